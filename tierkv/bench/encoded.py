"""What a codec makes of the pages of a context, and how far off they are."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tierkv.codecs import CODECS, encoded_bytes
from tierkv.page import Geometry
from tierkv.tiers.frame_format import FrameFormat

CLAIMED = {"int8": "<0.5%", "int8-channel": "<0.5%", "int4": "~2%", "int4-importance": "<1%"}
"""Loss of perplexity that the literature claims, for 8 bits by token, 4 bits by channel, and 4 bits
with important tokens kept better."""

Kept = list[tuple[int, torch.Tensor, torch.Tensor]]
"""Layer, K and V, ``[1, kv_heads, tokens, dim]``, in the order they were appended."""


@dataclass(frozen=True, slots=True)
class Damage:
    """How far a codec's pages are from the original, per layer: relative errors (Frobenius).

    Attributes:
        k, v: one a tiered layer.
    """

    k: list[float]
    v: list[float]

    def worst(self) -> dict[str, float | int]:
        """Return the largest errors and the layers that have them."""
        found: dict[str, float | int] = {}
        for name, errors in (("k", self.k), ("v", self.v)):
            layer = max(range(len(errors)), key=errors.__getitem__)
            found |= {f"{name}_error": errors[layer], f"{name}_error_layer": layer}
        return found


def page_geometry(geometry: Geometry) -> Geometry:
    """Return the geometry pages are evaluated in: a float32 model has pages of bfloat16."""
    return replace(geometry, dtype=torch.bfloat16) if geometry.dtype.itemsize > 2 else geometry


def bytes_per_token(geometry: Geometry, name: str) -> float:
    """Return the bytes of a token's K and V over all tiered layers, with their scales."""
    page = encoded_bytes(CODECS[name], page_geometry(geometry))
    return page * geometry.layers / geometry.page_tokens


@torch.no_grad()
def stored(
    kept: Kept, geometry: Geometry, name: str, residual_tokens: int = 0
) -> tuple[Kept, Damage]:
    """Encode and decode every whole page; the tail and the residual window stay as they are."""
    layout, tokens = FrameFormat(page_geometry(geometry), CODECS[name]), geometry.page_tokens
    found: Kept = []
    damage = Damage([], [])
    for layer in range(geometry.layers):
        own = [(k, v) for at, k, v in kept if at == layer]
        k, v = (torch.cat(parts, dim=2)[0] for parts in zip(*own, strict=True))
        count = max(k.shape[1] // tokens - -(-residual_tokens // tokens), 0)
        whole = [x[:, : count * tokens].unflatten(1, (count, tokens)) for x in (k, v)]
        frames = torch.zeros(count, layout.frame_bytes, dtype=torch.uint8)
        page_k, page_v = (x.to(layout.geometry.dtype) for x in whole)
        layout.write(page_k, page_v, frames)
        pages = []
        for x, decoded, errors in zip(
            whole, layout.pages(frames), (damage.k, damage.v), strict=True
        ):
            wide = decoded.to(x.dtype)
            errors.append(((wide - x).float().norm() / x.float().norm()).item())
            pages.append(wide.flatten(1, 2))
        rest = (x[:, count * tokens :] for x in (k, v))
        k, v = (torch.cat(pair, dim=1)[None] for pair in zip(pages, rest, strict=True))
        found.append((layer, k, v))
    return found, damage
