"""torch's fused attention kernels, asked for output and log-sum-exp.

Same contract as `reference.attend`, for the cases the kernels take; `attend` falls back to the
reference for the rest (soft cap, masks, differing K and V dims, float32 on CUDA). That choice
changes speed, not meaning.
"""

from __future__ import annotations

import torch

from tierkv.attention import reference
from tierkv.attention.merge import Partial

_cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cuda_flash = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention

CUDNN_MIN_QUERIES = 512
"""cuDNN attention is about twice as fast as flash for many queries, slower for few."""
CUDNN_MAX_DIM = 128


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attend to all keys that `mask` allows; see `reference.attend` for shapes."""
    if mask is not None or softcap is not None or not _fits(q, k, v):
        return reference.attend(q, k, v, scale=scale, mask=mask, softcap=softcap)
    return _flash(q, k, v, scale, causal=False)


def attend_causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Causal attention of the last queries to new tokens, without folding heads.

    q: ``[batch, heads, queries, dim]``; k, v: ``[batch, kv_heads, tokens, dim]`` with
    ``queries <= tokens``; the last query is the last token. Returns ``[batch, heads, ...]``.
    """
    heads, kv_heads, queries = q.shape[1], k.shape[1], q.shape[2]
    if mask is None and softcap is None and queries == k.shape[2] and _fits(q, k, v):
        return _flash(q, k, v, scale, causal=True)
    seen = reference.lower_right_causal(queries, k.shape[2], q.device)
    seen = seen if mask is None else seen & mask
    group = heads // kv_heads
    return reference.attend(
        q,
        k.repeat_interleave(group, dim=1) if group > 1 else k,
        v.repeat_interleave(group, dim=1) if group > 1 else v,
        scale=scale,
        mask=seen,
        softcap=softcap,
    )


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    if k.shape[-1] != v.shape[-1]:
        return False
    if q.device.type == "cpu":
        return True
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> Partial:
    if q.device.type == "cpu":
        out, lse = _cpu_flash(q, k, v, 0.0, causal, scale=scale)
        return Partial(out, lse)
    if q.shape[2] >= CUDNN_MIN_QUERIES and q.shape[3] <= CUDNN_MAX_DIM and q.shape[3] % 8 == 0:
        result = _cuda_cudnn(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return Partial(result[0], result[1].squeeze(-1))
    result = _cuda_flash(q, k, v, 0.0, causal, False, scale=scale)
    return Partial(result[0], result[1])
