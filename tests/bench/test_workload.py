"""Filling, decoding and the check of outputs, on a tiny model without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tierkv import api
from tierkv.bench import workload
from tierkv.bench.workload import Steps
from tierkv.hf import shapes
from tierkv.hf.geometry import model_geometry

CPU = torch.device("cpu")


def eager(model: Any, cache: Any) -> workload.Step:
    return partial(workload.step, model, cache)


@pytest.fixture(scope="module")
def model() -> Any:
    return shapes.random_model(shapes.shape_config("tiny"), CPU, torch.float32)


@pytest.fixture
def geometry(model: Any) -> Any:
    return model_geometry(model.config, torch.float32)


def quiet(*_: Any) -> None:
    """Progress that nobody watches."""


def test_outputs_equal_those_of_dynamic_cache(model: Any, geometry: Any) -> None:
    result = workload.check(
        model, geometry, partial(api.wrap, model), lambda _, cache, __: eager(model, cache)
    )
    assert result["ok"]
    assert result["relative_logit_error"] < 1e-4 < result["error_with_one_page_wrong"]
    assert result["same_greedy_tokens"] == result["steps"]
    assert result["streamed_bytes"] > 0, "pages were streamed, not only read where they were"


def test_one_wrong_page_is_noticed(
    model: Any, geometry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = workload.append

    def wrong(cache: Any, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        k = k.clone()
        k[:, :, 320:352] = k[:, :, 352:384]
        real(cache, layer, k, v.roll(32, dims=2))

    monkeypatch.setattr(workload, "append", wrong)
    result = workload.check(
        model, geometry, partial(api.wrap, model), lambda _, cache, __: eager(model, cache)
    )
    assert not result["ok"]


def test_fill_is_random_in_every_layer(model: Any, geometry: Any) -> None:
    with api.wrap(model, gpu_budget="8MiB") as wrapped:
        cache = wrapped.cache()
        workload.fill_tiers(cache, geometry, 100)
        assert cache.get_seq_length() == 100
        for arena in wrapped.manager.hot.arenas:
            k, v = arena.span(0, 96)
            assert 0.9 < float(k.std()) < 1.1
            assert 0.9 < float(v.std()) < 1.1


def test_decode_counts_what_is_streamed(model: Any, geometry: Any) -> None:
    page = geometry.page_bytes
    with api.wrap(model, gpu_budget=16 * page, cpu_budget=512 * page) as wrapped:
        cache = wrapped.cache()
        workload.fill_tiers(cache, geometry, 62 * 32)
        run = eager(model, cache)
        timed, moved = workload.decode(
            run, cache, CPU, warmup=2, steps=70, limit_seconds=100.0, say=quiet
        )
        hot = wrapped.stats()["tiers"]["hot"]["pages"]
    assert len(timed.seconds) == 70
    assert sum(timed.sealing) == 2
    assert moved["hot_to_warm"] == 2 * geometry.layers * page
    least = 70 * (62 * geometry.layers - hot) * page
    assert least <= moved["warm_to_hot"] <= 1.1 * least
    summary = timed.summary(32)
    assert summary["steps"] == 70
    assert summary["sealing_overhead"] is not None


def test_decode_ends_when_its_time_is_over(model: Any, geometry: Any) -> None:
    cache = shapes.stock_cache(model)
    workload.fill_stock(cache, geometry, 64, CPU)
    run = eager(model, cache)
    timed, moved = workload.decode(
        run, cache, CPU, warmup=1, steps=99, limit_seconds=0.0, say=quiet
    )
    assert len(timed.seconds) == workload.MIN_STEPS
    assert moved == {}
    assert cache.get_seq_length() == 64 + 1 + workload.MIN_STEPS


def test_summary_of_steps() -> None:
    steps = Steps([0.010] * 64, [i in (31, 63) for i in range(64)])
    steps.seconds[31], steps.seconds[32], steps.seconds[63] = 0.013, 0.011, 0.013
    summary = steps.summary(32)
    assert summary["ms_p50"] == pytest.approx(10.0)
    assert 10.0 < summary["ms_p99"] <= 13.0
    assert summary["ms_sealing"] == pytest.approx(13.0)
    assert summary["sealing_overhead"] == pytest.approx((3 + 1 + 3) / 640, rel=0.01)
    assert Steps([0.01] * 63, [True] + [False] * 62).summary(32)["sealing_overhead"] is None
    assert Steps([0.02], [False]).summary(32)["ms_p99"] == pytest.approx(20.0)


def test_stock_prefill_takes_time(model: Any) -> None:
    assert workload.stock_prefill(model, torch.ones((1, 96), dtype=torch.long), 32) > 0


@pytest.mark.parametrize("shared", [False, True])
def test_a_batch_is_filled_and_has_the_pages_it_says(
    shared: bool, model: Any, geometry: Any
) -> None:
    """One prompt that all share, or one each; the pages they may come to suffice."""
    batch = workload.Batch(3, shared)
    pages = batch.pages(geometry, 100, 64)
    budget = pages * geometry.layers * geometry.page_bytes + (1 << 20)
    with api.wrap(model, gpu_budget=budget, cpu_budget="1MiB") as wrapped:
        cache = wrapped.cache()
        batch.fill(cache, geometry, 100)
        assert cache.sequences.batch == 3 and cache.get_seq_length() == 100
        sealed = {tuple(row[:3]) for row in cache.sequences.blocks.tolist()}
        assert len(sealed) == batch.prompts == (1 if shared else 3)
        workload.step(model, cache, torch.ones((3, 64), dtype=torch.long))
        assert wrapped.manager.directory.live <= pages
        assert wrapped.stats()["moved_bytes"]["hot_to_warm"] == 0
    assert batch.kv_bytes(geometry, 100) == batch.prompts * 100 * geometry.token_bytes
