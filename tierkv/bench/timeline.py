"""Copies against compute within one decode step, as the GPU itself recorded them.

torch's profiler sees every kernel and copy of this process, so nothing has to be instrumented.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

LANES = ("host to device", "device to host", "attention", "other compute")
ATTENTION = re.compile(r"flash|fmha|sdpa|attn|attention|paged|decode|merge", re.IGNORECASE)
"""Names of kernels that belong to attention."""
DOWN = re.compile(r"DtoH|scatter", re.IGNORECASE)
UP = re.compile(r"HtoD", re.IGNORECASE)
WAITING = re.compile(r"sync|wait", re.IGNORECASE)
"""Names of what is no work."""
MAX_INTERVALS = 1000
"""Of a whole timeline: shorter gaps than this share of the step are closed."""


class Event(NamedTuple):
    """One kernel or copy on the GPU; times in microseconds."""

    name: str
    stream: int
    start: float
    stop: float


def record(work: Callable[[], None]) -> dict[str, Any] | None:
    """Run `work` twice and return the timeline of the second run, or None if none was seen.

    `work` ends with everything it started finished.
    """
    events: list[Event] = []
    for _ in range(2):  # the first pays for starting the profiler
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
        events = [
            Event(
                event.name, event.device_resource_id, event.time_range.start, event.time_range.end
            )
            for event in profiler.events() or []
            if "CUDA" in str(event.device_type)
            and event.time_range.end > event.time_range.start
            and not WAITING.search(event.name)
        ]
    return lanes(events) if events else None


def lanes(events: Iterable[Event]) -> dict[str, Any]:
    """Sort events into lanes: ``[start, duration]`` in ms, and how long each lane was busy.

    The stream with the most kernels computes; a kernel on another stream is a copy.
    """
    events = sorted(events, key=lambda event: event.start)
    is_copy = re.compile(r"^(Memcpy|Memset)", re.IGNORECASE)
    streams = Counter(event.stream for event in events if not is_copy.match(event.name))
    main = streams.most_common(1)[0][0] if streams else None
    found: dict[str, list[list[float]]] = defaultdict(list)
    zero, end = events[0].start, max(event.stop for event in events)
    gap = (end - zero) / MAX_INTERVALS / 1e3
    busy = dict.fromkeys(LANES, 0.0)
    for event in events:
        lane = _lane(event, main)
        start, duration = (event.start - zero) / 1e3, (event.stop - event.start) / 1e3
        busy[lane] += duration
        last = found[lane][-1] if found[lane] else None
        if last is not None and start - (last[0] + last[1]) < gap:
            last[1] = max(last[1], start + duration - last[0])
        else:
            found[lane].append([start, duration])
    rounded = {
        lane: [[round(x, 4) for x in interval] for interval in found[lane]] for lane in LANES
    }
    return {"span_ms": (end - zero) / 1e3, "busy_ms": busy, "lanes": rounded}


def _lane(event: Event, main: int | None) -> str:
    if UP.search(event.name):
        return "host to device"
    if "DtoH" in event.name:
        return "device to host"
    if event.stream != main and not event.name.startswith("Mem"):
        return "device to host" if DOWN.search(event.name) else "host to device"
    return "attention" if ATTENTION.search(event.name) else "other compute"
