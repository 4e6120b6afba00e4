"""A made-up report with the shape of a real one."""

from __future__ import annotations

from typing import Any

from tierkv.bench.summary import OFFLOADED, STOCK, TIERKV, add_speedups, goals
from tierkv.bench.timeline import Event, lanes

LINK, MEMORY = 55e9, 4.1e12


def made_up_row(system: str, tokens: int, hot: float, ms: float, **changes: Any) -> dict[str, Any]:
    """Return one row of a model with 128 KiB of KV per token, decoding in `ms`."""
    kv = tokens << 17
    down = int(kv * (1 - hot)) if system == TIERKV else (kv if system == OFFLOADED else 0)
    moved = {} if system == STOCK else {"warm_to_hot": down, "hot_to_warm": 0}
    if system == OFFLOADED:
        moved["hot_to_warm"] = kv
    bounds = {"link": 1e3 * down / LINK, "memory": 1e3 * (kv + 15e9) / MEMORY}
    bound = max(bounds, key=lambda name: bounds[name])
    return {
        "shape": "llama-3.1-8b", "layers": 32, "layers_of_shape": 32, "tokens": tokens,
        "system": system, "exact": True, "codec": "raw", "dtype": "bfloat16", "hot_share": hot,
        "kv_bytes": kv, "hot_bytes": kv - down, "warm_bytes": down, "cold_bytes": 0,
        "gpu_budget": kv - down, "cpu_budget": down, "host_peak_since": "row",
        "decode": {"steps": 64, "ms_p50": ms, "ms_p99": 1.1 * ms, "ms_mean": ms,
                   "ms_sealing": ms, "ms_quiet": ms, "sealing_overhead": 0.004},
        "bytes_per_token": moved, "pinned_bytes": down, "timeline": None,
        "prefill_seconds": None, "peak_gpu_bytes": 18 << 30, "peak_host_bytes": down + (4 << 30),
        "ceiling": {"bound": bound, "ms": bounds[bound], "share": bounds[bound] / ms,
                    "device_memory_ms": bounds["memory"], "attention_share": None},
        **changes,
    }  # fmt: skip


def made_up_events() -> list[Event]:
    """Return a decode step of 32 layers: copies on stream 9 beside compute on stream 7."""
    events = []
    for layer in range(32):
        zero = 8000.0 * layer
        events.append(Event("Memcpy HtoD (Pinned -> Device)", 9, zero, zero + 7600))
        events.append(Event("flash_fwd_splitkv_kernel", 7, zero + 7700, zero + 7900))
        events.extend(
            Event("gemv2T_kernel", 7, zero + 20 * i, zero + 20 * i + 15) for i in range(40)
        )
    return [*events, Event("Memcpy DtoH (Device -> Pinned)", 11, 9e4, 9.1e4)]


def made_up_report() -> dict[str, Any]:
    """Return a report of two shapes, one with three contexts."""
    rows = [
        made_up_row(TIERKV, 1 << 17, 0.125, 289.0, prefill_seconds=21.0, timeline=lanes(
            made_up_events())),
        made_up_row(TIERKV, 1 << 17, 1.0, 52.0, prefill_seconds=20.0),
        made_up_row(STOCK, 1 << 17, 1.0, 84.0, prefill_seconds=66.0),
        made_up_row(TIERKV, 1 << 18, 0.125, 575.0),
        made_up_row(TIERKV, 1 << 18, 1.0, 60.0),
        made_up_row(STOCK, 1 << 18, 1.0, 120.0),
        made_up_row(TIERKV, 1 << 19, 0.125, 1160.0),
        made_up_row(OFFLOADED, 1 << 17, 0.0, 900.0),
        made_up_row(TIERKV, 1 << 20, 0.125, 1010.0, shape="qwen2.5-7b-1m", layers=20,
                    layers_of_shape=28, bytes_per_token={"warm_to_hot": 49 << 30},
                    ceiling={"bound": "link", "ms": 957.0, "share": 0.947,
                             "device_memory_ms": 19.0, "attention_share": None}),
    ]  # fmt: skip
    add_speedups(rows)
    return {
        "machine": {"gpu": "NVIDIA H200, 139 GiB; driver 570.1", "cpus": 16,
                    "command": "tierkv bench --shape llama-3.1-8b:128K,256K,512K --hot 1/8,1"},
        "ceiling": {"host_to_device": LINK, "device_to_host": 53e9, "device_memory": MEMORY,
                    "disk_read": 1.3e9, "disk_direct": True},
        "checks": [{"shape": "llama-3.1-8b", "tokens": 2064, "steps": 4, "same_greedy_tokens": 4,
                    "relative_logit_error": 0.01, "error_with_one_page_wrong": 0.1, "ok": True}],
        "rows": rows,
        "skipped": [{"shape": "llama-3.1-8b", "tokens": 1 << 18, "system": OFFLOADED,
                     "hot_share": 0.0, "reason": "needs 128 GiB of host memory"}],
        "goals": goals(rows),
    }  # fmt: skip
