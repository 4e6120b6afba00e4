"""`int4`, with the tokens that matter most in 8 bits: an eighth of every head-page.

A token matters here if its key is unlike the page's other keys. Sinks are, and so are the tokens
that queries single out; and what is left has narrower groups. It is known when a page is sealed,
without the queries to come; whoever has measured attention passes that as `scores`. On SmolLM2 the
KL divergence is a third of that of `int4`, and well below that of `int4` with smaller groups at
equal bytes (README, Codecs); the lowest key norms (Devoto et al. 2024) choose about as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tierkv.codecs.affine import Section
from tierkv.codecs.base import CHUNK, LINE, head_pages
from tierkv.codecs.int4 import INT4
from tierkv.kernels.codec import Layout
from tierkv.page import Geometry
from tierkv.units import round_up

SHARE = 8
"""One of so many tokens is kept in 8 bits."""


@dataclass(frozen=True, slots=True)
class Int4Importance:
    """Head-page: K in 4 bits, V in 4 bits, K and V of kept tokens in 8 bits, their indices.

    In whole lines.
    """

    name: str = "int4-importance"
    lossless: bool = False

    def sections(self, geometry: Geometry) -> tuple[list[Section], list[Section], int]:
        """Return K and V in 4 bits, K and V of kept tokens, and the bytes of the indices."""
        few = geometry.page_tokens // SHARE
        every = list(INT4.sections(geometry))
        size = geometry.dtype.itemsize
        kept = [Section(few, s.dim, size, 8, 1, INT4.group(s.dim)) for s in every]
        return every, kept, round_up(few, CHUNK)

    def head_bytes(self, geometry: Geometry) -> int:
        """Bytes of one encoded head-page."""
        every, kept, index_bytes = self.sections(geometry)
        return round_up(sum(section.num_bytes for section in every + kept) + index_bytes, LINE)

    def layout(self, geometry: Geometry) -> Layout:
        """See `Codec`."""
        few, channels = geometry.page_tokens // SHARE, INT4.group(geometry.k_dim)
        return INT4.layout(geometry)._replace(kept=few, kept_k_columns=channels)

    def encode(
        self,
        geometry: Geometry,
        k: torch.Tensor,
        v: torch.Tensor,
        frames: torch.Tensor,
        scores: torch.Tensor | None = None,
    ) -> None:
        """See `Codec`. scores: ``[kv_heads, n, page_tokens]``, how much each token matters."""
        every, kept, _ = self.sections(geometry)
        raw, few = head_pages(self, geometry, frames), geometry.page_tokens // SHARE
        if scores is None:
            scores = unlikeness(k)
        scores = scores.masked_fill(scores.isnan(), torch.inf)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        chosen = order[..., :few].sort(dim=-1).values
        without = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        at = 0
        for section, x in zip(every, (k, v), strict=True):
            section.encode(x, raw[..., at : at + section.num_bytes], without)
            at += section.num_bytes
        for section, x in zip(kept, (k, v), strict=True):
            section.encode(x.gather(-2, _rows(chosen, x)), raw[..., at : at + section.num_bytes])
            at += section.num_bytes
        raw[..., at:] = 0
        raw[..., at : at + few] = chosen.to(torch.uint8)

    def decode(self, geometry: Geometry, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Codec`."""
        every, kept, _ = self.sections(geometry)
        raw, at, found = head_pages(self, geometry, frames), 0, []
        for section in every + kept:
            found.append(section.decode(raw[..., at : at + section.num_bytes], geometry.dtype))
            at += section.num_bytes
        chosen = raw[..., at : at + geometry.page_tokens // SHARE].long()
        for page, rows in zip(found[:2], found[2:], strict=True):
            page.scatter_(-2, _rows(chosen, page), rows)
        return found[0], found[1]

    def error_bound(
        self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """That of `int4`, or that of a kept token: which tokens are kept is not said."""
        found = []
        for section, x in zip(self.sections(geometry)[0], (k, v), strict=True):
            alone = replace(section, bits=8, group_tokens=1, group_dims=INT4.group(x.shape[-1]))
            found.append(torch.maximum(section.error_bound(x), alone.error_bound(x)))
        return found[0], found[1]


def unlikeness(k: torch.Tensor) -> torch.Tensor:
    """Return each key's largest distance, over channels, from the middle of the page's range.

    k: ``[..., tokens, dim]``; returns ``[..., tokens]`` float32. Free of sums, so that a kernel
    finds the same.
    """
    wide = k.float()
    middle = wide.amin(-2, keepdim=True) * 0.5 + wide.amax(-2, keepdim=True) * 0.5
    return (wide - middle).abs().amax(-1)


def _rows(index: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Expand token indices ``[..., n]`` to ``[..., n, dim]``."""
    return index[..., None].expand(*index.shape, like.shape[-1])


INT4_IMPORTANCE = Int4Importance()
