"""What one layer's lookup consists of: pages attended in place, and blocks to be staged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tierkv.paging.directory import NOWHERE, Blocks, PageDirectory
from tierkv.paging.sequences import Sequences
from tierkv.tiers.frames import Frames


@dataclass(frozen=True, eq=False)
class Fetch:
    """Distinct pages of one layer that go into slots ``0 .. n-1`` of one staging arena."""

    layer: int
    blocks: Blocks
    settled: list[Any] = field(default_factory=list)
    """The sources, once all pages have reached their warm homes; they stay there."""

    def same(self, other: Fetch) -> bool:
        """Whether both name the same pages in the same order."""
        if self is other:
            return True
        return self.layer == other.layer and np.array_equal(self.blocks, other.blocks)


@dataclass(frozen=True, eq=False)
class Staged:
    """One streamed part of a lookup.

    Attributes:
        fetch: the pages.
        rows: sequences that read it.
        positions: ``[n]`` page positions.
        slots: ``[rows, n]`` staging slot of each sequence's page, on the compute device.
        in_order: one sequence, and slots are ``0 .. n-1``: the arena is read without a gather.
    """

    fetch: Fetch
    rows: slice
    positions: Blocks
    slots: torch.Tensor
    in_order: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """Lookup of one layer over the first `past` pages of every sequence.

    Attributes:
        positions, frames: ``[r]`` and ``[batch, r]`` resident pages and their hot frames.
        streamed: ``[s]`` the other page positions.
        staged: those, in blocks that fit a staging arena.
        gathers: device index tensors for resident frames, filled on first use.
    """

    past: int
    placement_epoch: int
    positions: Blocks
    frames: Frames
    streamed: Blocks
    staged: list[Staged]
    gathers: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)


def make_plan(
    sequences: Sequences,
    layer: int,
    past: int,
    directory: PageDirectory,
    *,
    staging_pages: int,
    placement_epoch: int,
    device: torch.device,
    earlier: Plan | None = None,
) -> Plan:
    """Divide a lookup into resident and streamed pages.

    A page position is resident when every sequence's page there is hot. The rest is cut into
    blocks of at most `staging_pages` distinct pages; a page shared by sequences is staged once.

    Args:
        earlier: a plan of the same table over fewer pages, under the same placement: its blocks
            that are full stay as they are, because a page keeps its home.
    """
    row_step = max(1, min(sequences.batch, staging_pages))
    step = max(1, staging_pages // row_step)
    known, kept, staged = 0, 0, []
    if earlier is not None and earlier.past <= past and earlier.placement_epoch == placement_epoch:
        known = earlier.past
        kept = len(earlier.streamed) // step * step
        row_blocks = -(-sequences.batch // row_step)
        staged = earlier.staged[: kept // step * row_blocks]
    fresh = sequences.blocks[:, known:past]
    frames = directory.hot[fresh, layer]
    resident = (frames != NOWHERE).all(axis=0)
    positions, frames = known + np.flatnonzero(resident), frames[:, resident]
    streamed = known + np.flatnonzero(~resident)
    if earlier is not None and known:
        positions = np.concatenate([earlier.positions, positions])
        frames = np.concatenate([earlier.frames, frames], axis=1)
        streamed = np.concatenate([earlier.streamed, streamed])
    for at in range(kept, len(streamed), step):
        part = streamed[at : at + step]
        for row in range(0, sequences.batch, row_step):
            rows = slice(row, min(row + row_step, sequences.batch))
            staged.append(_stage(layer, rows, part, sequences.blocks[rows][:, part], device))
    return Plan(past, placement_epoch, positions, frames, streamed, staged)


def _stage(
    layer: int, rows: slice, positions: Blocks, wanted: Blocks, device: torch.device
) -> Staged:
    if len(wanted) == 1:  # keep the order of the sequence: staged without a gather
        distinct, slots = wanted[0], np.arange(len(positions))[None]
    else:
        distinct, inverse = np.unique(wanted, return_inverse=True)
        slots = inverse.reshape(wanted.shape)
    on_device = torch.as_tensor(np.ascontiguousarray(slots), device=device)
    return Staged(Fetch(layer, distinct), rows, positions, on_device, len(wanted) == 1)
