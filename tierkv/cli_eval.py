"""``tierkv eval``: flags, progress on stderr, tables and one line of JSON on stdout."""

from __future__ import annotations

import argparse
import importlib.resources
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tierkv.bench.quality import Options, run, text_ids
from tierkv.cli_bench import contexts, machine
from tierkv.cli_report import TABLE_WIDTH, StepLine
from tierkv.config import SELECTORS, Config
from tierkv.errors import ConfigError
from tierkv.hf import loading
from tierkv.selection import selector
from tierkv.units import format_bytes

TOKENS = 4096
"""Context where the text and the model allow so much."""
QUESTION_TOKENS = 64
"""Room for a needle's question and answer."""
TIERS = ("gpu_budget", "cpu_budget", "store", "page_tokens", "prefill_chunk", "sink_tokens",
         "recent_tokens", "dense_layers")  # fmt: skip
"""Flags that are settings of `tierkv.wrap`."""


def evaluate(args: argparse.Namespace) -> int:
    """Run ``tierkv eval`` and return its exit code.

    Raises:
        TierKVError: a flag is wrong, or the model cannot be evaluated.
    """
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'tierkv-offload[bench]'")
    started = time.perf_counter()
    _check(args)
    loading.quiet()
    device = loading.pick_device(args.device)
    if args.selectors is None:
        args.selectors = "cuboid" if device.type == "cuda" else "oracle,cuboid"
    for chosen in map(selector, _selectors(args.selectors)):
        if device.type == "cuda" and chosen.parts and chosen.kernel is None:
            raise ConfigError(f"--selectors: {chosen.name} runs on the CPU only; add --device cpu")
    on_cpu = args.dtype == "auto" and device.type == "cpu"
    dtype = "float32" if on_cpu else args.dtype  # faster there, and no rounding in the comparison
    text = _text(args.text)
    model, tokenizer = loading.load_model(args.model, device=args.device, dtype=dtype)
    options = options_from(args, model, tokenizer, text)
    described = {"machine": machine(args.commit), "model": Path(args.model).resolve().name,
                 "dtype": str(model.dtype).removeprefix("torch."),
                 "text": Path(args.text).name if args.text else "bundled"}  # fmt: skip
    file = Path(args.json) if args.json else None

    def save(report: dict[str, Any]) -> None:
        report["seconds"] = round(time.perf_counter() - started, 1)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**described, **report}) + "\n")

    bar = StepLine()
    with bar:
        report = {**described, **run(model, tokenizer, options, bar.say, save)}
    if args.plot:
        from tierkv.bench.quality_plot import draw  # matplotlib is optional

        draw(report, Path(args.plot))
        print(f"wrote {args.plot}", file=sys.stderr)
    print_tables(report)
    print(json.dumps(report))
    return 0


def options_from(args: argparse.Namespace, model: Any, tokenizer: Any, text: str) -> Options:
    """Return the options that flags mean for a model and a text.

    Raises:
        ConfigError: a flag cannot be understood, or asks for more than text or model have.
    """
    tiers = {name: getattr(args, name) for name in TIERS if getattr(args, name) is not None}
    page = Config.from_kwargs(**tiers).page_tokens
    budgets = _budgets(args.budgets)
    if min(budgets) < page:
        raise ConfigError(f"--budgets must be at least a page ({page} tokens), got {args.budgets}")
    limit = model.config.get_text_config(decoder=True).max_position_embeddings
    after = max(args.continuation, QUESTION_TOKENS if args.needles else 0)
    length = len(text_ids(tokenizer, text))
    spare = max(args.continuation, length // 4 if args.needles else 0)  # so that slices differ
    tokens = min(TOKENS, length - spare, limit - after)
    if args.tokens is not None:
        tokens = _numbers("--tokens", args.tokens)[0]
        if tokens + after > limit:
            raise ConfigError(
                f"--tokens {tokens} and {after} after them exceed the model's {limit} tokens"
            )
    if tokens < 2 * page:
        raise ConfigError(
            f"--tokens must be at least {2 * page} (two pages), got {tokens}; --text has {length}"
        )
    return Options(
        text=text,
        tokens=tokens,
        continuation=args.continuation,
        needles=args.needles,
        selectors=_selectors(args.selectors),
        budgets=budgets,
        tiers=tiers,
    )


def _check(args: argparse.Namespace) -> None:
    """Check what needs no model."""
    for name in ("continuation", "needles"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name} must not be negative, got {getattr(args, name)}")
    if not args.continuation and not args.needles:
        raise ConfigError("--continuation 0 and --needles 0 leave nothing to evaluate")
    if args.selectors is not None:
        _selectors(args.selectors)
    _budgets(args.budgets)


def _selectors(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SELECTORS:
            raise ConfigError(f"--selectors must be among {', '.join(SELECTORS)}, got {name!r}")
    return names


def _budgets(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_numbers("--budgets", text)))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return contexts(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _text(name: str | None) -> str:
    """Return a file's text, or the bundled texts one after the other."""
    if name is None:
        folder = importlib.resources.files("tierkv").joinpath("data")
        files = sorted((f for f in folder.iterdir() if f.name.endswith(".txt")), key=str)
        return "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {name} cannot be read as text: {error}") from None


def print_tables(report: dict[str, Any]) -> None:
    """Print a table each for the layers, the continuation and the needles on stdout."""
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    context = f"{report['model']} {report['dtype']}, {report['tokens']:,} tokens of context"
    if report["layers_left_out"]:
        console.print(f"no layer is looked into: {report['layers_left_out']}")
    if report["layers"]:
        table = _table(f"layers that select, each by itself, {context}", "attention recovered",
                       "worst layer", "output error", "worst layer", "moved per token",
                       costs=False)  # fmt: skip
        for row in report["layers"]:
            first = len(row["mass"]) - row["selecting_layers"]
            table.add_row(*_named(row), f"{row['mass_mean']:.1%}",
                          f"{min(row['mass'][first:]):.1%}", f"{row['error_mean']:.1%}",
                          f"{max(row['error'][first:]):.1%}",
                          format_bytes(round(row["moved_bytes"])))  # fmt: skip
        console.print(table)
    if report["continuation"]:
        steps = report["continuation"][0]["steps"]
        table = _table(f"continuation of {steps} tokens, {context}",
                       "perplexity", "x exact", "top-1 agreement", "KL")  # fmt: skip
        for row in report["continuation"]:
            table.add_row(*_named(row), f"{row['perplexity']:.3f}",
                          f"{row['perplexity_ratio']:.4f}", f"{row['top1_agreement']:.1%}",
                          f"{row['kl']:.5f}", *_costs(row))  # fmt: skip
        console.print(table)
    if report["needles"]:
        seeds = report["needles"][0]["needles"]
        depths = sorted(report["needles"][0]["by_depth"])
        table = _table(f"{seeds} needles, {context}", "answer tokens right", "score",
                       "whole answers", *(f"depth {depth}" for depth in depths))  # fmt: skip
        for row in report["needles"]:
            by_depth = (row["by_depth"][depth] for depth in depths)
            table.add_row(*_named(row), f"{row['right']}/{row['answer_tokens']}",
                          f"{row['score']:.1%}", f"{row['whole']}/{row['needles']}",
                          *(f"{count}/{of}" for count, of in by_depth), *_costs(row))  # fmt: skip
        console.print(table)


def _table(title: str, *columns: str, costs: bool = True) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("attention")
    for name in ("budget", *columns, *(("tokens read", "KV read", "seconds") if costs else ())):
        table.add_column(name, justify="right")
    return table


def _named(row: dict[str, Any]) -> tuple[str, str]:
    return (row["selector"] or "exact", f"{row['token_budget']:,}" if row["selector"] else "-")


def _costs(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['tokens_read']:,.0f}", f"{row['kv_share']:.1%}", f"{row['seconds']:.1f}"
