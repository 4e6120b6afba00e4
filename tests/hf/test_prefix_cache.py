"""Requests begin with the pages of finished ones: exact tokens, true counts, hard budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.hf.test_exact_tokens import model
from tests.hf.test_generation import tokens
from tests.models import tiny_model
from tests.paging.test_encoded_hot import roomy
from tests.paging_helpers import budgets, encode_hot
from tierkv.errors import ColdWriteError, ConfigError, UnsupportedModelError, WarmBudgetError

NEW = {"max_new_tokens": 12, "do_sample": False}


def wrap(name: str, kind: str, store: Path, rows: int = 2, **more: Any) -> Any:
    settings = budgets(kind, model(name), store, page_tokens=16, rows=rows)
    return tierkv.wrap(model(name), prefill_chunk=50, prefix_cache=True, **settings | more)


def plain(name: str, ids: torch.Tensor, **options: Any) -> list[Any]:
    return tiny_model(name).generate(ids, **NEW | options).tolist()


@pytest.mark.parametrize("kind", ["hot", "warm", "cold", "minimum"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_known_beginnings_are_not_computed_again(name: str, kind: str, tmp_path: Path) -> None:
    """Whole pages by reference, then token by token; the tokens are those of recomputation."""
    ids = tokens(1, 150)
    other = torch.cat([ids[:, :103], tokens(1, 40, seed=9)], dim=1)
    with wrap(name, kind, tmp_path) as wrapped:
        assert wrapped.generate(ids, **NEW).tolist() == plain(name, ids)
        assert wrapped.stats()["prefix"]["reused_tokens"] == 0
        assert wrapped.generate(other, **NEW).tolist() == plain(name, other)
        stats = wrapped.stats()
        assert stats["prefix"]["reused_tokens"] == 103
        assert stats["prefill"]["tokens"] == 149 + 143 - 1 - 103
        layers = wrapped.manager.geometry.layers
        by_tier = stats["prefix"]["reused_pages"]
        assert sum(by_tier.values()) == 6 * layers
        assert by_tier["hot" if kind == "hot" else "cold" if kind == "minimum" else "warm"]
        assert wrapped.generate(ids, **NEW).tolist() == plain(name, ids)
        assert wrapped.stats()["prefix"]["reused_tokens"] == 103 + 149, "one token is computed"
        assert wrapped.stats()["prefill"]["tokens"] == stats["prefill"]["tokens"]
        longer = wrapped.generate(ids, **NEW | {"max_new_tokens": 30})
        assert wrapped.generate(longer, **NEW).tolist() == plain(name, longer)
        assert wrapped.stats()["prefix"]["reused_tokens"] == 252 + 149 + 176, "decoded ones too"


def test_nothing_is_kept_unless_asked_for() -> None:
    with tierkv.wrap(model("llama")) as wrapped:
        cache = wrapped.cache()
        wrapped.prefill(tokens(1, 100), cache)
        cache.close()
        assert wrapped.manager.directory.live == 0
        assert "prefix" not in wrapped.stats()


def test_prefill_returns_the_logits_of_the_last_token(tmp_path: Path) -> None:
    ids = tokens(1, 96)
    with wrap("llama", "hot", tmp_path) as wrapped:
        first = wrapped.prefill(ids, wrapped.cache())
        again = wrapped.prefill(ids, wrapped.cache())
        assert wrapped.stats()["prefix"]["reused_tokens"] == 95
        torch.testing.assert_close(again.logits, first.logits)


def test_contexts_and_samples_take_part(tmp_path: Path) -> None:
    ids = tokens(1, 100)
    with wrap("llama", "warm", tmp_path) as wrapped:
        with wrapped.open() as context:
            context.append(ids)
            answer = context.generate(**NEW)
        both = torch.cat([ids, answer, tokens(1, 9, seed=3)], dim=1)
        with wrapped.open() as context:
            context.append(both)
            assert context.generate(**NEW).tolist()[0] == plain("llama", both)[0][121:]
        assert wrapped.stats()["prefix"]["reused_tokens"] == 96, "tails are not kept"
        torch.manual_seed(1)
        got = wrapped.generate(both, max_new_tokens=20, do_sample=True, num_return_sequences=2)
        assert wrapped.stats()["prefix"]["reused_tokens"] == 96 + 120
        for row in got:
            assert wrapped.generate(row[None], **NEW).tolist() == plain("llama", row[None])
        assert wrapped.stats()["prefix"]["reused_tokens"] == 96 + 120 + 2 * 128


def test_restored_pages_are_beginnings_too(tmp_path: Path) -> None:
    """They stay in the store when the prefix cache gives them up."""
    ids = tokens(1, 100)
    with wrap("llama", "cold", tmp_path) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
    with wrap("llama", "cold", tmp_path) as wrapped:
        with wrapped.open("book") as context:
            context.append(tokens(1, 20, seed=2))
            want = context.generate(**NEW)
        again = torch.cat([ids, tokens(1, 20, seed=2)], dim=1)
        assert wrapped.generate(again, **NEW)[:, 120:].tolist() == want.tolist()
        assert wrapped.stats()["prefill"]["tokens"] == 20, "computed twice"
        assert wrapped.stats()["prefix"]["reused_tokens"] == 119
        wrapped.manager.prefix.clear()
        with wrapped.open("book") as context:
            assert context.tokens == 100


def test_a_batch_begins_with_what_all_its_rows_know(tmp_path: Path) -> None:
    one, two = tokens(1, 90), tokens(1, 90, seed=12)
    with wrap("llama", "warm", tmp_path) as wrapped:
        wrapped.generate(one, **NEW)
        wrapped.generate(two[:, :70], **NEW)
        batch = torch.cat([one, two])
        assert plain("llama", two[:, :70])[0][70] != two[0, 70]
        assert wrapped.generate(batch, **NEW).tolist() == plain("llama", batch)
        assert wrapped.stats()["prefix"]["reused_tokens"] == 2 * 70


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "minimum"), ("qwen3", "cold"), ("llama", "hot")]
)
def test_rows_of_different_length_have_their_own_beginnings(
    name: str, kind: str, tmp_path: Path
) -> None:
    """A left-padded batch: padding moves behind the pages that each row begins with."""
    ids = tokens(3, 120, seed=21)
    mask = torch.ones_like(ids)
    for row, padding in enumerate([0, 37, 101]):
        ids[row, :padding], mask[row, :padding] = 0, 0
    with wrap(name, kind, tmp_path, rows=3) as wrapped:
        wrapped.generate(ids[:1, :90], **NEW)
        wrapped.generate(ids[1:2, 37:], **NEW)
        for count in (2, 3):
            batch = {"attention_mask": mask[:count], "max_new_tokens": 4, "do_sample": False}
            got = wrapped.generate(ids[:count], **batch)
            assert got.tolist() == plain(name, ids[:count], **batch)
        reused = wrapped.stats()["prefix"]["reused_tokens"]
        assert reused == 2 * (80 + 80), "whole pages of both rows, twice"
        whole = wrapped.generate(ids, **batch, return_dict_in_generate=True)
        assert whole.sequences.tolist() == got.tolist()
        del whole  # it holds the cache
        limited = {"attention_mask": mask, "max_length": 123, "do_sample": False}
        want = tiny_model(name).generate(ids, **limited)
        assert wrapped.generate(ids, **limited).tolist() == want.tolist()
        batch["no_repeat_ngram_size"] = 2
        assert wrapped.generate(ids, **batch).tolist() == plain(name, ids, **batch)
        reused = wrapped.stats()["prefix"]["reused_tokens"]
        assert reused == 3 * (80 + 80), "padding moved where prompts are looked at"


def test_pages_in_the_store_are_known_to_the_next_process(tmp_path: Path) -> None:
    """Without opening the context that saved them; a damaged one is computed instead."""
    ids = torch.cat([tokens(1, 100), tokens(1, 30, seed=5)], dim=1)
    with wrap("llama", "cold", tmp_path) as wrapped, wrapped.open("book") as context:
        context.append(ids[:, :100])
        context.save()
    for damaged in (False, True):
        with wrap("llama", "cold", tmp_path) as wrapped:
            if damaged:
                (extent,) = (tmp_path / "extents").iterdir()
                content = bytearray(extent.read_bytes())
                content[100 :: wrapped.manager.geometry.frame_bytes] = bytes(
                    value ^ 255 for value in content[100 :: wrapped.manager.geometry.frame_bytes]
                )
                extent.write_bytes(content)
            assert wrapped.generate(ids, **NEW).tolist() == plain("llama", ids)
            stats = wrapped.stats()
            assert stats["prefix"]["reused_tokens"] == (0 if damaged else 5 * 16)
            assert stats["prefix"]["failed_reads"] == damaged
            assert stats["prefill"]["tokens"] == 129 - stats["prefix"]["reused_tokens"]


@pytest.mark.parametrize("encoded", [False, True])
def test_kept_pages_give_way_to_new_ones(
    encoded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of hot they move down; before a budget error they are evicted, oldest first."""
    hf_model, raw = model("llama"), 0
    if encoded:
        encode_hot(monkeypatch)
        raw = 6  # frames of each layer for more tails
    with tierkv.wrap(hf_model, page_tokens=16) as probe:
        page = probe.manager.geometry.page_bytes
        frame = probe.manager.geometry.frame_bytes
    settings = {"gpu_budget": page * (3 * (12 + raw) + 6), "cpu_budget": frame * 3 * 12}
    with wrap("llama", "hot", tmp_path, **settings) as wrapped:
        prompts = [tokens(1, 150, seed=seed) for seed in range(4)]
        for ids in prompts:
            assert wrapped.generate(ids, **NEW).tolist() == plain("llama", ids)
            tiers, prefix = wrapped.manager.tiers, wrapped.manager.prefix
            blocks = prefix.tree.match(ids[0, :144].numpy()).blocks
            assert len(blocks) == 9
            assert tiers.is_hot(blocks).all(), "old pages kept the new ones out of hot"
        again = prompts[2]  # it had to leave hot for the last one, and comes back
        assert wrapped.generate(again, **NEW).tolist() == plain("llama", again)
        assert wrapped.stats()["prefix"]["reused_pages"]["warm"] > 0
        blocks = prefix.tree.match(again[0, :144].numpy()).blocks
        assert tiers.is_hot(blocks).all(), "pages that nobody uses stayed hot instead"
        stats = wrapped.stats()
        assert stats["pages_demoted"] > 0
        assert 0 < stats["prefix"]["evicted_pages"] < 4 * 10
        assert len(prefix.tree.match(prompts[0][0].numpy()).blocks) < 9, "the oldest goes first"
        whole = tokens(1, 16 * 23 - 1, seed=9)  # all there is
        assert wrapped.generate(whole, max_new_tokens=1).shape[1] == 16 * 23
        with pytest.raises(WarmBudgetError):
            wrapped.generate(tokens(1, 16 * 30, seed=10), max_new_tokens=1)
        assert wrapped.generate(prompts[3], **NEW).tolist() == plain("llama", prompts[3])


@pytest.mark.parametrize("codec", ["int8", "hot=int8"])
def test_kept_pages_leave_the_residual_window_its_frames(codec: str, tmp_path: Path) -> None:
    """Bug: pages of finished requests held the raw frames where hot pages are encoded, and later
    requests had no residual window."""
    given = {"gpu_budget": roomy(model("llama"), 8, raw=6), "cpu_budget": "8MiB"}
    given |= {"codec": codec, "residual_tokens": 32}
    with wrap("llama", "hot", tmp_path, **given) as wrapped:
        for seed in range(4):
            ids = tokens(1, 150, seed=seed)
            wrapped.generate(ids, max_new_tokens=5, do_sample=False)
            blocks = wrapped.manager.prefix.tree.match(ids[0, :144].numpy()).blocks
            assert len(blocks) == 9
            assert (wrapped.manager.directory.hot[blocks[-2:]] >= 0).all()


def test_tokens_that_nobody_vouches_for_are_not_kept(tmp_path: Path) -> None:
    """A cache that was fed by somebody else, with padding or by beams, is no one's beginning."""
    ids, more = tokens(2, 60), tokens(1, 40, seed=4)
    with wrap("llama", "hot", tmp_path) as wrapped:
        cache = wrapped.cache()
        model("llama")(ids[:1], **{wrapped.cache_argument(): cache})
        wrapped.prefill(torch.cat([ids[1:], more], 1), cache)  # not what the cache holds
        assert wrapped.manager.prefix.tree.pages == 0
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        got = wrapped.generate(ids, attention_mask=mask, **NEW)
        assert got.tolist() == plain("llama", ids, attention_mask=mask)
        assert wrapped.manager.prefix.tree.pages == 0
        wrapped.generate(more, max_new_tokens=30, num_beams=2, do_sample=False)
        assert wrapped.manager.prefix.tree.pages == 2
        with wrapped.open() as context:
            context.append(more)
            context.edit(20, ids[:1])
            assert (
                context.generate(**NEW).tolist()[0] == plain("llama", context.ids[:, :80])[0][80:]
            )


def test_after_a_failure_nobody_vouches_for_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows had changed places, dropping pages failed, and they were kept by each other's tokens."""
    ids = tokens(2, 200)
    with wrap("llama", "warm", tmp_path) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :100], tier_cache)

        def fails(blocks: Any) -> None:
            raise ColdWriteError("made up")

        with monkeypatch.context() as patch:
            patch.setattr(wrapped.manager, "release", fails)
            with pytest.raises(ColdWriteError):
                tier_cache.reorder_cache(torch.tensor([1, 0]))
        wrapped.prefill(ids, tier_cache)
        wrapped.prefill(ids, wrapped.cache())  # keeps what is not kept yet
        got = wrapped.generate(ids, max_new_tokens=8, do_sample=False)
    want = model("llama").generate(ids, max_new_tokens=8, do_sample=False)
    assert got.tolist() == want.tolist()


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="prefix_cache cannot be used"):
        wrap("gemma3", "hot", tmp_path)
    assert model("gemma3").config._attn_implementation != "tierkv"
    with pytest.raises(ConfigError, match="prefix_cache must be true or false"):
        tierkv.wrap(model("llama"), prefix_cache="yes")
