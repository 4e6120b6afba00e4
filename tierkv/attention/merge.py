"""Combine attention over disjoint sets of keys by log-sum-exp.

With outputs o_i and log-sum-exps L_i: ``o = sum e^(L_i - m) o_i / sum e^(L_i - m)``, m = max L_i
(the rescaling of online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tierkv.kernels import build
from tierkv.kernels.fold import MAX_DIM, fold


class Partial(NamedTuple):
    """Attention over some of the keys.

    Attributes:
        out: ``[batch, heads, queries, v_dim]``.
        lse: ``[batch, heads, queries]``, natural logarithm, float32; -inf where nothing was seen.
    """

    out: torch.Tensor
    lse: torch.Tensor


def merge(a: Partial, b: Partial) -> Partial:
    """Return attention over the union of two disjoint sets of keys, in float32."""
    top = torch.maximum(a.lse, b.lse)
    base = top.masked_fill(top == -torch.inf, 0.0)  # never (-inf) - (-inf)
    weight = torch.exp(b.lse - base)
    total = torch.exp(a.lse - base) + weight
    share = (weight / total.masked_fill(total == 0, 1.0)).unsqueeze(-1)
    wide = torch.promote_types(a.out.dtype, torch.float32)
    return Partial(torch.lerp(a.out.to(wide), b.out.to(wide), share), base + torch.log(total))


def accumulate(total: Partial, part: Partial) -> Partial:
    """Merge, overwriting `total` where it is float32 on a GPU; by our kernel if it can run."""
    if not _foldable(total.out, part.out):
        return merge(total, part)
    if total.out.dtype == torch.float32:
        out, lse = total
    else:
        out = torch.empty(total.out.shape, dtype=torch.float32, device=total.out.device)
        lse = torch.empty_like(total.lse, memory_format=torch.contiguous_format)
    fold(*total, *part, out, lse)
    return Partial(out, lse)


def _foldable(*outs: torch.Tensor) -> bool:
    dim = outs[0].shape[-1]
    known = all(out.is_cuda and out.dtype in build.DTYPES for out in outs)
    return known and dim % 4 == 0 and dim <= MAX_DIM and bool(build.available())


def merge_all(parts: list[Partial]) -> Partial:
    """Return attention over the union of any number of disjoint sets of keys, in float32.

    One pass over all parts: for decoding, where parts are small and launches are what costs.
    """
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part.lse for part in parts])
    top = lse.amax(dim=0)
    base = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(lse - base)
    total = weights.sum(dim=0)
    shares = weights / total.masked_fill(total == 0, 1.0)
    out = torch.stack([part.out for part in parts])
    return Partial((out * shares.unsqueeze(-1)).sum(dim=0), base + torch.log(total))


def apply_sinks(part: Partial, sinks: torch.Tensor) -> torch.Tensor:
    """Let learned sink logits take their share of the softmax (gpt-oss).

    sinks: broadcastable to ``part.lse``. A sink has a logit and no value, so it only scales.
    """
    return part.out * torch.sigmoid(part.lse - sinks.to(part.lse.dtype)).unsqueeze(-1)
