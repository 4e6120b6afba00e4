"""Forks, samples and beams share the pages of what they have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.hf.test_exact_tokens import model, prompt
from tests.hf.test_generation import tokens
from tests.models import tiny_model
from tests.paging_helpers import budgets, encode_hot
from tierkv.errors import ConfigError, HotBudgetError

NEW = {"max_new_tokens": 20, "do_sample": False}


@pytest.mark.parametrize("kind", ["hot", "warm", "cold", "minimum", "hot, encoded"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_forks_go_their_own_ways(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both continue as contexts of their own would; closing one costs the other nothing."""
    kind, _, encoded = kind.partition(", ")
    if encoded:
        encode_hot(monkeypatch)
    ids, _ = prompt("single")
    one, two = tokens(1, 21, seed=5), tokens(1, 40, seed=6)
    want = []
    for more in (one, two):
        whole = torch.cat([ids, more], 1)
        want.append(tiny_model(name).generate(whole, **NEW)[0, whole.shape[1] :].tolist())
    settings = budgets(kind, model(name), tmp_path, page_tokens=16, rows=2)
    with tierkv.wrap(model(name), prefill_chunk=50, **settings) as wrapped:
        live = wrapped.manager.directory
        context = wrapped.open()
        context.append(ids)
        pages = live.live
        twin = context.fork()
        assert live.live == pages + 1, "more than the tail was copied"
        context.append(one)
        twin.append(two)
        third = twin.generate(**NEW)
        assert third[0].tolist() == want[1]
        twin.close()
        assert context.generate(**NEW)[0].tolist() == want[0]
        context.close()
        assert live.live == 0
        assert wrapped.manager.hot.pages == wrapped.manager.warm.pages == 0
        assert wrapped.stats()["tiers"]["hot"]["pages"] == 0
        assert wrapped.stats()["prefill"]["tokens"] == 150 + 21 + 40


def test_a_fork_is_saved_under_its_own_name(tmp_path: Path) -> None:
    """Only its tail is written: the rest is the pages the other has saved."""
    ids, _ = prompt("single")
    settings = budgets("cold", model("llama"), tmp_path, page_tokens=16, rows=3)
    with tierkv.wrap(model("llama"), **settings) as wrapped:
        with wrapped.open("trunk") as trunk:
            trunk.append(ids)
            trunk.save()
            twin, nameless = trunk.fork("branch"), trunk.fork()
        twin.append(tokens(1, 5))
        assert twin.save() == 3  # the tail, in three layers
        with pytest.raises(ConfigError, match="has no name"):
            nameless.save()
        nameless.name = "later"
        assert nameless.save() == 0
        assert wrapped.saved() == ["branch", "later", "trunk"]
        with pytest.raises(ConfigError, match="name must be"):
            twin.fork("")
        empty = wrapped.open().fork()
        assert empty.tokens == 0


def test_a_fork_without_room_changes_nothing(tmp_path: Path) -> None:
    ids, _ = prompt("single")
    want = tiny_model("llama").generate(ids, **NEW)[0, 150:].tolist()
    settings = budgets("minimum", model("llama"), tmp_path, page_tokens=16, rows=1)
    with tierkv.wrap(model("llama"), **settings) as wrapped, wrapped.open() as context:
        context.append(ids)
        with pytest.raises(HotBudgetError, match="need a tail page"):
            context.fork()
        assert context.generate(**NEW)[0].tolist() == want


@pytest.mark.parametrize(
    "options",
    [{"do_sample": True, "num_return_sequences": 4, "top_k": 0}, {"num_beams": 4}],
    ids=["samples", "beams"],
)
def test_four_of_a_long_prompt_take_the_pages_of_one(options: dict[str, Any]) -> None:
    """6K tokens of prompt: 4 samples, or 4 beams, use at most 1.1 times the pages of one."""
    ids = tokens(1, 6000)
    hf_model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=8192)
    used = []
    with tierkv.wrap(hf_model, page_tokens=16, gpu_budget="64MiB") as wrapped:
        for more in ({}, options):
            most = 0

            def count(input_ids: Any, scores: Any, **_: Any) -> Any:
                nonlocal most
                most = max(most, wrapped.manager.hot.pages)
                return torch.zeros(len(input_ids), dtype=torch.bool)

            cache = wrapped.cache()
            wrapped.generate(
                ids, max_new_tokens=20, stopping_criteria=[count],
                **{wrapped.cache_argument(): cache}, **{"do_sample": False, **more},
            )  # fmt: skip
            cache.close()
            used.append(most)
    assert used[0] >= 6000 // 16
    assert used[1] <= 1.1 * used[0], used
