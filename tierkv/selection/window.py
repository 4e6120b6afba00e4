"""No page but the first and the last ones: what selection is worth is measured against this.

The attention pattern of StreamingLLM (Xiao et al., ICLR 2024). Nothing is dropped here: pages
stay in their tiers with their original positions, so another selector can read them later.
"""

from __future__ import annotations

import torch

from tierkv.selection.base import grouped


class Window:
    """Keeps nothing and scores every page -inf, so only sink and recent pages are read."""

    name = "window"
    parts = 0
    kernel = None

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        """Return an empty summary ``[..., 0, k_dim]``."""
        return keys.new_empty((*keys.shape[:-2], 0, keys.shape[-1]))

    def scores(self, query: torch.Tensor, summaries: torch.Tensor, scale: float) -> torch.Tensor:
        """Return -inf for every page."""
        q = grouped(query, summaries.shape[1])
        return q.new_full((*q.shape[:-1], summaries.shape[2]), -torch.inf)
