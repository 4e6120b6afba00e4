"""Copies of warm frames into staging buffers as part of a captured step, in a fixed order.

Frames on the device are not copied: they are decoded where they lie.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tierkv.tiers.arena import Arena
from tierkv.tiers.streams import Span


class StagedCopies:
    """Blocks of pages that every replay of a step brings up and reads in the same order.

    They are copied one after another on a stream of their own, as far ahead of their reader as
    there are buffers. Between `begin` and `end` the reader asks for them one by one. On a CPU
    device nothing is copied ahead.

    Args:
        stream: what copies are enqueued on; None without a GPU.
        buffers: ``[buffers, pages, frame_bytes]`` uint8 on the device.
        lay_out: ``lay_out(buffer, block)`` decodes what a buffer holds, and what lies on the
            device, into the arena.
        blocks: the copies of each block.
        arena: where blocks are read, one at a time.
    """

    def __init__(
        self,
        stream: Any,
        buffers: torch.Tensor,
        lay_out: Callable[[int, Sequence[Span]], None],
        blocks: Sequence[Sequence[Span]],
        arena: Arena,
    ):
        self._stream, self._buffers, self._lay_out = stream, buffers, lay_out
        self._blocks, self.arena = blocks, arena
        self._copied: deque[Any] = deque()  # of the blocks under way
        self._read: list[Any] = []  # of each buffer
        self._at = 0  # next block to be read

    def begin(self) -> None:
        """Start the first copies, behind what the caller's stream has so far."""
        self._at = 0
        self._copied.clear()
        self._read = [None] * len(self._buffers)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            for _ in range(min(len(self._buffers), len(self._blocks))):
                self._copy()

    def next(self) -> Arena:
        """Return the arena with the next block in it, valid until the one after is asked for."""
        block, buffer = self._blocks[self._at], self._at % len(self._buffers)
        self._at += 1
        if self._stream is None:
            self._lay_out(buffer, block)
            return self.arena
        reader = torch.cuda.current_stream(self._stream.device)
        reader.wait_event(self._copied.popleft())
        self._lay_out(buffer, block)
        self._read[buffer] = reader.record_event()
        if self._at + len(self._copied) < len(self._blocks):
            self._copy()
        return self.arena

    def end(self) -> None:
        """Make the caller's stream wait for all copies; every block has been read."""
        assert self._at == len(self._blocks), f"{len(self._blocks) - self._at} blocks are unread"
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _copy(self) -> None:
        at = self._at + len(self._copied)
        buffer = at % len(self._buffers)
        if self._read[buffer] is not None:
            self._stream.wait_event(self._read[buffer])
        with torch.cuda.stream(self._stream):
            for span in self._blocks[at]:
                if not span.on_gpu:
                    raw = self._buffers[buffer, span.first : span.stop]
                    raw.copy_(span.frames, non_blocking=True)
            self._copied.append(self._stream.record_event())
