"""Saving the pages of a context under keys of their content, and bringing them back.

A saved page is written once, whoever shares it. Restoring appends what was saved, page by page in
layer order, with reads running ahead on threads; no forward pass is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from tierkv.errors import ColdReadError, ConfigError
from tierkv.paging.directory import NOWHERE
from tierkv.paging.headpages import open_pages
from tierkv.paging.keys import page_key
from tierkv.paging.lookup import Lookup, Part
from tierkv.paging.manager import PageManager
from tierkv.paging.plan import Fetch
from tierkv.paging.sequences import Sequences
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.direct_io import aligned_buffer

BATCH_BYTES = 8 << 20
"""Bytes of one read or write."""
READS_AHEAD = 6
"""Reads under way while earlier ones are appended."""


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

    block_keys: one per page position, the tail included.

    Raises:
        DiskBudgetError, ColdWriteError: what was written of this call is dropped again.
    """
    cold, written = store_of(manager), list[bytes]()
    past, offset = divmod(sequences.lengths[0], manager.geometry.page_tokens)
    step = max(1, BATCH_BYTES // manager.warm.frame_bytes)
    try:
        for layer in range(manager.geometry.layers):
            if not manager.tiers.format.codec.lossless:
                for new in _save_encoded(manager, sequences, layer, block_keys[:past]):
                    written += new
            whole = Lookup(manager, sequences, layer, past, sequences.tails[layer], offset, None, 2)
            for part in whole.parts(step):
                for start in range(0, len(part.positions), step):
                    positions = part.positions[start : start + step].tolist()
                    keys = [page_key(block_keys[position], layer) for position in positions]
                    fresh = [i for i, key in enumerate(keys) if key not in cold]
                    if fresh:
                        frames = _frames(manager, part, start, len(positions))
                        new = [keys[i] for i in fresh]
                        cold.put(new, [frames[i] for i in fresh])
                        written += new
    except BaseException:
        cold.drop(written)
        raise
    return len(written)


def _frames(manager: PageManager, part: Part, start: int, count: int) -> list[memoryview]:
    """Return pages of a part as they lie on disk; tokens that a tail does not have are zero."""
    geometry = manager.geometry
    k, v = part.arena.k_frames, part.arena.v_frames
    if part.table is None:
        first = part.first + start
        k, v = k[:, first : first + count], v[:, first : first + count]
    else:
        index = part.table[0, start : start + count]
        k, v = k.index_select(1, index), v.index_select(1, index)
    size = manager.warm.frame_bytes
    buffer = aligned_buffer(count * size)
    held = part.tokens - (start + count - 1) * geometry.page_tokens
    if held < geometry.page_tokens:
        k, v = k.clone(), v.clone()
        k[:, -1, held:] = 0
        v[:, -1, held:] = 0
    raw = torch.frombuffer(buffer, dtype=torch.uint8).view(count, size)
    manager.tiers.format.write(k, v, raw)
    return [buffer[i * size : (i + 1) * size] for i in range(count)]


def _save_encoded(
    manager: PageManager, sequences: Sequences, layer: int, block_keys: Sequence[bytes]
) -> Iterator[list[bytes]]:
    """Write sealed pages below hot as they were encoded once; yield the keys after each write."""
    cold, blocks = store_of(manager), sequences.blocks[0, : len(block_keys)]
    keys = [page_key(key, layer) for key in block_keys]
    hot = manager.directory.hot[blocks, layer]
    below = [i for i in np.flatnonzero(hot == NOWHERE).tolist() if keys[i] not in cold]
    step = manager.warm.inbound.capacity
    for at in range(0, len(below), step):
        part = below[at : at + step]
        sources = open_pages(manager, Fetch(layer, blocks[part]))
        try:
            for read in sources.reads:
                read.result()
            manager.transfer.wait_frames(sources.frames)
            new = [keys[i] for i in part]
            cold.put(new, [manager.warm.payload(frame) for frame in sources.frames.tolist()])
        finally:
            wait(sources.reads)
            sources.release()
        yield new


def missing(manager: PageManager, block_keys: Sequence[bytes]) -> int:
    """Return how many pages of a saved context the store does not hold."""
    cold, layers = store_of(manager), range(manager.geometry.layers)
    return sum(page_key(key, layer) not in cold for key in block_keys for layer in layers)


def restore(
    manager: PageManager, sequences: Sequences, block_keys: Sequence[bytes], tokens: int
) -> None:
    """Append saved pages to an empty sequence.

    Raises:
        ColdReadError: a page is missing or damaged. The sequence is closed, nothing else changed.
        HotBudgetError, WarmBudgetError, DiskBudgetError: no room, likewise.
    """
    try:
        with ThreadPoolExecutor(READS_AHEAD, "tierkv-restore") as pool:
            for layer, raw, count in _read_ahead(manager, block_keys, tokens, pool):
                pages = manager.tiers.format.pages(raw)
                k, v = (x.flatten(1, 2)[None, :, :count] for x in pages)
                manager.append(sequences, layer, k.to(manager.device), v.to(manager.device))
    except BaseException:
        manager.close_sequences(sequences)
        raise


def _read_ahead(
    manager: PageManager, block_keys: Sequence[bytes], tokens: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[int, torch.Tensor, int]]:
    """Yield (layer, frames, tokens) in the order in which a prefill would append them."""
    cold, geometry = store_of(manager), manager.geometry
    size = manager.warm.frame_bytes
    step = max(1, BATCH_BYTES // size)

    def read(keys: list[bytes]) -> torch.Tensor:
        buffer = aligned_buffer(len(keys) * size)
        cold.read_into(keys, [buffer[i * size : (i + 1) * size] for i in range(len(keys))])
        return torch.frombuffer(buffer, dtype=torch.uint8).view(len(keys), size)

    waiting: deque[tuple[int, int, Future[torch.Tensor]]] = deque()
    for start in range(0, len(block_keys), step):
        blocks = block_keys[start : start + step]
        count = min(len(blocks) * geometry.page_tokens, tokens - start * geometry.page_tokens)
        if count <= 0:
            raise ColdReadError(f"{len(block_keys)} pages for {tokens} tokens")
        for layer in range(geometry.layers):
            keys = [page_key(block, layer) for block in blocks]
            waiting.append((layer, count, pool.submit(read, keys)))
            if len(waiting) > READS_AHEAD:
                first, held, future = waiting.popleft()
                yield first, future.result(), held
    for layer, count, future in waiting:
        yield layer, future.result(), count
