"""Page selection on the CPU: the CUDA sources emulated, the rules, and the arguments."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.kernels import emulator, select_cases
from tierkv.kernels import decode, gather, merge, score, select
from tierkv.kernels.build import DTYPES
from tierkv.page import Geometry
from tierkv.selection import choose

CPU = torch.device("cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    for module in (decode, gather, merge, score, select):
        monkeypatch.setattr(module, "kernel", emulator.kernel)
    for module in (decode, select):
        monkeypatch.setattr(module, "shared_memory", emulator.shared_memory)
    monkeypatch.setattr(select, "THREADS", 64)  # a thread is a fiber there


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("k_dim", "group", "parts"), [(128, 4, 2), (40, 16, 2), (80, 9, 1)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_emulated_scores_equal_float64(
    dtype: torch.dtype, k_dim: int, group: int, parts: int
) -> None:
    for seed in range(2):
        select_cases.check_scores(seed, CPU, dtype, k_dim, group, parts)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("dtype", "k_dim", "group"),
    [(BF16, 128, 7), (BF16, 40, 16), (F16, 64, 9), (F32, 68, 4), (F32, 128, 9)],
    ids=str,
)
def test_emulated_byte_scores_equal_the_selectors(
    dtype: torch.dtype, k_dim: int, group: int
) -> None:
    for seed in range(2):
        select_cases.check_byte_scores(seed, CPU, dtype, k_dim, group)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("dtype", "k_dim", "group", "page_tokens"),
    [
        (BF16, 128, 4, 32), (BF16, 64, 8, 16), (BF16, 256, 1, 64), (BF16, 40, 12, 32),
        (F16, 128, 7, 16), (F16, 96, 3, 32), (F16, 32, 16, 64),
        (F32, 64, 9, 16), (F32, 128, 5, 64),
    ],
    ids=str,
)  # fmt: skip
def test_emulated_key_scores_equal_the_selectors(
    dtype: torch.dtype, k_dim: int, group: int, page_tokens: int
) -> None:
    for seed in range(2):
        select_cases.check_key_scores(seed, CPU, dtype, k_dim, group, page_tokens)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("page_tokens", [32, 64])
def test_emulated_scores_of_many_pages_for_few_blocks(
    page_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every warp comes to several tiles."""
    monkeypatch.setattr(score, "MAX_BLOCKS", 1)
    for seed in (1, 3, 11):  # 131 pages
        select_cases.check_scores(seed, CPU, BF16, 32, 4, 2)
        select_cases.check_key_scores(seed, CPU, BF16, 32, 4, page_tokens)


@pytest.mark.usefixtures("emulated")
def test_emulated_hopeless_scores() -> None:
    select_cases.check_hopeless_scores(CPU)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("list_pages", [8, 1], ids=["listed", "overflowing"])
def test_emulated_plans_keep_the_rules(list_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when more candidates can be chosen than the list has room for."""
    monkeypatch.setattr(select, "LIST_PAGES", list_pages)
    for seed in range(8):
        select_cases.check_plans(seed, CPU, steps=4)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("listed", [64, 0])
def test_emulated_plans_without_room(listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all keys, and the list as well, do not fit into shared memory."""
    room = select.STATIC_SHARED_BYTES + 4 * (14 + 3 * 7 + 2 * 5 + 2 * listed + 4)
    monkeypatch.setattr(select, "shared_memory", lambda device: (room, room))
    for seed in range(6):
        select_cases.check_plans(seed, CPU, budget=7, slots=14, steps=4)


@pytest.mark.usefixtures("emulated")
def test_emulated_plans_of_many_pages_for_few_threads() -> None:
    """Every thread comes to several words of marks."""
    for seed in range(3):
        select_cases.check_plans(seed, CPU, capacity=4200, budget=6, slots=9, steps=3)


@pytest.mark.usefixtures("emulated")
def test_emulated_plans_of_more_pages_than_threads() -> None:
    """A thread's maxima say nothing there: all keys are searched."""
    for seed in range(4):
        select_cases.check_plans(seed, CPU, capacity=300, budget=100, slots=130, steps=3)


@pytest.mark.usefixtures("emulated")
def test_emulated_pipeline_attends_to_what_was_chosen() -> None:
    geometry = Geometry(1, 2, 32, 16, torch.bfloat16, 16)
    select_cases.check_pipeline(CPU, geometry, pages=40, budget=5, steps=3)


def test_the_rules_are_those_of_the_selectors() -> None:
    """The plain rules that the kernel is compared with equal `selection.choose`."""
    import random

    for seed in range(200):
        rng = random.Random(seed)
        mass = select_cases.random_mass(rng, rng.randint(1, 40))
        budget = rng.randint(1, 50)
        want = choose(torch.tensor([[mass]]), budget, candidates=torch.tensor(True))
        got = select_cases.choose(mass, budget, None)
        assert want.pages[0, 0, : int(want.counts)].tolist() == got, seed
        for share in (0.2, 0.8):
            want = choose(
                torch.tensor([[mass]]), budget, candidates=torch.tensor(True), mass_target=share
            )
            got = select_cases.choose(mass, budget, share)
            assert abs(int(want.counts) - len(got)) <= 1, seed  # masses here have 31 bits


def score_arguments(**changes: Any) -> dict[str, Any]:
    return {
        "query": torch.zeros(8, 64),
        "summaries": torch.zeros(2, 30, 2, 64),
        "scores": score.Scores.allocate(2, 4, 30, CPU),
        "sealed": torch.zeros(1, dtype=torch.int32),
        "first": 0, "recent": 0, "scale": 1.0, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(8, 32)}, "query"),
        ({"query": torch.zeros(9, 64)}, "9 query heads"),
        ({"query": torch.zeros(8, 64).half()}, "float16"),
        ({"summaries": torch.zeros(2, 30, 3, 64)}, "1 or 2 parts, got 3"),
        ({"stem": "score_keys"}, "score_keys takes 4 or 6 .* got 2"),
        ({"summaries": torch.zeros(2, 40, 2, 64)}, "40 pages"),
        ({"summaries": torch.zeros(2, 30, 2, 128)[..., :64]}, "strides"),
        ({"scores": score.Scores.allocate(2, 2, 30, CPU)}, "8 heads"),
        ({"sealed": torch.zeros(1)}, "sealed"),
        ({"first": -1}, "-1"),
        ({"scale": 0.0}, "above 0"),
        ({"sealed": torch.zeros(1, dtype=torch.int32, device="meta")}, "meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_scorings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score.prepare(**score_arguments(**changes))


def test_vectors_that_are_not_aligned_are_refused() -> None:
    with pytest.raises(ValueError, match="aligned"):
        score.prepare(
            **score_arguments(query=torch.zeros(8, 6), summaries=torch.zeros(2, 30, 2, 6))
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mass": torch.zeros(2, 29)}, "mass"),
        ({"mass": torch.zeros(2, 30).double()}, "float64"),
        ({"mass": torch.zeros(2, 30)}, "30 pages"),
        ({"addresses": torch.zeros(31, dtype=torch.int64)}, "addresses"),
        ({"plan": select.Plan.allocate(2, 9, CPU)}, "9 pages"),
        ({"plan": select.Plan.allocate(3, 5, CPU)}, "3 KV heads"),
        ({"step": torch.zeros(1)}, "step"),
        ({"mass_target": 1.5}, "1.5"),
        ({"recent": -2}, "-2"),
        ({"cache": select.ReuseCache.allocate(2, 30, 60000, CPU)}, "60000 slots"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_plans_are_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "shared_memory", emulator.shared_memory)
    one = torch.zeros(1, dtype=torch.int32)
    arguments: dict[str, Any] = {
        "mass": torch.zeros(2, 32), "addresses": torch.zeros(30, dtype=torch.int64),
        "cache": select.ReuseCache.allocate(2, 30, 8, CPU),
        "plan": select.Plan.allocate(2, 5, CPU), "sealed": one, "first": 0, "recent": 0,
        "step": one, "page_tokens": 16, **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        select.prepare(**arguments)


def test_a_reuse_cache_that_does_not_fit_together_is_refused() -> None:
    where, held = torch.zeros(2, 9, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="no reuse cache"):
        select.ReuseCache(where, held, held[:1])
    with pytest.raises(ValueError, match="int32"):
        select.ReuseCache(where.long(), held, held)
