"""Making room in a store: pages that nobody names first, then the least recently used contexts."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.errors import ConfigError
from tierkv.paging import inventory, manifest
from tierkv.paging.tierset import SESSION_PREFIX
from tierkv.tiers.cold import ColdStore


@dataclass(slots=True)
class Collected:
    """What a collection did.

    Attributes:
        unnamed_pages: dropped pages that no saved context named.
        evicted: dropped contexts and how many pages went with each, least recently used first.
        spared: saved contexts that could have gone but were kept, in the same order.
        stored_bytes: of all pages before and after.
        file_bytes: of all files of the store, before and after.
    """

    unnamed_pages: int = 0
    evicted: dict[str, int] = field(default_factory=dict)
    spared: list[str] = field(default_factory=list)
    stored_bytes: tuple[int, int] = (0, 0)
    file_bytes: tuple[int, int] = (0, 0)


def collect(
    cold: ColdStore,
    *,
    now: float,
    max_bytes: int | None = None,
    older_than: float | None = None,
    include_saved: bool = False,
) -> Collected:
    """Drop unnamed pages; then, if asked to, saved contexts. For a store that no model uses.

    Args:
        now: seconds since 1970.
        max_bytes: bytes of pages to come down to.
        older_than: seconds; contexts used since then stay. Without `max_bytes` all others go.
        include_saved: whether saved contexts may be dropped at all.

    Raises:
        ConfigError: `include_saved` without a limit would drop everything.
        ColdReadError: a manifest is damaged: which pages it named cannot be known.
    """
    if include_saved and max_bytes is None and older_than is None:
        raise ConfigError("--include-saved needs --max-bytes or --older-than, or it drops all")
    done, stored, files = Collected(), cold.stored_bytes, cold.used_bytes
    order = sorted(
        (manifest.last_used(cold, name, kept), name) for name, kept, _ in manifest.each(cold)
    )
    done.unnamed_pages = cold.drop([*inventory.unnamed(cold), *cold.keys(SESSION_PREFIX)])
    if max_bytes is not None or older_than is not None:
        oldest = [name for when, name in order if older_than is None or when <= now - older_than]
        for name in oldest:
            if max_bytes is not None and cold.stored_bytes <= max_bytes:
                break
            if include_saved:
                done.evicted[name] = manifest.forget(cold, name)
            else:
                done.spared.append(name)
    done.stored_bytes = stored, cold.stored_bytes
    done.file_bytes = files, cold.used_bytes
    return done
