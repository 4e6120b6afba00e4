"""Where every page is. Bookkeeping only: no data moves here.

A logical block stands for the same `page_tokens` tokens in all layers; a page is one block in
one layer. Blocks are shared between sequences by reference count.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

NOWHERE = -1
Blocks = npt.NDArray[np.int64]


class PageDirectory:
    """Reference counts of blocks and the frames that hold each page.

    Attributes (arrays grow as blocks are made):
        refs: ``[blocks]`` sequences that hold each block.
        hot: ``[blocks, layers]`` frame in the layer's hot arena, or `NOWHERE`.
        warm: ``[blocks, layers]`` frame in warm memory, or `NOWHERE`.
        cold: ``[blocks, layers]`` whether the page is durable on disk.
        saved: key of the content of blocks that came from a saved context. All their pages are on
            disk under it, and stay there when the block is released.
    """

    def __init__(self, layers: int):
        self.layers = layers
        self.refs: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.hot: npt.NDArray[np.int64] = np.zeros((0, layers), dtype=np.int64)
        self.warm: npt.NDArray[np.int64] = np.zeros((0, layers), dtype=np.int64)
        self.cold: npt.NDArray[np.bool_] = np.zeros((0, layers), dtype=bool)
        self.saved: dict[int, bytes] = {}
        self._free: list[int] = []

    def new_blocks(self, count: int) -> Blocks:
        """Make `count` blocks with one reference each and no page anywhere."""
        if len(self._free) < count:
            self._grow(count - len(self._free))
        blocks = np.array([heapq.heappop(self._free) for _ in range(count)], dtype=np.int64)
        self.refs[blocks] = 1
        return blocks

    def retain(self, blocks: Blocks) -> None:
        """Add one reference for every occurrence in `blocks`."""
        np.add.at(self.refs, blocks.reshape(-1), 1)

    def release(self, blocks: Blocks) -> Blocks:
        """Drop one reference for every occurrence; return the blocks nobody holds any more.

        The caller frees their frames and then calls `forget`.
        """
        flat = blocks.reshape(-1)
        np.subtract.at(self.refs, flat, 1)
        if (self.refs[flat] < 0).any():
            raise AssertionError(f"a block was released more often than held: {flat.tolist()}")
        unique = np.unique(flat)
        return unique[self.refs[unique] == 0]

    def forget(self, blocks: Blocks) -> None:
        """Make block ids available again. Their pages are in no tier any more."""
        self.hot[blocks] = NOWHERE
        self.warm[blocks] = NOWHERE
        self.cold[blocks] = False
        for block in blocks.tolist():
            self.saved.pop(block, None)
            heapq.heappush(self._free, block)

    def is_below(self, blocks: Blocks, layer: int) -> npt.NDArray[np.bool_]:
        """Return which pages of a layer warm or cold hold, whether they are hot or not."""
        return (self.warm[blocks, layer] != NOWHERE) | self.cold[blocks, layer]

    @property
    def live(self) -> int:
        """Blocks that somebody holds."""
        return int((self.refs > 0).sum())

    def _grow(self, at_least: int) -> None:
        old = len(self.refs)
        extra = max(at_least, old, 64)
        self.refs = np.concatenate([self.refs, np.zeros(extra, dtype=np.int64)])
        fill = np.full((extra, self.layers), NOWHERE, dtype=np.int64)
        self.hot = np.concatenate([self.hot, fill])
        self.warm = np.concatenate([self.warm, fill.copy()])
        self.cold = np.concatenate([self.cold, np.zeros((extra, self.layers), dtype=bool)])
        for block in range(old, old + extra):
            heapq.heappush(self._free, block)
