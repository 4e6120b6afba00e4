"""Changes to block tables: beams, samples and forks permute tables; only tails are copied."""

from __future__ import annotations

import numpy as np
import torch

from tierkv.paging.directory import Blocks
from tierkv.paging.manager import PageManager
from tierkv.paging.plan import make_plan
from tierkv.paging.selective import SelectiveState
from tierkv.paging.sequences import Sequences
from tierkv.paging.turns import activate, copy_tails, let_wait
from tierkv.tiers.arena import Arena
from tierkv.tiers.frames import Frames


def remap(manager: PageManager, sequences: Sequences, rows: Blocks) -> None:
    """Make sequence i a copy of what sequence ``rows[i]`` was; the batch becomes ``len(rows)``.

    Pages are shared by reference; tails are copied (copy-on-write at page granularity), and so is
    what selective attention keeps of them.

    Raises:
        HotBudgetError: more sequences than there are frames for tails; nothing changed.
        ConfigError: attention is selective, and `max_batch` is less; nothing changed.
        ColdWriteError: it is done, but pages that nobody holds any more stay on disk.
    """
    old, new = sequences.batch, len(rows)
    if not old or (new == old and (rows == np.arange(old)).all()):
        return
    manager.admit(sequences, new, max(sequences.lengths))
    extra = manager.take_tails(new - old) if new > old else sequences.tails[:, :0]
    past, offset = divmod(max(sequences.lengths), manager.geometry.page_tokens)
    tails = np.concatenate([sequences.tails[:, :new], extra], axis=1)
    if offset:
        for layer, arena in enumerate(manager.hot.arenas):
            _copy_frames(arena, sequences.tails[layer, rows], tails[layer])
    for layer in range(manager.geometry.layers):
        manager.hot.give(layer, sequences.tails[layer, new:])
    before = sequences.blocks.copy()
    shared = before[rows, :past]
    manager.directory.retain(shared)
    sequences.batch, sequences.tails = new, tails
    sequences.blocks = np.concatenate([shared, fresh_tails(manager, new, offset)], axis=1)
    sequences.changed()
    if (state := manager.selective) is not None:
        layers = list(filter(state.spec.selects, range(manager.geometry.layers)))
        hosts = [manager.tiers.home_addresses(shared.reshape(-1), layer) for layer in layers]
        state.remap(rows, [manager.hot.arenas[layer] for layer in layers], hosts)
    manager.release(before)


def fork(manager: PageManager, sequences: Sequences) -> Sequences:
    """Return sequences of their own that hold what these hold.

    Sealed pages are shared by reference, tails are copied; closing either leaves the other whole.
    Where attention is selective they take turns.

    Raises:
        HotBudgetError, WarmBudgetError, DiskBudgetError: no room for more tails; nothing changed.
    """
    twin = Sequences(manager.geometry.layers)
    if not sequences.batch:
        return twin
    if manager.selective is not None:
        twin.waiting = copy_tails(manager, sequences)
    manager.start(twin, sequences.batch)
    past, offset = divmod(max(sequences.lengths), manager.geometry.page_tokens)
    if offset and twin.waiting is None:
        for layer, arena in enumerate(manager.hot.arenas):
            _copy_frames(arena, sequences.tails[layer], twin.tails[layer])
    shared = sequences.blocks[:, :past]
    manager.directory.retain(shared)
    twin.blocks = np.concatenate([shared, fresh_tails(manager, twin.batch, offset)], axis=1)
    twin.lengths = list(sequences.lengths)
    return twin


def _copy_frames(arena: Arena, sources: Frames, targets: Frames) -> None:
    source, target = (
        torch.as_tensor(frames, device=arena.k.device) for frames in (sources, targets)
    )
    for paged in (arena.k_frames, arena.v_frames):
        paged.index_copy_(1, target, paged.index_select(1, source))


def crop(manager: PageManager, sequences: Sequences, length: int) -> None:
    """Shorten all sequences to `length` tokens, in every layer that is longer.

    A page that is cut in the middle becomes the tail again, as a copy: sealed pages never change.

    Raises:
        ColdReadError: the page to cut could not be read, and nothing changed; or, where attention
            is selective, one that is recent now, and the next step looks for it again.
        ColdWriteError: it is done, but pages that nobody holds any more stay on disk.
    """
    if not sequences.batch or all(now <= length for now in sequences.lengths):
        return
    activate(manager, sequences)
    tokens = manager.geometry.page_tokens
    keep, offset = divmod(length, tokens)
    cut = {
        layer: read_pages(manager, layer, sequences.blocks[:, keep])
        for layer, now in enumerate(sequences.lengths)
        if offset and now // tokens > keep
    }
    for layer, (k, v) in cut.items():
        tails = torch.as_tensor(sequences.tails[layer], device=manager.device)
        manager.hot.arenas[layer].k_frames.index_copy_(1, tails, k)
        manager.hot.arenas[layer].v_frames.index_copy_(1, tails, v)
    before = sequences.blocks.copy()
    sequences.blocks = np.concatenate(
        [before[:, :keep], fresh_tails(manager, sequences.batch, offset)], axis=1
    )
    sequences.lengths = [min(now, length) for now in sequences.lengths]
    sequences.changed()
    try:
        if manager.selective is not None and manager.selective.owner is sequences:
            _restore_recent(manager, manager.selective, sequences, keep)
    except BaseException:
        let_wait(manager, sequences)  # its pages are shown anew when it goes on
        raise
    finally:
        manager.release(before[:, keep:])


def _restore_recent(
    manager: PageManager, state: SelectiveState, sequences: Sequences, pages: int
) -> None:
    """Forget pages that are gone, and fill the ring of recent ones with what is now recent."""
    state.truncate(pages)
    if not state.spec.slots:
        return
    for layer in filter(state.spec.selects, range(manager.geometry.layers)):
        for position in range(max(pages - state.spec.recent_pages - 1, 0), pages):
            k, v = read_pages(manager, layer, sequences.blocks[:, position])
            for row in range(sequences.batch):
                page = k[:, row : row + 1], v[:, row : row + 1]
                state.keep_recent(row, position, *page, manager.hot.arenas[layer])


def fresh_tails(manager: PageManager, batch: int, offset: int) -> Blocks:
    """Return new blocks ``[batch, 1]`` for tails that hold tokens, else ``[batch, 0]``."""
    count = 1 if offset else 0
    return manager.new_blocks(batch * count).reshape(batch, count)


def read_pages(
    manager: PageManager, layer: int, blocks: Blocks
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy pages of one layer, ``[n]`` blocks, from any tier: ``[kv_heads, n, page_tokens, dim]``.

    Raises:
        ColdReadError: a page could not be read from disk.
    """
    page = Sequences(manager.geometry.layers)
    page.batch = len(blocks)
    page.blocks = blocks[:, None]
    plan = make_plan(
        page,
        layer,
        1,
        manager.directory,
        staging_pages=manager.placement.staging_pages,
        placement_epoch=manager.placement_epoch,
        device=manager.device,
    )
    arena = manager.hot.arenas[layer]
    if len(plan.positions):
        frames = torch.as_tensor(plan.frames[:, 0], device=manager.device)
        return arena.k_frames.index_select(1, frames), arena.v_frames.index_select(1, frames)
    parts = []
    for staged, source in manager.lookahead.stream(page, layer, plan):
        slots = staged.slots[:, 0]
        k, v = source.k_frames, source.v_frames
        parts.append((k.index_select(1, slots), v.index_select(1, slots)))
    return torch.cat([k for k, _ in parts], dim=1), torch.cat([v for _, v in parts], dim=1)
