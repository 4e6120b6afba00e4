"""What the tests of the page manager share: tiny managers, poisoned memory, a dict model."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tierkv.codecs import RAW, Codec
from tierkv.page import Geometry
from tierkv.paging.adopt import adopt, promote
from tierkv.paging.directory import NOWHERE
from tierkv.paging.edit import crop, fork, remap
from tierkv.paging.lookahead import Ticket
from tierkv.paging.lookup import Lookup
from tierkv.paging.manager import PageManager
from tierkv.paging.placement import STAGING_BUFFERS, Placement, staging_bytes
from tierkv.paging.sequences import Sequences
from tierkv.paging.tierset import SESSION_PREFIX
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.device_frames import DeviceFrames
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.hot import FREE, TAIL

TOKENS = 16
GEOMETRY = Geometry(layers=2, kv_heads=2, k_dim=4, v_dim=8, dtype=torch.float32, page_tokens=TOKENS)


def open_store(
    directory: Path,
    geometry: Geometry = GEOMETRY,
    *,
    disk_budget: int = 64 << 20,
    codec: Codec = RAW,
) -> ColdStore:
    return ColdStore(
        directory,
        frame_bytes=FrameFormat(geometry, codec).frame_bytes,
        disk_budget=disk_budget,
        free_floor=0,
        durable=False,
    )


def make_manager(
    store: ColdStore | None = None,
    *,
    geometry: Geometry = GEOMETRY,
    hot: int = 1,
    staging: int = 1,
    homes: int = 1,
    transit: int = 1,
    io_threads: int = 2,
    chunk_frames: int | None = None,
    codec: Codec = RAW,
    residual_tokens: int = 0,
    encoded: int | None = None,
) -> PageManager:
    """Make a manager with exactly these frames, poisoned, and budgets that hold no more.

    Args:
        hot: frames per layer.
        staging: pages per staging arena, at most `transit` if there is a store.
        homes: warm frames for good.
        transit: warm frames each way, if there is a store.
        chunk_frames: warm frames per piece of host memory (by default all of them fit in one).
        encoded: frames per layer of encoded pages on the device; None where hot pages are raw.
    """
    assert store is None or staging <= transit
    each_way = transit if store is not None else 0
    page = geometry.page_bytes
    total = staging_bytes(staging, page, page, cuda=False)
    place = Placement(hot, staging, total, homes, each_way, each_way, device_frames=encoded or 0)
    frame = FrameFormat(geometry, codec, on_disk=store is not None).frame_bytes
    with mock.patch.object(Placement, "choose", return_value=place):
        manager = PageManager(
            geometry,
            torch.device("cpu"),
            gpu_budget=place.hot_bytes(geometry, frame),
            cpu_budget=(homes + 2 * each_way) * FrameFormat(geometry, codec).frame_bytes,
            cold=store,
            io_threads=io_threads,
            codec=codec,
            encode_hot=encoded is not None,
            residual_tokens=residual_tokens,
        )
    manager.transfer.min_read_bytes = 1  # several threads read even pages as small as these
    if chunk_frames is not None:
        manager.warm.chunk_frames = chunk_frames
    poison(manager)
    return manager


def poison(manager: PageManager) -> None:
    """Fill memory that holds nothing, now and whenever it is given back, with NaN.

    A page that is read before it arrived, or after it left, then cannot look right by chance.
    """
    for arena in [*manager.transfer.staging, *manager.hot.arenas]:
        arena.k.fill_(torch.nan)
        arena.v.fill_(torch.nan)
    give_hot, finish = manager.hot.give, manager.lookahead._finish

    def poisoned_hot(layer: int, frames: Any) -> None:
        index = torch.as_tensor(frames)
        for paged in (manager.hot.arenas[layer].k_frames, manager.hot.arenas[layer].v_frames):
            paged.index_fill_(1, index, torch.nan)
        give_hot(layer, frames)

    def poisoned_staging(ticket: Ticket) -> None:
        buffer = ticket.buffer
        finish(ticket)
        if buffer is not None:
            manager.transfer.staging[buffer].k.fill_(torch.nan)
            manager.transfer.staging[buffer].v.fill_(torch.nan)

    manager.hot.give = poisoned_hot  # type: ignore[method-assign]
    manager.lookahead._finish = poisoned_staging  # type: ignore[method-assign]
    warm, device = manager.warm, manager.tiers.device_frames
    device.memory.fill_(255)
    for pool in device.pools:
        pool.give = _poisoned_device(device, pool.give)  # type: ignore[method-assign]
    for pool in (warm.homes, warm.inbound, warm.outbound):
        pool.give = _poisoned_warm(manager, pool.give)  # type: ignore[method-assign]


def _poisoned_warm(manager: PageManager, give: Any) -> Any:
    def poisoned(frames: Any) -> None:
        for frame in frames.tolist():
            manager.warm.payload(frame)[:] = b"\xff" * manager.warm.frame_bytes
        give(frames)

    return poisoned


def _poisoned_device(device: DeviceFrames, give: Any) -> Any:
    def poisoned(frames: Any) -> None:
        device.memory[torch.as_tensor(frames)] = 255
        give(frames)

    return poisoned


def delay(target: Any, name: str, seconds: float, *, seed: int = 0) -> None:
    """Make a method of an object sleep up to `seconds` before it starts."""
    original, rng = getattr(target, name), random.Random(seed)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(rng.uniform(0, seconds))
        return original(*args, **kwargs)

    setattr(target, name, slow)


class FailNth:
    """Make the n-th call (from 0) of a method raise; `failures` counts how often it did.

    Args:
        last: the last call that fails; by default only the n-th does.
    """

    def __init__(self, target: Any, name: str, at: int, error: Exception, last: int | None = None):
        self.calls = self.failures = 0
        self.at, self.last = at, at if last is None else last
        self._error, self._lock = error, threading.Lock()
        self._original = getattr(target, name)
        setattr(target, name, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            number = self.calls
            self.calls += 1
            fails = self.at <= number <= self.last
            self.failures += fails
        if fails:
            raise self._error
        return self._original(*args, **kwargs)


@dataclasses.dataclass(eq=False)
class Batch:
    """Sequences under test beside what they must hold.

    Attributes:
        keys, values: per layer ``[batch, kv_heads, tokens, dim]``.
    """

    manager: PageManager
    sequences: Sequences
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    generator: torch.Generator

    @classmethod
    def new(cls, manager: PageManager, batch: int, seed: int = 0) -> Batch:
        g = manager.geometry
        return cls(
            manager,
            Sequences(g.layers),
            [torch.zeros(batch, g.kv_heads, 0, g.k_dim) for _ in range(g.layers)],
            [torch.zeros(batch, g.kv_heads, 0, g.v_dim) for _ in range(g.layers)],
            torch.Generator().manual_seed(seed),
        )

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    @property
    def length(self) -> int:
        return self.keys[0].shape[2]

    def tokens(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Make random tokens for all layers."""
        g = self.manager.geometry
        shape = (self.batch, g.kv_heads, count)
        return [
            (
                torch.randn(*shape, g.k_dim, generator=self.generator),
                torch.randn(*shape, g.v_dim, generator=self.generator),
            )
            for _ in range(g.layers)
        ]

    def append_layer(self, layer: int, new: tuple[torch.Tensor, torch.Tensor]) -> Lookup:
        """Append to one layer; the model follows only if that succeeds."""
        lookup = self.manager.append(self.sequences, layer, *new)
        self.keys[layer] = torch.cat([self.keys[layer], new[0]], dim=2)
        self.values[layer] = torch.cat([self.values[layer], new[1]], dim=2)
        return lookup

    def append(self, count: int) -> None:
        """Run one step: append to every layer in order and check what attention would read."""
        for layer, new in enumerate(self.tokens(count)):
            self.check_lookup(self.append_layer(layer, new))

    def check_lookup(self, lookup: Lookup) -> None:
        """Compare everything a lookup yields, bit for bit; each position comes once."""
        seen = self.keys[lookup.layer].shape[2] - (
            lookup.new_tokens if lookup.new_tokens > 1 else 0
        )
        g, layer = self.manager.geometry, lookup.layer
        k = torch.full((self.batch, g.kv_heads, seen, g.k_dim), torch.nan)
        v = torch.full((self.batch, g.kv_heads, seen, g.v_dim), torch.nan)
        times = torch.zeros(self.batch, seen, dtype=torch.int64)
        assert lookup.length == self.keys[layer].shape[2]
        for segment in lookup.segments():
            columns = segment.columns(g.page_tokens, self.manager.device)
            assert segment.k.shape[2] == segment.v.shape[2] == len(columns)
            k[segment.rows, :, columns] = segment.k
            v[segment.rows, :, columns] = segment.v
            times[segment.rows, columns] += 1
        assert (times == 1).all(), f"layer {layer}: positions seen {times.unique().tolist()} times"
        assert torch.equal(k, self.keys[layer][:, :, :seen]), f"K of layer {layer}"
        assert torch.equal(v, self.values[layer][:, :, :seen]), f"V of layer {layer}"

    def lookup(self, layer: int) -> Lookup:
        """Look up all that a layer holds, without appending anything."""
        past, offset = divmod(self.sequences.lengths[layer], self.manager.geometry.page_tokens)
        tails = self.sequences.tails[layer].copy()
        return Lookup(self.manager, self.sequences, layer, past, tails, offset, None, 1)

    def check(self) -> None:
        """Check that everything is readable and unchanged, whatever happened before."""
        lengths = [keys.shape[2] for keys in self.keys]
        assert self.sequences.lengths == lengths
        for layer in range(self.manager.geometry.layers):
            if lengths[layer]:
                self.check_lookup(self.lookup(layer))

    def remap(self, rows: list[int]) -> None:
        remap(self.manager, self.sequences, np.array(rows, dtype=np.int64))
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]

    def fork(self, seed: int) -> Batch:
        """Return a batch of its own that holds the same."""
        twin = fork(self.manager, self.sequences)
        generator = torch.Generator().manual_seed(seed)
        return Batch(self.manager, twin, list(self.keys), list(self.values), generator)

    def begin(self, rows: list[int], length: int, seed: int, *, up: bool) -> Batch:
        """Return a batch that begins with `length` tokens, all sealed, of some of the rows."""
        pages, tokens = divmod(length, TOKENS)
        table = self.sequences.blocks[rows, :pages]
        partial = self.sequences.blocks[rows, pages] if tokens else table[:, 0]
        new = Batch.new(self.manager, len(rows), seed)
        adopt(self.manager, new.sequences, table, partial, tokens)
        new.keys = [keys[rows][:, :, :length] for keys in self.keys]
        new.values = [values[rows][:, :, :length] for values in self.values]
        if up:
            promote(self.manager, np.unique(table))
        return new

    def crop(self, length: int) -> None:
        crop(self.manager, self.sequences, length)
        self.keys = [keys[:, :, :length] for keys in self.keys]
        self.values = [values[:, :, :length] for values in self.values]

    def close(self) -> None:
        self.manager.close_sequences(self.sequences)


def check_books(manager: PageManager, batches: list[Batch]) -> None:
    """Check what must hold at any moment: budgets, owners, references, no page lost."""
    g, directory, hot, warm = manager.geometry, manager.directory, manager.hot, manager.warm
    staging = sum(arena.frames for arena in manager.transfer.staging)
    device = manager.tiers.device_frames
    taken = (g.layers * hot.frames_per_layer + staging) * g.page_bytes + device.memory.numel()
    assert taken <= manager.tiers.gpu_budget
    assert hot.pages <= g.layers * hot.frames_per_layer
    assert warm.taken_bytes <= manager.tiers.cpu_budget
    if manager.cold is not None:
        assert manager.cold.used_bytes <= manager.cold.disk_budget
    refs: Counter[int] = Counter()
    with manager.tiers.changed:
        for batch in batches:
            sequences = batch.sequences
            refs.update(sequences.blocks.reshape(-1).tolist())
            for layer, length in enumerate(sequences.lengths):
                blocks = sequences.blocks[:, : length // g.page_tokens]
                places = (directory.hot[blocks, layer] != NOWHERE).astype(int)
                places += directory.warm[blocks, layer] != NOWHERE
                places += directory.cold[blocks, layer]
                assert (places >= 1).all(), f"layer {layer} lost a page"
        found = {int(block): int(directory.refs[block]) for block in directory.refs.nonzero()[0]}
        assert found == dict(refs)
        for layer in range(g.layers):
            owned = hot.owner[layer]
            in_use = directory.hot[:, layer]
            blocks = np.flatnonzero(in_use != NOWHERE)
            assert (owned[in_use[blocks]] == blocks).all(), "a hot frame has two owners"
            assert (owned >= 0).sum() == len(blocks)
            tails = [frame for b in batches for frame in b.sequences.tails[layer].tolist()]
            assert sorted(tails) == np.flatnonzero(owned == TAIL).tolist()
            assert hot.free(layer) == (owned == FREE).sum()
        frames = directory.warm[directory.warm != NOWHERE].tolist()
        assert len(set(frames)) == len(frames), "a warm frame has two owners"
        assert device.used == sum(frame < warm.first for frame in frames)
        assert warm.homes.used == sum(warm.first <= f < warm.inbound_start for f in frames)
        outbound = {frame for frame in frames if frame >= warm.outbound_start}
        assert not outbound & manager.outflow._orphans
        assert warm.outbound.used == len(outbound | manager.outflow._orphans)


def check_empty(manager: PageManager) -> None:
    """Check that nothing is held once all sequences are closed."""
    manager.lookahead.cancel()
    assert manager.directory.live == 0
    assert not manager.directory.refs.any()
    assert all(pool.used == 0 for pool in manager.hot.pools)
    with manager.tiers.changed:
        assert manager.tiers.changed.wait_for(lambda: not manager.outflow._writing, 20)
        assert not manager.outflow._queued
        assert not manager.outflow._pinned
        assert not manager.outflow._orphans
        assert manager.warm.pages == manager.tiers.device_frames.used == 0
        assert manager.outflow._homes_used == [0] * manager.geometry.layers
    assert sorted(manager.lookahead._free_buffers) == list(range(STAGING_BUFFERS))
    if manager.cold is not None:
        assert list(manager.cold.keys(SESSION_PREFIX)) == []


def close_all(manager: PageManager, batches: list[Batch]) -> None:
    """Close sequences, then the manager; nothing may be left of either."""
    for batch in batches:
        batch.close()
    check_empty(manager)
    threads = own_threads(manager)
    manager.close()
    assert not [thread.name for thread in threads if thread.is_alive()]


def own_threads(manager: PageManager) -> list[threading.Thread]:
    """Return the worker threads that a manager has started."""
    pools = [pool for name, pool in vars(manager.transfer).items() if name.endswith("_pool")]
    assert len(pools) == 3
    return [thread for pool in pools for thread in pool._threads]
