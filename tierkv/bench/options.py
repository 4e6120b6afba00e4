"""What a run of the offload benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tierkv.bench.summary import OFFLOADED, STOCK


@dataclass(frozen=True, slots=True)
class Options:
    """What to run; see the flags of ``tierkv bench``.

    `shapes` are pairs of a shape's name and its contexts in tokens; `prefill_tokens` is the
    longest context that is really prefilled (0: none); budgets of None follow from the KV; `codecs`
    are how tierkv stores pages below hot, one row each; `eager` keeps it from replaying steps.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    device: torch.device
    dtype: torch.dtype
    hot_shares: tuple[float, ...] = (0.125,)
    steps: int = 64
    warmup: int = 3
    limit_seconds: float = 20.0
    prefill_tokens: int = 0
    prefill_chunk: int = 0
    baselines: tuple[str, ...] = (STOCK, OFFLOADED)
    offloaded_steps: int = 4
    cpu_budget: int | None = None
    store: Path | None = None
    page_tokens: int = 32
    codecs: tuple[str, ...] = ("raw",)
    eager: bool = False
    scale: int = 1
