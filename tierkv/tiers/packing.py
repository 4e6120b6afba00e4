"""Whether packing pays: how fast the disk reads, beside how fast threads unpack.

A page is written once and read many times. Packed pages come up no faster than they are unpacked,
so packing is switched off where the disk alone is faster than that. Measured when a store is first
opened for packing, and remembered in it: the store keeps its way, and what it holds stays readable.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from tierkv.codecs.lossless import LENGTH, Lossless
from tierkv.errors import ColdReadError
from tierkv.tiers.disk_speed import disk_bandwidth
from tierkv.tiers.metadata import Metadata

PROBE_BYTES = 32 << 20
"""Bytes written and read to measure the disk. In a store with less room, pages are packed."""
PROBE_SECONDS = 0.05
"""For which unpacking is measured."""
META_NAME = "packing"


@dataclass(frozen=True, slots=True)
class Packing:
    """What was decided for a store, and why.

    Attributes:
        on: whether pages are packed.
        disk_gb_s: read from the disk without packing; None if that was not measured.
        unpack_gb_s: what all reading threads unpack, in bytes of pages; likewise.
    """

    on: bool
    disk_gb_s: float | None = None
    unpack_gb_s: float | None = None

    @classmethod
    def remembered(cls, store: Metadata) -> Packing | None:
        """Return what was decided when the store was first opened for packing; None if never."""
        try:
            value = store.meta_get(META_NAME)
            return None if value is None else cls(**json.loads(value))
        except (ColdReadError, ValueError, TypeError):
            return None  # damaged, or of another version: decide again

    def remember(self, store: Metadata) -> None:
        """Keep it in the store."""
        store.meta_put(META_NAME, json.dumps(asdict(self)).encode())

    @classmethod
    def measured(
        cls, directory: Path, page_bytes: int, dtype: torch.dtype, *, level: int, threads: int
    ) -> Packing:
        """Measure the disk under `directory` and unpacking of one kind of page on `threads`.

        Raises:
            OSError: the directory cannot be written or read.
        """
        disk = disk_bandwidth(directory, PROBE_BYTES)[0] / 1e9
        unpack = unpack_bandwidth(page_bytes, dtype, level=level, threads=threads) / 1e9
        return cls(unpack >= disk, disk, unpack)

    def __str__(self) -> str:
        return (
            f"the disk reads {self.disk_gb_s:.2f} GB/s, the reading threads unpack "
            f"{self.unpack_gb_s:.2f} GB/s"
            if self.disk_gb_s is not None
            else "not measured"
        )


def unpack_bandwidth(page_bytes: int, dtype: torch.dtype, *, level: int, threads: int) -> float:
    """Return the bytes of pages of normal numbers that `threads` threads unpack per second."""
    whole = page_bytes // dtype.itemsize
    numbers = torch.randn(whole, generator=torch.Generator().manual_seed(0)).to(dtype)
    page = numbers.view(torch.uint8).numpy()
    packed = np.empty(page.nbytes + LENGTH.size + 1024, np.uint8)
    Lossless(dtype.itemsize, level).pack(page, packed)
    stop = time.perf_counter() + PROBE_SECONDS

    def work(_: int) -> int:
        tool, out, done = Lossless(dtype.itemsize, level), np.empty_like(page), 0
        while not done or time.perf_counter() < stop:
            tool.unpack(packed, out)
            done += 1
        return done

    start, threads = time.perf_counter(), min(threads, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        pages = sum(pool.map(work, range(threads)))
    return pages * page.nbytes / (time.perf_counter() - start)
