"""Counters of one page manager. Plain numbers, so that reading them costs nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Stats:
    """What moved, what was found where, and what had to be waited for.

    Attributes:
        hits_hot, hits_warm, hits_cold: pages that attention looked up, by the tier that held
            them when the lookup was announced.
        late_arrivals: looked-up pages whose copy was not finished when attention asked for them.
        unannounced: looked-up pages that no upcoming lookup had announced.
        cancelled: pages announced and brought up for a lookup that never came.
        stall_seconds: time attention waited for pages (host clock).
        hot_to_warm_bytes ... cold_to_warm_bytes: bytes moved each way.
        pages_sealed: pages that became full and immutable.
        pages_demoted: resident pages moved down to make room for a tail.
    """

    hits_hot: int = 0
    hits_warm: int = 0
    hits_cold: int = 0
    late_arrivals: int = 0
    unannounced: int = 0
    cancelled: int = 0
    stall_seconds: float = 0.0
    hot_to_warm_bytes: int = 0
    warm_to_hot_bytes: int = 0
    warm_to_cold_bytes: int = 0
    cold_to_warm_bytes: int = 0
    pages_sealed: int = 0
    pages_demoted: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the counters grouped as the CLI prints them (plain JSON types)."""
        flat = asdict(self)
        return {
            "hits": {tier: flat.pop(f"hits_{tier}") for tier in ("hot", "warm", "cold")},
            "moved_bytes": {
                way: flat.pop(f"{way}_bytes")
                for way in ("hot_to_warm", "warm_to_hot", "warm_to_cold", "cold_to_warm")
            },
            **flat,
        }
