"""Every key of a page at 2 bits a channel: nearly the oracle, for three times `cuboid`'s summary.

A box around many keys cannot tell which combinations of channels occur in it; coarse keys can.
Keys quantised per channel, as in KIVI (ICML 2024), serve as the index only: attention over what is
chosen reads the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierkv.selection.base import grouped

BITS = 2
LEVELS = (1 << BITS) - 1
WORD_TOKENS = 16 // BITS
"""Tokens that share a word of 16 bits."""


@dataclass(frozen=True, slots=True)
class Keys2:
    """Keeps the smallest value and the step of each channel, and each key's steps above it.

    A word holds the steps of consecutive tokens, the first in the lowest bits. In 16-bit dtypes the
    words are stored as bits, whatever number those would be; in float32 as numbers.

    Attributes:
        page_tokens: tokens per page.
    """

    page_tokens: int = 32

    @property
    def name(self) -> str:
        """Name in the registry."""
        return "keys2"

    @property
    def parts(self) -> int:
        """Two vectors of numbers, and the words."""
        return 2 + self.page_tokens // WORD_TOKENS

    @property
    def kernel(self) -> str:
        """The only kernel that reads words."""
        return "score_keys"

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        """Return ``[..., (low, step, words ...), k_dim]``."""
        assert keys.shape[-2] == self.page_tokens, f"{keys.shape[-2]} tokens in a page"
        low = keys.amin(dim=-2, keepdim=True)
        range_ = keys.amax(dim=-2, keepdim=True).float() - low.float()
        step = (range_ / LEVELS).to(keys.dtype)
        least = torch.finfo(torch.float32).tiny
        codes = (keys.float() - low.float()) / step.float().clamp_min(least)
        codes = codes.round().clamp(0, LEVELS).int()
        words = (codes.unflatten(-2, (-1, WORD_TOKENS)) << _shifts(keys)).sum(dim=-2)
        if keys.itemsize == 2:
            packed = words.to(torch.int16).view(keys.dtype)
        else:
            packed = words.to(keys.dtype)
        return torch.cat((low, step, packed), dim=-2)

    def scores(self, query: torch.Tensor, summaries: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the log-sum-exp over each page's coarse keys."""
        q = grouped(query, summaries.shape[1])
        low, step, packed = summaries.split((1, 1, self.parts - 2), dim=-2)
        words = packed.contiguous().view(torch.int16) if packed.itemsize == 2 else packed
        codes = (words.int().unsqueeze(-2) >> _shifts(packed)) & LEVELS
        keys = low.float() + step.float() * codes.flatten(-3, -2)
        each = torch.matmul(q, keys.flatten(2, 3).transpose(-1, -2)) * scale
        return torch.logsumexp(each.unflatten(-1, keys.shape[2:4]), dim=-1)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    """Return ``[WORD_TOKENS, 1]``: where in a word the steps of each token are."""
    return BITS * torch.arange(WORD_TOKENS, dtype=torch.int32, device=like.device)[:, None]
