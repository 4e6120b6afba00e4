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
    """Only the tokens at the slots change, whatever the strides of what is given."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    arena = Arena.allocate(geometry, 3, device)[0]
    for tensor in (arena.k, arena.v):
        tensor.normal_()
    kv_heads, batch = geometry.kv_heads, rng.choice([1, 1, 3])
    queries = torch.empty(batch, heads, geometry.k_dim, dtype=geometry.dtype, device=device)
    at = rng.sample(range(arena.k.shape[1]), batch)

    def rows(count: int, dim: int) -> torch.Tensor:
        made = torch.randn(batch, count, dim, device=device).to(geometry.dtype)
        kind = rng.randrange(5)
        if kind == 1:  # a slice of wider rows
            return torch.nn.functional.pad(made, (0, 16))[..., :dim]
        if kind == 2:  # not dense
            return made.transpose(1, 2).contiguous().transpose(1, 2)
        if kind == 3:  # begins within 16 bytes
            return torch.nn.functional.pad(made, (1, 15))[..., 1 : dim + 1]
        if kind == 4:  # heads first
            return made.transpose(0, 1).contiguous().transpose(0, 1)
        return made

    query, key = rows(heads, geometry.k_dim), rows(kv_heads, geometry.k_dim)
    value = rows(kv_heads, geometry.v_dim)
    want_k, want_v = arena.k.clone(), arena.v.clone()
    want_k[:, at], want_v[:, at] = key.transpose(0, 1), value.transpose(0, 1)
    slots = torch.tensor(at, device=device)
    append(query, key, value, queries=queries, k=arena.k, v=arena.v, slots=slots)
    for got, want in ((queries, query), (arena.k, want_k), (arena.v, want_v)):
        assert torch.equal(got, want), seed
