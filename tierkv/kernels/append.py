"""Put new tokens where the attention of a captured step reads them: one launch for Q, K and V."""

from __future__ import annotations

import numpy as np
import torch

from tierkv.kernels.build import kernel

THREADS = 128
ROWS = THREADS // 32
"""Rows that a block copies."""
CHUNK = 16
"""Bytes that are copied at once."""
DENSE = torch.contiguous_format


def append(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    queries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Enqueue the copy of one token of each sequence on torch's current stream.

    Args:
        query: ``[batch, heads, k_dim]``; key: ``[batch, kv_heads, k_dim]``; value: ``[batch,
            kv_heads, v_dim]``. What does not lie densely on whole 16 bytes is copied once more.
        queries: ``[batch, heads, k_dim]``, contiguous, receives the query.
        k, v: ``[kv_heads, tokens, dim]``, dense but for their first stride; receive key and value.
        slots: ``[batch]`` int64 on the device: the token that is written, below `tokens`.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    kv_heads, _, k_dim = k.shape
    (batch, heads, _), v_dim = queries.shape, v.shape[2]
    wanted = {
        "query": (query, (batch, heads, k_dim)), "key": (key, (batch, kv_heads, k_dim)),
        "value": (value, (batch, kv_heads, v_dim)), "queries": (queries, (batch, heads, k_dim)),
        "v": (v, (*k.shape[:2], v_dim)),
    }  # fmt: skip
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype != k.dtype or tensor.device != k.device:
            raise ValueError(
                f"{name} must be {shape} {k.dtype} on {k.device}, "
                f"got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
    if slots.shape != (batch,) or slots.dtype != torch.int64 or slots.device != k.device:
        raise ValueError(f"slots must be [{batch}] int64, got {tuple(slots.shape)} {slots.dtype}")
    dense = all(tensor.stride()[1:] == (tensor.shape[2], 1) for tensor in (k, v))
    if not dense or not all(map(_whole, (k, v, queries))) or not queries.is_contiguous():
        raise ValueError(
            f"rows of queries, k and v must be dense and whole {CHUNK} bytes, got dims {k_dim} "
            f"and {v_dim}, strides {queries.stride()}, {k.stride()}, {v.stride()}"
        )
    arguments: list[np.int32 | np.int64] = []
    sources = [
        rows if _whole(rows) else rows.clone(memory_format=DENSE) for rows in (query, key, value)
    ]
    for rows in sources:
        arguments += [np.int64(rows.data_ptr()), *_chunks(rows, rows.stride()[:2])]
    arguments.append(np.int64(queries.data_ptr()))
    for tokens in (k, v):
        arguments += [np.int64(tokens.data_ptr()), *_chunks(tokens, tokens.stride()[:1])]
    arguments.append(np.int64(slots.data_ptr()))
    sizes = (heads, kv_heads, k_dim * k.itemsize // CHUNK, v_dim * k.itemsize // CHUNK)
    arguments += [np.int32(size) for size in sizes]
    compiled = kernel("append", "append_token", (), k.device, THREADS)
    compiled.launch((-(-(heads + 2 * kv_heads) // ROWS), batch, 1), tuple(arguments))


def _chunks(like: torch.Tensor, sizes: tuple[int, ...]) -> list[np.int64]:
    return [np.int64(size * like.itemsize // CHUNK) for size in sizes]


def _whole(rows: torch.Tensor) -> bool:
    """Say whether rows are dense, begin at multiples of 16 bytes and are as long as such."""
    strides = [stride for size, stride in zip(rows.shape, rows.stride(), strict=True) if size > 1]
    sizes = [rows.shape[-1], *(stride for stride in strides if stride != 1)]
    whole = all(size * rows.itemsize % CHUNK == 0 for size in sizes)
    return whole and rows.stride(-1) == 1 and rows.data_ptr() % CHUNK == 0
