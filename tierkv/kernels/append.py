"""Put a new token where the attention of a captured step reads it: one launch for Q, K and V."""

from __future__ import annotations

import numpy as np
import torch

from tierkv.kernels.build import kernel

THREADS = 128
ROWS = THREADS // 32
"""Rows that a block copies."""
CHUNK = 16
"""Bytes that are copied at once."""


def append(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    queries: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot: torch.Tensor,
) -> None:
    """Enqueue the copy of one token on torch's current stream.

    Args:
        query: ``[heads, k_dim]``; key: ``[kv_heads, k_dim]``; value: ``[kv_heads, v_dim]``. Rows
            that do not lie densely on whole 16 bytes are copied once more.
        queries: ``[heads, k_dim]``, contiguous, receives the query.
        k, v: ``[kv_heads, tokens, dim]``, dense but for their first stride; receive key and value.
        slot: ``[1]`` int64 on the device: the token that is written, below `tokens`.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    kv_heads, _, k_dim = k.shape
    heads, v_dim, size = len(queries), v.shape[2], k.itemsize
    wanted = {
        "query": (query, (heads, k_dim)), "key": (key, (kv_heads, k_dim)),
        "value": (value, (kv_heads, v_dim)), "queries": (queries, (heads, k_dim)),
        "v": (v, (*k.shape[:2], v_dim)),
    }  # fmt: skip
    for name, (tensor, shape) in wanted.items():
        if tensor.shape != shape or tensor.dtype != k.dtype or tensor.device != k.device:
            raise ValueError(
                f"{name} must be {shape} {k.dtype} on {k.device}, "
                f"got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
    if slot.shape != (1,) or slot.dtype != torch.int64 or slot.device != k.device:
        raise ValueError(f"slot must be [1] int64, got {tuple(slot.shape)} {slot.dtype}")
    dense = all(tensor.stride()[1:] == (tensor.shape[2], 1) for tensor in (k, v))
    if not dense or not queries.is_contiguous() or not all(map(_whole, (queries, k, v))):
        raise ValueError(
            f"rows of queries, k and v must be dense and whole {CHUNK} bytes, got dims {k_dim} "
            f"and {v_dim}, strides {queries.stride()}, {k.stride()}, {v.stride()}"
        )
    sources = [
        rows if rows.stride(1) == 1 and _whole(rows) else rows.clone(memory_format=_CONTIGUOUS)
        for rows in (query, key, value)
    ]
    arguments: list[np.int32 | np.int64] = []
    for rows in sources:
        arguments += [np.int64(rows.data_ptr()), np.int64(rows.stride(0) * size // CHUNK)]
    arguments.append(np.int64(queries.data_ptr()))
    for tokens in (k, v):
        arguments += [np.int64(tokens.data_ptr()), np.int64(tokens.stride(0) * size // CHUNK)]
    arguments += [
        np.int64(slot.data_ptr()),
        *map(np.int32, (heads, kv_heads, k_dim * size // CHUNK, v_dim * size // CHUNK)),
    ]
    blocks = -(-(heads + 2 * kv_heads) // ROWS)
    compiled = kernel("append", "append_token", (), k.device, THREADS)
    compiled.launch((blocks, 1, 1), tuple(arguments))


_CONTIGUOUS = torch.contiguous_format


def _whole(rows: torch.Tensor) -> bool:
    """Say whether rows begin at multiples of 16 bytes and are as long as such."""
    sizes = (rows.data_ptr(), rows.stride(0) * rows.itemsize, rows.shape[-1] * rows.itemsize)
    return not any(size % CHUNK for size in sizes)
