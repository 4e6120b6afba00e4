"""The page as it is: ``[kv_heads, K | V]``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierkv.codecs.base import head_pages
from tierkv.page import Geometry


@dataclass(frozen=True, slots=True)
class Raw:
    """No encoding at all."""

    name: str = "raw"
    lossless: bool = True

    def head_bytes(self, geometry: Geometry) -> int:
        """Bytes of one head-page."""
        return geometry.head_page_elements * geometry.dtype.itemsize

    def layout(self, geometry: Geometry) -> None:
        """Nothing to decode."""

    def encode(
        self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor, frames: torch.Tensor
    ) -> None:
        """See `Codec`."""
        raw_k, raw_v = self.decode(geometry, frames)
        raw_k.copy_(k)
        raw_v.copy_(v)

    def decode(self, geometry: Geometry, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View frames as K and V pages; nothing is copied."""
        heads = head_pages(self, geometry, frames).view(geometry.dtype)
        split = geometry.page_tokens * geometry.k_dim
        k = heads[..., :split].unflatten(-1, (geometry.page_tokens, geometry.k_dim))
        return k, heads[..., split:].unflatten(-1, (geometry.page_tokens, geometry.v_dim))

    def error_bound(
        self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """No error."""
        return torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)


RAW = Raw()
