"""Attention of one new token per sequence over paged K and V, where they lie.

Several launches (resident pages, each staged block) fill slots of one `Partials`; one merge at the
end makes the output of the layer:

    slot = decode.attend(query, resident, partials, slot=0, tokens=..., scale=...)
    slot = decode.attend(query, staged, partials, slot=slot, tokens=..., scale=...)
    merge(partials, slot, out)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tierkv.kernels.build import DTYPES, Kernel, kernel, shared_memory
from tierkv.kernels.decode_blocks import TILE, Layout, choose_layout, choose_splits
from tierkv.kernels.merge import Partials
from tierkv.page import Geometry

MAX_GROUP = 16
"""Query heads per KV head."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """Frames as the kernel reads them: views of an arena or of staged raw frames.

    Attributes:
        k: ``[kv_heads, frames, page_tokens, k_dim]``; a head-page's K is one contiguous run.
        v: ``[kv_heads, frames, page_tokens, v_dim]`` likewise.
    """

    k: torch.Tensor
    v: torch.Tensor

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(f"K {tuple(k.shape)} and V {tuple(v.shape)} are no frames")
        if k.dtype not in DTYPES or v.dtype != k.dtype or v.device != k.device:
            raise ValueError(f"K is {k.dtype} on {k.device}, V {v.dtype} on {v.device}")
        tokens = k.shape[2]
        if tokens % TILE or tokens & (tokens - 1):
            raise ValueError(f"page_tokens must be a power of two from {TILE} on, got {tokens}")
        for name, tensor in (("K", k), ("V", v)):
            dim, size = tensor.shape[3], tensor.itemsize
            if dim * size % 16:
                raise ValueError(f"{name} rows of {dim} {tensor.dtype} are not whole 16 bytes")
            if tensor.stride(3) != 1 or tensor.stride(2) != dim:
                raise ValueError(f"{name}'s head-pages are not contiguous: {tensor.stride()}")
            if any(value * size % 16 for value in (*tensor.stride()[:2], tensor.storage_offset())):
                raise ValueError(f"{name}'s frames are not aligned to 16 bytes: {tensor.stride()}")
            if tensor.data_ptr() % 16:
                raise ValueError(f"{name} does not start at a multiple of 16 bytes")

    @property
    def sizes(self) -> Sizes:
        """See `Pages`."""
        heads, frames, page_tokens, k_dim = self.k.shape
        return Sizes(heads, frames, page_tokens, k_dim, self.v.shape[3], self.k.dtype)

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """See `Pages`."""
        return self.k, self.v

    @property
    def places(self) -> tuple[int, ...]:
        """See `Pages`."""
        k, v = self.k, self.v
        return k.data_ptr(), *k.stride()[:2], v.data_ptr(), *v.stride()[:2]

    @property
    def tile_bytes(self) -> int:
        """See `Pages`."""
        return 0

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """See `Pages`."""
        return ()


class Sizes(NamedTuple):
    """What frames hold."""

    kv_heads: int
    frames: int
    page_tokens: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype


class Pages(Protocol):
    """Frames that the kernel reads: raw ones (`PagedKV`) or encoded ones (`EncodedKV`)."""

    @property
    def sizes(self) -> Sizes:
        """What the frames hold."""

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """The tensors they lie in."""

    @property
    def places(self) -> tuple[int, ...]:
        """Addresses and strides as the kernel takes them."""

    @property
    def tile_bytes(self) -> int:
        """Bytes of an encoded tile; 0 where pages are raw."""

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """Further macros."""


def supports(geometry: Geometry, heads: int, device: torch.device) -> bool:
    """Say whether the kernel can be compiled for a model's pages and query heads."""
    group, rest = divmod(heads, geometry.kv_heads)
    size = geometry.dtype.itemsize
    if rest or not 1 <= group <= MAX_GROUP or geometry.dtype not in DTYPES:
        return False
    if geometry.k_dim * size % 16 or geometry.v_dim * size % 16:
        return False
    block, processor = shared_memory(device)
    try:
        choose_layout(
            geometry.k_dim, geometry.v_dim, size, group,
            block_limit=block, processor_limit=processor,
        )  # fmt: skip
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Checked arguments of one launch. `run` may be repeated while the tensors stay in place.

    Attributes:
        next_slot: first slot of the partials that the launch leaves free.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    next_slot: int
    held: tuple[torch.Tensor | None, ...]  # the arguments are bare addresses

    def run(self) -> None:
        """Enqueue on torch's current stream. Run once before capturing it in a CUDA graph."""
        self.kernel.launch(self.grid, self.arguments)


def attend(query: torch.Tensor, pages: Pages, partials: Partials, **arguments: Any) -> int:
    """Prepare and run once; see `prepare`. Return the next free slot."""
    launch = prepare(query, pages, partials, **arguments)
    launch.run()
    return launch.next_slot


def prepare(
    query: torch.Tensor,
    pages: Pages,
    partials: Partials,
    *,
    slot: int,
    tokens: int | torch.Tensor,
    scale: float,
    softcap: float | None = None,
    table: torch.Tensor | None = None,
    first_frame: int = 0,
    row_frames: int = 0,
    rows: slice | None = None,
    first_visible: torch.Tensor | None = None,
    position: int = 0,
    splits: int | None = None,
    max_splits: int | None = None,
) -> Launch:
    """Check the arguments of a launch and compile its kernel.

    Args:
        query: ``[batch, heads, k_dim]``; query head h reads KV head ``h // group``.
        pages: where the frames are.
        partials: receives one part per split, from slot `slot` on.
        tokens: tokens to see, for all sequences or as ``[rows]`` or ``[rows, kv_heads]`` int32 on
            the device, read when the launch runs. The last page may be partial.
        scale: factor on the scores before the soft cap.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        table: ``[rows, pages]`` int32 or int64 frames in order, or ``[rows, kv_heads, pages]`` if
            each KV head has its own. Without one, sequence r of `rows` has frames
            ``first_frame + r * row_frames`` and the following.
        rows: sequences of the batch that take part; the others see nothing. All by default.
        first_visible: ``[rows]`` int32, first token position that is not padding.
        position: position of the first token here. A sequence hides the tokens that come before
            `first_visible` if tokens here count from `position` without gaps.
        splits: parts to make; chosen to fill the device by default, but at most `max_splits`.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    kv_heads, frames, page_tokens, k_dim, v_dim, dtype = pages.sizes
    device = query.device
    if query.ndim != 3 or query.shape[2] != k_dim or query.dtype != dtype:
        raise ValueError(
            f"query must be [batch, heads, {k_dim}] {dtype}, got {tuple(query.shape)} {query.dtype}"
        )
    batch, heads = query.shape[:2]
    group = heads // kv_heads
    if heads % kv_heads or not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{heads} query heads on {kv_heads} KV heads; groups are 1 to {MAX_GROUP}")
    if query.stride(2) != 1:
        raise ValueError(f"the query's last dim must be dense, strides {query.stride()}")
    first_row, stop_row, _ = slice(0, batch).indices(batch) if rows is None else rows.indices(batch)
    count = stop_row - first_row
    if count < 1 or (rows is not None and rows.step not in (None, 1)):
        raise ValueError(f"rows {rows} of a batch of {batch}")
    if partials.out.shape[1:] != (batch, heads, v_dim):
        raise ValueError(f"partials {tuple(partials.out.shape)} for {(batch, heads, v_dim)}")
    if table is not None and (
        table.dtype not in (torch.int32, torch.int64)
        or table.shape[:-1] not in ((count,), (count, kv_heads))
        or table.stride(-1) != 1
    ):
        raise ValueError(
            f"table must be [{count}, pages] or [{count}, {kv_heads}, pages] int32 or int64, dense "
            f"along pages, got {tuple(table.shape)} {table.dtype} strides {table.stride()}"
        )
    lengths = tokens if isinstance(tokens, torch.Tensor) else None
    per_row, per_head = ((count,),), ((count,), (count, kv_heads))
    for name, tensor, shapes in (
        ("tokens", lengths, per_head),
        ("first_visible", first_visible, per_row),
    ):
        if tensor is not None and (
            tensor.dtype != torch.int32 or tensor.shape not in shapes or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be contiguous int32 {' or '.join(map(str, shapes))}, "
                f"got {tuple(tensor.shape)} {tensor.dtype}"
            )
    held = (query, *pages.memory, table, lengths, first_visible, partials.out, partials.lse)
    for tensor in held:
        if tensor is not None and tensor.device != device:
            raise ValueError(f"tensors must be on one device: {device} and {tensor.device}")
    if table is None:
        room = (frames - first_frame - (count - 1) * row_frames) * page_tokens
    else:
        room = table.shape[-1] * page_tokens
    if first_frame < 0 or row_frames < 0 or (lengths is None and not 0 <= tokens <= room):
        raise ValueError(
            f"{tokens} tokens from frame {first_frame}, {row_frames} frames a sequence, do not fit "
            f"the {room} tokens that are there"
        )
    compiled = _compile(pages, group, device)
    if splits is None:
        most = int(tokens) if lengths is None else room
        splits = choose_splits(most, count * kv_heads, compiled.blocks_at_once)
        splits = splits if max_splits is None else min(splits, max_splits)
    if splits < 1 or slot < 0 or slot + splits > partials.slots:
        raise ValueError(f"{splits} splits from slot {slot} on, partials have {partials.slots}")
    table_stride = row_frames if table is None else table.stride(0)
    arguments = (
        np.int64(query.data_ptr()),
        np.int64(query.stride(0)),
        np.int64(query.stride(1)),
        *map(np.int64, pages.places),
        np.int64(_address(table)),
        np.int32(0 if table is None else table.itemsize),
        np.int64(table_stride),
        np.int64(0 if table is None or table.ndim == 2 else table.stride(1)),
        np.int64(first_frame),
        np.int64(_address(lengths)),
        np.int32(1 if lengths is None or lengths.ndim == 1 else kv_heads),
        np.int32(tokens if lengths is None else 0),
        np.int64(_address(first_visible)),
        np.int32(position),
        np.int32(first_row),
        np.int32(count),
        np.float32(scale),
        np.float32(softcap or 0.0),
        np.int64(partials.out.data_ptr()),
        np.int64(partials.lse.data_ptr()),
        np.int32(slot),
    )
    return Launch(compiled, (splits, kv_heads, batch), arguments, slot + splits, held)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def constants(
    dtype: torch.dtype, k_dim: int, v_dim: int, group: int, page_tokens: int, layout: Layout
) -> tuple[tuple[str, int], ...]:
    """Return the macros that ``cuda/decode.cu`` is compiled with."""
    return (
        ("DTYPE", DTYPES[dtype]),
        ("K_DIM", k_dim),
        ("V_DIM", v_dim),
        ("GROUP", group),
        ("PAGE_TOKENS", page_tokens),
        ("WARPS", layout.warps),
        ("STAGES", layout.stages),
        ("SHARED_BYTES", layout.shared_bytes),
    )


def _compile(pages: Pages, group: int, device: torch.device) -> Kernel:
    _, _, page_tokens, k_dim, v_dim, dtype = pages.sizes
    block_limit, processor_limit = shared_memory(device)
    layout = choose_layout(
        k_dim, v_dim, dtype.itemsize, group, block_limit=block_limit,
        processor_limit=processor_limit, tile_bytes=pages.tile_bytes,
    )  # fmt: skip
    defines = constants(dtype, k_dim, v_dim, group, page_tokens, layout) + pages.defines
    return kernel("decode", "attend_pages", defines, device, layout.warps * 32, layout.shared_bytes)
