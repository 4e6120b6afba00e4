"""Giving memory back before everything that refers to it is gone."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def free(tensors: Iterable[torch.Tensor]) -> None:
    """Give back the memory of tensors and of all their views, which must not be used any more.

    Launches and views that refer to each other in cycles would keep it until those are collected.
    """
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.resizable():  # not on the CPU, once numpy has seen it
            storage.resize_(0)
