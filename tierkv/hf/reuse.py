"""The prefix cache as a wrapped model uses it: by token ids, for caches it has filled itself."""

from __future__ import annotations

import numpy as np
import torch

from tierkv.hf.cache import TierCache
from tierkv.paging.adopt import adopt, promote


def begin(cache: TierCache, ids: torch.Tensor, mask: torch.Tensor | None, most: int) -> None:
    """Let an empty cache begin with what is known of ``[batch, tokens]`` ids, `most` tokens of it.

    Padded batches begin with nothing: their pages would not lie where others have them.

    Raises:
        BudgetError: no room for tails.
        ColdReadError: a page could not be read; the cache is empty.
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
    table, partial, tokens = prefix.match(ids.cpu().numpy(), most)
    held = table.shape[1] * prefix.tree.page_tokens + tokens
    if not held:
        return
    prefix.count(held, table)
    adopt(manager, cache.sequences, table, partial, tokens)
    cache.known = ids[:, :held]
    try:
        promote(manager, np.unique(table))
    except BaseException:
        cache.reset()
        raise


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
