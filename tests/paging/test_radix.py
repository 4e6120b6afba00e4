"""The radix tree against a dict of every known beginning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.combinations import examples
from tierkv.paging.directory import NOWHERE
from tierkv.paging.radix import Node, RadixTree

PAGE = 4
Prefix = tuple[int, ...]
IDS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=PAGE), max_size=8).map(
    lambda parts: [token for part in parts for token in part]
)
"""Few different tokens, so that sequences share beginnings of every length."""


def path(node: Node) -> Prefix:
    ids: list[int] = []
    while node.parent is not None:
        ids = [*node.ids.tolist(), *ids]
        node = node.parent
    return tuple(ids)


class RadixMachine(RuleBasedStateMachine):
    """Calls in any order; a second tree gets the same ones and must answer the same."""

    @initialize(limit=st.sampled_from([None, 1, 6]))
    def start(self, limit: int | None) -> None:
        self.tree, self.twin = RadixTree(PAGE, limit), RadixTree(PAGE, limit)
        self.known: dict[Prefix, int] = {}  # whole pages from the start -> block of the last
        self.locks: list[tuple[Node, Node, Prefix]] = []
        self.made = 0

    def locked(self) -> set[Prefix]:
        return {p[:end] for *_, p in self.locks for end in range(PAGE, len(p) + 1, PAGE)}

    def gone(self, blocks: Any) -> None:
        """Blocks left the tree: never a locked one, nor one with something after it."""
        for block in blocks.tolist():
            (key,) = [key for key, value in self.known.items() if value == block]
            assert key not in self.locked()
            del self.known[key]
            assert not any(other[: len(key)] == key for other in self.known), "not a leaf"

    @rule(ids=IDS)
    def insert(self, ids: list[int]) -> None:
        blocks = np.arange(self.made, self.made + len(ids) // PAGE)
        self.made += len(blocks)
        kept, evicted, node = self.tree.insert(ids, blocks)
        again = self.twin.insert(ids, blocks)
        assert kept.tolist() == again[0].tolist() and evicted.tolist() == again[1].tolist()
        self.gone(evicted)
        new = [
            (tuple(ids[: (i + 1) * PAGE]), block)
            for i, block in enumerate(blocks.tolist())
            if tuple(ids[: (i + 1) * PAGE]) not in self.known
        ]
        assert kept.tolist() == [block for _, block in new[: len(kept)]]
        if self.tree.max_pages is None:
            assert len(kept) == len(new) and not len(evicted)
        self.known.update(new[: len(kept)])
        reached = path(node)
        whole = tuple(ids[: len(ids) // PAGE * PAGE])  # the node may hold more after those
        assert reached[: len(whole)] == whole[: len(reached)]

    @rule(ids=IDS, lock=st.booleans())
    def match(self, ids: list[int], lock: bool) -> None:
        found, again = self.tree.match(ids), self.twin.match(ids)
        assert found.blocks.tolist() == again.blocks.tolist() and found[1:3] == again[1:3]
        pages = 0
        while (key := tuple(ids[: (pages + 1) * PAGE])) in self.known and len(key) % PAGE == 0:
            assert found.blocks[pages] == self.known[key]
            pages += 1
            if pages * PAGE >= len(ids):
                break
        assert len(found.blocks) == pages
        begun, rest = tuple(ids[: pages * PAGE]), ids[pages * PAGE :]
        common: dict[int, int] = {}
        for key, block in self.known.items():
            if len(key) == len(begun) + PAGE and key[: len(begun)] == begun:
                pairs = list(zip(key[len(begun) :], rest, strict=False))
                same = [a == b for a, b in pairs]
                common[block] = same.index(False) if False in same else len(same)
        best = max(common.values(), default=0)
        assert found.partial_tokens == best < PAGE
        assert found.partial == NOWHERE if not best else common[found.partial] == best
        if lock:
            self.tree.lock(found.node)
            self.twin.lock(again.node)
            self.locks.append((found.node, again.node, path(found.node)))

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.locks:
            node, twin, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
            self.tree.unlock(node)
            self.twin.unlock(twin)

    @rule(pages=st.integers(0, 5))
    def evict(self, pages: int) -> None:
        locked = len(self.locked() & set(self.known))
        next_ones = self.tree.oldest(pages, lambda blocks: np.ones(len(blocks), dtype=bool))
        blocks = self.tree.evict(pages)
        assert blocks.tolist() == self.twin.evict(pages).tolist() == next_ones.tolist()
        assert len(blocks) == min(pages, len(self.known) - locked)
        self.gone(blocks)

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "tree"):
            return
        nodes = list(self.tree.walk())[1:]
        assert len(nodes) == self.tree.nodes <= self.tree.pages == len(self.known)
        assert self.tree.max_pages is None or self.tree.pages <= self.tree.max_pages
        assert sum(len(node.blocks) for node in nodes) == self.tree.pages
        assert len(self.tree._leaves) <= len(nodes)
        for node in nodes:
            assert sorted(node.children) == node.order
            assert len(node.ids) == PAGE * len(node.blocks) > 0


RadixMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
TestRadix = RadixMachine.TestCase


def test_least_recently_used_leaves_go_first_from_their_ends() -> None:
    tree = RadixTree(PAGE)
    trunk = [1] * 8
    tree.insert(trunk + [2] * 8, np.arange(4))
    tree.insert(trunk + [3] * 8, np.arange(10, 14))
    assert (tree.nodes, tree.pages) == (3, 6)
    assert tree.match(trunk + [2] * 5).partial_tokens == 1  # in use again, page 3 in part
    assert tree.evict(1).tolist() == [13]
    assert tree.evict(2).tolist() == [12, 3]
    tree.lock(tree.match(trunk).node)
    assert tree.evict(9).tolist() == [2]
    assert tree.pages == 2


def test_a_match_goes_on_into_the_page_that_differs() -> None:
    tree = RadixTree(PAGE)
    tree.insert([5, 6, 7, 8, 1, 2, 3, 4], np.array([0, 1]))
    tree.insert([5, 6, 7, 8, 1, 2, 9, 9], np.array([0, 2]))
    found = tree.match([5, 6, 7, 8, 1, 2, 9])
    assert (found.blocks.tolist(), found.partial, found.partial_tokens) == ([0], 2, 3)
    found = tree.match([5, 6, 7])
    assert (found.blocks.tolist(), found.partial, found.partial_tokens) == ([], 0, 3)
    assert tree.match([4]).partial == NOWHERE
    with pytest.raises(AssertionError, match="more often than locked"):
        tree.unlock(found.node.children[next(iter(found.node.children))])


def test_ids_sort_as_numbers() -> None:
    """The closest page by its bytes is the closest by its tokens, beyond 255 too."""
    tree = RadixTree(PAGE)
    for block, token in enumerate([255, 256, 65536, 131071]):
        tree.insert([token] * PAGE, np.array([block]))
        assert tree.match([token, token, 7]).partial == block
