"""What a selector is, and how the heads of a group agree on one set of pages.

A selector estimates, from a small summary of each sealed page, how much attention the page will
get. The estimate only decides which pages are looked up; attention over those is exact.
"""

from __future__ import annotations

from typing import Protocol

import torch

LEAST = torch.finfo(torch.float32).tiny
"""Mass of a page that was scored and whose share underflows: above 0, so it can be chosen."""


class Selector(Protocol):
    """Scores pages by a summary of their keys.

    Summaries are made once, when a page is sealed, and never change. Selectors hold no state, so
    one instance serves all layers, sequences and threads.

    Room is left for a selector that keeps its own index (clusters of keys, quantised keys) and
    knows a bound on the attention mass it misses: that one would have ``parts == 0``, build its
    index from the keys that `summarize` is shown, and answer with pages and the bound instead
    of scores. Nothing here depends on summaries having a meaning outside their selector.
    """

    @property
    def name(self) -> str:
        """Name in the registry, and value of the setting ``selector``."""
        ...

    @property
    def parts(self) -> int:
        """Vectors of `k_dim` elements in the summary of one head-page; 0: keeps none."""
        ...

    @property
    def kernel(self) -> str | None:
        """Stem in ``cuda/`` of the kernel that gives these scores; None if there is none."""
        ...

    def summarize(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the summaries of sealed pages, computed in float32, in the dtype of the keys.

        keys: ``[..., page_tokens, k_dim]``, after the rotary embedding. Returns ``[..., parts,
        k_dim]``. Does not modify or keep the keys.
        """
        ...

    def scores(self, query: torch.Tensor, summaries: torch.Tensor, scale: float) -> torch.Tensor:
        """Return a logit per query head and page: ``[batch, kv_heads, group, pages]``, float32.

        query: ``[batch, heads, k_dim]`` after the rotary embedding; head h belongs to KV head
        ``h // group``. summaries: ``[batch, kv_heads, pages, parts, k_dim]``. scale: the
        attention's own factor on scores. A page that is never to be looked up gets -inf.
        """
        ...


def page_mass(logits: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return each page's estimated share of attention: ``[batch, kv_heads, pages]``, float32.

    The mean over the group of the softmax over pages (the reduction "avgSM" of FreeKV, ICLR 2026):
    one set of pages per KV head, since that is the unit of transfers. Unlike a maximum over raw
    scores, it does not let the head with the largest logits decide for all.

    Args:
        logits: ``[batch, kv_heads, group, pages]``, from `Selector.scores`.
        valid: boolean, broadcastable to ``[batch, kv_heads, pages]``: the pages that compete.

    Returns:
        Rows that sum to 1 (to 0 where no page is valid). Exactly 0 means that the page is not
        valid or has the logit -inf in every head; all others get at least `LEAST`.
    """
    if logits.shape[-1] == 0:
        return logits.new_zeros((*logits.shape[:-2], 0), dtype=torch.float32)
    seen = logits.float().masked_fill(~valid.unsqueeze(-2), -torch.inf)
    top = seen.amax(dim=-1, keepdim=True)
    weights = torch.exp(seen - top.masked_fill(top == -torch.inf, 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    mass = (weights / total.masked_fill(total == 0, 1.0)).mean(dim=-2)
    return mass.clamp_min(LEAST).masked_fill((seen == -torch.inf).all(dim=-2), 0.0)


def grouped(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return ``[batch, heads, k_dim]`` as ``[batch, kv_heads, group, k_dim]`` in float32."""
    batch, heads, k_dim = query.shape
    assert heads % kv_heads == 0, f"{heads} query heads over {kv_heads} KV heads"
    return query.float().reshape(batch, kv_heads, heads // kv_heads, k_dim)


def corner_scores(query: torch.Tensor, summaries: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the largest dot product of the query with a point of each page's box, scaled.

    summaries hold the upper and the lower corner of the box. Per channel the better corner is
    the upper one where the query is positive, so this is one matrix product: ``relu(q) . upper +
    min(q, 0) . lower``.
    """
    q = grouped(query, summaries.shape[1])
    signs = torch.cat((q.clamp_min(0.0), q.clamp_max(0.0)), dim=-1)
    return torch.matmul(signs, summaries.float().flatten(-2).transpose(-1, -2)) * scale
