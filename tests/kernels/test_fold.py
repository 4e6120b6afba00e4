"""Merging of two partial attentions on the CPU: the CUDA source emulated, and its arguments."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch

from tests.kernels import emulator, fold_cases
from tierkv.kernels import fold

CPU = torch.device("cpu")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    monkeypatch.setattr(fold, "kernel", emulator.kernel)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dim", [4, 80, 128, 512])
def test_emulated_kernel_equals_float64(dim: int) -> None:
    rng = random.Random(dim)
    dtypes = fold_cases.any_dtypes(rng)
    for seed in range(4):
        shape = (rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 40), dim)
        fold_cases.check(seed, CPU, dtypes, shape)


@pytest.mark.usefixtures("emulated")
def test_nothing_to_do() -> None:
    out, lse = torch.empty(1, 2, 0, 64), torch.empty(1, 2, 0)
    fold.fold(out, lse, out, lse, out, lse)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a_out", torch.zeros(2, 3, 64), "a_out"),
        ("a_out", torch.zeros(1, 2, 3, 66), "66"),
        ("a_out", torch.zeros(1, 2, 3, 1024), "1024"),
        ("b_out", torch.zeros(1, 2, 4, 64), "b_out"),
        ("out", torch.zeros(1, 2, 3, 64, dtype=torch.float64), "float64"),
        ("out", torch.zeros(1, 2, 3, 128)[..., ::2], "dense"),
        ("a_lse", torch.zeros(1, 2, 3, 1), "a_lse"),
        ("lse", torch.zeros(1, 2, 3, dtype=torch.bfloat16), "bfloat16"),
        ("b_out", torch.zeros(1, 2, 3, 65)[..., 1:], "aligned"),
        ("b_lse", torch.zeros(1, 2, 3, device="meta"), "meta"),
    ],
)
def test_wrong_arguments_are_refused(name: str, value: torch.Tensor, message: str) -> None:
    out, lse = torch.zeros(1, 2, 3, 64), torch.zeros(1, 2, 3)
    arguments: dict[str, Any] = {
        "a_out": out, "a_lse": lse, "b_out": out.clone(), "b_lse": lse.clone(),
        "out": out, "lse": lse, name: value,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        fold.fold(**arguments)


def test_a_result_in_the_wrong_order_is_refused() -> None:
    """Memory that is read in one order and written in another would be overwritten too early."""
    out, lse = torch.zeros(1, 3, 3, 64), torch.zeros(1, 3, 3)
    with pytest.raises(ValueError, match="element by element"):
        fold.fold(out, lse, out.clone(), lse, out.transpose(1, 2), lse)
