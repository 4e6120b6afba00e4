"""Move pages between pinned host frames and device frames, as tables on the device say.

The host does no work per page, and none at all when a launch is replayed in a CUDA graph:

    gather.prepare(addresses, PagedKV(arena.k_frames, arena.v_frames), slots=slots).run()
    gather.prepare(addresses, PagedKV(k, v), to_host=True).run()
    gather.prepare_fetch(addresses_of_layer, fetches, PagedKV(arena.k_frames, arena.v_frames)).run()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierkv.kernels.build import Launch, kernel
from tierkv.kernels.decode import PagedKV

THREADS = 256
BLOCKS = 24
"""Blocks of a launch: enough for the link, also beside other kernels."""
CHUNK = 16
"""Bytes that are copied at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Fetches:
    """Head-pages to copy to the device: per KV head h the first ``counts[h]`` entries.

    Attributes:
        pages: ``[kv_heads, entries]`` int32, indices into a table of host addresses.
        frames: ``[kv_heads, entries]`` int32, device frames.
        counts: ``[kv_heads]`` int32.
    """

    pages: torch.Tensor
    frames: torch.Tensor
    counts: torch.Tensor

    def __post_init__(self) -> None:
        shape = self.pages.shape
        for name, tensor in (("pages", self.pages), ("frames", self.frames)):
            if tensor.ndim != 2 or tensor.shape != shape:
                raise ValueError(f"{name} must be [kv_heads, entries], got {tuple(tensor.shape)}")
        if self.counts.shape != shape[:1]:
            raise ValueError(f"counts must be [{shape[0]}], got {tuple(self.counts.shape)}")
        for tensor in (self.pages, self.frames, self.counts):
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"fetches are contiguous int32, got {tensor.dtype}")

    @classmethod
    def allocate(cls, kv_heads: int, entries: int, device: torch.device) -> Fetches:
        """Return an empty list with room for `entries` head-pages per KV head."""
        pages = torch.zeros((kv_heads, entries), dtype=torch.int32, device=device)
        counts = torch.zeros(kv_heads, dtype=torch.int32, device=device)
        return cls(pages, torch.zeros_like(pages), counts)


def prepare(
    addresses: torch.Tensor,
    pages: PagedKV,
    *,
    slots: torch.Tensor | None = None,
    to_host: bool = False,
    blocks: int = BLOCKS,
) -> Launch:
    """Check the arguments of a copy of whole pages and compile its kernel.

    Args:
        addresses: ``[n]`` int64 on the device: where host frames begin, multiples of 16. A frame
            is pinned, mapped memory, ``[kv_heads, K | V]``. A page at address 0 is left alone.
        pages: the device frames.
        slots: ``[n]`` int32 or int64 on the device: the frame of each page; no frame twice. Frames
            0 to n - 1 by default.
        to_host: copy device frames to host frames instead.
        blocks: blocks of 256 threads.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    _check_addresses(addresses, pages.k.device, blocks)
    count, (kv_heads, frames) = len(addresses), pages.k.shape[:2]
    if slots is None and count > frames:
        raise ValueError(f"{count} addresses, but only {frames} frames")
    if slots is not None:
        _check_index("slots", slots, (count,), pages.k.device, (torch.int32, torch.int64))
    name = "scatter_pages" if to_host else "gather_pages"
    arguments = (
        np.int64(addresses.data_ptr()),
        np.int64(0 if slots is None else slots.data_ptr()),
        np.int32(0 if slots is None else slots.itemsize),
        np.int32(count),
        np.int32(kv_heads),
        *_layout(pages, count * kv_heads),
    )
    compiled = kernel("gather", name, (), pages.k.device, THREADS)
    held = (addresses, slots, pages.k, pages.v)
    return Launch(compiled, (blocks if count else 0, 1, 1), arguments, held)


def prepare_frames(
    addresses: torch.Tensor,
    frames: torch.Tensor,
    num_bytes: int,
    *,
    slots: torch.Tensor,
    to_host: bool = False,
    blocks: int = BLOCKS,
) -> Launch:
    """Check the arguments of a copy of whole frames, whatever they hold, and compile its kernel.

    Args:
        addresses: as in `prepare`.
        frames: ``[frames, frame_bytes]`` uint8 on the device, contiguous.
        num_bytes: of each frame that are copied, rounded up to `CHUNK`.
        slots: ``[n]`` int32 or int64 on the device: the device frame of each page.
        to_host: copy device frames to host frames instead.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    size, count = -(-num_bytes // CHUNK), len(addresses)
    fits = frames.ndim == 2 and frames.dtype == torch.uint8 and frames.is_contiguous()
    if not fits or frames.shape[1] % CHUNK or frames.data_ptr() % CHUNK:
        raise ValueError(
            f"frames must be contiguous [n, bytes] uint8 in whole chunks of {CHUNK} bytes, got "
            f"{tuple(frames.shape)} {frames.dtype} strides {frames.stride()}"
        )
    if not 0 < size * CHUNK <= frames.shape[1]:
        raise ValueError(f"{num_bytes} bytes of frames of {frames.shape[1]}")
    _check_addresses(addresses, frames.device, blocks)
    _check_index("slots", slots, (count,), frames.device, (torch.int32, torch.int64))
    _check_count(count, size)
    arguments = (
        np.int64(addresses.data_ptr()),
        np.int64(slots.data_ptr()),
        np.int32(slots.itemsize),
        np.int32(count),
        np.int32(1),
        *map(np.int64, (frames.data_ptr(), 0, frames.shape[1] // CHUNK)),
        *map(np.int64, (0, 0, 0)),
        *map(np.int32, (size, 0)),
    )
    name = "scatter_pages" if to_host else "gather_pages"
    compiled = kernel("gather", name, (), frames.device, THREADS)
    return Launch(compiled, (blocks if count else 0, 1, 1), arguments, (addresses, slots, frames))


def prepare_fetch(
    addresses: torch.Tensor, fetches: Fetches, pages: PagedKV, *, blocks: int = BLOCKS
) -> Launch:
    """Check the arguments of a copy of single head-pages to the device; their number is read there.

    Args:
        addresses: ``[capacity]`` int64 on the device: the host frame of each page that `fetches`
            may name, as in `prepare`.
        fetches: which head-pages go to which frames; no frame twice for one KV head. Of several
            sequences, the KV heads of one follow those of another.
        pages: the device frames.
        blocks: blocks of 256 threads.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    _check_addresses(addresses, pages.k.device, blocks)
    frame_heads, (kv_heads, entries) = pages.k.shape[0], fetches.pages.shape
    if kv_heads % frame_heads:
        raise ValueError(
            f"pages of the fetches are of {kv_heads} KV heads, frames of {frame_heads}"
        )
    for name, tensor in (("pages", fetches.pages), ("frames", fetches.frames)):
        _check_index(f"{name} of the fetches", tensor, (kv_heads, entries), pages.k.device)
    _check_index("counts of the fetches", fetches.counts, (kv_heads,), pages.k.device)
    held = (addresses, fetches.pages, fetches.frames, fetches.counts, pages.k, pages.v)
    arguments = (
        *(np.int64(tensor.data_ptr()) for tensor in held[:4]),
        np.int32(entries),
        np.int32(kv_heads),
        np.int32(frame_heads),
        *_layout(pages, kv_heads * entries),
    )
    compiled = kernel("gather", "fetch_head_pages", (), pages.k.device, THREADS)
    return Launch(compiled, (blocks, 1, 1), arguments, held)


def _check_addresses(addresses: torch.Tensor, device: torch.device, blocks: int) -> None:
    if addresses.ndim != 1:
        raise ValueError(f"addresses must be [n], got {tuple(addresses.shape)}")
    _check_index("addresses", addresses, addresses.shape, device, (torch.int64,))
    if blocks < 1:
        raise ValueError(f"{blocks} blocks")


def _check_index(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = (torch.int32,),
) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {shape} {' or '.join(map(str, dtypes))}, "
            f"got {tuple(tensor.shape)} {tensor.dtype} strides {tensor.stride()}"
        )
    if tensor.device != device:
        raise ValueError(f"the frames are on {device}, {name} on {tensor.device}")


def _layout(pages: PagedKV, head_pages: int) -> tuple[Any, ...]:
    """Addresses, strides and sizes of the frames, the latter in chunks."""
    arguments: list[Any] = []
    sizes = []
    for tensor in (pages.k, pages.v):
        strides = (stride * tensor.itemsize // CHUNK for stride in tensor.stride()[:2])
        arguments += [np.int64(tensor.data_ptr()), *map(np.int64, strides)]
        sizes.append(tensor.shape[2] * tensor.shape[3] * tensor.itemsize // CHUNK)
    _check_count(head_pages, sum(sizes))
    return (*arguments, *map(np.int32, sizes))


def _check_count(runs: int, chunks: int) -> None:
    if runs * chunks >= 1 << 31:
        raise ValueError(f"{runs} runs of {chunks * CHUNK} bytes are too many at once")
