"""Pages on disk that were nearly chosen, and are read into guest frames before they are."""

from __future__ import annotations

import threading
from collections.abc import Container
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from tierkv.paging.guests import Guests, Keys, in_tables
from tierkv.paging.sequences import Sequences
from tierkv.tiers.frames import Frames

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager

AHEAD_PAGES = 32
"""Pages that are read together at most. Few at once cost the host more each, and the thousands that
were nearly chosen when decoding began then take longer to come: with 8, steps 17 to 64 waited for
16 ms instead of 3 (`benchmarks/faults.py`). A question that comes meanwhile shares the disk."""
MOST_WANTED = 4096
"""Pages that wait for their turn; those reported last come first."""
AHEAD_AGE = 256
"""Steps ago that a page read ahead counts as chosen: in a recording of 1,024 steps it was as likely
to be chosen in the next 16 (1 to 2%) as one that had been chosen 256 to 512 steps before."""
PAUSE = 64
"""Steps without reading ahead, after pages chosen more lately than `AHEAD_AGE` had to make room:
what is chosen fills all frames, and reading more only keeps the disk from bringing that."""
ROOM_SHARE = 16
"""One of so many guest frames is free when a step begins; half of those are left to questions."""


class ReadAhead:
    """Which pages wait, which are being read, and which have come.

    The caller holds `lock` around every method; it is told when a read is over.

    Attributes:
        read, failed: pages that were read, and that could not be.
        under_way: pages that are being read now.
        arrived: pages that have come and that the device does not know yet.
    """

    def __init__(self, manager: PageManager, guests: Guests, lock: threading.Condition):
        assert manager.selective is not None
        self.read = self.failed = 0
        self.under_way: set[int] = set()
        self.arrived: list[int] = []
        self._manager, self._spec = manager, manager.selective.spec
        self._capacity = manager.selective.addresses.shape[1]
        self._guests, self._lock = guests, lock
        self._wanted: dict[int, None] = {}  # in the order of their latest reports
        self._resumes = 0  # step from which on reading ahead pays

    @property
    def waiting(self) -> bool:
        """Whether there are pages to read."""
        return bool(self._wanted)

    def pays(self, step: int) -> bool:
        """Whether what is read ahead takes the place of something worth less."""
        return step >= self._resumes

    def note_left(self, chosen: Frames, step: int) -> bool:
        """Take note of pages that make room; say if they were chosen lately.

        chosen: ``[n]``, when each was chosen, sorted; 0 or less for never.
        """
        lately = len(chosen) > 0 and bool(chosen[-1] > max(step - AHEAD_AGE, 0))
        if lately:
            self._resumes = step + PAUSE
            self._wanted.clear()
        return lately

    def want(self, keys: Keys) -> None:
        """Have pages read, as far as they are not here when their turn comes."""
        latest = dict.fromkeys(keys.tolist())
        for key in latest.keys() & self._wanted.keys():
            del self._wanted[key]
        self._wanted |= latest
        for key in list(self._wanted)[: max(len(self._wanted) - MOST_WANTED, 0)]:
            del self._wanted[key]

    def start(self, sequences: Sequences, step: int) -> bool:
        """Start a read unless one is under way; return whether something was done."""
        manager, guests = self._manager, self._guests
        assert manager.cold is not None
        if not self._wanted or self.under_way:
            return False
        if guests.free <= len(guests.frames) // ROOM_SHARE // 2:
            self._wanted.clear()  # the next step begins with room again
            return False
        tables, most = sequences.blocks, self._spec.max_pages  # may be cut
        keys = np.sort(np.array(self._take(min(AHEAD_PAGES, guests.free)), dtype=np.int64))
        keys = keys[in_tables(tables, keys % self._capacity, most)]
        layers, pages = np.divmod(keys, self._capacity)
        layers, blocks = layers + self._spec.dense_layers, tables[np.divmod(pages, most)]
        cold = manager.directory.cold[blocks, layers]
        keys, layers, blocks = keys[cold], layers[cold], blocks[cold]
        if not len(keys):
            return True
        frames = guests.take(keys, step - AHEAD_AGE)
        named = zip(blocks.tolist(), layers.tolist(), strict=True)
        names = [manager.tiers.key(block, layer) for block, layer in named]
        (read,) = manager.transfer.read_cold(names, frames, settled=True, share=len(names))
        self.under_way.update(keys.tolist())
        read.add_done_callback(lambda done: self._has_come(keys, done))
        return True

    def take_arrived(self) -> Keys:
        """Return the pages of `arrived`, which the caller tells the device of."""
        arrived, self.arrived = np.array(self.arrived, dtype=np.int64), []
        return arrived

    def forget(self, gone: Container[int] | None = None) -> None:
        """Forget the pages that wait, and of those that have come the ones that are `gone`."""
        self._wanted.clear()
        if gone is not None:
            self.arrived = [key for key in self.arrived if key not in gone]

    def _take(self, most: int) -> list[int]:
        """Return up to `most` of the pages that wait and are not here, the latest first."""
        taken: list[int] = []
        while self._wanted and len(taken) < most:
            key, _ = self._wanted.popitem()
            if key not in self._guests:
                taken.append(key)
        return taken

    def _has_come(self, keys: Keys, read: Future[None]) -> None:
        manager = self._manager
        assert manager.cold is not None
        with self._lock:
            self.under_way.difference_update(keys.tolist())
            self._lock.notify_all()
            if read.cancelled() or read.exception() is not None:  # who needs them asks again
                self._guests.drop(keys)
                self.failed += len(keys)
                return
            self.arrived.extend(keys.tolist())
            self.read += len(keys)
            manager.stats.cold_to_warm_bytes += len(keys) * manager.cold.frame_bytes
