"""Compaction: files end where their pages do, and no failure on the way loses a page."""

import errno
import os

import pytest

from tests.tiers.cold_helpers import FRAME, FaultyCalls, extent_path, open_store, page, put, read
from tierkv.errors import ColdWriteError, StoreError, WriteLimitError
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.record import Record

KEYS = [b"%02d" % i for i in range(40)]
KEPT = [*KEYS[5:8], *KEYS[20::4]]


def scattered(directory):
    """A store with few pages all over its file."""
    store = open_store(directory)
    put(store, *KEYS)
    store.drop([key for key in KEYS if key not in KEPT])
    return store


def test_the_file_shrinks_to_its_pages(tmp_path):
    with scattered(tmp_path) as store:
        put(store, b"last")
        kept = [*KEPT, b"last"]
        store.compact()
        assert extent_path(store).stat().st_size == len(kept) * FRAME
        assert read(store, *kept) == [page(key) for key in kept]
        assert store.used_bytes < store.stored_bytes + (1 << 16)
    with open_store(tmp_path) as store:
        assert store.verify() == (len(kept), [])


def test_neighbours_stay_neighbours(tmp_path):
    """A restore reads runs of pages in one call."""
    with scattered(tmp_path) as store:
        store.compact()
        moved = [key for key in KEPT if key >= KEYS[20]]
        slots = [Record.unpack(key, store._catalogue.get(key)).slot for key in moved]
        assert slots == sorted(slots)


def fail(name, original, *args):
    raise OSError(errno.EIO, "injected")


@pytest.mark.parametrize("name", ["pwritev", "fdatasync", "ftruncate"])
def test_a_failure_loses_nothing(tmp_path, monkeypatch, name):
    with scattered(tmp_path) as store:
        store._commit.durable = True
        with monkeypatch.context() as patch:
            FaultyCalls(patch, [name], fail, at=0)
            with pytest.raises((ColdWriteError, StoreError), match="injected"):
                store.compact()
        assert read(store, *KEPT) == [page(key) for key in KEPT]
        store.compact()
        assert extent_path(store).stat().st_size == len(KEPT) * FRAME
    with open_store(tmp_path) as store:
        assert store.verify() == (len(KEPT), [])


def test_a_failed_commit_loses_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise ColdWriteError("commit failed")

    with scattered(tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(store._catalogue, "put_many", refuse)
            with pytest.raises(ColdWriteError, match="commit failed"):
                store.compact()
        assert read(store, *KEPT) == [page(key) for key in KEPT]
        assert store._payloads.own.slots.num_used == len(KEPT)
        store.compact()
        assert extent_path(store).stat().st_size == len(KEPT) * FRAME


def test_a_damaged_page_stays_where_it_is(tmp_path):
    """Moving it would give it a good checksum."""
    with scattered(tmp_path) as store:
        record = Record.unpack(KEPT[-1], store._catalogue.get(KEPT[-1]))
        fd = os.open(extent_path(store), os.O_RDWR)
        os.pwrite(fd, b"\0damaged\0", record.slot * FRAME)
        os.fsync(fd)
        os.close(fd)
        store.compact()
        assert [key for key, _ in store.verify().bad] == [KEPT[-1]]
        assert read(store, *KEPT[:-1]) == [page(key) for key in KEPT[:-1]]


def test_moves_count_as_writes(tmp_path):
    scattered(tmp_path).close()
    limit = {"disk_budget": 4 << 20, "free_floor": 0, "writes_per_day": 41 * FRAME}
    with ColdStore(tmp_path, frame_bytes=FRAME, durable=False, **limit) as store:
        with pytest.raises(WriteLimitError):
            store.compact()
        assert read(store, *KEPT) == [page(key) for key in KEPT]
