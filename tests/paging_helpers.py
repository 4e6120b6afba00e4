"""Budgets of every kind, from everything hot down to the minimum; hot pages as if encoded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tierkv import api
from tierkv.hf.geometry import model_geometry
from tierkv.paging.manager import PageManager


def encode_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have hot pages kept in frames of encoded ones, by the raw codec: nothing changes but where
    their bytes lie, and tokens stay exact."""
    monkeypatch.setattr(api, "PageManager", partial(PageManager, encode_hot=True))


def budgets(
    kind: str, hf_model: Any, store: Path, *, page_tokens: int, rows: int
) -> dict[str, Any]:
    """Return settings for `tierkv.wrap` so small that the tiers named by `kind` are used.

    Args:
        kind: ``hot`` (everything fits), ``warm`` (two tiers), ``cold`` (three tiers, a third of
            the pages each at best) or ``minimum`` (no smaller budget is accepted).
        rows: sequences that run at once; each needs one tail page a layer.
    """
    text = hf_model.config.get_text_config(decoder=True)
    latents = any(hasattr(module, "expand_kv") for module in hf_model.modules())
    geometry = model_geometry(text, hf_model.dtype, page_tokens, latents=latents)
    settings: dict[str, Any] = {"page_tokens": page_tokens, "gpu_budget": "1GiB"}
    if geometry is None:
        return settings
    copies = 7 if torch.cuda.is_available() and hf_model.device.type == "cuda" else 3
    page, frame = geometry.page_bytes, geometry.frame_bytes
    few = page * (geometry.layers * (rows + 2) + copies)
    least = page * (geometry.layers * rows + copies)
    if kind == "hot":
        return settings
    if kind == "warm":
        return settings | {"gpu_budget": few, "cpu_budget": "1GiB"}
    disk = {"store": str(store), "disk_budget": "256MiB", "disk_floor": "1MiB"}
    if kind == "cold":
        warm = frame * (geometry.layers * rows + 4)
        return settings | disk | {"gpu_budget": few, "cpu_budget": warm}
    assert kind == "minimum"
    return settings | disk | {"gpu_budget": least, "cpu_budget": 3 * frame}
