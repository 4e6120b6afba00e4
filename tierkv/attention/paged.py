"""Exact attention of one new token per sequence through our kernels, where the pages lie.

For what torch's fused kernels do not take, or would have to copy for: several sequences, padding
on the left, soft caps, float32, large or different head dims, scattered frames. One launch per
part of the lookup, one merge at the end. `exact` is the same in plain torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from tierkv.attention.merge import Partial
from tierkv.kernels import build, decode
from tierkv.kernels.merge import Partials, merge
from tierkv.paging.lookup import Lookup, Part

SLOTS = 128
"""Partial results kept before they are merged into one."""
MAX_SPLITS = 96
"""Splits of one launch at most."""
RESIDENT_DIM = 128
"""Up to this head dim torch's flash reads a plain run of 16-bit pages 6 to 8% faster (H200)."""


def fits(
    query: torch.Tensor, lookup: Lookup, *, padded: bool, softcap: float | None, latents: bool
) -> bool:
    """Say whether our kernels take a lookup and are the better choice for it."""
    geometry = lookup.manager.geometry
    if query.device.type != "cuda" or query.shape[2] != 1 or lookup.new_tokens != 1 or latents:
        return False
    if not build.available() or not decode.supports(geometry, query.shape[1], query.device):
        return False
    plain = query.shape[0] == 1 and not padded and softcap is None
    narrow = geometry.k_dim == geometry.v_dim <= RESIDENT_DIM
    return not (plain and narrow and query.dtype != torch.float32)


def attend(
    query: torch.Tensor,
    lookup: Lookup,
    *,
    scale: float,
    first_visible: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to everything a lookup of one new token holds.

    Args:
        query: ``[batch, heads, 1, dim]``.
        first_visible: ``[batch]`` int32 on the device, tokens of padding before each sequence.
        sinks: ``[heads]`` sink logits (gpt-oss).

    Returns:
        ``[batch, 1, heads, v_dim]`` in the query's dtype.
    """
    batch, heads = query.shape[:2]
    geometry, one = lookup.manager.geometry, query.squeeze(2)
    partials = Partials.allocate(SLOTS, batch, heads, geometry.v_dim, query.device)
    slot = 0
    for part in lookup.parts():
        for start, stop in _pieces(part, first_visible is not None):
            if slot + MAX_SPLITS > SLOTS:
                slot = _compact(partials, slot)
            slot = _launch(one, part, start, stop, partials, slot, scale, first_visible, softcap)
    out = query.new_empty((batch, heads, geometry.v_dim))
    merge(partials, slot, out, sinks=None if sinks is None else sinks.float())
    return out.unsqueeze(1)


def _launch(
    query: torch.Tensor,
    part: Part,
    start: int,
    stop: int,
    partials: Partials,
    slot: int,
    scale: float,
    first_visible: torch.Tensor | None,
    softcap: float | None,
) -> int:
    page_tokens = part.arena.page_tokens
    tokens = min(part.tokens - start * page_tokens, (stop - start) * page_tokens)
    hidden = first_visible
    if hidden is not None:
        hidden = hidden[part.rows].contiguous()
    return decode.attend(
        query,
        decode.PagedKV(part.arena.k_frames, part.arena.v_frames),
        partials,
        slot=slot,
        tokens=tokens,
        scale=scale,
        softcap=softcap,
        table=None if part.table is None else part.table[:, start:stop],
        first_frame=part.first + start if part.table is None else 0,
        rows=part.rows,
        first_visible=hidden,
        position=int(part.positions[start]) * page_tokens,
        max_splits=MAX_SPLITS,
    )


def _pieces(part: Part, padded: bool) -> Iterator[tuple[int, int]]:
    """Divide a part where positions have gaps, if the kernel has to know each token's position."""
    count = len(part.positions)
    gaps = (np.flatnonzero(np.diff(part.positions) != 1) + 1).tolist() if padded else []
    yield from itertools.pairwise([0, *gaps, count])


def _compact(partials: Partials, slots: int) -> int:
    """Merge the first slots into one; return the next free slot."""
    out, lse = torch.empty_like(partials.out[0]), torch.empty_like(partials.lse[0])
    merge(partials, slots, out, lse=lse)
    partials.out[0], partials.lse[0] = Partial(out, lse)
    return 1
