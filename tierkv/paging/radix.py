"""A radix tree over token ids: which pages are known for which beginning of a sequence.

The idea is SGLang's RadixAttention (Zheng et al., 2024, arXiv:2312.07104): every known sequence is
a path from the root, common beginnings are common edges, and what was not used for longest is
evicted from the leaves. Here an edge is a run of whole pages, because a page is the smallest thing
that can be shared; a match goes on token by token into the first page that differs.

Bookkeeping only: values are block numbers, which mean nothing here.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.paging.directory import NOWHERE, Blocks

Ids = npt.NDArray[np.int32]


class Node:
    """An edge and where it leads.

    Attributes:
        ids: ``[pages * page_tokens]`` int32 token ids on the edge.
        blocks: ``[pages]`` block of each page on it.
        children: edges that go on from here, by the bytes of their first page.
        order: the keys of `children`, sorted: the closest in it share the most tokens.
        locks: users of this node or one below.
        used: when it was last matched or inserted, in calls.
        queued: whether the tree's queue of leaves holds it.
    """

    __slots__ = ("blocks", "children", "ids", "locks", "order", "parent", "queued", "used")

    def __init__(self, ids: Ids, blocks: Blocks, parent: Node | None):
        self.ids, self.blocks, self.parent = ids, blocks, parent
        self.children: dict[bytes, Node] = {}
        self.order: list[bytes] = []
        self.locks = self.used = 0
        self.queued = False


class Match(NamedTuple):
    """The longest known beginning of a sequence.

    Attributes:
        blocks: ``[n]`` blocks of its whole pages.
        partial: block whose first `partial_tokens` tokens follow, or `NOWHERE`.
        partial_tokens: 0 to ``page_tokens - 1``.
        node: the deepest node that was reached; for `lock`.
    """

    blocks: Blocks
    partial: int
    partial_tokens: int
    node: Node


class RadixTree:
    """Token sequences in whole pages, and the block of each page.

    Args:
        page_tokens: tokens per page.
        max_pages: pages that the tree holds at most; `insert` evicts for what is beyond.

    Attributes:
        pages: pages in the tree. Memory: ``4 * page_tokens + 8`` bytes a page, and under 1 KiB
            plus a page's ids a node; there are never more nodes than pages.
        nodes: edges in the tree.
    """

    def __init__(self, page_tokens: int, max_pages: int | None = None):
        self.page_tokens, self.max_pages = page_tokens, max_pages
        self.root = Node(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64), None)
        self.pages = self.nodes = 0
        self._clock, self._ties = itertools.count(1), itertools.count()
        self._leaves: list[tuple[int, int, Node]] = []  # heap; entries may be out of date

    def match(self, ids: npt.ArrayLike) -> Match:
        """Return the longest known beginning of ``[tokens]`` ids, and note its use."""
        ids = np.asarray(ids, dtype=np.int32)
        now, size = next(self._clock), self.page_tokens
        node, at, found = self.root, 0, [self.root.blocks]
        while True:
            node.used = now
            rest = ids[at:]
            child = node.children.get(_key(rest[:size])) if len(rest) >= size else None
            if child is None:
                partial, tokens = self._nearest(node, rest[:size])
                return Match(np.concatenate(found), partial, tokens, node)
            same = _common(child.ids, rest)
            pages, tokens = divmod(same, size)
            found.append(child.blocks[:pages])
            at += pages * size
            node = child
            if pages < len(child.blocks):
                node.used = now
                partial = int(child.blocks[pages]) if tokens else NOWHERE
                return Match(np.concatenate(found), partial, tokens, node)

    def _nearest(self, node: Node, rest: Ids) -> tuple[int, int]:
        """Return the first page of a child that shares most tokens with `rest`, and how many."""
        best, most = NOWHERE, 0
        at = bisect_left(node.order, _key(rest))
        for key in node.order[max(at - 1, 0) : at + 1]:
            child = node.children[key]
            same = _common(child.ids[: self.page_tokens], rest)
            if same > most:
                best, most = int(child.blocks[0]), same
        return best, most

    def insert(self, ids: npt.ArrayLike, blocks: Blocks) -> tuple[Blocks, Blocks, Node]:
        """Make the whole pages of a sequence known.

        Args:
            ids: ``[tokens]``; what follows the last whole page is ignored.
            blocks: the block of each whole page, or of the first few. Pages that are known under
                other blocks keep those.

        Returns:
            The blocks of `blocks` that the tree now holds and did not before, those it evicted to
            stay within `max_pages` (never locked ones, nor pages just inserted, unless there is
            nothing else: then the sequence is cut short), and the sequence's last node.
        """
        size = self.page_tokens
        ids = np.asarray(ids, dtype=np.int32)[: len(blocks) * size]
        blocks = np.asarray(blocks, dtype=np.int64)[: len(ids) // size]
        ids = ids[: len(blocks) * size]
        now, node, at = next(self._clock), self.root, 0
        while at < len(blocks):
            node.used = now
            rest = ids[at * size :]
            child = node.children.get(_key(rest[:size]))
            if child is None:
                break
            pages = _common(child.ids, rest) // size
            at += pages
            whole = at == len(blocks) or pages == len(child.blocks)
            node = child if whole else self._split(child, pages)
        node.used = now
        evicted, new = blocks[:0], len(blocks) - at
        if self.max_pages is not None and self.pages + new > self.max_pages:
            self.lock(node)
            evicted = self.evict(self.pages + new - self.max_pages)
            self.unlock(node)
            new = min(new, self.max_pages - self.pages)
        if new:
            part = slice(at * size, (at + new) * size)
            leaf = Node(ids[part].copy(), blocks[at : at + new].copy(), node)
            leaf.used = now
            self._attach(node, leaf)
            self.pages += new
            node = leaf
        self._queue(node)
        return blocks[at : at + new], evicted, node

    def _split(self, node: Node, pages: int) -> Node:
        """Cut an edge after `pages` pages; return the new upper half. `node` stays the lower."""
        parent, cut = node.parent, pages * self.page_tokens
        assert parent is not None
        upper = Node(node.ids[:cut].copy(), node.blocks[:pages].copy(), parent)
        upper.locks, upper.used = node.locks, node.used
        parent.children[_key(node.ids[: self.page_tokens])] = upper
        node.ids, node.blocks, node.parent = (
            node.ids[cut:].copy(),
            node.blocks[pages:].copy(),
            upper,
        )
        self._attach(upper, node)
        return upper

    def _attach(self, parent: Node, child: Node) -> None:
        key = _key(child.ids[: self.page_tokens])
        parent.children[key] = child
        insort(parent.order, key)
        self.nodes += 1

    def lock(self, node: Node) -> None:
        """Keep a node and everything above it from being evicted, until `unlock`."""
        at: Node | None = node
        while at is not None:
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the same node."""
        at: Node | None = node
        while at is not None:
            if not at.locks:
                raise AssertionError("a node was unlocked more often than locked")
            at.locks -= 1
            self._queue(at)
            at = at.parent

    def evict(self, pages: int) -> Blocks:
        """Remove up to `pages` pages that are not locked; return their blocks.

        Leaves first, the one not used for longest, from its end: what is left of every sequence
        is still a beginning of it. The order depends on nothing but the calls made before.
        """
        gone: list[Blocks] = [self.root.blocks]
        while pages and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if used != node.used:
                self._queue(node)  # used since: it has another turn
                continue
            if node.children or node.locks or node.parent is None:
                continue  # queued again once it is an unlocked leaf
            keep = max(len(node.blocks) - pages, 0)
            gone.append(node.blocks[keep:][::-1])
            pages -= len(gone[-1])
            self.pages -= len(gone[-1])
            if keep:
                node.ids = node.ids[: keep * self.page_tokens].copy()
                node.blocks = node.blocks[:keep].copy()
                self._queue(node)
            else:
                self._remove(node)
        return np.concatenate(gone)

    def _queue(self, node: Node) -> None:
        """Note a leaf that could be evicted. A node that is used or locked later stays queued."""
        if not (node.children or node.locks or node.queued or node.parent is None):
            node.queued = True
            heapq.heappush(self._leaves, (node.used, next(self._ties), node))

    def _remove(self, node: Node) -> None:
        parent, key = node.parent, _key(node.ids[: self.page_tokens])
        assert parent is not None
        del parent.children[key]
        del parent.order[bisect_left(parent.order, key)]
        node.parent = None
        self.nodes -= 1
        self._queue(parent)

    def oldest(self, pages: int, wanted: Callable[[Blocks], npt.NDArray[np.bool_]]) -> Blocks:
        """Return up to `pages` blocks for which `wanted` holds, in the order of eviction.

        Nothing is removed. wanted: maps ``[n]`` blocks to ``[n]`` truth values.
        """
        found: list[Blocks] = [self.root.blocks]
        below = {id(node): len(node.children) for node in self.walk()}
        leaves = [(node.used, id(node), node) for node in self.walk() if not node.children]
        heapq.heapify(leaves)
        while pages and leaves:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            if node.locks or parent is None:
                continue
            blocks = node.blocks[::-1]
            found.append(blocks[wanted(blocks)][:pages])
            pages -= len(found[-1])
            below[id(parent)] -= 1
            if not below[id(parent)]:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        return np.concatenate(found)

    def walk(self) -> Iterator[Node]:
        """Yield every node, the root first, in no particular order below it."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _key(ids: Ids) -> bytes:
    """Return bytes that sort as the ids do."""
    return ids.astype(">u4").tobytes()


def _common(a: Ids, b: Ids) -> int:
    """Return how many tokens two runs have in common at the start."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length
