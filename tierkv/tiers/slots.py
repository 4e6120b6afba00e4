"""Which slots of one frame size are free, in use, or still being read.

A slot is named by its *position*, one number over all extent files. Pure bookkeeping: no I/O,
no keys, and no lock of its own; the caller holds one lock around every method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

_ABSENT, _FREE, _USED = 0, 1, 2


class SlotMap:
    """One state per position: absent (no space on disk), free, or used."""

    def __init__(self) -> None:
        self._state = np.zeros(0, np.uint8)
        self._readers: Counter[int] = Counter()  # position -> reads under way, never 0
        self._doomed: set[int] = set()  # released while being read; free after the last read

    @property
    def num_free(self) -> int:
        """Positions that `take` can hand out."""
        return int(np.count_nonzero(self._state == _FREE))

    @property
    def num_used(self) -> int:
        """Positions taken or claimed and not yet free again."""
        return int(np.count_nonzero(self._state == _USED))

    def add(self, first: int, count: int) -> None:
        """Make `count` absent positions from `first` free."""
        missing = first + count - len(self._state)
        if missing > 0:
            self._state = np.concatenate([self._state, np.full(missing, _ABSENT, np.uint8)])
        self._state[first : first + count] = _FREE

    def remove(self, first: int, count: int) -> None:
        """Make `count` free positions from `first` absent."""
        self._state[first : first + count] = _ABSENT

    def used_length(self, first: int, count: int) -> int:
        """Return how many of the `count` positions from `first` the last used one reaches."""
        used = np.flatnonzero(self._state[first : first + count] == _USED)
        return int(used[-1]) + 1 if len(used) else 0

    def claim(self, position: int) -> bool:
        """Mark a free position as used; False if it was not free."""
        if position >= len(self._state) or self._state[position] != _FREE:
            return False
        self._state[position] = _USED
        return True

    def take(self, count: int) -> list[int]:
        """Return `count` free positions, now used, ascending; one run of neighbours if possible.

        Raises:
            ValueError: fewer are free.
        """
        free = np.flatnonzero(self._state == _FREE)
        if not 0 < count <= len(free):
            raise ValueError(f"{count} slots wanted, {len(free)} are free")
        starts = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        start = int(starts[0]) if len(starts) else 0
        taken = free[start : start + count]
        self._state[taken] = _USED
        return [int(position) for position in taken]

    def free_positions(self) -> list[int]:
        """Return the positions that `take` can hand out, ascending."""
        return [int(position) for position in np.flatnonzero(self._state == _FREE)]

    def release(self, positions: Iterable[int]) -> None:
        """Free used positions; one that is being read becomes free when its last read ends."""
        for position in positions:
            if position in self._readers:
                self._doomed.add(position)
            else:
                self._state[position] = _FREE

    def pin(self, positions: Iterable[int]) -> None:
        """Keep positions from being reused until `unpin`; pins count."""
        self._readers.update(positions)

    def unpin(self, positions: Iterable[int]) -> None:
        """End one read of each position."""
        for position in positions:
            self._readers[position] -= 1
            if self._readers[position] == 0:
                del self._readers[position]
                if position in self._doomed:
                    self._doomed.remove(position)
                    self._state[position] = _FREE
