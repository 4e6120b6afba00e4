"""How much a store has written today, and how much it may: SSDs wear out by writes."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from tierkv.errors import WriteLimitError
from tierkv.units import format_bytes

COUNTER_NAME = b"\0writes"
"""Where the catalogue keeps the counter; no metadata name starts with NUL."""

_COUNTER = struct.Struct("<QQ")  # day, bytes
_DAY_SECONDS = 86400


class DailyWrites:
    """Bytes of page frames written since midnight UTC, by every process that owned the store.

    The counter is kept in the transaction that makes pages visible, so a batch that failed there
    joins it with the next one, in this process. The catalogue's own writes are not in it.

    Args:
        stored: the counter as `packed` gave it, or None.
        per_day: bytes allowed; None for no limit.
        clock: returns seconds since 1970.
    """

    def __init__(
        self, stored: bytes | None, per_day: int | None, clock: Callable[[], float] = time.time
    ) -> None:
        self.per_day, self._clock = per_day, clock
        self._day, self._bytes = _COUNTER.unpack(stored) if stored is not None else (0, 0)

    @property
    def today(self) -> int:
        """Bytes written today."""
        return self._bytes if self._day == self._now() else 0

    def check(self, num_bytes: int) -> None:
        """Raise `WriteLimitError` if that many more bytes may not be written today."""
        if self.per_day is not None and self.today + num_bytes > self.per_day:
            raise WriteLimitError(
                f"{format_bytes(num_bytes)} more would make {format_bytes(self.today + num_bytes)} "
                f"written to the store today; disk_writes_per_day is {format_bytes(self.per_day)} "
                f"(raise it, or wait for midnight UTC)"
            )

    def packed(self) -> bytes:
        """Return the counter as the catalogue keeps it."""
        return _COUNTER.pack(self._now(), self.today)

    def add(self, num_bytes: int) -> None:
        """Count bytes that were written."""
        self._day, self._bytes = self._now(), self.today + num_bytes

    def _now(self) -> int:
        return int(self._clock()) // _DAY_SECONDS
