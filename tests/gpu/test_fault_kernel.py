"""Waiting for pages on disk within a kernel, on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import fault_cases


@pytest.mark.parametrize("seed", range(6))
def test_notes_questions_and_failures(seed: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    fault_cases.check_notes(seed, device)
    fault_cases.check_questions(seed, device)
    fault_cases.check_failures(seed, device)
