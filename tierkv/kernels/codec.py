"""Encode pages into frames and decode frames, on the GPU: integers with a scale per group.

Frames lie in device memory, or in pinned host memory by a table of addresses; then only encoded
bytes cross the link. The arithmetic is that of `tierkv.codecs.affine`, bit for bit.

    codec.prepare_encode(layout, k, v, frames).run()
    codec.prepare_decode(layout, frames, PagedKV(arena.k_frames, arena.v_frames)).run()
    codec.prepare_fetch(layout, addresses_of_layer, fetches, PagedKV(...)).run()
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from tierkv.kernels.build import DTYPES, Launch, kernel
from tierkv.kernels.decode import PagedKV
from tierkv.kernels.gather import BLOCKS as LINK_BLOCKS
from tierkv.kernels.gather import CHUNK, Fetches
from tierkv.units import round_up

THREADS = 256
BLOCKS_PER_PROCESSOR = 8
"""Blocks of a launch between frames and pages that both lie in device memory."""
FETCH_BLOCKS = 2 * LINK_BLOCKS
"""Blocks that decode from host memory: a block has one head-page under way, about 9 KiB of
8-bit codes, less than a block that only copies."""
SLAB_TOKENS = 32
STATIC_SHARED, DYNAMIC_SHARED = 48 << 10, 96 << 10
"""Shared memory of a block on every GPU: declared in the source, and asked for by a launch."""


class Layout(NamedTuple):
    """Constants of the kernels. `rows` tokens x `columns` channels make a group."""

    dtype: torch.dtype
    bits: int
    page_tokens: int
    k_dim: int
    k_rows: int
    k_columns: int
    v_dim: int
    v_rows: int
    v_columns: int

    @property
    def supported(self) -> bool:
        """Whether kernels can work with it: rows of whole chunks that fit shared memory."""
        if self.dtype not in DTYPES:
            return False
        rows = (dim * self.dtype.itemsize for dim in (self.k_dim, self.v_dim))
        parameters = sum(size for _, size in self.sections())
        fits = parameters <= STATIC_SHARED and self.shared_bytes <= DYNAMIC_SHARED
        return fits and not any(row % CHUNK for row in rows)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Macros for ``cuda/codec.cu``."""
        sizes = self._asdict()
        del sizes["dtype"]
        names = ((name.upper(), int(size)) for name, size in sizes.items())
        return (("DTYPE", DTYPES[self.dtype]), *names)

    def sections(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (bytes of a slab of tokens, bytes of scales and bases) of K and of V."""
        found = []
        for dim, rows, columns in (self[3:6], self[6:9]):
            groups = self.page_tokens // rows * (dim // columns)
            slab = rows if rows > 1 else min(SLAB_TOKENS, self.page_tokens)
            size = self.dtype.itemsize
            parameters = round_up(2 * groups, CHUNK) + round_up(size * groups, CHUNK)
            found.append((slab * dim * size, parameters))
        return found[0], found[1]

    @property
    def shared_bytes(self) -> int:
        """Shared memory that encoding takes."""
        return max(slab + parameters for slab, parameters in self.sections())

    @property
    def head_bytes(self) -> int:
        """Bytes of one encoded head-page."""
        codes = self.page_tokens * (self.k_dim + self.v_dim) * self.bits // 8
        return codes + sum(parameters for _, parameters in self.sections())


def whole_chunks(x: torch.Tensor) -> bool:
    """Whether every row of pages ``[kv_heads, n, page_tokens, dim]`` begins at a whole chunk."""
    strides = (stride * x.itemsize % CHUNK for stride in x.stride()[:3])
    return x.stride(3) == 1 and not x.data_ptr() % CHUNK and not any(strides)


def prepare_encode(
    layout: Layout,
    k: torch.Tensor,
    v: torch.Tensor,
    frames: torch.Tensor,
    *,
    blocks: int | None = None,
) -> Launch:
    """Check the arguments of an encoding and compile its kernel.

    Args:
        k, v: ``[kv_heads, n, page_tokens, dim]`` on the device, the last dim contiguous.
        frames: ``[n, frame_bytes]`` uint8 on the device; or ``[n]`` int64, addresses of pinned
            host frames, where 0 leaves a page out.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    heads, count = k.shape[0], k.shape[1]
    sources: list[Any] = []
    for name, x, dim in (("K", k, layout.k_dim), ("V", v, layout.v_dim)):
        if x.shape != (heads, count, layout.page_tokens, dim) or x.dtype != layout.dtype:
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype}, not pages of {layout}")
        strides = [stride * x.itemsize for stride in x.stride()[:3]]
        if not whole_chunks(x):
            raise ValueError(f"{name}'s rows are not whole chunks: strides {x.stride()}")
        sources += [np.int64(x.data_ptr()), *(np.int64(stride // CHUNK) for stride in strides)]
    arguments = (*_frames(layout, frames, count, heads), np.int32(count), np.int32(heads), *sources)
    compiled = kernel(
        "codec", "encode_pages", layout.defines, k.device, THREADS, layout.shared_bytes
    )
    grid = min(blocks or _blocks(k.device), count * heads)
    return Launch(compiled, (grid, 1, 1), arguments, (frames, k, v))


def prepare_decode(
    layout: Layout,
    frames: torch.Tensor,
    pages: PagedKV,
    *,
    slots: torch.Tensor | None = None,
    blocks: int | None = None,
) -> Launch:
    """Check the arguments of a decoding of whole pages and compile its kernel.

    Args:
        frames: as in `prepare_encode`.
        pages: the device frames.
        slots: ``[n]`` int32 or int64: the device frame of each page; 0 to n - 1 by default.

    Raises:
        ValueError, KernelsUnavailableError: as `prepare_encode`.
    """
    _check_pages(layout, pages)
    count, heads = len(frames), pages.k.shape[0]
    if slots is None and count > pages.k.shape[1]:
        raise ValueError(f"{count} frames into {pages.k.shape[1]}")
    if slots is not None and (
        slots.shape != (count,)
        or slots.dtype not in (torch.int32, torch.int64)
        or not slots.is_contiguous()
        or slots.device != pages.k.device
    ):
        raise ValueError(f"slots must be [{count}] integers on {pages.k.device}, got {slots}")
    arguments = (
        *_frames(layout, frames, count, heads),
        np.int64(0 if slots is None else slots.data_ptr()),
        np.int32(0 if slots is None else slots.itemsize),
        np.int32(count),
        np.int32(heads),
        *_destinations(pages),
    )
    compiled = kernel("codec", "decode_pages", layout.defines, pages.k.device, THREADS)
    grid = min(blocks or _blocks(pages.k.device), count * heads)
    return Launch(compiled, (grid, 1, 1), arguments, (frames, slots, pages.k, pages.v))


def prepare_fetch(
    layout: Layout,
    addresses: torch.Tensor,
    fetches: Fetches,
    pages: PagedKV,
    *,
    blocks: int = FETCH_BLOCKS,
) -> Launch:
    """Check the arguments of a fetch of encoded head-pages; their number is read on the device.

    Arguments and errors as `tierkv.kernels.gather.prepare_fetch`.
    """
    _check_pages(layout, pages)
    heads, entries = pages.k.shape[0], fetches.pages.shape[1]
    device = pages.k.device
    if addresses.ndim != 1 or addresses.dtype != torch.int64 or not addresses.is_contiguous():
        raise ValueError(f"addresses must be [n] int64, got {tuple(addresses.shape)}")
    held = (addresses, fetches.pages, fetches.frames, fetches.counts, pages.k, pages.v)
    if any(tensor.device != device for tensor in held) or fetches.pages.shape[0] != heads:
        raise ValueError(
            f"fetches for {fetches.pages.shape[0]} heads do not fit {heads} on {device}"
        )
    arguments = (
        *(np.int64(tensor.data_ptr()) for tensor in held[:4]),
        np.int32(entries),
        np.int32(heads),
        *_destinations(pages),
    )
    compiled = kernel("codec", "decode_head_pages", layout.defines, device, THREADS)
    return Launch(compiled, (blocks, 1, 1), arguments, held)


def _blocks(device: torch.device) -> int:
    if device.type != "cuda":
        return BLOCKS_PER_PROCESSOR
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return int(BLOCKS_PER_PROCESSOR * processors)


def _check_pages(layout: Layout, pages: PagedKV) -> None:
    wanted = (layout.page_tokens, layout.k_dim, layout.v_dim, layout.dtype)
    found = (*pages.k.shape[2:], pages.v.shape[3], pages.k.dtype)
    if found != wanted:
        raise ValueError(f"frames of {found} are not those of {layout}")


def _frames(layout: Layout, frames: torch.Tensor, count: int, heads: int) -> tuple[Any, ...]:
    """Check encoded frames; return their addresses, or where they begin and how far apart."""
    if len(frames) != count or not frames.is_contiguous():
        raise ValueError(f"frames must be {count}, contiguous, got {tuple(frames.shape)}")
    if frames.ndim == 1 and frames.dtype == torch.int64:
        return np.int64(frames.data_ptr()), np.int64(0), np.int64(0)
    fits = frames.ndim == 2 and frames.dtype == torch.uint8
    if not fits or frames.shape[1] % CHUNK or frames.data_ptr() % CHUNK:
        raise ValueError(f"frames must be [n, bytes] uint8 in whole chunks, got {frames.shape}")
    if frames.shape[1] < heads * layout.head_bytes:
        raise ValueError(
            f"a page takes {heads * layout.head_bytes} bytes, a frame has {frames.shape[1]}"
        )
    return np.int64(0), np.int64(frames.data_ptr()), np.int64(frames.shape[1] // CHUNK)


def _destinations(pages: PagedKV) -> list[Any]:
    found: list[Any] = []
    for tensor in (pages.k, pages.v):
        strides = (stride * tensor.itemsize // CHUNK for stride in tensor.stride()[:2])
        found += [np.int64(tensor.data_ptr()), *map(np.int64, strides)]
    return found
