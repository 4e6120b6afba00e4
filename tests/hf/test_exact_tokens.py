"""Greedy tokens over tiered pages equal those of `DynamicCache` with stock attention.

Every architecture with every way transformers decodes; each of both also with all budgets from
"everything hot" to the minimum. Logit differences are printed (run with ``-s`` to see them).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.combinations import each, pairs
from tests.models import CONFIGS, STATEFUL, VOCAB, tiny_model
from tests.paging_helpers import budgets

NEW_TOKENS = 24
PROMPT_TOKENS = 150

MODES: dict[str, dict[str, Any]] = {
    "single": {},
    "left-padded": {},
    "beams": {"num_beams": 3},
    "prompt-lookup": {"prompt_lookup_num_tokens": 4},
    "samples": {"do_sample": True, "num_return_sequences": 3, "temperature": 0.8, "top_k": 0},
}
ROWS = {"single": 1, "left-padded": 2, "beams": 3, "prompt-lookup": 1, "samples": 3}


def prompt(mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    batch = 2 if mode == "left-padded" else 1
    ids = torch.randint(3, VOCAB, (batch, PROMPT_TOKENS), generator=generator)
    if mode == "prompt-lookup":  # something to look up
        ids[:, 75:] = ids[:, :75]
    mask = torch.ones_like(ids)
    if mode == "left-padded":
        ids[0, :37], mask[0, :37] = 0, 0
    return ids, mask


def options(mode: str) -> dict[str, Any]:
    base = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    extra = {} if mode == "beams" else {"output_logits": True}
    return base | extra | MODES[mode]


@functools.cache
def model(name: str) -> Any:
    return tiny_model(name)


@functools.cache
def expected(name: str, mode: str) -> Any:
    ids, mask = prompt(mode)
    torch.manual_seed(0)
    return model(name).generate(ids, attention_mask=mask, **options(mode))


def check(name: str, mode: str, result: Any, what: str) -> None:
    want = expected(name, mode)
    if result.get("logits") is not None and len(result.logits) == len(want.logits):
        gap = max(
            (a - b).abs().max().item() for a, b in zip(result.logits, want.logits, strict=True)
        )
        print(f"{name} {mode} {what}: largest logit difference {gap:.2e}")
    assert result.sequences.tolist() == want.sequences.tolist(), f"{name} {mode} {what}"


def skip_unsupported(name: str, mode: str) -> None:
    if name in STATEFUL and mode == "prompt-lookup":
        pytest.skip("transformers refuses assisted decoding for models with recurrent state")


@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    pairs(list(CONFIGS), list(MODES), ["minimum", "cold", "warm", "hot"]),
)
@pytest.mark.filterwarnings("ignore:.*has no full-attention layer")
def test_generate(name: str, mode: str, kind: str, tmp_path: Path) -> None:
    skip_unsupported(name, mode)
    ids, mask = prompt(mode)
    settings = budgets(kind, model(name), tmp_path, page_tokens=16, rows=ROWS[mode])
    with tierkv.wrap(model(name), prefill_chunk=50, **settings) as wrapped:
        torch.manual_seed(0)
        result = wrapped.generate(ids, attention_mask=mask, **options(mode))
        stats = wrapped.stats()
    check(name, mode, result, kind)
    if kind in ("cold", "minimum") and "store" in settings:
        assert stats["moved_bytes"]["cold_to_warm"] > 0, "the cold tier was not used"


@pytest.mark.parametrize(
    ("mode", "name"), each(list(MODES), ["gemma2", "deepseek_v3", "qwen3_next", "llama"])
)
def test_drop_in(name: str, mode: str, tmp_path: Path) -> None:
    """``hf_model.generate(..., past_key_values=model.cache())`` without tierkv's prefill."""
    skip_unsupported(name, mode)
    ids, mask = prompt(mode)
    settings = budgets("cold", model(name), tmp_path, page_tokens=16, rows=ROWS[mode])
    with tierkv.wrap(model(name), **settings) as wrapped:
        torch.manual_seed(0)
        result = model(name).generate(
            ids, attention_mask=mask, past_key_values=wrapped.cache(), **options(mode)
        )
    check(name, mode, result, "drop-in")


@pytest.mark.parametrize(
    ("page_tokens", "mode"),
    each([16, 32, 64, 128, 256], ["left-padded", "single", "prompt-lookup", "beams"]),
)
def test_page_sizes(mode: str, page_tokens: int, tmp_path: Path) -> None:
    ids, mask = prompt(mode)
    hf_model = model("llama")
    settings = budgets("minimum", hf_model, tmp_path, page_tokens=page_tokens, rows=ROWS[mode])
    with tierkv.wrap(hf_model, prefill_chunk=50, **settings) as wrapped:
        result = wrapped.generate(ids, attention_mask=mask, **options(mode))
    check("llama", mode, result, f"{page_tokens} tokens a page")


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 149, 500])
def test_chunk_sizes(chunk: int, tmp_path: Path) -> None:
    ids, mask = prompt("left-padded")
    hf_model = model("gemma2")
    settings = budgets("cold", hf_model, tmp_path, page_tokens=16, rows=2)
    with tierkv.wrap(hf_model, prefill_chunk=chunk, **settings) as wrapped:
        result = wrapped.generate(ids, attention_mask=mask, **options("left-padded"))
    check("gemma2", "left-padded", result, f"chunks of {chunk}")
