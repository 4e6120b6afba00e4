"""The prefix cache as a wrapped model uses it: by token ids, for caches it has filled itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierkv.errors import ColdReadError
from tierkv.hf.cache import TierCache
from tierkv.hf.fingerprint import model_root
from tierkv.paging import adopt
from tierkv.paging.directory import Blocks
from tierkv.paging.keys import Tokens, block_keys, page_key
from tierkv.paging.manager import PageManager


def begin(
    cache: TierCache, hf_model: Any, ids: torch.Tensor, mask: torch.Tensor | None, most: int
) -> None:
    """Let an empty cache begin with what is known of ``[batch, tokens]`` ids, `most` tokens of it.

    What the prefix cache does not know, a single sequence finds in the store, if it was saved by
    any context of any process. A page that cannot be read is computed. Padded batches begin with
    nothing here (see `lay_out`).

    Raises:
        BudgetError: no room for tails.
    """
    manager = cache.live_manager()
    prefix, held = manager.prefix, cache.get_seq_length()
    if prefix is None:
        return
    if held:
        if cache.known is not None and not _starts_with(ids, cache.known, held):
            cache.known = None
        return
    cache.reset()
    if _padded(mask):
        return
    cache.known = ids[:, :0]
    if most < 1:
        return
    rows = ids.cpu().numpy()
    table, partial, tokens = prefix.match(rows, most)
    stored = table[0, :0]
    if len(rows) == 1:
        stored = _stored(manager, hf_model, rows[0, :most], table[0])
        if len(stored):
            table, tokens = np.concatenate([table, stored[None]], axis=1), 0
    held = table.shape[1] * prefix.tree.page_tokens + tokens
    try:
        if held and _take(cache, table, partial, tokens, held * len(rows), table):
            cache.known = ids[:, :held]
    finally:
        manager.release(stored)


def _take(
    cache: TierCache, table: Blocks, partial: Blocks, tokens: int, reused: int, counted: Blocks
) -> bool:
    """Make an empty cache begin with pages; return whether all of them could be read.

    Otherwise it is empty, and nothing is known any more, lest the next request fail likewise.
    """
    manager = cache.live_manager()
    prefix = manager.prefix
    assert prefix is not None
    tiers = prefix.tiers(counted)
    try:
        adopt.begin(manager, cache.sequences, table, partial, tokens)
    except ColdReadError:
        cache.reset()
        prefix.stats.failed_reads += 1
        prefix.evict(prefix.tree.pages)
        return False
    except BaseException:
        cache.reset()
        raise
    prefix.count(reused, tiers)
    return True


def _stored(manager: PageManager, hf_model: Any, row: Tokens, known: Blocks) -> Blocks:
    """Return new blocks, referenced once, of pages in the store that go on from the known ones.

    As many as there are free frames for: so all of them are read, and checked, before they count.
    """
    size, layers = manager.geometry.page_tokens, range(manager.geometry.layers)
    whole, cold, prefix = len(row) // size, manager.cold, manager.prefix
    if cold is None or prefix is None or whole <= len(known):
        return known[:0]
    if prefix.root is None:
        prefix.root = model_root(hf_model, manager)
    keys = block_keys(prefix.root, row[: whole * size], size)[len(known) :]
    keys = keys[: adopt.room_above(manager, known)]
    for layer in layers:
        gone = set(cold.missing([page_key(key, layer) for key in keys]))
        there = (page_key(key, layer) not in gone for key in keys)
        keys = keys[: next((at for at, found in enumerate(there) if not found), len(keys))]
    return adopt.register(manager, keys)


@dataclass(frozen=True, slots=True)
class Layout:
    """A left-padded batch with the padding moved behind what each row begins with.

    Attributes:
        ids, mask: ``[batch, length]``.
        given: the batch as it was given.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    given: torch.Tensor

    def restored(self, output: Any) -> Any:
        """Return what `generate` has returned, its sequences behind the batch as it was given."""
        sequences = getattr(output, "sequences", output)
        whole = torch.cat([self.given, sequences[:, self.ids.shape[1] :]], dim=1)
        if sequences is output:
            return whole
        output.sequences = whole
        return output


def lay_out(cache: TierCache, ids: torch.Tensor, mask: torch.Tensor) -> Layout | None:
    """Let the rows of a left-padded batch begin with known pages, each with its own.

    Attention hides padding wherever it is, and a token's position is the number of visible ones
    before it. So a row may be: known pages, hidden tokens, the rest; and all rows are equally long
    again. Returns None, and does nothing, if no row is known or the batch has no such padding.

    Raises:
        BudgetError: no room for tails.
    """
    manager = cache.live_manager()
    prefix, visible = manager.prefix, mask.bool()
    left = bool((visible[:, :-1] <= visible[:, 1:]).all()) and not bool(visible.all())
    if prefix is None or len(ids) == 1 or not left or not bool(visible[:, -1].all()):
        return None
    starts = (~visible).sum(dim=1).tolist()
    rows = [row[start:] for row, start in zip(ids, starts, strict=True)]
    found = [prefix.tree.match(row[:-1].cpu().numpy()).blocks for row in rows]
    pages, size = max(map(len, found)), prefix.tree.page_tokens
    if not pages:
        return None
    filler = max(found, key=len)[:1]  # hidden: any page does
    table = np.stack([np.append(b, np.repeat(filler, pages - len(b))) for b in found])
    rest = [row[len(blocks) * size :] for row, blocks in zip(rows, found, strict=True)]
    length = pages * size + max(map(len, rest))
    laid = ids[~visible][0].repeat(len(ids), length)
    shown = mask.new_zeros(laid.shape)
    for at, (row, blocks) in enumerate(zip(rows, found, strict=True)):
        begun = len(blocks) * size
        laid[at, :begun], shown[at, :begun] = row[:begun], 1
        laid[at, length - len(rest[at]) :], shown[at, length - len(rest[at]) :] = rest[at], 1
    known = np.concatenate(found)
    if not _take(cache, table, table[:, 0], 0, len(known) * size, known):
        return None
    return Layout(laid, shown, ids)


def keep(cache: TierCache, ids: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Make a cache's pages findable. ids: ``[batch, tokens]``, all that it has been fed.

    Only for a cache whose every token is known to be that of `ids`: one that was empty when `begin`
    saw it, or was kept before.
    """
    prefix = cache.live_manager().prefix
    held = min(cache.get_seq_length(), ids.shape[1])
    if prefix is None or cache.known is None or _padded(mask) or cache.sequences.batch != len(ids):
        return
    cache.known = ids[:, :held]
    prefix.keep(cache.sequences, cache.known.cpu().numpy())


def _starts_with(ids: torch.Tensor, known: torch.Tensor, held: int) -> bool:
    """Whether `held` tokens of every row are known, and are those of `ids`."""
    return torch.equal(ids[:, :held], known[:, :held]) and known.shape[1] >= held


def _padded(mask: torch.Tensor | None) -> bool:
    return mask is not None and not bool(mask.all())
