"""From settings in tokens to sizes in pages."""

from __future__ import annotations

import torch

from tierkv.config import Config
from tierkv.errors import ConfigError, KernelsUnavailableError
from tierkv.kernels.build import available
from tierkv.page import Geometry
from tierkv.paging.selective import Selective
from tierkv.selection import selector


def selective_settings(
    config: Config, geometry: Geometry, device: torch.device, model_limit: int
) -> Selective:
    """Return what selective attention keeps on the device.

    Args:
        model_limit: tokens that the model was made for, taken if `max_context` is 0.

    Raises:
        ConfigError: a selector that does not run on a GPU, or does not take such pages.
        KernelsUnavailableError: a GPU without CuPy.
    """
    chosen, cuda = selector(config.selector, geometry.page_tokens), device.type == "cuda"
    if cuda and not available():
        raise KernelsUnavailableError(
            f"attention='selective' needs the CUDA kernels: {available().reason}"
        )
    if cuda and chosen.parts and chosen.kernel is None:
        raise ConfigError(f"selector {config.selector!r} runs on a CPU only: it has no kernel")
    chosen.summarize(torch.zeros(geometry.page_tokens, geometry.k_dim, dtype=geometry.dtype))

    def pages(tokens: int) -> int:
        return -(-tokens // geometry.page_tokens)

    budget, recent = pages(config.token_budget), pages(config.recent_tokens)
    if not chosen.parts:  # what is not chosen is spent on recent pages
        budget, recent = 0, recent + budget
    most = pages(config.max_context or model_limit)
    slots = min(max(int(config.reuse * budget), budget, 1), max(most, budget))
    return Selective(
        dense_layers=min(config.dense_layers, geometry.layers),
        budget_pages=budget,
        sink_pages=pages(config.sink_tokens),
        recent_pages=recent,
        slots=slots if cuda else 0,
        max_pages=most,
        parts=chosen.parts,
        selector=chosen,
        mass_target=config.mass,
        skips=config.on_cold_miss == "skip",
        sequences=config.max_batch,
    )
