"""What a run's rows mean together: speed-ups over the baselines, and goals met or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tierkv.units import parse_bytes

TIERKV, STOCK, OFFLOADED = "tierkv", "transformers", "transformers offloaded"
MIN_TOKENS = 1 << 17
"""Contexts from which on there are goals."""
HOST_LIMIT = parse_bytes("45GiB")
"""Host memory within which 256K of the Llama-3.1-8B shape must run."""
CODEC_GOALS = {"int8": 1.8, "int4": 3.2}
"""How many times as fast as raw pages encoded ones should decode."""


def hot_label(share: float) -> str:
    """Return a share of hot KV in words: ``1/8 hot``, ``all hot``."""
    if share >= 1:
        return "all hot"
    return f"1/{1 / share:.0f} hot" if share and (1 / share).is_integer() else f"{share:.3g} hot"


def add_speedups(rows: list[dict[str, Any]]) -> None:
    """Give each tierkv row its speed-ups: decode and prefill time of the baseline over its own."""
    for row in rows:
        if row["system"] != TIERKV:
            continue
        row["speedup"], row["prefill_speedup"] = {}, {}
        for other in _alike(rows, row):
            twin = other["system"] == TIERKV and other["hot_share"] == row["hot_share"]
            if twin and other["codec"] == "raw" != row["codec"] and other["decode"]:
                row["speedup"]["raw"] = other["decode"]["ms_mean"] / row["decode"]["ms_mean"]
            if other["system"] != TIERKV:
                if other["decode"]:
                    ratio = other["decode"]["ms_mean"] / row["decode"]["ms_mean"]
                    row["speedup"][other["system"]] = ratio
                if other["prefill_seconds"] and row["prefill_seconds"]:
                    ratio = other["prefill_seconds"] / row["prefill_seconds"]
                    row["prefill_speedup"][other["system"]] = ratio


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was aimed at and what came out; `met` is None where no target was set."""
    ours = [row for row in rows if row["system"] == TIERKV and row["tokens"] >= MIN_TOKENS]
    return [goal for row in ours for goal in _goals(rows, row)]


def _goals(rows: list[dict[str, Any]], row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    def goal(what: str, value: float, target: float | None, met: bool | None) -> dict[str, Any]:
        where = f"{row['shape']}, {row['tokens']} tokens, {hot_label(row['hot_share'])}"
        where += "" if row["codec"] == "raw" else f", {row['codec']}"
        return {"goal": what, "row": where, "value": value, "target": target, "met": met}

    def at_least(what: str, value: float, target: float) -> dict[str, Any]:
        return goal(what, value, target, value >= target)

    def at_most(what: str, value: float, target: float) -> dict[str, Any]:
        return goal(what, value, target, value <= target)

    ceiling, decode, speedup = row["ceiling"], row["decode"], row["speedup"]
    if ceiling["bound"] == "link":
        yield at_least("decode, share of the link's ceiling", ceiling["share"], 0.90)
    elif row["hot_share"] < 1:
        yield goal(
            f"decode, share of the {ceiling['bound']}'s ceiling", ceiling["share"], None, None
        )
    raw = row["speedup"].get("raw")
    if raw is not None:
        target = CODEC_GOALS.get(row["codec"])
        met = None if target is None else raw >= target
        yield goal("decode, times as fast as raw pages", raw, target, met)
    if row["hot_share"] < 1 and OFFLOADED in speedup:
        yield at_least("decode, times faster than transformers offloaded", speedup[OFFLOADED], 3.0)
    if row["hot_share"] >= 1 and STOCK in speedup:
        yield at_least("decode, times as fast as transformers all on GPU", speedup[STOCK], 1.0)
    if row["hot_share"] >= 1 and ceiling["attention_share"] is not None:
        share = ceiling["attention_share"]
        yield at_least("attention alone, share of device memory bandwidth", share, 0.85)
    if decode["sealing_overhead"] is not None and row["hot_share"] < 1:
        yield at_most("write-through, share of decode time", decode["sealing_overhead"], 0.02)
    if row["tokens"] >= 1 << 18 and row["peak_host_bytes"] and row["hot_share"] < 1:
        target = float(HOST_LIMIT) if row["tokens"] == 1 << 18 else None
        met = None if target is None else row["peak_host_bytes"] <= target
        yield goal("peak host bytes", row["peak_host_bytes"], target, met)
    if row["prefill_seconds"] and row["hot_share"] < 1:
        for other in _alike(rows, row):
            if other["system"] == TIERKV and other["hot_share"] >= 1 and other["prefill_seconds"]:
                ratio = row["prefill_seconds"] / other["prefill_seconds"]
                yield at_most("prefill, time over that of everything hot", ratio, 1.10)
    if STOCK in row["prefill_speedup"]:
        ratio = row["prefill_speedup"][STOCK]
        yield at_least("prefill, times faster than transformers chunked", ratio, 1.0)


def _alike(rows: list[dict[str, Any]], row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all rows of the same shape and context."""
    for other in rows:
        if (other["shape"], other["tokens"]) == (row["shape"], row["tokens"]):
            yield other
