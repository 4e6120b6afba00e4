"""Encoded pages as the decode attention kernel reads them: tile by tile, decoded in shared memory.

    decode.attend(query, EncodedKV(layout, kv_heads, frames), partials, slot=0, tokens=..., ...)

For all codecs but those with tokens in more bits (``int4-importance``); what a tile decodes to is,
bit for bit, what `tierkv.kernels.codec` lays out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierkv.kernels.codec import Layout
from tierkv.kernels.decode import Sizes
from tierkv.kernels.decode_blocks import TILE
from tierkv.kernels.gather import CHUNK


def reads(layout: Layout | None) -> bool:
    """Say whether attention can read pages of a codec where they lie."""
    if layout is None or not layout.supported or layout.kept:
        return False
    rows = (layout.k_rows, layout.v_rows)
    whole = layout.floats or all(count == 1 or count % TILE == 0 for count in rows)
    return whole and layout.k_dim % 8 == 0 and layout.v_dim % 8 == 0


@dataclass(frozen=True, slots=True, eq=False)
class EncodedKV:
    """Frames of encoded pages on the device.

    Attributes:
        layout: how the codec lays out a head-page; see `reads`.
        frames: ``[frames, frame_bytes]`` uint8, contiguous.
    """

    layout: Layout
    kv_heads: int
    frames: torch.Tensor

    def __post_init__(self) -> None:
        frames, layout = self.frames, self.layout
        if not reads(layout):
            raise ValueError(f"attention does not read pages of {layout}")
        fits = frames.ndim == 2 and frames.dtype == torch.uint8 and frames.is_contiguous()
        if not fits or frames.shape[1] % CHUNK or frames.data_ptr() % CHUNK:
            raise ValueError(f"frames must be [n, bytes] uint8 in whole chunks, got {frames.shape}")
        if frames.shape[1] < self.kv_heads * layout.head_bytes:
            raise ValueError(
                f"{self.kv_heads} head-pages take {self.kv_heads * layout.head_bytes} bytes, a "
                f"frame has {frames.shape[1]}"
            )

    @property
    def sizes(self) -> Sizes:
        """See `tierkv.kernels.decode.Pages`."""
        layout = self.layout
        return Sizes(
            self.kv_heads, len(self.frames), layout.page_tokens, layout.k_dim, layout.v_dim,
            layout.dtype,
        )  # fmt: skip

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """See `tierkv.kernels.decode.Pages`."""
        return (self.frames,)

    @property
    def places(self) -> tuple[int, ...]:
        """See `tierkv.kernels.decode.Pages`."""
        head, frame = self.layout.head_bytes // CHUNK, self.frames.shape[1] // CHUNK
        return self.frames.data_ptr(), head, frame, 0, 0, 0

    @property
    def tile_bytes(self) -> int:
        """See `tierkv.kernels.decode.Pages`."""
        layout = self.layout
        if layout.floats:
            return TILE * (layout.k_dim + layout.v_dim) + 2 * CHUNK
        rows = min(layout.k_rows, TILE)
        tile = layout._replace(page_tokens=TILE, k_rows=rows)
        return sum(map(sum, tile.sections()))

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """See `tierkv.kernels.decode.Pages`."""
        ours = {"DTYPE", "K_DIM", "V_DIM", "PAGE_TOKENS"}
        return tuple(define for define in self.layout.defines if define[0] not in ours)
