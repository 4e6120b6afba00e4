"""Encode pages into frames and decode frames, on the GPU, bit for bit as `tierkv.codecs` does.

Frames lie in device memory, or in pinned host memory by a table of addresses; then only encoded
bytes cross the link.

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
WARPS = THREADS // 32
FETCH_BLOCKS = 4 * LINK_BLOCKS
"""Blocks that decode from host memory. A block waits for one head-page at a time and decodes it, so
it takes more than those that only copy: 48 of them fetched int8 at 41 GB/s, 96 at 48 (H200)."""
LINE = 128
"""Bytes in whose multiples head-pages with e4m3 codes or kept tokens lie."""
GROUP_BYTES = 4096
"""Elements of a group within one token that a warp holds in registers, in bytes."""
STATIC_SHARED = 48 << 10
"""Shared memory of a block on every GPU."""


class Layout(NamedTuple):
    """Constants of the kernels. `rows` tokens x `columns` channels make a group.

    Attributes:
        floats: codes are e4m3, without bases; a group is all of K or V.
        kept: tokens that are there a second time, in 8 bits; their keys in groups of
            `kept_k_columns` channels, their values as all values.
    """

    dtype: torch.dtype
    bits: int
    page_tokens: int
    k_dim: int
    k_rows: int
    k_columns: int
    v_dim: int
    v_rows: int
    v_columns: int
    floats: bool = False
    kept: int = 0
    kept_k_columns: int = 0

    @property
    def supported(self) -> bool:
        """Whether kernels work with it: rows of whole chunks, groups and parameters that fit."""
        if self.dtype not in DTYPES:
            return False
        size = self.dtype.itemsize
        if any(dim * size % CHUNK for dim in (self.k_dim, self.v_dim)):
            return False
        columns = max(self.k_columns, self.v_columns, self.kept_k_columns)
        parameters = sum(size for _, size in self.sections())
        return parameters <= STATIC_SHARED and (self.floats or columns * size <= GROUP_BYTES)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Macros for ``cuda/codec.cu``."""
        sizes = self._asdict()
        del sizes["dtype"]
        names = ((name.upper(), int(size)) for name, size in sizes.items())
        return (("DTYPE", DTYPES[self.dtype]), *names)

    def sections(self) -> list[tuple[int, int]]:
        """Return (bytes of codes, bytes of parameters) of each part of an encoded head-page."""
        tokens, size = self.page_tokens, self.dtype.itemsize
        parts = [
            (tokens, self.bits, self.k_dim, self.k_rows, self.k_columns),
            (tokens, self.bits, self.v_dim, self.v_rows, self.v_columns),
        ]
        if self.kept:
            parts.append((self.kept, 8, self.k_dim, 1, self.kept_k_columns))
            parts.append((self.kept, 8, self.v_dim, 1, self.v_columns))
        found = [(0, round_up(self.kept, CHUNK))]
        for rows, bits, dim, group_rows, columns in parts:
            groups = rows // group_rows * (dim // columns)
            parameters = round_up(2 * groups, CHUNK) + round_up(size * groups, CHUNK)
            found.append((round_up(rows * dim * bits // 8, CHUNK), parameters))
        if self.floats:
            found = [(codes, LINE if codes else 0) for codes, _ in found]
        return found

    @property
    def head_bytes(self) -> int:
        """Bytes of one encoded head-page."""
        size = sum(map(sum, self.sections()))
        return round_up(size, LINE) if self.floats or self.kept else size


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
    compiled = kernel("codec", "encode_pages", layout.defines, k.device, THREADS)
    sections = count * heads * (1 if layout.kept else 2)
    grid = min(blocks or compiled.blocks_at_once, -(-sections // WARPS))
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
    grid = min(blocks or compiled.blocks_at_once, count * heads)
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
    frame_heads, (heads, entries) = pages.k.shape[0], fetches.pages.shape
    device = pages.k.device
    if addresses.ndim != 1 or addresses.dtype != torch.int64 or not addresses.is_contiguous():
        raise ValueError(f"addresses must be [n] int64, got {tuple(addresses.shape)}")
    held = (addresses, fetches.pages, fetches.frames, fetches.counts, pages.k, pages.v)
    if any(tensor.device != device for tensor in held) or heads % frame_heads:
        raise ValueError(f"fetches for {heads} heads do not fit {frame_heads} on {device}")
    arguments = (
        *(np.int64(tensor.data_ptr()) for tensor in held[:4]),
        np.int32(entries),
        np.int32(heads),
        np.int32(frame_heads),
        *_destinations(pages),
    )
    compiled = kernel("codec", "decode_head_pages", layout.defines, device, THREADS)
    return Launch(compiled, (blocks, 1, 1), arguments, held)


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
