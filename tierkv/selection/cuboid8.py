"""`cuboid` in 8 bits: half its memory, and half the bytes that scoring reads.

Keeps centre and radius instead of two corners: ``q . c + |q| . r`` is the score of the better
corner too, and radii are small. Channels differ in size by orders of magnitude, so every eight have
steps of their own, powers of two.
"""

from __future__ import annotations

import torch

from tierkv.errors import ConfigError
from tierkv.selection.base import grouped

CHANNELS = 8
"""Channels that share a step; their centres and radii are 16 bytes."""
LEVELS = 127
LEAST_EXPONENT, MOST_EXPONENT = -11, 4
"""Steps are 2 ** -11 to 2 ** 4: centres up to 2,032, with an error of 2 ** -12 at least."""


class Cuboid8:
    """Keeps of eight channels 8 bytes of centres, in steps above -128, and 8 of radii, in steps.

    A radius has 7 bits. The highest bits of its eight bytes are two numbers of four bits, lowest
    first: the exponents of the centres' and the radii's step, above `LEAST_EXPONENT`.
    """

    name = "cuboid8"
    parts = 1
    kernel = "score_bytes"

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        """Return ``[..., 1, k_dim]``, bytes seen as elements; float32 has twice the room needed.

        Raises:
            ConfigError: a row has no room for the bytes, which come by eight channels.
        """
        row, needed = keys.shape[-1] * keys.itemsize, -(-keys.shape[-1] // CHANNELS) * 2 * CHANNELS
        if needed > row:
            raise ConfigError(
                f"selector 'cuboid8' keeps {needed} bytes of {keys.shape[-1]} channels, which take "
                f"{row} in {keys.dtype}: use 'cuboid', or head dims in multiples of {CHANNELS}"
            )
        wide = keys.float()
        centre = (wide.amax(dim=-2) + wide.amin(dim=-2)) / 2
        radius = (wide - centre.unsqueeze(-2)).abs().mean(dim=-2)
        centres, radii = (_in_eights(values) for values in (centre, radius))
        centre_exponent = _exponent(centres)
        radius_exponent = _exponent(radii)
        low = torch.round(torch.ldexp(centres, -centre_exponent)).clamp(-128, 127).int() + 128
        high = torch.round(torch.ldexp(radii, -radius_exponent)).clamp(0, LEVELS).int()
        exponents = (centre_exponent - LEAST_EXPONENT) | (radius_exponent - LEAST_EXPONENT) << 4
        high |= (exponents >> torch.arange(CHANNELS, device=keys.device) & 1) << 7
        packed = torch.cat((low, high), dim=-1).to(torch.uint8).flatten(-2)
        packed = torch.nn.functional.pad(packed, (0, row - packed.shape[-1]))
        return packed.view(keys.dtype).unsqueeze(-2)

    def scores(self, query: torch.Tensor, summaries: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the scores of the better corner."""
        k_dim = summaries.shape[-1]
        stored = summaries.squeeze(-2).contiguous().view(torch.uint8)
        eights = -(-k_dim // CHANNELS)
        packed = stored[..., : eights * 2 * CHANNELS].unflatten(-1, (eights, 2, CHANNELS))
        low, high = packed.int().unbind(-2)
        bits = ((high >> 7) << torch.arange(CHANNELS, device=stored.device)).sum(-1, keepdim=True)
        steps = (torch.exp2((bits >> at & 15).float() + LEAST_EXPONENT) for at in (0, 4))
        signed = (low - 128, high & 127)
        centre, radius = (
            (number.float() * step).flatten(-2)[..., :k_dim]
            for number, step in zip(signed, steps, strict=True)
        )
        q = grouped(query, summaries.shape[1])
        both = torch.cat((q, q.abs()), dim=-1)
        return torch.matmul(both, torch.cat((centre, radius), -1).transpose(-1, -2)) * scale


def _in_eights(values: torch.Tensor) -> torch.Tensor:
    """Return ``[..., k_dim]`` as ``[..., eights, 8]``, zeros at the end."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % CHANNELS))
    return padded.unflatten(-1, (-1, CHANNELS))


def _exponent(values: torch.Tensor) -> torch.Tensor:
    """Return exponents of steps by which all eight values are within `LEVELS`."""
    largest = values.abs().amax(dim=-1, keepdim=True)
    return torch.frexp(largest / LEVELS).exponent.clamp(LEAST_EXPONENT, MOST_EXPONENT)
