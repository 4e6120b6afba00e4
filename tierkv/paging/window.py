"""The residual window: the last tokens of a sequence stay hot, and so as they were computed.

Encoded pages are approximate, and the last tokens matter most (KIVI, Liu et al. 2024, arXiv
2402.02750, keeps 32 to 128 of them whole). A page that leaves the window stays hot while frames are
free; when one is needed for the window, the latest hot page outside it moves down, and is encoded.
So budgets are as hard as without a window, which takes its frames out of each layer's share, and as
many pages are streamed. Pages that sequences share leave with the first of them. Before all others
go those that nobody uses and the prefix cache keeps.

Layers that select need none: their ring of recent tokens is not encoded (`recent_tokens`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tierkv.errors import HotBudgetError
from tierkv.page import Geometry
from tierkv.paging.descent import move_down
from tierkv.paging.directory import NOWHERE
from tierkv.paging.placement import Placement
from tierkv.units import format_bytes

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager
    from tierkv.paging.sequences import Sequences


def window_pages(tokens: int, geometry: Geometry, placement: Placement) -> int:
    """Return the pages that `tokens` tokens reach into at most, less the tail.

    Raises:
        HotBudgetError: a layer has not so many hot frames, and one for the tail.
    """
    pages = -(-tokens // geometry.page_tokens)
    if pages >= placement.hot_frames:
        short = (pages + 1 - placement.hot_frames) * geometry.page_bytes * geometry.layers
        raise HotBudgetError(
            f"residual_tokens {tokens} keeps {pages} pages and a tail hot in each layer; "
            f"gpu_budget leaves {placement.hot_frames} (raise gpu_budget by "
            f"{format_bytes(short)}, or lower residual_tokens)"
        )
    return pages


def slide(manager: PageManager, sequences: Sequences, layer: int, past: int, sealed: int) -> int:
    """Free hot frames for the window's share of the pages that each sequence is about to seal.

    past, sealed: pages of a sequence before, and those to come. Returns the frames that are free
    for the window: fewer than it wants where other sequences hold them.

    Raises:
        TierKVError: a page could not move down; what moved before is where it moved to.
    """
    wanted = min(sealed, manager.window_pages) * sequences.batch
    free = manager.hot.homes_free(layer)
    if wanted > free:
        before = sequences.blocks[:, : max(past + sealed - manager.window_pages, 0)][:, :past]
        hot = manager.directory.hot[before, layer] != NOWHERE
        latest = before.T[::-1][hot.T[::-1]]  # by position, the last first
        _, first = np.unique(latest, return_index=True)  # rows may share a page
        leaving = latest[np.sort(first)]
        if manager.prefix is not None:
            leaving = np.concatenate([manager.prefix.raw_pages(layer, wanted - free), leaving])
        # No more than all rows can use: a page moved in vain is one that nobody made room for.
        most = (free + len(leaving)) // sequences.batch * sequences.batch
        move_down(manager, layer, leaving[: max(min(wanted, most) - free, 0)])
    return min(wanted, manager.hot.homes_free(layer))
