"""Frames of encoded pages on the compute device: a fixed share for every layer.

They hold the same bytes as warm frames and are numbered before those (see `WarmTier`), so that a
page whose frame is here is read, moved and saved like any other encoded one, without the link.
"""

from __future__ import annotations

import numpy as np
import torch

from tierkv.tiers.frames import FramePool, Frames


class DeviceFrames:
    """`share` frames of each layer, ``layer * share`` and the following. Memory is taken at once.

    Attributes:
        memory: ``[layers * share, frame_bytes]`` uint8 on the device.
        pools: one a layer.
    """

    def __init__(self, layers: int, share: int, frame_bytes: int, device: torch.device):
        self.share = share
        self.memory = torch.empty((layers * share, frame_bytes), dtype=torch.uint8, device=device)
        self.pools = [FramePool(layer * share, (layer + 1) * share) for layer in range(layers)]

    def __len__(self) -> int:
        return len(self.memory)

    def free(self, layer: int) -> int:
        """Free frames of one layer."""
        return self.pools[layer].free

    def take(self, layer: int, count: int) -> Frames:
        """Take `count` frames of a layer. The caller checks `free` first."""
        return self.pools[layer].take(count)

    def give(self, layer: int, frames: Frames) -> None:
        """Return frames of a layer."""
        self.pools[layer].give(frames)

    @property
    def used(self) -> int:
        """Frames in use."""
        return sum(pool.used for pool in self.pools)

    def span(self, frames: Frames) -> torch.Tensor:
        """View a run of consecutive frames as ``[n, frame_bytes]``."""
        return self.memory[int(frames[0]) : int(frames[0]) + len(frames)]

    def addresses(self, frames: Frames) -> Frames:
        """Return where frames begin in the device's memory."""
        return np.int64(self.memory.data_ptr()) + frames * self.memory.shape[1]
