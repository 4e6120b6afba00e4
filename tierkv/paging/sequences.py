"""Block tables of a batch of sequences, and where each one's tail is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tierkv.paging.directory import Blocks

if TYPE_CHECKING:
    from tierkv.paging.plan import Plan


class Sequences:
    """`batch` sequences of equal length that run through the model together.

    Attributes:
        blocks: ``[batch, num_blocks]`` block table: logical block at each page position. The
            last one is the tail while the length is not a multiple of `page_tokens`.
        lengths: tokens appended so far, per layer. Equal between forwards.
        tails: ``[layers, batch]`` hot frame that the next token of each sequence goes to.
        plans: what each layer's last lookup consisted of; the next one extends it.
        waiting: K and V of each layer's tails while these have no frames; see `turns`.
    """

    def __init__(self, layers: int):
        self.batch = 0
        self.lengths = [0] * layers
        self.tails: npt.NDArray[np.int64] = np.zeros((layers, 0), dtype=np.int64)
        self.num_blocks = 0
        self.plans: dict[int, Plan] = {}
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._tail_index: dict[int, torch.Tensor] = {}
        self._table: Blocks = np.zeros((0, 0), dtype=np.int64)

    @property
    def blocks(self) -> Blocks:
        """The block table, ``[batch, num_blocks]``."""
        return self._table[:, : self.num_blocks]

    @blocks.setter
    def blocks(self, table: Blocks) -> None:
        self._table = table
        self.num_blocks = table.shape[1]

    def extend(self, blocks: Blocks) -> None:
        """Append page positions. blocks: ``[batch, n]``."""
        need = self.num_blocks + blocks.shape[1]
        if need > self._table.shape[1]:
            wider = np.zeros((self.batch, max(need, 2 * self._table.shape[1], 16)), dtype=np.int64)
            wider[:, : self.num_blocks] = self.blocks
            self._table = wider
        self._table[:, self.num_blocks : need] = blocks
        self.num_blocks = need

    def tail_index(self, layer: int, device: torch.device) -> torch.Tensor:
        """Return `tails` of a layer as an index tensor on the compute device."""
        if layer not in self._tail_index:
            self._tail_index[layer] = torch.as_tensor(self.tails[layer], device=device)
        return self._tail_index[layer]

    def sealed(self, layer: int) -> None:
        """Forget which tails a layer had; its next plan extends the one there is."""
        self._tail_index.pop(layer, None)

    def changed(self) -> None:
        """Forget what was prepared for all layers."""
        self.plans.clear()
        self._tail_index.clear()
