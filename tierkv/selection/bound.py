"""Upper bound on a page's scores, from the largest and smallest value of each channel.

Quest (Tang et al., ICML 2024). No key of the page can score above it, so a page whose bound is
low is safely skipped; the opposite does not hold, one outlier per channel makes any page look
good.
"""

from __future__ import annotations

import torch

from tierkv.selection.base import corner_scores


class Bound:
    """Keeps the maximum and the minimum per channel, which every dtype holds exactly."""

    name = "bound"
    parts = 2
    kernel = "score"

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the corners ``[..., (max, min), k_dim]``."""
        return torch.stack((keys.amax(dim=-2), keys.amin(dim=-2)), dim=-2)

    def scores(self, query: torch.Tensor, summaries: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the bounds: at least the score of each key in the page."""
        return corner_scores(query, summaries, scale)
