"""How a batch of pages becomes visible: payloads, sync, then one transaction of the catalogue.

A crash before the transaction leaves slots that no record names, and those are free at the next
opening; a failure gives them back at once. So a batch is stored whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tierkv.errors import ColdReadError, ColdWriteError
from tierkv.tiers.catalogue import Catalogue
from tierkv.tiers.payloads import Payloads
from tierkv.tiers.record import Record, payload_hash
from tierkv.tiers.wear import COUNTER_NAME, DailyWrites


class Committer:
    """Writes pages of one store. Its caller lets one thread in at a time.

    Args:
        writes: counts bytes of frames; kept in the same transaction.
        durable: whether what is visible has reached the disk.
    """

    def __init__(
        self, payloads: Payloads, catalogue: Catalogue, writes: DailyWrites, *, durable: bool
    ) -> None:
        self.writes, self.durable = writes, durable
        self._payloads, self._own, self._catalogue = payloads, payloads.own, catalogue

    def put(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        places: Sequence[int] | None = None,
    ) -> None:
        """Write pages and make them visible; keys that exist are replaced.

        Args:
            keys: all different.
            views: ``[frame_bytes]`` uint8.
            places: free positions to write to, if it matters.

        Raises:
            WriteLimitError, DiskBudgetError, ColdWriteError: nothing became visible.
        """
        num_bytes = len(keys) * self._own.frame_bytes
        self.writes.check(num_bytes)
        with self._writing_payloads(), self._payloads.lock:
            if places is None:
                positions: Sequence[int] = self._payloads.reserve(len(keys))
            else:
                self._payloads.reserve_at(places)
                positions = places
        records: dict[bytes, bytes] = {}
        try:
            for key, view, position in zip(keys, views, positions, strict=True):
                place = self._own.place(position)
                record = Record(self._own.frame_bytes, *place, view.nbytes, payload_hash(view))
                records[key] = record.pack(key)
            with self._writing_payloads():
                self._own.write(positions, views, durable=self.durable)
            self.writes.add(num_bytes)
            replaced = self._catalogue.put_many(records, {COUNTER_NAME: self.writes.packed()})
        except BaseException:
            self._give_back(positions, records)
            raise
        self._payloads.free(replaced)

    @contextmanager
    def _writing_payloads(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ColdWriteError(
                f"writing pages to {self._own.directory.parent} failed: {error}; "
                f"nothing became visible"
            ) from error

    def _give_back(self, positions: Sequence[int], records: Mapping[bytes, bytes]) -> None:
        """Free the slots of a failed batch, unless an interrupt came after its commit.

        If the catalogue cannot tell, they stay in use until the next opening.
        """
        try:
            stored = self._catalogue.get_many(records)
        except ColdReadError:
            return
        if not any(value == records[key] for key, value in zip(records, stored, strict=True)):
            with self._payloads.lock:
                self._own.slots.release(positions)
