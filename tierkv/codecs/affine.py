"""Integers of 8 or 4 bits with a scale and a base per group, for K and for V.

``value = code * scale + base``. The base is the group's minimum, exact in the model's element
type; the scale is rounded up to bfloat16, so that the largest code reaches the maximum. A code
times such a scale is exact in float32: fused and separate multiply-adds agree, and kernels give the
same bits as this reference.

Groups are blocks of tokens x channels. Grouping keys by channel and values by token is KIVI's
(Liu et al. 2024, arXiv 2402.02750): a few key channels are outliers for all tokens.

- A group of equal elements has scale 0 and is exact.
- A group with a NaN, an infinity or a magnitude above `LIMIT` decodes to NaN as a whole.
- No step is finer than `FINEST`, so that kernels may multiply by its inverse.
- What decodes beyond the largest number of the element type (float16 only) saturates there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierkv.codecs.base import CHUNK, head_pages
from tierkv.kernels.codec import Layout
from tierkv.page import Geometry
from tierkv.units import round_up

LIMIT = 2.0**126
"""Largest magnitude that is encoded: differences of two such values are finite in float32."""

FINEST = 2.0**-100
"""Smallest scale but 0. The inverse of a smaller one may not be finite in float32."""

SCALE_BYTES = 2
NAN_SCALE = 0x7FC0
"""Bits of the scale of a group that decodes to NaN."""


@dataclass(frozen=True, slots=True)
class Section:
    """K or V of one encoded head-page: codes, then scales, then bases, each in whole chunks.

    Codes lie in the order of the elements ``[tokens, dim]``; of two that share a byte, the first
    has the low bits. Groups are ordered ``[tokens / group_tokens, dim / group_dims]``.
    """

    tokens: int
    dim: int
    itemsize: int
    bits: int
    group_tokens: int
    group_dims: int

    @property
    def groups(self) -> int:
        """Groups of one head-page."""
        return self.tokens // self.group_tokens * (self.dim // self.group_dims)

    @property
    def scales_at(self) -> int:
        """Where the scales begin, in bytes."""
        return round_up(-(-self.tokens * self.dim * self.bits // 8), CHUNK)

    @property
    def bases_at(self) -> int:
        """Where the bases begin, in bytes."""
        return self.scales_at + round_up(self.groups * SCALE_BYTES, CHUNK)

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return self.bases_at + round_up(self.groups * self.itemsize, CHUNK)

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """View ``[..., tokens, dim]`` as ``[..., a, group_tokens, b, group_dims]``."""
        return x.unflatten(-1, (-1, self.group_dims)).unflatten(-3, (-1, self.group_tokens))

    def parameters(
        self, x: torch.Tensor, without: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scales (bfloat16) and bases (float32), ``[..., a, 1, b, 1]``.

        x: ``[..., tokens, dim]`` float32; without: ``[..., tokens]``, tokens to leave out. A group
        of which nothing is left has the scale NaN.
        """
        least = most = x
        if without is not None:
            least = x.masked_fill(without[..., None], torch.inf)
            most = x.masked_fill(without[..., None], -torch.inf)
        # Adding 0 turns -0 into 0: which of the two a minimum finds first is not defined.
        high = self.grouped(most).amax((-3, -1), keepdim=True) + 0.0
        low = self.grouped(least).amin((-3, -1), keepdim=True) + 0.0
        scale = round_scale(high - low, 2**self.bits - 1)
        bad = ~((low >= -LIMIT) & (low <= high) & (high <= LIMIT))
        return scale.masked_fill(bad, torch.nan), low.masked_fill(bad, 0.0)

    def encode(
        self, x: torch.Tensor, out: torch.Tensor, without: torch.Tensor | None = None
    ) -> None:
        """Encode ``[..., tokens, dim]`` into ``[..., num_bytes]`` uint8.

        without: ``[..., tokens]``, tokens that do not count; their codes are 0.
        """
        wide = x.float()
        scale, base = self.parameters(wide, without)
        step = scale.float()
        live = step > 0  # false for NaN too
        codes = (self.grouped(wide) - base) / torch.where(live, step, 1.0)
        codes = codes.round_().nan_to_num_(0.0).clamp_(0, 2**self.bits - 1)
        codes = torch.where(live, codes, 0.0).to(torch.uint8).flatten(-4)
        if without is not None:
            codes.unflatten(-1, x.shape[-2:]).masked_fill_(without[..., None], 0)
        if self.bits == 4:
            codes = codes[..., ::2] | codes[..., 1::2] << 4
        bits = scale.flatten(-4).view(torch.int16)
        bits = bits.masked_fill(scale.flatten(-4).isnan(), NAN_SCALE)
        out[..., : codes.shape[-1]] = codes
        put(out, self.scales_at, bits)
        put(out, self.bases_at, base.flatten(-4).to(x.dtype))

    def decode(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode ``[..., num_bytes]`` uint8 to ``[..., tokens, dim]``."""
        codes = raw[..., : -(-self.tokens * self.dim * self.bits // 8)]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        codes = self.grouped(codes.unflatten(-1, (self.tokens, self.dim)))
        shape = (self.tokens // self.group_tokens, 1, self.dim // self.group_dims, 1)
        scale = get(raw, self.scales_at, self.groups, torch.bfloat16).unflatten(-1, shape)
        base = get(raw, self.bases_at, self.groups, dtype).unflatten(-1, shape)
        x = codes.float() * scale.float() + base.float()
        most = torch.finfo(dtype).max
        return x.clamp(-most, most).to(dtype).flatten(-2).flatten(-3, -2)

    def error_bound(self, x: torch.Tensor) -> torch.Tensor:
        """Half a step, and the rounding of the result to the element type."""
        wide, info = x.float(), torch.finfo(x.dtype)
        scale, _ = self.parameters(wide)
        largest = self.grouped(wide).abs().amax((-3, -1), keepdim=True)
        bound = scale.float() * (0.5 + 2.0**-12) + largest * info.eps + info.smallest_normal
        return bound.expand_as(self.grouped(wide)).flatten(-2).flatten(-3, -2)


@dataclass(frozen=True, slots=True)
class Affine:
    """A codec of two sections.

    Attributes:
        bits: of a code, 8 or 4.
        key_tokens: tokens of a group of keys, by channel; 0 groups keys by token, like values.
        channels: of a group within one token; 0, or a dim that is no multiple, makes one group.
    """

    name: str
    bits: int
    key_tokens: int
    channels: int
    lossless: bool = False

    def sections(self, geometry: Geometry) -> tuple[Section, Section]:
        """Return how K and V of a head-page lie."""
        tokens, size = geometry.page_tokens, geometry.dtype.itemsize
        by_token = [
            Section(tokens, dim, size, self.bits, 1, self.group(dim))
            for dim in (geometry.k_dim, geometry.v_dim)
        ]
        if not self.key_tokens:
            return by_token[0], by_token[1]
        rows = min(self.key_tokens, tokens)
        return Section(tokens, geometry.k_dim, size, self.bits, rows, 1), by_token[1]

    def group(self, dim: int) -> int:
        """Channels of a group that lies within one token."""
        return self.channels if self.channels and dim % self.channels == 0 else dim

    def head_bytes(self, geometry: Geometry) -> int:
        """Bytes of one encoded head-page."""
        return sum(section.num_bytes for section in self.sections(geometry))

    def layout(self, geometry: Geometry) -> Layout:
        """See `Codec`."""
        groups = [(s.dim, s.group_tokens, s.group_dims) for s in self.sections(geometry)]
        return Layout(geometry.dtype, self.bits, geometry.page_tokens, *groups[0], *groups[1])

    def encode(
        self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor, frames: torch.Tensor
    ) -> None:
        """See `Codec`."""
        at, raw = 0, head_pages(self, geometry, frames)
        for section, x in zip(self.sections(geometry), (k, v), strict=True):
            section.encode(x, raw[..., at : at + section.num_bytes])
            at += section.num_bytes

    def decode(self, geometry: Geometry, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codec`."""
        raw = head_pages(self, geometry, frames)
        keys, values = self.sections(geometry)
        k = keys.decode(raw[..., : keys.num_bytes], geometry.dtype)
        return k, values.decode(raw[..., keys.num_bytes :], geometry.dtype)

    def error_bound(
        self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codec`."""
        keys, values = self.sections(geometry)
        return keys.error_bound(k), values.error_bound(v)


def divide(x: torch.Tensor, number: float) -> torch.Tensor:
    """Divide, rounding as IEEE says on every device: by a Python number CUDA multiplies instead."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def round_scale(extent: torch.Tensor, codes: float) -> torch.Tensor:
    """Return bfloat16 scales that spread codes up to `codes` over extents of float32.

    Rounded up, and at least `FINEST`; 0 for an extent of 0, NaN for one that is not finite.
    """
    scale = divide(extent, codes)
    scale = torch.where(extent > 0, scale.clamp(min=FINEST), scale)
    bits = (scale.view(torch.int32) + 0xFFFF) >> 16
    rounded = bits.to(torch.int16).view(torch.bfloat16)
    return torch.where(scale.isfinite(), rounded, torch.nan)


def put(out: torch.Tensor, at: int, values: torch.Tensor) -> None:
    """Write values ``[..., n]`` from byte `at` on; pad the last chunk with zeros."""
    data = values.contiguous().view(torch.uint8)
    stop = at + data.shape[-1]
    out[..., at:stop] = data
    out[..., stop : round_up(stop, CHUNK)] = 0


def get(raw: torch.Tensor, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Read ``[..., count]`` values from byte `at` on."""
    return raw[..., at : at + count * dtype.itemsize].contiguous().view(dtype)
