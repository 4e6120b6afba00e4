"""Score the pages of one layer and sequence by their summaries: each page's share of attention.

`Selector.scores` and `page_mass` in `tierkv.selection` are the oracles. Which pages compete is read
on the device, so a launch can be replayed in a CUDA graph while the sequence grows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tierkv.kernels.build import DTYPES, Launch, kernel
from tierkv.units import round_up

THREADS = 256
WARPS, SLOTS = THREADS // 32, 3
"""Warps of a block, and how many summaries of 32 tokens or fewer ``score_keys`` has room for."""
TILE_PAGES = 64
"""Pages that a block scores at once."""
WEIGH_PAGES = 4 * THREADS
"""Pages that a block weighs."""
PARTS = {"score": (1, 2), "score_bytes": (1,), "score_keys": (4, 6, 10, 18, 34)}
"""Kernel -> parts of a summary that it takes; those of keys are two and one per 8 tokens."""
MAX_GROUP = 16
MAX_BLOCKS = 1024
"""Blocks of one KV head at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Room for the scores of one layer; one allocation serves all layers.

    Attributes:
        logits: ``[heads, row_pages]`` float32; only candidates are written.
        mass: ``[kv_heads, row_pages]`` float32; only candidates have meaning.
        states: ``[heads * MAX_BLOCKS, 2]`` float32, parts of the softmax over pages.
    """

    logits: torch.Tensor
    mass: torch.Tensor
    states: torch.Tensor

    @classmethod
    def allocate(cls, kv_heads: int, group: int, pages: int, device: torch.device) -> Scores:
        """Return room for `pages` pages."""
        row, heads = round_up(pages, 4), kv_heads * group
        logits = torch.empty((heads, row), dtype=torch.float32, device=device)
        mass = torch.empty((kv_heads, row), dtype=torch.float32, device=device)
        states = torch.empty((heads * MAX_BLOCKS, 2), dtype=torch.float32, device=device)
        return cls(logits, mass, states)


@dataclass(frozen=True, slots=True)
class ScoreLaunch:
    """The two launches of one scoring, in order."""

    score: Launch
    weigh: Launch

    def run(self) -> None:
        """Enqueue both on torch's current stream."""
        self.score.run()
        self.weigh.run()


def prepare(
    query: torch.Tensor,
    summaries: torch.Tensor,
    scores: Scores,
    *,
    sealed: torch.Tensor,
    first: int,
    recent: int,
    scale: float,
    stem: str = "score",
) -> ScoreLaunch:
    """Check the arguments of a scoring and compile its kernels.

    Candidates are pages `first` up to ``min(sealed - recent, capacity)``. A candidate's mass is
    the mean over its group of the softmax over all candidates, above 0 unless every logit is -inf.

    Args:
        query: ``[heads, k_dim]`` after the rotary embedding; head h reads KV head ``h // group``.
        summaries: ``[kv_heads, capacity, parts, k_dim]`` of the query's dtype, a KV head's dense.
        scores: receives logits and mass.
        sealed: ``[1]`` int32 on the device: number of sealed pages.
        first: candidates begin here, after the sinks.
        recent: last sealed pages that are no candidates.
        scale: the attention's factor on scores, above 0.
        stem: which kernel, `Selector.kernel`. ``score`` takes two parts for corners u and l, logit
            ``scale * (max(q, 0) . u + min(q, 0) . l)``, and one for a mean m, logit
            ``scale * q . m``; ``score_bytes`` takes what `tierkv.selection.cuboid8` makes, and
            ``score_keys`` what `tierkv.selection.keys2` does.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernels cannot be compiled here.
    """
    if summaries.ndim != 4 or summaries.dtype not in DTYPES:
        raise ValueError(
            f"summaries must be [kv_heads, pages, parts, k_dim] of {', '.join(map(str, DTYPES))}, "
            f"got {tuple(summaries.shape)} {summaries.dtype}"
        )
    kv_heads, pages, parts, k_dim = summaries.shape
    if parts not in PARTS[stem]:
        raise ValueError(f"{stem} takes {' or '.join(map(str, PARTS[stem]))} parts, got {parts}")
    if query.ndim != 2 or query.shape[1] != k_dim or query.dtype != summaries.dtype:
        raise ValueError(
            f"query must be [heads, {k_dim}] {summaries.dtype}, "
            f"got {tuple(query.shape)} {query.dtype}"
        )
    heads, row = len(query), scores.logits.shape[1]
    group = heads // kv_heads
    if heads % kv_heads or not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{heads} query heads on {kv_heads} KV heads; groups are 1 to {MAX_GROUP}")
    if summaries.stride()[1:] != (parts * k_dim, k_dim, 1) or query.stride(1) != 1:
        raise ValueError(f"strides of summaries {summaries.stride()}, of query {query.stride()}")
    for name, tensor in (("query", query), ("summaries", summaries)):
        offsets = (tensor.data_ptr(), k_dim * tensor.itemsize, tensor.stride(0) * tensor.itemsize)
        if any(offset % 16 for offset in offsets):
            raise ValueError(f"vectors of {name} must be aligned to 16 bytes, dim {k_dim}")
    if scores.logits.shape[0] != heads or scores.mass.shape != (kv_heads, row) or row < pages:
        raise ValueError(
            f"scores {tuple(scores.logits.shape)} and {tuple(scores.mass.shape)} for {heads} heads "
            f"and {pages} pages"
        )
    if not scale > 0:
        raise ValueError(f"the scale must be above 0, got {scale}")
    check_sealed(sealed, first, recent)
    device = query.device
    for tensor in (summaries, scores.logits, scores.mass, scores.states, sealed):
        if tensor.device != device:
            raise ValueError(f"the query is on {device}, other tensors on {tensor.device}")

    defines = (
        ("DTYPE", DTYPES[query.dtype]), ("K_DIM", k_dim), ("GROUP", group), ("PARTS", parts),
    )  # fmt: skip
    shared = SLOTS * WARPS * (2 + min(parts - 2, 4)) * k_dim * 2
    if stem != "score_keys" or query.dtype == torch.float32:
        shared = 0
    compiled = kernel(stem, "score_pages", defines, device, THREADS, shared)
    blocks = min(compiled.blocks_at_once // kv_heads, -(-pages // TILE_PAGES) + 1, MAX_BLOCKS)
    blocks = max(1, blocks)
    candidates = (
        np.int32(pages), np.int64(sealed.data_ptr()), np.int32(first), np.int32(recent),
    )  # fmt: skip
    score = (
        np.int64(query.data_ptr()),
        np.int64(query.stride(0)),
        np.int64(summaries.data_ptr()),
        np.int64(summaries.stride(0)),
        *candidates,
        np.float32(scale),
        np.int64(scores.logits.data_ptr()),
        np.int32(row),
        np.int64(scores.states.data_ptr()),
    )
    weigh = (
        np.int64(scores.logits.data_ptr()),
        np.int32(row),
        np.int64(scores.states.data_ptr()),
        np.int32(blocks),
        *candidates,
        np.int64(scores.mass.data_ptr()),
    )
    held = (query, summaries, scores.logits, scores.mass, scores.states, sealed)
    return ScoreLaunch(
        Launch(compiled, (blocks, kv_heads, 1), score, held),
        Launch(
            kernel("weigh", "weigh_pages", (("GROUP", group),), device, THREADS),
            (-(-row // WEIGH_PAGES), kv_heads, 1), weigh, held,
        ),
    )  # fmt: skip


def check_sealed(sealed: torch.Tensor, first: int, recent: int) -> None:
    """Check what says which pages are candidates."""
    if sealed.shape != (1,) or sealed.dtype != torch.int32:
        raise ValueError(f"sealed must be [1] int32, got {tuple(sealed.shape)} {sealed.dtype}")
    if first < 0 or recent < 0:
        raise ValueError(f"candidates from page {first} on, {recent} recent pages left out")
