"""The catalogue of a store: page records and small metadata values in one LMDB environment.

The only door to LMDB. Every call is one short transaction, so that no reader holds old LMDB
pages back. The map is as large as the disk budget and a little more: a map is address space,
not disk, and this way the store's own budget check refuses a write long before LMDB's
MapFullError would. `writemap` stays off, so a stray pointer cannot damage the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lmdb

from tierkv.errors import ColdReadError, ColdWriteError, StoreFormatError
from tierkv.tiers.record import (
    FORMAT_VERSION,
    BadRecordError,
    pack_format,
    pack_meta,
    unpack_format,
    unpack_meta,
)

_FORMAT_NAME = b"\0format"  # no metadata name starts with NUL
_MAP_SLACK = 64 << 20
_SCAN_KEYS = 4096


class Catalogue:
    """Key to record bytes, and name to metadata value, each change one atomic transaction.

    Args:
        directory: where LMDB keeps its two files; created if needed.
        disk_budget: bytes; sizes the map.
        durable: whether a returned write has reached the disk (`sync` of LMDB).

    Every read may raise `ColdReadError`, every write `ColdWriteError`, with LMDB's own error
    chained.

    Raises:
        StoreFormatError: another format version, or not an intact LMDB environment.
    """

    def __init__(self, directory: Path, *, disk_budget: int, durable: bool) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        try:
            self._env = lmdb.open(
                str(directory),
                map_size=disk_budget + _MAP_SLACK,
                max_dbs=2,
                max_spare_txns=8,
                sync=durable,
                metasync=durable,
            )
        except lmdb.Error as error:
            raise StoreFormatError(
                f"no readable LMDB catalogue in {directory}: {error}; "
                "delete the store directory to start afresh"
            ) from error
        try:
            self._check_whole()
            self._pages = self._env.open_db(b"pages")
            self._meta = self._env.open_db(b"meta")
            self._check_format()
        except BaseException:
            self._env.close()
            raise

    def get(self, key: bytes) -> bytes | None:
        """Return the record bytes stored under `key`."""
        with self._reading(self._pages) as txn:
            return txn.get(key)

    def get_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Return the record bytes of each key, or None, all from one snapshot."""
        with self._reading(self._pages) as txn:
            return [txn.get(key) for key in keys]

    def put_many(
        self, records: Mapping[bytes, bytes], metadata: Mapping[bytes, bytes] | None = None
    ) -> dict[bytes, bytes]:
        """Store all records and metadata values or none; return the records they replaced."""
        replaced: dict[bytes, bytes] = {}
        with self._writing(self._pages) as txn:
            for key in sorted(records):
                old = txn.replace(key, records[key])
                if old is not None:
                    replaced[key] = old
            for name, value in (metadata or {}).items():
                txn.put(name, pack_meta(name, value), db=self._meta)
        return replaced

    def delete_many(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Delete those of `keys` that exist, all or none; return their record bytes.

        In key order, so that LMDB finishes one leaf, and can reuse its page, before the next.
        """
        removed: dict[bytes, bytes] = {}
        with self._writing(self._pages) as txn:
            for key in sorted(set(keys)):
                old = txn.pop(key)
                if old is not None:
                    removed[key] = old
        return removed

    def delete_same(self, records: Mapping[bytes, bytes]) -> list[bytes]:
        """Delete the keys that still hold these very record bytes; return those keys."""
        with self._writing(self._pages) as txn:
            same = [key for key, value in sorted(records.items()) if txn.get(key) == value]
            for key in same:
                txn.delete(key)
        return same

    def scan(self, prefix: bytes = b"") -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield lists of (key, record bytes) in key order, each list from its own snapshot."""
        start = prefix
        while rows := self._scan_from(start, prefix):
            yield rows
            start = rows[-1][0] + b"\0"

    def meta_get(self, name: bytes) -> bytes | None:
        """Return the value stored under `name`; `BadRecordError` if it is damaged."""
        with self._reading(self._meta) as txn:
            stored = txn.get(name)
        return None if stored is None else unpack_meta(name, stored)

    def meta_put(self, name: bytes, value: bytes) -> None:
        """Store `value` under `name`, replacing what was there."""
        with self._writing(self._meta) as txn:
            txn.put(name, pack_meta(name, value))

    def meta_delete(self, name: bytes) -> None:
        """Delete what is stored under `name`, if anything."""
        with self._writing(self._meta) as txn:
            txn.delete(name)

    def meta_names(self, prefix: bytes) -> list[bytes]:
        """Return the metadata names that start with `prefix`, in order."""
        names: list[bytes] = []
        with self._reading(self._meta) as txn, txn.cursor() as cursor:
            found = cursor.set_range(prefix or b"\1")
            while found and cursor.key().startswith(prefix):
                names.append(cursor.key())
                found = cursor.next()
        return names

    def __len__(self) -> int:
        with self._reading(self._pages) as txn:
            return txn.stat(self._pages)["entries"]

    def allocated_bytes(self) -> int:
        """Bytes LMDB's files take on disk. LMDB's file never shrinks."""
        return sum(path.stat().st_blocks * 512 for path in self.directory.iterdir())

    def growth_bytes(self, num_records: int, value_bytes: int = 0) -> int:
        """Bytes by which the file may still grow if `num_records` and `value_bytes` are added.

        LMDB writes a changed page to a new place, and the old place is free only after the next
        commit; one transaction changes each tree page at most once. So three times the tree
        bounds the file. A leaf that was split holds 16 records and more.
        """
        with self._reading(self._pages) as txn:
            pages, meta = txn.stat(self._pages), txn.stat(self._meta)
        tree = sum(stat["branch_pages"] + stat["leaf_pages"] for stat in (pages, meta))
        value_pages = -(-value_bytes // pages["psize"])
        bound = 3 * (tree + num_records // 16 + meta["overflow_pages"] + value_pages) + 32
        return max(value_pages, bound - self.allocated_bytes() // pages["psize"]) * pages["psize"]

    def close(self) -> None:
        """Close the environment. Further calls do nothing."""
        self._env.close()

    def _scan_from(self, start: bytes, prefix: bytes) -> list[tuple[bytes, bytes]]:
        rows: list[tuple[bytes, bytes]] = []
        with self._reading(self._pages) as txn, txn.cursor() as cursor:
            found = cursor.set_range(start) if start else cursor.first()
            while found and len(rows) < _SCAN_KEYS and cursor.key().startswith(prefix):
                rows.append(cursor.item())
                found = cursor.next()
        return rows

    def _check_whole(self) -> None:
        """Refuse a cut file: touching a mapped page past its end would kill the process."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        found = (self.directory / "data.mdb").stat().st_size
        if self._env.info()["last_txnid"] > 0 and found < needed:
            raise StoreFormatError(
                f"the catalogue in {self.directory} is cut off: {found} of {needed} bytes; "
                "delete the store directory to start afresh"
            )

    def _check_format(self) -> None:
        """Stamp a new catalogue with our version; refuse one of another version."""
        with self._writing(self._meta) as txn:
            stored = txn.get(_FORMAT_NAME)
            if stored is None and txn.stat(self._pages)["entries"] == 0:
                stored = pack_format()
                txn.put(_FORMAT_NAME, stored)
        try:
            found = unpack_format(stored or b"")
        except BadRecordError as error:
            raise StoreFormatError(
                f"the catalogue in {self.directory} is not one of tierkv's or is damaged: {error}"
            ) from error
        if found != FORMAT_VERSION:
            raise StoreFormatError(
                f"the store in {self.directory} has format version {found}, "
                f"this tierkv expects version {FORMAT_VERSION}; delete it or use that tierkv"
            )

    @contextmanager
    def _reading(self, database: lmdb._Database) -> Iterator[lmdb.Transaction[bytes]]:
        try:
            with self._env.begin(db=database) as txn:
                yield txn
        except lmdb.Error as error:
            raise ColdReadError(
                f"cannot read the catalogue in {self.directory}: {error}"
            ) from error

    @contextmanager
    def _writing(self, database: lmdb._Database) -> Iterator[lmdb.Transaction[bytes]]:
        """A transaction that commits on leaving; an exception inside it undoes everything."""
        try:
            with self._env.begin(write=True, db=database) as txn:
                yield txn
        except lmdb.Error as error:
            raise ColdWriteError(
                f"cannot write the catalogue in {self.directory}: {error}"
            ) from error
