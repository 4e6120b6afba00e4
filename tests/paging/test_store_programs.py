"""Random programs of saves, deletions, damage, repair, collection and travel, against sets."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.combinations import examples
from tests.paging.store_helpers import kept, save, tokens
from tests.tiers.cold_helpers import FRAME, extent_path, open_store, page, put, read
from tierkv.errors import ColdReadError
from tierkv.paging import archive, inventory, manifest
from tierkv.paging.collect import collect
from tierkv.paging.keys import KEPT_PREFIX, Tokens
from tierkv.tiers.record import Record

names = st.sampled_from(["a", "b", "c"])


class StoreProgram(RuleBasedStateMachine):
    """No named page is ever lost but by damage, none stays that should go, and order is LRU.

    The model: which contexts there are and when each was used, which keys are stored, and which
    of those are damaged on disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.cold = open_store(self.directory / "s")
        self.clock = 0.0
        self.patch = mock.patch.object(manifest, "time", SimpleNamespace(time=lambda: self.clock))
        self.patch.start()
        self.contexts: dict[str, Tokens] = {}
        self.used: dict[str, float] = {}
        self.stored: set[bytes] = set()
        self.damaged: set[bytes] = set()

    def teardown(self) -> None:
        self.patch.stop()
        self.cold.close()
        shutil.rmtree(self.directory)

    def keys(self, *contexts: str) -> set[bytes]:
        each = (kept(ids).page_keys(ids) for name in contexts if len(ids := self.contexts[name]))
        return set().union(*each)

    def lose(self, keys: set[bytes]) -> None:
        self.stored -= keys
        self.damaged -= keys

    def leave(self, name: str) -> int:
        """Take a context out of the model; returns how many pages go with it."""
        gone = self.keys(name) & self.stored
        del self.contexts[name], self.used[name]
        gone -= self.keys(*self.contexts)
        self.lose(gone)
        return len(gone)

    @rule(name=names, length=st.integers(0, 70), variant=st.integers(0, 3))
    def save(self, name: str, length: int, variant: int) -> None:
        self.clock += 1
        ids, former = tokens(length, changed=variant * 16), self.keys(*self.contexts)
        save(self.cold, name, ids)
        self.contexts[name], self.used[name] = ids, self.clock
        self.stored |= self.keys(name)
        self.lose(former - self.keys(*self.contexts))

    @rule(name=names)
    def use(self, name: str) -> None:
        if name in self.contexts:
            self.clock += 1
            manifest.touch(self.cold, name)
            self.used[name] = self.clock

    @rule(name=names)
    def forget(self, name: str) -> None:
        if name in self.contexts:
            assert manifest.forget(self.cold, name) == self.leave(name)

    @rule(number=st.integers(0, 9))
    def leave_unnamed(self, number: int) -> None:
        key = KEPT_PREFIX + bytes([number]) * 34
        put(self.cold, key)
        self.stored.add(key)
        self.damaged.discard(key)

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.stored - self.damaged) or [b""]))
        if not key:
            return
        record = Record.unpack(key, self.cold._catalogue.get(key) or b"")
        fd = os.open(extent_path(self.cold, record.file_index), os.O_RDWR)
        byte = os.pread(fd, 1, record.slot * FRAME)[0]
        os.pwrite(fd, bytes([byte ^ 1]), record.slot * FRAME)
        os.fsync(fd)
        os.close(fd)
        self.damaged.add(key)

    @rule()
    def repair(self) -> None:
        report = self.cold.verify()
        assert {key for key, _ in report.bad} == self.damaged
        assert report.whole == len(self.stored - self.damaged)
        lacking = inventory.incomplete(self.cold, self.damaged)
        self.cold.drop([key for key, _ in report.bad])
        self.lose(set(self.damaged))
        assert lacking == inventory.incomplete(self.cold)

    @rule(pages=st.none() | st.integers(0, 30), include=st.booleans())
    def collect(self, pages: int | None, include: bool) -> None:
        include = include and pages is not None
        limit = None if pages is None else pages * FRAME
        done = collect(self.cold, now=self.clock, max_bytes=limit, include_saved=include)
        unnamed = self.stored - self.keys(*self.contexts)
        assert done.unnamed_pages == len(unnamed)
        self.lose(unnamed)
        evicted = {}
        while include and self.contexts and len(self.stored) > (pages or 0):
            oldest = min(self.used, key=lambda name: self.used[name])
            evicted[oldest] = self.leave(oldest)
        assert done.evicted == evicted
        assert done.stored_bytes[1] == len(self.stored) * FRAME

    @rule(name=names)
    def travel(self, name: str) -> None:
        """Export, delete, import again; a context with bad pages does not travel."""
        if name not in self.contexts:
            return
        file, ids = self.directory / "file", self.contexts[name]
        keys = self.keys(name)
        if keys & self.damaged or keys - self.stored:
            with pytest.raises(ColdReadError):
                archive.export_context(self.cold, name, file, force=True)
            self.lose(keys & self.damaged)  # a read drops what it finds damaged
            return
        archive.export_context(self.cold, name, file, force=True)
        manifest.forget(self.cold, name)
        self.leave(name)
        self.clock += 1
        assert archive.import_context(self.cold, file) == len(keys - self.stored)
        self.contexts[name], self.used[name] = ids, self.clock
        self.stored |= keys

    @rule()
    def restart(self) -> None:
        self.cold.close()
        self.cold = open_store(self.directory / "s")

    @rule(name=names)
    def read(self, name: str) -> None:
        if name in self.contexts:
            keys = sorted((self.keys(name) & self.stored) - self.damaged)
            assert read(self.cold, *keys) == [page(key) for key in keys]

    @invariant()
    def agrees(self) -> None:
        assert set(self.cold.keys()) == self.stored
        assert manifest.names(self.cold) == sorted(self.contexts)
        for name, ids in self.contexts.items():
            one, found = manifest.find(self.cold, name)
            assert found.tolist() == ids.tolist()
            assert manifest.last_used(self.cold, name, one) == self.used[name]
        gone = {name: len(self.keys(name) - self.stored) for name in self.contexts}
        assert inventory.incomplete(self.cold) == {name: n for name, n in gone.items() if n}


StoreProgram.TestCase.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None, derandomize=True
)
test_store_programs = StoreProgram.TestCase
