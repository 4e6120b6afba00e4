"""The measures of the quality study, on layers small enough to know the answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.selection.cases import seeds
from tierkv.attention import reference
from tierkv.selection import SELECTORS, selector
from tierkv.selection.quality import (
    Regime,
    Trace,
    attention,
    estimate,
    overlap,
    recovered,
    reuse_misses,
    select,
)

REGIME = Regime(page_tokens=16, budget_tokens=64, sink_tokens=32, recent_tokens=32)


def trace(seed: int = 0, tokens: int = 300, steps: int = 20) -> Trace:
    generator = torch.Generator().manual_seed(seed)
    return Trace(
        queries=2 * torch.randn(steps, 6, 8, generator=generator),
        seen=torch.arange(tokens - steps + 1, tokens + 1),
        keys=torch.randn(2, tokens, 8, generator=generator),
        values=torch.randn(2, tokens, 5, generator=generator),
        scale=0.5,
    )


def test_attention_is_that_of_the_reference() -> None:
    layer = trace()
    out = torch.einsum("skgt,ktd->skgd", attention(layer), layer.values)
    for step, seen in enumerate(layer.seen.tolist()):
        part = reference.attend(
            layer.queries[step].view(1, 2, 3, 8),
            layer.keys[None, :, :seen],
            layer.values[None, :, :seen],
            scale=layer.scale,
        )
        torch.testing.assert_close(out[step], part.out[0])


def test_candidates_are_whole_pages_between_sink_and_recent_tokens() -> None:
    """At 281 tokens, all but the last 32 end in page 15; page 15 itself ends at 256."""
    candidates = REGIME.candidates(trace())
    assert candidates[0].nonzero().flatten().tolist() == list(range(2, 15))
    assert candidates[-1].nonzero().flatten().tolist() == list(range(2, 16))
    assert REGIME.sealed(trace())[0].sum() == 281 // 16


@pytest.mark.parametrize("name", SELECTORS)
def test_a_budget_for_everything_recovers_everything(name: str) -> None:
    layer = trace()
    regime = replace(REGIME, budget_tokens=320)
    chosen = select(estimate(selector(name, 16), layer, regime), layer, regime)
    mass, error = recovered(layer, attention(layer), chosen, regime)
    if name == "window":
        assert not chosen.any()
        assert (mass < 0.9).any()
    else:
        assert torch.equal(chosen, regime.candidates(layer).unsqueeze(1).expand_as(chosen))
        assert (mass > 0.9999).all()
        assert (error < 1e-4).all()


@settings(max_examples=20)
@given(seed=seeds, all_compete=st.booleans())
def test_recovered_equals_attention_over_what_was_read(seed: int, all_compete: bool) -> None:
    layer = trace(seed).only(slice(None, None, 4))
    regime = replace(REGIME, all_compete=all_compete)
    chosen = select(estimate(selector("cuboid"), layer, regime), layer, regime)
    assert (chosen.sum(dim=-1) == regime.budget_pages).all()
    weights = attention(layer)
    mass, error = recovered(layer, weights, chosen, regime)
    for step, seen in enumerate(layer.seen.tolist()):
        stop = (seen - 32) // 16 * 16
        for head in range(6):
            pages = chosen[step, head // 3].nonzero().flatten().tolist()
            read = [t for t in range(seen) if t < 32 or t >= stop or t // 16 in pages]
            scores = layer.keys[head // 3, :seen] @ layer.queries[step, head] * layer.scale
            share = scores.softmax(-1)[read].sum()
            true = scores.softmax(-1) @ layer.values[head // 3, :seen]
            ours = scores[read].softmax(-1) @ layer.values[head // 3, read]
            torch.testing.assert_close(mass[step, head], share)
            torch.testing.assert_close(
                error[step, head], (ours - true).norm() / true.norm(), atol=1e-4, rtol=1e-3
            )


@settings(max_examples=20)
@given(seed=seeds)
def test_with_one_head_a_group_no_selector_beats_the_oracle(seed: int) -> None:
    layer = trace(seed)
    layer = replace(layer, queries=layer.queries[:, :2])
    weights, masses = attention(layer), {}
    for name in SELECTORS:
        chosen = select(estimate(selector(name, 16), layer, REGIME), layer, REGIME)
        masses[name] = recovered(layer, weights, chosen, REGIME).mass
    for name, mass in masses.items():
        assert (mass <= masses["oracle"] + 1e-5).all(), name


def test_mass_target_selects_fewer_pages() -> None:
    layer = trace()
    sizes = []
    for target in (0.5, 0.9, None):
        regime = replace(REGIME, budget_tokens=128, mass_target=target)
        chosen = select(estimate(selector("oracle", 16), layer, regime), layer, regime)
        sizes.append(int(chosen.sum()))
    assert sizes[0] < sizes[1] < sizes[2]


def test_overlap() -> None:
    truth = torch.tensor([[[True, True, False, True], [False] * 4]])
    guess = torch.tensor([[[True, False, True, True], [True] * 4]])
    assert overlap(guess, truth).tolist() == [[pytest.approx(2 / 3), 0]]


def pages(*steps: set[int]) -> torch.Tensor:
    out = torch.zeros(len(steps), 1, 8, dtype=torch.bool)
    for step, chosen in enumerate(steps):
        out[step, 0, list(chosen)] = True
    return out


def test_reuse_drops_what_was_selected_longest_ago() -> None:
    selected = pages({0, 1}, {1, 2}, {0, 1}, {3, 4}, {1, 3}, {0, 2})
    assert reuse_misses(selected, 3).flatten().tolist() == [2, 1, 0, 2, 1, 2]
    assert reuse_misses(selected, 2).flatten().tolist() == [2, 1, 1, 2, 1, 2]
    assert reuse_misses(selected, 8).flatten().tolist() == [2, 1, 0, 2, 0, 0]


@settings(max_examples=40)
@given(
    steps=st.lists(st.sets(st.integers(0, 7), max_size=3), min_size=1, max_size=20),
    capacity=st.integers(3, 8),
)
def test_reuse_equals_a_list_of_recent_pages(steps: list[set[int]], capacity: int) -> None:
    held: list[int] = []  # oldest first; of equal age the higher index is dropped first
    expected = []
    for now in steps:
        expected.append(len(now - set(held)))
        held = [page for page in held if page not in now] + sorted(now, reverse=True)
        held = held[-capacity:]
    assert reuse_misses(pages(*steps), capacity).flatten().tolist() == expected
