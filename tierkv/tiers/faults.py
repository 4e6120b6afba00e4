"""Why pages could not be read, in words that counters, errors and reports share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tierkv.errors import ColdReadError

COUNTERS = (
    "pages_written",
    "pages_read",
    "pages_dropped",
    "bytes_written",
    "bytes_read",
    "missing",
    "other_frame_bytes",
    "bad_header",
    "bad_checksum",
    "bad_meta",
    "truncated",
    "io_errors",
    "write_errors",
    "budget_refusals",
)
"""Labels of a store's counters. All exist from the start: absent would look the same as 0."""

DAMAGE = ("bad_header", "bad_checksum", "truncated")
"""Reasons for which a record is dropped: no later read of it can succeed."""


class Fault(NamedTuple):
    """Why one page could not be read: a counter's label, and the details for a person."""

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})"


class VerifyReport(NamedTuple):
    """Outcome of `ColdStore.verify`: how many records are whole, and (key, why) of the others."""

    whole: int
    bad: list[tuple[bytes, str]]


class BadPagesError(ColdReadError):
    """Some pages of a batch could not be read; `faults` says which and why, the rest were."""

    def __init__(self, faults: Mapping[bytes, Fault], num_keys: int) -> None:
        self.faults = dict(faults)
        key, fault = next(iter(self.faults.items()))
        super().__init__(
            f"{len(self.faults)} of {num_keys} pages could not be read; key {key.hex()}: {fault}"
        )
