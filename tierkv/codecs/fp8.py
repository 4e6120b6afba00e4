"""8-bit floats (e4m3) with one scale per head and page, for keys and for values.

The scale maps the largest magnitude to 448, the largest number of e4m3. Three bits of mantissa
leave a relative error of 1/16 an element, ten times what `int8` leaves at the same size; it is here
for hardware that multiplies fp8 directly. A head with an element that is not finite, or beyond
`LIMIT`, decodes to NaN; one of zeros is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierkv.codecs.affine import LIMIT, get, put, round_scale
from tierkv.codecs.base import CHUNK, LINE, head_pages
from tierkv.kernels.codec import Layout
from tierkv.page import Geometry
from tierkv.units import round_up

LARGEST = 448.0
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class FP8:
    """Head-page: codes of K, its scale (float32) in a line, codes of V, its scale in another."""

    name: str = "fp8"
    lossless: bool = False

    def head_bytes(self, geometry: Geometry) -> int:
        """Bytes of one encoded head-page."""
        return sum(self._sizes(geometry)) + 2 * LINE

    def layout(self, geometry: Geometry) -> Layout:
        """See `Codec`."""
        tokens, k_dim, v_dim = geometry.page_tokens, geometry.k_dim, geometry.v_dim
        groups = (k_dim, tokens, k_dim, v_dim, tokens, v_dim)
        return Layout(geometry.dtype, 8, tokens, *groups, floats=True)

    def _sizes(self, geometry: Geometry) -> tuple[int, int]:
        tokens = geometry.page_tokens
        return round_up(tokens * geometry.k_dim, CHUNK), round_up(tokens * geometry.v_dim, CHUNK)

    def encode(
        self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor, frames: torch.Tensor
    ) -> None:
        """See `Codec`."""
        at, raw = 0, head_pages(self, geometry, frames)
        for x, size in zip((k, v), self._sizes(geometry), strict=True):
            scale = _scale(x)
            codes = x.float() / torch.where(scale > 0, scale, 1.0)
            codes = codes.masked_fill_(scale.isnan(), 0.0).clamp_(-LARGEST, LARGEST).to(E4M3)
            put(raw, at, codes.flatten(-2).view(torch.uint8))
            raw[..., at + size : at + size + LINE] = 0
            put(raw, at + size, scale.flatten(-2))
            at += size + LINE

    def decode(self, geometry: Geometry, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codec`."""
        at, raw, pages = 0, head_pages(self, geometry, frames), []
        dims = (geometry.k_dim, geometry.v_dim)
        for dim, size in zip(dims, self._sizes(geometry), strict=True):
            shape = (geometry.page_tokens, dim)
            codes = get(raw, at, geometry.page_tokens * dim, E4M3).float().unflatten(-1, shape)
            x = codes * get(raw, at + size, 1, torch.float32)[..., None]
            most = torch.finfo(geometry.dtype).max
            pages.append(x.clamp(-most, most).to(geometry.dtype))
            at += size + LINE
        return pages[0], pages[1]

    def error_bound(
        self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A sixteenth of the element, or half the smallest step, and the final rounding."""
        bounds = []
        for x in (k, v):
            scale, info = _scale(x), torch.finfo(x.dtype)
            size = x.float().abs()
            step = torch.maximum(size * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-12)
            bounds.append(step + (size + step) * info.eps + info.smallest_normal)
        return bounds[0], bounds[1]


def _scale(x: torch.Tensor) -> torch.Tensor:
    """Return ``[..., 1, 1]`` float32, NaN where a head is not finite.

    With the eight bits of a bfloat16, so that a code times it is exact.
    """
    largest = x.float().abs().amax((-2, -1), keepdim=True)
    scale = round_scale(largest, LARGEST).float()
    return torch.where(largest <= LIMIT, scale, torch.nan)


FP8_CODEC = FP8()
