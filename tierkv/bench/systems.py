"""The systems that are compared on one model: tierkv, and transformers' own caches."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tierkv import api
from tierkv.bench import memory, timeline, workload
from tierkv.bench.ceiling import Ceiling
from tierkv.bench.options import Options
from tierkv.bench.summary import STOCK, TIERKV
from tierkv.bench.workload import Progress, Step
from tierkv.codec_names import parse_codecs
from tierkv.codecs import CODECS
from tierkv.errors import TierKVError
from tierkv.hf import shapes
from tierkv.hf.graph import decode_graph
from tierkv.hf.prefill import default_chunk
from tierkv.page import Geometry
from tierkv.tiers.frame_format import FrameFormat
from tierkv.units import format_bytes

OFFLOADED_FACTOR = 4
"""Host memory that transformers' offloaded cache needs, over the KV: new pinned tensors for each
layer and token, in powers of two, beside the old ones (killed at 125 GiB with 32 GiB of KV)."""
HEADROOM = 3 << 30
"""Bytes on either side for everything that is no KV."""


class SkippedError(TierKVError):
    """A measurement that this machine cannot make; the message says why."""


class Systems:
    """Makes one row of measurements at a time; baselines use the same model, unwrapped."""

    def __init__(
        self, model: Any, geometry: Geometry, options: Options, limits: Ceiling, say: Progress
    ):
        self.model, self.geometry, self.options = model, geometry, options
        self.limits, self.say = limits, say
        self.read_bytes = _bytes_per_step(model)

    def measure(self, system: str, tokens: int, share: float, codec: str) -> dict[str, Any]:
        """Return what one system does with one context, with `share` of the KV hot.

        Raises:
            SkippedError, BudgetError, torch.OutOfMemoryError: this machine cannot.
        """
        if system == TIERKV:
            return self._tiers(tokens, share, codec)
        return self._stock(tokens) if system == STOCK else self._offloaded(tokens)

    def wrap(self, **settings: Any) -> api.TieredModel:
        """Wrap the model with the run's page size and prefill chunk."""
        options = self.options
        common = {"page_tokens": options.page_tokens, "prefill_chunk": options.prefill_chunk}
        return api.wrap(self.model, **{**common, **settings})

    def budgets(self, tokens: int, share: float, codec: str = "raw") -> dict[str, Any]:
        """Return the settings under which `share` of the KV is hot and the rest fits below.

        An eighth of a GPU budget at most is for staging buffers and leaves no room for pages.
        """
        geometry, options = self.geometry, self.options
        pages = -(-(tokens + options.steps + options.warmup + 8) // geometry.page_tokens) + 2
        kv = pages * geometry.layers * geometry.page_bytes
        if share >= 1:
            gpu = kv + min(kv // 7, 512 << 20) + 16 * geometry.page_bytes
        else:
            gpu = int(tokens * geometry.token_bytes * share)
        slack = (2 * geometry.layers + 8) * geometry.page_bytes
        down = max(kv - gpu + min(gpu // 8, 512 << 20), 0) + slack
        cpu = (
            down
            // geometry.page_bytes
            * FrameFormat(geometry, CODECS[parse_codecs(codec).warm]).frame_bytes
        )
        return {"gpu_budget": gpu, "cpu_budget": options.cpu_budget or cpu, "codec": codec}

    def _tiers(self, tokens: int, share: float, codec: str) -> dict[str, Any]:
        options, settings = self.options, self.budgets(tokens, share, codec)
        self._need(settings["gpu_budget"], settings["cpu_budget"])
        with ExitStack() as stack:
            if options.store is not None:
                scratch = TemporaryDirectory(prefix="tierkv-bench-", dir=options.store)
                settings["store"] = stack.enter_context(scratch)
                settings["disk_budget"] = 2 * tokens * self.geometry.token_bytes + (1 << 30)
            wrapped = stack.enter_context(self.wrap(**settings))
            cache = wrapped.cache()
            workload.fill_tiers(cache, self.geometry, tokens, self.say)
            run, captured = self.step_of(wrapped, cache, tokens), False
            row, moved = self._decode(run, cache, options.warmup, options.steps)
            if cache.graph is not None:
                captured = cache.graph.replays == options.warmup + row["decode"]["steps"]
            tiers = {name: tier["bytes"] for name, tier in wrapped.stats()["tiers"].items()}
            steps = row["decode"]["steps"]
            row |= {
                "gpu_budget": settings["gpu_budget"],
                "cpu_budget": settings["cpu_budget"],
                **{f"{name}_bytes": tiers[name] for name in ("hot", "warm", "cold")},
                "bytes_per_token": {way: total / steps for way, total in moved.items()},
                "pinned_bytes": wrapped.manager.warm.taken_bytes if wrapped.manager else 0,
                "timeline": self._timeline(cache),
                "captured": captured,
            }
            cache.close()
            row["prefill_seconds"] = self._prefill(wrapped, tokens)
        kv = tokens * self.geometry.token_bytes
        if parse_codecs(codec).hot != "raw":
            kv = sum(tiers.values())
        return row | {"ceiling": self._ceiling(row, kv)}

    def step_of(self, wrapped: api.TieredModel, cache: Any, tokens: int) -> Step:
        """Return what decodes a token: a replayed step where `generate` would replay one."""
        eager = functools.partial(workload.step, self.model, cache)
        if self.options.eager:
            return eager
        graph = decode_graph(self.model, cache, wrapped.config, tokens)
        if graph is None:
            return eager
        return lambda token: eager(token) if graph.obstacle() else graph.step(token)

    def _decode(
        self, run: Step, cache: Any, warmup: int, steps: int
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """Return what every row says of decoding, and the bytes that tiers moved meanwhile."""
        timed, moved = workload.decode(
            run, cache, self.options.device, warmup=warmup, steps=steps,
            limit_seconds=self.options.limit_seconds, say=self.say,
        )  # fmt: skip
        row = {
            "decode": timed.summary(self.geometry.page_tokens),
            "peak_gpu_bytes": memory.peak_device_bytes(self.options.device),
            "pinned_bytes": None,
            "timeline": None,
            "prefill_seconds": None,
        }
        return row, moved

    def _timeline(self, cache: Any) -> dict[str, Any] | None:
        """Return the timeline of an eager step; the profiler sees little of a replay."""
        if self.options.device.type != "cuda":
            return None
        self.say("timeline", 0, 1)
        token = torch.ones((1, 1), dtype=torch.long, device=self.options.device)

        def work() -> None:
            with torch.no_grad():
                workload.step(self.model, cache, token)
            memory.synchronize(self.options.device)

        try:
            return timeline.record(work)
        except RuntimeError as error:  # the profiler may not be allowed here
            self.say(f"no timeline: {error}", 1, 1)
            return None

    def _ceiling(self, row: dict[str, Any], kv: int) -> dict[str, Any]:
        """Return what bounds a step: the link, the disk, or reading `kv` bytes and the weights from
        device memory."""
        limits, moved = self.limits, row["bytes_per_token"]
        memory_ms = 1e3 * (self.read_bytes + kv) / limits.device_memory
        bounds = {"memory": memory_ms, "disk": 0.0}
        bounds["link"] = 1e3 * moved.get("warm_to_hot", 0) / limits.host_to_device
        if limits.disk_read:
            bounds["disk"] = 1e3 * moved.get("cold_to_warm", 0) / limits.disk_read
        bound = max(bounds, key=lambda name: bounds[name])
        busy = row.get("timeline") and row["timeline"]["busy_ms"]["attention"]
        attention = kv / (busy / 1e3) / limits.device_memory if busy else None
        return {
            "bound": bound,
            "ms": bounds[bound],
            "share": bounds[bound] / row["decode"]["ms_mean"],
            "device_memory_ms": memory_ms,
            "attention_share": attention,
        }

    def _prefill(self, wrapped: api.TieredModel, tokens: int) -> float | None:
        """Really prefill a context; returns seconds.

        First a shorter one, two chunks longer than what stays hot: the first use of a kernel
        compiles it.
        """
        if tokens > self.options.prefill_tokens:
            return None
        ids, chunk = self._prompt(tokens), self._chunk_tokens()
        warm = wrapped.cache()
        manager, hot = wrapped.manager, 0
        if manager is not None:
            hot = manager.hot.frames_per_layer + manager.tiers.device_frames.share
        warmup = min(hot * self.geometry.page_tokens, tokens // 2) + 2 * chunk
        wrapped.prefill(ids[:, :warmup], warm)
        warm.close()
        before = wrapped.stats()["prefill"]["seconds"]
        cache = wrapped.cache()
        wrapped.prefill(ids, cache, on_progress=lambda *at: self.say("prefill", *at))
        cache.close()
        return float(wrapped.stats()["prefill"]["seconds"] - before)

    def _chunk_tokens(self) -> int:
        return self.options.prefill_chunk or default_chunk(self.model)

    def _prompt(self, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2)
        high = self.model.config.vocab_size
        ids = torch.randint(1, high, (1, tokens), generator=generator)
        return ids.to(self.options.device)

    def _stock(self, tokens: int) -> dict[str, Any]:
        kv = tokens * self.geometry.token_bytes
        self._need(kv + 3 * kv // self.geometry.layers, 0)
        cache = shapes.stock_cache(self.model)
        row = self._baseline(cache, tokens, self.options.steps)
        row |= {"hot_bytes": kv, "warm_bytes": 0, "cold_bytes": 0, "bytes_per_token": {}}
        row["ceiling"] = self._ceiling(row, tokens * self.geometry.token_bytes)
        del cache
        memory.give_back()
        if tokens <= self.options.prefill_tokens:
            row["prefill_seconds"] = self._stock_prefill(tokens)
        return row

    def _stock_prefill(self, tokens: int) -> float:
        ids, chunk = self._prompt(tokens), self._chunk_tokens()
        self.say(f"transformers' prefill in chunks of {chunk}", 0, 1)
        workload.stock_prefill(self.model, ids[:, : 2 * chunk], chunk)
        return workload.stock_prefill(self.model, ids, chunk)

    def _offloaded(self, tokens: int) -> dict[str, Any]:
        kv = tokens * self.geometry.token_bytes
        if self.options.device.type != "cuda":
            raise SkippedError("transformers' offloaded cache needs a GPU")
        self._need(4 * kv // self.geometry.layers, OFFLOADED_FACTOR * kv)
        cache = shapes.stock_cache(self.model, offloading=True)
        row = self._baseline(cache, tokens, self.options.offloaded_steps)
        moved = {"warm_to_hot": kv, "hot_to_warm": kv}  # by its construction, all of it each way
        row |= {"hot_bytes": 0, "warm_bytes": kv, "cold_bytes": 0, "bytes_per_token": moved}
        return row | {"ceiling": self._ceiling(row, tokens * self.geometry.token_bytes)}

    def _baseline(self, cache: Any, tokens: int, steps: int) -> dict[str, Any]:
        self.say("fill", 0, 1)
        workload.fill_stock(cache, self.geometry, tokens, self.options.device)
        run = functools.partial(workload.step, self.model, cache)
        return self._decode(run, cache, min(self.options.warmup, 2), steps)[0]

    def _need(self, device_bytes: int, host_bytes: int) -> None:
        device, host = self.options.device, host_bytes
        if device.type != "cuda":
            device_bytes, host = 0, host_bytes + device_bytes
        free = memory.free_device_bytes(device)
        if device_bytes and device_bytes + HEADROOM > free:
            raise SkippedError(
                f"needs {format_bytes(device_bytes + HEADROOM)} of GPU memory, "
                f"{format_bytes(free)} are free"
            )
        available = memory.available_host_bytes()
        if host and host + HEADROOM // self.options.scale > available:
            raise SkippedError(
                f"needs {format_bytes(host)} of host memory, {format_bytes(available)} are "
                f"available"
            )


def _bytes_per_step(model: Any) -> int:
    """Return the weight bytes that a decode step reads: all but the table of embeddings."""
    total = sum(weight.nbytes for weight in model.parameters())
    table = model.get_input_embeddings().weight
    return total - (0 if table is model.get_output_embeddings().weight else table.nbytes)
