"""The hot tier: frames on the compute device, a fixed share for every layer.

In exact mode every page of a layer is read at every step (a cyclic scan), so which pages are
resident does not matter but how many does. Each layer owns `frames_per_layer` frames; pages keep
theirs until released, and the tail of every sequence holds one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from tierkv.page import Geometry
from tierkv.tiers.arena import Arena
from tierkv.tiers.device_memory import free
from tierkv.tiers.frames import FramePool, Frames

FREE, TAIL = -1, -2


class HotTier:
    """Frames of all layers on `device`. Memory is taken once, by the constructor.

    Args:
        frames_per_layer: frames that pages and tails take in every layer that is not selective.
        selective: for each layer, frames beyond its tails that selective attention manages
            itself, or None where pages have homes.
        tails: tails of a layer that selects.
        encoded: sealed pages have their homes in `DeviceFrames`; frames here are for tails, and
            for the residual window if `window` says that there is one.

    Attributes:
        arenas: one `Arena` a layer.
        selecting: K and V of the last group of layers that select, by frame:
            ``[s, kv_heads, frames, page_tokens, dim]``; None if there is none.
        owner: ``[layers, frames]`` logical block in each frame, `FREE` or `TAIL`.
        homed: layers whose sealed pages may stay for good, as they were computed.
    """

    def __init__(
        self,
        geometry: Geometry,
        frames_per_layer: int,
        device: torch.device,
        selective: Sequence[int | None] = (),
        tails: int = 1,
        *,
        encoded: bool = False,
        window: bool = False,
    ):
        self.geometry = geometry
        extra = list(selective) or [None] * geometry.layers
        plain = [layer for layer, more in enumerate(extra) if more is None]
        self.homed = [] if encoded else plain
        self._sealed = plain if window else self.homed
        taken = [frames_per_layer if more is None else tails for more in extra]
        self.frames_per_layer = min(taken)
        self.arenas: list[Arena] = []
        self.selecting: tuple[torch.Tensor, torch.Tensor] | None = None
        for (own, more), layers in itertools.groupby(zip(taken, extra, strict=True)):
            k, v = Arena.stack(geometry, own + (more or 0), device, len(list(layers)))
            self.arenas += Arena.views(geometry, k, v)
            if more is not None:
                size = (-1, geometry.page_tokens)
                self.selecting = k.unflatten(2, size), v.unflatten(2, size)
        self.pools = [FramePool(0, own) for own in taken]
        self.owner = np.full((geometry.layers, max(taken)), FREE, dtype=np.int64)

    def free(self, layer: int) -> int:
        """Free frames of one layer."""
        return self.pools[layer].free

    def homes_free(self, layer: int) -> int:
        """Frames of one layer that sealed pages may take, for good or as long as no tail or window
        needs them."""
        return self.pools[layer].free if layer in self._sealed else 0

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

    def close(self) -> None:
        """Give back all memory."""
        free(paged for arena in self.arenas for paged in (arena.k, arena.v))
