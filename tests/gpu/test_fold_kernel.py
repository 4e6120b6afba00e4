"""Merging of two partial attentions on the GPU: strides, dtypes, -inf, in place, graph replay."""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernels import fold_cases
from tierkv.attention.merge import Partial, merge
from tierkv.kernels import fold
from tierkv.kernels.build import available

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    usable = available()
    assert usable, usable.reason
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("dtypes", [(F32, BF16, F32), (BF16, BF16, BF16), (F16, F32, F16)], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 512])
def test_random_problems(
    dim: int, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], device: torch.device
) -> None:
    rng = random.Random(dim)
    for seed in range(12):
        shape = (rng.randint(1, 3), rng.randint(1, 9), rng.choice([1, 7, 300, 1025]), dim)
        fold_cases.check(seed, device, dtypes, shape)


def test_a_chunk_of_prefill(device: torch.device) -> None:
    """What cuDNN returns (``[B, H, Q, D]`` over ``[B, Q, H, D]``) onto float32, in place."""
    shape = (1, 32, 4096, 128)
    total = torch.randn(shape, device=device)
    lse = torch.randn(shape[:3], device=device)
    part = torch.randn(1, 4096, 32, 128, device=device).bfloat16().transpose(1, 2)
    part_lse = torch.randn(*shape[:3], 1, device=device).squeeze(-1)
    want = merge(Partial(total, lse), Partial(part, part_lse))
    fold.fold(total, lse, part, part_lse, total, lse)
    torch.testing.assert_close(total, want.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want.lse, rtol=1e-5, atol=1e-5)


def test_rows_past_2_to_the_32_bytes(device: torch.device) -> None:
    """Offsets are 64-bit: the last rows lie behind the first 4 GiB and 2^31 elements."""
    queries = (1 << 31) // 512 + 100
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("less than 14 GiB of GPU memory are free")
    whole = torch.zeros(1, 2, queries // 2, 512, dtype=BF16, device=device)
    one = torch.ones_like(whole)
    lse = torch.zeros(1, 2, queries // 2, device=device)
    fold.fold(whole, lse, one, torch.zeros_like(lse), whole, lse)
    assert bool((whole[0, :, :: queries // 8] == 0.5).all()) and bool(
        (whole[0, 1, -1] == 0.5).all()
    )


def test_graph_replay(device: torch.device) -> None:
    """Replayed on changed input, in place, without an allocation."""
    shape = (1, 8, 33, 128)
    total, lse = torch.zeros(shape, device=device), torch.zeros(shape[:3], device=device)
    part = torch.randn(shape, device=device).bfloat16()
    part_lse = torch.randn(shape[:3], device=device)
    launch = fold.prepare(total, lse, part, part_lse, total, lse)
    launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    total.zero_()
    lse.fill_(-torch.inf)
    expected = Partial(total.clone(), lse.clone())
    for _ in range(4):
        part.copy_(torch.randn(shape, device=device))
        part_lse.copy_(torch.randn(shape[:3], device=device))
        expected = merge(expected, Partial(part, part_lse))
        graph.replay()
    torch.testing.assert_close(total, expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-5, atol=1e-5)
