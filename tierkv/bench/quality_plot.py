"""A quality report as a picture: quality by budget and by bytes moved, and layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter, PercentFormatter, ScalarFormatter

from tierkv.config import SELECTORS

PANELS = (
    ("continuation", "perplexity_ratio", "perplexity / exact"),
    ("continuation", "kl", "KL(exact || selective), nats"),
    ("continuation", "top1_agreement", "top-1 agreement with exact"),
    ("needles", "score", "needle answer tokens right"),
    ("layers", "mass_mean", "attention recovered"),
    ("layers", "error_mean", "output error of a layer"),
)
"""Part of the report, column, label."""


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the picture; its format follows from the file's name.

    The second row has bytes moved per token on its axis, the third the layers one by one, where
    layers were looked into.
    """
    matplotlib.use("agg")
    panels = [panel for panel in PANELS if report[panel[0]]]
    moved = {(row["selector"], row["token_budget"]): row["moved_bytes"] for row in report["layers"]}
    heights = 1 + 2 * bool(moved)
    figure = Figure(figsize=(max(4.2 * len(panels), 9), 3.8 * heights), layout="constrained")
    model = report.get("model", "model")
    figure.suptitle(f"Selective attention, {model}, {report['tokens']:,} tokens of context")
    grid = figure.add_gridspec(heights, 2 * len(panels))
    for place, (part, column, label) in enumerate(panels):
        rows = report[part]
        columns = slice(2 * place, 2 * place + 2)
        axes = figure.add_subplot(grid[0, columns])
        budgets = sorted({row["token_budget"] for row in rows if row["selector"]})
        _lines(axes, rows, column, lambda row: row["token_budget"])
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="token budget per KV head", title=label)
        if moved:
            axes = figure.add_subplot(grid[1, columns])
            _lines(axes, rows, column, lambda row: moved[row["selector"], row["token_budget"]])
            axes.xaxis.set_major_formatter(EngFormatter("B"))
            axes.set(xlabel="moved per token, reuse cache", title=label)
    for half, (column, label) in enumerate(
        (("mass", "attention recovered"), ("error", "output error"))
    ):
        if moved:
            axes = figure.add_subplot(grid[2, half * len(panels) : (half + 1) * len(panels)])
            for row in report["layers"]:
                axes.plot(row[column], label=f"{row['selector']} {row['token_budget']:,}")
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes.set(xlabel="layer", title=label)
            _finish(axes)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=80)


def _lines(
    axes: Axes, rows: list[dict[str, Any]], column: str, x: Callable[[dict[str, Any]], float]
) -> None:
    """Draw a line per selector, and exact attention as a level."""
    for name in dict.fromkeys(row["selector"] for row in rows if row["selector"]):
        own = sorted(
            (row for row in rows if row["selector"] == name), key=lambda row: row["token_budget"]
        )
        color = f"C{SELECTORS.index(name)}"  # the same in all panels
        axes.plot(
            [x(row) for row in own], [row[column] for row in own], color, marker="o", label=name
        )
    for row in rows:
        if row["selector"] is None:
            axes.axhline(row[column], color="#777777", linestyle="--", linewidth=1, label="exact")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.title.set_fontsize(10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
