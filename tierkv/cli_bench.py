"""``tierkv bench``: flags, progress on stderr, a table and one line of JSON on stdout."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tierkv.bench.options import Options
from tierkv.bench.runs import run
from tierkv.bench.summary import OFFLOADED, STOCK, TIERKV, goals, hot_label
from tierkv.cli_report import TABLE_WIDTH, StepLine
from tierkv.codec_names import parse_codecs
from tierkv.doctor import gpu
from tierkv.errors import ConfigError
from tierkv.hf import loading
from tierkv.units import format_bytes, parse_bytes

CONTEXTS = "128K,256K,512K,1M"


def bench(args: argparse.Namespace) -> int:
    """Run ``tierkv bench`` and return its exit code.

    Raises:
        TierKVError: a flag or shape is wrong, or outputs differ from those of transformers.
    """
    if args.plots and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plots needs matplotlib: pip install 'tierkv-offload[bench]'")
    report = _measure(args) if args.report is None else _read(Path(args.report))
    if args.plots:
        from tierkv.bench.plots import draw  # matplotlib is optional

        for path in draw(report, Path(args.plots)):
            print(f"wrote {path}", file=sys.stderr)
    print_tables(report)
    short = [{key: row[key] for key in row if key != "timeline"} for row in report["rows"]]
    print(json.dumps({**report, "rows": short}))
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    loading.quiet()
    options = options_from(args)
    described = {"machine": machine(args.commit)}
    file = Path(args.json) if args.json else None
    bar = StepLine()

    def save(report: dict[str, Any]) -> None:
        report["seconds"] = round(time.perf_counter() - started, 1)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**described, **report}) + "\n")

    with bar:
        return {**described, **run(options, bar.say, save)}


def _read(file: Path) -> dict[str, Any]:
    """Return an earlier report; one of a run that was cut short has no goals yet."""
    try:
        report: dict[str, Any] = json.loads(file.read_text())
        return {**report, "goals": goals(report["rows"])}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--report {file} is no report of tierkv bench: {error}") from None


def options_from(args: argparse.Namespace) -> Options:
    """Return the options that flags mean on this machine.

    Raises:
        ConfigError: a flag cannot be understood.
    """
    device = loading.pick_device(args.device)
    cuda, quick = device.type == "cuda", args.quick
    dtype = args.dtype if args.dtype != "auto" else ("bfloat16" if cuda else "float32")
    usual = (
        (("128K" if cuda else "2K") if quick else CONTEXTS) if args.tokens is None else args.tokens
    )
    shapes = []
    for text in args.shape or ["llama-3.1-8b" if cuda else "tiny"]:
        name, _, own = text.rpartition(":")
        shapes.append((name, contexts(own)) if name else (text, contexts(usual)))
    return Options(
        shapes=tuple(shapes),
        device=device,
        dtype=getattr(torch, dtype),
        hot_shares=tuple(_share(text) for text in args.hot.split(",")),
        steps=args.steps or (16 if quick else 64),
        limit_seconds=args.limit_seconds or (8.0 if quick else 20.0),
        prefill_tokens=contexts(args.prefill)[0] if args.prefill else 0,
        prefill_chunk=args.prefill_chunk,
        baselines=tuple(
            name for name in (STOCK, OFFLOADED) if name.split()[-1] not in args.without
        ),
        offloaded_steps=2 if quick else 4,
        cpu_budget=None if args.cpu_budget is None else parse_bytes(args.cpu_budget),
        store=None if args.store is None else Path(args.store).expanduser(),
        page_tokens=args.page_tokens,
        codecs=codecs(args.codec),
        eager=args.eager,
        scale=16 if quick and not cuda else 1,
    )


def contexts(text: str) -> tuple[int, ...]:
    """Return tokens of a text such as ``128K,1M`` (K is 1024).

    Raises:
        ConfigError: it is no such list.
    """
    found = []
    for part in text.upper().split(","):
        unit = {"K": 1 << 10, "M": 1 << 20}.get(part[-1:], 1)
        digits = part[:-1] if unit > 1 else part
        if not digits.isdigit() or not int(digits):
            raise ConfigError(f"tokens must be numbers such as 4096, 128K or 1M, got {part!r}")
        found.append(int(digits) * unit)
    return tuple(found)


def codecs(text: str) -> tuple[str, ...]:
    """Return the codecs of a text such as ``raw,int8``.

    Raises:
        ConfigError: one of them is unknown.
    """
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        parse_codecs(name)
    return names


def _share(text: str) -> float:
    top, _, bottom = text.partition("/")
    try:
        share = float(top) / float(bottom or 1)
    except (ValueError, ZeroDivisionError):
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"hot must be shares such as 1/8 or 1.0, above 0 up to 1, got {text!r}")
    return share


def machine(commit: str | None) -> dict[str, Any]:
    """Return what a published number must name: machine, versions, commit and command."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    return {
        "gpu": gpu().detail,
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **versions,
        "commit": commit or _commit(),
        "command": _command(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _command() -> str:
    script = Path(sys.argv[0])
    called = (
        ["python", f"{script.parent.name}/{script.name}"] if script.name == "offload.py" else []
    )
    return shlex.join([*(called or ["tierkv"]), *sys.argv[1:]])


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def print_tables(report: dict[str, Any]) -> None:
    """Print the ceiling, the rows, what was skipped, and the goals on stdout."""
    wide = None if sys.stdout.isatty() else TABLE_WIDTH
    console = Console(width=wide, highlight=False)
    limits = report["ceiling"]
    speeds = [f"{name.replace('_', ' ')} {limits[name] / 1e9:.1f} GB/s" for name in
              ("host_to_device", "device_to_host", "device_memory", "disk_read")
              if limits[name]]  # fmt: skip
    console.print(f"{report['machine']['gpu']}, {report['machine']['cpus']} CPUs, random weights")
    console.print(f"measured ceiling: {', '.join(speeds)}")
    for check in report["checks"]:
        console.print(
            f"outputs of {check['shape']} at {check['tokens']} tokens: logits differ by "
            f"{check['relative_logit_error']:.2g}, one wrong page would make "
            f"{check['error_with_one_page_wrong']:.2g}; greedy tokens equal "
            f"{check['same_greedy_tokens']}/{check['steps']}"
        )
    console.print(_rows_table(report["rows"]))
    for skipped in report["skipped"]:
        console.print(f"skipped {skipped['shape']} {skipped['tokens']} {skipped['system']}: "
                      f"{skipped['reason']}", soft_wrap=True)  # fmt: skip
    if report["goals"]:
        table = Table(title="goals", title_justify="left")
        for name in ("goal", "row", "value", "target", ""):
            table.add_column(name, justify="right" if name in ("value", "target") else "left")
        for goal in report["goals"]:
            value, target = (_goal_number(goal, name) for name in ("value", "target"))
            met = {True: "met", False: "MISSED", None: "-"}[goal["met"]]
            table.add_row(goal["goal"], goal["row"], value, target, met)
        console.print(table)


def _goal_number(goal: dict[str, Any], name: str) -> str:
    value = goal[name]
    if value is None:
        return "-"
    return format_bytes(value) if "bytes" in goal["goal"] else f"{value:.3f}"


def _rows_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="decode, batch 1, exact", title_justify="left")
    for name in ("shape", "tokens", "system", "kind", "hot", "warm", "cold", "p50 ms/token", "p99",
                 "ceiling", "x GPU", "x offloaded", "prefill s", "GPU peak",
                 "host peak (pinned)"):  # fmt: skip
        right = name not in ("shape", "system", "kind", "ceiling")
        table.add_column(name, justify="right" if right else "left")
    for row in rows:
        cut = row["layers"] != row["layers_of_shape"]
        layers = f" ({row['layers']}/{row['layers_of_shape']} layers)" if cut else ""
        ours, speedup = row["system"] == TIERKV, row.get("speedup", {})
        graph = ", graph" if row.get("captured") else ""
        pinned = "" if row["pinned_bytes"] is None else f" ({format_bytes(row['pinned_bytes'])})"
        table.add_row(
            row["shape"] + layers,
            f"{row['tokens']:,}",
            f"tierkv {hot_label(row['hot_share'])}{graph}" if ours else row["system"],
            f"{'exact' if row['exact'] else 'selective'} {row['codec']}",
            *(format_bytes(row[f"{tier}_bytes"]) for tier in ("hot", "warm", "cold")),
            f"{row['decode']['ms_p50']:.2f}",
            f"{row['decode']['ms_p99']:.2f}",
            f"{row['ceiling']['share']:.0%} of {row['ceiling']['bound']}",
            *(_times(speedup.get(name)) for name in (STOCK, OFFLOADED)),
            "-" if row["prefill_seconds"] is None else f"{row['prefill_seconds']:.2f}",
            "-" if row["peak_gpu_bytes"] is None else format_bytes(row["peak_gpu_bytes"]),
            format_bytes(row["peak_host_bytes"]) + pinned,
        )
    return table


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
