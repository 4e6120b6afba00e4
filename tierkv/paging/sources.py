"""Where the pages of a fetch come from: frames on the device, warm frames, the disk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierkv.paging.directory import NOWHERE
from tierkv.paging.plan import Fetch
from tierkv.tiers.frames import Frames
from tierkv.tiers.streams import Span

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager


@dataclass(eq=False)
class Sources:
    """What `open_sources` found; held until it is copied.

    Attributes:
        spans, frames: encoded pages, and the staging slots they go to.
        reads: disk reads that fill some of the frames.
        hot: ``(slots, k_pages, v_pages)`` of raw pages on the device, or None.
        num_hot, num_warm, num_cold: pages by the tier that holds them.
        release: lets go of what is pinned, after reads that still run; those that do not are
            cancelled.
    """

    spans: list[Span]
    frames: Frames
    reads: list[Future[None]]
    hot: Any
    num_hot: int
    num_warm: int
    num_cold: int
    release: Callable[[], None]


def open_sources(manager: PageManager, fetch: Fetch, *, encoded: bool = False) -> Sources | None:
    """Pin a fetch's pages and start their disk reads; None when warm frames are short.

    encoded: as they were encoded, even where they are raw on the device too; for a caller who
        counts what goes up.
    """
    if fetch.settled:
        sources: Sources = fetch.settled[0]
        manager.stats.warm_to_hot_bytes += sources.num_warm * manager.tiers.format.page_bytes
        return sources
    layer, blocks = fetch.layer, fetch.blocks
    with manager.tiers.changed:
        hot, frames = manager.directory.hot[blocks, layer], manager.directory.warm[blocks, layer]
        if encoded:
            hot = np.full_like(hot, NOWHERE)
        on_device = np.flatnonzero(hot != NOWHERE)
        missing = np.flatnonzero((hot == NOWHERE) & (frames == NOWHERE))
        if len(missing) > manager.warm.inbound.free:
            return None
        inbound = manager.warm.inbound.take(len(missing))
        frames[missing] = inbound
        slots = np.flatnonzero(hot == NOWHERE)
        frames = frames[slots]
        pinned = frames[frames >= manager.warm.outbound_start].tolist()
        here = int(manager.warm.on_device(frames).sum())
        manager.outflow.pin(pinned)

    reads, resident = list[Future[None]](), None

    def release() -> None:
        wait([read for read in reads if not read.cancel()])  # they fill the frames
        if len(inbound) or pinned:
            with manager.tiers.changed:
                manager.warm.inbound.give(inbound)
                manager.outflow.unpin(pinned)

    try:  # all of it may take memory
        spans = manager.transfer.spans(slots, frames)
        if len(missing):
            assert manager.cold is not None
            keys = [manager.tiers.key(block, layer) for block in blocks[missing].tolist()]
            reads += manager.transfer.read_cold(keys, inbound)
            manager.stats.cold_to_warm_bytes += len(missing) * manager.cold.frame_bytes
        if not encoded:
            up = len(slots) - here
            manager.stats.warm_to_hot_bytes += up * manager.tiers.format.page_bytes
        if len(on_device):
            pages = manager.hot.arenas[layer].pages(hot[on_device])
            resident = (torch.as_tensor(on_device, device=manager.device), *pages)
    except BaseException:
        release()
        raise
    sources = Sources(
        spans, frames, reads, resident, len(on_device) + here, len(slots) - len(missing) - here,
        len(missing), release,
    )  # fmt: skip
    if not (len(missing) or len(on_device) or pinned):
        fetch.settled.append(sources)
    return sources
