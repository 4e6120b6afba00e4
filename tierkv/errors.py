"""Every error tierkv raises on purpose, as one tree rooted at `TierKVError`.

Messages carry the numbers that led to the error and the knob that cures it.
"""

from __future__ import annotations


class TierKVError(Exception):
    """Root of all tierkv errors."""


class ConfigError(TierKVError, ValueError):
    """A setting is unknown, malformed or out of range."""


class UnsupportedModelError(TierKVError):
    """The model cannot work with tierkv; the message names it and says why."""


class HandshakeError(TierKVError):
    """A tier cache was updated but tierkv's attention did not read it (or the other way round)."""


class KernelsUnavailableError(TierKVError):
    """The CUDA kernels cannot run here; the message says why."""


class CaptureError(TierKVError):
    """A decode step cannot be captured as a CUDA graph; nothing was appended."""


class PageFaultError(TierKVError):
    """A captured step asked for pages on disk and nobody answered; nothing was appended."""


class ClosedError(TierKVError):
    """The object was used after `close()`."""


class BudgetError(TierKVError):
    """A budget would be exceeded. Nothing was written; what is stored stays readable."""


class HotBudgetError(BudgetError):
    """`gpu_budget` is too small for what must be on the compute device."""


class WarmBudgetError(BudgetError):
    """`cpu_budget` is too small, and no cold tier can take the pages."""


class DiskBudgetError(BudgetError):
    """`disk_budget` or the free-space floor would be broken by a write."""


class WriteLimitError(DiskBudgetError):
    """`disk_writes_per_day` is used up; what is stored stays readable."""


class StoreError(TierKVError):
    """The cold store on disk cannot be used."""


class StoreLockedError(StoreError):
    """Another process owns the store; the message names it."""


class StoreFormatError(StoreError):
    """The store was written by an incompatible version, or its catalogue is damaged."""


class ArchiveError(StoreError):
    """An exported context is damaged, cut off or of another version; nothing was imported."""


class ColdReadError(StoreError):
    """A page could not be read back whole from disk."""


class ColdWriteError(StoreError):
    """Pages could not be written to disk; they stay in warm memory."""
