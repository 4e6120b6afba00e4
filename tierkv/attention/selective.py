"""Selective attention of one new token: sinks, recent pages, the tail, and the pages that matter.

Which pages matter is decided per KV head from summaries (`tierkv.selection`); attention over
those is exact. Here in plain torch, for the CPU and as the oracle; `selective_gpu` is the same in
kernels.
"""

from __future__ import annotations

import torch

from tierkv.attention import fused, selective_gpu
from tierkv.attention.merge import Partial, apply_sinks, merge_all
from tierkv.paging.headpages import read_head_pages, skip_cold
from tierkv.paging.lookup import Lookup
from tierkv.paging.selective import NONE, SelectiveState
from tierkv.selection import choose, page_mass


def applies(lookup: Lookup) -> bool:
    """Whether a lookup is one of a layer that selects, and for one new token."""
    state = lookup.manager.selective
    if state is None or lookup.new_tokens != 1 or not state.spec.selects(lookup.layer):
        return False
    return lookup.past > state.spec.kept_pages  # else everything is read anyway


def attend(
    query: torch.Tensor,
    lookup: Lookup,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to what matters most of everything a lookup holds.

    Args:
        query: ``[batch, heads, 1, dim]``.
        sinks: ``[heads]`` sink logits (gpt-oss).

    Returns:
        ``[batch, 1, heads, v_dim]`` in the query's dtype.

    Raises:
        ColdReadError: a chosen page could not be read from disk.
    """
    if on_gpu(query):
        return selective_gpu.attend(query, lookup, scale=scale, softcap=softcap, sinks=sinks)
    manager, layer, (batch, heads) = lookup.manager, lookup.layer, query.shape[:2]
    state, geometry = manager.selective, manager.geometry
    assert state is not None
    sealed, tail = lookup.past, lookup.tail_tokens
    folded = query.reshape(batch, geometry.kv_heads, heads // geometry.kv_heads, -1)
    parts = []
    if sealed:
        pages = look_up(query[:, :, 0], state, layer, sealed, scale)
        if state.spec.skips:
            pages = skip_cold(manager, lookup.sequences, layer, pages)
        read = [
            read_head_pages(manager, lookup.sequences, layer, own, row)
            for row, own in enumerate(pages)
        ]
        k, v = (torch.stack(part).flatten(2, 3) for part in zip(*read, strict=True))
        mask = None
        if bool((pages == NONE).any()):
            mask = (pages != NONE).repeat_interleave(geometry.page_tokens, 2)[:, :, None]
        parts.append(fused.attend(folded, k, v, scale=scale, mask=mask, softcap=softcap))
    tails = torch.from_numpy(lookup.tails[:, None])
    k, v = (part[:, :, :tail] for part in manager.hot.arenas[layer].gather(tails))
    parts.append(fused.attend(folded, k, v, scale=scale, softcap=softcap))
    result = merge_all(parts)
    result = Partial(result.out.reshape(batch, heads, 1, -1), result.lse.reshape(batch, heads, 1))
    out = result.out if sinks is None else apply_sinks(result, sinks.view(1, heads, 1))
    return out.transpose(1, 2).to(query.dtype)


def on_gpu(query: torch.Tensor) -> bool:
    """Whether kernels decide and read."""
    return query.device.type == "cuda"


def look_up(
    query: torch.Tensor, state: SelectiveState, layer: int, sealed: int, scale: float
) -> torch.Tensor:
    """Return the page positions that each KV head reads, ``[batch, kv_heads, n]``, -1 for none.

    query: ``[batch, heads, k_dim]``; sealed: sealed pages of each sequence.
    """
    spec, device, batch = state.spec, query.device, len(query)
    summaries = state.summaries[state.index(layer), :batch, :, :sealed]
    position = torch.arange(sealed, device=device)
    first, stop = spec.sink_pages, sealed - spec.recent_pages
    kept = position[(position < first) | (position >= stop)].expand(*summaries.shape[:2], -1)
    candidates = ((position >= first) & (position < stop))[None, None]
    if stop <= first:
        return kept
    logits = spec.selector.scores(query, summaries, scale)
    chosen = choose(
        page_mass(logits, candidates),
        min(spec.budget_pages, stop - first),
        candidates=candidates,
        mass_target=spec.mass_target,
    )
    return torch.cat([kept, chosen.pages], dim=2)
