"""In which tiers the tokens of a sequence are."""

from __future__ import annotations

import numpy as np

from tierkv.paging.directory import NOWHERE
from tierkv.paging.manager import PageManager
from tierkv.paging.sequences import Sequences


def tokens_by_tier(manager: PageManager, sequences: Sequences) -> dict[str, int]:
    """Return tokens of the first sequence by the fastest tier that holds their pages.

    Layers may differ: the numbers are means over layers, rounded so that they add up to the
    sequence's length. The tail is hot.
    """
    geometry, length = manager.geometry, sequences.lengths[0]
    if not length:
        return {"hot": 0, "warm": 0, "cold": 0}
    blocks = sequences.blocks[0, : length // geometry.page_tokens]
    directory = manager.directory
    with manager.tiers.changed:
        hot = manager.tiers.is_hot(blocks)
        warm = ~hot & (directory.warm[blocks] != NOWHERE)
    num_warm = int(np.count_nonzero(warm)) * geometry.page_tokens // geometry.layers
    num_cold = int(np.count_nonzero(~hot & ~warm)) * geometry.page_tokens // geometry.layers
    return {"hot": length - num_warm - num_cold, "warm": num_warm, "cold": num_cold}
