"""Encoded pages brought up to the device as they are, from warm memory and from disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.paging.directory import Blocks
from tierkv.paging.headpages import open_pages
from tierkv.paging.plan import Fetch
from tierkv.paging.sources import Sources

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager


def promote_encoded(manager: PageManager, blocks: Blocks) -> None:
    """Give pages homes on the device; there is room in every layer. Their warm homes are free then.

    Pages that are just being written to disk stay where they are. While one part of the pages is
    copied, the next one is read from disk.

    Raises:
        ColdReadError: a page could not be read; what was brought up before stays.
    """
    warm, directory = manager.warm, manager.directory
    manager.lookahead.cancel()
    manager.placement_epoch += 1
    step = max(1, (warm.inbound.capacity or 2 * len(blocks)) // 2)
    fetches = []
    for layer in range(manager.geometry.layers):
        with manager.tiers.changed:
            frames = directory.warm[blocks, layer]
            raw = directory.hot[blocks, layer] >= 0
        missing = blocks[~raw & ~warm.on_device(frames) & (frames < warm.outbound_start)]
        fetches += [Fetch(layer, missing[at : at + step]) for at in range(0, len(missing), step)]
    coming: list[tuple[Fetch, Sources]] = []
    try:
        for fetch in fetches:
            while coming and (len(coming) == 2 or len(fetch.blocks) > warm.inbound.free):
                _settle(manager, *coming.pop(0))
            coming.append((fetch, open_pages(manager, fetch, encoded=True)))
        while coming:
            _settle(manager, *coming.pop(0))
    finally:
        for _, sources in coming:
            sources.release()


def _settle(manager: PageManager, fetch: Fetch, sources: Sources) -> None:
    """Wait for pages to be read, and copy them to frames on the device."""
    tiers, layer, blocks = manager.tiers, fetch.layer, fetch.blocks
    try:
        for read in sources.reads:
            read.result()
        with tiers.changed:
            frames = tiers.device_frames.take(layer, len(blocks))
        try:
            manager.transfer.copy_in(sources.frames, frames)
        except BaseException:
            with tiers.changed:
                tiers.device_frames.give(layer, frames)
            raise
        manager.stats.warm_to_hot_bytes += len(blocks) * tiers.format.page_bytes
        with tiers.changed:
            left = tiers.directory.warm[blocks, layer]
            tiers.directory.warm[blocks, layer] = frames
            manager.outflow.give_homes(layer, left[left >= 0])
    finally:
        sources.release()
