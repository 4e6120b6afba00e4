"""Reading is not always faster than computing; what was measured before decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hf.test_context import NEW, wrap
from tests.hf.test_exact_tokens import prompt
from tierkv.errors import ColdReadError, DiskBudgetError
from tierkv.hf import breakeven
from tierkv.hf.breakeven import Rates

MIB = 1 << 20


def test_the_faster_one_is_chosen_and_doubt_means_reading() -> None:
    rates = Rates()
    assert rates.verdict(100, 100 * MIB) is None, "nothing is known"
    rates.computed(1000, 2.0)
    rates.computed(10, 5.0)  # shorter: warming up, most likely
    assert rates.verdict(1000, 100 * MIB) is None, "no disk is known"
    rates.was_read(breakeven.MIN_READ_BYTES - 1, 9.0)
    assert rates.verdict(1000, 100 * MIB) is None, "too small to tell"
    rates.was_read(100 * MIB, 4.0)
    assert (
        rates.verdict(1000, 100 * MIB) == "computing 1000 tokens takes 2.00 s, reading them 4.00 s"
    )
    assert rates.verdict(1000, 62 * MIB) is None, "hardly faster"
    assert rates.verdict(1001, 200 * MIB) is None, "longer than any known"
    assert rates.verdict(1, MIB // 4) is None, "nothing to gain"


@pytest.mark.parametrize("slow", ["disk", "model"])
def test_a_context_comes_back_the_faster_way(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process knows the figures; the tokens do not depend on the way."""
    ids, _ = prompt("single")
    monkeypatch.setattr(breakeven, "MIN_READ_BYTES", 1)
    with wrap("llama", tmp_path) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        assert wrapped.rates.tokens == 150
        compute, read = (0.1, 9.0) if slow == "disk" else (9.0, 0.1)
        size = 150 * wrapped.manager.geometry.token_bytes
        wrapped.rates = Rates(150, compute, size, read)
        context.save()
        want = context.generate(**NEW)
    with wrap("llama", tmp_path) as wrapped, wrapped.open("book") as context:
        assert context.tokens == 150
        assert context.restored_tokens == (0 if slow == "disk" else 150)
        assert wrapped.stats()["prefill"]["tokens"] == (150 if slow == "disk" else 0)
        assert (context.recomputed is not None) == (slow == "disk")
        assert context.generate(**NEW).tolist() == want.tolist()
    if slow == "model":
        return
    with wrap("llama", tmp_path, prefix_cache=True) as wrapped, wrapped.open("book") as context:
        assert context.restored_tokens == 150, "the prefix cache would read the pages anyway"


def test_a_first_restore_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that save nothing, too; damaged figures are none."""
    ids, _ = prompt("single")
    monkeypatch.setattr(breakeven, "MIN_READ_BYTES", 1)
    for run in range(3):
        with wrap("llama", tmp_path, gpu_budget="1GiB") as wrapped:
            if run == 0:
                with wrapped.open("book") as context:
                    context.append(ids)
                    context.save()
                continue
            cold, rates = wrapped.manager.cold, Rates()
            root = wrapped.open("book")._root
            breakeven.load(cold, root, wrapped.manager.device, rates)
            assert rates.num_bytes == 150 * wrapped.manager.geometry.token_bytes
            assert rates.tokens == 150

            def damaged(name: str) -> bytes:
                raise ColdReadError(name)

            monkeypatch.setattr(cold, "meta_get", damaged)
            breakeven.load(cold, root, wrapped.manager.device, rates)


def test_a_full_store_keeps_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with wrap("llama", tmp_path) as wrapped:
        cold = wrapped.manager.cold

        def full(name: str, value: bytes) -> None:
            raise DiskBudgetError("full")

        monkeypatch.setattr(cold, "meta_put", full)
        breakeven.store(cold, b"root", wrapped.manager.device, Rates(1, 1.0))
        rates = Rates()
        breakeven.load(cold, b"root", wrapped.manager.device, rates)
        assert rates == Rates()
