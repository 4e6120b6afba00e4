"""Disks and host memory that fail or dawdle: named errors, nothing lost, same bytes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.paging.manager_helpers import (
    TOKENS,
    Batch,
    FailNth,
    check_books,
    check_empty,
    close_all,
    delay,
    make_manager,
    open_store,
)
from tests.paging.test_codecs import wait_for_disk
from tierkv.errors import (
    ColdReadError,
    ColdWriteError,
    HotBudgetError,
    TierKVError,
    WarmBudgetError,
)
from tierkv.paging.manager import PageManager
from tierkv.paging.plan import Fetch

FOREVER = 1 << 30
TRIES = 12


class Story:
    """A fixed run over all tiers that goes on after errors as a careful caller would.

    After a failed step it checks that everything is still readable, cuts back what the step had
    already appended, and tries again; after a failed lookup it repeats that lookup.

    Args:
        on_error: called with each error; may repair what is broken.
    """

    def __init__(self, manager: PageManager, on_error: Callable[[TierKVError], None]):
        self.manager, self.on_error = manager, on_error
        self.errors: list[TierKVError] = []
        self.a, self.b = Batch.new(manager, 2, seed=1), Batch.new(manager, 1, seed=2)
        self.open = [self.a, self.b]

    def run(self) -> None:
        a, b = self.a, self.b
        for batch, count in ((a, 40), (b, 33), *[(a, 1)] * 5):
            self.append(batch, count)
        self.edit(a, lambda: a.remap([0, 1, 1]))
        self.append(a, 20)
        self.edit(a, lambda: a.crop(37))
        for batch, count in (*[(a, 1)] * 6, (b, 50)):
            self.append(batch, count)
        self.edit(a, lambda: a.remap([2, 0]))
        self.append(a, 17)
        self.edit(b, lambda: b.crop(TOKENS))
        self.append(b, 30)

    def run_short(self) -> None:
        """Read from disk few times, but by every way there is."""
        a, b = self.a, self.b
        self.open.remove(b)
        for count in (40, 20, 1):
            self.append(a, count)
        self.retry(lambda: a.crop(37))
        self.append(a, 12)
        self.retry(lambda: a.remap([1, 1]))
        self.append(a, 1)

    def append(self, batch: Batch, count: int) -> None:
        before = batch.length
        for _ in range(TRIES):
            try:
                for layer, new in enumerate(batch.tokens(count)):
                    lookup = batch.append_layer(layer, new)
                    self.retry(lambda lookup=lookup: batch.check_lookup(lookup))  # type: ignore[misc]
                return
            except TierKVError as error:
                self.note(error)
            if batch.sequences in self.manager._open:  # nothing was begun otherwise
                self.edit(batch, lambda: batch.crop(before))
        raise AssertionError(f"still failing after {TRIES} tries: {self.errors[-1]}")

    def edit(self, batch: Batch, action: Callable[[], None]) -> None:
        self.retry(action)
        self.check()

    def retry(self, action: Callable[[], None]) -> None:
        for _ in range(TRIES):
            try:
                return action()
            except TierKVError as error:
                self.note(error)
        raise AssertionError(f"still failing after {TRIES} tries: {self.errors[-1]}")

    def note(self, error: TierKVError) -> None:
        self.errors.append(error)
        self.check()  # while the fault is still there
        self.on_error(error)
        self.check()

    def check(self) -> None:
        """Everything must be readable; reads that fail may be repeated."""
        for batch in self.open:
            if batch.sequences not in self.manager._open:
                continue
            for _ in range(TRIES):
                try:
                    batch.check()
                    break
                except TierKVError as error:
                    self.errors.append(error)
            else:
                raise AssertionError(f"not readable after {TRIES} tries: {self.errors[-1]}")
        check_books(self.manager, [b for b in self.open if b.sequences in self.manager._open])

    def close(self) -> None:
        close_all(self.manager, self.open)


def ignore(error: TierKVError) -> None:
    """Repair nothing: the fault passes by itself."""


@pytest.fixture
def managers(tmp_path: Path) -> Iterator[Callable[..., PageManager]]:
    """Make managers with stores of their own; closes what a failed test left open."""
    made: list[PageManager] = []

    def make(**frames: Any) -> PageManager:
        sizes = {"hot": 5, "staging": 2, "homes": 3, "transit": 2} | frames
        made.append(make_manager(open_store(tmp_path / str(len(made))), **sizes))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def every_n(tell: Callable[[int], FailNth], least: int) -> None:
    """Call `tell` with n = 0, 1, ... until no fault strikes any more."""
    n = 0
    while tell(n).failures:
        n += 1
    assert n >= least, f"only {n} calls: the story does not use what it should"


def test_the_story_uses_all_tiers(managers: Callable[..., PageManager]) -> None:
    manager = managers()
    story = Story(manager, ignore)
    story.run()
    story.close()
    assert not story.errors
    stats = manager.stats
    assert min(stats.hits_hot, stats.hits_warm, stats.hits_cold, stats.pages_demoted) > 0


def test_a_demotion_that_fails_midway_is_undone(managers: Callable[..., PageManager]) -> None:
    """Pages that had already been sent down were in two tiers, and on the retry leaked a frame."""
    manager = managers(hot=5, staging=1, homes=2, transit=1)
    batch = Batch.new(manager, 1)
    batch.append(4 * TOKENS + 3)  # all hot: four pages a layer and the tail
    fault = FailNth(manager.cold, "put", 0, ColdWriteError("injected"), last=FOREVER)
    more = Batch.new(manager, 3, seed=1)
    for _ in range(2):
        with pytest.raises(ColdWriteError, match="injected"):
            more.append(1)
        check_books(manager, [batch])
        batch.check()
    fault.last = -1
    more.append(1)
    assert manager.stats.pages_demoted == 6
    for each in (batch, more):
        each.check()
    check_books(manager, [batch, more])
    assert manager.warm.homes.used == 2
    close_all(manager, [batch, more])


def test_one_failed_write_is_made_good(managers: Callable[..., PageManager]) -> None:
    """The n-th write fails, for every n: its pages wait in warm memory and are written later."""

    def tell(n: int) -> FailNth:
        manager = managers()
        fault = FailNth(manager.cold, "put", n, ColdWriteError("injected"))
        story = Story(manager, ignore)
        story.run()
        story.close()
        assert all("injected" in str(error) for error in story.errors)
        return fault

    every_n(tell, 12)


def test_writes_that_keep_failing(managers: Callable[..., PageManager]) -> None:
    """All writes fail from the n-th on, for every n, until an error has been seen.

    An append that ran out of warm memory midway left its tail in a frame it no longer owned,
    and the retry queued the same page twice.
    """
    surfaced = []

    def tell(n: int) -> FailNth:
        manager = managers()
        fault = FailNth(manager.cold, "put", n, ColdWriteError("injected"), last=FOREVER)

        def repair(error: TierKVError) -> None:
            assert isinstance(error, ColdWriteError)
            assert "warm memory" in str(error)
            assert "injected" in str(error)
            fault.last = -1

        story = Story(manager, repair)
        story.run()
        fault.last = -1
        story.close()
        surfaced.append(len(story.errors))
        return fault

    every_n(tell, 8)
    assert sum(surfaced) >= len(surfaced) - 2  # the last writes may go unnoticed


@pytest.mark.parametrize("in_a_row", [1, 3])
def test_failed_reads(managers: Callable[..., PageManager], in_a_row: int) -> None:
    """The n-th read fails, for every n: the lookup or crop that needs it may be repeated."""
    surfaced = []

    def tell(n: int) -> FailNth:
        manager = managers(hot=2, homes=1, transit=3)
        error = ColdReadError("injected")
        fault = FailNth(manager.cold, "read_into", n, error, last=n + in_a_row - 1)
        story = Story(manager, ignore)
        story.run_short()
        story.close()
        assert all(seen is error for seen in story.errors)
        surfaced.append(bool(story.errors))
        return fault

    every_n(tell, 20)
    assert sum(surfaced) > len(surfaced) // 2  # the others were for lookups that never came


def test_a_failed_read_does_not_free_frames_that_others_still_fill(
    managers: Callable[..., PageManager],
) -> None:
    """One failed read of a fetch gave back all its frames while its other reads ran on.

    The next fetch then read into the same memory: a wrong page, or a checksum that did not match
    and a good page dropped from the store.
    """
    manager = managers(hot=1, homes=1, transit=6, io_threads=4)
    batch = Batch.new(manager, 1)
    batch.append(40 * TOKENS)
    read_into, rng, lock = manager.cold.read_into, random.Random(0), threading.Lock()  # type: ignore[union-attr]
    filling: set[int] = set()
    shared: set[int] = set()
    errors: list[ColdReadError] = []

    def flaky(keys: list[bytes], buffers: list[memoryview]) -> None:
        places = {np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers}
        with lock:
            shared.update(filling & places)
            filling.update(places)
            fails = rng.random() < 0.05
        try:
            if fails:
                raise ColdReadError("injected")
            time.sleep(rng.uniform(0, 0.01))
            read_into(keys, buffers)
        finally:
            with lock:
                filling.difference_update(places)

    manager.cold.read_into = flaky  # type: ignore[method-assign, union-attr]
    for _ in range(8):
        for layer in range(len(batch.keys)):
            try:
                batch.check_lookup(batch.lookup(layer))
            except ColdReadError as error:
                assert "injected" in str(error)
                errors.append(error)
    assert errors
    assert not shared, "two reads filled one frame"
    manager.cold.read_into = read_into  # type: ignore[method-assign, union-attr]
    manager.lookahead.cancel()
    batch.check()
    close_all(manager, [batch])


def test_host_memory_that_is_refused(managers: Callable[..., PageManager]) -> None:
    """The n-th piece of host memory is refused, for every n; later there is some.

    An upcoming lookup kept the inbound frames it had taken, until none was left.
    """
    surfaced = []

    def tell(n: int) -> FailNth:
        manager = managers(chunk_frames=1)
        error = WarmBudgetError("injected: lower cpu_budget")
        fault = FailNth(manager.warm, "_map", n, error)
        story = Story(manager, ignore)
        story.run()
        story.close()
        assert story.errors in ([], [error])
        surfaced.append(bool(story.errors))
        return fault

    every_n(tell, 5)
    assert sum(surfaced) >= len(surfaced) // 2  # the others were for lookups that never came


def test_hot_pages_that_find_no_memory_leave_the_others_free(
    managers: Callable[..., PageManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: where hot pages could not be gathered beside pages from disk, the frames that those
    were being read into were never free again."""
    manager = managers(hot=2, homes=0, transit=4)
    batch = Batch.new(manager, 1)
    batch.append(4 * TOKENS)
    wait_for_disk(manager)
    manager.lookahead.cancel()
    fetch = Fetch(0, batch.sequences.blocks[0, :4])

    def fails(frames: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(manager.hot.arenas[0], "pages", fails)
        with pytest.raises(MemoryError):
            manager.open_sources(fetch)
    assert manager.warm.inbound.used == 0
    sources = manager.open_sources(fetch)
    assert sources is not None and (sources.num_hot, sources.num_cold) == (1, 3)
    for read in sources.reads:
        read.result()
    sources.release()
    batch.check()
    close_all(manager, [batch])


def test_sequences_that_could_not_start_hold_nothing(
    managers: Callable[..., PageManager],
) -> None:
    """A batch too large for the hot budget was remembered: a smaller one was then refused."""
    manager = managers(hot=2)
    batch = Batch.new(manager, 3)
    with pytest.raises(HotBudgetError):
        batch.append(1)
    assert batch.sequences.batch == 0
    assert batch.sequences.lengths == [0, 0]
    check_empty(manager)


def test_closing_after_a_failed_write_forgets_it(managers: Callable[..., PageManager]) -> None:
    """The error of pages that nobody holds any more was raised for all sequences after them."""
    manager = managers(hot=2)
    fault = FailNth(manager.cold, "put", 0, ColdWriteError("injected"), last=FOREVER)
    batch = Batch.new(manager, 1)
    with pytest.raises(ColdWriteError):
        for _ in range(20):
            batch.append(TOKENS)
    assert fault.failures
    batch.close()
    check_empty(manager)
    again = Batch.new(manager, 1, seed=1)
    again.append(TOKENS)  # fits without the disk, which still fails
    fault.last = -1
    for _ in range(20):
        again.append(TOKENS)
    close_all(manager, [again])


def test_closing_while_drops_fail(managers: Callable[..., PageManager]) -> None:
    """A drop that failed kept tails in their frames, and the manager's threads alive."""
    manager = managers(hot=2)
    batches = [Batch.new(manager, 1, seed=seed) for seed in (1, 2)]
    for batch in batches:
        batch.append(20 * TOKENS)
    fault = FailNth(manager.cold, "drop", 0, ColdWriteError("injected"), last=FOREVER)
    with pytest.raises(ColdWriteError, match="injected"):
        batches[0].close()
    check_books(manager, batches[1:])
    batches[1].check()
    with pytest.raises(ColdWriteError, match="injected"):
        manager.close()
    assert fault.failures >= 2
    open_store(manager.cold.directory).close()  # type: ignore[union-attr]
    manager.close()


@pytest.mark.timeout(60)
def test_a_write_that_fails_in_an_unforeseen_way(managers: Callable[..., PageManager]) -> None:
    """An error that is not ours left the batch under way for good, and closing waited for it."""
    manager = managers(hot=2)
    fault = FailNth(manager.cold, "put", 0, MemoryError("injected"), last=FOREVER)
    batch = Batch.new(manager, 1)
    stuck = False
    try:
        with pytest.raises(ColdWriteError) as caught:
            for _ in range(20):
                batch.append(TOKENS)
                deadline = time.monotonic() + 5
                while manager.outflow._writing and time.monotonic() < deadline:
                    time.sleep(0.001)
                stuck = bool(manager.outflow._writing)
                assert not stuck, "the failed batch is still under way"
        assert "injected" in str(caught.value)
        batch.check()
        fault.last = -1
        batch.append(TOKENS)
        close_all(manager, [batch])
    finally:
        if stuck:
            manager.outflow._writing = 0


DELAYS = {
    "slow reads": [("cold", "read_into", 0.01)],
    "slow writes": [("cold", "put", 0.01)],
    "slow copies": [("transfer", "_bring_up", 0.005), ("transfer", "write_down", 0.005)],
    "slow host memory": [("warm", "_map", 0.03)],
    "all of them": [
        ("cold", "read_into", 0.005),
        ("cold", "put", 0.005),
        ("transfer", "_bring_up", 0.002),
        ("transfer", "write_down", 0.002),
        ("warm", "_map", 0.02),
    ],
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("slow", list(DELAYS))
def test_delays_change_no_byte(managers: Callable[..., PageManager], slow: str, seed: int) -> None:
    """Two threads that both took a piece of host memory each wrote to their own."""
    manager = managers(transit=4, io_threads=4, chunk_frames=3)
    for part, name, seconds in DELAYS[slow]:
        delay(getattr(manager, part), name, seconds, seed=seed)
    story = Story(manager, ignore)
    story.run()
    story.close()
    assert not story.errors
    assert manager.stats.hits_cold > 0
