"""Sequences that begin with pages there are already: by reference, without a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import closing

import numpy as np

from tierkv.paging.directory import NOWHERE, Blocks
from tierkv.paging.edit import fresh_tails, read_pages
from tierkv.paging.manager import PageManager
from tierkv.paging.plan import Fetch
from tierkv.paging.promotion import promote_encoded
from tierkv.paging.sequences import Sequences
from tierkv.paging.turns import take_note
from tierkv.tiers.arena import Arena
from tierkv.tiers.frames import Frames, runs


def begin(
    manager: PageManager, sequences: Sequences, table: Blocks, partial: Blocks, tokens: int
) -> None:
    """Make new sequences hold known pages (see `adopt`), brought up as far as there is room.

    Raises:
        ConfigError: attention is selective, and they are too many sequences or too long.
        BudgetError: no room for the tails.
        ColdReadError: a page could not be read. The caller closes the sequences.
    """
    size = manager.geometry.page_tokens
    manager.admit(sequences, len(table), table.shape[1] * size + tokens)
    adopt(manager, sequences, table, partial, tokens)
    by_position = table.T.reshape(-1)
    promote(manager, by_position[np.sort(np.unique(by_position, return_index=True)[1])])
    if manager.selective is not None:
        take_note(manager, sequences)


def adopt(
    manager: PageManager, sequences: Sequences, table: Blocks, partial: Blocks, tokens: int
) -> None:
    """Make new sequences hold known pages, and after those the beginning of one page each.

    Args:
        table: ``[batch, pages]`` whole pages, taken by reference.
        partial: ``[batch]`` pages whose first `tokens` tokens are copied into the tails.
        tokens: 0 to ``page_tokens - 1``.

    Raises:
        BudgetError: no room for the tails.
        ColdReadError: a partial page could not be read. The sequences are empty either way.
    """
    batch, pages = table.shape
    partial = partial if tokens else partial[:0]
    held = np.concatenate([table.reshape(-1), partial])
    manager.directory.retain(held)  # nothing may be evicted before it is ours
    try:
        manager.start(sequences, batch)
        for layer in range(manager.geometry.layers if tokens else 0):
            k, v = read_pages(manager, layer, partial)
            arena = manager.hot.arenas[layer]
            tails = sequences.tail_index(layer, manager.device)
            arena.k_frames.index_copy_(1, tails, k)
            arena.v_frames.index_copy_(1, tails, v)
        begun = fresh_tails(manager, batch, tokens)
        manager.directory.retain(table)
        sequences.blocks = np.concatenate([table, begun], axis=1)
        length = pages * manager.geometry.page_tokens + tokens
        sequences.lengths = [length] * manager.geometry.layers
    except BaseException:
        manager.close_sequences(sequences)
        raise
    finally:
        manager.release(held)


def register(manager: PageManager, block_keys: Sequence[bytes]) -> Blocks:
    """Make blocks, ``[n]``, whose pages lie on disk under keys of their content.

    They have one reference each, which the caller releases; the pages stay in the store then.
    """
    blocks = manager.new_blocks(len(block_keys))
    with manager.tiers.changed:
        manager.directory.saved.update(zip(blocks.tolist(), block_keys, strict=True))
        manager.directory.cold[blocks] = True
    return blocks


def room_above(manager: PageManager, blocks: Blocks) -> int:
    """Return how many more pages a layer `promote` could bring up after those of `blocks`."""
    directory, homed, every = manager.directory, manager.hot.homed, range(manager.geometry.layers)
    warm = min(manager.outflow.warm_free(layer) + _lent(manager, layer) for layer in every)
    warm += min(map(manager.tiers.device_frames.free, every))
    below = directory.hot[blocks] == NOWHERE
    rooms = []
    if homed:
        hot = min(manager.hot.homes_free(layer) for layer in homed)
        rooms.append(hot + warm - int(below[:, homed].any(axis=1).sum()) - 1)  # one for the tail
    if len(homed) < manager.geometry.layers:
        away = below & (directory.warm[blocks] == NOWHERE)
        rooms.append(warm - int(away.any(axis=1).sum()))
    return max(0, min(rooms))


def _lent(manager: PageManager, layer: int) -> int:
    """Return the homes of a layer that are lent as long as the context there is goes on."""
    state = manager.selective
    return 0 if state is None or state.faults is None else state.faults.homes.count(layer)


def promote(manager: PageManager, blocks: Blocks) -> None:
    """Bring pages up into frames that are free: the first blocks hot, the last ones warm.

    Pages of layers that select have no home in hot memory, so all of those go to warm.

    blocks: ``[n]``, different ones, by position. Reads run ahead. Of others' pages only those move
    that nobody uses and the prefix cache keeps.

    Raises:
        ColdReadError: a page could not be read; what was brought up before stays.
    """
    manager.transfer.wait_replay()  # what follows gives warm homes away, and reads into others
    tiers = manager.tiers
    if layers := tiers.hot_layers:
        below = blocks[~tiers.is_hot(blocks)[:, layers].all(axis=1)]
        room = min(map(tiers.hot_room, layers))
        if manager.prefix is not None and len(below) > room:
            manager.prefix.leave_hot(len(below) - room)
            room = min(map(tiers.hot_room, layers))
        encoded = tiers.device_frames.share > 0
        (promote_encoded if encoded else _promote_hot)(manager, below[:room])
    if manager.cold is not None:
        _promote_warm(manager, blocks)


def _promote_hot(manager: PageManager, blocks: Blocks) -> None:
    step = manager.placement.staging_pages
    fetches = []
    for layer in manager.hot.homed:
        missing = blocks[manager.directory.hot[blocks, layer] == NOWHERE]
        fetches += [Fetch(layer, missing[at : at + step]) for at in range(0, len(missing), step)]
    if not fetches:
        return
    manager.placement_epoch += 1
    with closing(manager.lookahead.run(fetches)) as arrived:
        for fetch, staged in arrived:
            _settle_hot(manager, fetch, staged)


def _settle_hot(manager: PageManager, fetch: Fetch, staged: Arena) -> None:
    """Give staged pages a home in hot memory. Their homes in warm memory are free then, unless
    what those hold could not be made again: a page is never encoded from what it was decoded to.
    """
    frames = manager.hot.take(fetch.layer, fetch.blocks, len(fetch.blocks))
    arena = manager.hot.arenas[fetch.layer]
    for start, stop in runs(frames):
        target = slice(int(frames[start]), int(frames[stop - 1]) + 1)
        arena.k_frames[:, target].copy_(staged.k_frames[:, start:stop])
        arena.v_frames[:, target].copy_(staged.v_frames[:, start:stop])
    with manager.tiers.changed:
        manager.directory.hot[fetch.blocks, fetch.layer] = frames
        if manager.tiers.format.codec.lossless:
            manager.outflow.leave_home(fetch.layer, fetch.blocks)


def _promote_warm(manager: PageManager, blocks: Blocks) -> None:
    """Read pages from disk straight into warm homes, as many as each layer may take."""
    directory, outflow = manager.directory, manager.outflow
    reading: list[tuple[int, Blocks, Frames, list[Future[None]]]] = []
    for layer in range(manager.geometry.layers):
        places = np.stack([directory.hot[blocks, layer], directory.warm[blocks, layer]])
        cold = blocks[(places == NOWHERE).all(axis=0)]
        frames = outflow.take_homes(layer, len(cold))
        cold = cold[len(cold) - len(frames) :]  # the newest: layers that select choose them most
        if not len(cold):
            continue
        keys = [manager.tiers.key(block, layer) for block in cold.tolist()]
        reading.append((layer, cold, frames, manager.transfer.read_cold(keys, frames)))
    wait([read for *_, reads in reading for read in reads])
    failure = None
    for layer, cold, frames, reads in reading:
        failed = [error for read in reads if (error := read.exception()) is not None]
        with manager.tiers.changed:
            if failed:
                outflow.give_homes(layer, frames)
            else:
                directory.warm[cold, layer] = frames
                assert manager.cold is not None
                manager.stats.cold_to_warm_bytes += len(cold) * manager.cold.frame_bytes
        failure = failure or next(iter(failed), None)
    if failure is not None:
        raise failure
