"""What each layer's selection recovers of the layer's own attention, and how many bytes it moves.

The queries are those of exact attention over real text, so errors do not add up over layers: this
says where a selector fails, not how much the model's answers suffer. The bytes are those of a reuse
cache as the GPU keeps it, replayed step by step.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tierkv import api
from tierkv.bench import memory
from tierkv.bench.workload import Progress
from tierkv.config import Config
from tierkv.hf.watch import watched
from tierkv.selection import selector
from tierkv.selection.quality import (
    Regime,
    Trace,
    attention,
    estimate,
    recovered,
    reuse_misses,
    select,
)
from tierkv.units import format_bytes

STEPS = 64
"""Last tokens, whose queries stand for decode steps."""
KEPT_SHARE = 0.25
"""Of free host memory that keys and values may take."""


class NotModelledError(Exception):
    """Why layers cannot be looked into."""


@torch.no_grad()
def traces(model: Any, ids: torch.Tensor, tiers: dict[str, Any], say: Progress) -> list[Trace]:
    """Read ``ids [1, tokens]`` exactly; return the last `STEPS` steps of every tiered layer.

    tiers: settings of `tierkv.wrap`.

    Raises:
        NotModelledError: no layer is tiered, attention is more than a softmax, or keys and values
            would fill host memory.
    """
    parts: dict[int, list[list[torch.Tensor]]] = {}
    scales: dict[int, float] = {}

    def seen(layer: int, q: torch.Tensor, *given: Any) -> None:
        k, v, scale, plain = given
        if layer not in tiered:
            return
        if not plain:
            raise NotModelledError("attention with a soft cap or sink logits is not modelled")
        scales[layer] = scale
        shown = [x[0].to("cpu", copy=True) for x in (q[:, :, -STEPS:], k, v)]
        parts.setdefault(layer, []).append(shown)

    with api.wrap(model, **{**tiers, "attention": "exact"}) as wrapped:
        if wrapped.manager is None:
            raise NotModelledError("no layer has full attention")
        tier_cache, total = wrapped.cache(), ids.shape[1]
        tiered = list(tier_cache.tiered)
        size = total * wrapped.manager.geometry.token_bytes
        if size > KEPT_SHARE * memory.available_host_bytes():
            raise NotModelledError(f"{format_bytes(size)} of keys and values would fill the host")
        with watched(seen):
            wrapped.prefill(ids, tier_cache, on_progress=partial(say, "layers: prefill"))
        tier_cache.close()
    found, steps = [], min(STEPS, total)
    for layer in tiered:
        queries, keys, values = (torch.cat(x, dim=1) for x in zip(*parts.pop(layer), strict=True))
        seen_tokens = torch.arange(total - steps + 1, total + 1)
        found.append(
            Trace(queries[:, -steps:].transpose(0, 1), seen_tokens, keys, values, scales[layer])
        )
    return found


def measure(
    found: list[Trace],
    selectors: tuple[str, ...],
    budgets: tuple[int, ...],
    config: Config,
    say: Progress,
) -> list[dict[str, Any]]:
    """Return a row per selector and budget.

    Columns `mass` (share of attention recovered), `error` (of the output, relative) and `moved`
    (bytes per token into the reuse cache) are lists by layer; `mass_mean`, `error_mean` and
    `moved_bytes` (a sum) are over the layers that select.

    config: page size, sink and recent tokens, dense layers and the reuse cache's size.
    """
    regime = Regime(config.page_tokens, 0, config.sink_tokens, config.recent_tokens)
    rows: list[dict[str, Any]] = [
        {"selector": name, "token_budget": budget, "mass": [], "error": [], "moved": []}
        for name in selectors for budget in budgets
    ]  # fmt: skip
    for layer, trace in enumerate(found):
        say("layers", layer, len(found))
        weights, masses = attention(trace), {
            name: estimate(selector(name, regime.page_tokens), trace, regime) for name in selectors
        }  # fmt: skip
        token_bytes = (trace.keys.shape[-1] + trace.values.shape[-1]) * trace.keys.element_size()
        for row in rows:
            own = replace(regime, budget_tokens=row["token_budget"])
            if row["selector"] == "window":
                recent = own.recent_tokens + own.budget_tokens
                own = replace(own, budget_tokens=0, recent_tokens=recent)
            pages = select(masses[row["selector"]], trace, own)
            result = recovered(trace, weights, pages, own)
            missed = reuse_misses(pages, max(int(config.reuse * own.budget_pages), 1))[1:]
            row["mass"].append(result.mass.mean().item())
            row["error"].append(result.error.mean().item())
            row["moved"].append(missed.sum().item() / len(missed) * own.page_tokens * token_bytes)
    first = min(config.dense_layers, len(found) - 1)
    for row in rows:
        row["selecting_layers"] = len(found) - first
        for name in ("mass", "error"):
            row[f"{name}_mean"] = statistics.fmean(row[name][first:])
        row["moved_bytes"] = sum(row["moved"][first:])
    return rows
