"""Merge two partial attentions of many queries in one pass; `attention.merge` is the oracle."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from tierkv.kernels.build import DTYPES, Kernel, Launch, kernel

THREADS = 256
MAX_DIM = 512


def fold(
    a_out: torch.Tensor,
    a_lse: torch.Tensor,
    b_out: torch.Tensor,
    b_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge once; see `prepare`."""
    prepare(a_out, a_lse, b_out, b_lse, out, lse).run()


def prepare(
    a_out: torch.Tensor,
    a_lse: torch.Tensor,
    b_out: torch.Tensor,
    b_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Launch:
    """Check the arguments of a merge and compile its kernel.

    A side whose log-sum-exp is -inf saw nothing and its output does not count, whatever it is.
    Where neither saw anything, `out` becomes 0 and `lse` -inf.

    Args:
        a_out, b_out: ``[batch, heads, queries, v_dim]`` of any supported dtypes, normalised. Any
            strides that are multiples of 4, the last dim dense.
        a_lse, b_lse: ``[batch, heads, queries]`` float32, natural logarithm, any strides.
        out: like `a_out`; may be `a_out` or `b_out`.
        lse: like `a_lse`; may be `a_lse` or `b_lse`.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    for written, read in ((out, a_out), (out, b_out), (lse, a_lse), (lse, b_lse)):
        if written.data_ptr() == read.data_ptr() and _form(written) != _form(read):
            raise ValueError("a result may take the place of an argument only element by element")
    outs, sums = (a_out, b_out, out), (a_lse, b_lse, lse)
    compiled, grid, strides, sizes = _checked(
        tuple(map(_form, outs)), tuple(map(_form, sums)), a_out.device
    )
    held = (a_out, a_lse, b_out, b_lse, out, lse)
    arguments: list[Any] = []
    for tensor, steps in zip(held, strides, strict=True):
        arguments += [np.int64(tensor.data_ptr()), *steps]
    return Launch(compiled, grid, (*arguments, *sizes), held)


class _Form(NamedTuple):
    """All of a tensor that decides how it is read, but where it lies."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    misaligned: int


def _form(tensor: torch.Tensor) -> _Form:
    strides = tuple(
        0 if size == 1 else stride  # never taken
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    misaligned = tensor.data_ptr() % 16
    return _Form(tuple(tensor.shape), strides, tensor.dtype, tensor.device, misaligned)


@functools.lru_cache(maxsize=256)
def _checked(
    outs: tuple[_Form, ...], sums: tuple[_Form, ...], device: torch.device
) -> tuple[Kernel, tuple[int, int, int], tuple[Any, ...], tuple[Any, ...]]:
    """Return the kernel, its grid, strides (outs and sums in turns) and sizes."""
    names = ("a", "b", "")
    shape = outs[0].shape
    if len(shape) != 4 or not 0 < shape[3] <= MAX_DIM or shape[3] % 4:
        raise ValueError(
            f"a_out must be [batch, heads, queries, v_dim], v_dim a multiple of 4 up to {MAX_DIM}, "
            f"got {shape}"
        )
    for name, form in zip(names, outs, strict=True):
        if form.shape != shape or form.dtype not in DTYPES or form.strides[3] not in (0, 1):
            raise ValueError(
                f"{_named(name, 'out')} must be {shape} of {', '.join(map(str, DTYPES))} with a "
                f"dense last dim, got {form.shape} {form.dtype} strides {form.strides}"
            )
    for name, form in zip(names, sums, strict=True):
        if form.shape != shape[:3] or form.dtype != torch.float32:
            raise ValueError(
                f"{_named(name, 'lse')} must be {shape[:3]} float32, got {form.shape} {form.dtype}"
            )
    for form in (*outs, *sums):
        if form.device != device:
            raise ValueError(f"tensors on {device} and {form.device}")
    width = min(_width(_named(n, "out"), form) for n, form in zip(names, outs, strict=True))
    batch, heads, queries, v_dim = shape
    defines = (
        ("A_DTYPE", DTYPES[outs[0].dtype]),
        ("B_DTYPE", DTYPES[outs[1].dtype]),
        ("OUT_DTYPE", DTYPES[outs[2].dtype]),
        ("V_DIM", v_dim),
        ("WIDTH", width),
    )
    compiled = kernel("fold", "fold_partials", defines, device, THREADS)
    rows = THREADS // (v_dim // width)
    strides = tuple(
        tuple(map(np.int64, form.strides[:3]))
        for pair in zip(outs, sums, strict=True)
        for form in pair
    )
    sizes = (np.int32(heads), np.int32(queries))
    return compiled, (heads * -(-queries // rows), batch, 1), strides, sizes


def _named(side: str, what: str) -> str:
    return f"{side}_{what}" if side else what


def _width(name: str, form: _Form) -> int:
    """How many elements a thread may take: 8, or 4 if rows are not aligned for that."""
    for width in (8, 4):
        size = form.dtype.itemsize
        aligned = min(16, width * size)
        offsets = (form.misaligned, *(stride * size for stride in form.strides[:3]))
        if form.shape[3] % width == 0 and not any(offset % aligned for offset in offsets):
            return width
    raise ValueError(
        f"rows of {name} must be aligned to 4 elements, got strides {form.strides} from an address "
        f"{form.misaligned} bytes off a multiple of 16"
    )
