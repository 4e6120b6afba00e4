"""Saving the pages of a context under keys of their content, and bringing them back.

A saved page is written once, whoever shares it. Restoring takes what was saved by reference and
brings it up into free frames, with reads running ahead on threads; no forward pass is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np
import torch
from torch.nn.functional import pad

from tierkv.errors import ColdReadError, ConfigError
from tierkv.paging import adopt
from tierkv.paging.directory import NOWHERE, Blocks
from tierkv.paging.headpages import open_pages
from tierkv.paging.keys import page_key
from tierkv.paging.manager import PageManager
from tierkv.paging.plan import Fetch
from tierkv.paging.sequences import Sequences
from tierkv.paging.turns import activate
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.direct_io import aligned_buffer
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.frames import Frames, runs


def store_of(manager: PageManager) -> ColdStore:
    """Return the store.

    Raises:
        ConfigError: there is none.
    """
    if manager.cold is None:
        raise ConfigError("saving and resuming need a store; set store (--store DIR)")
    return manager.cold


def save(manager: PageManager, sequences: Sequences, block_keys: Sequence[bytes]) -> int:
    """Write every page of one sequence that the store does not hold yet; return how many.

    block_keys: one per page position, the tail included. Pages that the store holds are not read.

    Raises:
        DiskBudgetError, ColdWriteError: what was written of this call is dropped again.
        ColdReadError: a page could not be read to be written, likewise.
    """
    activate(manager, sequences)
    written = list[bytes]()
    try:
        if not manager.tiers.format.codec.lossless:
            _save_encoded(manager, sequences, block_keys, written)
        _save_rest(manager, sequences, block_keys, written)
    except BaseException:
        store_of(manager).drop(written)
        raise
    return len(written)


def _save_rest(
    manager: PageManager, sequences: Sequences, block_keys: Sequence[bytes], written: list[bytes]
) -> None:
    """Write what the store does not hold yet; add the keys to `written` as they are."""
    cold, layout = store_of(manager), manager.tiers.format
    geometry, step = manager.geometry, manager.placement.staging_pages
    past, held = divmod(sequences.lengths[0], geometry.page_tokens)
    fetches: list[Fetch] = []
    keys: list[list[bytes]] = []
    tails: list[int] = []
    for layer in range(geometry.layers):
        named = {page_key(key, layer): at for at, key in enumerate(block_keys)}
        fresh = [named[key] for key in cold.missing(list(named))]
        if fresh and fresh[-1] == past:
            tails.append(layer)
        sealed = np.array([at for at in fresh if at < past], dtype=np.int64)
        for start in range(0, len(sealed), step):
            part = sealed[start : start + step]
            fetches.append(Fetch(layer, sequences.blocks[0, part]))
            keys.append([page_key(block_keys[at], layer) for at in part.tolist()])
    buffer = aligned_buffer(step * layout.frame_bytes) if fetches or tails else memoryview(b"")
    with closing(manager.lookahead.run(fetches)) as arrived:
        for (fetch, arena), names in zip(arrived, keys, strict=True):
            count = len(fetch.blocks)
            k, v = arena.k_frames[:, :count], arena.v_frames[:, :count]
            cold.put(names, _frames(buffer, layout, k, v))
            written += names
    for layer in tails:
        k, v = manager.hot.arenas[layer].pages(sequences.tails[layer, :1])
        name = page_key(block_keys[past], layer)
        k, v = (pad(x[:, :, :held], (0, 0, 0, geometry.page_tokens - held)) for x in (k, v))
        cold.put([name], _frames(buffer, layout, k, v))
        written.append(name)


def _frames(
    buffer: memoryview, layout: FrameFormat, k: torch.Tensor, v: torch.Tensor
) -> list[memoryview]:
    """Lay pages, ``[kv_heads, n, page_tokens, dim]``, out in `buffer` as they lie on disk."""
    count, size = k.shape[1], layout.frame_bytes
    raw = torch.frombuffer(buffer, dtype=torch.uint8)[: count * size].view(count, size)
    layout.write(k, v, raw)
    return [buffer[i * size : (i + 1) * size] for i in range(count)]


def _save_encoded(
    manager: PageManager, sequences: Sequences, block_keys: Sequence[bytes], written: list[bytes]
) -> None:
    """Write sealed pages that tiers below hot hold as they were encoded, once and for all."""
    cold, step = store_of(manager), manager.warm.inbound.capacity
    past = sequences.lengths[0] // manager.geometry.page_tokens
    for layer in range(manager.geometry.layers):
        blocks = sequences.blocks[0, :past]
        with manager.tiers.changed:
            below = np.flatnonzero(manager.directory.is_below(blocks, layer))
        named = {page_key(block_keys[at], layer): at for at in below.tolist()}
        fresh = cold.missing(list(named))
        for start in range(0, len(fresh), step):
            keys = fresh[start : start + step]
            part = np.array([named[key] for key in keys], dtype=np.int64)
            sources = open_pages(manager, Fetch(layer, blocks[part]), encoded=True)
            try:
                for read in sources.reads:
                    read.result()
                cold.put(keys, _as_they_lie(manager, sources.frames))
            finally:
                sources.release()
            written += keys


def _as_they_lie(manager: PageManager, frames: Frames) -> list[memoryview]:
    """Return the memory of frames; of those on the device, a copy."""
    warm, size = manager.warm, manager.warm.frame_bytes
    manager.transfer.wait_frames(frames)
    here = frames[warm.on_device(frames)]
    copies = aligned_buffer(max(len(here), 1) * size)
    raw = torch.frombuffer(copies, dtype=torch.uint8).view(-1, size)
    for start, stop in runs(here):
        raw[start:stop] = warm.span(here[start:stop]).cpu()
    at = {frame: index * size for index, frame in enumerate(here.tolist())}
    return [
        copies[at[frame] : at[frame] + size] if frame in at else warm.payload(frame)
        for frame in frames.tolist()
    ]


def restore(
    manager: PageManager, sequences: Sequences, block_keys: Sequence[bytes], tokens: int
) -> None:
    """Make a new sequence hold saved pages.

    As many as there are free frames for are read, straight into place; the others, which the store
    must hold, stay where they are on disk, are never written again, and are checked when they are
    read. Nothing is looked up before the first read: the disk is what takes the time.

    Raises:
        ColdReadError: a page is missing or damaged. The sequence is closed, nothing else changed.
        HotBudgetError, WarmBudgetError, DiskBudgetError: no room, likewise.
    """
    pages, rest = divmod(tokens, manager.geometry.page_tokens)
    blocks = adopt.register(manager, block_keys)
    try:
        adopt.begin(manager, sequences, blocks[None, :pages], blocks[pages:], rest)
        _check_left(manager, sequences)
    except BaseException:
        manager.close_sequences(sequences)
        raise
    finally:
        manager.release(blocks)


def above(manager: PageManager, sequences: Sequences) -> bool:
    """Whether all sealed pages of a batch are hot or warm."""
    return not len(_left(manager, sequences))


def _left(manager: PageManager, sequences: Sequences) -> Blocks:
    """Return (block, layer) of the sealed pages that are neither hot nor warm, ``[n, 2]``."""
    sealed = sequences.blocks[:, : sequences.lengths[0] // manager.geometry.page_tokens].reshape(-1)
    hot, warm = manager.directory.hot[sealed], manager.directory.warm[sealed]
    rows, layers = np.nonzero((hot == NOWHERE) & (warm == NOWHERE))
    return np.stack([sealed[rows], layers], axis=1)


def _check_left(manager: PageManager, sequences: Sequences) -> None:
    """Raise `ColdReadError` if the store lacks pages that stay there."""
    left = _left(manager, sequences).tolist()
    gone = store_of(manager).missing([manager.tiers.key(*page) for page in left])
    if gone:
        raise ColdReadError(f"{len(gone)} of {len(left)} pages left on disk are not in the store")
