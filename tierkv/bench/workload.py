"""The work that is timed: a cache filled with random keys and values, and tokens decoded on it.

Decoding reads the whole cache whatever it holds, so it is filled directly and no prompt is run.
The values are random, never zeros: constant data flatters both memory and arithmetic.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tierkv.bench.memory import synchronize
from tierkv.hf.attach import cache_argument
from tierkv.hf.shapes import stock_cache
from tierkv.page import Geometry

FILL_TOKENS = 8192
CHECK_PAGES = 64
CHECK_STEPS = 4
MIN_STEPS = 4

Step = Callable[[torch.Tensor], torch.Tensor]
"""Appends a token ``[1, 1]`` to a cache; returns its logits, ``[1, 1, vocab]``."""
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and how much there is."""


@dataclass(slots=True)
class Steps:
    """Seconds of each timed step, and whether it sealed pages."""

    seconds: list[float] = field(default_factory=list)
    sealing: list[bool] = field(default_factory=list)

    def summary(self, page_tokens: int) -> dict[str, Any]:
        """Return milliseconds per token, and what sealing pages adds to them.

        `sealing_overhead` is the time by which a step that seals, and the one after it (in which
        the pages are still written through), exceed a usual step, over the time of all steps. It
        needs two whole pages of steps, else it is None.
        """
        ms = [1e3 * value for value in self.seconds]
        cuts = statistics.quantiles(ms, n=100, method="inclusive") if len(ms) > 1 else ms * 99
        quiet = [value for value, seals in zip(ms, self.sealing, strict=True) if not seals]
        result: dict[str, Any] = {
            "steps": len(ms),
            "ms_p50": cuts[49],
            "ms_p99": cuts[98],
            "ms_mean": statistics.fmean(ms),
            "ms_sealing": None,
            "ms_quiet": statistics.fmean(quiet) if quiet else None,
            "sealing_overhead": None,
        }
        whole = len(ms) // page_tokens * page_tokens
        if any(self.sealing) and whole >= 2 * page_tokens and quiet:
            usual = statistics.median(quiet)
            sealing = [i for i, seals in enumerate(self.sealing) if seals]
            result["ms_sealing"] = statistics.fmean(ms[i] for i in sealing)
            touched = {j for i in sealing for j in (i, i + 1) if j < whole}
            extra = sum(ms[j] - usual for j in touched)
            result["sealing_overhead"] = extra / (whole * usual)
        return result


def random_kv(
    geometry: Geometry, tokens: int, generator: torch.Generator, batch: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random K and V, ``[batch, kv_heads, tokens, dim]``, on the generator's device."""
    shape = (batch, geometry.kv_heads, tokens)
    options: dict[str, Any] = {"dtype": geometry.dtype, "device": generator.device}
    return (
        torch.randn((*shape, geometry.k_dim), generator=generator, **options),
        torch.randn((*shape, geometry.v_dim), generator=generator, **options),
    )


def fill_tiers(
    cache: Any, geometry: Geometry, tokens: int, say: Progress | None = None, batch: int = 1
) -> None:
    """Append `tokens` random tokens to every layer of an empty tier cache, chunk by chunk."""
    generator, chunk = _generator(cache.manager.device), max(FILL_TOKENS // batch, 1)
    for start in range(0, tokens, chunk):
        count = min(chunk, tokens - start)
        for layer in range(geometry.layers):
            append(cache, layer, *random_kv(geometry, count, generator, batch))
        if say is not None:
            say("fill", start + count, tokens)


def append(cache: Any, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """Append to one layer of a tier cache without attending."""
    cache.append(layer, k, v)
    cache.attended(layer)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that decode together.

    Attributes:
        sequences: how many.
        shared: they are samples of one prompt, whose pages are there once.
    """

    sequences: int = 1
    shared: bool = False

    @property
    def prompts(self) -> int:
        """Prompts that are stored."""
        return 1 if self.shared else self.sequences

    def kv_bytes(self, geometry: Geometry, tokens: int) -> int:
        """Bytes of the prompts, of `tokens` each."""
        return self.prompts * tokens * geometry.token_bytes

    def pages(self, geometry: Geometry, tokens: int, room_tokens: int) -> int:
        """Pages of a layer at most: prompts of `tokens`, and what every sequence may add."""
        room = room_tokens // geometry.page_tokens + 3  # the tail, the page it began in, and one
        return self.prompts * (tokens // geometry.page_tokens) + self.sequences * room

    def fill(self, cache: Any, geometry: Geometry, tokens: int) -> None:
        """Give every sequence its prompt in an empty tier cache."""
        fill_tiers(cache, geometry, tokens, batch=self.prompts)
        if self.shared:
            cache.batch_repeat_interleave(self.sequences)


def fill_stock(
    cache: Any, geometry: Geometry, tokens: int, device: torch.device, batch: int = 1
) -> None:
    """Give every layer of an empty transformers cache `tokens` random tokens."""
    generator = _generator(device)
    for layer in range(geometry.layers):
        cache.update(*random_kv(geometry, tokens, generator, batch), layer)


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(1)


def step(model: Any, cache: Any, token: torch.Tensor) -> torch.Tensor:
    """Feed tokens ``[batch, n]``, one to decode; return the logits ``[batch, n, vocab]``."""
    logits: torch.Tensor = model(input_ids=token, **{cache_argument(model): cache}).logits
    return logits


@torch.no_grad()
def decode(
    run: Step,
    cache: Any,
    device: torch.device,
    *,
    warmup: int,
    steps: int,
    limit_seconds: float,
    say: Progress,
) -> tuple[Steps, dict[str, int]]:
    """Decode greedily, each token brought to the host before the next, as generation does.

    run: appends a token to the cache.

    Ends early when `limit_seconds` are over. Returns the steps, and the bytes moved by the tiers
    in all timed steps together (nothing for transformers' own cache).
    """
    manager = getattr(cache, "manager", None)
    token = torch.ones((1, 1), dtype=torch.long, device=device)
    timed, before = Steps(), _moved(manager)
    start = last = time.perf_counter()
    for index in range(-warmup, steps):
        if index == 0:
            before = _moved(manager)
            start = last = time.perf_counter()
        sealed = manager.stats.pages_sealed if manager is not None else 0
        token = run(token)[:, -1:].argmax(-1)
        token.item()
        now = time.perf_counter()
        if index >= 0:
            timed.seconds.append(now - last)
            timed.sealing.append(manager is not None and manager.stats.pages_sealed > sealed)
            say("decode", index + 1, steps)
            last = time.perf_counter()
            if now - start > limit_seconds and index + 1 >= MIN_STEPS:
                break
    after = _moved(manager)
    return timed, {way: after[way] - before[way] for way in after}


def _moved(manager: Any) -> dict[str, int]:
    moved: dict[str, int] = manager.stats.as_dict()["moved_bytes"] if manager is not None else {}
    return moved


@torch.no_grad()
def check(
    model: Any,
    geometry: Geometry,
    wrapped: Callable[..., Any],
    step_of: Callable[[Any, Any, int], Step],
) -> dict[str, Any]:
    """Compare logits of tierkv, most pages streamed, with `DynamicCache` on the same random KV.

    The scale is a control: `DynamicCache` with one page of each layer replaced. tierkv has to be
    at least twice as near as that, which one wrong page in 64 would prevent.

    Args:
        wrapped: makes a wrapped model of keyword settings; used as a context manager.
        step_of: returns what decodes a token, of a wrapped model, its cache and its length.
    """
    page, size = geometry.page_tokens, geometry.page_bytes * geometry.layers
    device = model.device
    tokens = CHECK_PAGES * page + page // 2
    layers = []
    generator = _generator(device)
    for _ in range(geometry.layers):
        layers.append(random_kv(geometry, tokens, generator))
    expected, control = stock_cache(model), stock_cache(model)
    for layer, (k, v) in enumerate(layers):
        expected.update(k, v, layer)
        other = random_kv(geometry, page, generator)
        middle = slice(CHECK_PAGES // 2 * page, (CHECK_PAGES // 2 + 1) * page)
        changed = [x.clone() for x in (k, v)]
        for whole, part in zip(changed, other, strict=True):
            whole[:, :, middle] = part
        control.update(*changed, layer)
    want, far = (
        torch.cat(list(_forced(partial(step, model, cache), device)))
        for cache in (expected, control)
    )
    budget = (CHECK_PAGES // 8 + 2) * size
    with wrapped(gpu_budget=budget, cpu_budget=4 * CHECK_PAGES * size) as tiers:
        cache = tiers.cache()
        for layer, (k, v) in enumerate(layers):
            append(cache, layer, k, v)
        got = torch.cat(list(_forced(step_of(tiers, cache, 2 * tokens), device)))
        streamed = tiers.stats()["moved_bytes"]["warm_to_hot"]
    error = ((got - want).norm() / want.norm()).item()
    scale = ((far - want).norm() / want.norm()).item()
    return {
        "tokens": tokens,
        "steps": CHECK_STEPS,
        "same_greedy_tokens": int((got.argmax(-1) == want.argmax(-1)).sum()),
        "relative_logit_error": error,
        "error_with_one_page_wrong": scale,
        "streamed_bytes": streamed,
        "ok": error <= scale / 2,
    }


def _forced(run: Step, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield float logits ``[1, vocab]`` of a few steps over the same tokens."""
    for index in range(CHECK_STEPS):
        yield run(torch.tensor([[7 * index + 3]], device=device))[:, -1].float()


@torch.no_grad()
def stock_prefill(model: Any, ids: torch.Tensor, chunk: int) -> float:
    """Return the seconds of transformers' own chunked prefill (and its first token)."""
    mask = torch.ones_like(ids)
    synchronize(ids.device)
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=mask, max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk
    )
    synchronize(ids.device)
    return time.perf_counter() - start
