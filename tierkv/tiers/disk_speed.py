"""How fast a disk reads in large calls, past the page cache where the file system allows it."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tierkv.tiers.direct_io import (
    aligned_buffer,
    open_extent,
    probe_direct_io,
    read_frames,
    write_frames,
)

CALL_BYTES = 8 << 20
THREADS = 4


def disk_bandwidth(directory: Path, num_bytes: int, *, rounds: int = 3) -> tuple[float, bool]:
    """Write a file, read it back in large calls; return bytes per second and whether O_DIRECT.

    Raises:
        OSError: the directory cannot be written or read.
    """
    direct = probe_direct_io(directory).works
    count = max(THREADS, num_bytes // CALL_BYTES)
    with tempfile.TemporaryDirectory(prefix="tierkv-probe-", dir=directory) as scratch:
        raw = Path(scratch) / "raw"
        fd = open_extent(raw, direct=direct)
        try:
            page = aligned_buffer(CALL_BYTES)
            page[:] = os.urandom(CALL_BYTES)
            for index in range(count):
                write_frames(fd, index * CALL_BYTES, [page], direct=direct)
        finally:
            os.close(fd)
        size = count * CALL_BYTES
        rates = [read_bandwidth([raw], size, direct=direct) for _ in range(rounds)]
    return statistics.median(rates), direct


def read_bandwidth(
    paths: Sequence[Path],
    num_bytes: int,
    *,
    direct: bool,
    threads: int = THREADS,
    call_bytes: int = CALL_BYTES,
) -> float:
    """Read the first `num_bytes` of some files, dropped from the page cache; bytes per second.

    Every thread reads into memory of its own, which it has touched before.

    Raises:
        OSError: a file cannot be read.
    """
    calls: list[tuple[int, int]] = []
    fds: list[int] = []
    try:
        for path in paths:
            fds.append(open_extent(path, direct=direct))
            drop_cached(fds[-1])
            calls += [(fds[-1], at) for at in range(0, os.fstat(fds[-1]).st_size, call_bytes)]
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
