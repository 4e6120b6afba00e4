"""The constructed model: right answers at any length, and no right answer without every page."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tierkv.attention import selective
from tierkv.bench import constructed
from tierkv.bench.constructed import MISSING, Needles
from tierkv.hf.attach import cache_argument
from tierkv.hf.shapes import stock_cache
from tierkv.paging.selective import NONE

PAGE, TOKENS = 16, 3000


@cache
def model(dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    return constructed.build(dtype=dtype, **({"layers": 3, "heads": 4, "kv_heads": 2} | sizes))


@torch.no_grad()
def forced(hf_model: Any, past: Any, context: Needles, index: int, first: int) -> list[int]:
    """Return what a model says after a needle's key and its true answer, from position `first`."""
    asked = torch.tensor([[context.keys[index], *context.answers[index][:-1]]])
    positions = first + torch.arange(asked.shape[1])[None]
    logits = hf_model(asked, position_ids=positions, **{cache_argument(hf_model): past}).logits
    past.crop(-asked.shape[1])
    found: list[int] = logits[0].argmax(-1).tolist()
    return found


@torch.no_grad()
def read(hf_model: Any, context: Needles, positions: torch.Tensor | None = None) -> Any:
    past = stock_cache(hf_model)
    hf_model(context.ids, position_ids=positions, **{cache_argument(hf_model): past})
    return past


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "head_dim"), [(4, 8, 2, 64), (3, 4, 4, 64), (5, 8, 1, 128)]
)
def test_right_answers_also_a_million_tokens_apart(
    layers: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """RoPE depends on positions only, so a gap in them is as good as tokens in between."""
    hf_model = model(dtype, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    context = constructed.needles(400)
    positions = torch.arange(400)[None]
    for apart in (0, (1 << 20) - 400):
        far = torch.where(positions < 200, positions, positions + apart)
        past = read(hf_model, context, far)
        for index in range(len(context)):
            got = forced(hf_model, past, context, index, 400 + apart)
            assert tuple(got) == context.answers[index]


@pytest.mark.parametrize("part", ["keys", "values"])
def test_every_page_of_every_lookup_head_matters(part: str) -> None:
    """Zeroed or moved by one token in one KV head of one layer: the answer is `MISSING`."""
    hf_model, context = model(), constructed.needles(400)
    past = read(hf_model, context)
    start = context.starts[3]
    spoilt = slice(start // PAGE * PAGE, start // PAGE * PAGE + 2 * PAGE)

    def pages(layer: int, head: int) -> torch.Tensor:  # appending makes new tensors
        whole: torch.Tensor = getattr(past.layers[layer], part)
        return whole[0, head, spoilt]

    for layer in (1, 2):
        for head in range(2):
            right = pages(layer, head).clone()
            for wrong in (torch.zeros_like(right), right.roll(1, dims=0)):
                pages(layer, head).copy_(wrong)
                got = forced(hf_model, past, context, 3, 400)
                assert tuple(got) != context.answers[3]
                if not wrong.any():
                    assert set(got) == {MISSING}
                others = forced(hf_model, past, context, 7, 400)
                assert tuple(others) == context.answers[7]
            pages(layer, head).copy_(right)
    assert tuple(forced(hf_model, past, context, 3, 400)) == context.answers[3]


def settings(path: Path, dtype: torch.dtype, selector: str | None) -> dict[str, Any]:
    """Budgets so small that a third of the pages is in each tier; 12 of 187 pages are selected."""
    size = 3 * TOKENS * 2 * 2 * 64 * dtype.itemsize
    hot, given = 0.3 * size, {"attention": "exact"}
    if selector is not None:
        hot, given = 0.35 * size + (512 << 10), {"attention": "selective", "selector": selector}
    return given | {
        "page_tokens": PAGE, "store": str(path), "disk_floor": 0, "gpu_budget": int(hot),
        "cpu_budget": int(0.3 * size), "token_budget": 12 * PAGE, "sink_tokens": PAGE,
        "recent_tokens": 2 * PAGE, "max_context": TOKENS + 200,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selector", [None, "cuboid", "bound", "mean", "keys2"])
def test_three_tiers_find_every_needle(
    selector: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    context = constructed.needles(TOKENS)
    with tierkv.wrap(model(dtype), **settings(tmp_path, dtype, selector)) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(context.ids, tier_cache)
        tiers = [constructed.homes(tier_cache, context, index) for index in range(len(context))]
        for tier in ("hot", "warm", "cold"):
            assert sum(count[tier] for count in tiers) >= 3
        for index in range(len(context)):
            got = constructed.ask(wrapped, tier_cache, context, index)
            assert got == context.answers[index], f"needle {index} at {context.starts[index]}"
        assert tier_cache.get_seq_length() == TOKENS


def test_one_head_page_left_out_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a window, which leaves out all of them, finds none."""
    context, look_up = constructed.needles(TOKENS), selective.look_up
    page = context.starts[4] // PAGE
    left_out = True

    def without(query: Any, state: Any, layer: int, *more: Any) -> torch.Tensor:
        pages = look_up(query, state, layer, *more)
        second = pages[0, 1]
        if left_out:
            pages[0, 1] = torch.where((second == page) | (second == page + 1), NONE, second)
        return pages

    monkeypatch.setattr(selective, "look_up", without)
    given = settings(tmp_path / "a", torch.float32, "cuboid")
    with tierkv.wrap(model(), **given) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(context.ids, tier_cache)
        assert set(constructed.ask(wrapped, tier_cache, context, 4)) == {MISSING}
        assert constructed.ask(wrapped, tier_cache, context, 5) == context.answers[5]
        left_out = False
        assert constructed.ask(wrapped, tier_cache, context, 4) == context.answers[4]
    given = settings(tmp_path / "b", torch.float32, "window")
    with tierkv.wrap(model(), **given) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(context.ids, tier_cache)
        assert set(constructed.ask(wrapped, tier_cache, context, 4)) == {MISSING}


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    for sizes, text in (
        ({"layers": 1}, "2 layers at least"),
        ({"layers": 6, "heads": 8}, "at most 32"),
        ({"head_dim": 32}, "64 at least"),
        ({"heads": 3}, "3 heads on 2 KV heads"),
        ({"vocab": 100}, "more than 161"),
    ):
        with pytest.raises(ValueError, match=text):
            constructed.build(**sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="10 needles of 5 tokens need"):
        constructed.needles(99)
