"""A captured step's new token on the GPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import append_cases
from tierkv.kernels.build import available
from tierkv.page import Geometry


@pytest.mark.parametrize(("geometry", "heads"), append_cases.SHAPES, ids=lambda value: str(value))
def test_tokens_go_where_they_belong(geometry: Geometry, heads: int) -> None:
    usable = available()
    assert usable, usable.reason
    device = torch.device("cuda", torch.cuda.current_device())
    for seed in range(24):
        append_cases.check_append(seed, geometry, heads, device)
