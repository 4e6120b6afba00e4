"""Greedy tokens over tiered pages on CUDA equal those of `DynamicCache` on the same device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.hf.test_exact_tokens import MODES, ROWS, options, prompt, skip_unsupported
from tests.models import CONFIGS, tiny_model
from tests.paging_helpers import budgets


@functools.cache
def model(name: str, dtype: torch.dtype) -> Any:
    return tiny_model(name, dtype).cuda()


@functools.cache
def expected(name: str, mode: str, dtype: torch.dtype) -> Any:
    ids, mask = prompt(mode)
    torch.manual_seed(0)
    return model(name, dtype).generate(ids.cuda(), attention_mask=mask.cuda(), **options(mode))


@pytest.mark.parametrize("kind", ["hot", "warm", "cold", "minimum"])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.filterwarnings("ignore:.*has no full-attention layer")
def test_generate(name: str, mode: str, kind: str, tmp_path: Path) -> None:
    skip_unsupported(name, mode)
    hf_model = model(name, torch.float32)
    ids, mask = (tensor.cuda() for tensor in prompt(mode))
    settings = budgets(kind, hf_model, tmp_path, page_tokens=16, rows=ROWS[mode])
    with tierkv.wrap(hf_model, prefill_chunk=50, **settings) as wrapped:
        torch.manual_seed(0)
        result = wrapped.generate(ids, attention_mask=mask, **options(mode))
    want = expected(name, mode, torch.float32)
    assert result.sequences.tolist() == want.sequences.tolist()


@pytest.mark.parametrize("kind", ["hot", "warm", "cold"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_half_precision_logits(name: str, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    """Half precision rounds differently in every kernel, so tokens may differ at ties.

    Logits of every step, fed the same tokens, must be as close to float32 as stock attention is
    (within a factor of two), whatever the tiers.
    """
    hf_model = model(name, dtype)
    wide = model(name, torch.float32)
    wide.load_state_dict(hf_model.state_dict())  # the same weights, exactly
    ids = prompt("single")[0].cuda()
    with torch.no_grad():
        exact = wide(ids).logits
        stock = hf_model(ids).logits.float()
        settings = budgets(kind, hf_model, tmp_path, page_tokens=16, rows=1)
        with tierkv.wrap(hf_model, **settings) as wrapped:
            tier_cache, parts = wrapped.cache(), []
            for start in (0, 50, 100):
                chunk = ids[:, start : start + 50]
                parts.append(hf_model(chunk, past_key_values=tier_cache).logits)
            ours = torch.cat(parts, dim=1).float()
    model.cache_clear()
    stock_error = ((stock - exact).norm() / exact.norm()).item()
    our_error = ((ours - exact).norm() / exact.norm()).item()
    print(f"{name} {dtype} {kind}: error {our_error:.2e}, stock {stock_error:.2e}")
    assert our_error <= 2 * stock_error + 1e-3
