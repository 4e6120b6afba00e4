"""The hot tier: frames on the compute device, a fixed share for every layer.

In exact mode every page of a layer is read at every step (a cyclic scan), so which pages are
resident does not matter but how many does. Each layer owns `frames_per_layer` frames; pages keep
theirs until released, and the tail of every sequence holds one.
"""

from __future__ import annotations

import numpy as np
import torch

from tierkv.page import Geometry
from tierkv.tiers.arena import Arena
from tierkv.tiers.frames import FramePool, Frames

FREE, TAIL = -1, -2


class HotTier:
    """Frames of all layers on `device`. Memory is taken once, by the constructor.

    Attributes:
        arenas: one `Arena` a layer.
        owner: ``[layers, frames]`` logical block in each frame, `FREE` or `TAIL`.
    """

    def __init__(self, geometry: Geometry, frames_per_layer: int, device: torch.device):
        self.geometry = geometry
        self.frames_per_layer = frames_per_layer
        self.arenas = Arena.allocate(geometry, frames_per_layer, device, geometry.layers)
        self.pools = [FramePool(0, frames_per_layer) for _ in range(geometry.layers)]
        self.owner = np.full((geometry.layers, frames_per_layer), FREE, dtype=np.int64)

    def free(self, layer: int) -> int:
        """Free frames of one layer."""
        return self.pools[layer].free

    def take(self, layer: int, owners: Frames | int, count: int) -> Frames:
        """Take `count` frames of `layer` for `owners` (block ids, or `TAIL`)."""
        frames = self.pools[layer].take(count)
        self.owner[layer, frames] = owners
        return frames

    def give(self, layer: int, frames: Frames) -> None:
        """Return frames of `layer`."""
        self.owner[layer, frames] = FREE
        self.pools[layer].give(frames)

    @property
    def pages(self) -> int:
        """Frames in use, tails included."""
        return sum(pool.used for pool in self.pools)
