"""Random merges of two partial attentions and their result in float64, for CPU and GPU tests."""

from __future__ import annotations

import random

import torch

from tierkv.attention.merge import Partial, merge
from tierkv.kernels.build import DTYPES
from tierkv.kernels.fold import fold

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest error of an output, ``|out - exact| / |exact|`` over the whole tensor."""


def strided(
    rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return NaN in `shape`, its first three dims in memory in any order and with room between."""
    order = [*rng.sample(range(3), 3), *range(3, len(shape))]
    sizes = [shape[axis] + (rng.choice([0, 4]) if axis == 3 else 0) for axis in order]
    whole = torch.full(sizes, float("nan"), dtype=dtype, device=device)
    whole = whole.permute([order.index(axis) for axis in range(len(shape))])
    return whole[..., : shape[3]] if len(shape) == 4 else whole


def check(
    seed: int,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    shape: tuple[int, int, int, int],
) -> None:
    """Merge with -inf on either side, in place or not, and compare with `attention.merge`."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    a_out, b_out, out = (strided(rng, shape, dtype, device) for dtype in dtypes)
    a_lse, b_lse, lse = (strided(rng, shape[:3], torch.float32, device) for _ in range(3))
    for tensor in (a_out, b_out):
        tensor.copy_(torch.randn(shape, device=device))
    for tensor in (a_lse, b_lse):
        tensor.copy_(10 * torch.randn(shape[:3], device=device))
    a_lse[torch.rand(shape[:3], device=device) < 0.2] = -torch.inf
    b_lse[torch.rand(shape[:3], device=device) < 0.2] = -torch.inf
    b_lse[..., -1] = -1000.0  # e^-1000 is 0 beside anything

    exact = merge(
        Partial(a_out.double().masked_fill(nothing(a_lse), 0.0), a_lse.double()),
        Partial(b_out.double().masked_fill(nothing(b_lse), 0.0), b_lse.double()),
    )
    for tensor, sums in ((a_out, a_lse), (b_out, b_lse)):
        tensor.masked_fill_(nothing(sums), float("nan"))  # what saw nothing is never used
    if dtypes[0] == dtypes[2] and rng.random() < 0.5:
        out = a_out
    if rng.random() < 0.5:
        lse = rng.choice([a_lse, b_lse])
    fold(a_out, a_lse, b_out, b_lse, out, lse)

    error = float((out.double() - exact.out).norm() / exact.out.norm().clamp_min(1e-30))
    assert error <= TOLERANCES[dtypes[2]], (error, seed, dtypes, shape)
    assert torch.equal(lse == -torch.inf, exact.lse == -torch.inf)
    assert bool((out[exact.lse == -torch.inf] == 0).all())
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-6, atol=1e-5)


def nothing(lse: torch.Tensor) -> torch.Tensor:
    return (lse == -torch.inf).unsqueeze(-1)


def any_dtypes(rng: random.Random) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    a, b, out = rng.choices(list(DTYPES), k=3)
    return a, b, out
