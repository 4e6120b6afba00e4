"""Pages, queries and plain-loop answers shared by the tests of selection."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

SHAPES = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1)}
"""Name -> query heads, KV heads."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

shapes = st.sampled_from(sorted(SHAPES.values()))
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 10_000)


def random_pages(
    seed: int,
    heads: tuple[int, int],
    *,
    batch: int = 2,
    pages: int = 5,
    tokens: int = 16,
    dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a query ``[batch, heads, dim]`` and keys ``[batch, kv_heads, pages, tokens, dim]``.

    Some channels are far from zero and some keys are outliers, as in real models.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, heads[1], pages, tokens, dim, generator=generator)
    keys = keys + 4 * torch.randn(dim, generator=generator)
    keys[..., 0, :] *= 3
    query = torch.randn(batch, heads[0], dim, generator=generator)
    return query.to(dtype), keys.to(dtype)


def true_scores(query: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Return every key's score ``[batch, kv_heads, group, pages, tokens]`` in float64, by loops."""
    batch, kv_heads, pages, tokens, _ = keys.shape
    group = query.shape[1] // kv_heads
    out = torch.empty(batch, kv_heads, group, pages, tokens, dtype=torch.float64)
    for b in range(batch):
        for head in range(query.shape[1]):
            for page in range(pages):
                k = keys[b, head // group, page].double()
                out[b, head // group, head % group, page] = k @ query[b, head].double() * scale
    return out


def choose_by_loop(
    mass: list[float], candidates: list[bool], budget: int, target: float | None
) -> list[int]:
    """Return the pages of one row that `choose` must return: a loop over a sorted list."""
    order = sorted(
        (page for page in range(len(mass)) if candidates[page] and mass[page] > 0),
        key=lambda page: (-mass[page], page),
    )
    total = math.fsum(mass[page] for page in order)
    chosen: list[int] = []
    for page in order:
        done = math.fsum(mass[p] for p in chosen)
        if len(chosen) == budget or (target is not None and done >= target * total):
            break
        chosen.append(page)
    return sorted(chosen)
