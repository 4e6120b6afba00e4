"""Upcoming lookups: pages arrive before they are needed, and nothing stale is ever yielded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.paging.manager_helpers import TOKENS, Batch, close_all, make_manager, open_store
from tests.paging.test_codecs import wait_for_disk
from tierkv.paging import headpages
from tierkv.paging.manager import PageManager

SLOW = 0.02
"""Seconds that the consumer computes per block: many times what copying a tiny page takes."""


@pytest.fixture
def managers(tmp_path: Path) -> Iterator[Callable[..., PageManager]]:
    made: list[PageManager] = []

    def make(*, on_disk: bool = False, **frames: Any) -> PageManager:
        store = open_store(tmp_path / str(len(made))) if on_disk else None
        made.append(make_manager(store, **frames))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


def consume(batch: Batch, layer: int, *, seconds: float = 0.0) -> None:
    """Look a layer up as attention does, computing for so long on every segment."""
    for _segment in batch.lookup(layer).segments():
        time.sleep(seconds)


def step(batch: Batch, *, seconds: float = 0.0) -> None:
    """Decode one token, computing for so long on every segment."""
    for layer, new in enumerate(batch.tokens(1)):
        for _segment in batch.append_layer(layer, new).segments():
            time.sleep(seconds)


def zero(manager: PageManager) -> None:
    stats = manager.stats
    stats.late_arrivals = stats.unannounced = stats.cancelled = 0
    stats.hits_hot = stats.hits_warm = stats.hits_cold = 0
    stats.stall_seconds = 0.0


def test_an_interrupted_read_keeps_its_frames_until_it_is_over(
    managers: Callable[..., PageManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while pages on disk were waited for gave their frames away: the reads went on into
    what others had put there meanwhile."""
    manager = managers(on_disk=True, hot=1, homes=0, transit=4, io_threads=1)
    batch = Batch.new(manager, 1)
    batch.append(5 * TOKENS)
    wait_for_disk(manager)
    manager.lookahead.cancel()
    assert manager.cold is not None
    read, free, begun = manager.cold.read_into, list[int](), threading.Event()

    def slow(*arguments: Any) -> None:
        begun.set()
        time.sleep(0.1)
        read(*arguments)
        free.append(manager.warm.inbound.free)

    def interrupted() -> None:
        assert begun.wait(10)
        raise KeyboardInterrupt

    start = manager.transfer.read_cold

    def started(*arguments: Any) -> Any:
        reads = start(*arguments)
        reads[0].result = interrupted  # type: ignore[assignment]
        return reads

    monkeypatch.setattr(manager.cold, "read_into", slow)
    monkeypatch.setattr(manager.transfer, "read_cold", started)
    with pytest.raises(KeyboardInterrupt):
        headpages.read_head_pages(manager, batch.sequences, 1, torch.tensor([[0, 1], [2, 3]]))
    assert free == [0] and manager.warm.inbound.free == 4


def test_warm_pages_arrive_before_they_are_needed(managers: Callable[..., PageManager]) -> None:
    manager = managers(hot=1, staging=2, homes=64)
    batch = Batch.new(manager, 1)
    batch.append(9 * TOKENS)
    manager.lookahead.cancel()
    zero(manager)
    stats = manager.stats
    step(batch, seconds=SLOW)
    # Nobody had announced layer 0, and its first block could not be there yet.
    assert stats.unannounced == 9
    assert stats.late_arrivals <= 2
    zero(manager)
    for _ in range(4):
        step(batch, seconds=SLOW)
    assert stats.late_arrivals == 0
    assert stats.unannounced == 0
    assert stats.cancelled == 0
    assert stats.hits_warm == 4 * 2 * 9
    assert stats.hits_cold == 0
    assert stats.stall_seconds == 0
    close_all(manager, [batch])


def test_cold_pages_arrive_before_they_are_needed(managers: Callable[..., PageManager]) -> None:
    manager = managers(on_disk=True, hot=1, staging=1, homes=4, transit=8)
    batch = Batch.new(manager, 1)
    batch.append(9 * TOKENS)
    for _ in range(2):
        step(batch, seconds=SLOW)
    zero(manager)
    for _ in range(3):
        step(batch, seconds=SLOW)
    stats = manager.stats
    # Four of the nine pages in two layers found a warm home, the rest is on disk.
    assert (stats.hits_warm, stats.hits_cold) == (3 * 4, 3 * (2 * 9 - 4))
    assert stats.unannounced == 0
    assert stats.late_arrivals <= 2  # a disk may have a bad moment
    close_all(manager, [batch])


def test_an_impatient_consumer_is_counted(managers: Callable[..., PageManager]) -> None:
    """The counters do notice: with copies that take long, all arrivals are late."""
    manager = managers(hot=1, staging=1, homes=64)
    batch = Batch.new(manager, 1)
    batch.append(5 * TOKENS)
    bring_up = manager.transfer._bring_up

    def slow(*args: Any) -> Any:
        time.sleep(SLOW)
        return bring_up(*args)

    manager.transfer._bring_up = slow  # type: ignore[method-assign]
    manager.lookahead.cancel()
    zero(manager)
    step(batch)
    assert manager.stats.late_arrivals == manager.stats.hits_warm == 10
    assert manager.stats.stall_seconds > 5 * SLOW
    close_all(manager, [batch])


def test_the_next_layer_is_under_way_before_it_is_asked_for(
    managers: Callable[..., PageManager],
) -> None:
    manager = managers(hot=1, staging=4, homes=64)
    batch = Batch.new(manager, 1)
    batch.append(3 * TOKENS)
    manager.lookahead.cancel()
    consume(batch, 0)
    (ticket,) = list(manager.lookahead._queue)[:1]
    assert ticket.fetch.layer == 1
    assert ticket.copied is not None
    ticket.copied.result(10)
    zero(manager)
    consume(batch, 1)
    assert (manager.stats.late_arrivals, manager.stats.unannounced) == (0, 0)
    assert manager.lookahead._queue[0].fetch.layer == 0  # the next step's
    close_all(manager, [batch])


def test_announcements_end_after_one_round_of_layers(managers: Callable[..., PageManager]) -> None:
    """What lies more than a step ahead may change: the layer in hand seals pages meanwhile."""
    manager = managers(hot=1, staging=8, homes=64)
    batch = Batch.new(manager, 1)
    batch.append(2 * TOKENS)
    manager.lookahead.cancel()
    consume(batch, 0)
    assert [ticket.fetch.layer for ticket in manager.lookahead._queue] == [1, 0]
    close_all(manager, [batch])


def test_sealing_pages_does_not_break_the_pipeline(managers: Callable[..., PageManager]) -> None:
    manager = managers(hot=1, staging=2, homes=64)
    batch = Batch.new(manager, 1)
    batch.append(5 * TOKENS)
    for _ in range(2):
        step(batch)
    zero(manager)
    for _ in range(3 * TOKENS):
        batch.append(1)
    batch.append(2 * TOKENS + 3)
    batch.append(1)
    assert manager.stats.unannounced == 0
    assert manager.stats.cancelled == 0
    close_all(manager, [batch])


def test_two_batches_in_turn(managers: Callable[..., PageManager]) -> None:
    """Announcements are for one batch; another one's lookups cancel them and stay right."""
    manager = managers(hot=2, staging=2, homes=64)
    batches = [Batch.new(manager, 1, seed=seed) for seed in (1, 2)]
    for _ in range(3):
        for batch in batches:
            batch.append(3 * TOKENS + 1)
    assert manager.stats.cancelled > 0
    for _ in range(3):
        for batch in batches:
            batch.check()
    close_all(manager, batches)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("first_layer", [0, 1])
def test_nothing_stale_after_edits(
    managers: Callable[..., PageManager], first_layer: int, on_disk: bool
) -> None:
    """Pages announced for block tables that changed must not be taken for the new ones.

    Block ids are reused at once, so a stale announcement would look like the right one.
    """
    homes = 8 if on_disk else 48
    manager = managers(on_disk=on_disk, hot=4, staging=2, homes=homes, transit=4)
    batch = Batch.new(manager, 2)
    batch.append(6 * TOKENS + 5)
    length = batch.length
    for rows, shorter, count in (
        ([1, 0], 3 * TOKENS, 3 * TOKENS + 5),
        ([0, 0], 3 * TOKENS + 2, 3 * TOKENS + 3),
        ([1, 1, 0], 0, 6 * TOKENS + 5),
        ([2, 0], 6 * TOKENS - 1, 6),
    ):
        consume(batch, first_layer)  # announces the other layer and the next step
        batch.remap(rows)
        assert not manager.lookahead._queue
        batch.check()
        consume(batch, first_layer)
        batch.crop(shorter)
        assert not manager.lookahead._queue
        batch.append(count)  # other tokens in the same positions and the same blocks
        assert batch.length == length
        batch.check()
    close_all(manager, [batch])


def test_cancelling_waits_for_copies_under_way(managers: Callable[..., PageManager]) -> None:
    """Frames are reused after `cancel`, so no copy may still read them or write to an arena."""
    manager = managers(hot=1, staging=1, homes=64)
    batch = Batch.new(manager, 1)
    batch.append(5 * TOKENS)
    manager.lookahead.cancel()
    bring_up, running = manager.transfer._bring_up, threading.Semaphore(0)
    active: list[int] = []

    def slow(*args: Any) -> Any:
        active.append(1)
        running.release()
        time.sleep(0.1)
        try:
            return bring_up(*args)
        finally:
            active.pop()

    manager.transfer._bring_up = slow  # type: ignore[method-assign]
    segments = batch.lookup(0).segments()
    next(segments)
    del segments  # the consumer gives up in the middle
    assert running.acquire(timeout=10)
    manager.lookahead.cancel()
    assert not active
    assert sorted(manager.lookahead._free_buffers) == [0, 1]
    batch.check()
    close_all(manager, [batch])


def test_frames_bound_what_is_announced(managers: Callable[..., PageManager]) -> None:
    manager = managers(on_disk=True, hot=1, staging=2, homes=1, transit=4)
    batch = Batch.new(manager, 1)
    batch.append(20 * TOKENS)
    most, open_sources = 0, manager.open_sources

    def counted(fetch: Any) -> Any:
        nonlocal most
        sources = open_sources(fetch)
        most = max(most, manager.warm.inbound.used)
        return sources

    manager.open_sources = counted  # type: ignore[method-assign]
    for _ in range(3):
        batch.append(1)
    assert most == 4
    assert manager.stats.hits_cold > 0
    close_all(manager, [batch])
