"""Into how many splits captured exact layers divide what they read in place."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tierkv
from tests.models import tiny_model
from tierkv.attention import captured_exact
from tierkv.attention.captured import CapturedLookups

TOKENS = 3000


@pytest.mark.parametrize("attention", ["exact", "selective"])
def test_long_contexts_are_split(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact layers beside selecting ones read a whole context in one split: 25 ms more at 1M."""
    hf_model = tiny_model("llama")
    more: dict[str, Any] = {}
    if attention == "selective":
        more = {"dense_layers": 1, "token_budget": 256, "max_context": 4096, "attention": attention}
    attend, settings = Mock(return_value=1), {"scale": 1.0, "softcap": None, "sinks": None}
    monkeypatch.setattr(captured_exact.decode, "attend", attend)
    monkeypatch.setattr(captured_exact, "merge", Mock())
    with tierkv.wrap(hf_model, page_tokens=16, gpu_budget="64MiB", **more) as wrapped:
        tier_cache = wrapped.cache()
        ids = torch.randint(3, 99, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        wrapped.prefill(ids, tier_cache)
        lookups = CapturedLookups(tier_cache.live_manager(), tier_cache.sequences, 400)
        lookups.begin()
        lookups.exact.renew()
        config = hf_model.config
        query = torch.zeros(1, config.num_attention_heads, 1, config.head_dim)
        lookups.exact.queries(query)
        lookups.exact.attend(0, **settings)
    assert attend.call_args.kwargs["max_splits"] >= TOKENS // captured_exact.MIN_SPLIT_TOKENS
