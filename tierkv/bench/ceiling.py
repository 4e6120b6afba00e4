"""What the machine itself can do: the bandwidths that bound decoding, measured at the start."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tierkv.bench.memory import synchronize
from tierkv.tiers.disk_speed import disk_bandwidth

ROUNDS = 7
"""Timed rounds per copy; the median counts."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bandwidths in bytes per second.

    Attributes:
        host_to_device, device_to_host: one large copy from or to pinned memory.
        device_memory: a copy within device memory, reads and writes both counted.
        disk_read: O_DIRECT reads past the page cache, or None without a store.
        disk_direct: whether those reads could use O_DIRECT.
    """

    host_to_device: float
    device_to_host: float
    device_memory: float
    disk_read: float | None = None
    disk_direct: bool = False


def measure(device: torch.device, store: Path | None, *, scale: int = 1) -> Ceiling:
    """Measure every bandwidth; `scale` divides the sizes (for smoke runs)."""
    cuda = device.type == "cuda"
    large = (1 << 30 if cuda else 1 << 26) // scale
    host = torch.ones(large, dtype=torch.uint8, pin_memory=cuda)
    there = torch.ones(large, dtype=torch.uint8, device=device)
    up = _copy_bandwidth(there, host, device)
    down = _copy_bandwidth(host, there, device)
    del host
    size = (4 << 30 if cuda else 1 << 26) // scale
    one, two = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    memory = 2 * _copy_bandwidth(one, two, device)
    if store is None:
        return Ceiling(up, down, memory)
    store.mkdir(parents=True, exist_ok=True)
    disk, direct = disk_bandwidth(store, large)
    return Ceiling(up, down, memory, disk, direct)


def _copy_bandwidth(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    def copies() -> None:
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        synchronize(device)

    copies()
    return 4 * source.numel() / statistics.median(_seconds(copies) for _ in range(ROUNDS))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
