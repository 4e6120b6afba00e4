"""Small values by name: the part of a cold store that is not pages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tierkv.errors import ColdReadError, ColdWriteError, DiskBudgetError, StoreError
from tierkv.tiers.catalogue import Catalogue
from tierkv.tiers.lifetime import Lifetime
from tierkv.tiers.payloads import Payloads
from tierkv.tiers.record import BadRecordError

_MAX_NAME_BYTES = 500


class Metadata:
    """What `ColdStore` does with metadata, and the counters both halves share."""

    counters: dict[str, int]
    _counting: threading.Lock
    _writer: threading.Lock
    _lifetime: Lifetime
    _catalogue: Catalogue
    _payloads: Payloads

    def meta_get(self, name: str) -> bytes | None:
        """Return the value stored under `name`, or None.

        Raises:
            ColdReadError: it is damaged; it was counted as ``bad_meta`` and dropped.
        """
        with self._lifetime.using():
            try:
                return self._catalogue.meta_get(_meta_key(name))
            except BadRecordError as error:
                self._count("bad_meta")
                with self._writer:
                    self._catalogue.meta_delete(_meta_key(name))
                raise ColdReadError(f"metadata {name!r} is damaged: {error}") from error

    def meta_put(self, name: str, value: bytes) -> None:
        """Store `value` under `name`, replacing what was there.

        Raises:
            DiskBudgetError: not enough room; nothing was written.
            ColdWriteError: the catalogue failed; nothing was written.
        """
        with self._lifetime.using(), self._writer, self._counting_failures():
            growth = self._catalogue.growth_bytes(0, len(value))
            with self._payloads.lock:
                self._payloads.budget.check(growth, f"metadata {name!r}")
            self._catalogue.meta_put(_meta_key(name), value)

    def meta_delete(self, name: str) -> None:
        """Delete the value stored under `name`, if any."""
        with self._lifetime.using(), self._writer:
            self._catalogue.meta_delete(_meta_key(name))

    def meta_names(self, prefix: str = "") -> list[str]:
        """Return the names of all metadata values that start with `prefix`, in order."""
        with self._lifetime.using():
            return [name.decode() for name in self._catalogue.meta_names(prefix.encode())]

    def meta_verify(self) -> list[tuple[str, str]]:
        """Read every metadata value; return (name, why) of those that are damaged. Keeps them."""
        bad = []
        for name in self.meta_names():
            with self._lifetime.using():
                try:
                    self._catalogue.meta_get(name.encode())
                except BadRecordError as error:
                    bad.append((name, f"bad_meta ({error})"))
        return bad

    @contextmanager
    def _counting_failures(self) -> Iterator[None]:
        try:
            yield
        except DiskBudgetError:
            self._count("budget_refusals")
            raise
        except ColdWriteError:
            self._count("write_errors")
            raise

    def _count(self, label: str, amount: int = 1) -> None:
        with self._counting:
            self.counters[label] += amount


def _meta_key(name: str) -> bytes:
    key = name.encode()
    if not 1 <= len(key) <= _MAX_NAME_BYTES or key.startswith(b"\0"):
        raise StoreError(f"a metadata name must have 1 to {_MAX_NAME_BYTES} bytes, got {name!r}")
    return key
