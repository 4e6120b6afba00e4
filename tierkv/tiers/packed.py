"""A cold store whose pages are packed losslessly, each in a slot smaller than its frame.

A page that does not shrink so far is kept as it is, in two slots: one under its key, the rest under
the key with `REST` before it. Checksums are over what is on disk, so damage shows before anything
is unpacked. Packing runs on threads of its own, unpacking on the threads that read.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierkv.codecs.base import identity
from tierkv.codecs.lossless import LENGTH, LEVEL, Bytes, Lossless
from tierkv.errors import ColdWriteError, StoreError
from tierkv.page import SECTOR
from tierkv.tiers.cold import REST, ColdStore
from tierkv.tiers.direct_io import aligned_buffer
from tierkv.tiers.faults import DAMAGE, BadPagesError, Fault
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.frame_views import FrameViews
from tierkv.tiers.packing import PROBE_BYTES, Packing
from tierkv.units import round_up

BATCH_BYTES = 16 << 20
"""Bytes of packed pages that one write or read holds beside the frames."""
_GONE = (*DAMAGE, "missing")
"""Why the rest of a page will never be read."""

SHARES = {torch.bfloat16: 12 / 16, torch.float32: 14 / 16, torch.float16: 15 / 16}
"""Size of a slot over that of a frame, a little more than what pages of each type shrink to."""


def slot_bytes(frame_bytes: int, dtype: torch.dtype) -> int:
    """Return the bytes of a slot for frames of a size; the same for frames that cannot shrink."""
    return round_up(int(frame_bytes * SHARES[dtype]), SECTOR)


class PackedStore(ColdStore):
    """`ColdStore` for frames of `page_frame_bytes`; takes and gives whole frames.

    Args:
        page_frame_bytes: bytes of a frame outside the store, more than a slot takes.
        page_bytes: bytes of it that are page; the rest is neither kept nor given back.
        dtype: of the elements.
        level: of zstd.
        threads: that pack.

        `room` counts slots: a page that does not shrink takes two.

    Attributes:
        packing: why pages are packed here.
    """

    packing = Packing(True)

    def __init__(
        self,
        directory: str | Path,
        *,
        page_frame_bytes: int,
        page_bytes: int,
        dtype: torch.dtype,
        level: int = LEVEL,
        threads: int = 4,
        **limits: Any,
    ) -> None:
        self.page_frame_bytes, self.page_bytes = page_frame_bytes, page_bytes
        self._lossless = lambda: Lossless(dtype.itemsize, level)
        self._own_tools, self._adding = threading.local(), threading.Lock()
        self._sums = dict.fromkeys(("packed", "not_packed", "pack_ns", "unpack_ns", "unpacked"), 0)
        self._pool = ThreadPoolExecutor(threads, "tierkv-pack")
        super().__init__(directory, frame_bytes=slot_bytes(page_frame_bytes, dtype), **limits)
        # What is left of pages that an earlier tierkv, or a record found damaged, took out by half.
        whole = [key.removeprefix(REST) for key in self.keys(REST)]
        self.drop(self.missing(whole))

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        """Pack and store all pages or none; see `ColdStore.put`."""
        step, done = max(1, BATCH_BYTES // self.frame_bytes), list[bytes]()
        try:
            for at in range(0, len(keys), step):
                self._put_packed(keys[at : at + step], payloads[at : at + step])
                done += keys[at : at + step]
        except BaseException:
            if done:
                self.drop(done)
            raise

    def _put_packed(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        slots = self._slots(len(keys))
        pages = [np.frombuffer(payload, np.uint8)[: self.page_bytes] for payload in payloads]
        whole = list(self._pool.map(self._pack, pages, map(_bytes, slots)))
        rest_keys, rest_slots = list[bytes](), self._slots(whole.count(False))
        for key, page, slot, fits in zip(keys, pages, slots, whole, strict=True):
            if not fits:
                rest = rest_slots[len(rest_keys)]
                split = self.frame_bytes - LENGTH.size
                _bytes(slot)[LENGTH.size :] = page[:split]  # the length before it stays 0
                _bytes(rest)[: self.page_bytes - split] = page[split:]
                rest_keys.append(REST + key)
        super().put([*keys, *rest_keys], [*slots, *rest_slots])

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Read and unpack pages; see `ColdStore.read_into`."""
        step, faults = max(1, BATCH_BYTES // self.frame_bytes), dict[bytes, Fault]()
        halves: list[bytes] = []
        frames = FrameViews(buffers, self.page_frame_bytes, len(keys)).each()
        for at in range(0, len(keys), step):
            part = keys[at : at + step]
            faults |= self._read_packed(part, list(islice(frames, len(part))), halves)
        if faults:
            error = BadPagesError(faults, len(keys))
            try:
                if halves:
                    self.drop(halves)
            except ColdWriteError as cause:
                raise error from cause
            raise error

    def _read_packed(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], halves: list[bytes]
    ) -> dict[bytes, Fault]:
        """Read and unpack; return the faults.

        halves: gets the keys of pages whose slot is whole, but which cannot be made of it.
        """
        slots = dict(zip(keys, self._slots(len(keys)), strict=True))
        faults = self._read(slots)
        whole = [key for key, slot in slots.items() if key not in faults and not _length(slot)]
        rests = dict(zip([REST + key for key in whole], self._slots(len(whole)), strict=True))
        lost = self._read(rests)
        faults |= {key: lost[REST + key] for key in whole if REST + key in lost}
        halves += [key for key in whole if key in faults and faults[key].reason in _GONE]
        for key, buffer in zip(keys, buffers, strict=True):
            if key not in faults:
                page = np.frombuffer(buffer, np.uint8)[: self.page_bytes]
                fault = self._unpack(slots[key], rests.get(REST + key), page)
                if fault is not None:
                    self._count(fault.reason)
                    faults[key] = fault
                    halves.append(key)
        return faults

    def _read(self, slots: Mapping[bytes, memoryview]) -> dict[bytes, Fault]:
        try:
            super().read_into(list(slots), list(slots.values()))
        except BadPagesError as error:
            return error.faults
        return {}

    @property
    def holds_pages(self) -> bool:
        """Whether there are packed pages of our own size."""
        with self._lifetime.using(), self._payloads.lock:
            return self._payloads.own.slots.num_used > 0

    def report(self) -> dict[str, Any]:
        """Return how many pages shrank, and gigabytes of pages per second and thread."""
        with self._adding:
            sums = dict(self._sums)
        size, pages = self.page_bytes, sums["packed"] + sums["not_packed"]
        slots = pages + sums["not_packed"]
        return {
            **asdict(self.packing),
            "pages": pages,
            "not_packed": sums["not_packed"],
            "ratio": pages * self.page_frame_bytes / (slots * self.frame_bytes) if slots else None,
            "pack_gb_s": pages * size / sums["pack_ns"] if pages else None,
            "unpack_gb_s": sums["unpacked"] * size / sums["unpack_ns"]
            if sums["unpacked"]
            else None,
        }

    def close(self) -> None:
        """See `ColdStore.close`."""
        self._pool.shutdown(wait=True)
        super().close()

    def _slots(self, count: int) -> list[memoryview]:
        memory = aligned_buffer(max(count, 1) * self.frame_bytes)
        edges = range(0, (count + 1) * self.frame_bytes, self.frame_bytes)
        return [memory[start:stop] for start, stop in pairwise(edges)]

    def _tool(self) -> Lossless:
        if not hasattr(self._own_tools, "lossless"):
            self._own_tools.lossless = self._lossless()
        tool: Lossless = self._own_tools.lossless
        return tool

    def _pack(self, page: Bytes, slot: Bytes) -> bool:
        start = time.perf_counter_ns()
        fits = self._tool().pack(page, slot) > 0
        self._add(pack_ns=time.perf_counter_ns() - start, packed=fits, not_packed=not fits)
        return fits

    def _unpack(self, slot: memoryview, rest: memoryview | None, page: Bytes) -> Fault | None:
        start = time.perf_counter_ns()
        if rest is not None:
            split = self.frame_bytes - LENGTH.size
            page[:split] = _bytes(slot)[LENGTH.size :]
            page[split:] = _bytes(rest)[: self.page_bytes - split]
            return None
        try:
            self._tool().unpack(_bytes(slot), page)
        except ValueError as error:
            return Fault("bad_header", str(error))
        self._add(unpack_ns=time.perf_counter_ns() - start, unpacked=1)
        return None

    def _add(self, **amounts: int) -> None:
        with self._adding:
            for name, amount in amounts.items():
                self._sums[name] += int(amount)


class UnpackedStore(ColdStore):
    """A cold store whose pages were to be packed, on a disk that is faster than unpacking."""

    def __init__(self, directory: str | Path, packing: Packing, **limits: Any) -> None:
        self.packing = packing
        super().__init__(directory, **limits)

    def report(self) -> dict[str, Any]:
        """Return what was measured when packing was switched off."""
        return asdict(self.packing)


def _bytes(slot: memoryview) -> Bytes:
    return np.frombuffer(slot, np.uint8)


def _length(slot: memoryview) -> int:
    (length,) = LENGTH.unpack_from(slot)
    return int(length)


def open_store(
    directory: str | Path,
    layout: FrameFormat,
    level: int | None,
    *,
    threads: int,
    always: bool = True,
    **limits: Any,
) -> ColdStore:
    """Open a store for frames of a format, packed at a level of zstd or, if that is None, not.

    Pages of one sector cannot take less, and are not packed. Unless `always`, nor are those of a
    store whose disk was found faster than unpacking when it was first opened so; a warning says so.

    Raises:
        StoreError: also where the disk could not be measured.
    """
    size = layout.frame_bytes
    if level is None or not _shrinks(layout, level):
        return ColdStore(directory, frame_bytes=size, **limits)
    store = PackedStore(
        directory, page_frame_bytes=size, page_bytes=layout.page_bytes,
        dtype=layout.geometry.dtype, level=level, threads=threads, **limits,
    )  # fmt: skip
    try:
        store.packing = _decide(store, layout, level, threads, always)
    except OSError as error:
        store.close()
        raise StoreError(f"cannot measure the disk of the store in {directory}: {error}") from error
    except BaseException:
        store.close()
        raise
    if store.packing.on:
        return store
    store.close()
    warnings.warn(
        f"codec: zstd is off for {directory}, faster without it: {store.packing} "
        f"(raw+zstd:{level} packs all the same, and takes less of the disk)",
        stacklevel=2,
    )
    return UnpackedStore(directory, store.packing, frame_bytes=size, **limits)


def _decide(
    store: PackedStore, layout: FrameFormat, level: int, threads: int, always: bool
) -> Packing:
    """Return what the store remembers, or find out; where packing is on, it stays on.

    Where nobody noted it, as there was no room for that, packed pages tell.
    """
    known = Packing.remembered(store)
    if known is not None and (known.on or not always):
        return known
    scarce = store.room() * store.frame_bytes < PROBE_BYTES
    if always or scarce or store.holds_pages:
        found = Packing(True)
    else:
        found = Packing.measured(
            store.directory, layout.page_bytes, layout.geometry.dtype, level=level, threads=threads
        )
    if not scarce:
        found.remember(store)
    return found


def stored_codec(layout: FrameFormat, level: int | None, store: ColdStore, *, always: bool) -> str:
    """Return how `open_store` would store pages on disk, as far as another could not read them."""
    known = Packing.remembered(store)
    packed = _shrinks(layout, level) and (always or known is None or known.on)
    return identity(layout.codec) + ("+zstd" if packed else "")


def _shrinks(layout: FrameFormat, level: int | None) -> bool:
    size = layout.frame_bytes
    return level is not None and slot_bytes(size, layout.geometry.dtype) < size
