"""What must go to disk, and what does not care about the disk."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.models import tiny_model
from tests.paging.manager_helpers import (
    GEOMETRY,
    TOKENS,
    Batch,
    check_books,
    close_all,
    make_manager,
    open_store,
)
from tests.paging_helpers import budgets
from tierkv.errors import WriteLimitError


def test_a_full_disk_does_not_matter_while_warm_has_room(tmp_path: Path) -> None:
    """An append was refused because "0 more pages must go to disk", which was nearly full."""
    model = tiny_model("llama")
    settings = budgets("warm", model, tmp_path, page_tokens=16, rows=1)
    full = {"store": str(tmp_path), "disk_budget": "64KiB", "disk_floor": "1MiB"}
    with tierkv.wrap(model, **settings | full) as wrapped:
        tier_cache = wrapped.cache()
        tierkv.prefill(wrapped, torch.arange(3, 153)[None], tier_cache)
        assert tier_cache.get_seq_length() == 150
        assert wrapped.stats()["tiers"]["warm"]["pages"] > 0


def test_pages_that_are_just_being_written_count_once(tmp_path: Path) -> None:
    """Bug: between the write of a batch and the moment its frames were free, its pages counted as
    written and as yet to be written; a step that there was room for was refused."""
    manager = make_manager(open_store(tmp_path), homes=0, transit=8)
    assert manager.cold is not None
    manager.cold.writes.per_day = 12 * manager.cold.frame_bytes
    written, put = threading.Event(), manager.transfer.put_cold

    def lingers(*args: Any) -> None:
        put(*args)
        written.set()
        time.sleep(0.2)

    manager.transfer.put_cold = lingers  # type: ignore[method-assign]
    batch = Batch.new(manager, 1)
    batch.append(3 * TOKENS)
    assert written.wait(20)
    batch.append(3 * TOKENS)
    with pytest.raises(WriteLimitError):
        batch.append(TOKENS)
    batch.check()
    close_all(manager, [batch])


def test_dropped_sequences_make_room_for_a_captured_step() -> None:
    """The room was checked before the pages of sequences that nobody holds any more were freed."""
    manager = make_manager(hot=2, homes=GEOMETRY.layers)
    kept, dropped = Batch.new(manager, 1), Batch.new(manager, 1)
    kept.append(TOKENS - 1)
    dropped.append(TOKENS + 1)  # takes every home
    manager.discard(dropped.sequences)
    manager.begin_token(kept.sequences)
    check_books(manager, [kept])
    close_all(manager, [kept])
