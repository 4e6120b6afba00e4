"""A captured step's new token on the CPU: the CUDA source emulated, and its arguments."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.kernels import append_cases, emulator
from tierkv.kernels import append
from tierkv.page import Geometry

CPU = torch.device("cpu")


@pytest.mark.parametrize(("geometry", "heads"), append_cases.SHAPES, ids=lambda value: str(value))
def test_emulated_tokens_go_where_they_belong(
    geometry: Geometry, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    monkeypatch.setattr(append, "kernel", emulator.kernel)
    for seed in range(8):
        append_cases.check_append(seed, geometry, heads, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 4, 32)}, "query must be"),
        ({"key": torch.zeros(2, 2, 64).half()}, "float16"),
        ({"value": torch.zeros(1, 2, 64)}, "value must be"),
        ({"slots": torch.zeros(2)}, "slots"),
        ({"slots": torch.zeros(1, dtype=torch.int64)}, "slots"),
        ({"queries": torch.zeros(2, 64, 4).transpose(1, 2)}, "dense"),
        ({"k": torch.zeros(2, 64, 8).transpose(1, 2)}, "dense"),
        ({"v": torch.zeros(2, 9, 64)}, "v must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_tokens_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "query": torch.zeros(2, 4, 64), "key": torch.zeros(2, 2, 64),
        "value": torch.zeros(2, 2, 64), "queries": torch.zeros(2, 4, 64),
        "k": torch.zeros(2, 8, 64), "v": torch.zeros(2, 8, 64),
        "slots": torch.zeros(2, dtype=torch.int64), **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        append.append(**arguments)
