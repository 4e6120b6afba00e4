"""Several I/O threads at once: a reader sees a whole page or a miss, never another's bytes."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tiers.cold_helpers import frames, open_store, page, put, read, slots
from tierkv.tiers.faults import BadPagesError

KEYS = [b"key" + bytes([i]) for i in range(24)]
VERSIONS = 3


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path, disk_budget=1 << 20) as store:
        yield store


def run_all(*workers):
    """Run functions in threads; raise the first error any of them had."""
    with ThreadPoolExecutor(len(workers)) as pool:
        for future in [pool.submit(worker) for worker in workers]:
            future.result(timeout=60)


def test_readers_beside_puts_and_drops(store):
    """A page's slot was once reused while a load still read it: another request's bytes."""
    pages = {key: [bytes(page((key, v))) for v in range(VERSIONS)] for key in KEYS}
    stop = threading.Event()

    def write(seed):
        rng = random.Random(seed)
        try:
            for _ in range(150):
                batch = rng.sample(KEYS, 6)
                if rng.random() < 0.4:
                    store.drop(batch)
                else:
                    version = rng.randrange(VERSIONS)
                    store.put(batch, [memoryview(pages[key][version]) for key in batch])
        finally:
            stop.set()

    def read_often(seed):
        rng = random.Random(seed)
        buffers = frames(8)
        while not stop.is_set():
            batch = rng.sample(KEYS, 8)
            faults = {}
            try:
                store.read_into(batch, buffers)
            except BadPagesError as error:
                faults = error.faults
            assert all(fault.reason == "missing" for fault in faults.values())
            for key, buffer in zip(batch, buffers, strict=True):
                assert key in faults or bytes(buffer) in pages[key]

    run_all(*(lambda s=s: write(s) for s in (1, 2)), *(lambda s=s: read_often(s) for s in range(4)))
    assert slots(store)[1] == len(store)
    assert store.verify() == (len(store), [])


@pytest.mark.parametrize("how", ["drop", "replace"])
def test_a_slot_under_read_is_not_reused(store, monkeypatch, how):
    put(store, b"a")
    started, go_on, original = threading.Event(), threading.Event(), os.preadv

    def slow_preadv(*args):
        started.set()
        assert go_on.wait(10)
        return original(*args)

    pages = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", slow_preadv)
        reader = threading.Thread(target=lambda: pages.extend(read(store, b"a")))
        reader.start()
        assert started.wait(10)
        if how == "drop":
            store.drop([b"a"])
        else:
            store.put([b"a"], [page("new")])
        put(store, *KEYS)
        go_on.set()
        reader.join(10)
    assert pages == [page(b"a")]
    assert slots(store)[1] == len(store)
    assert read(store, *KEYS) == [page(key) for key in KEYS]


def test_a_damaged_page_replaced_meanwhile_is_not_dropped(store, monkeypatch):
    put(store, b"a")
    original = os.preadv

    def replace_then_spoil(fd, views, offset):
        monkeypatch.setattr(os, "preadv", original)
        store.put([b"a"], [page("new")])
        done = original(fd, views, offset)
        views[0][0] ^= 1
        return done

    monkeypatch.setattr(os, "preadv", replace_then_spoil)
    with pytest.raises(BadPagesError, match="bad_checksum"):
        read(store, b"a")
    assert read(store, b"a") == [page("new")]
    assert slots(store)[1] == 1
