"""The prefix cache: pages stay findable by their tokens after their sequences are closed.

vLLM calls it automatic prefix caching; the tree is SGLang's (see `radix`). A page that is kept has
one reference from here. It stays in the tier it is in, until its frame is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tierkv.errors import BudgetError
from tierkv.paging.descent import demote
from tierkv.paging.directory import NOWHERE, Blocks
from tierkv.paging.radix import Match, Node, RadixTree

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager
    from tierkv.paging.sequences import Sequences

Rows = npt.NDArray[np.int64]


@dataclass(slots=True)
class PrefixStats:
    """What the prefix cache saved.

    Attributes:
        reused_tokens: tokens that sequences began with instead of computing them.
        reused_hot_pages, reused_warm_pages, reused_cold_pages: whole pages among them, by the tier
            that held them then; one a layer.
        evicted_pages: page positions given up for room.
        failed_reads: requests that were computed because a page could not be read.
    """

    reused_tokens: int = 0
    reused_hot_pages: int = 0
    reused_warm_pages: int = 0
    reused_cold_pages: int = 0
    evicted_pages: int = 0
    failed_reads: int = 0


class PrefixCache:
    """The radix tree of one model's pages, and the references it holds.

    Attributes:
        tree: known beginnings; its blocks are those of the manager's directory.
        stats: counters.
        root: what the keys of the model's pages in the store begin from, once it is needed.
    """

    def __init__(self, manager: PageManager):
        self._manager = manager
        self.tree = RadixTree(manager.geometry.page_tokens)
        self.stats = PrefixStats()
        self.root: bytes | None = None
        self._used: dict[Sequences, list[Node]] = {}

    def match(self, ids: Rows, most: int) -> tuple[Blocks, Blocks, int]:
        """Return what a batch may begin with.

        Args:
            ids: ``[batch, tokens]``.
            most: tokens to match at most.

        Returns:
            Whole pages ``[batch, pages]``, the page ``[batch]`` whose beginning follows, and how
            many of its tokens do. All rows get as much as the one with the shortest match.
        """
        found = [self.tree.match(row[:most]) for row in ids]
        size = self.tree.page_tokens
        held = min(len(match.blocks) * size + match.partial_tokens for match in found)
        pages, tokens = divmod(held, size)
        table = np.stack([match.blocks[:pages] for match in found])
        partial = np.array([_page(match, pages) for match in found], dtype=np.int64)
        return table, partial, tokens

    def tiers(self, blocks: Blocks) -> tuple[int, int, int]:
        """Return how many pages of blocks, of any shape, are hot, warm and cold; one a layer."""
        directory = self._manager.directory
        hot = self._manager.tiers.is_hot(blocks)
        warm = ~hot & (directory.warm[blocks] != NOWHERE)
        return int(hot.sum()), int(warm.sum()), int((~hot & ~warm).sum())

    def count(self, tokens: int, tiers: tuple[int, int, int]) -> None:
        """Count tokens that need not be computed, and where their whole pages were."""
        self.stats.reused_tokens += tokens
        self.stats.reused_hot_pages += tiers[0]
        self.stats.reused_warm_pages += tiers[1]
        self.stats.reused_cold_pages += tiers[2]

    def keep(self, sequences: Sequences, ids: Rows) -> None:
        """Make the sealed pages of a batch findable. ids: ``[batch, n]`` of its first n tokens."""
        pages = min(ids.shape[1], *sequences.lengths) // self.tree.page_tokens
        nodes = []
        for row, blocks in zip(ids, sequences.blocks[:, :pages], strict=True):
            new, _, node = self.tree.insert(row, blocks)
            self._manager.directory.retain(new)
            self.tree.lock(node)
            nodes.append(node)
        self.forget(sequences)
        self._used[sequences] = nodes

    def forget(self, sequences: Sequences) -> None:
        """Let pages go that only the locks of closed sequences kept."""
        for node in self._used.pop(sequences, ()):
            self.tree.unlock(node)

    def leave_hot(self, pages: int) -> None:
        """Make room for `pages` more pages in each layer of hot, with pages that nobody uses.

        They move to the tiers below, the least recently used first; where there is no room, they
        are evicted.
        """
        directory, tiers = self._manager.directory, self._manager.tiers

        def idle(blocks: Blocks) -> npt.NDArray[np.bool_]:
            return (directory.refs[blocks] == 1) & tiers.is_hot(blocks).any(axis=1)

        def free() -> int:
            return min(map(tiers.hot_room, tiers.hot_layers), default=0)

        goal = free() + pages
        while (count := goal - free()) > 0 and len(blocks := self.tree.oldest(count, idle)):
            try:
                demote(self._manager, blocks)
                return
            except BudgetError:
                self.evict(count)

    def raw_pages(self, layer: int, most: int) -> Blocks:
        """Return blocks that nobody uses and a layer has raw, the least recently used first."""
        directory = self._manager.directory

        def idle(blocks: Blocks) -> npt.NDArray[np.bool_]:
            return (directory.refs[blocks] == 1) & (directory.hot[blocks, layer] != NOWHERE)

        return self.tree.oldest(most, idle)

    def evict(self, pages: int) -> int:
        """Give up as many page positions that nobody uses, if there are; return how many."""
        blocks = self.tree.evict(pages)
        self._manager.release(blocks)
        self.stats.evicted_pages += len(blocks)
        return len(blocks)

    def clear(self) -> None:
        """Give up everything. All sequences are closed."""
        self._manager.release(self.tree.evict(self.tree.pages))

    def report(self) -> dict[str, Any]:
        """Return counters as plain JSON types."""
        stats = self.stats
        return {
            "kept_pages": self.tree.pages,
            "reused_tokens": stats.reused_tokens,
            "reused_pages": {
                "hot": stats.reused_hot_pages,
                "warm": stats.reused_warm_pages,
                "cold": stats.reused_cold_pages,
            },
            "evicted_pages": stats.evicted_pages,
            "failed_reads": stats.failed_reads,
        }


def _page(match: Match, position: int) -> int:
    return int(match.blocks[position]) if position < len(match.blocks) else match.partial
