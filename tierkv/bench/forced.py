"""Teacher forcing: the same true tokens under exact and under selective attention.

A context is prefilled exactly, once; its keys and values are then given to a fresh cache for every
setting. Only the decode steps differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tierkv import api
from tierkv.bench import memory, workload
from tierkv.bench.encoded import Damage, Kept, bytes_per_token, stored
from tierkv.bench.workload import Progress
from tierkv.errors import ConfigError
from tierkv.hf.cache import TierCache
from tierkv.paging.lookup import Lookup
from tierkv.paging.manager import PageManager

TOGETHER = 64
"""Tokens that are fed at once where all attention is exact."""
KEPT_SHARE = 0.25
"""Of free host memory that keys and values of a context may take between settings."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How decode steps attend: exactly without a selector, else with it and a token budget.

    `codec`: what the context's whole pages have been through.
    """

    selector: str | None = None
    token_budget: int = 0
    codec: str = "raw"

    @property
    def label(self) -> str:
        """What to call it in a line of text."""
        if self.codec != "raw":
            return self.codec
        return "exact" if self.selector is None else f"{self.selector} {self.token_budget}"

    def arguments(self, tokens: int) -> dict[str, Any]:
        """Return settings of `tierkv.wrap` for contexts of up to `tokens`."""
        if self.selector is None:
            return {"attention": "exact"}
        return {
            "attention": "selective",
            "selector": self.selector,
            "token_budget": self.token_budget,
            "max_context": tokens,
        }

    def row(self) -> dict[str, Any]:
        """Return the columns that name it."""
        budget = None if self.selector is None else self.token_budget
        return {"attention": "selective" if self.selector else "exact",
                "selector": self.selector, "token_budget": budget, "codec": self.codec}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forced:
    """What teacher forcing gave under one setting.

    Attributes:
        logits: ``[steps, vocab]`` float32 in host memory; row i predicts token ``start + i + 1``.
        tokens_read: mean tokens that a KV head reads per step, in layers that select (in all
            tiered layers where attention is exact).
        kv_share: of the KV in all tiered layers, dense ones included, the share read per step.
        seconds: of the decode steps.
        damage: what the codec did to the context's pages; None for raw ones.
        bytes_per_token: that a token's K and V take in pages of the codec.
    """

    setting: Setting
    logits: torch.Tensor
    tokens_read: float
    kv_share: float
    seconds: float
    damage: Damage | None = None
    bytes_per_token: float = 0.0


class _Recording(TierCache):
    """A tier cache that keeps in host memory what is appended while `kept` is a list."""

    kept: Kept | None = None

    def append(self, tier_layer: int, k: torch.Tensor, v: torch.Tensor) -> Lookup:
        """Append to one tiered layer ``[1, kv_heads, tokens, dim]``."""
        if self.kept is not None:
            kept_k, kept_v = (torch.empty_like(x, device="cpu").copy_(x) for x in (k, v))
            self.kept.append((tier_layer, kept_k, kept_v))
        return super().append(tier_layer, k, v)


@torch.no_grad()
def forced(
    model: Any,
    ids: torch.Tensor,
    start: int,
    settings: Sequence[Setting],
    tiers: dict[str, Any],
    say: Progress,
) -> Iterator[Forced]:
    """Prefill ``ids[:, :start]``, then feed the rest but the last token, per setting.

    One by one if any setting selects, else several together: exact attention gives the same.

    The prefill is repeated for each setting only where the model has layers with state of their
    own (windows, recurrence), or where keys and values would fill host memory; codecs are not
    evaluated there.

    Args:
        ids: ``[1, tokens]`` on the model's device.
        tiers: further settings of `tierkv.wrap`.

    Raises:
        ConfigError: a codec cannot be evaluated with this model and context; names the flag.
    """
    kept: Kept | None = None
    total, feeds = ids.shape[1], range(start, ids.shape[1] - 1)
    stride = 1 if any(setting.selector for setting in settings) else TOGETHER
    for setting in settings:
        with api.wrap(model, **{**tiers, **setting.arguments(total)}) as wrapped:
            text = model.config.get_text_config(decoder=True)
            cache = _Recording(text, wrapped.manager)
            damage, size = None, 0.0
            if setting.codec != "raw" and kept is None:
                raise ConfigError(
                    "--codecs: keys and values of the whole context must be kept in host memory, "
                    "and every layer must attend to all of it; lower --tokens or take another model"
                )
            if wrapped.manager is not None:
                size = bytes_per_token(wrapped.manager.geometry, setting.codec)
            if kept is None:
                cache.kept = [] if _may_keep(cache, start) else None
                wrapped.prefill(ids[:, :start], cache, on_progress=partial(say, "prefill"))
                kept, cache.kept = cache.kept, None
            else:
                pages = kept
                if setting.codec != "raw":
                    assert wrapped.manager is not None
                    pages, damage = stored(
                        kept,
                        wrapped.manager.geometry,
                        setting.codec,
                        wrapped.config.residual_tokens,
                    )
                for layer, k, v in pages:
                    workload.append(cache, layer, k.to(ids.device), v.to(ids.device))
            before, logits = time.perf_counter(), list[torch.Tensor]()
            for at in feeds[::stride]:
                say(setting.label, at - start, len(feeds))
                tokens_fed = ids[:, at : min(at + stride, total - 1)]
                logits += workload.step(model, cache, tokens_fed)[0].float().cpu()
            seconds = time.perf_counter() - before
            tokens, share = reads(wrapped.manager, feeds)
            cache.close()
        yield Forced(setting, torch.stack(logits), tokens, share, seconds, damage, size)


def _may_keep(cache: TierCache, tokens: int) -> bool:
    if cache.manager is None or cache.tiered_in_part:
        return False
    size = cache.manager.geometry.token_bytes * tokens
    return size < KEPT_SHARE * memory.available_host_bytes()


def reads(manager: PageManager | None, lengths: Sequence[int]) -> tuple[float, float]:
    """Return mean tokens read per KV head, and the share of all KV, of decode steps.

    They follow from the sizes, as every head fills its budget (`mass` is not set).

    lengths: tokens that the cache held before each step. See `Forced` for what is averaged.
    """
    if manager is None or not lengths:
        return 0.0, 1.0
    state, layers, page = manager.selective, manager.geometry.layers, manager.geometry.page_tokens
    whole = sum(lengths) + len(lengths)
    if state is None or not any(map(state.spec.selects, range(layers))):
        return whole / len(lengths), 1.0
    spec, read = state.spec, 0
    for length in lengths:
        pages = min(length // page, spec.kept_pages + spec.budget_pages)
        read += pages * page + length % page + 1
    selecting = sum(map(spec.selects, range(layers)))
    share = (selecting * read + (layers - selecting) * whole) / (layers * whole)
    return read / len(lengths), share
