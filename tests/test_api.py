"""The public object: settings, statistics, closing."""

from __future__ import annotations

import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.models import VOCAB, tiny_model
from tests.paging_helpers import budgets
from tierkv.errors import ClosedError, ConfigError, StoreLockedError, TierKVError

SETTINGS: dict[str, Any] = {"gpu_budget": "16MiB", "cpu_budget": "16MiB", "page_tokens": 16}


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def small(kind: str, model: Any, store: Path) -> dict[str, Any]:
    return budgets(kind, model, store, page_tokens=16, rows=2)


def test_public_names() -> None:
    for name in tierkv.__all__:
        assert getattr(tierkv, name) is not None
    assert issubclass(tierkv.errors.ConfigError, TierKVError)


def test_unknown_setting_suggests_the_nearest() -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="gpu_budget"):
        tierkv.wrap(model, gpu_bugdet="1GiB")
    with pytest.raises(ConfigError, match="page_tokens"):
        tierkv.wrap(model, page_tokens=48)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["hot", "warm", "cold"])
def test_stats_are_plain_json(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    with tierkv.wrap(model, **small(kind, model, tmp_path)) as wrapped:
        before = wrapped.stats()
        wrapped.generate(tokens(2, 150), max_new_tokens=5, do_sample=False)
        after = wrapped.stats()
    for stats in (before, after):
        assert json.loads(json.dumps(stats)) == stats
    assert before.keys() == after.keys()
    assert set(after["tiers"]) == {"hot", "warm", "cold"}
    for tier in after["tiers"].values():
        assert tier["bytes"] <= tier["budget_bytes"]


def test_stats_before_use_are_zero() -> None:
    with tierkv.wrap(tiny_model("llama"), **SETTINGS) as wrapped:
        stats = wrapped.stats()
    assert stats["prefill"] == {"tokens": 0, "seconds": 0.0}
    assert set(stats["hits"].values()) == {0}
    assert set(stats["moved_bytes"].values()) == {0}
    assert all(tier["pages"] == tier["bytes"] == 0 for tier in stats["tiers"].values())


def test_stats_are_a_snapshot() -> None:
    with tierkv.wrap(tiny_model("llama"), **SETTINGS) as wrapped:
        stats = wrapped.stats()
        stats["prefill"]["tokens"] = -1
        assert wrapped.stats()["prefill"]["tokens"] == 0


def test_everything_hot_moves_nothing() -> None:
    model = tiny_model("llama")
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        wrapped.generate(tokens(2, 150), max_new_tokens=5)
        stats = wrapped.stats()
    assert set(stats["moved_bytes"].values()) == {0}
    assert stats["hits"]["hot"] > 0
    assert stats["hits"]["warm"] == stats["hits"]["cold"] == 0


def test_small_budgets_move_pages(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with tierkv.wrap(model, **small("cold", model, tmp_path)) as wrapped:
        wrapped.generate(tokens(2, 300), max_new_tokens=5)
        stats = wrapped.stats()
    assert all(count > 0 for count in stats["moved_bytes"].values())
    assert all(count > 0 for count in stats["hits"].values())
    assert stats["pages_sealed"] == 2 * 3 * (304 // 16)


def settled(before: set[threading.Thread]) -> set[threading.Thread]:
    """Threads that were not there before, after a grace period for those on their way out."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        extra = {t for t in threading.enumerate() if t not in before and t.is_alive()}
        if not extra:
            break
        time.sleep(0.01)
    return extra


@pytest.mark.parametrize("kind", ["hot", "warm", "cold", "minimum"])
def test_no_thread_outlives_the_model(kind: str, tmp_path: Path) -> None:
    model, before = tiny_model("llama"), set(threading.enumerate())
    with tierkv.wrap(model, **small(kind, model, tmp_path)) as wrapped:
        wrapped.generate(tokens(2, 150), max_new_tokens=5)
    assert settled(before) == set()


def test_no_thread_outlives_a_failed_wrap(tmp_path: Path) -> None:
    model, before = tiny_model("llama"), set(threading.enumerate())
    with pytest.raises(TierKVError):
        tierkv.wrap(model, gpu_budget=100, store=str(tmp_path), disk_budget="64MiB", disk_floor=1)
    assert settled(before) == set()


@pytest.mark.parametrize("kind", ["hot", "cold"])
def test_close_is_idempotent(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    wrapped = tierkv.wrap(model, **small(kind, model, tmp_path))
    cache = wrapped.cache()
    wrapped.prefill(tokens(2, 100), cache)
    with wrapped:
        wrapped.close()
        wrapped.close()
    wrapped.close()
    cache.close()
    model.set_attn_implementation("eager")
    wrapped.close()  # the model is not ours any more
    assert model.config._attn_implementation == "eager"


def test_closed_model_says_so() -> None:
    wrapped = tierkv.wrap(tiny_model("llama"), **SETTINGS)
    cache = wrapped.cache()
    wrapped.close()
    with pytest.raises(ClosedError, match="wrap it again"):
        wrapped.cache()
    with pytest.raises(ClosedError):
        wrapped.generate(tokens(1, 10))
    with pytest.raises(ClosedError):
        tierkv.prefill(wrapped, tokens(1, 10), cache)
    with pytest.raises(ClosedError):
        wrapped.__enter__()


def test_stats_of_a_closed_model_can_still_be_read(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with tierkv.wrap(model, **small("cold", model, tmp_path)) as wrapped:
        wrapped.generate(tokens(2, 150), max_new_tokens=5)
        moved = wrapped.stats()["moved_bytes"]
    stats = wrapped.stats()
    assert stats["moved_bytes"] == moved
    assert json.dumps(stats)


def tensor_bytes() -> int:
    """Memory that live tensors hold."""
    storages = {
        thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided
    }
    return sum(storages.values())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"codec": "hot=int8"},
        {"attention": "selective", "max_context": 4096, "token_budget": 64},
    ],
)
def test_closing_gives_back_all_memory_at_once(more: dict[str, Any]) -> None:
    """Frames lay in cycles: a closed model kept its GPU memory until they were collected, so that
    the next one did not fit.
    """
    model = tiny_model("llama")
    gc.collect()
    gc.disable()
    try:
        before = tensor_bytes()
        wrapped = tierkv.wrap(model, **SETTINGS | more)
        cache = wrapped.cache()
        wrapped.prefill(tokens(1, 200), cache)
        wrapped.generate(tokens(1, 10), max_new_tokens=4)
        open_bytes = tensor_bytes()
        wrapped.close()
        assert open_bytes - before > 8 << 20
        assert tensor_bytes() - before < 1 << 20
        cache.close()  # was there all the time
    finally:
        gc.enable()


def test_the_store_is_free_after_close(tmp_path: Path) -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    settings = small("cold", model, tmp_path)
    with tierkv.wrap(model, **settings) as wrapped:
        wrapped.generate(tokens(2, 150), max_new_tokens=3)
        with pytest.raises(StoreLockedError):
            tierkv.wrap(other, **settings)
        assert other.config._attn_implementation == "sdpa"
    with tierkv.wrap(other, **settings) as again:
        assert again.stats()["tiers"]["cold"]["pages"] == 0  # of that session only
        again.generate(tokens(2, 150), max_new_tokens=3)
