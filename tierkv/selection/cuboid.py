"""The default selector: a box around a page's keys, shrunk to their mean distance from its centre.

The "cuboid-mean" digest of ArkVale (NeurIPS 2024). A box that holds every key (`bound`) is blown
up by single outliers; this one is not an upper bound and ranks pages better.
"""

from __future__ import annotations

import torch

from tierkv.selection.base import corner_scores


class Cuboid:
    """Centre c = (max + min) / 2 and radius r = mean abs(key - c) per channel; keeps c+r, c-r."""

    name = "cuboid"
    parts = 2
    kernel = "score"

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the corners ``[..., (c + r, c - r), k_dim]``."""
        wide = keys.float()
        centre = (wide.amax(dim=-2) + wide.amin(dim=-2)) / 2
        radius = (wide - centre.unsqueeze(-2)).abs().mean(dim=-2)
        return torch.stack((centre + radius, centre - radius), dim=-2).to(keys.dtype)

    def scores(self, query: torch.Tensor, summaries: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the scores of the better corner."""
        return corner_scores(query, summaries, scale)
