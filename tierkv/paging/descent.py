"""Hot pages on their way down, and what is given up so that a budget suffices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tierkv.errors import BudgetError
from tierkv.paging.directory import NOWHERE, Blocks

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager


def make_room(manager: PageManager, down: Callable[[], list[int]]) -> list[int]:
    """Check that the tiers below hot take `down()` pages of each layer; return that.

    What the prefix cache keeps makes way: it is moved down for pages that could be hot, and
    evicted before anyone is told that a budget is too small.

    Raises:
        WarmBudgetError, DiskBudgetError: they cannot; nothing that is in use was touched.
        ColdWriteError: an earlier write to disk failed, and again just now.
    """
    if manager.prefix is not None:
        need, encoded = down(), manager.tiers.device_frames
        over = [need[layer] - encoded.free(layer) for layer in manager.tiers.hot_layers]
        if (pages := max(over, default=0)) > 0:
            manager.prefix.leave_hot(pages)
    while True:
        need = down()
        try:
            manager.outflow.check_room(need)
        except BudgetError:
            state = manager.selective
            if state is not None and state.faults is not None and state.faults.reclaim_homes():
                continue
            if manager.prefix is None or not manager.prefix.evict(max(*need, 1)):
                raise
        else:
            return need


def demote(manager: PageManager, blocks: Blocks) -> None:
    """Move the pages of blocks from hot to the tiers below.

    Raises:
        WarmBudgetError, DiskBudgetError: no room there; nothing was moved.
        ColdWriteError: a write to disk failed; what was not moved yet stays hot.
    """
    directory, warm, every = manager.directory, manager.warm, range(manager.geometry.layers)
    hot = [blocks[directory.hot[blocks, layer] != NOWHERE] for layer in every]

    def encoded(layer: int) -> Blocks:
        return blocks[warm.on_device(directory.warm[blocks, layer])]

    with manager.tiers.changed:
        down = [
            int((~directory.is_below(hot[layer], layer)).sum())
            + int((~directory.cold[encoded(layer), layer]).sum())
            for layer in every
        ]
    manager.outflow.check_room([0] * len(down), down)
    for layer in every:
        move_down(manager, layer, hot[layer])
        sink(manager, layer, encoded(layer))


def sink(manager: PageManager, layer: int, blocks: Blocks) -> None:
    """Move encoded pages of one layer from the device to the tiers below, as they are."""
    if not len(blocks):
        return
    manager.lookahead.cancel()
    manager.placement_epoch += 1
    before = manager.tiers.device_frames.free(layer)
    try:
        manager.outflow.sink(layer, blocks)
    finally:
        manager.stats.pages_demoted += manager.tiers.device_frames.free(layer) - before


def move_down(manager: PageManager, layer: int, blocks: Blocks) -> None:
    """Move hot pages of one layer down; those that a tier below holds already are just dropped."""
    if not len(blocks):
        return
    manager.lookahead.cancel()
    frames = manager.directory.hot[blocks, layer]
    blocks, frames = blocks[np.argsort(frames)], np.sort(frames)  # runs are read without a gather
    with manager.tiers.changed:
        lasting = ~manager.directory.is_below(blocks, layer)
    if lasting.any():
        k, v = manager.hot.arenas[layer].pages(frames[lasting])
        try:
            manager.outflow.send_down(layer, blocks[lasting], k, v)
        except BaseException:
            manager.outflow.take_back(layer, blocks[lasting])
            raise
    manager.directory.hot[blocks, layer] = NOWHERE
    manager.hot.give(layer, frames)
    manager.stats.pages_demoted += len(blocks)
    manager.placement_epoch += 1
