"""Contexts that take turns: selective attention keeps summaries and frames of one at a time, be it
one sequence or a batch.

The others wait. Their sealed pages stay in the tiers they are in; only the tails lie in host
memory, outside of any budget, for want of frames. A context whose turn it is has its pages shown
to selective attention anew, which reads each of them once.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import torch

from tierkv.paging.plan import Fetch
from tierkv.paging.sequences import Sequences

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager


def activate(manager: PageManager, sequences: Sequences) -> None:
    """Let it be the turn of a context, one that waits or a new one; the one there is waits then.

    Raises:
        BudgetError: no room for its tails.
        ColdReadError: one of its pages could not be read. It waits on, like the other one.
    """
    state = manager.selective
    if state is None or state.owner is sequences:
        return
    if state.owner is not None:
        let_wait(manager, state.owner)
    if sequences.waiting is None:
        return
    sequences.tails, state.owner = manager.take_tails(sequences.batch), sequences
    try:
        for layer, (k, v) in enumerate(sequences.waiting):
            tails, arena = sequences.tail_index(layer, manager.device), manager.hot.arenas[layer]
            arena.k_frames.index_copy_(1, tails, k.to(manager.device))
            arena.v_frames.index_copy_(1, tails, v.to(manager.device))
        take_note(manager, sequences)
    except BaseException:
        let_wait(manager, sequences)
        raise
    sequences.waiting = None
    state.turns += 1


def copy_tails(
    manager: PageManager, sequences: Sequences
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return K and V of the tails of each layer, ``[kv_heads, batch, page_tokens, dim]``."""
    if sequences.waiting is not None:
        return sequences.waiting  # never changed
    pages = (
        arena.pages(tails) for arena, tails in zip(manager.hot.arenas, sequences.tails, strict=True)
    )
    return [(k.to("cpu", copy=True), v.to("cpu", copy=True)) for k, v in pages]


def let_wait(manager: PageManager, sequences: Sequences) -> None:
    """End the turn of a context. Of what selective attention has kept nothing is left."""
    assert manager.selective is not None
    manager.lookahead.cancel()
    sequences.waiting = copy_tails(manager, sequences)
    for layer, tails in enumerate(sequences.tails):
        manager.hot.give(layer, tails)
    sequences.tails = sequences.tails[:, :0]
    sequences.changed()
    manager.selective.forget()


def take_note(manager: PageManager, sequences: Sequences) -> None:
    """Show selective attention the sealed pages of the context whose turn it is.

    Their summaries are made from the keys that attention reads.

    Raises:
        ColdReadError: a page could not be read.
    """
    state, tiers = manager.selective, manager.tiers
    assert state is not None
    step, parts = manager.placement.staging_pages, list[tuple[int, int, Fetch]]()
    for layer in filter(state.spec.selects, range(manager.geometry.layers)):
        pages = sequences.lengths[layer] // manager.geometry.page_tokens
        for row, sealed in enumerate(sequences.blocks[:, :pages]):
            starts = range(0, pages, step)
            parts += [(row, at, Fetch(layer, sealed[at : at + step])) for at in starts]
    with closing(manager.lookahead.run([fetch for *_, fetch in parts])) as arrived:
        for (row, start, _), (fetch, staged) in zip(parts, arrived, strict=True):
            layer, count = fetch.layer, len(fetch.blocks)
            k, v = staged.k_frames[:, :count], staged.v_frames[:, :count]
            addresses = tiers.home_addresses(fetch.blocks, layer) if state.spec.slots else None
            state.sealed(layer, row, start, k, v, manager.hot.arenas[layer], addresses)
