"""New tokens put into random places, compared bit for bit, for CPU and GPU tests."""

from __future__ import annotations

import random

import torch

from tierkv.kernels.append import append
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena

SHAPES = [
    (Geometry(1, 2, 128, 128, torch.bfloat16, 16), 14),
    (Geometry(1, 3, 40, 24, torch.float16, 16), 3),
    (Geometry(1, 1, 192, 64, torch.float32, 16), 16),
]
"""Pages, and query heads."""


def check_append(seed: int, geometry: Geometry, heads: int, device: torch.device) -> None:
    """Only the token at the slot changes, whatever the strides of what is given."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    arena = Arena.allocate(geometry, 3, device)[0]
    for tensor in (arena.k, arena.v):
        tensor.normal_()
    queries = torch.empty(heads, geometry.k_dim, dtype=geometry.dtype, device=device)
    kv_heads, at = geometry.kv_heads, rng.randrange(arena.k.shape[1])

    def rows(count: int, dim: int) -> torch.Tensor:
        made = torch.randn(count, dim, device=device).to(geometry.dtype)
        kind = rng.randrange(4)
        if kind == 1:  # a slice of wider rows
            return torch.nn.functional.pad(made, (0, 16))[:, :dim]
        if kind == 2:  # not dense
            return made.t().contiguous().t()
        if kind == 3:  # begins within 16 bytes
            return torch.nn.functional.pad(made, (1, 15))[:, 1 : dim + 1]
        return made

    query, key = rows(heads, geometry.k_dim), rows(kv_heads, geometry.k_dim)
    value = rows(kv_heads, geometry.v_dim)
    want_k, want_v = arena.k.clone(), arena.v.clone()
    want_k[:, at], want_v[:, at] = key, value
    slot = torch.tensor([at], device=device)
    append(query, key, value, queries=queries, k=arena.k, v=arena.v, slot=slot)
    for got, want in ((queries, query), (arena.k, want_k), (arena.v, want_v)):
        assert torch.equal(got, want), seed
