"""Waiting for pages on disk within a step: the CUDA source emulated, and the arguments."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.kernels import emulator, fault_cases
from tierkv.kernels import fault

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    monkeypatch.setattr(fault, "kernel", emulator.kernel)


def test_emulated_notes() -> None:
    for seed in range(6):
        fault_cases.check_notes(seed, CPU)


def test_emulated_questions() -> None:
    for seed in range(4):
        fault_cases.check_questions(seed, CPU)


def test_emulated_failures() -> None:
    for seed in range(2):
        fault_cases.check_failures(seed, CPU)


def test_arguments_that_do_not_fit() -> None:
    case = fault_cases.Case(0, CPU)
    with pytest.raises(ValueError, match="share and patience must be above 0, got 0"):
        case.run(share=0.0)
    case.box = fault.Mailbox.allocate(1, case.capacity, case.heads, case.budget, CPU)
    with pytest.raises(ValueError, match="for layer 1"):
        case.run()
    case.box = fault.Mailbox.allocate(3, case.capacity, case.heads, 0, CPU)
    with pytest.raises(ValueError, match="a mailbox of 0 pages for"):
        case.run()
