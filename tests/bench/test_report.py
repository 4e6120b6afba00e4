"""Ceiling, timeline, speed-ups, goals and pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bench.report_helpers import made_up_events, made_up_report, made_up_row
from tierkv.bench import ceiling, memory
from tierkv.bench.summary import OFFLOADED, STOCK, TIERKV, add_speedups, goals, hot_label
from tierkv.bench.timeline import Event, lanes

CPU = torch.device("cpu")


def test_ceiling_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    limits = ceiling.measure(CPU, tmp_path / "store", scale=64)
    for value in (limits.host_to_device, limits.device_to_host, limits.device_memory):
        assert 1e8 < value < 1e13
    assert limits.disk_read is not None
    assert 1e6 < limits.disk_read < 1e12
    assert not list((tmp_path / "store").iterdir())


def test_host_memory_is_known() -> None:
    assert 1 << 20 < memory.host_bytes() <= memory.peak_host_bytes() * 1.01
    assert memory.available_host_bytes() > 1 << 20


def test_lanes_of_a_step() -> None:
    timeline = lanes(made_up_events())
    assert timeline["span_ms"] == pytest.approx(255.9)
    assert timeline["busy_ms"] == pytest.approx(
        {"host to device": 32 * 7.6, "device to host": 1.0, "attention": 32 * 0.2,
         "other compute": 32 * 40 * 0.015}
    )  # fmt: skip
    assert len(timeline["lanes"]["host to device"]) == 32
    assert len(timeline["lanes"]["other compute"]) == 32, "small gaps are closed"


def test_kernels_on_other_streams_are_copies() -> None:
    events = [
        Event("gemm", 7, 0.0, 10.0),
        Event("gemm", 7, 10.0, 20.0),
        Event("gather_pages", 9, 0.0, 5.0),
        Event("scatter_pages", 11, 5.0, 9.0),
        Event("Memcpy DtoD (Device -> Device)", 7, 20.0, 21.0),
        Event("tierkv_decode_attention", 7, 21.0, 23.0),
    ]
    busy = lanes(events)["busy_ms"]
    assert busy["host to device"] == pytest.approx(0.005)
    assert busy["device to host"] == pytest.approx(0.004)
    assert busy["attention"] == pytest.approx(0.002)
    assert busy["other compute"] == pytest.approx(0.021)


def test_speedups_are_over_the_same_context() -> None:
    rows = [
        made_up_row(TIERKV, 1 << 17, 0.125, 300.0, prefill_seconds=20.0),
        made_up_row(STOCK, 1 << 17, 1.0, 60.0, prefill_seconds=50.0),
        made_up_row(OFFLOADED, 1 << 17, 0.0, 1200.0),
        made_up_row(STOCK, 1 << 18, 1.0, 1.0),
    ]
    add_speedups(rows)
    assert rows[0]["speedup"] == pytest.approx({STOCK: 0.2, OFFLOADED: 4.0})
    assert rows[0]["prefill_speedup"] == pytest.approx({STOCK: 2.5})
    assert "speedup" not in rows[1]


def test_goals() -> None:
    report = made_up_report()
    found = {(goal["goal"], goal["row"]): goal for goal in goals(report["rows"])}
    row = "llama-3.1-8b, 131072 tokens, 1/8 hot"
    assert found["decode, share of the link's ceiling", row]["met"]
    assert found["decode, times faster than transformers offloaded", row]["met"]
    assert found["prefill, time over that of everything hot", row]["value"] == pytest.approx(1.05)
    assert found["peak host bytes", row.replace("131072", "262144")]["met"]
    slow = made_up_row(TIERKV, 1 << 17, 0.125, 400.0)
    add_speedups([slow])
    assert [goal["met"] for goal in goals([slow])] == [False, True]
    attention = made_up_row(TIERKV, 1 << 20, 1.0, 50.0)
    attention["ceiling"]["attention_share"] = 0.8
    add_speedups([attention])
    assert [goal["met"] for goal in goals([attention])] == [False]


def test_hot_labels() -> None:
    assert [hot_label(x) for x in (0.125, 1.0, 0.3, 0.0)] == [
        "1/8 hot", "all hot", "0.3 hot", "0 hot"
    ]  # fmt: skip


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    from tierkv.bench.plots import draw

    drawn = draw(made_up_report(), tmp_path / "plots")
    assert [path.name for path in drawn] == [
        "ms_per_token.png", "bytes_moved.png", "share_of_ceiling.png",
        "timeline-llama-3.1-8b-128K-1_8-hot.png",
    ]  # fmt: skip
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
    empty = {**made_up_report(), "rows": []}
    assert len(draw(empty, tmp_path / "plots")) == 3


def test_encoded_pages_are_compared_with_raw_ones() -> None:
    rows = [
        made_up_row(TIERKV, 1 << 17, 0.125, 290.0),
        made_up_row(TIERKV, 1 << 17, 0.25, 250.0),
        made_up_row(TIERKV, 1 << 17, 0.125, 145.0, codec="int8"),
        made_up_row(TIERKV, 1 << 17, 0.125, 100.0, codec="int4"),
    ]
    add_speedups(rows)
    assert [row["speedup"].get("raw") for row in rows] == [None, None, 2.0, 2.9]
    found = [goal for goal in goals(rows) if "raw pages" in goal["goal"]]
    assert [(goal["target"], goal["met"]) for goal in found] == [(1.8, True), (3.2, False)]
    assert found[0]["row"].endswith("1/8 hot, int8")
