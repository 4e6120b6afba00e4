"""Each selector against a plain loop, on every head layout and dtype, and on hostile pages."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.selection.cases import (
    DTYPES,
    SHAPES,
    dtypes,
    random_pages,
    seeds,
    shapes,
    true_scores,
)
from tierkv.errors import ConfigError
from tierkv.selection import DEFAULT, SELECTORS, choose, page_mass, selector

SCALE = 0.3
TOKENS = 16


def scores(name: str, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    chosen = selector(name, keys.shape[-2])
    return chosen.scores(query, chosen.summarize(keys), SCALE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", SELECTORS)
def test_shapes_and_dtypes(name: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    query, keys = random_pages(1, heads, dtype=dtype)
    chosen = selector(name, TOKENS)
    assert chosen.name == name
    before = keys.clone()
    summaries = chosen.summarize(keys)
    assert summaries.shape == (2, heads[1], 5, chosen.parts, 8)
    assert summaries.dtype == dtype
    logits = chosen.scores(query, summaries, SCALE)
    assert logits.shape == (2, heads[1], heads[0] // heads[1], 5)
    assert logits.dtype == torch.float32
    assert not logits.isnan().any()
    assert torch.equal(keys, before)


@settings(max_examples=60)
@given(seed=seeds, heads=shapes, dtype=dtypes)
def test_no_key_scores_above_the_bound(
    seed: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    query, keys = random_pages(seed, heads, dtype=dtype)
    best = true_scores(query, keys, SCALE).amax(dim=-1)
    assert (scores("bound", query, keys).double() >= best - 1e-4).all()


@settings(max_examples=30)
@given(seed=seeds, heads=shapes)
def test_the_bound_is_reached_when_all_keys_are_equal(seed: int, heads: tuple[int, int]) -> None:
    query, keys = random_pages(seed, heads)
    keys = keys[..., :1, :].expand_as(keys)
    best = true_scores(query, keys, SCALE).amax(dim=-1).float()
    for name in ("bound", "cuboid", "mean"):
        torch.testing.assert_close(scores(name, query, keys), best, atol=1e-4, rtol=1e-4)


@settings(max_examples=25)
@given(seed=seeds, heads=shapes, dtype=dtypes)
def test_cuboid_equals_a_loop(seed: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    query, keys = random_pages(seed, heads, batch=1, pages=2, dim=4, dtype=dtype)
    group = heads[0] // heads[1]
    expected = torch.zeros(1, heads[1], group, 2)
    for head in range(heads[0]):
        for page in range(2):
            total = 0.0
            for channel in range(4):
                values = keys[0, head // group, page, :, channel].tolist()
                centre = (max(values) + min(values)) / 2
                radius = sum(abs(centre - value) for value in values) / len(values)
                corners = torch.tensor([centre + radius, centre - radius]).to(dtype).tolist()
                q = query[0, head, channel].item()
                total += q * (corners[0] if q > 0 else corners[1])
            expected[0, head // group, head % group, page] = total * SCALE
    rounding = 0.0 if dtype == torch.float32 else 20 * torch.finfo(dtype).eps  # of the corners
    torch.testing.assert_close(
        scores("cuboid", query, keys), expected, atol=1e-4 + rounding, rtol=1e-4
    )


@settings(max_examples=30)
@given(seed=seeds, heads=shapes, dtype=dtypes)
def test_cuboid_lies_between_mean_and_bound(
    seed: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """The mean key is inside the cuboid, and the cuboid is inside the box of all keys."""
    query, keys = random_pages(seed, heads, dtype=dtype)
    slack = 1e-4 + (0.0 if dtype == torch.float32 else 60 * torch.finfo(dtype).eps)
    assert (scores("cuboid", query, keys) <= scores("bound", query, keys) + slack).all()
    assert (scores("mean", query, keys) <= scores("cuboid", query, keys) + slack).all()


@settings(max_examples=30)
@given(seed=seeds, heads=shapes, dtype=dtypes)
def test_cuboid8_is_cuboid_within_its_steps(
    seed: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Eight channels share a step: the largest of them over 127, up to the next power of two."""
    query, keys = random_pages(seed, heads, dtype=dtype)
    largest = float(keys.abs().max())
    step = max(2 * largest / 127, 2.0**-11) + largest * torch.finfo(dtype).eps
    room = SCALE * query.float().abs().sum(dim=-1).amax() * 2 * step + 1e-4
    error = scores("cuboid8", query, keys) - scores("cuboid", query, keys)
    assert (error.abs() <= room).all()


def test_cuboid8_keeps_what_its_steps_can() -> None:
    """Centres and radii that are whole steps are kept exactly, negative and large ones too."""
    centre = torch.tensor([126.0, -126, 3, 0, 0.5, -0.25, 0.125, 0, 2032, -2032, 16, 0, 0, 0, 0, 0])
    radius = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 126, 0, 0, 1000, 0, 0, 0, 0, 0])
    keys = torch.stack((centre + radius, centre - radius), dim=0)[None, None, None]
    query = torch.eye(16)[None]
    for sign in (1, -1):
        got = selector("cuboid8").scores(sign * query, selector("cuboid8").summarize(keys), 1.0)
        step = torch.where(torch.arange(16) < 8, 1.0, 16.0)
        want = sign * (centre / step).round() * step + radius
        torch.testing.assert_close(got[0, 0, :, 0], want, atol=2.0**-11, rtol=0)


@settings(max_examples=30)
@given(seed=seeds, heads=shapes, dtype=dtypes)
def test_oracle_is_the_attention_mass(
    seed: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    query, keys = random_pages(seed, heads, dtype=dtype)
    each = true_scores(query, keys, SCALE)
    share = each.flatten(-2).softmax(dim=-1).unflatten(-1, each.shape[-2:]).sum(dim=-1)
    mass = page_mass(scores("oracle", query, keys), torch.ones(5, dtype=torch.bool))
    torch.testing.assert_close(mass, share.mean(dim=2).float(), atol=1e-5, rtol=1e-3)


@settings(max_examples=30)
@given(seed=seeds, heads=shapes, dtype=dtypes)
def test_keys2_equals_the_oracle_on_rounded_keys(
    seed: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Each channel of a page at four levels from its smallest to its largest value."""
    query, keys = random_pages(seed, heads, dtype=dtype)
    low = keys.amin(dim=-2, keepdim=True).float()
    step = ((keys.amax(dim=-2, keepdim=True).float() - low) / 3).to(dtype).float()
    rounded = low + ((keys.float() - low) / step).round().clamp(0, 3) * step
    expected = true_scores(query, rounded, SCALE).logsumexp(dim=-1).float()
    torch.testing.assert_close(scores("keys2", query, keys), expected, atol=1e-4, rtol=1e-4)
    assert ((rounded - keys.float()).abs() <= 0.51 * step + 1e-2 * keys.float().abs()).all()


def test_keys2_is_exact_for_four_levels() -> None:
    """And for channels that are the same in all keys."""
    generator = torch.Generator().manual_seed(2)
    keys = torch.randint(0, 4, (1, 2, 3, TOKENS, 8), generator=generator) / 2
    keys[..., 0, :], keys[..., 1, :], keys[..., 3] = 0, 1.5, 0.25
    query = torch.randn(1, 4, 8, generator=generator)
    for dtype in DTYPES:
        got = scores("keys2", query.to(dtype), keys.to(dtype))
        want = scores("oracle", query.to(dtype), keys.to(dtype))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@settings(max_examples=30)
@given(seed=seeds, heads=shapes, dtype=dtypes)
def test_mean_equals_the_mean_score(seed: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    query, keys = random_pages(seed, heads, dtype=dtype)
    expected = true_scores(query, keys, SCALE).mean(dim=-1).float()
    slack = 1e-4 + (0.0 if dtype == torch.float32 else 60 * torch.finfo(dtype).eps)
    torch.testing.assert_close(scores("mean", query, keys), expected, atol=slack, rtol=1e-3)


@pytest.mark.parametrize("name", SELECTORS)
def test_heads_of_a_group_stand_next_to_each_other(name: str) -> None:
    """Head h reads KV head h // group; an interleaved map (h % kv_heads) gives other scores."""
    query, keys = random_pages(2, (6, 2))
    whole = scores(name, query, keys)
    for kv_head in range(2):
        alone = scores(name, query[:, 3 * kv_head :][:, :3], keys[:, kv_head : kv_head + 1])
        torch.testing.assert_close(whole[:, kv_head : kv_head + 1], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SELECTORS)
def test_no_pages_no_scores(name: str) -> None:
    query, keys = random_pages(3, (4, 2), pages=1)
    logits = scores(name, query, keys[:, :, :0])
    assert logits.shape == (2, 2, 2, 0)
    assert page_mass(logits, torch.ones(0, dtype=torch.bool)).shape == (2, 2, 0)


def test_window_chooses_nothing() -> None:
    query, keys = random_pages(4, (4, 2))
    everything = torch.ones(5, dtype=torch.bool)
    mass = page_mass(scores("window", query, keys), everything)
    assert (mass == 0).all()
    chosen = choose(mass, 3, candidates=everything)
    assert (chosen.counts == 0).all()
    assert (chosen.pages == -1).all()


def test_unknown_selector_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"selector must be one of cuboid.*oracle, got 'quest'"):
        selector("quest")
    assert DEFAULT in SELECTORS


def first_choice(name: str, query: torch.Tensor, keys: torch.Tensor) -> int:
    everything = torch.ones(keys.shape[2], dtype=torch.bool)
    mass = page_mass(scores(name, query, keys), everything)
    return int(choose(mass, 1, candidates=everything).pages[0, 0, 0])


def hostile(pages: int = 8, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a query, quiet pages, and the key that the query asks for."""
    generator = torch.Generator().manual_seed(7)
    needle = torch.randn(dim, generator=generator).sign()
    keys = 0.05 * torch.randn(1, 1, pages, TOKENS, dim, generator=generator)
    return 2 * needle.view(1, 1, dim), keys, needle


def test_needle_among_opposites_is_lost_to_the_mean_only() -> None:
    """One matching key among keys that point the other way: the mean looks like a bad page."""
    query, keys, needle = hostile()
    keys[0, 0, 5] -= needle / 2
    keys[0, 0, 5, 3] = 4 * needle
    assert first_choice("oracle", query, keys) == 5
    assert first_choice("bound", query, keys) == 5
    assert first_choice("cuboid", query, keys) == 5
    assert first_choice("mean", query, keys) != 5


def test_decoy_of_outliers_fools_the_bound_only() -> None:
    """Each channel has its extremes in other keys: the box reaches far, but no key is there."""
    query, keys, needle = hostile()
    keys[0, 0, 5, 3] = needle
    keys[0, 0, 2] += 4 * torch.eye(TOKENS) - 4 * torch.eye(TOKENS).roll(1, dims=0)
    assert first_choice("oracle", query, keys) == 5
    assert first_choice("bound", query, keys) == 2
    assert first_choice("cuboid", query, keys) == 5
    assert first_choice("mean", query, keys) == 5


def test_outliers_on_one_side_fool_the_cuboid_too() -> None:
    """Its centre is the middle of the range, so all keys but the outlier are far from it.

    A known weakness of the digest, kept as published: with the range [0, 4] and all keys but one
    at 0, the centre is 2, the mean distance 2, and the corner 4, as that of `bound`.
    """
    query, keys, needle = hostile()
    keys[0, 0, 5, 3] = needle
    keys[0, 0, 2] += 4 * torch.diag(needle)
    assert first_choice("oracle", query, keys) == first_choice("keys2", query, keys) == 5
    assert first_choice("cuboid", query, keys) == first_choice("bound", query, keys) == 2
