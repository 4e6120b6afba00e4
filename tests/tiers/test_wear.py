"""Writes per day: counted across processes, refused by name, and nothing stored is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.models import tiny_model
from tests.paging_helpers import budgets
from tests.tiers.cold_helpers import FRAME, open_store, page, put, read
from tierkv.errors import DiskBudgetError, WriteLimitError
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.wear import COUNTER_NAME, DailyWrites

DAY = 86400


def limited(directory: Path, pages: int | None) -> ColdStore:
    limit = None if pages is None else pages * FRAME
    return ColdStore(
        directory, frame_bytes=FRAME, disk_budget=4 << 20, free_floor=0, writes_per_day=limit,
        durable=False,
    )  # fmt: skip


def test_counted_across_openings_and_refused_by_name(tmp_path: Path) -> None:
    with limited(tmp_path, 5) as store:
        put(store, b"a", b"b")
        put(store, b"b")  # replacing writes too
    with limited(tmp_path, 5) as store:
        assert store.writes.today == 3 * FRAME
        with pytest.raises(WriteLimitError, match=r"disk_writes_per_day is 20 KiB \(raise it"):
            put(store, b"c", b"d", b"e")
        assert store.counters["budget_refusals"] == 1
        assert read(store, b"a", b"b") == [page(b"a"), page(b"b")]
        put(store, b"c", b"d")
        assert store.meta_names() == [], "the counter is nobody's metadata"
    with limited(tmp_path, None) as store:
        put(store, b"e")
        assert store.writes.today == 6 * FRAME


def test_a_refused_batch_is_not_counted(tmp_path: Path) -> None:
    with open_store(tmp_path, disk_budget=1 << 17) as store:
        with pytest.raises(DiskBudgetError):
            put(store, *(bytes([i, i]) for i in range(64)))
        assert store.writes.today == 0


def test_a_new_day_starts_at_zero() -> None:
    now = 5.5 * DAY
    writes = DailyWrites(None, 100, lambda: now)
    writes.check(100)
    writes.add(70)
    again = DailyWrites(writes.packed(), 100, lambda: now)
    again.add(30)
    assert (writes.today, again.today) == (70, 100)
    with pytest.raises(WriteLimitError):
        again.check(1)
    now = 6 * DAY
    assert again.today == 0
    again.check(100)


def test_a_damaged_counter_is_counted_and_starts_anew(tmp_path: Path) -> None:
    with limited(tmp_path, 2) as store:
        put(store, b"a", b"b")
        with store._catalogue._writing(store._catalogue._meta) as txn:
            txn.put(COUNTER_NAME, b"nonsense")
    with limited(tmp_path, 2) as store:
        assert store.counters["bad_meta"] == 1
        put(store, b"c")
        assert store.writes.today == FRAME


def wrap(model: Any, store: Path, kind: str, **more: Any) -> Any:
    settings = budgets(kind, model, store, page_tokens=16, rows=1)
    return tierkv.wrap(model, **{"prefill_chunk": 50, "store": str(store)} | settings | more)


def test_saves_are_refused_and_what_is_saved_resumes(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), torch.arange(3, 103)[None]
    with wrap(model, tmp_path, "hot") as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
    with wrap(model, tmp_path, "hot", disk_writes_per_day="64KiB") as wrapped:
        with wrapped.open("book") as context:
            assert context.tokens == 100
            context.append(ids)
            context.append(ids)
            with pytest.raises(WriteLimitError, match="disk_writes_per_day"):
                context.save()
        with wrapped.open("book") as context:
            assert context.tokens == 100


def test_spilling_is_refused_before_anything_is_appended(tmp_path: Path) -> None:
    """Live pages that would go to disk count too; those that are there stay readable."""
    model, ids = tiny_model("llama"), torch.arange(3, 103)[None]
    with wrap(model, tmp_path, "minimum", disk_writes_per_day="128KiB") as wrapped:
        tier_cache = wrapped.cache()
        tierkv.prefill(wrapped, ids, tier_cache)
        assert wrapped.stats()["tiers"]["cold"]["pages"] > 0
        more = torch.cat([ids] * 4, dim=1)
        with pytest.raises(WriteLimitError, match="disk_writes_per_day is 128 KiB"):
            tierkv.prefill(wrapped, more, tier_cache)
        held = tier_cache.get_seq_length()
        assert len(set(tier_cache.sequences.lengths)) == 1, "no layer is ahead of another"
        output = model(more[:, held : held + 1], past_key_values=tier_cache, use_cache=True)
        assert torch.isfinite(output.logits).all(), "stored pages are still read"
