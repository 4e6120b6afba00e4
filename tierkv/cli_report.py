"""What commands show on stderr: progress of prefill and of measurements, statistics."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tierkv.units import format_bytes

TIERS = ("hot", "warm", "cold")
TABLE_WIDTH = 190
"""Columns of wide tables where stdout is no terminal."""


class PrefillBar:
    """Progress of prefill on stderr, if that is a terminal. Gone before the first token."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("prefill"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]} {task.fields[tiers]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("prefill", total=None, rate="", tiers="")

    def update(self, done: int, total: int, stats: dict[str, Any]) -> None:
        """Show `done` of `total` prompt tokens, the speed so far and pages by tier."""
        elapsed = self._progress.tasks[self._task].elapsed
        pages = [
            f"{tier} {stats['tiers'][tier]['pages']}"
            for tier in TIERS
            if tier in stats.get("tiers", {})
        ]
        self._progress.update(
            self._task,
            completed=done,
            total=total,
            rate=f"{done / elapsed:,.0f} tokens/s" if elapsed else "",
            tiers=" ".join(pages),
        )
        if done >= total:
            self._progress.stop()

    def __enter__(self) -> PrefillBar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


class StepLine:
    """What is being done, on stderr: one live line on a terminal, else a line per measurement."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("") if self._console.is_terminal else None
        self._last = ""

    def say(self, text: str, done: int, total: int) -> None:
        """Show `text` and how much of it is done."""
        part = f" {done:,}/{total:,}" if total > 1 else ""
        if self._status is not None:
            self._status.update(f"{text}{part}")
        elif text != self._last:
            self._console.print(f"{time.strftime('%H:%M:%S')} {text}", soft_wrap=True)
        self._last = text

    def __enter__(self) -> StepLine:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


def loading_note(model: str) -> AbstractContextManager[Any]:
    """Show on stderr, if that is a terminal, that a model is being loaded."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return nullcontext()
    once = " (the first time it is converted, which takes half a minute)"
    return console.status(f"loading {model}{once if model == 'smollm2' else ''}")


def peak_memory() -> dict[str, int | None]:
    """Return the most bytes this process used, on the GPU (None without one) and on the host."""
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"gpu_bytes": gpu, "host_bytes": rss if sys.platform == "darwin" else rss * 1024}


def print_report(run: Any, memory: dict[str, int | None], store: str | None) -> None:
    """Print the statistics of a `tierkv.cli_stream.Run` as tables on stderr."""
    console = Console(stderr=True, highlight=False)
    summary = Table(title="run", title_justify="left", show_header=False)
    summary.add_column()
    summary.add_column(justify="right")
    for name, value in _summary(run, memory):
        summary.add_row(name, value)
    console.print(summary)
    if "tiers" in run.stats:
        print_tiers(run.stats, store)


def print_tiers(stats: dict[str, Any], store: str | None) -> None:
    """Print pages, bytes, budget and hits of each tier as a table on stderr."""
    Console(stderr=True, highlight=False).print(_tier_table(stats, store))


def _summary(run: Any, memory: dict[str, int | None]) -> list[tuple[str, str]]:
    stats = run.stats
    rows = [
        ("prompt tokens", f"{run.prompt_tokens:,}"),
        *([("of them resumed", f"{run.resumed_tokens:,}")] if run.resumed_tokens else []),
        ("new tokens", f"{len(run.token_ids):,} ({run.finish})"),
        ("time to first token", _number(run.ttft_seconds, "s")),
        ("prefill", _number(run.prefill_tokens_per_second, "tokens/s", 0)),
        ("decode", _number(run.ms_per_token, "ms/token", 1)),
    ]
    for way, num_bytes in stats.get("moved_bytes", {}).items():
        rows.append((f"moved {_words(way)}", format_bytes(num_bytes)))
    for name, value in stats.items():
        if name == "stall_seconds":
            rows.append(("stalled on pages", _number(value, "s")))
        elif isinstance(value, (int, float)):
            rows.append((_words(name), f"{value:,}"))
    if memory["gpu_bytes"] is not None:
        rows.append(("peak GPU memory", format_bytes(memory["gpu_bytes"])))
    rows.append(("peak host memory", format_bytes(memory["host_bytes"] or 0)))
    return rows


def _tier_table(stats: dict[str, Any], store: str | None) -> Table:
    table = Table(title="tiers", title_justify="left")
    for title in ("tier", "pages", "bytes", "budget", "hits"):
        table.add_column(title, justify="left" if title == "tier" else "right")
    hits = stats.get("hits", {})
    for tier, state in stats["tiers"].items():
        off = tier == "cold" and store is None
        table.add_row(
            tier,
            f"{state['pages']:,}",
            format_bytes(state["bytes"]),
            "off (no --store)" if off else format_bytes(state["budget_bytes"]),
            f"{hits.get(tier, 0):,}",
        )
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float | None, unit: str, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f} {unit}"
