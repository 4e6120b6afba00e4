"""Frames in host buffers: many of them in few objects.

A context of 128K tokens is tens of thousands of frames. One Python object for each would make
Python look for garbage in the middle of a read, which stops every thread (0.3 s on a 2-core CPU).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from tierkv.errors import StoreError
from tierkv.tiers.frames import Frames, runs


class FrameViews:
    """Frames of one size, numbered through buffers that hold one or more of them each.

    Args:
        buffers: writable, C-contiguous, a multiple of `frame_bytes` bytes each.
        count: of frames that they must hold.

    Attributes:
        neighbours: ``[frames]``, counts up by one exactly while frames lie behind each other.

    Raises:
        StoreError: the buffers are others.
    """

    def __init__(self, buffers: Sequence[memoryview], frame_bytes: int, count: int):
        for buffer in buffers:
            if not buffer.nbytes or buffer.nbytes % frame_bytes or not buffer.c_contiguous:
                raise StoreError(
                    f"pages must be multiples of {frame_bytes} contiguous bytes, got "
                    f"{buffer.nbytes} (contiguous: {buffer.c_contiguous})"
                )
            if buffer.readonly:
                raise StoreError("cannot read a page into a read-only buffer")
        self.frame_bytes = frame_bytes
        self._buffers = [buffer.cast("B") for buffer in buffers]
        counts = np.array([buffer.nbytes // frame_bytes for buffer in buffers], dtype=np.int64)
        self._firsts: list[int] = (np.cumsum(counts) - counts).tolist()
        if counts.sum() != count:
            raise StoreError(f"{count} keys but buffers for {counts.sum()}")
        buffer_of = np.repeat(np.arange(len(buffers)), counts)
        self.neighbours = np.arange(len(buffer_of)) + buffer_of

    def __len__(self) -> int:
        return len(self.neighbours)

    def view(self, frame: int, count: int = 1) -> memoryview:
        """Return `count` frames, neighbours, as ``[count * frame_bytes]`` uint8."""
        buffer = bisect_right(self._firsts, frame) - 1
        start = (frame - self._firsts[buffer]) * self.frame_bytes
        return self._buffers[buffer][start : start + count * self.frame_bytes]

    def pieces(self, frames: Frames) -> list[memoryview]:
        """Return frames in the order given, as few views as their places allow."""
        ranges = runs(self.neighbours[frames])
        return [self.view(int(frames[start]), stop - start) for start, stop in ranges]

    def addresses(self, frames: Frames) -> Frames:
        """Return where frames begin in memory."""
        bases = [
            np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
            for buffer in self._buffers
        ]
        at = np.searchsorted(self._firsts, frames, side="right") - 1
        return np.array(bases)[at] + (frames - np.array(self._firsts)[at]) * self.frame_bytes

    def each(self) -> Iterator[memoryview]:
        """Yield every frame."""
        for buffer in self._buffers:
            for start in range(0, buffer.nbytes, self.frame_bytes):
                yield buffer[start : start + self.frame_bytes]
