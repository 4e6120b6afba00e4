"""The numbers that change with every captured step, in one piece of memory: one copy a step."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy.typing as npt
import torch

Array = TypeVar("Array")


class Numbers(NamedTuple, Generic[Array]):
    """Lengths and slots that a step reads, views of one buffer."""

    position: Array
    """``[rows, 1]`` int64, position of the new token of each sequence."""
    slots: Array
    """``[layers, rows]`` int64, where a layer writes it, as a token slot of its arena."""
    tokens: Array
    """``[exact_layers, rows]`` int32, tokens that an exact layer reads in place."""
    tail_tokens: Array
    """``[1]`` int32, tokens in the tail, the new one included."""


class StepNumbers:
    """The numbers of a step on the device, and on the host, where they are set.

    Attributes:
        device: what captured steps read.
        host: what `upload` copies there; numpy sets it faster than torch.
    """

    def __init__(self, layers: int, exact_layers: int, rows: int, device: torch.device):
        shape = layers, exact_layers, rows
        size = rows * (1 + layers) + (rows * exact_layers + 2) // 2
        self._host = torch.zeros(size, dtype=torch.int64)
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self.device = _views(self._device, *shape)
        host = (view.numpy() for view in _views(self._host, *shape))
        self.host: Numbers[npt.NDArray[Any]] = Numbers(*host)

    def upload(self) -> None:
        """Copy all numbers, behind the work enqueued so far. They may be set anew at once."""
        self._device.copy_(self._host, non_blocking=True)  # pageable memory is staged by the driver


def _views(
    buffer: torch.Tensor, layers: int, exact_layers: int, rows: int
) -> Numbers[torch.Tensor]:
    wide, narrow = rows * (1 + layers), rows * exact_layers
    integers = buffer[wide:].view(torch.int32)
    return Numbers(
        buffer[:rows].view(rows, 1), buffer[rows:wide].view(layers, rows),
        integers[:narrow].view(exact_layers, rows), integers[narrow : narrow + 1],
    )  # fmt: skip
