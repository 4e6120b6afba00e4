"""Copies as streams see them: neighbouring frames in one, and what is still under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class Span(NamedTuple):
    """Neighbouring frames that go to neighbouring staging slots in one copy."""

    first: int
    stop: int
    frames: torch.Tensor

    @property
    def on_gpu(self) -> bool:
        """Whether the frames need not cross the link."""
        return self.frames.is_cuda


class StreamClock:
    """Numbers the work enqueued on one CUDA stream, which finishes in order."""

    def __init__(self, stream: Any):
        self.stream = stream
        self._issued = self._done = 0
        self._events: dict[int, Any] = {}

    def tick(self) -> tuple[int, Any]:
        """Mark everything enqueued so far; return its number and its event."""
        self._issued += 1
        event = self._events[self._issued] = self.stream.record_event()
        return self._issued, event

    def last(self) -> Any:
        """Return the event of the latest work if it may not be over yet, else None."""
        return self.pending(np.array([self._issued]))

    def pending(self, numbers: npt.NDArray[np.int64]) -> Any:
        """Return the event of the latest of `numbers` if it may not be over yet, else None."""
        latest = int(numbers.max()) if len(numbers) else 0
        while self._done < latest and self._events[self._done + 1].query():
            self._done += 1
            del self._events[self._done]
        return self._events[latest] if latest > self._done else None


def joined(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the slot ranges of spans, neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for span in spans:
        if ranges and ranges[-1][1] == span.first:
            ranges[-1] = (ranges[-1][0], span.stop)
        else:
            ranges.append((span.first, span.stop))
    return ranges
