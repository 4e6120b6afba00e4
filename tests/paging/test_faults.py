"""The thread that brings pages on disk to steps that wait for them; the device is a fake one."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ColdReadError, PageFaultError, WarmBudgetError
from tierkv.kernels.fault import (
    ANSWERED,
    ASKED,
    BEAT,
    COUNT,
    FORESEEN,
    GAVE_UP,
    LAYER,
    REFUSED,
    REST,
    ROUND,
    Mailbox,
)  # fmt: skip
from tierkv.paging.ahead import AHEAD_AGE, PAUSE
from tierkv.paging.directory import NOWHERE, PageDirectory
from tierkv.paging.faults import FaultService
from tierkv.paging.guests import Guests
from tierkv.tiers.transfer import Transfer
from tierkv.tiers.warm import WarmTier

LAYERS, PAGES, FRAME, DENSE = 3, 24, 64, 1
ON_DISK = PAGES - 2  # the last ones are still on their way there


def content(layer: int, page: int) -> bytes:
    return bytes([layer + 1, page + 1]) * (FRAME // 2)


class FakeManager(SimpleNamespace):
    """Tiers with what the service needs: warm memory is real, the disk makes up what it holds."""

    def __init__(self, inbound: int, guests: int):
        warm = WarmTier(FRAME, 4, inbound, 2 * LAYERS, guests, pinned=False)
        directory = PageDirectory(LAYERS + DENSE)
        blocks = directory.new_blocks(PAGES)
        directory.cold[blocks[:ON_DISK], DENSE:] = True
        for page in range(ON_DISK, PAGES):
            for layer in range(LAYERS):
                (frame,) = warm.outbound.take(1)
                directory.warm[blocks[page], layer + DENSE] = frame
                warm.payload(int(frame))[:] = content(layer, page)
        self.pool, self.broken = ThreadPoolExecutor(2), set[tuple[int, int]]()
        state = SimpleNamespace(
            spec=SimpleNamespace(max_pages=PAGES, dense_layers=DENSE), steps=0, device="cpu",
            addresses=torch.zeros(LAYERS, PAGES, dtype=torch.int64), forgotten=0, owner=None,
        )  # fmt: skip
        state.forget_frames = lambda: setattr(state, "forgotten", state.forgotten + 1)
        super().__init__(
            warm=warm, directory=directory, selective=state,
            sequences=SimpleNamespace(blocks=blocks[None]),
            tiers=SimpleNamespace(changed=threading.Condition(), key=lambda b, layer: (b, layer)),
            lookahead=SimpleNamespace(cancel=lambda: None), cold=SimpleNamespace(frame_bytes=FRAME),
            stats=SimpleNamespace(cold_to_warm_bytes=0, hot_to_warm_bytes=0, warm_to_hot_bytes=0),
            transfer=SimpleNamespace(
                io_threads=2, min_read_bytes=1, warm=warm, _io_pool=self.pool, _read=self.read,
                finish=lambda: None, wait_frames=lambda frames: None,
            ),
        )  # fmt: skip
        self.transfer.read_cold = partial(Transfer.read_cold, self.transfer)

    def read(self, keys: Any, frames: Any, settled: bool) -> None:
        assert settled
        for (block, layer), frame in zip(keys, frames.tolist(), strict=True):
            payload = self.warm.payload(frame)
            payload[:] = bytes(FRAME)  # until it has come, it is not there
            if (block, layer - DENSE) in self.broken:
                raise ColdReadError(f"block {block} is broken")
            payload[:] = content(layer - DENSE, block)


class FakeDevice:
    """What the kernels of a step do: ask, write the answer into the table, fetch by it."""

    def __init__(self, manager: FakeManager, box: Mailbox):
        self.addresses, self.box, self.number = manager.selective.addresses, box, 0
        self.failed, self.patience = False, 0.3

    def choose(self, layer: int, pages: list[int], rounds: int) -> None:
        """Choose pages of a layer; every one of them must be fetched whole, whatever way."""
        if self.failed:
            return
        missing = [page for page in pages if not self.addresses[layer, page]]
        fetched = set(self.fetch(layer, pages))
        left = len(missing)
        for turn in range(rounds):
            if self.failed or not left:
                break
            left = self.ask(layer, turn, [*missing, missing[0]])
            if self.failed:
                break  # what is fetched from now on is never used
            fetched |= set(self.fetch(layer, missing))
        assert self.failed or (fetched == set(pages) and not left)

    def ask(self, layer: int, turn: int, pages: list[int]) -> int:
        words = self.box.words.numpy()
        self.box.pages.numpy()[: len(pages)] = pages
        words[LAYER], words[ROUND], words[COUNT] = layer, turn, len(pages)
        self.number += 1
        words[ASKED] = self.number
        beat, heard = words[BEAT], time.monotonic()
        while words[ANSWERED] != self.number:
            time.sleep(1e-5)
            if words[BEAT] != beat:
                beat, heard = words[BEAT], time.monotonic()
            if time.monotonic() - heard > self.patience:
                words[GAVE_UP] = self.number
                self.failed = True
                return 0
        if words[REFUSED]:
            self.failed = True
            return 0
        told = self.box.addresses.numpy()[: len(pages)]
        self.addresses[layer, pages] = torch.from_numpy(told.copy())
        return int(words[REST])

    def fetch(self, layer: int, pages: list[int]) -> list[int]:
        there = [page for page in pages if self.addresses[layer, page]]
        for page in there:
            found = ctypes.string_at(int(self.addresses[layer, page]), FRAME)
            assert found == content(layer, page), f"layer {layer} page {page}"
        return there


LOOKUPS = st.lists(
    st.lists(st.integers(0, PAGES - 1), max_size=9, unique=True), min_size=LAYERS, max_size=LAYERS
)
STEPS = st.lists(
    st.tuples(
        LOOKUPS,
        st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, PAGES - 1)), max_size=6),
        st.lists(st.tuples(st.integers(0, ON_DISK - 1), st.integers(0, LAYERS - 1)), max_size=2),
        st.integers(0, PAGES),
    ),
    max_size=6,
)


@given(st.integers(1, 10), st.integers(0, 30), STEPS)
def test_every_page_comes_whole_or_the_step_says_why_not(
    inbound: int, num_guests: int, steps: list[Any]
) -> None:
    """In any order, with any room, read ahead or not, some of them broken, some forgotten."""
    manager = FakeManager(inbound, num_guests)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    device = FakeDevice(manager, box)
    device.patience = 30.0  # the thread may have to wait for a core
    try:
        for number, (lookups, nearly, broken, keep) in enumerate(steps):
            manager.broken, manager.selective.steps = set(broken), number
            device.failed, failed = False, None
            try:
                with service.serving(manager.sequences):
                    for layer, pages in enumerate(lookups):
                        device.choose(layer, pages, -(-PAGES // inbound))
                        box.last_chosen[layer, pages] = number
                    for layer, page in nearly:
                        row = box.foreseen[layer, 0]
                        row[0] = min(int(row[0]) + 1, FORESEEN)
                        row[int(row[0])] = page
            except ColdReadError as error:
                failed = error
            assert (failed is not None) == device.failed
            if failed is not None:
                assert any(page in lookups[layer] for page, layer in broken)
            assert not manager.warm.inbound.used
            if keep < PAGES and number % 2:  # a crop
                service.truncate(keep)
                manager.selective.addresses[:, keep:] = 0
        told = manager.selective.addresses.count_nonzero()
        assert told <= len(service.guests.keys) <= num_guests
        assert service.guests.free == num_guests - len(service.guests.keys)
    finally:
        service.close()
        manager.pool.shutdown()
        manager.warm.close()


def test_a_dead_thread_ends_the_step_and_the_next_step_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = FakeManager(4, 4)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    device = FakeDevice(manager, box)
    with monkeypatch.context() as killed:
        killed.setattr(service, "_run", lambda: None)
        with (
            pytest.raises(PageFaultError, match="the next step starts another"),
            service.serving(manager.sequences),
        ):
            device.choose(0, [1, 2, 3], 9)
    assert device.failed and manager.selective.forgotten == 1
    device.failed = False
    with service.serving(manager.sequences):
        device.choose(0, [1, 2, 3], 9)
    assert service.report()["guests"] == 3
    service.close()


def test_no_room_at_all_is_said() -> None:
    manager = FakeManager(1, 0)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    device = FakeDevice(manager, box)
    taken = manager.warm.inbound.take(1)  # by somebody who does not let go
    with (
        pytest.raises(WarmBudgetError, match="2 pages from disk find no room; raise cpu_budget"),
        service.serving(manager.sequences),
    ):
        device.choose(0, [1, 2], 9)
    manager.warm.inbound.give(taken)
    service.close()


def test_pages_read_ahead_are_not_waited_for() -> None:
    manager = FakeManager(4, 8)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    device = FakeDevice(manager, box)
    with service.serving(manager.sequences):
        device.choose(0, [1, 2], 9)
        box.foreseen[1, 0, :3] = torch.tensor([2, 5, 6])
    deadline = time.monotonic() + 10
    while service.ahead.read < 2 and time.monotonic() < deadline:
        time.sleep(1e-3)
    with service.serving(manager.sequences):
        pass  # tells the device, while this step runs
    with service.serving(manager.sequences):
        device.choose(1, [5, 6], 9)
    counts = service.report()
    assert (counts["questions"], counts["pages_awaited"], counts["pages_ahead"]) == (1, 2, 2)
    service.close()


def test_reports_may_come_while_they_are_read() -> None:
    """numpy refused to list the reports while the device added some, and the thread died of it."""
    manager = FakeManager(4, 8)
    box = Mailbox.allocate(400, PAGES, 4, 1, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    counts, over = box.foreseen.numpy()[:, :, 0], threading.Event()

    def report() -> None:
        while not over.is_set():
            counts[::2] = 1
            counts[::2] = 0

    device = threading.Thread(target=report)
    device.start()
    try:
        for _ in range(300):
            box.take_foreseen()
    finally:
        over.set()
        device.join()
        service.close()


def test_pages_that_have_just_arrived_are_answered_at_once() -> None:
    """A question about pages all of which were read ahead failed: nothing was left to read."""
    manager = FakeManager(4, 8)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    device = FakeDevice(manager, box)
    with service.serving(manager.sequences):
        device.choose(0, [1, 2], 9)
        manager.selective.addresses[0] = 0
        device.choose(0, [1, 2], 9)
        device.choose(1, [ON_DISK, ON_DISK + 1], 9)  # all still in memory
    counts = service.report()
    assert (counts["questions"], counts["pages_awaited"]) == (3, 4)
    service.close()


def test_the_guests_not_chosen_for_longest_leave() -> None:
    guests = Guests(np.arange(10, 14))
    assert guests.take(np.array([7, 8, 9]), 5).tolist() == [10, 11, 12]
    assert guests.take(np.array([1, 2]), 6).tolist() == [13]
    assert guests.find(np.array([8, 2, 1])).tolist() == [11, NOWHERE, 13]
    chosen = {7: 9, 8: 2, 9: 0, 1: 0}
    oldest, when = guests.oldest(3, lambda keys: np.array([chosen[k] for k in keys.tolist()]), {9})
    assert (oldest.tolist(), when.tolist()) == ([8, 1, 7], [5, 6, 9])
    guests.drop(oldest[:2])
    assert (guests.free, sorted(guests.keys.tolist())) == (2, [7, 9])


def test_a_kernel_that_gave_up_does_not_free_what_is_still_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread was stopped for longer than the kernel's patience, and goes on afterwards."""
    manager = FakeManager(4, 0)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    device, fill = FakeDevice(manager, box), service._fill
    used: list[int] = []

    def slow(*arguments: Any) -> None:
        time.sleep(0.8)  # without a beat
        used.append(manager.warm.inbound.used)
        fill(*arguments)

    monkeypatch.setattr(service, "_fill", slow)
    with (
        pytest.raises(PageFaultError, match="had no answer"),
        service.serving(manager.sequences),
    ):
        device.choose(0, [1, 2], 9)
    assert used == [2] and not manager.warm.inbound.used
    service.close()


def test_an_interrupted_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while pages read ahead were told to the device left the step running unanswered.

    The frames that it read from were free for others already.
    """
    manager = FakeManager(4, 0)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    device, held = FakeDevice(manager, box), list[int]()

    def interrupted() -> None:
        raise KeyboardInterrupt

    def finish() -> None:
        device.choose(1, [3, 4], 9)  # what the step still does
        held.append(manager.warm.inbound.used)

    with monkeypatch.context() as patch:
        patch.setattr(manager.transfer, "finish", finish)
        patch.setattr(service, "_tell_arrived", interrupted)
        with pytest.raises(KeyboardInterrupt), service.serving(manager.sequences):
            device.choose(0, [1, 2], 9)
    assert held == [2] and not device.failed
    assert not manager.selective.addresses.any() and not manager.warm.inbound.used
    service.close()


def read_ahead(service: Any, manager: FakeManager, pages: list[int]) -> None:
    """Have pages of layer 0 read ahead by the caller, and wait until they have come."""
    service._sequences = manager.sequences
    service.ahead.want(np.array(pages))
    assert service._read_ahead()
    with service._lock:
        assert service._lock.wait_for(lambda: not service.ahead.under_way, 10)


@pytest.mark.parametrize("readable", [True, False])
def test_a_question_reads_while_a_page_of_it_is_read_ahead(readable: bool) -> None:
    """It waited for reads ahead first. What those fail to read it reads by itself."""
    manager = FakeManager(4, 8)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    device, asked, read = FakeDevice(manager, box), threading.Event(), manager.read
    together: list[bool] = []

    def slow(keys: Any, frames: Any, settled: bool) -> None:
        pages = [block for block, _ in keys]
        if 1 in pages:
            asked.set()
        elif not together:
            together.append(asked.wait(10))
            if not readable:
                raise ColdReadError("not this time")
        read(keys, frames, settled)

    manager.transfer._read = slow
    service._sequences = manager.sequences
    service.ahead.want(np.array([5]))
    assert service._read_ahead()
    with service.serving(manager.sequences):
        device.choose(0, [1, 5], 9)
    assert together == [True] and not device.failed
    assert (service.ahead.failed, service.awaited) == ((0, 1) if readable else (1, 2))
    service.close()


def test_one_free_frame_takes_one_page_read_ahead() -> None:
    """With fewer than 32 guest frames the last one was asked for two pages: that read failed."""
    manager = FakeManager(4, 17)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    service.guests.take(np.arange(PAGES, PAGES + 16), 0)
    read_ahead(service, manager, [5, 7])
    assert (service.ahead.read, service.ahead.failed) == (1, 0) and 7 in service.guests
    service.close()


def test_pages_read_ahead_leave_before_those_chosen_lately() -> None:
    """They counted as chosen when they came, and took the place of pages that had been."""
    manager = FakeManager(4, 8)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    manager.selective.steps = 1000
    read_ahead(service, manager, [5, 6])
    service.guests.take(np.array([7]), 900)
    box.last_chosen[0, 6] = 901  # chosen after all
    oldest, when = service.guests.oldest(3, box.when_chosen, set())
    assert (oldest.tolist(), when.tolist()) == ([5, 7, 6], [1000 - AHEAD_AGE, 900, 901])
    service.close()


@pytest.mark.parametrize(
    ("step", "age", "reads"),
    [(1000, AHEAD_AGE, 1), (1000, AHEAD_AGE - 1, 0), (100, AHEAD_AGE, 1), (100, 99, 0)],
)
def test_nothing_is_read_ahead_while_chosen_pages_have_to_leave(
    step: int, age: int, reads: int
) -> None:
    """Pages read ahead kept the disk busy while every step read again what had just left."""
    manager = FakeManager(4, 16)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    manager.selective.steps = step
    service.guests.take(np.arange(PAGES, PAGES + 16), step - age)
    service.ahead.want(np.array([5]))
    with service.serving(manager.sequences):  # makes room
        box.foreseen[0, 0, :2] = torch.tensor([1, 6])
    deadline = time.monotonic() + (10 if reads else 0.05)
    while not service.ahead.read and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert bool(service.ahead.read) == bool(reads) and service.left == 2
    manager.selective.steps = step + PAUSE - 1
    assert service.ahead.pays(step + PAUSE - 1) == bool(reads) and service.ahead.pays(step + PAUSE)
    service.close()


def test_pages_to_read_ahead_may_be_cut_off_meanwhile() -> None:
    """A crop shortens the block table before it says so: the thread died of an IndexError."""
    manager = FakeManager(4, 8)
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    service: Any = FaultService(manager, box)  # type: ignore[arg-type]
    manager.sequences.blocks = manager.sequences.blocks[:, :6]
    read_ahead(service, manager, [5, 7])
    assert service.ahead.read == 1 and 5 in service.guests and 7 not in service.guests
    service.close()


@pytest.mark.filterwarnings("error")
def test_a_thread_that_has_beaten_for_half_a_day_goes_on() -> None:
    """The count of beats overflowed: a warning, and where that is an error, a dead thread."""
    box = Mailbox.allocate(LAYERS, PAGES, 1, PAGES, torch.device("cpu"))
    box.words[BEAT] = 2**31 - 1
    box.beat()
    assert box.words[BEAT] == 0
