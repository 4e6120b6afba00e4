"""Pages moved from the ends of extent files into free slots before them, so that files can end."""

from __future__ import annotations

from tierkv.tiers.commit import Committer
from tierkv.tiers.direct_io import aligned_buffer
from tierkv.tiers.frame_views import FrameViews
from tierkv.tiers.payloads import Payloads

MOVE_BYTES = 8 << 20
"""Bytes of pages that move at once."""


def compact(payloads: Payloads, committer: Committer) -> int:
    """Move pages of the store's own size; return how many. Files are trimmed by the caller.

    Each batch becomes visible as a `put` does. A page that cannot be read stays where it is.

    Raises:
        WriteLimitError, DiskBudgetError, ColdWriteError: what was moved before stays moved.
    """
    moved, size = 0, payloads.own.frame_bytes
    step = max(1, MOVE_BYTES // size)
    with payloads.lock:
        moves = payloads.moves()
    memory = aligned_buffer(min(step, max(1, len(moves))) * size)
    for start in range(0, len(moves), step):
        batch = moves[start : start + step]
        views = [memory[i * size : (i + 1) * size] for i in range(len(batch))]
        targets = FrameViews([memory[: len(batch) * size]], size, len(batch))
        faults, _ = payloads.read(size, [key for key, _ in batch], targets)
        whole = [i for i, (key, _) in enumerate(batch) if key not in faults]
        keys, places = [batch[i][0] for i in whole], [batch[i][1] for i in whole]
        committer.put(keys, [views[i] for i in whole], places)
        moved += len(whole)
    return moved
