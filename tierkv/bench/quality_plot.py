"""A quality report as a picture: divergence from exact attention, and needles, by budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

PANELS = (
    ("continuation", "perplexity_ratio", "perplexity / exact"),
    ("continuation", "kl", "KL(exact || selective), nats"),
    ("continuation", "top1_agreement", "top-1 agreement with exact"),
    ("needles", "score", "needle answer tokens right"),
)
"""Part of the report, column, label."""


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the picture; its format follows from the file's name."""
    matplotlib.use("agg")
    panels = [panel for panel in PANELS if report[panel[0]]]
    figure = Figure(figsize=(4.2 * len(panels), 4.0), layout="constrained")
    model = report.get("model", "model")
    figure.suptitle(f"Selective attention, {model}, {report['tokens']:,} tokens of context")
    for axes, (part, column, label) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        rows = report[part]
        for name in dict.fromkeys(row["selector"] for row in rows if row["selector"]):
            points = sorted((r["token_budget"], r[column]) for r in rows if r["selector"] == name)
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        exact = [row[column] for row in rows if row["selector"] is None]
        axes.axhline(exact[0], color="#777777", linestyle="--", linewidth=1, label="exact")
        axes.set_xscale("log", base=2)
        budgets = sorted({row["token_budget"] for row in rows if row["selector"]})
        axes.set_xticks(budgets)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("token budget per KV head")
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
