"""The vocabulary of pages: what one holds, and how many bytes it takes.

A page is `page_tokens` consecutive tokens of one sequence in one layer: K and V of every KV
head. Its bytes, in warm and cold, are ``[kv_heads, K: page_tokens x k_dim | V: page_tokens x
v_dim]``, so that a head-page is one contiguous run and a page is one too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierkv.errors import ConfigError
from tierkv.units import round_up

SECTOR = 4096
"""Bytes to which frames are aligned, so that O_DIRECT can read straight into them."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of one model's tiered KV cache.

    Attributes:
        layers: number of layers whose KV is tiered (full-attention layers).
        kv_heads: KV heads per layer.
        k_dim, v_dim: elements per head and token of what is stored as K and as V. They may
            differ (multi-head latent attention stores latents and rotary keys).
        dtype: element type of the stored K and V.
        page_tokens: tokens per page, a power of two from 16 to 256.
    """

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    page_tokens: int = 32

    def __post_init__(self) -> None:
        tokens = self.page_tokens
        if not 16 <= tokens <= 256 or tokens & (tokens - 1):
            raise ConfigError(f"page_tokens must be a power of two from 16 to 256, got {tokens}")
        for name in ("layers", "kv_heads", "k_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"geometry {name} must be at least 1, got {getattr(self, name)}")

    @property
    def head_page_elements(self) -> int:
        """Elements of one head-page: K then V."""
        return self.page_tokens * (self.k_dim + self.v_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.kv_heads * self.head_page_elements * self.dtype.itemsize

    @property
    def frame_bytes(self) -> int:
        """Bytes a page takes in warm memory and on disk: `page_bytes` in whole sectors."""
        return round_up(self.page_bytes, SECTOR)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all tiered layers."""
        return self.layers * self.kv_heads * (self.k_dim + self.v_dim) * self.dtype.itemsize
