"""The cold store used as meant: what goes in comes out, within the budget, for one owner."""

import os

import pytest

from tests.tiers.cold_helpers import (
    BUDGET,
    FRAME,
    extent_path,
    frames,
    open_store,
    page,
    put,
    read,
    slots,
)
from tierkv.errors import (
    ColdReadError,
    ConfigError,
    DiskBudgetError,
    StoreError,
)
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.direct_io import aligned_buffer
from tierkv.tiers.faults import COUNTERS


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store") as store:
        yield store


def test_round_trip_and_reopening(tmp_path):
    with open_store(tmp_path, durable=True) as store:
        put(store, b"a", b"b", b"c")
        put(store, b"d")
    with open_store(tmp_path, durable=True) as store:
        assert read(store, b"d", b"a", b"c", b"b") == [page(k) for k in (b"d", b"a", b"c", b"b")]
        assert len(store) == 4
        assert list(store.keys()) == [b"a", b"b", b"c", b"d"]
        assert b"a" in store
        assert b"x" not in store
        assert store.counters["pages_read"] == 4
        assert store.counters["bytes_read"] == 4 * FRAME


def test_put_replaces_and_frees_the_old_slot(store):
    put(store, b"a", b"b")
    _, used = slots(store)
    store.put([b"a"], [page("new")])
    assert slots(store)[1] == used
    assert read(store, b"a", b"b") == [page("new"), page(b"b")]


def test_a_batch_gets_neighbouring_slots_and_one_call(store, monkeypatch):
    keys = [bytes([i]) for i in range(32)]
    calls = []
    for name in ("pwritev", "preadv"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, f=original, n=name: (calls.append((n, len(a[1]))), f(*a))[1]
        )
    put(store, *keys)
    read(store, *reversed(keys))
    store.read_into(sorted(keys), [aligned_buffer(32 * FRAME)])
    assert calls == [("pwritev", 32), ("preadv", 32), ("preadv", 1)]


def test_a_write_syncs_the_payloads_before_it_becomes_visible(tmp_path, monkeypatch):
    order = []
    with open_store(tmp_path, durable=True) as store:
        put(store, b"a")
        for owner, name in ((os, "pwritev"), (os, "fdatasync"), (store._catalogue, "put_many")):
            original = getattr(owner, name)
            monkeypatch.setattr(
                owner, name, lambda *a, f=original, n=name: (order.append(n), f(*a))[1]
            )
        put(store, b"b", b"c")
    assert order == ["pwritev", "fdatasync", "put_many"]


def test_unaligned_and_read_only_payloads_go_through_a_bounce_buffer(store):
    raw = bytearray(FRAME + 1)
    raw[1:] = page("odd")
    store.put([b"a", b"b"], [memoryview(raw)[1:], memoryview(bytes(page("bytes")))])
    buffer = memoryview(bytearray(FRAME + 1))[1:]
    store.read_into([b"a"], [buffer])
    assert buffer == page("odd")
    assert read(store, b"b") == [page("bytes")]


def test_other_element_types_are_taken_as_bytes(store):
    store.put([b"a"], [page("x").cast("I")])
    buffer = frames(1)[0]
    store.read_into([b"a"], [buffer.cast("H")])
    assert buffer == page("x")


def test_one_key_may_be_read_twice_in_a_batch(store):
    put(store, b"a")
    assert read(store, b"a", b"a") == [page(b"a")] * 2
    assert slots(store)[1] == 1


def test_drop(store):
    put(store, b"a", b"b", b"c")
    assert store.drop([b"a", b"c", b"missing", b"a"]) == 2
    assert list(store.keys()) == [b"b"]
    assert slots(store)[1] == 1
    with pytest.raises(ColdReadError, match=f"key {b'a'.hex()}: missing"):
        read(store, b"a")
    assert store.counters["missing"] == 1
    assert store.drop([]) == 0
    store.put([], [])
    store.read_into([], [])


def test_keys_by_prefix(store):
    put(store, b"a1", b"a2", b"b1", b"\xff\xff")
    assert list(store.keys(b"a")) == [b"a1", b"a2"]
    assert list(store.keys(b"\xff")) == [b"\xff\xff"]
    assert list(store.keys(b"c")) == []


def test_every_counter_exists_from_the_start(store):
    """A labelled counter that nobody created looked the same as zero."""
    assert store.counters == dict.fromkeys(COUNTERS, 0)
    put(store, b"a")
    with pytest.raises(ColdReadError):
        read(store, b"b")
    assert tuple(store.counters) == COUNTERS


def test_metadata(tmp_path):
    with open_store(tmp_path) as store:
        assert store.meta_get("x") is None
        store.meta_put("context/x", b"1")
        store.meta_put("context/y", bytes(100_000))
        store.meta_put("z", b"")
        with pytest.raises(StoreError, match="metadata name"):
            store.meta_put("", b"")
        with pytest.raises(StoreError, match="metadata name"):
            store.meta_get("\0format")
    with open_store(tmp_path) as store:
        assert store.meta_get("context/x") == b"1"
        assert store.meta_get("context/y") == bytes(100_000)
        assert store.meta_names("context/") == ["context/x", "context/y"]
        assert store.meta_names() == ["context/x", "context/y", "z"]
        store.meta_delete("z")
        store.meta_delete("z")
        assert store.meta_get("z") is None
        assert len(store) == 0
        with pytest.raises(DiskBudgetError, match="disk_budget"):
            store.meta_put("big", bytes(BUDGET))


def test_malformed_arguments_are_refused(store):
    with pytest.raises(StoreError, match="1 to 64 bytes, got 65"):
        put(store, bytes(65))
    with pytest.raises(StoreError, match="1 to 64 bytes, got 0"):
        put(store, b"")
    with pytest.raises(StoreError, match="twice"):
        put(store, b"a", b"a")
    with pytest.raises(StoreError, match="2 keys but 1 buffers"):
        store.put([b"a", b"b"], [page(0)])
    with pytest.raises(StoreError, match="must be 4096 contiguous bytes, got 8192"):
        store.put([b"a"], [aligned_buffer(8192)])
    with pytest.raises(StoreError, match="contiguous: False"):
        store.put([b"a"], [aligned_buffer(8192)[::2]])
    put(store, b"a")
    with pytest.raises(StoreError, match="read-only"):
        store.read_into([b"a"], [memoryview(bytes(FRAME))])
    with pytest.raises(StoreError, match="1 keys but buffers for 2"):
        store.read_into([b"a"], [aligned_buffer(2 * FRAME)])
    with pytest.raises(StoreError, match="multiples of 4096 contiguous bytes, got 5000"):
        store.read_into([b"a"], [aligned_buffer(5000)])
    with pytest.raises(StoreError, match="contiguous: False"):
        store.read_into([b"a"], [aligned_buffer(2 * FRAME)[::2]])
    assert len(store) == 1


@pytest.mark.parametrize("frame_bytes", [0, -4096, 100, 4097, 8 << 30])
def test_a_frame_size_out_of_range_is_refused(tmp_path, frame_bytes):
    with pytest.raises(ConfigError, match=f"got {frame_bytes}"):
        open_store(tmp_path, frame_bytes=frame_bytes)


def test_the_budget_is_never_exceeded_and_room_is_exact(tmp_path):
    with open_store(tmp_path, frame_bytes=1 << 16) as store:
        put(store, b"kept")
        room = store.room()
        keys = [i.to_bytes(64, "big") for i in range(room + 1)]
        with pytest.raises(
            DiskBudgetError, match=r"of disk_budget 4 MiB are left \(raise disk_budget"
        ):
            put(store, *keys)
        assert len(store) == 1
        put(store, *keys[:room])
        assert len(store) == room + 1
        assert BUDGET // 2 < store.used_bytes <= BUDGET
        assert read(store, b"kept") == [page(b"kept", frame_bytes=1 << 16)]
        assert store.counters["budget_refusals"] == 1
        store.drop(keys)
        assert store.room() >= room * 3 // 4
    assert sum(p.stat().st_blocks * 512 for p in tmp_path.rglob("*") if p.is_file()) < 1 << 20


def test_the_free_space_floor_is_respected(tmp_path):
    """An unbounded tier once filled the node's disk."""
    with open_store(tmp_path, free_floor=1 << 62) as store:
        assert store.room() == 0
        with pytest.raises(DiskBudgetError, match="lower disk_floor"):
            put(store, b"a")
        assert slots(store) == (0, 0)


def test_reopening_with_a_smaller_budget_keeps_what_is_stored(tmp_path):
    with open_store(tmp_path) as store:
        put(store, b"a")
    with open_store(tmp_path, disk_budget=0) as store:
        assert store.room() == 0
        assert read(store, b"a") == [page(b"a")]
        with pytest.raises(DiskBudgetError):
            put(store, b"b")


def test_pages_of_another_size_are_counted_verified_and_dropped_but_not_read(tmp_path):
    with open_store(tmp_path, frame_bytes=2 * FRAME) as store:
        put(store, b"big", b"big2")
    with open_store(tmp_path) as store:
        put(store, b"small")
        assert len(store) == 3
        assert store.verify() == (3, [])
        assert b"big" not in store
        with pytest.raises(ColdReadError, match="other_frame_bytes"):
            read(store, b"big")
        assert store.drop([b"big", b"big2"]) == 2
        assert list((tmp_path / "extents").iterdir()) == [extent_path(store)]
        assert read(store, b"small") == [page(b"small")]


def test_a_put_may_replace_a_page_of_another_size(tmp_path):
    with open_store(tmp_path, frame_bytes=2 * FRAME) as store:
        put(store, b"a")
    with open_store(tmp_path) as store:
        put(store, b"a")
        assert store.verify() == (1, [])
    with open_store(tmp_path, frame_bytes=2 * FRAME) as store:
        assert b"a" not in store


def test_several_extent_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tierkv.tiers.extents.FILE_BYTES", 4 * FRAME)
    keys = [bytes([i]) for i in range(10)]
    with open_store(tmp_path) as store:
        put(store, *keys)
        assert extent_path(store, 2).exists()
        assert read(store, *keys) == [page(key) for key in keys]
        store.drop(keys[:4])
    with open_store(tmp_path) as store:
        assert not extent_path(store, 0).exists()
        assert store.verify() == (6, [])
        put(store, *keys[:4])
        assert read(store, *keys) == [page(key) for key in keys]


def test_a_directory_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot open the store"):
        open_store(tmp_path / "file" / "store")


def test_a_store_is_what_the_constructor_returned(tmp_path):
    with ColdStore(tmp_path, frame_bytes=FRAME, disk_budget=BUDGET, free_floor=0) as store:
        assert store.directory == tmp_path
