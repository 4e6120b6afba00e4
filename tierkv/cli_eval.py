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

from tierkv.bench.encoded import CLAIMED
from tierkv.bench.quality import Options, run, text_ids
from tierkv.cli_bench import contexts, machine
from tierkv.cli_report import TABLE_WIDTH, StepLine
from tierkv.codec_names import CODECS
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
         "recent_tokens", "dense_layers", "residual_tokens")  # fmt: skip
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
        usual = "cuboid" if device.type == "cuda" else "oracle,cuboid"
        args.selectors = "" if args.codecs else usual
    if args.plot and not args.selectors:
        raise ConfigError("--plot draws selectors against budgets: add --selectors")
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
        codecs=_codecs(args.codecs),
        tiers=tiers,
    )


def _check(args: argparse.Namespace) -> None:
    """Check what needs no model."""
    for name in ("continuation", "needles"):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name} must not be negative, got {getattr(args, name)}")
    if not args.continuation and not args.needles:
        raise ConfigError("--continuation 0 and --needles 0 leave nothing to evaluate")
    _codecs(args.codecs)
    if args.selectors is not None:
        _selectors(args.selectors)
    _budgets(args.budgets)


def _selectors(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(","))) if text else ()
    for name in names:
        if name not in SELECTORS:
            raise ConfigError(f"--selectors must be among {', '.join(SELECTORS)}, got {name!r}")
    return names


def _codecs(text: str) -> tuple[str, ...]:
    names = CODECS if text == "all" else tuple(dict.fromkeys(text.split(","))) if text else ()
    for name in names:
        if name not in CODECS:
            raise ConfigError(f"--codecs must be among {', '.join(CODECS)} or all, got {name!r}")
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
        encoded = [row for row in report["continuation"] if row["codec"] != "raw"]
        for row in report["continuation"]:
            if row in encoded:
                continue
            table.add_row(*_named(row), f"{row['perplexity']:.3f}",
                          f"{row['perplexity_ratio']:.4f}", f"{row['top1_agreement']:.1%}",
                          f"{row['kl']:.5f}", *_costs(row))  # fmt: skip
        if encoded:
            console.print(_codec_table(report["continuation"][0], encoded, steps, context))
        if len(encoded) + 1 < len(report["continuation"]) or not encoded:
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


def _codec_table(
    exact: dict[str, Any], encoded: list[dict[str, Any]], steps: int, context: str
) -> Table:
    """Return the table of codecs beside what the literature claims for such ones."""
    table = Table(title=f"codecs, continuation of {steps} tokens, {context}", title_justify="left")
    table.add_column("codec of the context's pages")
    for name in ("bytes/token", "of raw", "perplexity", "x raw", "claimed loss", "top-1 agreement",
                 "KL", "worst keys", "worst values"):  # fmt: skip
        table.add_column(name, justify="right")
    raw = exact["bytes_per_token"]
    for row in (exact, *encoded):
        worst = [f"{row[f'{name}_error']:.2%} (layer {row[f'{name}_error_layer']})"
                 if row in encoded else "-" for name in ("k", "v")]  # fmt: skip
        table.add_row(row["codec"], f"{row['bytes_per_token']:,.0f}",
                      f"{row['bytes_per_token'] / raw:.1%}", f"{row['perplexity']:.3f}",
                      f"{row['perplexity_ratio']:.4f}", CLAIMED.get(row["codec"], "-"),
                      f"{row['top1_agreement']:.1%}", f"{row['kl']:.5f}", *worst)  # fmt: skip
    return table


def _table(title: str, *columns: str, costs: bool = True) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("attention")
    for name in ("budget", *columns, *(("tokens read", "KV read", "seconds") if costs else ())):
        table.add_column(name, justify="right")
    return table


def _named(row: dict[str, Any]) -> tuple[str, str]:
    name = "exact" if row.get("codec", "raw") == "raw" else f"exact, {row['codec']}"
    return (row["selector"] or name, f"{row['token_budget']:,}" if row["selector"] else "-")


def _costs(row: dict[str, Any]) -> tuple[str, str, str]:
    return f"{row['tokens_read']:,.0f}", f"{row['kv_share']:.1%}", f"{row['seconds']:.1f}"
