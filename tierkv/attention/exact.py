"""Exact attention over a lookup: every token counts, wherever its page lives.

Tokens before an append are seen by all its queries, so their order does not matter: resident
pages and the tail attend in place, streamed pages as they arrive, the append to itself causally,
and the parts merge by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tierkv.attention import fused, paged
from tierkv.attention.merge import Partial, accumulate, apply_sinks, merge_all
from tierkv.paging.lookup import Lookup, Segment

MAX_EXPANDED_TOKENS = 4096
"""Tokens whose latents are expanded to keys and values at once."""

DECODE_QUERIES = 16
"""Up to this many queries the parts of a lookup are merged once at the end."""

Expand = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lookup: Lookup,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    first_visible: int = 0,
    padding: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    expand: Expand | None = None,
) -> torch.Tensor:
    """Attend to everything a lookup holds and to the tokens just appended.

    Args:
        query: ``[batch, heads, queries, dim]``, the last queries of the append.
        key, value: ``[batch, kv_heads, new_tokens, dim]`` as attention sees them (expanded).
        mask: ``[batch, 1, 1, length]`` boolean, True where a token is no padding; or None.
        first_visible: token position from which on the mask hides nothing.
        padding: ``[batch]`` int32, tokens hidden before each sequence, if the mask hides no other.
        sinks: ``[heads]`` sink logits (gpt-oss).
        expand: turns stored latents into keys and values (multi-head latent attention).

    Returns:
        ``[batch, queries, heads, v_dim]`` in the query's dtype.
    """
    batch, heads, queries, _ = query.shape
    if (mask is None or padding is not None) and paged.fits(
        query, lookup, padded=mask is not None, softcap=softcap, latents=expand is not None
    ):
        return paged.attend(
            query, lookup, scale=scale, first_visible=padding, softcap=softcap, sinks=sinks
        )
    parts: list[Partial] = []
    if lookup.new_tokens > 1:
        recent = mask if mask is None else mask[..., -lookup.new_tokens :]
        if lookup.length - lookup.new_tokens >= first_visible:
            recent = None
        parts.append(
            fused.attend_causal(query, key, value, scale=scale, mask=recent, softcap=softcap)
        )
    page_tokens = lookup.manager.geometry.page_tokens
    segments = lookup.segments()
    if expand is not None:
        segments = _cut(segments, page_tokens)
    folded: torch.Tensor | None = None
    for segment in segments:
        k, v = segment.k, segment.v
        if expand is not None:
            k, v = expand(k, v)
        if folded is None:
            folded = _fold(query, k.shape[1])
        seen = _visible(segment, mask, first_visible, page_tokens)
        part = fused.attend(folded[segment.rows], k, v, scale=scale, mask=seen, softcap=softcap)
        part = _spread(_unfold(part, heads, queries), segment.rows, batch)
        parts.append(part)
        if queries > DECODE_QUERIES:  # parts are large: keep one
            parts = [parts[0] if len(parts) == 1 else accumulate(*parts)]
    result = merge_all(parts)
    out = result.out if sinks is None else apply_sinks(result, sinks.view(1, heads, 1))
    return out.transpose(1, 2).to(query.dtype)


def _cut(segments: Iterator[Segment], page_tokens: int) -> Iterator[Segment]:
    """Bound the tokens per segment: expanded latents are many times the size of stored ones."""
    pages = max(1, MAX_EXPANDED_TOKENS // page_tokens)
    for segment in segments:
        for at in range(0, len(segment.positions), pages):
            tokens = slice(at * page_tokens, (at + pages) * page_tokens)
            yield Segment(
                segment.rows,
                segment.k[:, :, tokens],
                segment.v[:, :, tokens],
                segment.positions[at : at + pages],
            )


def _fold(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Lay the query heads of a KV head side by side, so that its K and V are read once.

    Query head h belongs to KV head ``h // group``.
    """
    batch, heads, queries, dim = query.shape
    return query.reshape(batch, kv_heads, heads // kv_heads * queries, dim)


def _unfold(part: Partial, heads: int, queries: int) -> Partial:
    batch = part.out.shape[0]
    return Partial(
        part.out.reshape(batch, heads, queries, -1), part.lse.reshape(batch, heads, queries)
    )


def _visible(
    segment: Segment, mask: torch.Tensor | None, first_visible: int, page_tokens: int
) -> torch.Tensor | None:
    if mask is None or int(segment.positions.min()) * page_tokens >= first_visible:
        return None
    return mask[segment.rows][..., segment.columns(page_tokens, mask.device)]


def _spread(part: Partial, rows: slice, batch: int) -> Partial:
    """Extend a part that only some sequences read to the whole batch: the rest saw nothing."""
    if part.out.shape[0] == batch:
        return part
    out = part.out.new_zeros((batch, *part.out.shape[1:]))
    lse = part.lse.new_full((batch, *part.lse.shape[1:]), -torch.inf)
    out[rows], lse[rows] = part
    return Partial(out, lse)
