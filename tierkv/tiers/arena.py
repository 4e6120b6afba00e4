"""Token slots on the compute device, in the layout that attention reads without a copy.

An arena holds frames of one layer side by side: K is ``[kv_heads, frames * page_tokens, k_dim]``
and V likewise. A head-page's K and its V are each one contiguous run, and neighbouring frames of
one head are contiguous too, so a run of frames is a plain view for any attention kernel.
"""

from __future__ import annotations

import torch

from tierkv.page import Geometry
from tierkv.tiers.frames import Frames, runs


class Arena:
    """`frames` frames of one layer, or of a staging buffer.

    Attributes:
        k: ``[kv_heads, frames * page_tokens, k_dim]``.
        v: ``[kv_heads, frames * page_tokens, v_dim]``.
    """

    def __init__(self, geometry: Geometry, k: torch.Tensor, v: torch.Tensor):
        self.page_tokens = geometry.page_tokens
        self.frames = k.shape[1] // geometry.page_tokens
        self.k, self.v = k, v
        # The same memory by frame: [kv_heads, frames, page_tokens, dim].
        self.k_frames = k.unflatten(1, (self.frames, geometry.page_tokens))
        self.v_frames = v.unflatten(1, (self.frames, geometry.page_tokens))

    @classmethod
    def allocate(
        cls, geometry: Geometry, frames: int, device: torch.device, count: int = 1
    ) -> list[Arena]:
        """Return `count` arenas of `frames` frames each, in two allocations."""
        return cls.views(geometry, *cls.stack(geometry, frames, device, count))

    @staticmethod
    def stack(
        geometry: Geometry, frames: int, device: torch.device, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory of `count` arenas, ``[count, kv_heads, frames * page_tokens, dim]``."""
        shape = (count, geometry.kv_heads, frames * geometry.page_tokens)
        k = torch.empty((*shape, geometry.k_dim), dtype=geometry.dtype, device=device)
        v = torch.empty((*shape, geometry.v_dim), dtype=geometry.dtype, device=device)
        return k, v

    @classmethod
    def views(cls, geometry: Geometry, k: torch.Tensor, v: torch.Tensor) -> list[Arena]:
        """Return the arenas of a `stack`."""
        return [cls(geometry, k[i], v[i]) for i in range(len(k))]

    def write_tokens(self, slot: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write consecutive tokens from token slot `slot` on. k, v: ``[kv_heads, tokens, dim]``."""
        stop = slot + k.shape[1]
        self.k[:, slot:stop].copy_(k)
        self.v[:, slot:stop].copy_(v)

    def span(self, start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View `tokens` tokens from frame `start` on as ``[1, kv_heads, tokens, dim]``."""
        first = start * self.page_tokens
        last = first + tokens
        return self.k[None, :, first:last], self.v[None, :, first:last]

    def gather(self, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy frames of several sequences. frames: ``[batch, n]`` int64 on the arena's device.

        Returns K and V as ``[batch, kv_heads, n * page_tokens, dim]`` (V strided like K).
        """
        batch, count = frames.shape
        index = frames.reshape(-1)
        out = []
        for paged in (self.k_frames, self.v_frames):
            picked = paged.index_select(1, index)
            picked = picked.view(picked.shape[0], batch, count * self.page_tokens, -1)
            out.append(picked.transpose(0, 1))
        return out[0], out[1]

    def pages(self, frames: Frames) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages in `frames` as ``[kv_heads, n, page_tokens, dim]``."""
        first, count = int(frames[0]), len(frames)
        if len(runs(frames)) == 1:
            return self.k_frames[:, first : first + count], self.v_frames[:, first : first + count]
        index = torch.as_tensor(frames, device=self.k.device)
        return self.k_frames.index_select(1, index), self.v_frames.index_select(1, index)
