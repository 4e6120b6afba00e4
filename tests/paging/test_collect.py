"""Making room in a store: what goes, in which order, and what never goes by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paging.store_helpers import save, tokens
from tests.tiers.cold_helpers import FRAME, open_store, put
from tierkv.errors import ColdReadError, ConfigError
from tierkv.paging import inventory, manifest
from tierkv.paging.collect import collect
from tierkv.paging.keys import KEPT_PREFIX
from tierkv.paging.tierset import SESSION_PREFIX
from tierkv.tiers.catalogue import Catalogue
from tierkv.tiers.cold import ColdStore

DAY = 86400.0


def three(directory: Path, monkeypatch: pytest.MonkeyPatch) -> ColdStore:
    """A store with contexts of 4, 2 (of the same pages) and 6 positions, used on days 1, 2, 3."""
    cold = open_store(directory)
    for day, name, ids in (
        (1, "old", tokens(64)), (2, "short", tokens(32)), (3, "new", tokens(96, changed=0)),
    ):  # fmt: skip
        monkeypatch.setattr(manifest.time, "time", lambda day=day: day * DAY)
        save(cold, name, ids)
    return cold


def test_unnamed_pages_go_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left by a save that failed at its last step, and by a process that was killed."""
    with three(tmp_path, monkeypatch) as cold:
        before = set(cold.keys())
        put(cold, KEPT_PREFIX + b"nobody", SESSION_PREFIX + b"gone", b"other/x")
        done = collect(cold, now=9 * DAY)
        assert done.unnamed_pages == 2
        assert set(cold.keys()) == before | {b"other/x"}
        assert done.stored_bytes == (FRAME * (len(before) + 3), FRAME * (len(before) + 1))
        assert collect(cold, now=9 * DAY).unnamed_pages == 0


def test_saved_contexts_stay_without_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with three(tmp_path, monkeypatch) as cold:
        pages = len(cold)
        done = collect(cold, now=9 * DAY, max_bytes=0)
        assert (done.evicted, done.spared) == ({}, ["old", "short", "new"])
        assert len(cold) == pages
        with pytest.raises(ConfigError, match="needs --max-bytes or --older-than"):
            collect(cold, now=9 * DAY, include_saved=True)


def test_least_recently_used_go_first_and_shared_pages_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with three(tmp_path, monkeypatch) as cold:
        done = collect(cold, now=9 * DAY, max_bytes=16 * FRAME, include_saved=True)
        assert done.evicted == {"old": 2 * 2}  # two of its four positions are shared
        assert manifest.names(cold) == ["new", "short"]
        assert inventory.incomplete(cold) == {}
        monkeypatch.setattr(manifest.time, "time", lambda: 8 * DAY)
        manifest.touch(cold, "short")  # as a restore does
        done = collect(cold, now=9 * DAY, max_bytes=4 * FRAME, include_saved=True)
        assert done.evicted == {"new": 12}
        assert done.file_bytes[1] == cold.used_bytes


def test_older_than(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with three(tmp_path, monkeypatch) as cold:
        done = collect(cold, now=4 * DAY, older_than=2 * DAY, include_saved=True)
        assert list(done.evicted) == ["old", "short"]
        assert manifest.names(cold) == ["new"]
        assert cold.meta_names(manifest.USED_PREFIX) == ["used/new"]


def test_a_damaged_manifest_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which pages it named cannot be known: dropping the unnamed ones would drop its pages."""
    with three(tmp_path, monkeypatch) as cold:
        spoil(cold, "context/new")
        pages = len(cold)
        with pytest.raises(ColdReadError, match="context/new"):
            collect(cold, now=9 * DAY, max_bytes=0, include_saved=True)
        assert len(cold) == pages


def spoil(cold: ColdStore, name: str) -> None:
    """Flip a byte of a metadata value on disk."""
    catalogue: Catalogue = cold._catalogue
    with catalogue._writing(catalogue._meta) as txn:
        value = bytearray(txn.get(name.encode()))
        value[-1] ^= 1
        txn.put(name.encode(), bytes(value))


def test_a_full_store_can_still_be_restored_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noting the time of use must not turn a read into a failure."""
    three(tmp_path, monkeypatch).close()
    with open_store(tmp_path, disk_budget=0) as cold:
        manifest.touch(cold, "old")
        kept, _ = manifest.find(cold, "old")
        assert manifest.last_used(cold, "old", kept) == DAY
