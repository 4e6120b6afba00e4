"""Sequences that run together under selective attention: each says what it says alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.attention.test_selective import settings
from tests.hf.test_exact_tokens import model, options, prompt
from tests.hf.test_generation import tokens
from tests.hf.test_selective_turns import alone
from tierkv.errors import ConfigError, HotBudgetError, UnsupportedModelError
from tierkv.hf.attach import cache_argument

ROWS = 3
NEW: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}


def selecting(kind: str, path: Path, **more: Any) -> Any:
    given = settings(kind, "llama", path, max_batch=ROWS, **more)
    if kind != "hot":
        given["gpu_budget"] += 8 << 20  # summaries of each sequence
    return tierkv.wrap(model("llama"), **given)


@pytest.mark.parametrize(
    ("kind", "selector", "miss"),
    [("hot", "cuboid", "wait"), ("warm", "keys2", "wait"), ("cold", "mean", "wait"),
     ("cold", "window", "skip")],
)  # fmt: skip
def test_a_batch_says_what_its_sequences_say_alone(
    kind: str, selector: str, miss: str, tmp_path: Path
) -> None:
    """Over steps that seal pages, and with a cache given to transformers."""
    ids, name = tokens(ROWS, 300), cache_argument(model("llama"))
    with selecting(kind, tmp_path, selector=selector, on_cold_miss=miss) as wrapped:

        def said(rows: torch.Tensor) -> list[list[list[int]]]:
            own = model("llama").generate(rows, **NEW, **{name: wrapped.cache()})
            return [wrapped.generate(rows, **NEW).tolist(), own.tolist()]

        each = [said(row[None]) for row in ids]
        assert said(ids) == [[row for (row,) in way] for way in zip(*each, strict=True)]
        hits = wrapped.stats()["moved_bytes"]
    assert (hits["cold_to_warm"] > 0) == (kind == "cold")


def test_batches_and_contexts_take_turns(tmp_path: Path) -> None:
    one, two = tokens(1, 250, seed=7), tokens(2, 300)
    want = alone(one, 18), [alone(row[None], 18) for row in two]
    with selecting("cold", tmp_path) as wrapped, wrapped.open() as context:
        context.append(one)
        tier_cache = wrapped.cache()
        argument, ids = {cache_argument(model("llama")): tier_cache}, two
        said: list[int] = []
        for _ in range(2):
            said += context.generate(max_new_tokens=9, do_sample=False)[0].tolist()
            ids = wrapped.generate(ids, max_new_tokens=9, do_sample=False, **argument)
        assert (said, ids[:, 300:].tolist()) == want
        assert wrapped.manager.selective.turns == 2
        tier_cache.crop(310 - tier_cache.get_seq_length())  # within a page
        again = wrapped.generate(ids[:, :311], max_new_tokens=7, do_sample=False, **argument)
        assert again.tolist() == ids.tolist()


@pytest.mark.parametrize("kind", ["warm", "cold"])
@pytest.mark.parametrize("mode", ["beams", "samples"])
def test_beams_and_samples_share_a_prompt(mode: str, kind: str, tmp_path: Path) -> None:
    """With a budget for everything they are exact, also where beams swap places."""
    ids, mask = prompt(mode)
    torch.manual_seed(0)
    want = model("llama").generate(ids, attention_mask=mask, **options(mode))
    with selecting(kind, tmp_path, token_budget=1024) as wrapped:
        torch.manual_seed(0)
        got = wrapped.generate(ids, attention_mask=mask, **options(mode))
    assert got.sequences.tolist() == want.sequences.tolist()


def test_samples_of_a_small_budget(tmp_path: Path) -> None:
    """Each goes on from what was kept of the prompt, and chooses for itself."""
    ids = tokens(1, 300)
    want = alone(ids, 20)
    with selecting("warm", tmp_path) as wrapped:
        got = wrapped.generate(
            ids, max_new_tokens=20, do_sample=True, top_k=1, num_return_sequences=ROWS
        )
    assert got[:, 300:].tolist() == [want] * ROWS


@pytest.mark.parametrize("kind", ["warm", "cold"])
def test_a_batch_begins_with_pages_that_were_kept(kind: str, tmp_path: Path) -> None:
    ids = tokens(2, 300)
    want = [alone(row[None], 20) for row in ids]
    with selecting(kind, tmp_path, prefix_cache=True) as wrapped:
        for _ in range(2):
            assert wrapped.generate(ids, **NEW)[:, 300:].tolist() == want
        assert wrapped.stats()["prefix"]["reused_tokens"] > 500


def test_what_a_batch_may_not_be(tmp_path: Path) -> None:
    ids = tokens(4, 200)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    with selecting("warm", tmp_path) as wrapped:
        for how, rows in (({}, 4), ({"num_return_sequences": 5, "do_sample": True}, 1)):
            with pytest.raises(ConfigError, match=r"max_batch is 3, and .* got a batch of [45]"):
                wrapped.generate(ids[:rows], max_new_tokens=2, **how)
        assert wrapped.stats()["prefill"]["tokens"] == 0, "it is refused before the prefill"
        with pytest.raises(UnsupportedModelError, match=r"hide padding, .* hides 20 tokens"):
            wrapped.generate(ids[:2], attention_mask=mask[:2], max_new_tokens=2)
        with pytest.raises(UnsupportedModelError, match="sequences of equal length"):
            wrapped.prefill(ids[:2], wrapped.cache(), attention_mask=mask[:2])
        assert wrapped.generate(ids[:1], max_new_tokens=2).shape == (1, 202)
    with pytest.raises(HotBudgetError, match=r"of max_batch 900 sequences \d+ fit .*max_batch"):
        tierkv.wrap(model("llama"), **settings("warm", "llama", tmp_path, max_batch=900))
