"""The page manager against a dict of tensors, in any order of calls a model might make."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.combinations import examples
from tests.paging.manager_helpers import (
    TOKENS,
    Batch,
    check_books,
    close_all,
    delay,
    make_manager,
    open_store,
    poison,
)
from tierkv.errors import BudgetError
from tierkv.page import Geometry
from tierkv.paging.manager import PageManager

MAX_OPEN = 3
COUNTS = st.one_of(st.integers(1, 50), st.sampled_from([1, TOKENS - 1, TOKENS, TOKENS + 1, 50]))


class PageManagerMachine(RuleBasedStateMachine):
    """Appends, beams, crops, forks and closes over budgets from the minimum to a few pages."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.manager: Any = None
        self.batches: list[Batch] = []
        self.made = 0

    @initialize(
        geometry=st.builds(
            Geometry,
            layers=st.integers(1, 3),
            kv_heads=st.integers(1, 2),
            k_dim=st.sampled_from([4, 8]),
            v_dim=st.sampled_from([4, 8]),
            dtype=st.just(torch.float32),
            page_tokens=st.just(TOKENS),
        ),
        hot=st.integers(1, 8),
        staging=st.integers(1, 6),
        homes=st.integers(1, 12),
        more_transit=st.integers(0, 4),
        disk=st.sampled_from([None, 300 << 10, 64 << 20, 64 << 20]),
        by_placement=st.booleans(),
        chunk_frames=st.sampled_from([None, 1, 3]),
        jitter=st.booleans(),
    )
    def start(
        self,
        geometry: Geometry,
        hot: int,
        staging: int,
        homes: int,
        more_transit: int,
        disk: int | None,
        by_placement: bool,
        chunk_frames: int | None,
        jitter: bool,
    ) -> None:
        store = None
        if disk is not None:
            store = open_store(Path(self.directory.name), geometry, disk_budget=disk)
        if by_placement:  # as `Placement` divides them: one staging page, one frame each way
            self.manager = PageManager(
                geometry,
                torch.device("cpu"),
                gpu_budget=geometry.page_bytes * (geometry.layers * hot + 3),
                cpu_budget=geometry.frame_bytes * (homes + 2),
                cold=store,
                io_threads=2,
            )
            poison(self.manager)
        else:
            self.manager = make_manager(
                store,
                geometry=geometry,
                hot=hot,
                staging=staging,
                homes=homes,
                transit=staging + more_transit,
                chunk_frames=chunk_frames,
            )
        if jitter:
            delay(self.manager.transfer, "_bring_up", 0.002)
            delay(self.manager.transfer, "put_cold", 0.002)
            delay(self.manager.transfer, "_read", 0.002)

    def pick(self, data: st.DataObject) -> Batch:
        return self.batches[data.draw(st.integers(0, len(self.batches) - 1), "batch")]

    def append(self, batch: Batch, count: int, layers: int | None = None) -> None:
        """Run one step over the first `layers` layers; only the first may run out of budget."""
        steps = list(enumerate(batch.tokens(count)))[:layers]
        for layer, new in steps:
            try:
                lookup = batch.append_layer(layer, new)
            except BudgetError:
                assert layer == 0, "ran out of budget in the middle of a step"
                for other in self.batches:
                    other.check()
                return
            batch.check_lookup(lookup)

    @precondition(lambda self: len(self.batches) < MAX_OPEN)
    @rule(rows=st.integers(1, 3), count=COUNTS)
    def new_sequences(self, rows: int, count: int) -> None:
        self.made += 1
        batch = Batch.new(self.manager, rows, seed=self.made)
        self.append(batch, count)
        if batch.sequences in self.manager._open:
            self.batches.append(batch)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), count=COUNTS)
    def append_chunk(self, data: st.DataObject, count: int) -> None:
        self.append(self.pick(data), count)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), steps=st.integers(1, 18))
    def decode(self, data: st.DataObject, steps: int) -> None:
        batch = self.pick(data)
        for _ in range(steps):
            self.append(batch, 1)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), count=COUNTS)
    def stop_midway(self, data: st.DataObject, count: int) -> None:
        """A forward that fails after some layers is undone by cutting to the shortest."""
        batch = self.pick(data)
        before = batch.length
        self.append(batch, count, layers=data.draw(st.integers(1, len(batch.keys)), "layers"))
        batch.crop(before)
        batch.check()

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), count=COUNTS, taken=st.integers(0, 2))
    def abandon_lookup(self, data: st.DataObject, count: int, taken: int) -> None:
        """Attention that fails in the middle of a lookup leaves the next one whole."""
        batch = self.pick(data)
        for layer, new in enumerate(batch.tokens(count)):
            try:
                segments = batch.append_layer(layer, new).segments()
            except BudgetError:
                assert layer == 0
                return
            for _, _segment in zip(range(taken), segments, strict=False):
                pass
            del segments

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def remap(self, data: st.DataObject) -> None:
        batch = self.pick(data)
        row = st.integers(0, batch.batch - 1)
        rows = data.draw(st.lists(row, min_size=1, max_size=4), "rows")
        try:
            batch.remap(rows)
        except BudgetError:
            for other in self.batches:
                other.check()

    @precondition(lambda self: 0 < len(self.batches) < MAX_OPEN)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        batch = self.pick(data)
        self.made += 1
        try:
            self.batches.append(batch.fork(self.made))
        except BudgetError:
            batch.check()
        else:
            self.batches[-1].check()

    @precondition(lambda self: 0 < len(self.batches) < MAX_OPEN)
    @rule(data=st.data(), up=st.booleans())
    def begin(self, data: st.DataObject, up: bool) -> None:
        """Sequences that begin with known pages, brought up where there is room."""
        batch = self.pick(data)
        sealed = batch.length // TOKENS * TOKENS
        if not sealed:
            return
        length = data.draw(st.integers(1, sealed), "length")
        row = st.integers(0, batch.batch - 1)
        rows = data.draw(st.lists(row, min_size=1, max_size=3), "rows")
        self.made += 1
        try:
            self.batches.append(batch.begin(rows, length, self.made, up=up))
        except BudgetError:
            batch.check()
        else:
            self.batches[-1].check()
            batch.check()

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        batch = self.pick(data)
        batch.crop(data.draw(st.integers(0, batch.length), "length"))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def check(self, data: st.DataObject) -> None:
        self.pick(data).check()

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def close_sequences(self, data: st.DataObject) -> None:
        batch = self.pick(data)
        self.batches.remove(batch)
        batch.close()
        batch.close()

    @rule()
    def cancel(self) -> None:
        self.manager.lookahead.cancel()

    @invariant()
    def books(self) -> None:
        if self.manager is not None:
            check_books(self.manager, self.batches)

    def teardown(self) -> None:
        try:
            if self.manager is not None:
                for batch in self.batches:
                    batch.check()
                close_all(self.manager, self.batches)
        finally:
            if self.manager is not None:
                self.manager.close()
            self.directory.cleanup()


PageManagerMachine.TestCase.settings = settings(
    max_examples=examples(50),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPageManager = PageManagerMachine.TestCase
