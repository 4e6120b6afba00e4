"""The choice of pages against a loop: budgets, ties, targets, masks, and the order of entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.selection.cases import choose_by_loop
from tierkv.errors import ConfigError
from tierkv.selection import choose

ALL = torch.tensor(True)


@st.composite
def rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Masses in eighths, so that ties are common and sums exact, and which pages may be chosen."""
    pages = draw(st.integers(0, 12))
    row = st.lists(st.integers(0, 8), min_size=pages, max_size=pages)
    mass = torch.tensor(draw(st.lists(row, min_size=6, max_size=6))) / 8
    mask = st.lists(st.booleans(), min_size=pages, max_size=pages)
    candidates = torch.tensor(draw(st.lists(mask, min_size=6, max_size=6)), dtype=torch.bool)
    return mass.view(2, 3, pages).float(), candidates.view(2, 3, pages)


@settings(max_examples=200)
@given(
    drawn=rows(),
    budget=st.integers(0, 15),
    target=st.sampled_from([None, 0.125, 0.5, 0.75, 0.95, 1.0]),
)
def test_equals_a_loop(
    drawn: tuple[torch.Tensor, torch.Tensor], budget: int, target: float | None
) -> None:
    mass, candidates = drawn
    pages, counts = choose(mass, budget, candidates=candidates, mass_target=target)
    assert pages.shape == (2, 3, budget)
    assert counts.shape == (2, 3)
    assert pages.dtype == counts.dtype == torch.int64
    for b in range(2):
        for head in range(3):
            expected = choose_by_loop(
                mass[b, head].tolist(), candidates[b, head].tolist(), budget, target
            )
            assert counts[b, head] == len(expected)
            assert pages[b, head].tolist() == expected + [-1] * (budget - len(expected))


def test_ties_go_to_the_lower_page() -> None:
    mass = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.3]).view(1, 1, 5)
    assert choose(mass, 3, candidates=ALL).pages.flatten().tolist() == [1, 2, 4]
    many = torch.full((1, 2, 1000), 1e-3)  # large enough for a sort that is not stable by luck
    assert choose(many, 400, candidates=ALL).pages[0, 1].tolist() == list(range(400))


def test_entries_are_in_the_order_of_the_sequence() -> None:
    mass = torch.tensor([0.2, 0.1, 0.7]).view(1, 1, 3)
    assert choose(mass, 4, candidates=ALL).pages.flatten().tolist() == [0, 1, 2, -1]


def test_target_stops_early_and_the_budget_caps_it() -> None:
    mass = torch.tensor([0.05, 0.6, 0.05, 0.3]).view(1, 1, 4)
    for budget, target, expected in ((4, 0.5, [1]), (4, 0.85, [1, 3]), (1, 0.85, [1])):
        chosen = choose(mass, budget, candidates=ALL, mass_target=target)
        assert chosen.pages.flatten().tolist()[: len(expected)] == expected
        assert chosen.counts.item() == len(expected)


def test_target_is_a_share_of_the_candidates() -> None:
    mass = torch.tensor([0.8, 0.15, 0.05]).view(1, 1, 3)
    candidates = torch.tensor([False, True, True])
    chosen = choose(mass, 3, candidates=candidates, mass_target=0.7)
    assert chosen.pages.flatten().tolist() == [1, -1, -1]


def test_no_candidates_no_pages() -> None:
    for mass in (torch.rand(1, 2, 4), torch.full((1, 2, 4), torch.nan), torch.rand(1, 2, 0)):
        for target in (None, 0.9):
            nothing = torch.zeros(mass.shape[-1], dtype=torch.bool)
            chosen = choose(mass, 3, candidates=nothing, mass_target=target)
            assert chosen.pages.tolist() == [[[-1] * 3] * 2]
            assert chosen.counts.tolist() == [[0, 0]]


@pytest.mark.parametrize("target", [0.0, -0.5, 1.01])
def test_a_target_that_is_no_share(target: float) -> None:
    with pytest.raises(ConfigError, match="mass_target"):
        choose(torch.rand(1, 1, 4), 2, candidates=ALL, mass_target=target)


def test_a_negative_budget() -> None:
    with pytest.raises(ConfigError, match="budget_pages must be 0 or more, got -1"):
        choose(torch.rand(1, 1, 4), -1, candidates=ALL)
