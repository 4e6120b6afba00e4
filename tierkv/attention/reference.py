"""Attention in plain torch: the oracle every other path is compared with.

All arithmetic is in float32 (float64 stays float64). Keys are taken in blocks, so that no
``queries x keys`` matrix larger than one block exists.
"""

from __future__ import annotations

import torch

from tierkv.attention.merge import Partial, merge

BLOCK_KEYS = 4096
"""Keys per block of scores."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attend and return the output with its log-sum-exp.

    Args:
        q: ``[batch, kv_heads, queries, k_dim]``; the query heads of a group lie along `queries`.
        k, v: ``[batch, kv_heads, keys, dim]``.
        scale: factor on the scores before the soft cap.
        mask: boolean, broadcastable to ``[batch, kv_heads, queries, keys]``; True may be seen.
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2).

    Returns:
        Output ``[batch, kv_heads, queries, v_dim]`` and natural log-sum-exp ``[batch, kv_heads,
        queries]``, float32. A query that sees nothing has output 0 and log-sum-exp -inf.
    """
    result: Partial | None = None
    for start in range(0, k.shape[2], BLOCK_KEYS):
        block = slice(start, start + BLOCK_KEYS)
        seen = mask if mask is None or mask.shape[-1] == 1 else mask[..., block]
        part = _attend_block(q, k[:, :, block], v[:, :, block], scale, seen, softcap)
        result = part if result is None else merge(result, part)
    assert result is not None, "attention over no keys"
    return result


def _attend_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    softcap: float | None,
) -> Partial:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return Partial(torch.matmul(weights, v.to(wide)), lse)


def lower_right_causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """Return ``[queries, keys]``, True where a key may be seen; the last query sees all keys."""
    last = torch.arange(queries, device=device).unsqueeze(1) + (keys - queries)
    return torch.arange(keys, device=device) <= last
