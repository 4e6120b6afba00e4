"""Copies of pages by table on the CPU: the CUDA source emulated, and its arguments."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.kernels import emulator, gather_cases
from tierkv.kernels import gather
from tierkv.kernels.decode import PagedKV
from tierkv.page import Geometry

CPU = torch.device("cpu")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    monkeypatch.setattr(gather, "kernel", emulator.kernel)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("geometry", gather_cases.GEOMETRIES, ids=lambda g: f"{g.k_dim}-{g.v_dim}")
def test_emulated_kernels_copy_what_the_tables_say(geometry: Geometry) -> None:
    for seed in range(4):
        gather_cases.check_pages(seed, geometry, CPU, to_host=False)
        gather_cases.check_pages(seed, geometry, CPU, to_host=True)
        gather_cases.check_fetch(seed, geometry, CPU)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("to_host", [False, True])
def test_emulated_copies_of_frames(to_host: bool) -> None:
    """Whatever frames hold; bytes past what is asked for are left alone."""
    gather_cases.check_frames(0, CPU, to_host=to_host)
    gather_cases.check_frames(1, CPU, to_host=to_host)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": torch.zeros(3, 100, dtype=torch.uint8)}, "whole chunks"),
        ({"frames": torch.zeros(3, 96)}, "uint8"),
        ({"num_bytes": 97}, "97 bytes of frames of 96"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, "slots"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_frames_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "addresses": torch.zeros(3, dtype=torch.int64),
        "frames": torch.zeros(3, 96, dtype=torch.uint8),
        "num_bytes": 90,
        "slots": torch.zeros(3, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        gather.prepare_frames(**arguments | changes)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"addresses": int32(3)}, "addresses"),
        ({"addresses": torch.zeros(3, 1, dtype=torch.int64)}, "addresses"),
        ({"addresses": torch.zeros(6, dtype=torch.int64)[::2]}, "contiguous"),
        ({"addresses": torch.zeros(3, dtype=torch.int64, device="meta")}, "meta"),
        ({"addresses": torch.zeros(6, dtype=torch.int64)}, "5 frames"),
        ({"slots": int32(4)}, "slots"),
        ({"slots": torch.zeros(3)}, "slots"),
        ({"blocks": 0}, "0 blocks"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_pages_are_refused(changes: dict[str, Any], message: str) -> None:
    k = torch.zeros(2, 5, 32, 64, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"addresses": torch.zeros(3, dtype=torch.int64), **changes}
    with pytest.raises(ValueError, match=message):
        gather.prepare(pages=PagedKV(k, k), **arguments)


def test_wrong_fetches_are_refused() -> None:
    k = torch.zeros(2, 5, 32, 64, dtype=torch.bfloat16)
    addresses, fetches = torch.zeros(9, dtype=torch.int64), gather.Fetches.allocate(3, 4, CPU)
    with pytest.raises(ValueError, match="pages of the fetches"):
        gather.prepare_fetch(addresses, fetches, PagedKV(k, k))
    with pytest.raises(ValueError, match="frames"):
        gather.Fetches(int32(2, 4), int32(2, 3), int32(2))
    with pytest.raises(ValueError, match="counts"):
        gather.Fetches(int32(2, 4), int32(2, 4), int32(3))
    with pytest.raises(ValueError, match="int32"):
        gather.Fetches(int32(2, 4), int32(2, 4), torch.zeros(2))
