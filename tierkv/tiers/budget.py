"""How much a store may still put on disk: its own budget, and a floor of free space."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tierkv.errors import DiskBudgetError
from tierkv.units import format_bytes


class DiskBudget:
    """Two hard limits, in bytes, checked before anything is written.

    Args:
        directory: on the file system whose free space counts.
        disk_budget: bytes that the store's files may take in total.
        free_floor: bytes that must stay free on the file system.
        used_bytes: returns the bytes that the store's files take now.
    """

    def __init__(
        self,
        directory: Path,
        *,
        disk_budget: int,
        free_floor: int,
        used_bytes: Callable[[], int],
    ) -> None:
        self.directory = directory
        self.disk_budget = disk_budget
        self.free_floor = free_floor
        self.used_bytes = used_bytes

    def left(self) -> int:
        """Bytes that may still be added; negative if a limit is broken already."""
        return min(self._budget_left(), self._free() - self.free_floor)

    def check(self, needed: int, what: str) -> None:
        """Raise `DiskBudgetError` if `what` may not add `needed` bytes; name numbers and knob."""
        head = f"{what} need up to {format_bytes(needed)} more on disk"
        budget_left, free = self._budget_left(), self._free()
        if needed > budget_left:
            raise DiskBudgetError(
                f"{head}; {format_bytes(budget_left)} of disk_budget "
                f"{format_bytes(self.disk_budget)} are left "
                "(raise disk_budget or drop stored pages)"
            )
        if needed > free - self.free_floor:
            raise DiskBudgetError(
                f"{head}; the file system has {format_bytes(free)} free, of which disk_floor "
                f"keeps {format_bytes(self.free_floor)} (free some space or lower disk_floor)"
            )

    def _budget_left(self) -> int:
        return self.disk_budget - self.used_bytes()

    def _free(self) -> int:
        status = os.statvfs(self.directory)
        return status.f_bavail * status.f_frsize
