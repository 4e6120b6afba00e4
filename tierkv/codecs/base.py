"""What a codec is: how a page's bytes are stored in a tier.

A codec is stateless; the geometry says how large a page is. A frame holds ``[kv_heads,
head_page]``, so an encoded head-page is one contiguous run too, and its scales lie beside its
codes. Encoding happens once: what is stored is moved on as it is.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tierkv.kernels.codec import Layout
from tierkv.page import Geometry

CHUNK = 16
"""Bytes a kernel loads at once; every run of an encoded head-page is a multiple of it."""

LINE = 128
"""Bytes that cross the link together; half a line takes nearly as long as a whole one."""


class Codec(Protocol):
    """Encodes and decodes many pages at once. Each implementation is one file."""

    @property
    def name(self) -> str:
        """What the setting `codec` calls it."""

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit."""

    def head_bytes(self, geometry: Geometry) -> int:
        """Bytes of one encoded head-page, a multiple of `CHUNK`."""

    def layout(self, geometry: Geometry) -> Layout | None:
        """Return what kernels are compiled for; None if pages are only copied."""

    def encode(
        self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor, frames: torch.Tensor
    ) -> None:
        """Encode pages into frames on the same device; bytes past `encoded_bytes` are left alone.

        k, v: ``[kv_heads, n, page_tokens, dim]``; frames: ``[n, frame_bytes]`` uint8.
        """

    def decode(self, geometry: Geometry, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode frames ``[n, frame_bytes]`` to K and V, ``[kv_heads, n, page_tokens, dim]``."""

    def error_bound(
        self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest absolute error of each element that decoding may show, float32.

        NaN where the codec promises nothing: groups with elements that are not finite.
        """


REVISIONS = {"fp8": 2, "int4-importance": 2}
"""Of codecs whose layout has changed since pages were first stored with them."""


def identity(codec: Codec) -> str:
    """Return what tells apart stored pages that another codec, or an earlier one, cannot read."""
    revision = REVISIONS.get(codec.name)
    return codec.name if revision is None else f"{codec.name}.{revision}"


def encoded_bytes(codec: Codec, geometry: Geometry) -> int:
    """Bytes of one encoded page, without the padding of its frame."""
    return geometry.kv_heads * codec.head_bytes(geometry)


def head_pages(codec: Codec, geometry: Geometry, frames: torch.Tensor) -> torch.Tensor:
    """View frames ``[n, frame_bytes]`` as encoded head-pages, ``[kv_heads, n, head_bytes]``."""
    size = encoded_bytes(codec, geometry)
    return frames[:, :size].unflatten(1, (geometry.kv_heads, -1)).transpose(0, 1)
