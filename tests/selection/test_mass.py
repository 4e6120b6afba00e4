"""Shares of attention: they sum to one, average the group, and never become NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.selection.cases import seeds
from tierkv.selection.base import LEAST, page_mass


def random_logits(seed: int, pages: int = 7, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(2, 3, 4, pages, generator=generator)


@settings(max_examples=60)
@given(seed=seeds, spread=st.sampled_from([0.0, 1.0, 30.0, 1e4]), density=st.floats(0, 1))
def test_sums_to_one_over_valid_pages(seed: int, spread: float, density: float) -> None:
    logits = random_logits(seed, spread=spread)
    valid = torch.rand(2, 3, 7, generator=torch.Generator().manual_seed(seed)) < density
    mass = page_mass(logits, valid)
    assert mass.dtype == torch.float32
    assert not mass.isnan().any()
    assert torch.equal(mass > 0, valid)
    torch.testing.assert_close(mass.sum(dim=-1), valid.any(dim=-1).float())


@settings(max_examples=30)
@given(seed=seeds)
def test_is_the_mean_over_the_group_of_softmaxes(seed: int) -> None:
    logits = random_logits(seed)
    valid = torch.rand(2, 1, 7, generator=torch.Generator().manual_seed(seed)) < 0.7
    mass = page_mass(logits, valid)
    for b in range(2):
        for kv_head in range(3):
            pages = valid[b, 0].nonzero().flatten()
            if len(pages):
                heads = [logits[b, kv_head, g, pages].double().softmax(-1) for g in range(4)]
                expected = sum(heads) / 4
                torch.testing.assert_close(
                    mass[b, kv_head, pages].double(), expected, atol=1e-6, rtol=1e-5
                )


def test_a_head_with_large_logits_has_one_vote() -> None:
    """Raw maxima would let it outvote the others; adding a constant to a head changes nothing."""
    logits = random_logits(5)
    louder = logits.clone()
    louder[:, :, 0] += 1000
    valid = torch.ones(7, dtype=torch.bool)
    torch.testing.assert_close(
        page_mass(louder, valid), page_mass(logits, valid), atol=1e-4, rtol=1e-3
    )


def test_invalid_pages_take_no_share() -> None:
    logits = random_logits(6)
    valid = torch.tensor([True, False, True, True, False, True, True])
    changed = logits.clone()
    changed[..., ~valid] = 1e9
    assert torch.equal(page_mass(changed, valid), page_mass(logits, valid))


def test_a_share_that_underflows_is_still_a_choice() -> None:
    logits = torch.tensor([0.0, -1000.0, -torch.inf]).expand(1, 1, 2, 3)
    mass = page_mass(logits, torch.ones(3, dtype=torch.bool))
    assert mass.flatten().tolist() == [1.0, LEAST, 0.0]


def test_minus_infinity_in_some_heads_is_a_score() -> None:
    logits = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0], [-torch.inf] * 2])
    mass = page_mass(logits.view(1, 1, 3, 2), torch.ones(2, dtype=torch.bool))
    assert mass.flatten().tolist() == pytest.approx([1 / 3, 1 / 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits(dtype: torch.dtype) -> None:
    mass = page_mass(random_logits(8).to(dtype), torch.ones(7, dtype=torch.bool))
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.sum(dim=-1), torch.ones(2, 3))
