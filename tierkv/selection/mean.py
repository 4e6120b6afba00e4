"""The mean key of a page: half the summary of `cuboid`, and blind to what the mean hides.

The landmarks of ShadowKV (ICML 2025), and of block-sparse attention before it. By Jensen's
inequality ``page_tokens * exp(q . mean)`` never exceeds the page's true weight, so a page with
one matching key among many others is underrated.
"""

from __future__ import annotations

import torch

from tierkv.selection.base import grouped


class Mean:
    """Keeps the mean key."""

    name = "mean"
    parts = 1
    kernel = "score"

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the mean keys ``[..., 1, k_dim]``."""
        return keys.float().mean(dim=-2, keepdim=True).to(keys.dtype)

    def scores(self, query: torch.Tensor, summaries: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the scores of the mean keys."""
        means = summaries.float().squeeze(-2)
        return torch.matmul(grouped(query, means.shape[1]), means.transpose(-1, -2)) * scale
