"""How good a selection is, measured on the K, V and queries of real layers.

Everything here is a function of captured tensors; no tier and no model is involved. A layer is
compared with itself: the queries are those of a dense run, so errors of earlier layers do not add
up. Output errors of a whole selective model are larger, answers are a matter for task tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tierkv.selection.base import Selector, page_mass
from tierkv.selection.choose import choose

STEPS_AT_ONCE = 16
"""Steps scored together; bounds the memory that the oracle's summaries take."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Decode steps of one layer, on one sequence.

    Attributes:
        queries: ``[steps, heads, k_dim]`` after the rotary embedding.
        seen: ``[steps]``: how many tokens each step sees, its own included; the last sees all.
        keys: ``[kv_heads, tokens, k_dim]`` after the rotary embedding.
        values: ``[kv_heads, tokens, v_dim]``.
        scale: the attention's factor on scores.
    """

    queries: torch.Tensor
    seen: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float

    def only(self, steps: slice) -> Trace:
        """Return the trace of some of the steps."""
        return replace(self, queries=self.queries[steps], seen=self.seen[steps])


@dataclass(frozen=True, slots=True)
class Regime:
    """What is read at each step.

    Attributes:
        page_tokens: tokens per page.
        budget_tokens: tokens of selected pages per KV head, besides sink and recent ones.
        sink_tokens, recent_tokens: first and last tokens, always read. Only whole pages between
            them can be selected, so up to ``page_tokens - 1`` more recent tokens are read.
        mass_target: share of the candidates' mass at which selection stops, or None.
        all_compete: the softmax over pages is over all sealed pages, also those that are read
            anyway, so that a head that looks at sinks has less say about the rest.
    """

    page_tokens: int
    budget_tokens: int
    sink_tokens: int = 64
    recent_tokens: int = 64
    mass_target: float | None = None
    all_compete: bool = False

    @property
    def budget_pages(self) -> int:
        """Pages per KV head."""
        return self.budget_tokens // self.page_tokens

    def sealed(self, trace: Trace) -> torch.Tensor:
        """Return ``[steps, pages]``: the pages that are full at a step."""
        pages = torch.arange(trace.keys.shape[1] // self.page_tokens)
        return (pages + 1) * self.page_tokens <= trace.seen.unsqueeze(1)

    def candidates(self, trace: Trace) -> torch.Tensor:
        """Return ``[steps, pages]``: the pages that can be selected at a step."""
        pages = torch.arange(trace.keys.shape[1] // self.page_tokens)
        stop = (trace.seen - self.recent_tokens).unsqueeze(1)
        return (pages * self.page_tokens >= self.sink_tokens) & (
            (pages + 1) * self.page_tokens <= stop
        )


class Recovered(NamedTuple):
    """Attention over what was read against attention over everything, ``[steps, heads]`` each.

    Attributes:
        mass: share of the true attention that lies on what was read.
        error: norm of the difference of the outputs over the norm of the true one.
    """

    mass: torch.Tensor
    error: torch.Tensor


def attention(trace: Trace) -> torch.Tensor:
    """Return the true attention weights ``[steps, kv_heads, group, tokens]``."""
    kv_heads, tokens, k_dim = trace.keys.shape
    steps = trace.queries.shape[0]
    q = trace.queries.float().reshape(steps, kv_heads, -1, k_dim).transpose(0, 1)
    scores = torch.matmul(q.flatten(1, 2), trace.keys.float().transpose(-1, -2)) * trace.scale
    hidden = torch.arange(tokens) >= trace.seen.unsqueeze(1)
    scores = scores.view(kv_heads, steps, -1, tokens).masked_fill(hidden.unsqueeze(1), -torch.inf)
    return scores.softmax(dim=-1).transpose(0, 1)


def estimate(selector: Selector, trace: Trace, regime: Regime) -> torch.Tensor:
    """Return the mass that a selector expects on each page: ``[steps, kv_heads, pages]``."""
    kv_heads, tokens = trace.keys.shape[:2]
    pages = tokens // regime.page_tokens
    whole = trace.keys[:, : pages * regime.page_tokens]
    summaries = selector.summarize(whole.unflatten(1, (pages, regime.page_tokens)))
    valid = regime.sealed(trace) if regime.all_compete else regime.candidates(trace)
    out = torch.zeros(len(trace.queries), kv_heads, pages)
    for start in range(0, len(out), STEPS_AT_ONCE):
        steps = slice(start, start + STEPS_AT_ONCE)
        query = trace.queries[steps]
        logits = selector.scores(query, summaries.expand(len(query), -1, -1, -1, -1), trace.scale)
        out[steps] = page_mass(logits, valid[steps].unsqueeze(1))
    return out


def select(mass: torch.Tensor, trace: Trace, regime: Regime) -> torch.Tensor:
    """Return the pages that such estimates select, ``[steps, kv_heads, pages]`` of bool."""
    pages = mass.shape[-1]
    chosen = choose(
        mass,
        regime.budget_pages,
        candidates=regime.candidates(trace).unsqueeze(1),
        mass_target=regime.mass_target,
    )
    out = torch.zeros(*mass.shape[:2], pages + 1, dtype=torch.bool)
    out.scatter_(-1, chosen.pages.masked_fill(chosen.pages < 0, pages), True)
    return out[..., :pages]


def recovered(
    trace: Trace, weights: torch.Tensor, selected: torch.Tensor, regime: Regime
) -> Recovered:
    """Return what attention over sink, recent and selected pages recovers.

    weights: from `attention`; selected: from `select`, for the same regime.
    """
    tokens = trace.keys.shape[1]
    read = selected | ~regime.candidates(trace).unsqueeze(1)
    kept = torch.ones(*selected.shape[:2], tokens, dtype=torch.bool)  # past the last whole page
    whole = read.repeat_interleave(regime.page_tokens, dim=-1)
    kept[..., : whole.shape[-1]] = whole
    some = weights * kept.unsqueeze(2)
    mass = some.sum(dim=-1)
    values = trace.values.float()
    true = torch.einsum("skgt,ktd->skgd", weights, values)
    ours = torch.einsum("skgt,ktd->skgd", some, values) / mass.unsqueeze(-1)
    error = (ours - true).norm(dim=-1) / true.norm(dim=-1)
    return Recovered(mass.flatten(1), error.flatten(1))


def overlap(predicted: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return ``[steps, kv_heads]``: share of the true pages that were predicted."""
    return (predicted & truth).sum(dim=-1) / truth.sum(dim=-1).clamp_min(1)


def reuse_misses(selected: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return ``[steps, kv_heads]``: selected pages that a reuse cache does not hold.

    selected: ``[steps, kv_heads, pages]``. The cache holds `capacity` pages per KV head, is empty
    at first, and drops those that were selected longest ago; what is selected now stays.
    """
    steps, kv_heads, pages = selected.shape
    assert capacity >= int(selected.sum(dim=-1).max()), "the cache cannot hold one selection"
    last = torch.full((kv_heads, pages), -1)
    misses = torch.zeros(steps, kv_heads, dtype=torch.int64)
    for step in range(steps):
        now = selected[step]
        misses[step] = (now & (last < 0)).sum(dim=-1)
        last = last.masked_fill(now, step)
        newest = last.sort(dim=-1, descending=True, stable=True).indices
        last.scatter_(-1, newest[:, capacity:], -1)
    return misses
