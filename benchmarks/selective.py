"""Selective decoding at long contexts, beside exact decoding with everything on the GPU.

Regime: one sequence, bf16, random weights and random KV filled in directly; each token is brought
to the host before the next, as generation does. Pages of the selecting layers are in pinned host
memory; the first `--dense-layers` layers are exact and hot. Two kinds of steps: `random` feeds
random tokens (hardly any locality: the worst case), `steady` feeds one token again and again. The
share of chosen head-pages that were in the reuse cache stands beside each, because that decides
the time. Rows: captured as a CUDA graph, and eager. Ceilings: reading weights and what attention
reads once from GPU memory, and moving the missed head-pages over the link, both at bandwidths
measured first. The last line of stdout is one JSON object.

    python benchmarks/selective.py --shape llama-3.1-8b:128K --shape qwen2.5-7b-1m:128K,1M \
        --exact 128K
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tierkv import api
from tierkv.bench import ceiling, memory, workload
from tierkv.cli_bench import contexts
from tierkv.config import Config
from tierkv.hf import shapes
from tierkv.hf.geometry import model_geometry
from tierkv.hf.graph import DecodeGraph
from tierkv.page import Geometry
from tierkv.selection.settings import selective_settings
from tierkv.units import format_bytes

STAGING_BYTES = 320 << 20
"""More than staging buffers take at most."""
ROOM_TOKENS = 4096
"""Tokens that the context may still grow by."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", action="append", metavar="NAME:TOKENS,...", required=True)
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--dense-layers", type=int, default=2)
    parser.add_argument("--selector", default="cuboid")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--eager-steps", type=int, default=8)
    parser.add_argument(
        "--exact", default="1", metavar="TOKENS",
        help="also all on the GPU, ours and transformers', up to this context",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    (exact,) = contexts(arguments.exact)
    limits = ceiling.measure(device, None)
    memory.give_back()
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}; host to device "
        f"{limits.host_to_device / 1e9:.1f} GB/s, "
        f"device memory {limits.device_memory / 1e12:.2f} TB/s"
    )
    print(f"{'shape':>15} {'tokens':>8} {'system':>22} {'steps':>7} {'ms/token':>9} {'reused':>7} "
          f"{'ceiling':>8} {'hot KV':>7} {'summaries':>10}")  # fmt: skip
    report: dict[str, Any] = {"machine": name, "settings": vars(arguments), "rows": [],
                              "host_to_device": limits.host_to_device,
                              "device_memory": limits.device_memory}  # fmt: skip
    for shape in arguments.shape:
        shape_name, _, lengths = shape.partition(":")
        config = shapes.shape_config(shape_name)
        model = shapes.random_model(config, device, torch.bfloat16)
        geometry = model_geometry(config, torch.bfloat16)
        assert geometry is not None
        run = Run(shape_name, model, geometry, limits, arguments, report)
        for tokens in contexts(lengths):
            run.selective(tokens)
            if tokens <= exact:
                run.exact(tokens)
                run.stock(tokens)
        del model, run
        memory.give_back()
    print(json.dumps(report))


class Run:
    """All rows of one model."""

    def __init__(
        self, name: str, model: Any, geometry: Geometry, limits: Any, arguments: Any, report: Any
    ):
        self.name, self.model, self.geometry, self.limits = name, model, geometry, limits
        self.arguments, self.report = arguments, report
        self.device = model.device
        table = model.get_input_embeddings().weight
        weights = sum(weight.nbytes for weight in model.parameters())
        tied = table is model.get_output_embeddings().weight
        self.weights = weights - (0 if tied else table.nbytes)

    def selective(self, tokens: int) -> None:
        """Decode with most of the KV in pinned memory."""
        g, a = self.geometry, self.arguments
        knobs = {
            "attention": "selective", "token_budget": a.token_budget, "selector": a.selector,
            "dense_layers": a.dense_layers, "max_context": tokens + ROOM_TOKENS,
        }  # fmt: skip
        spec = selective_settings(Config(**knobs), g, self.device, 0)
        pages, selecting = spec.max_pages + 2, g.layers - spec.dense_layers
        state = selecting * spec.state_bytes(g)
        dense = spec.dense_layers * pages * g.page_bytes
        cpu = (selecting * pages + 64) * g.frame_bytes
        with api.wrap(
            self.model, gpu_budget=state + dense + STAGING_BYTES, cpu_budget=cpu, **knobs
        ) as wrapped:
            start = time.perf_counter()
            tier_cache = wrapped.cache()
            workload.fill_tiers(tier_cache, g, tokens)
            memory.synchronize(self.device)
            filled = time.perf_counter() - start
            counters = wrapped.manager.selective.counters
            frames = selecting * (1 + spec.frames) * g.page_bytes
            more = {
                "hot_bytes": frames + spec.dense_layers * tokens // g.page_tokens * g.page_bytes,
                "summary_bytes": state - frames, "fill_seconds": filled,
            }  # fmt: skip
            graph = DecodeGraph(self.model, tier_cache, tokens + ROOM_TOKENS)
            eager = self.stepped(tier_cache)
            for way, call, steps in (
                ("eager", eager, a.eager_steps), ("captured", self.checked(graph), a.steps)
            ):  # fmt: skip
                for kind in ("random", "steady"):
                    self.decode(f"selective, {way}", tokens, kind, call, steps, counters, more)
            del graph
            tier_cache.close()

    def exact(self, tokens: int) -> None:
        """Decode with everything hot, captured."""
        g = self.geometry
        pages = (tokens + ROOM_TOKENS) // g.page_tokens + 2
        with api.wrap(
            self.model,
            gpu_budget=pages * g.layers * g.page_bytes + STAGING_BYTES,
            cpu_budget="1GiB",
        ) as wrapped:
            tier_cache = wrapped.cache()
            workload.fill_tiers(tier_cache, g, tokens)
            graph = DecodeGraph(self.model, tier_cache, tokens + ROOM_TOKENS)
            more = {"hot_bytes": tokens * g.token_bytes, "summary_bytes": 0}
            call, steps = self.checked(graph), self.arguments.steps
            self.decode("exact, captured", tokens, "random", call, steps, None, more)
            del graph
            tier_cache.close()

    def stock(self, tokens: int) -> None:
        """Decode with transformers' own cache, all on the GPU."""
        stock_cache = shapes.stock_cache(self.model)
        workload.fill_stock(stock_cache, self.geometry, tokens, self.device)
        more = {"hot_bytes": tokens * self.geometry.token_bytes, "summary_bytes": 0}
        call = self.stepped(stock_cache)
        self.decode("transformers", tokens, "random", call, 8, None, more)
        del stock_cache, call
        memory.give_back()

    def stepped(self, model_cache: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the model's own step over a cache."""
        return functools.partial(workload.step, self.model, model_cache)

    def checked(self, graph: DecodeGraph) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the graph's step; a step that cannot be replayed ends the benchmark."""

        def call(token: torch.Tensor) -> torch.Tensor:
            if graph.obstacle():
                raise SystemExit(f"cannot be captured: {graph.obstacle()}")
            return graph.step(token)

        return call

    @torch.no_grad()
    def decode(
        self, system: str, tokens: int, kind: str, call: Callable[[torch.Tensor], torch.Tensor],
        steps: int, counters: torch.Tensor | None, more: dict[str, Any],
    ) -> None:  # fmt: skip
        """Time steps and add a row."""
        generator = torch.Generator().manual_seed(3)
        feed = torch.randint(
            1, self.model.config.vocab_size, (steps + 4, 1, 1), generator=generator
        )
        feed = (feed if kind == "random" else feed[:1].expand_as(feed)).to(self.device)
        seconds, before = [], None
        for index, token in enumerate(feed):
            if index == 4:
                before = None if counters is None else counters.sum(0).tolist()
            start = time.perf_counter()
            call(token)[:, -1].argmax(-1).item()
            if index >= 4:
                seconds.append(time.perf_counter() - start)
        g, reused, bounds = self.geometry, None, {}
        read = tokens * g.token_bytes
        if counters is not None and before is not None:
            hits, misses, _ = (b - a for a, b in zip(before, counters.sum(0).tolist(), strict=True))
            reused = hits / max(hits + misses, 1)
            head_page = g.page_bytes // g.kv_heads
            bounds["link"] = misses / steps * head_page / self.limits.host_to_device
            dense = self.arguments.dense_layers
            chosen = (hits + misses) / steps * head_page
            read = chosen + more["summary_bytes"] + read * dense / g.layers
        bounds["memory"] = (self.weights + read) / self.limits.device_memory
        row = {
            "shape": self.name, "tokens": tokens, "system": system, "kind": kind,
            "ms_mean": 1e3 * statistics.fmean(seconds), "ms_p50": 1e3 * statistics.median(seconds),
            "ms_p99": 1e3 * sorted(seconds)[int(0.99 * len(seconds))], "steps": steps,
            "reused": reused, "bounds_ms": {name: 1e3 * bound for name, bound in bounds.items()},
            "kv_bytes": tokens * g.token_bytes, **more,
        }  # fmt: skip
        self.report["rows"].append(row)
        ceiling_ms = sum(row["bounds_ms"].values())
        print(f"{self.name:>15} {tokens:>8} {system:>22} {kind:>7} {row['ms_p50']:>9.2f} "
              f"{'' if reused is None else f'{reused:.1%}':>7} {ceiling_ms:>8.2f} "
              f"{more['hot_bytes'] / row['kv_bytes']:>7.1%} "
              f"{format_bytes(more['summary_bytes']):>10}", flush=True)  # fmt: skip
        if self.arguments.json:
            with open(self.arguments.json, "w", encoding="utf-8") as file:
                json.dump(self.report, file, indent=1)


if __name__ == "__main__":
    main()
