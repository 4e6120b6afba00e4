"""O_DIRECT where it works, buffered and said so where it does not."""

import os

import pytest

from tests.tiers.cold_helpers import FRAME, open_store, page, put, read
from tierkv.tiers import direct_io
from tierkv.tiers.direct_io import Probe


def test_without_o_direct_it_reads_buffered_and_says_so(tmp_path, monkeypatch):
    """O_DIRECT stores that failed one after another once left 0 files and a healthy status."""
    original = os.open

    def no_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_direct)
    with open_store(tmp_path) as store:
        assert not store.direct_io
        assert "Invalid argument" in store.direct_io_reason
        put(store, b"a", b"b")
        assert read(store, b"b", b"a") == [page(b"b"), page(b"a")]
    monkeypatch.undo()
    with open_store(tmp_path) as store:
        assert read(store, b"a") == [page(b"a")]


@pytest.mark.parametrize("name", ["pwritev", "preadv"])
def test_the_probe_sees_o_direct_that_opens_but_does_not_transfer(tmp_path, monkeypatch, name):
    def fail(*args):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, name, fail)
    probe = direct_io.probe_direct_io(tmp_path)
    assert not probe.works
    assert list(tmp_path.iterdir()) == []


def test_the_probe_compares_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: FRAME)
    assert direct_io.probe_direct_io(tmp_path).works is False


def test_the_probe_passes_or_says_why(tmp_path):
    probe = direct_io.probe_direct_io(tmp_path)
    assert isinstance(probe, Probe)
    assert probe.reason
