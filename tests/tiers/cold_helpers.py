"""What the tests of the cold store share: a small store, recognisable pages, fault injection."""

import itertools
import os
import random

from tierkv.tiers.cold import ColdStore
from tierkv.tiers.direct_io import aligned_buffer

FRAME = 4096
BUDGET = 4 << 20


def open_store(directory, *, frame_bytes=FRAME, disk_budget=BUDGET, free_floor=0, durable=False):
    """A store for tests: not durable unless the test is about the order of writes."""
    return ColdStore(
        directory,
        frame_bytes=frame_bytes,
        disk_budget=disk_budget,
        free_floor=free_floor,
        durable=durable,
    )


def frames(count, *, frame_bytes=FRAME):
    """`count` neighbouring, aligned, writable buffers."""
    memory = aligned_buffer(max(1, count) * frame_bytes)
    return [memory[i * frame_bytes : (i + 1) * frame_bytes] for i in range(count)]


def page(seed, *, frame_bytes=FRAME):
    """A page of bytes that depend on `seed` alone."""
    (view,) = frames(1, frame_bytes=frame_bytes)
    view[:] = random.Random(repr(seed)).randbytes(frame_bytes)
    return view


def put(store, *keys):
    """Store under each key the page seeded by it."""
    store.put(keys, [page(key, frame_bytes=store.frame_bytes) for key in keys])


def read(store, *keys):
    """Return the pages under `keys`."""
    buffers = frames(len(keys), frame_bytes=store.frame_bytes)
    store.read_into(keys, buffers)
    return buffers


def extent_path(store, file_index=0):
    return store.directory / "extents" / f"{store.frame_bytes}-{file_index}.kv"


def slots(store):
    """(free, used) slots of the store's own frame size."""
    return store._payloads.own.slots.num_free, store._payloads.own.slots.num_used


class FaultyCalls:
    """Make the n-th of the named `os` functions fail (n from 0); counts all their calls."""

    def __init__(self, monkeypatch, names, fault, at=None):
        self.count = itertools.count()
        self.num_calls = 0
        for name in names:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name), fault, at))

    def _wrapped(self, name, original, fault, at):
        def call(*args):
            number = next(self.count)
            self.num_calls = number + 1
            if number == at:
                return fault(name, original, *args)
            return original(*args)

        return call
