"""One owner, one process, one life: the lock, the fork check, and what close means."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.tiers.cold_helpers import open_store, page, put, read
from tierkv.errors import ClosedError, StoreError, StoreLockedError

ROOT = Path(__file__).parents[2]


def test_a_second_process_fails_fast_and_names_the_owner(tmp_path):
    """Two processes that shared a directory once overwrote each other's pages."""
    script = (
        "import sys\n"
        "from tierkv.tiers.cold import ColdStore\n"
        "ColdStore(sys.argv[1], frame_bytes=4096, disk_budget=1 << 20, free_floor=0)\n"
    )
    with open_store(tmp_path):
        result = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 1
    assert "StoreLockedError" in result.stderr
    assert f"pid {os.getpid()} on host {os.uname().nodename}, started 2" in result.stderr


def test_the_same_process_cannot_open_it_twice(tmp_path):
    """Opening one LMDB file twice in one process is a serious error."""
    with open_store(tmp_path), pytest.raises(StoreLockedError, match=f"pid {os.getpid()}"):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_after_close_every_method_says_so(tmp_path):
    store = open_store(tmp_path)
    store.close()
    store.close()
    for use in (
        lambda: put(store, b"a"),
        lambda: read(store, b"a"),
        lambda: store.drop([b"a"]),
        lambda: store.keys(),
        lambda: b"a" in store,
        lambda: len(store),
        lambda: store.room(),
        lambda: store.used_bytes,
        lambda: store.verify(),
        lambda: store.meta_get("a"),
        lambda: store.meta_put("a", b""),
        lambda: store.meta_names(),
    ):
        with pytest.raises(ClosedError, match="is closed"):
            use()


def test_close_waits_for_a_read_under_way(tmp_path, monkeypatch):
    """A reset without waiting once let an I/O thread touch what was already given away."""
    store = open_store(tmp_path)
    put(store, b"a")
    started, go_on, original = threading.Event(), threading.Event(), os.preadv

    def slow_preadv(*args):
        started.set()
        assert go_on.wait(10)
        return original(*args)

    monkeypatch.setattr(os, "preadv", slow_preadv)
    pages = []
    reader = threading.Thread(target=lambda: pages.extend(read(store, b"a")))
    reader.start()
    assert started.wait(10)
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    closer.join(10)
    reader.join(10)
    assert pages == [page(b"a")]


def test_a_forked_child_is_refused_and_does_not_hold_the_lock(tmp_path):
    store = open_store(tmp_path)
    put(store, b"a")
    gate, child_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            read(store, b"a")
        except StoreError as error:
            store.close()
            refused = b"forked child" in str(error).encode()
            os.write(child_end, b"1" if refused else b"0")
            threading.Event().wait(20)
        os._exit(1)
    try:
        assert os.read(gate, 1) == b"1"
        assert read(store, b"a") == [page(b"a")]
        store.close()
        open_store(tmp_path).close()  # although the child is still alive
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(gate)
        os.close(child_end)
