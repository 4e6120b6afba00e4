"""Selective attention on the CPU: what is read, and that a budget for everything is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.hf.test_exact_tokens import expected, model, options, prompt
from tests.paging_helpers import budgets
from tierkv.attention import reference, selective
from tierkv.errors import ConfigError, HotBudgetError, UnsupportedModelError
from tierkv.hf.attach import cache_argument
from tierkv.paging.selective import NONE

SMALL: dict[str, Any] = {
    "attention": "selective", "page_tokens": 16, "token_budget": 48, "sink_tokens": 16,
    "recent_tokens": 32, "dense_layers": 1, "max_context": 1024,
}  # fmt: skip


def settings(kind: str, name: str, path: Path, **more: Any) -> dict[str, Any]:
    """Budgets of a kind, with room for the summaries of selective attention."""
    given = budgets(kind, model(name), path, page_tokens=16, rows=1)
    if kind != "hot":
        given["gpu_budget"] += 4 << 20
    return given | SMALL | more


@pytest.mark.parametrize("kind", ["hot", "warm", "cold"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("selector", ["cuboid", "mean"])
def test_a_budget_for_everything_is_exact(
    selector: str, name: str, kind: str, tmp_path: Path
) -> None:
    ids, mask = prompt("single")
    everything = settings(kind, name, tmp_path, token_budget=1024, selector=selector)
    with tierkv.wrap(model(name), prefill_chunk=50, **everything) as wrapped:
        result = wrapped.generate(ids, attention_mask=mask, **options("single"))
    assert result.sequences.tolist() == expected(name, "single").sequences.tolist()


@pytest.mark.parametrize(
    "selector", ["cuboid", "cuboid8", "bound", "mean", "window", "keys2", "oracle"]
)
def test_pages_left_out_are_as_if_masked(
    selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention over the pages looked up equals dense attention with a mask over the others."""
    looked_up: dict[int, torch.Tensor] = {}
    calls: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}
    look_up, attend = selective.look_up, selective.attend

    def recorded(query: Any, state: Any, layer: int, sealed: int, scale: float) -> torch.Tensor:
        pages = look_up(query, state, layer, sealed, scale)
        (looked_up[layer],) = pages
        return pages

    def watched(query: Any, lookup: Any, *, scale: float, **more: Any) -> torch.Tensor:
        out = attend(query, lookup, scale=scale, **more)
        calls[lookup.layer] = query, out, scale
        return out

    monkeypatch.setattr(selective, "look_up", recorded)
    monkeypatch.setattr(selective, "attend", watched)
    torch.manual_seed(0)
    ids = torch.randint(3, 199, (1, 331))
    given = settings("cold", "llama", tmp_path, selector=selector)
    with torch.no_grad(), tierkv.wrap(model("llama"), **given) as wrapped:
        tier_cache = wrapped.cache()
        append, past = tier_cache.append, {}

        def kept(layer: int, k: torch.Tensor, v: torch.Tensor) -> Any:
            before = past.get(layer, (k[:, :, :0], v[:, :, :0]))
            past[layer] = torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)
            return append(layer, k, v)

        monkeypatch.setattr(tier_cache, "append", kept)
        wrapped.prefill(ids[:, :330], tier_cache)
        model("llama")(ids[:, 330:], **{cache_argument(model("llama")): tier_cache})
        stats = wrapped.stats()
    assert stats["moved_bytes"]["cold_to_warm"] > 0
    assert sorted(looked_up) == sorted(calls) == [1, 2]
    for layer, pages in looked_up.items():
        wanted = 1 + (5 if selector == "window" else 3 + 2)
        assert [len(set(row) - {NONE}) for row in pages.tolist()] == [wanted] * 2
        assert all({0, 18, 19} <= set(row) for row in pages.tolist())
        seen = torch.zeros(1, 2, 1, 331, dtype=torch.bool)
        seen[..., 320:] = True  # the tail
        for head, row in enumerate(pages.tolist()):
            for page in set(row) - {NONE}:
                seen[0, head, 0, page * 16 : page * 16 + 16] = True
        query, out, scale = calls[layer]
        dense = reference.attend(query.view(1, 2, 2, -1), *past[layer], scale=scale, mask=seen)
        torch.testing.assert_close(out.flatten(), dense.out.flatten(), rtol=1e-4, atol=1e-5)


def test_a_context_may_be_cut_and_go_on(tmp_path: Path) -> None:
    """Pages that take the positions of others are ranked by their own keys."""
    torch.manual_seed(1)
    ids = torch.randint(3, 199, (1, 300))
    given = settings("warm", "llama", tmp_path)
    logits = []
    for cut in (False, True):
        with torch.no_grad(), tierkv.wrap(model("llama"), **given) as wrapped:
            tier_cache = wrapped.cache()
            argument = {cache_argument(model("llama")): tier_cache}
            if cut:
                other = torch.randint(3, 199, (1, 250))
                wrapped.prefill(torch.cat([ids[:, :100], other], dim=1), tier_cache)
                model("llama")(ids[:, :1], **argument)
                tier_cache.crop(100 - tier_cache.get_seq_length())
            wrapped.prefill(ids, tier_cache)
            logits.append(model("llama")(ids[:, :1], **argument).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_selective_says_so(tmp_path: Path) -> None:
    ids, _ = prompt("single")
    with tierkv.wrap(model("llama"), **settings("warm", "llama", tmp_path)) as wrapped:
        with pytest.raises(ConfigError, match=r"max_batch is 1, and .* got a batch of 2"):
            wrapped.generate(ids.repeat(2, 1), max_new_tokens=2)
        with pytest.raises(ConfigError, match="max_context is 1024 tokens"):
            wrapped.prefill(ids.repeat(1, 10), wrapped.cache())
    with pytest.raises(HotBudgetError, match="lower token_budget or max_context"):
        tierkv.wrap(model("llama"), **SMALL | {"gpu_budget": "16KiB"})
    with pytest.raises(UnsupportedModelError, match="latents"):
        tierkv.wrap(model("deepseek_v3"), **SMALL)
    with pytest.raises(ConfigError, match="selector must be one of"):
        tierkv.wrap(model("llama"), **SMALL | {"selector": "quest"})


def test_pages_on_disk_may_be_skipped(tmp_path: Path) -> None:
    """Only sinks and recent pages are read from disk; what was left out is counted."""
    torch.manual_seed(0)
    ids = torch.randint(3, 199, (1, 331))
    results, counts, read = {}, {}, {}
    for miss in ("wait", "skip"):
        given = settings("cold", "llama", tmp_path / miss, on_cold_miss=miss, dense_layers=0)
        with torch.no_grad(), tierkv.wrap(model("llama"), **given) as wrapped:
            tier_cache = wrapped.cache()
            wrapped.prefill(ids[:, :330], tier_cache)
            before = wrapped.stats()["moved_bytes"]["cold_to_warm"]
            argument = {cache_argument(model("llama")): tier_cache}
            results[miss] = model("llama")(ids[:, 330:], **argument).logits
            counts[miss] = wrapped.stats()
            read[miss] = counts[miss]["moved_bytes"]["cold_to_warm"] - before
    assert read["skip"] < read["wait"]
    assert 0 < counts["skip"]["selective"]["skipped"] <= 3 * 2 * 3
    assert not torch.equal(results["wait"], results["skip"])
