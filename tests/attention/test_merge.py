"""Parts of attention merge to the whole, however the keys are divided."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.combinations import examples
from tierkv.attention.merge import Partial, apply_sinks, merge, merge_all
from tierkv.attention.reference import attend

SCALE = 0.3


def qkv(keys: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 2, 3, 8, generator=generator)
    k = torch.randn(2, 2, keys, 8, generator=generator) * 3
    v = torch.randn(2, 2, keys, 5, generator=generator)
    return q, k, v


@settings(max_examples=examples(80))
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_any_split_in_any_order_equals_the_whole(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    keys = sum(sizes)
    q, k, v = qkv(keys, seed)
    mask = torch.rand(2, 1, 3, keys, generator=torch.Generator().manual_seed(seed)) > 0.3
    stops = torch.tensor(sizes).cumsum(0).tolist()
    parts = [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    for part in parts:  # some parts hide every key of some or all queries
        hidden = data.draw(st.sampled_from(["nothing", "a query", "a sequence", "everything"]))
        if hidden == "a query":
            mask[:, :, 1, part] = False
        elif hidden == "a sequence":
            mask[1, :, :, part] = False
        elif hidden == "everything":
            mask[..., part] = False
    whole = attend(q, k, v, scale=SCALE, mask=mask)
    order = data.draw(st.permutations(parts))
    pieces = [attend(q, k[:, :, p], v[:, :, p], scale=SCALE, mask=mask[..., p]) for p in order]
    for merged in (functools.reduce(merge, pieces), merge_all(pieces)):
        assert not merged.out.isnan().any()
        torch.testing.assert_close(merged.out, whole.out, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(merged.lse, whole.lse, atol=1e-5, rtol=1e-4)


def test_nothing_and_nothing_is_nothing() -> None:
    empty = Partial(torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf))
    for out, lse in (merge(empty, empty), merge_all([empty] * 3), merge_all([empty])):
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


def test_nothing_changes_nothing() -> None:
    q, k, v = qkv(9)
    part = attend(q, k, v, scale=SCALE)
    empty = Partial(torch.zeros_like(part.out), torch.full_like(part.lse, -torch.inf))
    both = [part, empty]
    for merged in (merge(part, empty), merge(empty, part), merge_all(both), merge_all(both[::-1])):
        torch.testing.assert_close(merged.out, part.out, atol=0, rtol=0)
        torch.testing.assert_close(merged.lse, part.lse, atol=1e-6, rtol=0)


def test_far_apart_parts_do_not_overflow() -> None:
    a = Partial(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), 5000.0))
    b = Partial(torch.full((1, 1, 1, 1), 7.0), torch.full((1, 1, 1), -5000.0))
    for out, lse in (merge(a, b), merge(b, a), merge_all([a, b]), merge_all([b, a])):
        assert out.item() == 1.0
        assert lse.item() == 5000.0


def test_half_precision_output_merges_in_float32() -> None:
    q, k, v = qkv(20)
    parts = [attend(q, k[:, :, p], v[:, :, p], scale=SCALE) for p in (slice(8), slice(8, 20))]
    halves = [Partial(part.out.bfloat16(), part.lse) for part in parts]
    whole = attend(q, k, v, scale=SCALE)
    for merged in (merge(*halves), merge_all(halves)):
        assert merged.out.dtype == torch.float32
        torch.testing.assert_close(merged.out, whole.out, atol=2e-2, rtol=2e-2)


def test_sinks_equal_a_column_of_the_softmax() -> None:
    q, k, v = qkv(11)
    sinks = torch.tensor([0.7, -2.0])
    scores = q.double() @ k.double().transpose(-1, -2) * SCALE
    column = sinks.double().view(1, 2, 1, 1).expand(2, 2, 3, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    out = apply_sinks(attend(q, k, v, scale=SCALE), sinks.view(1, 2, 1))
    torch.testing.assert_close(out.double(), weights @ v.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("logit", [-5.0, 0.0, 5.0])
def test_sink_of_a_query_that_sees_nothing(logit: float) -> None:
    empty = Partial(torch.zeros(1, 1, 2, 4), torch.full((1, 1, 2), -torch.inf))
    out = apply_sinks(empty, torch.full((1, 1, 1), logit))
    assert (out == 0).all()
