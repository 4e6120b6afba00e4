"""Frames that are here, decoded and laid out for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tierkv.tiers.arena import Arena
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.streams import Span, joined

PREPARED_READS = 4096
"""Prepared readings that are kept: few of staging buffers, as most blocks fill one, and one for
every run of frames on the device."""


class LayOut:
    """Decodes blocks of pages into an arena, behind the caller's own work.

    Args:
        buffers: ``[buffers, pages, frame_bytes]``, where warm frames were copied to; None without
            a GPU: all frames are read where they lie.
        arena: what blocks are laid out in.
    """

    def __init__(self, frame_format: FrameFormat, buffers: torch.Tensor | None, arena: Arena):
        self._format, self._buffers, self._arena = frame_format, buffers, arena
        self._reads: dict[tuple[int, int, int], Callable[[], None]] = {}

    def __call__(self, buffer: int, spans: Sequence[Span]) -> None:
        """Decode what was copied into a staging buffer, and what lies on the device."""
        if self._buffers is None:
            for span in spans:
                self._format.read(span.frames, self._arena, span.first)
            return
        for first, stop in joined([span for span in spans if not span.on_gpu]):
            self._prepared(self._buffers[buffer, first:stop], first)()
        for span in spans:
            if span.on_gpu:
                self._prepared(span.frames, span.first)()

    def _prepared(self, frames: torch.Tensor, first: int) -> Callable[[], None]:
        """Return what lays out frames from a slot on; the host is slow to check it anew."""
        key = frames.data_ptr(), len(frames), first
        if key not in self._reads:
            if len(self._reads) == PREPARED_READS:
                self._reads.clear()
            self._reads[key] = self._format.prepare_read(frames, self._arena, first)
        return self._reads[key]
