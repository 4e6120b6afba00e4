"""The constructed model on a GPU: every needle is found, with its pages on all three tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierkv
from tierkv.bench import constructed
from tierkv.hf.geometry import model_geometry

TOKENS = 32768


@pytest.mark.filterwarnings("ignore:decoding without a CUDA graph")
@pytest.mark.parametrize("store", [True, False], ids=["three tiers", "two tiers"])
@pytest.mark.parametrize("selector", [None, "cuboid", "bound", "mean", "keys2"])
def test_every_needle(selector: str | None, store: bool, tmp_path: Path) -> None:
    """Without a store the selective steps are CUDA graphs, with one they wait for the disk."""
    model = constructed.build(
        heads=8, kv_heads=2, head_dim=128, device="cuda", dtype=torch.bfloat16
    )
    geometry = model_geometry(model.config, torch.bfloat16)
    assert geometry is not None
    size = TOKENS * geometry.token_bytes
    given = {"gpu_budget": int(0.4 * size), "cpu_budget": size, "max_context": TOKENS + 256}
    if store:
        given |= {"cpu_budget": int(0.3 * size), "store": str(tmp_path), "disk_floor": 0}
    if selector is not None:
        given |= {"gpu_budget": int(0.7 * size), "attention": "selective", "selector": selector,
                  "token_budget": 1024}  # fmt: skip
    context = constructed.needles(TOKENS)
    with tierkv.wrap(model, **given) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(context.ids.cuda(), tier_cache)
        tiers = [constructed.homes(tier_cache, context, index) for index in range(len(context))]
        for tier in ("hot", "warm", "cold")[: 3 if store else 2]:
            assert sum(count[tier] for count in tiers) > 0
        for index in range(len(context)):
            got = constructed.ask(wrapped, tier_cache, context, index)
            assert got == context.answers[index], f"needle {index} at {context.starts[index]}"
