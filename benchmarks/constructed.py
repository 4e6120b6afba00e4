"""Whether every needle is found at any length: exactly and selectively, pages on all three tiers.

Regime: the constructed model (`tierkv/bench/constructed.py`), batch 1, a real chunked prefill of
filler with a needle at each of --depths depths, then each needle's key asked for and its answer of
4 tokens generated greedily, all through `tierkv.wrap`. An answer needs every lookup head of every
layer to read the needle's pages; otherwise the model says so. --hot and --warm are the shares of
the KV that GPU (with summaries and reuse cache, for selective) and pinned memory may hold; the rest
is on disk, in --store, and every chunk of the prefill reads it again. Ceiling: 100% of the needles.
ms/token is that of this small model, disk reads included: no claim about speed. The last line of
stdout is one JSON object; the exit code is 1 if a needle was not found.

    python benchmarks/constructed.py --tokens 128K,1M --store /mnt/nvme/scratch
    python benchmarks/constructed.py --tokens 16K --device cpu       # dry run
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import tierkv
from tierkv.bench import constructed, memory
from tierkv.cli_bench import contexts
from tierkv.config import SELECTORS, Config
from tierkv.hf.geometry import model_geometry
from tierkv.page import Geometry
from tierkv.selection.settings import selective_settings
from tierkv.units import format_bytes

ANSWER_TOKENS = 4
ROOM_TOKENS = 1024
"""Tokens that the context may still grow by."""
STAGING_SHARE = 1 / 8
"""Of `gpu_budget` that staging may take, beside what is asked for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", default="128K,1M")
    parser.add_argument("--attention", default="exact,cuboid", help="exact, or names of selectors")
    parser.add_argument("--token-budget", type=int, default=4096)
    parser.add_argument("--hot", type=float, default=0.3, help="share of the KV")
    parser.add_argument("--warm", type=float, default=0.3, help="share of the KV; 1: no disk")
    parser.add_argument("--store", default=None, help="where pages on disk go (default: TMPDIR)")
    parser.add_argument("--depths", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-tokens", type=int, default=32)
    parser.add_argument("--prefill-chunk", type=int, default=32768)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    a = parser.parse_args()
    attentions = a.attention.split(",")
    if unknown := set(attentions) - {"exact", *SELECTORS}:
        parser.error(f"--attention: {', '.join(sorted(unknown))}")
    device, dtype = torch.device(a.device), getattr(torch, a.dtype)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    report: dict[str, Any] = {"benchmark": "constructed", "machine": name, "settings": vars(a),
                              "torch": torch.__version__, "rows": []}  # fmt: skip
    model = constructed.build(
        layers=a.layers, heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim, device=device,
        dtype=dtype, seed=a.seed,
    )  # fmt: skip
    geometry = model_geometry(model.config, dtype, a.page_tokens)
    assert geometry is not None
    print(f"{name}, torch {torch.__version__}: {a.layers} layers, {a.heads} heads on {a.kv_heads} "
          f"KV heads of {a.head_dim}, {a.dtype}")  # fmt: skip
    print(f"{'tokens':>8} {'attention':>10} {'found':>7} {'tokens right':>12} {'prefill':>9} "
          f"{'ms/token':>9} {'KV':>9} {'hot/warm/cold pages of needles':>32}")  # fmt: skip
    for tokens in contexts(a.tokens):
        context = constructed.needles(tokens, depths=a.depths, answer=ANSWER_TOKENS, seed=a.seed)
        for attention in attentions:
            report["rows"].append(measure(model, geometry, context, attention, a))
            memory.give_back()
            if a.json:
                Path(a.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    if any(row["found"] < row["needles"] for row in report["rows"]):
        sys.exit(1)


def measure(
    model: Any, geometry: Geometry, context: constructed.Needles, attention: str, a: Any
) -> dict[str, Any]:
    """Prefill, ask for every needle, print a line and return the row."""
    tokens = context.ids.shape[1]
    with tempfile.TemporaryDirectory(dir=a.store, prefix="constructed-") as folder:
        given = settings(geometry, tokens, attention, model.device, a)
        if a.warm < 1:
            given["store"] = folder
        with tierkv.wrap(model, **given) as wrapped:
            tier_cache = wrapped.cache()
            start = time.perf_counter()
            wrapped.prefill(context.ids.to(model.device), tier_cache, on_progress=progress)
            prefilled = time.perf_counter()
            needles = range(len(context))
            homes = [constructed.homes(tier_cache, context, index) for index in needles]
            answers = [constructed.ask(wrapped, tier_cache, context, index) for index in needles]
            seconds = time.perf_counter() - prefilled
            stats = wrapped.stats()
            tier_cache.close()
    right = [sum(map(int.__eq__, *pair)) for pair in zip(answers, context.answers, strict=True)]
    row = {
        "tokens": tokens, "attention": attention, "needles": len(context),
        "found": sum(count == ANSWER_TOKENS for count in right), "tokens_right": sum(right),
        "answers": answers, "expected": context.answers, "starts": context.starts,
        "homes": homes, "prefill_seconds": prefilled - start,
        "ms_per_token": 1e3 * seconds / (len(context) * ANSWER_TOKENS),
        "kv_bytes": tokens * geometry.token_bytes, "settings": given | {"store": a.warm < 1},
        "stats": stats,
    }  # fmt: skip
    pages = "/".join(str(sum(count[tier] for count in homes)) for tier in ("hot", "warm", "cold"))
    print(f"{tokens:>8} {attention:>10} {row['found']:>4}/{len(context):<2} "
          f"{row['tokens_right']:>9}/{len(context) * ANSWER_TOKENS} "
          f"{row['prefill_seconds']:>7.1f} s {row['ms_per_token']:>9.1f} "
          f"{format_bytes(row['kv_bytes']):>9} {pages:>32}", flush=True)  # fmt: skip
    return row


def settings(
    geometry: Geometry, tokens: int, attention: str, device: torch.device, a: Any
) -> dict[str, Any]:
    """Return settings of `tierkv.wrap`: budgets as shares of the KV."""
    whole = (tokens + ROOM_TOKENS) * geometry.token_bytes
    knobs: dict[str, Any] = {"attention": "exact"}
    least = 0
    if attention != "exact":
        knobs = {"attention": "selective", "selector": attention, "token_budget": a.token_budget,
                 "max_context": tokens + ROOM_TOKENS}  # fmt: skip
        spec = selective_settings(
            Config(**knobs, page_tokens=geometry.page_tokens), geometry, device, 0
        )
        selecting = geometry.layers - spec.dense_layers
        least = selecting * spec.state_bytes(geometry)
        least += spec.dense_layers * 8 * geometry.page_bytes
    hot = max(a.hot * whole, least / (1 - STAGING_SHARE))
    return knobs | {
        "page_tokens": geometry.page_tokens, "prefill_chunk": a.prefill_chunk,
        "gpu_budget": int(hot),
        "cpu_budget": int(a.warm * whole) if a.warm < 1 else int(1.1 * whole),
        "disk_budget": int(2 * whole) + (1 << 30),
    }  # fmt: skip


def progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\rprefill {done}/{total}", end="\n" if done == total else "", file=sys.stderr)


if __name__ == "__main__":
    main()
