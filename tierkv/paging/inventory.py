"""Which pages saved contexts name, which of those the store holds, and which pages nobody names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tierkv.paging import manifest
from tierkv.paging.keys import KEPT_PREFIX, block_of
from tierkv.tiers.cold import ColdStore


def named(cold: ColdStore, *, but: str | None = None) -> set[bytes]:
    """Return the keys of all pages that saved contexts name, one of them left out."""
    keys: set[bytes] = set()
    for name, kept, ids in manifest.each(cold):
        if name != but:
            keys |= kept.page_keys(ids)
    return keys


def unnamed(cold: ColdStore, in_use: Iterable[bytes] = ()) -> list[bytes]:
    """Return the keys of kept pages that no saved context names.

    A save that failed at its last step leaves such pages, and so does a killed process.

    in_use: keys of page positions that open contexts read from the store; left out.
    """
    keep, blocks = named(cold), set(in_use)
    return [
        key for key in cold.keys(KEPT_PREFIX) if key not in keep and block_of(key) not in blocks
    ]


def incomplete(
    cold: ColdStore, bad_pages: Collection[bytes] = (), bad_names: Collection[str] = ()
) -> dict[str, int]:
    """Return how many pages each saved context lacks, of those that lack any.

    bad_pages: keys to count as lacking; bad_names: metadata names not to be read.
    """
    there = set(cold.keys(KEPT_PREFIX)) - set(bad_pages)
    lacking: dict[str, int] = {}
    for name in manifest.names(cold):
        if manifest.META_PREFIX + name not in bad_names:
            kept, ids = manifest.find(cold, name)
            gone = kept.page_keys(ids) - there
            if gone:
                lacking[name] = len(gone)
    return lacking
