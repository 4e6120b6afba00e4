"""Reads handed to the kernel together, and a store that reads so."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.cold_helpers import FRAME, open_store
from tierkv.tiers import extents
from tierkv.tiers.direct_io import aligned_buffer, open_extent, probe_direct_io, write_frames
from tierkv.tiers.faults import BadPagesError
from tierkv.tiers.read_queue import MAX_DEPTH, ReadQueue, Reads

SECTOR, SECTORS = 4096, 200


@pytest.fixture
def queue() -> Iterator[ReadQueue]:
    try:
        made = ReadQueue()
    except OSError as error:
        pytest.skip(f"the kernel has no queue: {error}")
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A file whose sectors hold their number."""
    fd = open_extent(tmp_path / "file", direct=probe_direct_io(tmp_path).works)
    content = aligned_buffer(SECTORS * SECTOR)
    content[:] = np.repeat(np.arange(SECTORS, dtype=np.uint8), SECTOR).tobytes()
    write_frames(fd, 0, [content], direct=True)
    yield fd
    os.close(fd)


def reads(fd: int, sectors: list[int], counts: list[int], memory: np.ndarray) -> Reads:
    """Reads from given sectors on, of so many sectors each, into memory one after the other."""
    at = memory.ctypes.data + SECTOR * np.arange(sum(counts))
    vectors = np.stack([at, np.full_like(at, SECTOR)], axis=1)
    offsets = np.array(sectors) * SECTOR
    return Reads(np.full(len(sectors), fd), offsets, np.array(counts), vectors)


@pytest.mark.parametrize("depth", [1, 3, MAX_DEPTH])
def test_reads_come_where_they_belong(queue: ReadQueue, file: int, depth: int) -> None:
    chance = np.random.default_rng(depth)
    sectors, counts = chance.integers(0, SECTORS - 4, 150), chance.integers(1, 4, 150)
    memory = np.frombuffer(aligned_buffer(int(counts.sum()) * SECTOR), np.uint8)
    results = queue.read(reads(file, sectors.tolist(), counts.tolist(), memory), depth)
    assert results.tolist() == (counts * SECTOR).tolist()
    expected = np.concatenate([np.arange(a, a + n) for a, n in zip(sectors, counts, strict=True)])
    assert (memory.reshape(-1, SECTOR) == expected[:, None]).all()


def test_what_does_not_come_says_why(queue: ReadQueue, file: int) -> None:
    memory = np.frombuffer(aligned_buffer(3 * SECTOR), np.uint8)
    asked = reads(file, [SECTORS - 1, SECTORS + 5], [2, 1], memory)
    assert queue.read(asked, 2).tolist() == [SECTOR, 0]
    asked.vectors[2, 0] = 4096  # no memory of ours
    asked.offsets[1] = 0
    assert queue.read(asked, 2).tolist() == [SECTOR, -errno.EFAULT]


def test_a_refused_request_leaves_none_under_way(queue: ReadQueue, file: int) -> None:
    memory = np.frombuffer(aligned_buffer(3 * SECTOR), np.uint8)
    asked = reads(file, [0, 1, 2], [1, 1, 1], memory)
    asked.fds[2] = 1 << 20  # not open
    with pytest.raises(OSError, match="descriptor"):
        queue.read(asked, 3)
    assert memory[0] == 0 and memory[SECTOR] == 1  # awaited, though they were of no use
    with pytest.raises(OSError):
        queue.read(reads(file, [0], [1], memory), 1)  # closed


def scattered(store: Any, keys: list[bytes]) -> np.ndarray:
    """Read pages in an order in which no two are neighbours; return their first bytes."""
    order = np.random.default_rng(3).permutation(len(keys))[: len(keys) // 2]
    memory = aligned_buffer(len(order) * FRAME)
    views = [memory[at * FRAME : (at + 1) * FRAME] for at in range(len(order))]
    store.read_into([keys[at] for at in order], views)
    assert [view[0] for view in views] == order.tolist()
    return order


@pytest.fixture
def pages() -> tuple[list[bytes], list[memoryview]]:
    keys = [b"page %d" % at for at in range(100)]
    payloads = [aligned_buffer(FRAME) for _ in keys]
    for at, payload in enumerate(payloads):
        payload[:] = bytes([at]) * FRAME
    return keys, payloads


def test_a_store_reads_scattered_pages_together(
    tmp_path: Path, queue: ReadQueue, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, payloads = pages
    with open_store(tmp_path) as store:
        if not store.direct_io:
            pytest.skip(store.direct_io_reason)
        store.put(keys, payloads)
        monkeypatch.setattr(os, "preadv", None)  # would be one read at a time
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(scattered, store, keys) for _ in range(3)]:
                done.result()
        assert store.counters["pages_read"] == 3 * len(keys) // 2


def test_a_few_neighbours_do_not_keep_the_rest_apart(
    tmp_path: Path, queue: ReadQueue, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run longer than half of what may be under way had all pages read one by one."""
    keys, payloads = pages
    monkeypatch.setattr(extents, "DEPTH_BYTES", 20 * FRAME)
    with open_store(tmp_path) as store:
        if not store.direct_io:
            pytest.skip(store.direct_io_reason)
        store.put(keys, payloads)
        monkeypatch.setattr(os, "preadv", None)  # would be one read at a time
        wanted = [*range(0, 60, 2), *range(70, 90)]
        memory = aligned_buffer(len(wanted) * FRAME)
        store.read_into([keys[at] for at in wanted], [memory])
        assert memory[::FRAME].tolist() == wanted


def test_a_store_without_a_queue_reads_one_by_one(
    tmp_path: Path, pages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> ReadQueue:
        raise OSError(errno.EPERM, "not here")

    monkeypatch.setattr(extents, "ReadQueue", refused)
    with open_store(tmp_path) as store:
        store.put(*pages)
        scattered(store, pages[0])


def test_what_the_queue_does_not_bring_is_read_without_it(
    tmp_path: Path, pages: Any, queue: ReadQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page without neighbours was named as bad when the kernel was short of memory for it."""

    def short(self: ReadQueue, reads: Reads, depth: int) -> np.ndarray:
        for address, _ in reads.vectors.tolist():
            ctypes.memset(address, 255, FRAME)
        return np.where(np.arange(len(reads.fds)) % 2, -errno.EAGAIN, FRAME // 2)

    monkeypatch.setattr(ReadQueue, "read", short)
    with open_store(tmp_path) as store:
        store.put(*pages)
        scattered(store, pages[0])
        assert not store.counters["io_errors"]


def test_one_bad_page_among_many_is_named(tmp_path: Path, pages: Any, queue: ReadQueue) -> None:
    keys, payloads = pages
    with open_store(tmp_path) as store:
        store.put(keys, payloads)
        (file,) = (tmp_path / "extents").glob("*.kv")
        with file.open("r+b") as damaged:
            damaged.seek(7 * FRAME)
            damaged.write(b"x")
        wanted = [keys[at] for at in (2, 7, 50, 99)]
        memory = aligned_buffer(4 * FRAME)
        views = [memory[at * FRAME : (at + 1) * FRAME] for at in range(4)]
        with pytest.raises(BadPagesError) as caught:
            store.read_into(wanted, views)
        assert list(caught.value.faults) == [keys[7]]
        assert [views[at][0] for at in (0, 2, 3)] == [2, 50, 99]
