"""Bookkeeping of free frames: which physical places of a tier are free."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.int64]


class FramePool:
    """Free frames ``start .. stop - 1``, handed out lowest first so that runs stay contiguous."""

    def __init__(self, start: int, stop: int):
        self.capacity = max(stop - start, 0)
        self._next = start  # frames from here on were never used
        self._stop = max(stop, start)
        self._returned: list[int] = []  # heap of frames given back

    @property
    def free(self) -> int:
        """Number of frames that `take` can still hand out."""
        return len(self._returned) + self._stop - self._next

    @property
    def used(self) -> int:
        """Number of frames handed out."""
        return self.capacity - self.free

    def take(self, count: int) -> Frames:
        """Return `count` frames in ascending order. The caller checks `free` first."""
        if count > self.free:
            raise AssertionError(f"take({count}) from a pool with {self.free} free frames")
        old = [heapq.heappop(self._returned) for _ in range(min(count, len(self._returned)))]
        new = range(self._next, self._next + count - len(old))
        self._next += len(new)
        return np.array([*old, *new], dtype=np.int64)

    def give(self, frames: Frames) -> None:
        """Return frames to the pool."""
        for frame in frames.tolist():
            heapq.heappush(self._returned, frame)


def runs(*columns: Frames) -> list[tuple[int, int]]:
    """Return ``[start, stop)`` index ranges over which every column counts up by one.

    Copies between two tiers become one copy per range: neighbours in both move together.
    """
    size = len(columns[0])
    if size == 0:
        return []
    breaks = np.zeros(size - 1, dtype=bool)
    for column in columns:
        breaks |= np.diff(column) != 1
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), size]
    return list(itertools.pairwise(edges))
