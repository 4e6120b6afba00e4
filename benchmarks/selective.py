"""Selective decoding at long contexts, beside exact decoding with everything on the GPU.

Regime: one sequence, or `--batch` of them in one step, bf16, random weights and random KV filled in
directly; each token is brought to the host before the next, as generation does. Pages of the
selecting layers are in pinned host memory; the first `--dense-layers` layers are exact and hot. Two
kinds of steps: `random` lets random weights choose for random tokens (hardly any locality: the
worst case), `replayed` chooses what SmolLM2 chose on real text, scaled up
(`tierkv/bench/locality.py`); scoring still takes its time. What decides the time is `ready`, the
share of chosen head-pages that were in frames when a layer asked. Where lookups are foreseen
(`--look-ahead`), `recall` is the share of the chosen that were foreseen, and `early` the share of
fetched bytes that came ahead of their layer. Rows: eager; captured as a CUDA graph; the same with
the model's layers compiled; both with lookups foreseen. `bare` is the captured step of the same
model over 256 tokens: its floor. Ceilings: reading weights and what attention reads once from GPU
memory, and moving the missed head-pages over the link, both at bandwidths measured first. The last
line of stdout is one JSON object. Of a batch, a step makes a token of each sequence, and times,
shares and bytes are of a step; with `--shared` they are samples of one prompt, whose pages are
there once.

With `--warm SHARE --store DIR` there are replayed rows only, first with three tiers: pinned memory
for that share of the selecting layers' KV, the rest on disk, pages on disk waited for. Every row
then replays pages of its own, none of which was chosen before its warm-ups; take 64 of those
(`--warmups`) and at most 64 steps, the recording's length. A line below says what is read from disk
per token, ahead of need and waited for, and what share of the throughput without disk is left.

    python benchmarks/selective.py --shape llama-3.1-8b:128K --shape qwen2.5-7b-1m:128K,1M \
        --exact 128K --compile
    python benchmarks/selective.py --shape llama-3.1-8b:128K --batch 8 --shared --compile
    python benchmarks/selective.py --shape qwen2.5-7b-1m:1M --compile --eager-steps 0 \
        --warm 1/2 --store DIR --warmups 64 --steps 64
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from tierkv import api
from tierkv.bench import ceiling, memory, workload
from tierkv.bench.locality import Player, Recording, ReplayReader, replay
from tierkv.cli_bench import contexts
from tierkv.config import Config
from tierkv.hf import shapes
from tierkv.hf.geometry import model_geometry
from tierkv.hf.graph import DecodeGraph
from tierkv.kernels.build import available
from tierkv.page import Geometry
from tierkv.paging.selective import Selective, SelectiveState
from tierkv.selection.settings import selective_settings
from tierkv.units import format_bytes

STAGING_BYTES = 320 << 20
"""More than staging buffers take at most."""
RECORDED = Path(__file__).parent / "data" / "locality.npz"
ROOM_TOKENS = 4096
"""Tokens that the context may still grow by."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", action="append", metavar="NAME:TOKENS,...", required=True)
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--dense-layers", type=int, default=2)
    parser.add_argument("--selector", default="cuboid")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--eager-steps", type=int, default=8)
    parser.add_argument("--look-ahead", type=int, default=0, metavar="LAYERS")
    parser.add_argument("--compile", action="store_true", help="also with compiled layers")
    parser.add_argument(
        "--exact", default="1", metavar="TOKENS",
        help="also all on the GPU, ours and transformers', up to this context",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=1, help="sequences that run together")
    parser.add_argument("--shared", action="store_true", help="they are samples of one prompt")
    parser.add_argument("--warmups", type=int, default=8, help="steps before those timed")
    parser.add_argument("--warm", metavar="SHARE", help="also three tiers; such as 1/2")
    parser.add_argument("--store", metavar="DIR", help="where the third tier lies")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if bool(arguments.warm) != bool(arguments.store):
        parser.error("--warm and --store go together")
    if not available():
        raise SystemExit(f"the kernels cannot run here: {available().reason}")
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
    print(f"{'shape':>15} {'tokens':>8} {'batch':>5} {'system':>26} {'steps':>8} {'ms':>9} "
          f"{'ready':>7} {'recall':>7} {'early':>7} {'ceiling':>8} {'hot KV':>7} {'summaries':>10}"
          )  # fmt: skip
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
        if not arguments.warm:
            run.exact(256, "bare")
        for tokens in contexts(lengths):
            floors = ", ".join(f"{name} {ms:.1f}" for name, ms in run.floors(tokens).items())
            print(f"{shape_name:>15} {tokens:>8} floors, ms: {floors}")
            if arguments.warm:
                run.selective(tokens, Fraction(arguments.warm))
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
        self.batch = workload.Batch(arguments.batch, arguments.shared)
        table = model.get_input_embeddings().weight
        weights = sum(weight.nbytes for weight in model.parameters())
        tied = table is model.get_output_embeddings().weight
        self.weights = weights - (0 if tied else table.nbytes)

    def selective(self, tokens: int, warm: Fraction | None = None) -> None:
        """Decode with most of the KV in pinned memory, or a share of it and the rest on disk."""
        torch.cuda.reset_peak_memory_stats(self.device)
        g, a = self.geometry, self.arguments
        knobs: dict[str, Any] = {
            "attention": "selective", "token_budget": a.token_budget, "selector": a.selector,
            "dense_layers": a.dense_layers, "max_context": tokens + ROOM_TOKENS,
            "max_batch": a.batch,
        }  # fmt: skip
        spec = selective_settings(Config(**knobs), g, self.device, 0)
        pages = self.batch.pages(g, tokens, ROOM_TOKENS)
        selecting = g.layers - spec.dense_layers
        state_bytes = selecting * spec.state_bytes(g)
        dense = spec.dense_layers * pages * g.page_bytes
        cpu = (selecting * pages + 64) * g.frame_bytes
        system = "selective" if warm is None else "three tiers"
        if warm is not None:
            prompt = selecting * (tokens // g.page_tokens) * g.frame_bytes
            below = self.batch.prompts * prompt
            cpu = int(below * warm)
            knobs |= {"store": a.store, "disk_budget": below + (4 << 30), "disk_floor": 1 << 30}
        with api.wrap(
            self.model, gpu_budget=state_bytes + dense + STAGING_BYTES, cpu_budget=cpu, **knobs
        ) as wrapped:
            start = time.perf_counter()
            tier_cache = wrapped.cache()
            self.batch.fill(tier_cache, g, tokens)
            memory.synchronize(self.device)
            filled = time.perf_counter() - start
            state = wrapped.manager.selective
            kv = self.batch.kv_bytes(g, tokens)
            frames = selecting * a.batch * (1 + spec.frames) * g.page_bytes
            more = {
                "hot_bytes": frames + spec.dense_layers * kv // g.layers,
                "summary_bytes": state_bytes - frames, "fill_seconds": filled,
            }  # fmt: skip
            if a.eager_steps and warm is None:
                eager = self.stepped(tier_cache)
                self.decode("selective, eager", tokens, "random", eager, a.eager_steps, state, more)
            ways: dict[str, dict[str, Any]] = {"captured": {}}
            if a.look_ahead:
                ways["ahead"] = {"look_ahead": a.look_ahead}
            for way in list(ways) if a.compile else ():
                ways[f"{way}, compiled"] = ways[way] | {"compiled": True}
            query = torch.empty(
                (a.batch, self.model.config.num_attention_heads, 1, g.k_dim),
                dtype=g.dtype, device=self.device,
            )  # fmt: skip
            for kind in ("replayed",) if a.warm else ("random", "replayed"):
                for seed, (way, options) in enumerate(ways.items()):
                    player = None
                    if kind == "replayed":
                        player = self.player(spec, tokens, seed)
                    state.reader = player and ReplayReader(wrapped.manager, state, query, player)
                    graph = DecodeGraph(self.model, tier_cache, tokens + ROOM_TOKENS, **options)
                    step, name = self.checked(graph), f"{system}, {way}"
                    more["pinned_bytes"] = wrapped.manager.warm.taken_bytes
                    self.decode(name, tokens, kind, step, a.steps, state, more, player)
            state.reader = None
            del graph, step
            tier_cache.close()

    def player(self, spec: Selective, tokens: int, seed: int) -> Player:
        """Return SmolLM2's choices at the sizes of this model, the pages placed by a seed."""
        made = replay(
            Recording.load(RECORDED),
            layers=self.geometry.layers - spec.dense_layers,
            kv_heads=self.arguments.batch * self.geometry.kv_heads,
            budget_pages=spec.budget_pages,
            first=spec.sink_pages,
            stop=tokens // self.geometry.page_tokens - spec.recent_pages,
            steps=self.arguments.steps + self.arguments.warmups,
            seed=seed,
        )
        return Player(made, self.device, nearly=bool(self.arguments.warm))

    def exact(self, tokens: int, name: str = "exact") -> None:
        """Decode with everything hot, captured."""
        torch.cuda.reset_peak_memory_stats(self.device)
        g, pages = self.geometry, self.batch.pages(self.geometry, tokens, ROOM_TOKENS)
        with api.wrap(
            self.model,
            gpu_budget=pages * g.layers * g.page_bytes + STAGING_BYTES,
            cpu_budget="1GiB",
        ) as wrapped:
            tier_cache = wrapped.cache()
            self.batch.fill(tier_cache, g, tokens)
            more = {"hot_bytes": self.batch.kv_bytes(g, tokens), "summary_bytes": 0}
            ways = ("captured", "compiled") if self.arguments.compile else ("captured",)
            for way in ways:
                graph = DecodeGraph(
                    self.model, tier_cache, tokens + ROOM_TOKENS, compiled=way == "compiled"
                )
                call, steps = self.checked(graph), self.arguments.steps
                self.decode(f"{name}, {way}", tokens, "random", call, steps, None, more)
            del graph, call
            tier_cache.close()

    def stock(self, tokens: int) -> None:
        """Decode with transformers' own cache, all on the GPU."""
        stock_cache = shapes.stock_cache(self.model)
        batch = self.batch.sequences
        workload.fill_stock(stock_cache, self.geometry, tokens, self.device, batch)
        more = {"hot_bytes": batch * tokens * self.geometry.token_bytes, "summary_bytes": 0}
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
        steps: int, state: SelectiveState | None, more: dict[str, Any],
        player: Player | None = None,
    ) -> None:  # fmt: skip
        """Time steps and add a row."""
        generator = torch.Generator().manual_seed(3)
        warmups = self.arguments.warmups
        feed = torch.randint(
            1,
            self.model.config.vocab_size,
            (steps + warmups, self.arguments.batch, 1),
            generator=generator,
        ).to(self.device)
        seconds: list[float] = []
        before = after = (0,) * 8
        disk_before: dict[str, float] = {}
        for index, token in enumerate(feed):
            if index == warmups:
                before, disk_before = _counts(state), _disk(state)
            if player is not None:
                player.advance()
            start = time.perf_counter()
            call(token)[:, -1].argmax(-1).tolist()
            if index >= warmups:
                seconds.append(time.perf_counter() - start)
        g, bounds, batch = self.geometry, {}, self.arguments.batch
        read, shares = (
            batch * tokens * g.token_bytes,
            {"ready": None, "recall": None, "early": None},
        )
        if state is not None:
            after = _counts(state)
            hits, late, awaited, used, _, early, _, _ = (
                b - a for a, b in zip(before, after, strict=True)
            )
            late += awaited
            shares["ready"] = hits / max(hits + late, 1)
            more = more | {key: (value - disk_before.get(key, 0)) / steps
                           for key, value in _disk(state).items()}  # fmt: skip
            if early:
                shares |= {"recall": used / (hits + late), "early": early / (early + late)}
            head_page, misses = g.page_bytes // g.kv_heads, early + late
            more = more | {"link_bytes_per_token": misses / steps * head_page}
            bounds["link"] = more["link_bytes_per_token"] / self.limits.host_to_device
            dense = self.arguments.dense_layers
            chosen = (hits + late) / steps * head_page
            read = chosen + more["summary_bytes"] + read * dense / g.layers
        bounds["memory"] = (self.weights + read) / self.limits.device_memory
        row = {
            "shape": self.name, "tokens": tokens, "batch": batch, "system": system, "kind": kind,
            "ms_mean": 1e3 * statistics.fmean(seconds), "ms_p50": 1e3 * statistics.median(seconds),
            "ms_p99": 1e3 * sorted(seconds)[int(0.99 * len(seconds))], "steps": steps,
            **shares, "bounds_ms": {name: 1e3 * bound for name, bound in bounds.items()},
            "kv_bytes": self.batch.kv_bytes(g, tokens), "floors_ms": self.floors(tokens),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated(self.device), **more,
        }  # fmt: skip
        self.report["rows"].append(row)
        ceiling_ms = sum(row["bounds_ms"].values())
        texts = ["" if share is None else f"{share:.1%}" for share in shares.values()]
        print(f"{self.name:>15} {tokens:>8} {batch:>5} {system:>26} {kind:>8} "
              f"{row['ms_p50']:>9.2f} {texts[0]:>7} {texts[1]:>7} {texts[2]:>7} {ceiling_ms:>8.2f} "
              f"{more['hot_bytes'] / row['kv_bytes']:>7.1%} "
              f"{format_bytes(more['summary_bytes']):>10}", flush=True)  # fmt: skip
        if self.arguments.warm and kind == "replayed":
            self.compare(row)
        if self.arguments.json:
            with open(self.arguments.json, "w", encoding="utf-8") as file:
                json.dump(self.report, file, indent=1)

    def compare(self, row: dict[str, Any]) -> None:
        """Print what a row reads from disk, or how the same row with three tiers compares."""
        if "questions" in row:
            read = (row["pages_ahead"] + row["pages_awaited"]) * self.geometry.frame_bytes
            print(f"{'':>24} mean {row['ms_mean']:.2f} ms; disk: {format_bytes(int(read))} a "
                  f"token, {row['pages_ahead']:.1f} pages ahead, {row['pages_awaited']:.1f} "
                  f"awaited in {row['questions']:.1f} questions and "
                  f"{1e3 * row['seconds_awaited']:.2f} ms; filled in {row['fill_seconds']:.0f} s",
                  flush=True)  # fmt: skip
            return
        name = row["system"].replace("selective", "three tiers")
        other = next(
            other for other in self.report["rows"]
            if other["system"] == name and other["tokens"] == row["tokens"]
            and other["shape"] == row["shape"]
        )  # fmt: skip
        other["of_two_tiers"] = {key: row[key] / other[key] for key in ("ms_mean", "ms_p50")}
        print(f"{'':>24} mean {row['ms_mean']:.2f} ms; three tiers have "
              f"{other['of_two_tiers']['ms_mean']:.1%} of this throughput, by medians "
              f"{other['of_two_tiers']['ms_p50']:.1%}", flush=True)  # fmt: skip

    def floors(self, tokens: int) -> dict[str, float]:
        """Return the time of reading weights and all KV from GPU memory, by the KV's dtype.

        Each sequence reads its own, also where they share a prompt.
        """
        kv = self.arguments.batch * tokens * self.geometry.token_bytes
        parts = {"dense bf16": kv, "dense int8": kv // 2, "weights": 0}
        rate = self.limits.device_memory / 1e3
        return {name: (self.weights + num_bytes) / rate for name, num_bytes in parts.items()}


def _counts(state: SelectiveState | None) -> tuple[int, ...]:
    """Return what choosing has counted so far: four numbers of the layers, four ahead of them."""
    if state is None:
        return (0,) * 8
    return tuple(torch.cat([state.counters.sum(0), state.announced.sum(0)]).tolist())


def _disk(state: SelectiveState | None) -> dict[str, float]:
    """Return what waiting for pages on disk has counted so far."""
    report = state.faults.report() if state is not None and state.faults is not None else {}
    names = ("questions", "pages_awaited", "seconds_awaited", "pages_ahead", "pages_left")
    return {name: report[name] for name in names if report}


if __name__ == "__main__":
    main()
