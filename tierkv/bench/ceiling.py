"""What the machine itself can do: the bandwidths that bound decoding, measured at the start."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tierkv.bench.memory import synchronize
from tierkv.tiers.direct_io import (
    aligned_buffer,
    open_extent,
    probe_direct_io,
    read_frames,
    write_frames,
)

ROUNDS = 7
"""Timed rounds per copy; the median counts."""
DISK_CALL_BYTES = 8 << 20
DISK_THREADS = 4


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


def disk_bandwidth(directory: Path, num_bytes: int) -> tuple[float, bool]:
    """Write a file, read it back in large calls; return bytes per second and whether O_DIRECT."""
    direct = probe_direct_io(directory).works
    count = max(DISK_THREADS, num_bytes // DISK_CALL_BYTES)
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=directory) as scratch:
        raw = Path(scratch) / "raw"
        fd = open_extent(raw, direct=direct)
        try:
            page = aligned_buffer(DISK_CALL_BYTES)
            page[:] = os.urandom(DISK_CALL_BYTES)
            for index in range(count):
                write_frames(fd, index * DISK_CALL_BYTES, [page], direct=direct)
        finally:
            os.close(fd)
        size = count * DISK_CALL_BYTES
        rates = [read_bandwidth([raw], size, direct=direct) for _ in range(3)]
    return statistics.median(rates), direct


def read_bandwidth(
    paths: Sequence[Path],
    num_bytes: int,
    *,
    direct: bool,
    threads: int = DISK_THREADS,
    call_bytes: int = DISK_CALL_BYTES,
) -> float:
    """Read the first `num_bytes` of some files, dropped from the page cache; bytes per second.

    Every thread reads into memory of its own, which it has touched before.
    """
    calls: list[tuple[int, int]] = []
    fds = [open_extent(path, direct=direct) for path in paths]
    try:
        for fd in fds:
            drop_cached(fd)
            calls += [(fd, at) for at in range(0, os.fstat(fd).st_size, call_bytes)]
        calls = calls[: -(-num_bytes // call_bytes)]
        targets = [aligned_buffer(call_bytes) for _ in range(threads)]
        for target in targets:
            target[:] = bytes(call_bytes)

        def work(thread: int) -> int:
            mine = calls[thread::threads]
            return sum(read_frames(fd, at, [targets[thread]], direct=direct) for fd, at in mine)

        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            done = sum(pool.map(work, range(threads)))
            return done / (time.perf_counter() - start)
    finally:
        for fd in fds:
            os.close(fd)


def drop_cached(fd: int) -> None:
    """Drop a file from the page cache, written out first."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
