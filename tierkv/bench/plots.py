"""A report as pictures: time, bytes moved, share of the ceiling, and one decode step."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from tierkv.bench.summary import OFFLOADED, STOCK, TIERKV, hot_label
from tierkv.bench.timeline import LANES

Rows = list[dict[str, Any]]
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#777777"
TIER_COLORS = (BLUE, GREEN, "#cc79a7", "#56b4e9")
LANE_COLORS = (BLUE, "#56b4e9", ORANGE, GREY)
SHORT = {"link": "link", "memory": "mem", "disk": "disk"}
WAYS = {
    "warm_to_hot": ("host to device", BLUE),
    "hot_to_warm": ("device to host", "#56b4e9"),
    "cold_to_warm": ("disk to host", ORANGE),
    "warm_to_cold": ("host to disk", RED),
}


def draw(report: dict[str, Any], directory: Path) -> list[Path]:
    """Write every picture that the report has data for as PNG; return their paths."""
    matplotlib.use("agg")
    directory.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, title, panel in (
        ("ms_per_token", "Decode time against context", _time_panel),
        ("bytes_moved", "Bytes moved per token", _bytes_panel),
        ("share_of_ceiling", "Share of the ceiling (measured bandwidth)", _share_panel),
    ):
        figure = _panels(report, title, panel)
        drawn.append(directory / f"{name}.png")
        figure.savefig(drawn[-1], dpi=130)
    for row in report["rows"]:
        if row["timeline"]:
            where = f"{row['shape']}-{_context(row)}-{hot_label(row['hot_share'])}"
            drawn.append(directory / f"timeline-{where.replace('/', '_').replace(' ', '-')}.png")
            _timeline(row, _machine(report)).savefig(drawn[-1], dpi=130)
    return drawn


def _panels(report: dict[str, Any], title: str, panel: Callable[[Axes, Rows], None]) -> Figure:
    """Draw one panel per shape side by side."""
    shapes = list(dict.fromkeys(row["shape"] for row in report["rows"])) or ["nothing measured"]
    figure = Figure(figsize=(max(7.0, 6.0 * len(shapes)), 4.8), layout="constrained")
    figure.suptitle(title, fontsize=13)
    width = max(7.0, 6.0 * len(shapes))
    figure.supxlabel(textwrap.fill(_machine(report), int(width * 18)), fontsize=7, color=GREY)
    panels = figure.subplots(1, len(shapes), squeeze=False, sharey=True)[0]
    for axes, shape in zip(panels, shapes, strict=True):
        rows = [row for row in report["rows"] if row["shape"] == shape]
        cut = rows and rows[0]["layers"] != rows[0]["layers_of_shape"]
        layers = f" ({rows[0]['layers']} of {rows[0]['layers_of_shape']} layers)" if cut else ""
        axes.set_title(f"{shape}{layers}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelleft=True)
        panel(axes, rows)
    return figure


def _machine(report: dict[str, Any]) -> str:
    machine = report.get("machine", {})
    return "   ".join(str(machine.get(key) or "") for key in ("gpu", "command"))[:200]


def _context(row: dict[str, Any]) -> str:
    tokens = row["tokens"]
    return f"{tokens >> 20}M" if tokens % (1 << 20) == 0 else f"{tokens / 1024:.3g}K"


def _label(row: dict[str, Any]) -> str:
    return f"tierkv, {hot_label(row['hot_share'])}" if row["system"] == TIERKV else row["system"]


def _colors(rows: Rows) -> dict[str, str]:
    ours = sorted({_label(row) for row in rows if row["system"] == TIERKV})
    colors = dict(zip(ours, TIER_COLORS * len(ours), strict=False))
    return {**colors, STOCK: ORANGE, OFFLOADED: RED}


def _contexts(axes: Axes, rows: Rows) -> list[int]:
    contexts = sorted({row["tokens"] for row in rows})
    names = {row["tokens"]: _context(row) for row in rows}
    axes.set_xticks(range(len(contexts)), [names[tokens] for tokens in contexts])
    _limit_x(axes, len(contexts))
    axes.set_xlabel("context, tokens")
    return contexts


def _limit_x(axes: Axes, count: int) -> None:
    """Leave room beside few groups, so that no bar becomes a wall."""
    spare = max(0.5, (4 - count) / 2)
    axes.set_xlim(-spare, count - 1 + spare)


def _time_panel(axes: Axes, rows: Rows) -> None:
    contexts, colors = _contexts(axes, rows), _colors(rows)
    for label in dict.fromkeys(_label(row) for row in rows):
        mine = sorted((r for r in rows if _label(r) == label), key=lambda r: r["tokens"])
        x, y = [contexts.index(r["tokens"]) for r in mine], [r["decode"]["ms_p50"] for r in mine]
        axes.plot(x, y, "o-", color=colors[label], label=label)
        for at, value in zip(x, y, strict=True):
            text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            axes.annotate(text, (at, value), (0, 6), textcoords="offset points", fontsize=8,
                          ha="center", color=colors[label])  # fmt: skip
        if mine[0]["system"] == TIERKV:
            bound = [r["ceiling"]["ms"] for r in mine]
            axes.plot(x, bound, ":_", color=colors[label], markersize=14)
    axes.plot([], [], ":_", color=GREY, markersize=14, label="ceiling of tierkv (same color)")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.15)
    axes.set_ylabel("ms per token (median)")
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _bytes_panel(axes: Axes, rows: Rows) -> None:
    rows = sorted((r for r in rows if r["bytes_per_token"]), key=lambda r: r["tokens"])
    names = [f"{_context(r)}\n{_label(r).replace(', ', chr(10)).replace(' off', chr(10) + 'off')}"
             for r in rows]  # fmt: skip
    bottom = [0.0] * len(rows)
    for way, (name, color) in WAYS.items():
        sizes = [r["bytes_per_token"].get(way, 0) / 2**30 for r in rows]
        if any(sizes):
            axes.bar(range(len(rows)), sizes, 0.65, bottom, color=color, label=name)
            bottom = [x + y for x, y in zip(bottom, sizes, strict=True)]
    for at, value in enumerate(bottom):
        axes.annotate(f"{value:.3g}", (at, value), (0, 3), textcoords="offset points",
                      ha="center", fontsize=8)  # fmt: skip
    axes.set_xticks(range(len(rows)), names, fontsize=7)
    _limit_x(axes, len(rows))
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.1 * max(bottom, default=1.0)))
    axes.set_ylabel("GiB per token")
    if any(bottom):
        axes.legend(fontsize=8, frameon=False)


def _share_panel(axes: Axes, rows: Rows) -> None:
    contexts, colors = _contexts(axes, rows), _colors(rows)
    labels = list(dict.fromkeys(_label(row) for row in rows))
    width = 0.8 / max(1, len(labels))
    for place, label in enumerate(labels):
        mine = [row for row in rows if _label(row) == label]
        x = [contexts.index(r["tokens"]) + (place - (len(labels) - 1) / 2) * width for r in mine]
        y = [100 * r["ceiling"]["share"] for r in mine]
        axes.bar(x, y, 0.92 * width, color=colors[label], label=label)
        for at, value, row in zip(x, y, mine, strict=True):
            text = f"{value:.0f}%\n{SHORT[row['ceiling']['bound']]}"
            axes.annotate(text, (at, value), (0, 2), textcoords="offset points", fontsize=7,
                          ha="center")  # fmt: skip
    axes.axhline(90, color=GREY, linewidth=1, linestyle="--")
    axes.set_ylim(0, 122)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("% of the bandwidth named above the bar")
    if labels:
        axes.legend(fontsize=8, frameon=False, loc="upper center", ncols=2)


def _timeline(row: dict[str, Any], machine: str) -> Figure:
    """Draw a whole step, and a tenth of it in the middle larger."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    recorded, span = row["timeline"], row["timeline"]["span_ms"]
    whole, part = figure.subplots(2, 1)
    busy = [f"{lane}  {recorded['busy_ms'][lane]:.3g} ms" for lane in LANES]
    for axes, names in ((whole, busy), (part, list(LANES))):
        for place, (lane, color) in enumerate(zip(LANES, LANE_COLORS, strict=True)):
            axes.broken_barh(recorded["lanes"][lane], (-place - 0.4, 0.8), facecolors=color,
                             edgecolors=color, linewidths=0.4)  # fmt: skip
        axes.set_yticks([-place for place in range(len(LANES))], names, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    whole.set_xlim(0, span)
    whole.axvspan(0.45 * span, 0.55 * span, color="#eeeeee", zorder=0)
    whole.set_title(f"One decode step: {row['shape']}, {_context(row)}, {_label(row)}", fontsize=10)
    part.set_xlim(0.45 * span, 0.55 * span)
    part.set_title("the shaded tenth", fontsize=8, color=GREY)
    part.set_xlabel("ms")
    figure.supxlabel(machine, fontsize=7, color=GREY)
    return figure
