"""The host's side of page faults: a thread that brings the pages a captured step waits for.

A captured step that chooses pages on disk waits for them on the GPU (`tierkv.kernels.fault`). While
it runs, a thread answers: pages go from disk into guest frames, where they stay for as long as they
are chosen, or pass through inbound frames if no guest frame is free; those are taken again when a
later question shows that the fetch is over, because layers run in order. Between questions, and
between steps, the thread reads pages that were nearly chosen. It never calls CUDA, which may be
waiting for the kernel that waits for the thread.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierkv.errors import PageFaultError, WarmBudgetError
from tierkv.kernels.fault import Mailbox, Question
from tierkv.paging.ahead import ROOM_SHARE, ReadAhead
from tierkv.paging.directory import NOWHERE
from tierkv.paging.guests import Guests, Keys, in_tables
from tierkv.paging.lent import LentHomes
from tierkv.paging.sequences import Sequences
from tierkv.tiers.frames import Frames

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager

PATIENCE = 10.0
"""Seconds without a beat of the thread after which a waiting kernel gives up."""
POLL, IDLE_POLL, BEAT = 20e-6, 500e-6, 0.5
"""Seconds between looks at the mailbox in a step, between steps, and beats in a long read."""
TIMER_SLACK = 29
"""Of Linux's prctl: by how many nanoseconds the sleeps of a thread may be prolonged."""
FAULT_THREADS, LEAST_PAGES = 4, 32
"""Threads that read for a question, and how many of its pages one reads at least. One keeps the
disk busy, but checks what has come by itself."""
LEAVING_SHARE = 8
"""One of so many guest frames is made free at once."""
NO_KEYS: Keys = np.zeros(0, dtype=np.int64)


class FaultService:
    """Answers the questions of one manager's captured steps.

    Attributes:
        patience: see `PATIENCE`.
        questions, awaited, seconds: questions answered, pages they waited for, and for how long.
        ahead: reads nearly chosen pages.
        homes: lets guests have warm homes.
        left: guests that made room.

    Args:
        manager: has a store, and layers that select.

    Raises:
        WarmBudgetError: guest frames cannot be pinned.
    """

    patience = PATIENCE

    def __init__(self, manager: PageManager, mailbox: Mailbox):
        assert manager.selective is not None
        self.mailbox = mailbox
        self.questions = self.awaited = self.left = 0
        self.seconds = 0.0
        self.guests = Guests(manager.warm.guests)
        self._manager, self._state = manager, manager.selective
        self._most = self._state.spec.max_pages  # of a sequence; those of the next one follow
        self._capacity = self._state.addresses.shape[1]
        warm = manager.warm
        self._used: Frames = np.arange(warm.inbound_start, warm.stop)
        warm.addresses(self._used)  # pinned now: no thread may do it in a step
        self._copied = (-1, -1)  # what had been copied to and from these frames at the last look
        self._lock = threading.Condition()  # guards all below
        self.homes = LentHomes(manager, self.guests, self._lock)
        self._thread: threading.Thread | None = None
        self._sequences: Sequences | None = None
        self._serving = self._answering = self._noted = self._closed = False
        self._error: Exception | None = None
        self.ahead = ReadAhead(manager, self.guests, self._lock)
        self._passing: Frames = NO_KEYS  # inbound frames of the latest answer
        self._passed: list[Keys] = []  # pages of this step that went through inbound frames

    @contextmanager
    def serving(self, sequences: Sequences) -> Iterator[None]:
        """Answer what the captured step that the block enqueues asks; return when it is over.

        Raises:
            ColdReadError, WarmBudgetError: a page could not be brought; the step has failed, its
                results mean nothing, and the reuse cache is empty.
            PageFaultError: the thread did not answer; likewise.
        """
        self._prepare()
        with self._lock:
            self._sequences, self._serving, self._error = sequences, True, None
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="tierkv-faults", daemon=True)
                self._thread.start()
            self._lock.notify_all()
        try:
            yield
            with self._lock:  # the caller waits for the step; between steps it is in a hurry
                self._noted = self.ahead.pays(self._state.steps)
        finally:
            try:
                self._tell_arrived()  # while the step runs; holds from the next one on
            finally:
                failed = self._end_step()
        if failed:
            raise self._error or PageFaultError(
                f"a captured step asked for pages on disk and had no answer for "
                f"{self.patience:g} s: the thread that reads them has died or hangs; nothing was "
                f"appended, and the next step starts another"
            )

    def welcome(self, batch: int, position: int) -> Frames | None:
        """Take guest frames, ``[layers * batch]``, for pages that are sealed; None if too few.

        The caller, between steps, fills them and tells the device of them.
        """
        layers = np.arange(len(self._state.addresses))[:, None]
        keys = layers * self._capacity + np.arange(batch) * self._most + position
        with self._lock:
            if self.guests.free < keys.size:
                return None
            return self.guests.take(keys.reshape(-1), self._state.steps)

    def truncate(self, pages: int) -> None:
        """Forget pages from position `pages` on. No step is running."""
        with self._lock:
            self._noted = False
            self.mailbox.take_foreseen()
            self.ahead.forget()
            self._lock.wait_for(lambda: not self.ahead.under_way)
            keys = self.guests.keys
            gone = keys[keys % self._capacity % self._most >= pages]
            self.guests.drop(gone)
            self.ahead.forget(set(gone.tolist()))
        if not pages:
            self.homes.give_back(for_good=False)

    def recover(self) -> None:
        """Finish what an interrupt kept the last step from. No step is running."""
        if self._passed or len(self._passing):
            self._settle()

    def reclaim_homes(self) -> bool:
        """Make homes of lent frames again, between two steps; say if there were any."""
        self.homes.take_over(self._forget)  # or what was written for them stays on disk for nothing
        if not len(self.homes.frames):
            return False
        with self._lock:
            self._forget(self.guests.keys)
        self.truncate(0)
        self.homes.give_back(for_good=True)
        return True

    def report(self) -> dict[str, Any]:
        """Return the counters as plain JSON types."""
        return {
            "questions": self.questions, "pages_awaited": self.awaited,
            "seconds_awaited": self.seconds, "pages_ahead": self.ahead.read,
            "pages_ahead_failed": self.ahead.failed, "pages_left": self.left,
            "guests": len(self.guests.keys), "guest_frames": len(self.guests.frames),
            "homes_lent": len(self.homes.frames),
        }  # fmt: skip

    def close(self) -> None:
        """End the thread and wait for its reads."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            self._lock.wait_for(lambda: not self.ahead.under_way)

    # -- between steps, on the caller's thread -----------------------------------------------

    def _prepare(self) -> None:
        """Make room for pages, and see that nothing else uses their frames."""
        manager = self._manager
        copied = manager.stats.hot_to_warm_bytes, manager.stats.warm_to_hot_bytes
        if copied != self._copied:
            manager.lookahead.cancel()  # of exact layers; it may hold inbound frames
            manager.transfer.wait_frames(np.append(self._used, self.homes.frames))
            self._copied = copied
        self.homes.take_over(self._forget)
        if self.guests.free < len(self.guests.frames) // ROOM_SHARE:
            self._make_room()

    def _make_room(self) -> None:
        """Let guests leave; homes are to be lent if some were chosen lately."""
        most = len(self.guests.frames) // LEAVING_SHARE
        with self._lock:
            stays = {*self.ahead.under_way, *self.ahead.arrived}
            leaving, chosen = self.guests.oldest(most, self.mailbox.when_chosen, stays)
            lately = self.ahead.note_left(chosen, self._state.steps)
        if lately:
            self.homes.ask(self.mailbox.last_chosen, int(chosen[-1]))
        self._forget(leaving)  # first: an interrupt may come before they are gone
        with self._lock:
            self.guests.drop(leaving)
            self.left += len(leaving)

    def _forget(self, keys: Keys) -> None:
        """Make the device forget where pages are."""
        if len(keys):
            self._tell(keys, None)

    def _tell_arrived(self) -> None:
        """Tell the device of pages that were read ahead."""
        with self._lock:
            arrived = self.ahead.take_arrived()
            frames = self.guests.find(arrived)
        if len(arrived):
            self._tell(arrived, frames)

    def _end_step(self) -> bool:
        """Wait for the step, then undo what was for it alone; say whether it failed."""
        assert self._thread is not None
        try:
            self._manager.transfer.finish()
        finally:
            with self._lock:
                self._serving = False
                while self._answering and self._thread.is_alive():  # the kernel gave up first
                    self._lock.wait(BEAT)
            self._settle()
            failed = self.mailbox.failed
            if failed:
                self._state.forget_frames()
                self.mailbox.reset()
        return failed

    def _settle(self) -> None:
        """Make the device forget pages that only passed through, then free their frames."""
        self._forget(np.concatenate([NO_KEYS, *self._passed]))
        with self._lock:
            self._passed.clear()
            self._release_passing()

    def _tell(self, keys: Keys, frames: Frames | None) -> None:
        """Write the addresses of pages to the device: those of frames, or none."""
        addresses = np.zeros_like(keys) if frames is None else self._manager.warm.addresses(frames)
        index, values = (
            torch.from_numpy(part).to(self._state.device, non_blocking=True)  # copied on return
            for part in (keys, addresses)
        )
        self._state.addresses.view(-1).index_put_((index,), values)

    # -- on the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(TIMER_SLACK, 1000, 0, 0, 0)
        while True:
            with self._lock:
                self._lock.wait_for(
                    lambda: self._closed or self._serving or self._noted or self.ahead.waiting
                )
                if self._closed:
                    return
                serving, noted = self._serving, self._noted
                self.mailbox.beat()
                question = self.mailbox.question() if serving else None
                self._answering = question is not None
            if question is not None:
                self._answer(question)
            elif noted:
                self._want()
            elif not self._read_ahead():
                time.sleep(POLL if serving else IDLE_POLL)

    def _want(self) -> None:
        """Have pages read ahead that the steps so far have nearly chosen."""
        with self._lock:
            if not self._noted:
                return
            self._noted = False
            layers, pages = self.mailbox.take_foreseen()
            assert self._sequences is not None
            there = in_tables(self._sequences.blocks, pages, self._most)
            self.ahead.want(layers[there] * self._capacity + pages[there])

    def _answer(self, question: Question) -> None:
        start = time.perf_counter()
        try:
            addresses, rest = self._bring(question)
        except Exception as error:  # whatever it is, the step that waits raises it
            self._error = error
            self.mailbox.refuse(question)
        else:
            self.mailbox.answer(question, addresses, rest)
        with self._lock:
            self._answering = False
            self.questions += 1
            self.seconds += time.perf_counter() - start
            self._lock.notify_all()

    def _bring(self, question: Question) -> tuple[Frames, int]:
        """Bring the pages of a question into frames, as many as there is room for.

        Returns their addresses, ``[n]`` as asked, and how many different pages are left.
        """
        pages, places = np.unique(question.pages, return_inverse=True)
        keys = question.layer * self._capacity + pages
        with self._lock:
            self._release_passing()  # what used those has been fetched
            coming = np.array([key in self.ahead.under_way for key in keys.tolist()])
        here, came, left = np.full(len(keys), NOWHERE), 0, 0
        for part in np.flatnonzero(~coming), np.flatnonzero(coming):  # what is on its way is last
            if not len(part):
                continue
            here[part], part_came, part_left = self._bring_part(keys[part])
            came, left = came + part_came, left + part_left
        if left and not came:
            raise WarmBudgetError(f"{left} pages from disk find no room; raise cpu_budget")
        self.awaited += came  # by this thread only
        addresses = np.zeros_like(keys)
        there = here != NOWHERE
        addresses[there] = self._manager.warm.addresses(here[there])
        return addresses[places], left

    def _bring_part(self, keys: Keys) -> tuple[Frames, int, int]:
        """Bring pages of one layer, after reads ahead that are under way for any of them.

        Returns the frame of each, and how many were brought and how many are left.
        """
        asked = keys.tolist()
        with self._lock:
            while not self._lock.wait_for(lambda: self.ahead.under_way.isdisjoint(asked), BEAT):
                self.mailbox.beat()
            here = self.guests.find(keys)
            over = np.isin(keys, np.concatenate([NO_KEYS, *self._passed]))
            new = np.flatnonzero((here == NOWHERE) & ~over)
            kept = self.guests.take(keys[new], self._state.steps)
            with self._manager.tiers.changed:
                inbound = self._manager.warm.inbound
                passing = inbound.take(min(len(new) - len(kept), inbound.free))
            self._passing = np.concatenate([self._passing, passing])
            coming = new[: len(kept) + len(passing)]
            if len(passing):
                self._passed.append(keys[coming[len(kept) :]])
        here[coming] = np.concatenate([kept, passing])
        try:
            if len(coming):  # or all were read ahead, and the device does not know yet
                self._fill(keys[coming], here[coming])
        except BaseException:
            with self._lock:
                self.guests.drop(keys[coming[: len(kept)]])
            raise
        return here, len(coming), len(new) - len(coming)

    def _fill(self, keys: Keys, frames: Frames) -> None:
        """Read pages of one layer into frames; those on their way to disk are still in memory."""
        manager, sequences = self._manager, self._sequences
        assert sequences is not None and manager.cold is not None
        layer = int(keys[0]) // self._capacity + self._state.spec.dense_layers
        blocks = sequences.blocks[np.divmod(keys % self._capacity, self._most)]
        with manager.tiers.changed:
            warm = manager.directory.warm[blocks, layer]
            for at in np.flatnonzero(warm != NOWHERE).tolist():
                source, target = int(warm[at]), int(frames[at])
                manager.warm.payload(target)[:] = manager.warm.payload(source)
        absent = np.flatnonzero(warm == NOWHERE)
        names = [manager.tiers.key(block, layer) for block in blocks[absent].tolist()]
        share = max(-(-len(names) // FAULT_THREADS), LEAST_PAGES)
        reads = manager.transfer.read_cold(names, frames[absent], settled=True, share=share)
        while wait(reads, timeout=BEAT).not_done:
            self.mailbox.beat()
        for read in reads:
            read.result()
        with self._lock:
            manager.stats.cold_to_warm_bytes += len(names) * manager.cold.frame_bytes

    def _release_passing(self) -> None:
        """Free the inbound frames of the latest answer. Lock held."""
        if len(self._passing):
            with self._manager.tiers.changed:
                frames, self._passing = self._passing, NO_KEYS  # first: none is given twice
                self._manager.warm.inbound.give(frames)
                self._manager.tiers.changed.notify_all()

    def _read_ahead(self) -> bool:
        """Start reading nearly chosen pages, if none are being read; say if it did."""
        assert self._sequences is not None
        with self._lock:
            return self.ahead.start(self._sequences, self._state.steps)
