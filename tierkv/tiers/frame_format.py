"""How pages lie in frames, in any tier: encoded by a codec, in whole sectors."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tierkv.codecs import RAW, Codec, encoded_bytes
from tierkv.errors import ConfigError
from tierkv.kernels import codec as kernels
from tierkv.kernels import gather
from tierkv.kernels.build import Launch, available
from tierkv.kernels.decode import PagedKV
from tierkv.kernels.encoded import EncodedKV, reads
from tierkv.kernels.gather import Fetches
from tierkv.page import SECTOR, Geometry
from tierkv.tiers.arena import Arena
from tierkv.units import round_up

ROW = 512
"""Bytes to which frames are aligned at least: transfers over the link are whole ones."""


class FrameFormat:
    """Encodes pages into frames and decodes frames into an arena.

    Frames lie in memory of any device. What runs on a GPU is enqueued on the caller's stream.

    Attributes:
        page_bytes: bytes of one encoded page, what crosses the link.
        frame_bytes: bytes of its frame: whole sectors, or for encoded pages that never go to disk
            a multiple of `ROW`, as little padding as that allows.
    """

    def __init__(self, geometry: Geometry, codec: Codec = RAW, *, on_disk: bool = True):
        self.geometry, self.codec = geometry, codec
        self.page_bytes = encoded_bytes(codec, geometry)
        whole = SECTOR if on_disk or codec.lossless else ROW
        self.frame_bytes = round_up(self.page_bytes, whole)
        self._layout = codec.layout(geometry)

    def write(self, k: torch.Tensor, v: torch.Tensor, frames: torch.Tensor) -> None:
        """Encode pages. k, v: ``[kv_heads, n, page_tokens, dim]``; frames: ``[n, frame_bytes]``."""
        k, v = k.to(self.geometry.dtype), v.to(self.geometry.dtype)
        if self._layout is None or not self._on_gpu(frames):
            self.codec.encode(self.geometry, k, v, frames)
            return
        k, v = (x if kernels.whole_chunks(x) else x.contiguous() for x in (k, v))
        kernels.prepare_encode(self._layout, k, v, frames).run()

    def pages(self, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode frames ``[n, frame_bytes]`` to ``[kv_heads, n, page_tokens, dim]``.

        With the raw codec they are views.
        """
        return self.codec.decode(self.geometry, frames)

    def read(self, frames: torch.Tensor, arena: Arena, first: int) -> None:
        """Decode frames ``[n, frame_bytes]`` into an arena from frame `first` on."""
        self.prepare_read(frames, arena, first)()

    def prepare_read(self, frames: torch.Tensor, arena: Arena, first: int) -> Callable[[], None]:
        """Return what decodes frames into an arena, as often as it is called."""
        stop = first + len(frames)
        into = arena.k_frames[:, first:stop], arena.v_frames[:, first:stop]
        if self._layout is not None and self._on_gpu(frames):
            return kernels.prepare_decode(self._layout, frames, PagedKV(*into)).run

        def read() -> None:
            for frame, page in zip(into, self.pages(frames), strict=True):
                frame.copy_(page)

        return read

    def _on_gpu(self, frames: torch.Tensor) -> bool:
        """Whether our kernels encode and decode these frames; else the reference does."""
        if frames.device.type != "cuda" or self._layout is None:
            return False
        return self._layout.supported and bool(available())

    def prepare_fetch(self, addresses: torch.Tensor, fetches: Fetches, pages: PagedKV) -> Launch:
        """Prepare a fetch of head-pages from pinned frames; see `tierkv.kernels.gather`."""
        if self._layout is None:
            return gather.prepare_fetch(addresses, fetches, pages)
        return kernels.prepare_fetch(self._layout, addresses, fetches, pages)

    def attended(self, frames: torch.Tensor) -> EncodedKV | None:
        """Return frames on the device as decode attention reads them; None if it cannot."""
        if self._layout is None or not reads(self._layout):
            return None
        return EncodedKV(self._layout, self.geometry.kv_heads, frames)

    def check_fetch(self) -> None:
        """Check that a kernel fetches single head-pages.

        Raises:
            ConfigError: none decodes this codec at this geometry.
        """
        if self._layout is not None and not self._layout.supported:
            g = self.geometry
            raise ConfigError(
                f"codec: attention='selective' on a GPU and captured steps cannot fetch "
                f"{self.codec.name!r} pages of {g.k_dim} and {g.v_dim} {g.dtype}; use 'raw'"
            )

    def select(
        self, frames: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Decode some of many frames: K and V pages, and where among them frame ``index[i]`` is."""
        if self.codec.lossless:
            return *self.pages(frames), index
        distinct, places = index.unique(return_inverse=True)
        return *self.pages(frames[distinct]), places
