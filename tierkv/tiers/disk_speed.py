"""How fast a disk reads in large calls, past the page cache where the file system allows it."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
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
        fd = open_extent(Path(scratch) / "raw", direct=direct)
        try:
            page = aligned_buffer(CALL_BYTES)
            page[:] = os.urandom(CALL_BYTES)
            for index in range(count):
                write_frames(fd, index * CALL_BYTES, [page], direct=direct)
            os.fdatasync(fd)

            def work(thread: int) -> None:
                target = aligned_buffer(CALL_BYTES)
                for index in range(thread, count, THREADS):
                    read_frames(fd, index * CALL_BYTES, [target], direct=direct)

            def seconds_of_a_round(pool: ThreadPoolExecutor) -> float:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                list(pool.map(work, range(THREADS)))
                return time.perf_counter() - start

            with ThreadPoolExecutor(THREADS) as pool:
                seconds = statistics.median(seconds_of_a_round(pool) for _ in range(rounds))
        finally:
            os.close(fd)
    return count * CALL_BYTES / seconds, direct
