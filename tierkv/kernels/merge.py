"""Combine attention over disjoint sets of tokens in one launch; `attention.merge` is the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tierkv.kernels.build import DTYPES, kernel

THREADS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Partials:
    """Room for attention over parts of the tokens, slot by slot; one allocation serves all layers.

    Attributes:
        out: ``[slots, batch, heads, v_dim]`` float32, normalised; not read where `lse` is -inf.
        lse: ``[slots, batch, heads]`` float32, natural logarithm; -inf where nothing was seen.
    """

    out: torch.Tensor
    lse: torch.Tensor

    def __post_init__(self) -> None:
        for tensor in (self.out, self.lse):
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError("partials must be contiguous float32 tensors")
        if self.out.ndim != 4 or self.out.shape[:3] != self.lse.shape:
            raise ValueError(f"partials {tuple(self.out.shape)} and {tuple(self.lse.shape)}")

    @classmethod
    def allocate(
        cls, slots: int, batch: int, heads: int, v_dim: int, device: torch.device
    ) -> Partials:
        """Return uninitialised room."""
        out = torch.empty((slots, batch, heads, v_dim), dtype=torch.float32, device=device)
        return cls(out, torch.empty((slots, batch, heads), dtype=torch.float32, device=device))

    @property
    def slots(self) -> int:
        """Number of parts that fit."""
        return self.out.shape[0]


def merge(
    partials: Partials,
    slots: int,
    out: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge the first `slots` slots into `out`; no allocation, no synchronisation.

    Args:
        out: ``[batch, heads, v_dim]`` of any supported dtype; only the last dim must be dense.
        lse: ``[batch, heads]`` float32, receives the log-sum-exp without the sinks.
        sinks: ``[heads]`` float32 sink logits (gpt-oss): they only scale `out`.
    """
    _, batch, heads, v_dim = partials.out.shape
    if not 1 <= slots <= partials.slots:
        raise ValueError(f"{slots} slots to merge, {partials.slots} exist")
    if out.dtype not in DTYPES or out.shape != (batch, heads, v_dim) or out.stride(2) != 1:
        raise ValueError(
            f"out must be [{batch}, {heads}, {v_dim}] with a dense last dim, "
            f"got {out.dtype} {tuple(out.shape)} strides {out.stride()}"
        )
    if v_dim % 4 or v_dim > 4 * THREADS:
        raise ValueError(f"v_dim must be a multiple of 4 up to {4 * THREADS}, got {v_dim}")
    if out.data_ptr() % (4 * out.itemsize) or out.stride(0) % 4 or out.stride(1) % 4:
        raise ValueError(f"rows of out must be aligned to 4 elements, strides {out.stride()}")
    for name, tensor, shape in (("lse", lse, (batch, heads)), ("sinks", sinks, (heads,))):
        if tensor is not None and (
            tensor.dtype != torch.float32 or tensor.shape != shape or not tensor.is_contiguous()
        ):
            raise ValueError(f"{name} must be contiguous float32 {shape}")
    for tensor in (partials.lse, out, lse, sinks):
        if tensor is not None and tensor.device != partials.out.device:
            raise ValueError(f"tensors on {tensor.device} and {partials.out.device}")
    defines = (("DTYPE", DTYPES[out.dtype]), ("V_DIM", v_dim))
    kernel("merge", "merge_slots", defines, out.device, THREADS).launch(
        (heads, batch, 1),
        (
            np.int64(partials.out.data_ptr()),
            np.int64(partials.lse.data_ptr()),
            np.int32(slots),
            np.int64(0 if sinks is None else sinks.data_ptr()),
            np.int64(out.data_ptr()),
            np.int64(out.stride(0)),
            np.int64(out.stride(1)),
            np.int64(0 if lse is None else lse.data_ptr()),
        ),
    )
