"""Copies of pages on disk in warm memory, for as long as they are chosen: bookkeeping only.

A guest's page is on disk as well, so that leaving is a drop. In selective mode recency decides who
leaves. A page is named by one number, its key: ``layer * capacity + page``, the layer counted among
those that select, the page as in `SelectiveState.addresses`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tierkv.paging.directory import NOWHERE, Blocks
from tierkv.tiers.frames import Frames

Keys = Frames
"""``[n]`` int64; see above."""


def in_tables(tables: Blocks, pages: Keys, most: int) -> npt.NDArray[np.bool_]:
    """Say which pages, ``[n]``, block tables ``[batch, pages]`` have; `most` there is room for."""
    rows, positions = np.divmod(pages, most)
    return (rows < len(tables)) & (positions < tables.shape[1])


class Guests:
    """Which page is in which guest frame. The caller holds a lock around every method.

    Args:
        frames: ``[n]``, the frames there are.
    """

    def __init__(self, frames: Frames):
        self.frames, self._own = frames, len(frames)
        self._keys = np.full(len(frames), NOWHERE, dtype=np.int64)
        self._since = np.zeros(len(frames), dtype=np.int64)
        self._slot: dict[int, int] = {}
        self._free = list(range(len(frames)))[::-1]

    @property
    def free(self) -> int:
        """Frames without a page."""
        return len(self._free)

    @property
    def keys(self) -> Keys:
        """All pages here."""
        return self._keys[self._keys != NOWHERE]

    def __contains__(self, key: int) -> bool:
        return key in self._slot

    def find(self, keys: Keys) -> Frames:
        """Return the frame of each page, `NOWHERE` for those that are not here."""
        slots = [self._slot.get(key, NOWHERE) for key in keys.tolist()]
        return np.array([NOWHERE if s == NOWHERE else self.frames[s] for s in slots], np.int64)

    def take(self, keys: Keys, step: int) -> Frames:
        """Give frames to pages that are not here, as many as are free; return those.

        step: counts as a step in which the pages were chosen.
        """
        slots = [self._free.pop() for _ in range(min(len(keys), len(self._free)))]
        for key, slot in zip(keys.tolist(), slots, strict=False):
            self._slot[key], self._keys[slot], self._since[slot] = slot, key, step
        return self.frames[slots]

    def add(self, frames: Frames) -> None:
        """Have more frames."""
        held = len(self.frames)
        self._keys = np.append(self._keys[:held], np.full(len(frames), NOWHERE))
        self._since = np.append(self._since[:held], np.zeros_like(frames))
        self.frames = np.append(self.frames, frames)
        self._free += range(held, held + len(frames))

    def reset(self) -> None:
        """Have the frames there were at first, all of them free."""
        kept = self._own
        self._free, self._slot = list(range(kept))[::-1], {}
        self._keys = np.full(kept, NOWHERE, dtype=np.int64)
        self.frames, self._since = self.frames[:kept], self._since[:kept]

    def drop(self, keys: Keys) -> None:
        """Free the frames of pages, those that are here."""
        for key in keys.tolist():
            slot = self._slot.pop(key, NOWHERE)
            if slot != NOWHERE:
                self._keys[slot] = NOWHERE
                self._free.append(slot)

    def oldest(
        self, count: int, last_chosen: Callable[[Keys], Frames], stays: set[int]
    ) -> tuple[Keys, Frames]:
        """Return the pages, up to `count`, that were not chosen for longest, and since when.

        Args:
            last_chosen: returns the step in which each page was last chosen.
            stays: pages that are left out.
        """
        slots = np.flatnonzero(self._keys != NOWHERE)
        slots = slots[~np.isin(self._keys[slots], list(stays))]
        keys = self._keys[slots]
        when = np.maximum(last_chosen(keys), self._since[slots])
        first = np.argsort(when, kind="stable")[:count]
        return keys[first], when[first]
