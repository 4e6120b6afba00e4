"""Reading single head-pages from wherever they are, for a compute device that is the host."""

from __future__ import annotations

import numpy as np
import torch

from tierkv.errors import WarmBudgetError
from tierkv.paging.directory import NOWHERE, Blocks
from tierkv.paging.manager import PageManager
from tierkv.paging.plan import Fetch
from tierkv.paging.sequences import Sequences
from tierkv.paging.sources import Sources


def read_head_pages(
    manager: PageManager, sequences: Sequences, layer: int, pages: torch.Tensor, row: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy head-pages of one sequence's layer; pages on disk are read into warm memory first.

    Args:
        pages: ``[kv_heads, n]`` page positions; -1 for none.
        row: which of the sequences.

    Returns:
        K and V, ``[kv_heads, n, page_tokens, dim]``, zeros where there is no page.

    Raises:
        ColdReadError: a page could not be read from disk.
    """
    geometry, wanted = manager.geometry, pages.numpy()
    shape = (*wanted.shape, geometry.page_tokens)
    k = torch.zeros((*shape, geometry.k_dim), dtype=geometry.dtype)
    v = torch.zeros((*shape, geometry.v_dim), dtype=geometry.dtype)
    positions = np.unique(wanted[wanted >= 0])
    step = manager.warm.inbound.capacity or max(len(positions), 1)
    for at in range(0, len(positions), step):
        part = positions[at : at + step]
        sources = open_pages(manager, Fetch(layer, sequences.blocks[row, part]))
        try:
            for read in sources.reads:
                read.result()
            _copy(manager, part, sources, wanted, k, v)
        finally:
            sources.release()
    return k, v


def skip_cold(
    manager: PageManager, sequences: Sequences, layer: int, pages: torch.Tensor
) -> torch.Tensor:
    """Replace pages that are on disk only by -1, and count them; sinks and recent ones stay.

    pages: ``[batch, kv_heads, n]``: sinks and recent pages first.
    """
    state, directory = manager.selective, manager.directory
    assert state is not None
    blocks = sequences.blocks
    away = (directory.hot[blocks, layer] == NOWHERE) & (directory.warm[blocks, layer] == NOWHERE)
    rows = torch.arange(len(pages))[:, None, None]
    skipped = (pages >= 0) & torch.from_numpy(away)[rows, pages.clamp_min(0)]
    skipped[..., : state.spec.kept_pages] = False
    state.counters[: skipped.shape[0] * skipped.shape[1], 2] += skipped.sum(dim=2).flatten()
    return pages.masked_fill(skipped, -1)


def open_pages(manager: PageManager, fetch: Fetch, *, encoded: bool = False) -> Sources:
    """Pin pages and start their disk reads; the caller releases them.

    encoded: as warm or cold hold them, even where they are hot too.

    Raises:
        WarmBudgetError: there are more pages on disk among them than warm memory takes in.
    """
    sources = manager.open_sources(fetch, encoded=encoded)
    if sources is None:  # upcoming lookups hold the inbound frames
        manager.lookahead.cancel()
        sources = manager.open_sources(fetch, encoded=encoded)
    if sources is None:
        raise WarmBudgetError(f"{len(fetch.blocks)} pages from disk find no room; raise cpu_budget")
    return sources


def _copy(
    manager: PageManager,
    positions: Blocks,
    sources: Sources,
    wanted: Blocks,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Copy pages (all of them in warm frames) to every place that wants them, chunk by chunk."""
    frame_at = np.full(positions.max() + 1, -1, dtype=np.int64)
    frame_at[positions] = sources.frames
    inside = (wanted >= 0) & (wanted <= positions.max())
    frames = np.where(inside, frame_at[np.where(inside, wanted, 0)], -1)
    chunks = np.where(frames >= 0, manager.warm.chunk_of(frames), -1)
    for chunk in np.unique(chunks[chunks >= 0]).tolist():
        heads, entries = (torch.from_numpy(index) for index in np.nonzero(chunks == chunk))
        start = manager.warm.chunk_start(chunk)
        local = torch.from_numpy(frames[chunks == chunk] - start)
        count = int(local.max()) + 1
        raw = manager.warm.span(np.arange(start, start + count))
        warm_k, warm_v, local = manager.tiers.format.select(raw, local)
        k[heads, entries] = warm_k[heads, local]
        v[heads, entries] = warm_v[heads, local]
