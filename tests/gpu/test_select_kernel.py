"""Page selection on the GPU: scores against float64, plans against plain rules, whole steps."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import select_cases
from tierkv.kernels import score, select
from tierkv.kernels.build import available
from tierkv.page import Geometry

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    usable = available()
    assert usable, usable.reason
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(
    ("dtype", "k_dim", "group", "parts"),
    [(BF16, 128, 4, 2), (BF16, 256, 16, 2), (F16, 40, 9, 1), (F32, 128, 7, 2), (F32, 64, 1, 1)],
    ids=str,
)
def test_scores_equal_float64(
    dtype: torch.dtype, k_dim: int, group: int, parts: int, device: torch.device
) -> None:
    for seed in range(12):
        select_cases.check_scores(seed, device, dtype, k_dim, group, parts)


@pytest.mark.parametrize(
    ("dtype", "k_dim", "group"),
    [(BF16, 128, 7), (BF16, 256, 16), (BF16, 40, 9), (F16, 64, 8), (F32, 128, 4), (F32, 68, 16)],
    ids=str,
)
def test_byte_scores_equal_the_selectors(
    dtype: torch.dtype, k_dim: int, group: int, device: torch.device
) -> None:
    for seed in range(12):
        select_cases.check_byte_scores(seed, device, dtype, k_dim, group)


@pytest.mark.parametrize("page_tokens", [16, 32, 128])
@pytest.mark.parametrize(
    ("dtype", "k_dim", "group"),
    [
        (BF16, 128, 4), (BF16, 128, 7), (BF16, 64, 1), (BF16, 256, 16), (BF16, 40, 9),
        (F16, 128, 8), (F16, 96, 3), (F16, 256, 12), (F32, 128, 4), (F32, 40, 16),
    ],
    ids=str,
)  # fmt: skip
def test_key_scores_equal_the_selectors(
    dtype: torch.dtype, k_dim: int, group: int, page_tokens: int, device: torch.device
) -> None:
    for seed in range(6):
        select_cases.check_key_scores(seed, device, dtype, k_dim, group, page_tokens)


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
def test_scores_of_many_pages_for_few_blocks(
    page_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every warp comes to several tiles."""
    monkeypatch.setattr(score, "MAX_BLOCKS", 1)
    for seed in range(12):
        select_cases.check_scores(seed, device, BF16, 128, 4, 2)
        select_cases.check_key_scores(seed, device, BF16, 128, 4, page_tokens)


def test_hopeless_scores(device: torch.device) -> None:
    select_cases.check_hopeless_scores(device)


@pytest.mark.parametrize("replay", [False, True], ids=["direct", "replayed"])
def test_plans_keep_the_rules(replay: bool, device: torch.device) -> None:
    for seed in range(40):
        select_cases.check_plans(seed, device, replay=replay)


@pytest.mark.parametrize("cached", [1 << 20, 1000])
def test_plans_of_long_contexts(
    cached: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of pages, whether or not their keys fit into shared memory."""
    real = select.shared_memory(device)
    room = min(real[0], select.STATIC_SHARED_BYTES + 4 * (600 + 3 * 256 + cached))
    monkeypatch.setattr(select, "shared_memory", lambda device: (room, real[1]))
    for seed in range(6):
        select_cases.check_plans(seed, device, capacity=9001, budget=256, slots=600, steps=3)


def test_a_million_tokens(device: torch.device) -> None:
    """Scores of 32768 pages: the same bits every time, and as many chosen as the budget says."""
    query = torch.randn(32, 128, device=device).bfloat16()
    summaries = torch.randn(8, 32768, 2, 128, device=device).sort(dim=2, descending=True).values
    scores = score.Scores.allocate(8, 4, 32768, device)
    sealed = select_cases.int32(32768, device)
    candidates = {"sealed": sealed, "first": 2, "recent": 2}
    launch = score.prepare(query, summaries.bfloat16(), scores, scale=128**-0.5, **candidates)
    launch.run()
    mass = scores.mass.clone()
    total = mass[:, 2:32766].double().sum(dim=1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-4, atol=0)
    cache = select.ReuseCache.allocate(8, 32768, 512, device)
    plan = select.Plan.allocate(8, 256, device)
    addresses = torch.full((32768,), 16, dtype=torch.int64, device=device)
    choice = select.prepare(
        scores.mass, addresses, cache, plan, step=select_cases.int32(1, device), page_tokens=32,
        **candidates,
    )  # fmt: skip
    for _ in range(5):
        launch.run()
        choice.run()
        assert torch.equal(scores.mass[:, 2:32766], mass[:, 2:32766])
        want = mass[:, 2:32766].topk(256, dim=1).values.sort(dim=1).values
        got = mass.gather(1, plan.selected.long()).sort(dim=1).values
        assert torch.equal(got, want)
    assert plan.stats.sum(dim=0).tolist() == [4 * 8 * 256, 8 * 256, 0, 4 * 8 * 256]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_attention_reads_what_was_chosen(dtype: torch.dtype, device: torch.device) -> None:
    geometry = Geometry(1, 8, 128, 128, dtype)
    select_cases.check_pipeline(device, geometry, pages=300, budget=32, steps=8)
