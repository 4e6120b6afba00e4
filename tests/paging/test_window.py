"""The residual window: the last tokens stay hot and whole, within the budgets, whatever is done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tierkv
from tests.models import VOCAB, tiny_model
from tests.paging.manager_helpers import (
    Batch,
    FailNth,
    check_books,
    close_all,
    make_manager,
    open_store,
)
from tests.paging.test_codecs import GEOMETRY, INT8, Encoded, wait_for_disk
from tests.paging_helpers import budgets
from tierkv.errors import ColdWriteError, HotBudgetError, WarmBudgetError
from tierkv.paging.directory import NOWHERE
from tierkv.paging.edit import crop

TOKENS = GEOMETRY.page_tokens


def hot_positions(batch: Encoded, layer: int, row: int = 0) -> list[int]:
    sealed = batch.length // TOKENS
    frames = batch.manager.directory.hot[batch.sequences.blocks[row, :sealed], layer]
    return np.flatnonzero(frames != NOWHERE).tolist()


@pytest.mark.parametrize("tiers", [2, 3])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_last_pages_stay_hot(rows: int, tiers: int, tmp_path: Path) -> None:
    """Over steps of all sizes; what left the window is what the codec makes of it, once."""
    store = open_store(tmp_path, GEOMETRY, codec=INT8) if tiers == 3 else None
    homes = 3 if tiers == 3 else 60
    manager = make_manager(
        store, geometry=GEOMETRY, codec=INT8, hot=5 * rows, staging=2, homes=homes, transit=2,
        residual_tokens=2 * TOKENS,
    )  # fmt: skip
    assert manager.window_pages == 2
    with torch.inference_mode():
        batch = Encoded.new(manager, rows)
        for count in (70, 1, 40, 1, 1, 33, 300, *[1] * 40, 64, 31, 1, 2):
            batch.append(count)
            sealed = batch.length // TOKENS
            for layer in range(GEOMETRY.layers):
                for row in range(rows):
                    hot = hot_positions(batch, layer, row)
                    assert set(range(max(sealed - 2, 0), sealed)) <= set(hot)
                    assert len(hot) == min(sealed, 4), "the share is used, and no more"
            check_books(manager, [batch])
        batch.check()
        close_all(manager, [batch])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("homes", [7, 8, 9, 11, 12])
def test_rows_that_share_pages_stay_within_what_was_reserved(homes: int) -> None:
    """Bug: beams that share fewer hot pages than there are rows moved those down, which freed too
    little for a page of each row, and those went down as well: warm memory ran out in the middle
    of a step, and the step waited for ever."""
    manager = make_manager(
        geometry=GEOMETRY, codec=INT8, hot=5, staging=2, homes=homes, residual_tokens=TOKENS
    )
    with torch.inference_mode():
        batch = Encoded.new(manager, 1)
        batch.append(3 * TOKENS)
        batch.remap([0, 0, 0])
        before = manager.warm.homes.free
        fits = before // (3 * GEOMETRY.layers)
        for _ in range(fits):
            batch.append(TOKENS)
            check_books(manager, [batch])
        assert before - manager.warm.homes.free == 3 * GEOMETRY.layers * fits
        with pytest.raises(WarmBudgetError):
            batch.append(TOKENS)
        batch.check()
        close_all(manager, [batch])


def captured_step(batch: Batch) -> None:
    """Write a token of one sequence as a graph does, between `begin_token` and `end_token`."""
    manager, offset = batch.manager, batch.length % TOKENS
    manager.begin_token(batch.sequences)
    for layer, (k, v) in enumerate(batch.tokens(1)):
        slot = int(batch.sequences.tails[layer, 0]) * TOKENS + offset
        manager.hot.arenas[layer].write_tokens(slot, k[0], v[0])
        batch.keys[layer] = torch.cat([batch.keys[layer], k], dim=2)
        batch.values[layer] = torch.cat([batch.values[layer], v], dim=2)
    manager.end_token(batch.sequences)


@pytest.mark.parametrize("window", [0, 1])
def test_a_captured_step_that_cannot_seal_is_undone(window: int, tmp_path: Path) -> None:
    """Bug: a page that could not go down after a replay counted as sealed, and was nowhere: the
    last tokens of the context were lost."""
    manager = make_manager(
        open_store(tmp_path, GEOMETRY, codec=INT8), geometry=GEOMETRY, codec=INT8,
        hot=1 + window, homes=0, residual_tokens=window * TOKENS,
    )  # fmt: skip
    with torch.inference_mode():
        batch = Encoded.new(manager, 1)
        batch.append(3 * TOKENS - 1)
        wait_for_disk(manager)
        before = batch.keys, batch.values
        batch.keys, batch.values = list(before[0]), list(before[1])
        assert manager.cold is not None
        broken = FailNth(manager.cold, "put", 0, ColdWriteError("no disk"), last=5)
        with pytest.raises(ColdWriteError, match="no disk"):
            captured_step(batch)
        assert set(batch.sequences.lengths) <= {3 * TOKENS - 1, 3 * TOKENS}
        check_books(manager, [batch])
        crop(manager, batch.sequences, 3 * TOKENS - 1)
        batch.keys, batch.values = before
        broken.at = broken.last = -1
        for _ in range(TOKENS + 1):
            captured_step(batch)
        check_books(manager, [batch])
        assert batch.sequences.lengths == [4 * TOKENS] * GEOMETRY.layers
        close_all(manager, [batch])


def test_a_captured_step_slides_the_window() -> None:
    """Pages that `end_token` seals; the oldest residents stay where they are."""
    manager = make_manager(
        geometry=GEOMETRY, codec=INT8, hot=4, staging=2, homes=60, residual_tokens=TOKENS
    )
    with torch.inference_mode():
        batch = Encoded.new(manager, 1)
        batch.append(5 * TOKENS - 1)
        for _ in range(3 * TOKENS):
            captured_step(batch)
            sealed = batch.length // TOKENS
            for layer in range(GEOMETRY.layers):
                assert hot_positions(batch, layer) == [0, 1, sealed - 1]
        batch.check()
        check_books(manager, [batch])
        close_all(manager, [batch])


def test_a_step_that_fails_appends_nothing(tmp_path: Path) -> None:
    """The page that leaves the window goes first: nothing was written when it cannot move."""
    manager = make_manager(
        open_store(tmp_path, GEOMETRY, codec=INT8), geometry=GEOMETRY, codec=INT8, hot=3,
        homes=2, residual_tokens=TOKENS,
    )  # fmt: skip
    with torch.inference_mode():
        batch = Encoded.new(manager, 1)
        batch.append(3 * TOKENS)
        assert manager.cold is not None
        broken = FailNth(manager.cold, "put", 0, ColdWriteError("no disk"), last=1)
        with pytest.raises(ColdWriteError, match="no disk"):
            for _ in range(4):
                batch.append(2 * TOKENS)
        assert broken.failures
        keep = min(batch.sequences.lengths)
        batch.crop(keep)
        for count in (1, TOKENS, 3 * TOKENS):
            batch.append(count)
            check_books(manager, [batch])
        batch.check()
        close_all(manager, [batch])


def test_a_window_that_does_not_fit_is_refused() -> None:
    with pytest.raises(HotBudgetError, match=r"residual_tokens 96 keeps 3 pages.*leaves 3"):
        make_manager(geometry=GEOMETRY, codec=INT8, hot=3, residual_tokens=3 * TOKENS)
    make_manager(geometry=GEOMETRY, hot=3, residual_tokens=3 * TOKENS).close()  # pages are raw


def test_a_model_moves_as_many_pages_with_a_window(tmp_path: Path) -> None:
    """Only others: each page that stays for the window takes the place of an earlier one."""
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (1, 260), generator=torch.Generator().manual_seed(0))
    settings = budgets("warm", model, tmp_path, page_tokens=16, rows=1)
    settings["gpu_budget"] *= 4
    found = []
    for tokens in (0, 32):
        with tierkv.wrap(model, codec="int4", residual_tokens=tokens, **settings) as wrapped:
            cache = wrapped.cache()
            wrapped.prefill(ids, cache)
            stats = wrapped.stats()
            assert wrapped.manager is not None
            blocks = cache.sequences.blocks[0, :16]
            last = wrapped.manager.directory.hot[blocks[-2:]]
            assert (last != NOWHERE).all() == (tokens == 32)
            found.append((stats["moved_bytes"]["hot_to_warm"], stats["tiers"]["hot"]["bytes"]))
    assert found[0] == found[1] and found[0][0] > 0
