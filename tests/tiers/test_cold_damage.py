"""Damage and failure: bad bytes are counted misses, failed calls leave nothing behind."""

import errno
import os
from contextlib import contextmanager

import lmdb
import pytest

from tests.tiers.cold_helpers import (
    BUDGET,
    FRAME,
    FaultyCalls,
    extent_path,
    frames,
    open_store,
    page,
    put,
    read,
    slots,
)
from tierkv.errors import ColdReadError, ColdWriteError, StoreError, StoreFormatError
from tierkv.tiers.faults import BadPagesError
from tierkv.tiers.record import Record, pack_format


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path) as store:
        yield store


@contextmanager
def catalogue(directory, database):
    """Write into a closed store's LMDB behind its back."""
    env = lmdb.open(str(directory / "catalogue"), map_size=BUDGET, max_dbs=2)
    with env, env.begin(write=True, db=env.open_db(database)) as txn:
        yield txn


def damage(store, key, *, byte=100):
    """Change one byte of a stored payload."""
    record = Record.unpack(key, store._catalogue.get(key))
    offset = record.slot * store.frame_bytes + byte
    with extent_path(store, record.file_index).open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, offset)[0] ^ 1]), offset)
        os.fsync(file.fileno())


@pytest.mark.parametrize("byte", [0, 100, FRAME - 1])
def test_a_flipped_payload_bit_is_a_counted_miss_and_dropped(store, byte):
    put(store, b"a", b"b", b"c")
    damage(store, b"b", byte=byte)
    assert [key for key, _ in store.verify().bad] == [b"b"]
    assert b"b" in store  # verify changes nothing
    buffers = frames(3)
    with pytest.raises(BadPagesError, match=f"1 of 3 .* key {b'b'.hex()}: bad_checksum") as caught:
        store.read_into([b"a", b"b", b"c"], buffers)
    assert list(caught.value.faults) == [b"b"]
    assert (buffers[0], buffers[2]) == (page(b"a"), page(b"c"))
    assert store.counters["bad_checksum"] == 1
    assert b"b" not in store
    assert slots(store)[1] == 2
    assert store.verify() == (2, [])
    put(store, b"b")
    assert read(store, b"a", b"b", b"c") == [page(b"a"), page(b"b"), page(b"c")]


def test_a_truncated_extent_spoils_only_what_it_cut(store):
    put(store, b"a", b"b", b"c")
    os.truncate(extent_path(store), FRAME + 100)
    with pytest.raises(BadPagesError, match="2 of 3") as caught:
        read(store, b"a", b"b", b"c")
    assert {key: fault.reason for key, fault in caught.value.faults.items()} == {
        b"b": "truncated",
        b"c": "truncated",
    }
    assert store.counters["truncated"] == 2
    assert read(store, b"a") == [page(b"a")]
    put(store, b"b", b"c")
    assert store.verify() == (3, [])


@pytest.mark.parametrize("kept", [0, FRAME, FRAME + 100])
def test_an_extent_truncated_before_opening(tmp_path, kept):
    with open_store(tmp_path) as store:
        put(store, b"a", b"b", b"c")
    os.truncate(extent_path(store), kept)
    with open_store(tmp_path) as store:
        lost = 3 - kept // FRAME
        assert store.counters["truncated"] == lost
        assert len(store.verify().bad) == lost
        assert len(store) == 3 - lost
        put(store, b"b", b"c")
        assert read(store, b"b", b"c") == [page(b"b"), page(b"c")]


def test_a_missing_extent_file(tmp_path):
    with open_store(tmp_path) as store:
        put(store, b"a")
    extent_path(store).unlink()
    with open_store(tmp_path) as store:
        assert store.counters["truncated"] == 1
        assert len(store) == 0


def test_damaged_headers_are_dropped_when_opening(tmp_path):
    """Metadata that recovery believed once gave pages a wrong place."""
    with open_store(tmp_path) as store:
        put(store, b"a", b"b", b"c", b"d")
    with catalogue(tmp_path, b"pages") as txn:
        a, b = txn.get(b"a"), txn.get(b"b")
        txn.put(b"a", b)
        txn.put(b"b", a)
        txn.put(b"c", txn.get(b"c")[:-1])
    with open_store(tmp_path) as store:
        assert store.counters["bad_header"] == 3
        assert [key for key, _ in store.verify().bad] == [b"a", b"b", b"c"]
        assert list(store.keys()) == [b"d"]
        assert read(store, b"d") == [page(b"d")]
        assert slots(store)[1] == 1


def test_a_header_damaged_while_open(store):
    put(store, b"a", b"b")
    store._catalogue.put_many({b"a": store._catalogue.get(b"b")})
    assert b"a" not in store
    assert [key for key, _ in store.verify().bad] == [b"a"]
    with pytest.raises(ColdReadError, match="bad_header"):
        read(store, b"a", b"b")
    assert store.counters["bad_header"] == 1
    assert list(store.keys()) == [b"b"]
    assert read(store, b"b") == [page(b"b")]


def test_damaged_metadata_is_counted_and_dropped(tmp_path):
    with open_store(tmp_path) as store:
        store.meta_put("x", b"value")
    with catalogue(tmp_path, b"meta") as txn:
        txn.put(b"x", txn.get(b"x")[:-1] + b"!")
    with open_store(tmp_path) as store:
        with pytest.raises(ColdReadError, match="'x' is damaged"):
            store.meta_get("x")
        assert store.counters["bad_meta"] == 1
        assert store.meta_get("x") is None


def test_another_format_version_is_refused_and_named(tmp_path):
    open_store(tmp_path).close()
    with catalogue(tmp_path, b"meta") as txn:
        txn.put(b"\0format", pack_format(7))
    with pytest.raises(StoreFormatError, match=r"format version 7.*expects version 1"):
        open_store(tmp_path)


@pytest.mark.parametrize("stamp", [b"", b"something else", pack_format(1)[:-1] + b"?"])
def test_another_magic_is_refused(tmp_path, stamp):
    open_store(tmp_path).close()
    with catalogue(tmp_path, b"meta") as txn:
        txn.put(b"\0format", stamp)
    for _ in range(2):  # the failed opening must have released the lock
        with pytest.raises(StoreFormatError, match="not one of tierkv's"):
            open_store(tmp_path)


def test_pages_without_a_format_stamp_are_refused(tmp_path):
    with open_store(tmp_path) as store:
        put(store, b"a")
    with catalogue(tmp_path, b"meta") as txn:
        txn.delete(b"\0format")
    with pytest.raises(StoreFormatError):
        open_store(tmp_path)


def test_a_file_that_is_no_lmdb(tmp_path):
    open_store(tmp_path).close()
    (tmp_path / "catalogue" / "data.mdb").write_bytes(b"x" * 8192)
    with pytest.raises(StoreFormatError, match="no readable LMDB catalogue"):
        open_store(tmp_path)


def test_a_cut_catalogue_is_refused(tmp_path):
    """Reading a mapped page past the end of its file kills the process with SIGBUS."""
    with open_store(tmp_path) as store:
        put(store, *[i.to_bytes(64, "big") for i in range(200)])
    path = tmp_path / "catalogue" / "data.mdb"
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(StoreFormatError, match="cut off"):
        open_store(tmp_path)


def raising(number):
    def fault(name, original, *args):
        raise OSError(number, os.strerror(number))

    return fault


def short_write(name, original, *args):
    if name != "pwritev":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    fd, views, offset = args
    return original(fd, [views[0][:4096]], offset) if len(views) > 1 else 0


WRITE_CALLS = ("statvfs", "open", "fsync", "posix_fallocate", "pwritev", "fdatasync")
FAULTS = {
    "EIO": raising(errno.EIO),
    "ENOSPC": raising(errno.ENOSPC),
    "EINVAL": raising(errno.EINVAL),
    "short": short_write,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_of_any_call_of_a_put_leaves_nothing(tmp_path, monkeypatch, fault):
    """A key whose store had failed once stayed visible: gibberish on every hit."""
    monkeypatch.setattr("tierkv.tiers.extents.FILE_BYTES", 4 * FRAME)
    monkeypatch.setattr("tierkv.tiers.direct_io.MAX_TRANSFER_BYTES", 2 * FRAME)
    monkeypatch.setattr("tierkv.tiers.payloads._GROWTH_BYTES", 0)
    keys = [b"a", *(bytes([i]) for i in range(8))]
    at, num_calls = 0, 1
    while at < num_calls:
        with open_store(tmp_path / str(at), disk_budget=1 << 20, durable=True) as store:
            put(store, b"a")
            with monkeypatch.context() as patch:
                FaultyCalls(patch, WRITE_CALLS, FAULTS[fault], at)
                with pytest.raises(ColdWriteError) as caught:
                    store.put(keys, [page("new")] * len(keys))
            assert isinstance(caught.value.__cause__, OSError)
            assert store.counters["write_errors"] == 1
            assert list(store.keys()) == [b"a"]
            assert read(store, b"a") == [page(b"a")]
            assert slots(store)[1] == 1
            with monkeypatch.context() as patch:
                counted = FaultyCalls(patch, WRITE_CALLS, None)
                store.put(keys, [page("new")] * len(keys))
            if at == 0:
                num_calls = counted.num_calls
            assert read(store, *keys) == [page("new")] * len(keys)
            assert slots(store)[1] == len(keys)
            assert store.verify() == (len(keys), [])
        at += 1
    assert num_calls >= 10


def test_a_failed_commit_leaves_nothing(store, monkeypatch):
    put(store, b"a")
    with monkeypatch.context() as patch:

        def fail(*_):
            raise ColdWriteError("commit failed")

        patch.setattr(store._catalogue, "put_many", fail)
        with pytest.raises(ColdWriteError, match="commit failed"):
            put(store, b"a", b"b")
    assert slots(store)[1] == 1
    assert read(store, b"a") == [page(b"a")]


def test_an_interrupt_after_the_commit_keeps_the_slots(store, monkeypatch):
    """Freeing them would hand visible pages' slots to the next batch."""
    original = store._catalogue.put_many

    def commit_then_interrupt(*records):
        original(*records)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store._catalogue, "put_many", commit_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(store, b"a", b"b")
    put(store, b"c", b"d")
    assert read(store, b"a", b"b", b"c") == [page(b"a"), page(b"b"), page(b"c")]


def test_a_map_full_is_a_write_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tierkv.tiers.catalogue._MAP_SLACK", (64 << 10) - BUDGET)
    with open_store(tmp_path) as store:
        with pytest.raises(ColdWriteError, match="MDB_MAP_FULL"):
            put(store, *[i.to_bytes(64, "big") for i in range(600)])
        assert slots(store)[1] == 0
        put(store, b"a")
        assert read(store, b"a") == [page(b"a")]


def test_a_failed_drop_of_damage_still_names_the_page(store, monkeypatch):
    put(store, b"a")
    damage(store, b"a")

    def fail(records):
        raise ColdWriteError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(store._catalogue, "delete_same", fail)
        with pytest.raises(BadPagesError, match="bad_checksum") as caught:
            read(store, b"a")
    assert isinstance(caught.value.__cause__, ColdWriteError)


def test_a_failed_read_is_reported_and_keeps_the_page(store, monkeypatch):
    put(store, b"a", b"b")
    with monkeypatch.context() as patch:
        FaultyCalls(patch, ["preadv"], raising(errno.EIO), at=0)
        assert read(store, b"a", b"b") == [
            page(b"a"),
            page(b"b"),
        ]  # the run failed, singles did not
    with monkeypatch.context() as patch:
        FaultyCalls(patch, ["preadv"], raising(errno.EIO), at=0)
        with pytest.raises(ColdReadError, match=r"io_errors .*Input/output error"):
            read(store, b"a")
    assert store.counters["io_errors"] == 1
    assert read(store, b"a") == [page(b"a")]


def test_a_failure_while_opening_releases_the_lock(tmp_path, monkeypatch):
    """An early return once kept the lock for good."""
    open_store(tmp_path).close()
    with monkeypatch.context() as patch:
        patch.setattr(
            "tierkv.tiers.payloads.frame_sizes", lambda directory: os.listdir("/nonexistent")
        )
        with pytest.raises(StoreError, match="cannot open the store"):
            open_store(tmp_path)
    open_store(tmp_path).close()
