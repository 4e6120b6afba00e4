"""The cold tier: pages on disk that outlive the process.

LMDB holds the catalogue, extent files beside it hold the payloads::

    <directory>/owner.lock                          who uses the store now
    <directory>/catalogue/                          LMDB: key -> record, name -> metadata
    <directory>/extents/<frame_bytes>-<index>.kv    payloads, preallocated, in 4 KiB-aligned slots

A write puts the payloads into free slots, syncs them, and only then commits the one catalogue
transaction that makes them visible; a drop goes the other way round. So a crash at any moment
leaves whole pages and nothing else. Slots that no record names are free at the next opening.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tierkv.errors import (
    ColdWriteError,
    ConfigError,
    StoreError,
)
from tierkv.page import SECTOR
from tierkv.tiers.catalogue import Catalogue
from tierkv.tiers.commit import Committer
from tierkv.tiers.compaction import compact
from tierkv.tiers.direct_io import probe_direct_io
from tierkv.tiers.extents import FILE_BYTES
from tierkv.tiers.faults import COUNTERS, DAMAGE, BadPagesError, VerifyReport
from tierkv.tiers.lifetime import Lifetime
from tierkv.tiers.metadata import Metadata
from tierkv.tiers.owner import OwnerLock
from tierkv.tiers.payloads import Payloads
from tierkv.tiers.record import BadRecordError, Record
from tierkv.tiers.wear import COUNTER_NAME, DailyWrites

REST = b"rest/"
"""Before the key of a page: the key of what did not fit into its slot (see `packed`). The two are
halves of one page, and leave the store together."""


class ColdStore(Metadata):
    """Pages of one size on disk, by key. Thread-safe; one owner per directory.

    Args:
        directory: created if needed. It may hold pages of other sizes too, from other models:
            this object counts, verifies and drops them, but reads and writes only its own.
        frame_bytes: bytes of one page's frame, a multiple of 4096.
        disk_budget: bytes that all files of the store may take on disk together.
        free_floor: bytes that a write must leave free on the file system.
        writes_per_day: bytes of frames that may be written in a day, all processes together; None
            for no limit.
        durable: whether a returned write survives a power cut. Without it a process that dies
            still loses nothing, but a machine that does may lose the whole store.

    Attributes:
        direct_io: whether payloads bypass the page cache (O_DIRECT); if not, reads are buffered.
        direct_io_reason: how we know.
        writes: what was written today, and the limit.
        counters: events since opening, by the labels in `COUNTERS`.

    Raises:
        ConfigError: an argument out of range.
        StoreLockedError: the store is open elsewhere, or in this process; names the owner.
        StoreFormatError: another version's store, or a damaged catalogue.
        StoreError: the directory cannot be used; the operating system's error is chained.

    Every method raises `ClosedError` after `close`, and `StoreError` in a forked child.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        frame_bytes: int,
        disk_budget: int,
        free_floor: int,
        writes_per_day: int | None = None,
        durable: bool = True,
    ) -> None:
        if frame_bytes % SECTOR or not SECTOR <= frame_bytes <= FILE_BYTES // 4:
            raise ConfigError(
                f"frame_bytes must be a multiple of {SECTOR} up to {FILE_BYTES // 4}, "
                f"got {frame_bytes}"
            )
        if disk_budget < 0 or free_floor < 0:
            raise ConfigError(
                f"disk_budget and disk_floor must not be negative, got {disk_budget}, {free_floor}"
            )
        self.directory = Path(directory)
        self.frame_bytes = frame_bytes
        self.disk_budget = disk_budget
        self.free_floor = free_floor
        self._writes_per_day = writes_per_day
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._durable = durable
        self._writer = threading.Lock()  # one put, drop or metadata write at a time; taken first
        self._counting = threading.Lock()
        self._lifetime = Lifetime(f"the store in {directory}")
        self._bad_at_open: list[tuple[bytes, str]] = []
        try:
            with ExitStack() as undo:
                self._open(undo)
                self._resources = undo.pop_all()
        except OSError as error:
            raise StoreError(f"cannot open the store in {directory}: {error}") from error

    def put(self, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> None:
        """Store all pages or none; a key that exists is replaced.

        Args:
            keys: 1 to 64 bytes each, all different.
            payloads: C-contiguous, `frame_bytes` bytes each; written without a copy if their
                address is a multiple of 4096.

        Raises:
            DiskBudgetError: not enough room; nothing was written.
            WriteLimitError: a `DiskBudgetError`; the day's writes are used up, likewise.
            ColdWriteError: the disk or the catalogue failed; nothing became visible.
            StoreError: malformed arguments.
        """
        with self._lifetime.using(), self._writer:
            views = self._payloads.views(keys, payloads)
            if len(set(keys)) != len(keys):
                raise StoreError("a key occurs twice in one batch")
            if not keys:
                return
            with self._counting_failures():
                self._commit.put(keys, views)
            self._count("pages_written", len(keys))
            self._count("bytes_written", len(keys) * self.frame_bytes)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with the page stored under its key, checked against its checksum.

        Neighbours on disk are read in one call, into one buffer if they are neighbours there too.
        Damaged pages are dropped from the store. A page whose read failed in the operating system
        (``io_errors``) is kept: the next may succeed.

        Args:
            keys: pages stored by `put`.
            buffers: writable, C-contiguous, for one page each or for several, together for as
                many as there are keys; read into without a copy if their address is a multiple of
                4096.

        Raises:
            BadPagesError: a `ColdReadError`; `faults` names the keys that could not be read. Their
                buffers' content is undefined, the other buffers hold their pages.
            StoreError: malformed arguments.
        """
        with self._lifetime.using():
            views = self._payloads.targets(keys, buffers)
            faults, values = self._payloads.read(self.frame_bytes, keys, views)
            num_read = sum(key not in faults for key in keys) if faults else len(keys)
            self._count("pages_read", num_read)
            self._count("bytes_read", num_read * self.frame_bytes)
            if faults:
                for fault in faults.values():
                    self._count(fault.reason)
                damaged = [key for key, fault in faults.items() if fault.reason in DAMAGE]
                error = BadPagesError(faults, len(keys))
                try:
                    self._drop_damaged({key: values[key] for key in damaged})
                except ColdWriteError as cause:
                    raise error from cause
                raise error

    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove the pages under `keys`, of any frame size and in all their slots; return how many
        of the keys there were.

        A slot that is being read is reused only after that read.

        Raises:
            ColdWriteError: the catalogue failed; nothing was removed.
            StoreError: the pages are gone, but files could not be shrunk.
        """
        with self._lifetime.using(), self._writer:
            removed = self._catalogue.delete_many([*keys, *map(_other_half, keys)])
            self._payloads.free(removed)
            self._count("pages_dropped", len(removed))
            if removed:
                self._trim(own=False)
            return len(removed.keys() & set(keys))

    def keys(self, prefix: bytes = b"") -> Iterator[bytes]:
        """Iterate over the keys that start with `prefix`, of every frame size, in order.

        Pages put or dropped meanwhile may or may not appear.
        """
        with self._lifetime.using():
            return (key for rows in self._scan(prefix) for key, _ in rows)

    def verify(self) -> VerifyReport:
        """Read every page of every frame size; changes nothing, counts nothing.

        Records found damaged when the store was opened are reported too: those are gone. A page in
        two slots is named by its own key, whichever of them is bad.
        """
        whole, bad = 0, list(self._bad_at_open)
        for rows in self._scan():
            with self._lifetime.using():
                faults = self._payloads.verify(rows)
            bad += [(key, str(fault)) for key, fault in faults.items() if fault.reason != "missing"]
            whole += len(rows) - len(faults)
        return VerifyReport(whole, [(key.removeprefix(REST), why) for key, why in bad])

    def compact(self) -> int:
        """Move pages of our own size from the ends of files into free slots before them, and give
        the ends back to the file system; return how many pages moved.

        Each batch becomes visible as a `put` does. A page that cannot be read stays where it is.

        Raises:
            WriteLimitError, DiskBudgetError, ColdWriteError: what was moved before stays moved.
        """
        with self._lifetime.using(), self._writer:
            moved = compact(self._payloads, self._commit)
            self._trim(own=True)
        return moved

    def room(self) -> int:
        """Pages that one `put` of new keys could write now within disk_budget and disk_floor."""
        with self._lifetime.using(), self._payloads.lock:
            return self._payloads.room()

    @property
    def used_bytes(self) -> int:
        """Bytes the catalogue and all extent files take on disk."""
        with self._lifetime.using(), self._payloads.lock:
            return self._payloads.used_bytes()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the frames of all stored pages; the files also hold free space."""
        with self._lifetime.using(), self._payloads.lock:
            return self._payloads.stored_bytes()

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that have no record; what the others have is checked when it is read."""
        with self._lifetime.using():
            values = self._catalogue.get_many(keys)
        return [key for key, value in zip(keys, values, strict=True) if value is None]

    def __contains__(self, key: bytes) -> bool:
        """Whether a page of our own size is stored under `key` (its payload is not checked)."""
        with self._lifetime.using():
            value = self._catalogue.get(key)
        try:
            return value is not None and Record.unpack(key, value).frame_bytes == self.frame_bytes
        except BadRecordError:
            return False

    def __len__(self) -> int:
        """Number of records, of every frame size."""
        with self._lifetime.using():
            return len(self._catalogue)

    def close(self) -> None:
        """Wait for calls under way, give unused space back, release the store. Idempotent.

        In a forked child it does nothing: the store belongs to the parent.
        """
        if self._lifetime.end():
            with self._resources:
                self._trim(own=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self, undo: ExitStack) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        undo.callback(OwnerLock(self.directory / "owner.lock").release)
        self._catalogue = Catalogue(
            self.directory / "catalogue", disk_budget=self.disk_budget, durable=self._durable
        )
        undo.callback(self._catalogue.close)
        self.writes = DailyWrites(self._stored_counter(), self._writes_per_day)
        directory = self.directory / "extents"
        directory.mkdir(exist_ok=True)
        self.direct_io, self.direct_io_reason = probe_direct_io(directory)
        self._payloads = Payloads(
            directory,
            self._catalogue,
            frame_bytes=self.frame_bytes,
            disk_budget=self.disk_budget,
            free_floor=self.free_floor,
            direct=self.direct_io,
        )
        undo.callback(self._payloads.close)
        self._commit = Committer(
            self._payloads, self._catalogue, self.writes, durable=self._durable
        )
        for rows in self._catalogue.scan():
            if faults := self._payloads.claim(rows):
                self._catalogue.delete_many(faults)
                for key, fault in faults.items():
                    self._count(fault.reason)
                    self._bad_at_open.append((key, str(fault)))
        self._trim(own=True)

    def _trim(self, *, own: bool) -> None:
        try:
            with self._payloads.lock:
                self._payloads.trim(own=own)
        except OSError as error:
            raise StoreError(f"cannot shrink the files in {self.directory}: {error}") from error

    def _stored_counter(self) -> bytes | None:
        try:
            return self._catalogue.meta_get(COUNTER_NAME)
        except BadRecordError:
            self._count("bad_meta")
            return None

    def _scan(self, prefix: bytes = b"") -> Iterator[list[tuple[bytes, bytes]]]:
        """The catalogue's `scan`, without keeping `close` waiting between its lists."""
        scan = self._catalogue.scan(prefix)
        while True:
            with self._lifetime.using():
                rows = next(scan, None)
            if rows is None:
                return
            yield rows

    def _drop_damaged(self, values: Mapping[bytes, bytes]) -> None:
        """Drop those records that nobody has replaced meanwhile, and their other halves."""
        if values:
            with self._writer:
                same = self._catalogue.delete_same(values)
                self._payloads.free({key: values[key] for key in same})
                self._payloads.free(self._catalogue.delete_many(map(_other_half, same)))


def _other_half(key: bytes) -> bytes:
    return key.removeprefix(REST) if key.startswith(REST) else REST + key
