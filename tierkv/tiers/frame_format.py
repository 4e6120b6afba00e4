"""How pages lie in frames, in warm memory and on disk: encoded by a codec, in whole sectors."""

from __future__ import annotations

import torch

from tierkv.codecs import RAW, Codec, encoded_bytes
from tierkv.page import SECTOR, Geometry
from tierkv.tiers.arena import Arena
from tierkv.units import round_up


class FrameFormat:
    """Encodes pages into frames and decodes frames into an arena.

    Frames lie in memory of any device. What runs on a GPU is enqueued on the caller's stream.

    Attributes:
        page_bytes: bytes of one encoded page, what crosses the link.
        frame_bytes: bytes of its frame, a multiple of `SECTOR`.
    """

    def __init__(self, geometry: Geometry, codec: Codec = RAW):
        self.geometry, self.codec = geometry, codec
        self.page_bytes = encoded_bytes(codec, geometry)
        self.frame_bytes = round_up(self.page_bytes, SECTOR)

    def write(self, k: torch.Tensor, v: torch.Tensor, frames: torch.Tensor) -> None:
        """Encode pages. k, v: ``[kv_heads, n, page_tokens, dim]``; frames: ``[n, frame_bytes]``."""
        self.codec.encode(self.geometry, k, v, frames)

    def pages(self, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode frames ``[n, frame_bytes]`` to ``[kv_heads, n, page_tokens, dim]``.

        With the raw codec they are views.
        """
        return self.codec.decode(self.geometry, frames)

    def read(self, frames: torch.Tensor, arena: Arena, first: int) -> None:
        """Decode frames ``[n, frame_bytes]`` into an arena from frame `first` on."""
        k, v = self.pages(frames)
        stop = first + len(frames)
        arena.k_frames[:, first:stop].copy_(k)
        arena.v_frames[:, first:stop].copy_(v)

    def select(
        self, frames: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Decode some of many frames: K and V pages, and where among them frame ``index[i]`` is."""
        if self.codec.lossless:
            return *self.pages(frames), index
        distinct, places = index.unique(return_inverse=True)
        return *self.pages(frames[distinct]), places
