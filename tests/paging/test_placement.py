"""How budgets are divided into frames: never more than the budget, and the minimum is true."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tierkv.errors import HotBudgetError, WarmBudgetError
from tierkv.page import Geometry
from tierkv.paging.placement import (
    MAX_STAGING_BYTES,
    MAX_TRANSIT_BYTES,
    Placement,
    staging_bytes,
)
from tierkv.units import format_bytes

GEOMETRIES = st.builds(
    Geometry,
    layers=st.integers(1, 100),
    kv_heads=st.sampled_from([1, 2, 8]),
    k_dim=st.sampled_from([8, 64, 128, 576]),
    v_dim=st.sampled_from([8, 128, 512]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    page_tokens=st.sampled_from([16, 32, 256]),
)
LLAMA_70B = Geometry(80, 8, 128, 128, torch.bfloat16, 32)


def smallest(geometry: Geometry, *, cuda: bool) -> int:
    """The smallest gpu_budget that is accepted: a tail a layer and the staging pages."""
    page = geometry.page_bytes
    need = page * geometry.layers + staging_bytes(1, page, page, cuda)
    with pytest.raises(HotBudgetError, match=re.escape(format_bytes(need))):
        Placement.choose(geometry, gpu_budget=0, cpu_budget=0, has_cold=False, cuda=cuda)
    return need


@given(
    GEOMETRIES,
    st.integers(0, 1 << 36),
    st.integers(0, 1 << 36),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, None, 1, 5]),
)
def test_budgets_are_never_exceeded(
    geometry: Geometry,
    gpu_budget: int,
    cpu_budget: int,
    has_cold: bool,
    cuda: bool,
    less: int,
    raw_pages: int | None,
) -> None:
    """Also where pages below hot, or all but a few, take a half or a quarter of the bytes."""
    frame, page = geometry.frame_bytes // less, geometry.page_bytes
    try:
        place = Placement.choose(
            geometry, gpu_budget=gpu_budget, cpu_budget=cpu_budget, has_cold=has_cold, cuda=cuda,
            frame_bytes=frame, raw_pages=raw_pages,
        )  # fmt: skip
    except HotBudgetError:
        assert gpu_budget < smallest(geometry, cuda=cuda)
        return
    except WarmBudgetError:
        assert has_cold
        assert cpu_budget < 3 * frame
        return
    assert place.hot_bytes(geometry, frame) <= gpu_budget
    if raw_pages is None:
        assert not place.device_frames
    elif place.hot_frames < raw_pages:  # what one sequence needs comes first, and nothing is left
        assert gpu_budget - place.hot_bytes(geometry) < page * geometry.layers + place.staging_bytes
    assert place.staging_bytes == staging_bytes(place.staging_pages, page, min(page, frame), cuda)
    assert place.hot_frames >= 1
    assert place.staging_pages >= 1
    assert place.staging_pages * min(page, frame) <= max(MAX_STAGING_BYTES, page)
    warm = place.warm_homes + place.warm_inbound + place.warm_outbound
    assert warm * frame <= cpu_budget
    if has_cold:
        # A fetch must fit into the inbound frames, or it could never start.
        assert 1 <= place.staging_pages <= place.warm_inbound == place.warm_outbound
        assert place.warm_inbound * frame <= max(MAX_TRANSIT_BYTES, frame)
    else:
        assert place.warm_inbound == place.warm_outbound == 0
        assert place.warm_homes == cpu_budget // frame


@example(LLAMA_70B, False)
@example(LLAMA_70B, True)
@given(GEOMETRIES, st.booleans())
def test_the_minimum_in_the_message_is_enough(geometry: Geometry, cuda: bool) -> None:
    """With 45 layers and more, staging took a second page and the stated minimum was refused."""
    need = smallest(geometry, cuda=cuda)
    place = Placement.choose(geometry, gpu_budget=need, cpu_budget=0, has_cold=False, cuda=cuda)
    assert place.hot_frames == place.staging_pages == 1
    with pytest.raises(HotBudgetError, match=re.escape(format_bytes(need))):
        Placement.choose(geometry, gpu_budget=need - 1, cpu_budget=0, has_cold=False, cuda=cuda)


def test_the_warm_minimum_in_the_message_is_enough() -> None:
    frame = LLAMA_70B.frame_bytes
    budget = {"gpu_budget": 1 << 30, "has_cold": True, "cuda": False}
    place = Placement.choose(LLAMA_70B, cpu_budget=3 * frame, **budget)
    assert (place.warm_homes, place.warm_inbound, place.warm_outbound) == (1, 1, 1)
    with pytest.raises(WarmBudgetError, match=re.escape(format_bytes(3 * frame))):
        Placement.choose(LLAMA_70B, cpu_budget=3 * frame - 1, **budget)
