"""The true mass of every page, from all its keys: the limit for selectors, not one to decode with.

It reads every key, which is what selection exists to avoid; evaluation only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierkv.selection.base import grouped


@dataclass(frozen=True, slots=True)
class Oracle:
    """Its summary of a page is the page's keys.

    Attributes:
        page_tokens: tokens per page, and so vectors per summary.
    """

    page_tokens: int = 32

    @property
    def name(self) -> str:
        """Name in the registry."""
        return "oracle"

    @property
    def parts(self) -> int:
        """One vector per token."""
        return self.page_tokens

    @property
    def kernel(self) -> None:
        """None: on a GPU it would need room for all keys."""
        return None

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the keys themselves, not a copy."""
        tokens = keys.shape[-2]
        assert tokens == self.page_tokens, f"{tokens} tokens in a page of {self.page_tokens}"
        return keys

    def scores(self, query: torch.Tensor, summaries: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the log-sum-exp over each page's keys."""
        pages, tokens = summaries.shape[2:4]
        q = grouped(query, summaries.shape[1])
        each = torch.matmul(q, summaries.float().flatten(2, 3).transpose(-1, -2)) * scale
        return torch.logsumexp(each.unflatten(-1, (pages, tokens)), dim=-1)
