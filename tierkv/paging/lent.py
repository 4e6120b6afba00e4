"""Warm homes lent to guests: pages that are not chosen go to disk, those that are come to stay.

While a prompt is read, warm memory holds as much of it as it can, for all of that is read again and
again. Decoding reads what is chosen. When guests that were chosen lately have to leave, homes that
are free are lent to guests; and pages with warm homes that were not are written to disk, beside the
steps, and the frames of those homes hold guests from then on, until the context ends or waits, or
the disk has no room for what is sealed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierkv.errors import WarmBudgetError
from tierkv.paging.directory import NOWHERE, Blocks
from tierkv.paging.guests import Guests, Keys
from tierkv.tiers.frames import Frames

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager

MOST_BYTES = 256 << 20
"""Pages that are written at once: half a second of a disk that steps may wait for, too."""
NONE: Frames = np.zeros(0, dtype=np.int64)


class LentHomes:
    """Which homes are lent. Used between steps, by the caller's thread.

    Attributes:
        frames: ``[n]``, those lent now.

    Args:
        guests: receive the frames.
        lock: guards them.
    """

    def __init__(self, manager: PageManager, guests: Guests, lock: threading.Condition):
        self.frames, self._layers = NONE, NONE
        self._manager, self._guests, self._lock = manager, guests, lock
        self._asked: tuple[Blocks, Blocks] = NONE, NONE
        self._written: Future[None] | None = None
        self._refused = False  # the disk has no room, or fails

    def count(self, layer: int) -> int:
        """Homes of a layer that are lent."""
        return int((self._layers == layer).sum())

    def ask(self, last_chosen: torch.Tensor, before: int) -> None:
        """Lend homes that are free, and have pages written to disk that were not chosen lately.

        Not before a step that seals pages, for which homes and room on disk were counted.

        Args:
            last_chosen: ``[layers that select, n * max_pages]``, the step that last chose each
                page, as `SelectiveState.addresses`; 0 for none.
            before: lately means in this step or later.
        """
        manager, state = self._manager, self._manager.selective
        if self._written is not None or self._refused or state is None or state.owner is None:
            return
        if (state.owner.lengths[-1] + 1) % manager.geometry.page_tokens == 0:
            return
        layers = range(state.spec.dense_layers, manager.geometry.layers)
        try:
            for layer in layers:
                self._lend_free(layer)
        except WarmBudgetError:  # host memory is short
            self._refused = True
            return
        table = state.owner.blocks[:, : state.spec.max_pages]
        chosen = state.by_sequence(last_chosen)[:, : len(table), : table.shape[1]].cpu().numpy()
        blocks, latest = _latest(table, chosen)
        homes = manager.warm.in_homes(manager.directory.warm[blocks, layers.start :].T)
        homes[:, np.isin(blocks, table[:, -state.spec.recent_pages - 2 :])] = False  # read anyway
        at, which = np.nonzero(homes & (latest < before))
        order = np.argsort(latest[at, which], kind="stable")
        order = order[: MOST_BYTES // manager.warm.frame_bytes]
        self._asked = blocks[which[order]], at[order] + layers.start
        if len(order):
            self._written = manager.outflow.copy_down(*self._asked)

    def take_over(self, forget: Callable[[Keys], None]) -> None:
        """Let guests have the homes of pages that are on disk by now.

        forget: makes the device forget where those pages are; it asks for them then. Called
            before anything changes, for an interrupt may come at any line.
        """
        manager, state = self._manager, self._manager.selective
        if self._written is None or not self._written.done():
            return
        (blocks, layers), written, self._written = self._asked, self._written, None
        if written.exception() is not None:
            self._refused = True
            return
        assert state is not None and state.owner is not None
        manager.lookahead.cancel()
        directory, table = manager.directory, state.owner.blocks[:, : state.spec.max_pages]
        with manager.tiers.changed:
            there = manager.warm.in_homes(directory.warm[blocks, layers])
            there &= directory.cold[blocks, layers] & np.isin(blocks, table)
            blocks, layers = blocks[there], layers[there]
            frames = directory.warm[blocks, layers]
        keys = [NONE]
        for layer in np.unique(layers).tolist():
            rows, pages = np.nonzero(np.isin(table, blocks[layers == layer]))
            own = (layer - state.spec.dense_layers) * state.addresses.shape[1]
            keys.append(own + rows * state.spec.max_pages + pages)
        forget(np.concatenate(keys))
        state.away += len(frames)
        manager.transfer.wait_frames(frames)
        manager.placement_epoch += 1
        with manager.tiers.changed:
            directory.warm[blocks, layers] = NOWHERE
        self._lend(frames, layers)

    def _lend_free(self, layer: int) -> None:
        """Lend what is free of a layer's homes; pinned now, for no thread may do it in a step."""
        manager = self._manager
        frames = manager.outflow.take_homes(layer, manager.outflow.warm_free(layer))
        try:
            manager.warm.addresses(frames)
            manager.transfer.wait_frames(frames)  # guests are read into them without
        except BaseException:
            with manager.tiers.changed:
                manager.outflow.give_homes(layer, frames)
            raise
        self._lend(frames, np.full_like(frames, layer))

    def _lend(self, frames: Frames, layers: Frames) -> None:
        self.frames, self._layers = np.append(self.frames, frames), np.append(self._layers, layers)
        with self._lock:
            self._guests.add(frames)

    def give_back(self, *, for_good: bool) -> None:
        """Make homes of them again. There are no guests.

        for_good: lend none until the context ends or waits.
        """
        frames, layers = self.frames, self._layers
        self.frames, self._layers = NONE, NONE  # an interrupt may come: no home is given twice
        self._written, self._refused = None, for_good
        with self._lock:
            self._guests.reset()
        with self._manager.tiers.changed:
            for layer in np.unique(layers).tolist():
                self._manager.outflow.give_homes(layer, frames[layers == layer])


def _latest(table: Blocks, chosen: Frames) -> tuple[Blocks, Frames]:
    """Return the blocks of tables, ``[n]``, and when any sequence chose each, ``[layers, n]``.

    table: ``[batch, pages]``; chosen: ``[layers, batch, pages]``.
    """
    if len(table) == 1:
        return table[0], chosen[:, 0]
    blocks, at = np.unique(table, return_inverse=True)
    latest = np.zeros((len(chosen), len(blocks)), dtype=chosen.dtype)
    for layer, when in enumerate(chosen):
        np.maximum.at(latest[layer], at.ravel(), when.ravel())
    return blocks, latest
