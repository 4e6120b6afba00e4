"""The payloads of a store's records: extents of every frame size, one budget, one lock.

The lock ties a record's lookup to the pin of its slot: a slot freed by a drop cannot be reused
between the two. It is never held while payloads move.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.errors import StoreError
from tierkv.tiers.budget import DiskBudget
from tierkv.tiers.catalogue import Catalogue
from tierkv.tiers.direct_io import aligned_buffer
from tierkv.tiers.extents import Extents, frame_sizes
from tierkv.tiers.faults import Fault
from tierkv.tiers.frame_views import FrameViews
from tierkv.tiers.frames import Frames
from tierkv.tiers.record import MAX_KEY_BYTES, BadRecordError, Record, payload_hash, unpack_many

_GROWTH_BYTES = 64 << 20
_VERIFY_BYTES = 16 << 20
_PLACE = ("frame_bytes", "file_index", "slot")


class Payloads:
    """Reads and frees payloads by their records; `own` is the frame size that is written.

    `lock` must be held around every method but `read`, `verify`, `free`, which take it themselves,
    `views`, `targets` and `close`, and around the use of `own.slots`.
    """

    def __init__(
        self,
        directory: Path,
        catalogue: Catalogue,
        *,
        frame_bytes: int,
        disk_budget: int,
        free_floor: int,
        direct: bool,
    ) -> None:
        self.lock = threading.Lock()
        self.budget = DiskBudget(
            directory, disk_budget=disk_budget, free_floor=free_floor, used_bytes=self.used_bytes
        )
        self._catalogue = catalogue
        self._extents: dict[int, Extents] = {}
        try:
            for size in frame_sizes(directory) | {frame_bytes}:
                self._extents[size] = Extents(directory, size, direct=direct)
        except BaseException:
            self.close()
            raise
        self.own = self._extents[frame_bytes]

    def claim(self, rows: Sequence[tuple[bytes, bytes]]) -> dict[bytes, Fault]:
        """Mark the slots that these (key, record bytes) name as used; return those that cannot be.

        Their headers are damaged, or their slots are not there: no read could succeed.
        """
        faults: dict[bytes, Fault] = {}
        whole, records = unpack_many([key for key, _ in rows], [value for _, value in rows])
        places = zip(*(records[name].tolist() for name in _PLACE), strict=True)
        for (key, value), is_whole in zip(rows, whole.tolist(), strict=True):
            if not is_whole:
                faults[key] = _why_not(key, value)
                continue
            frame_bytes, file_index, slot = next(places)
            extents = self._extents.get(frame_bytes)
            if extents is None or not extents.claim(file_index, slot):
                faults[key] = Fault("truncated", f"slot {slot} of file {file_index} is not there")
        return faults

    def views(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[memoryview]:
        """Return `buffers`, one per key and of our own size, as ``[frame_bytes]`` uint8 views.

        Raises:
            StoreError: keys or buffers are malformed.
        """
        _check_keys(keys)
        if len(keys) != len(buffers):
            raise StoreError(f"{len(keys)} keys but {len(buffers)} buffers")
        for buffer in buffers:
            if buffer.nbytes != self.own.frame_bytes or not buffer.c_contiguous:
                raise StoreError(
                    f"a page must be {self.own.frame_bytes} contiguous bytes, got {buffer.nbytes} "
                    f"(contiguous: {buffer.c_contiguous})"
                )
        return [buffer.cast("B") for buffer in buffers]

    def targets(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> FrameViews:
        """Return `buffers`, writable ones that hold a frame of our own size for each key.

        Raises:
            StoreError: keys or buffers are malformed.
        """
        _check_keys(keys)
        return FrameViews(buffers, self.own.frame_bytes, len(keys))

    def read(
        self, frame_bytes: int, keys: Sequence[bytes], views: FrameViews
    ) -> tuple[dict[bytes, Fault], dict[bytes, bytes]]:
        """Fill `views` with the pages of `keys`, all of one frame size.

        Returns the faults by key, and the record bytes of the faulty keys that have any. A view
        is filled unless its key is among the faults.
        """
        extents = self._extents[frame_bytes]
        with self.lock:
            values = self._catalogue.get_many(keys)
            frames, records = _of_size(keys, values, frame_bytes)
            positions = _positions(extents, records)
            extents.slots.pin(positions.tolist())
        faults: dict[bytes, Fault] = {}
        if len(frames) < len(keys):
            for index in np.setdiff1d(np.arange(len(keys)), frames).tolist():
                faults[keys[index]] = _why_not(keys[index], values[index])
        try:
            unread = extents.read(positions, views, frames)
            sizes, hashes = records["payload_bytes"].tolist(), records["payload_hash"].tolist()
            for i, frame in enumerate(frames.tolist()):
                fault = unread.get(i) or _check_payload(views.view(frame), sizes[i], hashes[i])
                if fault:
                    faults[keys[frame]] = fault
        finally:
            with self.lock:
                extents.slots.unpin(positions.tolist())
        if not faults:
            return faults, {}
        stored = dict(zip(keys, values, strict=True))
        return faults, {key: value for key in faults if (value := stored[key]) is not None}

    def verify(self, rows: Sequence[tuple[bytes, bytes]]) -> dict[bytes, Fault]:
        """Read the pages of these (key, record bytes), of any frame size; return the faults.

        A page that was dropped meanwhile is a fault too: ``missing``.
        """
        faults: dict[bytes, Fault] = {}
        keys_by_size: dict[int, list[bytes]] = {}
        for key, value in rows:
            try:
                keys_by_size.setdefault(Record.unpack(key, value).frame_bytes, []).append(key)
            except BadRecordError as error:
                faults[key] = Fault("bad_header", str(error))
        for frame_bytes, keys in keys_by_size.items():
            count = max(1, min(len(keys), _VERIFY_BYTES // frame_bytes))
            memory = aligned_buffer(count * frame_bytes)
            for start in range(0, len(keys), count):
                batch = keys[start : start + count]
                views = FrameViews([memory[: len(batch) * frame_bytes]], frame_bytes, len(batch))
                faults |= self.read(frame_bytes, batch, views)[0]
        return faults

    def free(self, values: Mapping[bytes, bytes]) -> None:
        """Free the slots of records that have left the catalogue.

        A damaged header names no slot we could trust; its slot is free at the next opening.
        """
        with self.lock:
            for key, value in values.items():
                try:
                    record = Record.unpack(key, value)
                except BadRecordError:
                    continue
                extents = self._extents[record.frame_bytes]
                extents.slots.release([extents.position(record.file_index, record.slot)])

    def trim(self, *, own: bool) -> None:
        """Give unused space at the ends of files back; `own` includes the size being written.

        Raises:
            OSError: a file could not be shrunk; its slots stay usable.
        """
        for extents in self._extents.values():
            if own or extents is not self.own:
                extents.trim()

    def used_bytes(self) -> int:
        """Bytes that the catalogue and all extent files take on disk."""
        extents = sum(extents.allocated_bytes() for extents in self._extents.values())
        return extents + self._catalogue.allocated_bytes()

    def stored_bytes(self) -> int:
        """Bytes of the slots in use."""
        return sum(x.slots.num_used * x.frame_bytes for x in self._extents.values())

    def room(self) -> int:
        """Frames of our own size that one batch could write within the budget."""
        left = self.budget.left()
        most = self.own.slots.num_free + max(0, left) // self.own.frame_bytes
        too_many = bisect_left(range(most + 1), True, key=lambda n: self._bytes_for(n) > left)
        return max(0, too_many - 1)

    def reserve(self, count: int) -> list[int]:
        """Return `count` positions of our own size, now in use; grow the files if need be.

        Growth goes in steps, so that the file system can lay large pieces out in one run, but
        never takes the space that the catalogue will need to fill them.

        Raises:
            DiskBudgetError: not enough room.
            OSError: the file system refused the space.
        """
        self.budget.check(self._bytes_for(count), f"{count} pages")
        num_free = self.own.slots.num_free
        if count > num_free:
            step = min(_GROWTH_BYTES, self.budget.disk_budget // 16) // self.own.frame_bytes
            self.own.grow(max(count - num_free, min(step, self.room() - num_free)))
        return self.own.slots.take(count)

    def reserve_at(self, positions: Sequence[int]) -> None:
        """Mark free positions of our own size as in use, for pages that move there.

        Raises:
            DiskBudgetError: not enough room for the catalogue's change.
        """
        growth = self._catalogue.growth_bytes(len(positions))
        self.budget.check(growth, f"moving {len(positions)} pages")
        for position in positions:
            self.own.slots.claim(position)

    def moves(self) -> list[tuple[bytes, int]]:
        """Return (key, free position) of pages of our own size that should move for files to end
        earlier: as many from the end as there are free slots before them. Order is kept.
        """
        used: list[tuple[int, bytes]] = []
        for rows in self._catalogue.scan():
            keys = [key for key, _ in rows]
            index, records = _of_size(keys, [value for _, value in rows], self.own.frame_bytes)
            positions = _positions(self.own, records).tolist()
            used += [(at, keys[i]) for at, i in zip(positions, index.tolist(), strict=True)]
        used.sort(reverse=True)
        free = self.own.slots.free_positions()
        pairs = zip(used, free, strict=False)
        count = sum(position > target for (position, _), target in pairs)
        keys = [key for _, key in reversed(used[:count])]
        return list(zip(keys, free[:count], strict=True))

    def close(self) -> None:
        """Close all files. Further calls do nothing."""
        for extents in self._extents.values():
            extents.close()

    def _bytes_for(self, count: int) -> int:
        """Bytes that the files may grow by if `count` frames are written."""
        growth = max(0, count - self.own.slots.num_free) * self.own.frame_bytes
        return growth + self._catalogue.growth_bytes(count)


def _of_size(
    keys: Sequence[bytes], values: Sequence[bytes | None], frame_bytes: int
) -> tuple[Frames, npt.NDArray[Any]]:
    """Return which keys have an intact record of a frame size, and the fields of those records."""
    whole, records = unpack_many(keys, values)
    own = records["frame_bytes"] == frame_bytes
    return np.flatnonzero(whole)[own], records[own]


def _positions(extents: Extents, records: npt.NDArray[Any]) -> Frames:
    files, slots = records["file_index"].astype(np.int64), records["slot"].astype(np.int64)
    return extents.position(files, slots)


def _why_not(key: bytes, value: bytes | None) -> Fault:
    """Say what is wrong with a record that `_of_size` left out."""
    if value is None:
        return Fault("missing", "no such key")
    try:
        record = Record.unpack(key, value)
    except BadRecordError as error:
        return Fault("bad_header", str(error))
    return Fault("other_frame_bytes", f"a page of {record.frame_bytes} bytes")


def _check_payload(view: memoryview, num_bytes: int, expected: int) -> Fault | None:
    found = payload_hash(view[:num_bytes])
    if found == expected:
        return None
    return Fault("bad_checksum", f"xxh3-64 {found:016x} instead of {expected:016x}")


def _check_keys(keys: Sequence[bytes]) -> None:
    for key in keys:
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise StoreError(f"a key must have 1 to {MAX_KEY_BYTES} bytes, got {len(key)}")
