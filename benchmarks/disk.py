"""How fast pages come from disk: raw O_DIRECT, LMDB values, and the cold store.

Regime: incompressible pages of --frame-kib, read with the page cache dropped, the way a resumed
context or a cold page is. Ceiling: `preadv` and `pwritev` with O_DIRECT on a preallocated file of
the same file system, in 8 MiB calls one after another (sequential) or single pages at random
places (random), with as many threads.

LMDB rows read values through py-lmdb in the ways that might avoid one page fault per 4 KiB:
kernel readahead, posix_fadvise(WILLNEED) on the whole file, madvise(POPULATE_READ) on the whole
map (neither is open to a store larger than memory), values of 4 MiB. Those that read single
values read only --lmdb-mib, for they are slow. Write rows include the sync: one per 8 MiB batch.

Shared disks change speed by the second, so each row is measured in a pair with its ceiling, in
random order, and pairs are shuffled anew in each of --repeats rounds. "of ceiling" is the median
of the pairs' ratios, "GB/s" the median of the row. The last line of stdout is one JSON object.

    python benchmarks/disk.py --dir /mnt/nvme/scratch --gib 2
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import lmdb

from tierkv.tiers.cold import ColdStore
from tierkv.tiers.direct_io import aligned_buffer, open_extent, read_frames, write_frames

BATCH_BYTES = 8 << 20
LARGE_VALUE_BYTES = 4 << 20
THREADS = (1, 4)
MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Row(NamedTuple):
    """One thing to measure: `measure` returns GB/s; `ceiling` names the row it is held against."""

    name: str
    ceiling: str
    measure: Callable[[], float]


def key(index: int) -> bytes:
    """A page's key in the LMDB and cold store rows."""
    return index.to_bytes(32, "big")


def split(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Cut `items` into `parts` contiguous parts."""
    size = -(-len(items) // parts)
    return [items[i : i + size] for i in range(0, len(items), size)]


def batches(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Cut `items` into lists of `size`, the last one shorter."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def drop_page_cache(*directories: Path) -> None:
    """Write out and forget what the kernel caches of these directories' files."""
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDWR)
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
    if os.geteuid() == 0:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
        except OSError as error:
            print(f"# cannot drop all caches, fadvise only: {error}")


class Bench:
    """The three stores under one directory, filled with the same pages, and the rows to time."""

    def __init__(self, directory: Path, *, total_bytes: int, frame_bytes: int, lmdb_bytes: int):
        self.frame_bytes = frame_bytes
        self.batch = max(1, BATCH_BYTES // frame_bytes)
        self.num_pages = total_bytes // frame_bytes // self.batch * self.batch
        self.lmdb_pages = min(self.num_pages, lmdb_bytes // frame_bytes)
        self.raw_path = directory / "raw" / "pages"
        self.lmdb_dir = directory / "lmdb"
        self.large_dir = directory / "lmdb-large"
        self.cold_dir = directory / "cold"
        for path in (self.raw_path.parent, self.lmdb_dir, self.large_dir):
            path.mkdir()
        self.source = self._buffers()
        for view in self.source:
            view[:] = os.urandom(frame_bytes)
        self.rng = random.Random(0)
        self._fill()

    def ceilings(self) -> dict[str, Callable[[], float]]:
        """Return what the disk itself does, by name."""
        ceilings = {
            f"raw read {order}, threads={threads}": self._cold_cache(self.read_raw, order, threads)
            for order in ("sequential", "random")
            for threads in THREADS
        }
        return ceilings | {"raw write": self.write_raw}

    def rows(self) -> list[Row]:
        """Return what is held against the ceilings."""
        rows = []
        for threads in THREADS:
            for order in ("sequential", "random"):
                what = f"{order}, threads={threads}"
                measure = self._cold_cache(self.read_cold, order, threads)
                rows.append(Row(f"cold read {what}", f"raw read {what}", measure))
            for readahead in (False, True):
                what = f"random, threads={threads}"
                measure = self._cold_cache(self.read_lmdb, "random", threads, readahead)
                name = f"lmdb read {what}, readahead={readahead}"
                rows.append(Row(name, f"raw read {what}", measure))
        sequential: dict[str, Callable[[], float]] = {
            "readahead=True": lambda: self.read_lmdb("sequential", 1, True),
            "fadvise WILLNEED": self.read_lmdb_fadvise,
            "madvise POPULATE_READ": self.read_lmdb_populate,
            "4 MiB values": self.read_lmdb_large,
        }
        for what, measure in sequential.items():
            name = f"lmdb read sequential, threads=1, {what}"
            rows.append(Row(name, "raw read sequential, threads=1", self._cold_cache(measure)))
        rows.append(Row("cold write", "raw write", self.write_cold))
        rows.append(Row("lmdb write", "raw write", self.write_lmdb))
        return rows

    def read_raw(self, order: str, threads: int) -> float:
        """Read all pages with preadv: whole batches in order, or one page at a time."""
        fd = open_extent(self.raw_path, direct=True)

        def work(pages: Sequence[int]) -> None:
            buffers = self._buffers()
            step = self.batch if order == "sequential" else 1
            for batch in batches(pages, step):
                views = buffers[: len(batch)]
                done = read_frames(fd, batch[0] * self.frame_bytes, views, direct=True)
                assert done == len(batch) * self.frame_bytes

        try:
            return self._timed_read(work, self._pages(order, self.num_pages), threads)
        finally:
            os.close(fd)

    def read_cold(self, order: str, threads: int) -> float:
        """Read all pages through `ColdStore.read_into`, a batch at a time, checksums included."""
        with self._cold() as store:

            def work(pages: Sequence[int]) -> None:
                buffers = self._buffers()
                for batch in batches(pages, self.batch):
                    store.read_into([key(i) for i in batch], buffers[: len(batch)])

            return self._timed_read(work, self._pages(order, self.num_pages), threads)

    def read_lmdb(self, order: str, threads: int, readahead: bool) -> float:
        """Read some values, one transaction each."""
        with self._lmdb(self.lmdb_dir, readahead=readahead) as env:
            return self._read_values(env, self._pages(order, self.num_pages), threads)

    def read_lmdb_fadvise(self) -> float:
        """Ask the kernel to read the whole file ahead, then read values in order."""
        with self._lmdb(self.lmdb_dir, readahead=True) as env:
            start = time.perf_counter()
            fd = os.open(self.lmdb_dir / "data.mdb", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            os.close(fd)
            self._get_values(env, range(self.num_pages), self.frame_bytes)
            return self.num_pages * self.frame_bytes / (time.perf_counter() - start) / 1e9

    def read_lmdb_populate(self) -> float:
        """Fault the whole map in with one call, then read values in order."""
        with self._lmdb(self.lmdb_dir, readahead=True) as env:
            start = time.perf_counter()
            address, size = _mapping(self.lmdb_dir / "data.mdb")
            if _libc.madvise(address, size, MADV_POPULATE_READ) != 0:
                raise OSError(ctypes.get_errno(), "madvise(MADV_POPULATE_READ) failed")
            self._get_values(env, range(self.num_pages), self.frame_bytes)
            return self.num_pages * self.frame_bytes / (time.perf_counter() - start) / 1e9

    def read_lmdb_large(self) -> float:
        """Read values of 4 MiB, in order."""
        with self._lmdb(self.large_dir, readahead=True) as env:
            count = max(1, self.lmdb_pages * self.frame_bytes // LARGE_VALUE_BYTES)
            start = time.perf_counter()
            self._get_values(env, range(count), LARGE_VALUE_BYTES)
            return count * LARGE_VALUE_BYTES / (time.perf_counter() - start) / 1e9

    def write_raw(self) -> float:
        """Write a quarter of the pages in place, one fdatasync per batch."""
        fd = open_extent(self.raw_path, direct=True)

        def write(batch: Sequence[int]) -> None:
            write_frames(fd, batch[0] * self.frame_bytes, self.source, direct=True)
            os.fdatasync(fd)

        try:
            return self._timed_write(write)
        finally:
            os.close(fd)

    def write_cold(self) -> float:
        """Replace a quarter of the pages through `ColdStore.put`, durably."""
        with self._cold() as store:
            return self._timed_write(lambda batch: store.put([key(i) for i in batch], self.source))

    def write_lmdb(self) -> float:
        """Replace a quarter of the values, one synced transaction per batch."""
        with self._lmdb(self.lmdb_dir, readahead=True) as env:

            def write(batch: Sequence[int]) -> None:
                with env.begin(write=True) as txn:
                    for i, view in zip(batch, self.source, strict=True):
                        txn.put(key(i), view)

            return self._timed_write(write)

    def _fill(self) -> None:
        fd = open_extent(self.raw_path, direct=True)
        os.posix_fallocate(fd, 0, self.num_pages * self.frame_bytes)
        with (
            self._cold() as store,
            self._lmdb(self.lmdb_dir, readahead=True) as env,
            self._lmdb(self.large_dir, readahead=True) as large,
        ):
            for batch in batches(range(self.num_pages), self.batch):
                write_frames(fd, batch[0] * self.frame_bytes, self.source, direct=True)
                store.put([key(i) for i in batch], self.source)
                with env.begin(write=True) as txn:
                    for i, view in zip(batch, self.source, strict=True):
                        txn.put(key(i), view)
            value = os.urandom(LARGE_VALUE_BYTES)
            for i in range(max(1, self.lmdb_pages * self.frame_bytes // LARGE_VALUE_BYTES)):
                with large.begin(write=True) as txn:
                    txn.put(key(i), value)
            with env.begin() as txn:
                assert txn.get(key(1)) == bytes(self.source[1 % self.batch])
            page = self._buffers()[0]
            store.read_into([key(1)], [page])
            assert page == self.source[1 % self.batch]
        os.fdatasync(fd)
        os.close(fd)

    def _cold_cache(self, measure: Callable[..., float], *args: object) -> Callable[[], float]:
        def run() -> float:
            drop_page_cache(self.raw_path.parent, self.lmdb_dir, self.large_dir, self.cold_dir)
            return measure(*args)

        return run

    def _pages(self, order: str, count: int) -> Sequence[int]:
        if order == "sequential":
            return range(count)
        return self.rng.sample(range(self.num_pages), count)

    def _buffers(self) -> list[memoryview]:
        memory = aligned_buffer(self.batch * self.frame_bytes)
        return [
            memory[i * self.frame_bytes : (i + 1) * self.frame_bytes] for i in range(self.batch)
        ]

    def _cold(self) -> ColdStore:
        budget = 2 * self.num_pages * self.frame_bytes + (64 << 20)
        return ColdStore(
            self.cold_dir, frame_bytes=self.frame_bytes, disk_budget=budget, free_floor=0
        )

    @contextmanager
    def _lmdb(self, directory: Path, *, readahead: bool) -> Iterator[lmdb.Environment]:
        size = 2 * self.num_pages * self.frame_bytes + (64 << 20)
        env = lmdb.open(str(directory), map_size=size, readahead=readahead, max_spare_txns=8)
        try:
            yield env
        finally:
            env.close()

    def _read_values(self, env: lmdb.Environment, pages: Sequence[int], threads: int) -> float:
        def work(part: Sequence[int]) -> None:
            self._get_values(env, part, self.frame_bytes)

        return self._timed_read(work, pages[: self.lmdb_pages], threads)

    def _get_values(self, env: lmdb.Environment, pages: Sequence[int], value_bytes: int) -> None:
        """Copy each value into a buffer, as a page on its way to a frame would be."""
        target = aligned_buffer(value_bytes)
        for i in pages:
            with env.begin(buffers=True) as txn:
                value = txn.get(key(i))
                assert value is not None
                target[:] = value

    def _timed_read(
        self, work: Callable[[Sequence[int]], None], pages: Sequence[int], threads: int
    ) -> float:
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            list(pool.map(work, split(pages, threads)))
            seconds = time.perf_counter() - start
        return len(pages) * self.frame_bytes / seconds / 1e9

    def _timed_write(self, write: Callable[[Sequence[int]], None]) -> float:
        count = max(self.batch, self.num_pages // 4 // self.batch * self.batch)
        start = time.perf_counter()
        for batch in batches(range(count), self.batch):
            write(batch)
        return count * self.frame_bytes / (time.perf_counter() - start) / 1e9


def _mapping(path: Path) -> tuple[int, int]:
    """Return (address, bytes) of the mapped part of `path` that its file covers."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path.resolve())):
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            return first, min(last - first, path.stat().st_size // 4096 * 4096)
    raise OSError(f"{path} is not mapped")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--dir", type=Path, required=True, help="a directory on the disk to measure"
    )
    parser.add_argument("--gib", type=float, default=1.0, help="pages stored, GiB (needs 4x space)")
    parser.add_argument("--frame-kib", type=int, default=256, help="bytes of one page, KiB")
    parser.add_argument("--lmdb-mib", type=int, default=128, help="bytes the slow LMDB rows read")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    directory = Path(tempfile.mkdtemp(prefix="tierkv-disk-", dir=args.dir))
    try:
        bench = Bench(
            directory,
            total_bytes=int(args.gib * 2**30),
            frame_bytes=args.frame_kib << 10,
            lmdb_bytes=args.lmdb_mib << 20,
        )
        rows, ceilings = bench.rows(), bench.ceilings()
        samples: dict[str, list[float]] = {
            name: [] for name in (*ceilings, *(r.name for r in rows))
        }
        ratios: dict[str, list[float]] = {row.name: [] for row in rows}
        rng = random.Random(0)
        for _ in range(args.repeats):
            for row in rng.sample(rows, len(rows)):
                pair = [(row.name, row.measure), (row.ceiling, ceilings[row.ceiling])]
                speed = {name: measure() for name, measure in rng.sample(pair, 2)}
                for name, value in speed.items():
                    samples[name].append(value)
                ratios[row.name].append(speed[row.name] / speed[row.ceiling])
    finally:
        shutil.rmtree(directory)
    speeds = {name: statistics.median(values) for name, values in samples.items()}
    shares = {name: statistics.median(values) for name, values in ratios.items()}
    print(f"{'':54}{'GB/s':>7}{'min':>7}{'max':>7}{'of ceiling':>12}")
    for name, values in samples.items():
        share = f"{shares[name]:.0%}" if name in shares else "ceiling"
        print(f"{name:54}{speeds[name]:7.2f}{min(values):7.2f}{max(values):7.2f}{share:>12}")
    print(
        json.dumps(
            {
                "benchmark": "disk",
                "gib": args.gib,
                "frame_kib": args.frame_kib,
                "repeats": args.repeats,
                "gb_per_s": {name: round(value, 4) for name, value in speeds.items()},
                "of_ceiling": {name: round(value, 4) for name, value in shares.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
