"""The oracle itself against a softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch

from tierkv.attention import reference
from tierkv.attention.reference import attend, lower_right_causal


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax as the textbook writes it, in float64; nothing seen gives 0 and -inf."""
    scores = q.double() @ k.double().transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    exponents = scores.exp()
    total = exponents.sum(-1)
    out = exponents @ v.double() / total.where(total > 0, 1.0).unsqueeze(-1)
    return out, total.log()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "k_dim", "v_dim"),
    [(1, 1, 1, 1, 1, 1), (2, 3, 5, 37, 16, 16), (1, 2, 7, 130, 24, 40), (3, 1, 1, 64, 64, 8)],
)
def test_equals_softmax(
    batch: int, heads: int, queries: int, keys: int, k_dim: int, v_dim: int, masked: bool,
    softcap: float | None,
) -> None:  # fmt: skip
    q, k = random(batch, heads, queries, k_dim), random(batch, heads, keys, k_dim, seed=1)
    v = random(batch, heads, keys, v_dim, seed=2)
    mask = random(batch, 1, queries, keys, seed=3) > 0 if masked else None
    out, lse = attend(q, k, v, scale=k_dim**-0.5, mask=mask, softcap=softcap)
    want_out, want_lse = dense(q, k, v, k_dim**-0.5, mask, softcap)
    assert out.shape == (batch, heads, queries, v_dim)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (random(1, 2, 50, 16, seed=seed).to(dtype) for seed in range(3))
    out, lse = attend(q, k, v, scale=0.25)
    want_out, want_lse = dense(q, k, v, 0.25)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def test_float64_stays_float64() -> None:
    q, k, v = (random(1, 2, 9, 16, seed=seed).double() for seed in range(3))
    out, lse = attend(q, k, v, scale=0.25)
    want_out, want_lse = dense(q, k, v, 0.25)
    torch.testing.assert_close(out, want_out, atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(lse, want_lse, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_query_that_sees_nothing_is_zero(softcap: float | None) -> None:
    q, k, v = random(2, 2, 4, 8), random(2, 2, 30, 8, seed=1), random(2, 2, 30, 8, seed=2)
    mask = torch.ones(2, 1, 4, 30, dtype=torch.bool)
    mask[0, 0, 1] = False
    mask[1] = False
    out, lse = attend(q, k, v, scale=0.3, mask=mask, softcap=softcap)
    assert not out.isnan().any()
    assert (out[0, :, 1] == 0).all() and (out[1] == 0).all()
    assert (lse[0, :, 1] == -torch.inf).all() and (lse[1] == -torch.inf).all()
    want, _ = dense(q, k, v, 0.3, mask, softcap)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 7, 64, 99, 100, 101])
def test_blocks_of_keys_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_KEYS", block)
    q, k, v = random(2, 2, 3, 16), random(2, 2, 100, 16, seed=1), random(2, 2, 100, 16, seed=2)
    mask = random(2, 1, 3, 100, seed=3) > 0
    mask[0, 0, 0, :70] = False  # whole blocks unseen
    mask[1, 0, 2] = False
    out, lse = attend(q, k, v, scale=0.25, mask=mask)
    want_out, want_lse = dense(q, k, v, 0.25, mask)
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def test_more_keys_than_a_block() -> None:
    keys = 2 * reference.BLOCK_KEYS + 17
    q, k, v = random(1, 1, 2, 8), random(1, 1, keys, 8, seed=1), random(1, 1, keys, 8, seed=2)
    out, lse = attend(q, k, v, scale=1.0)
    want_out, want_lse = dense(q, k, v, 1.0)
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


def test_one_column_mask_is_for_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_KEYS", 8)
    q, k, v = random(2, 1, 2, 8), random(2, 1, 20, 8, seed=1), random(2, 1, 20, 8, seed=2)
    mask = torch.tensor([True, False]).view(2, 1, 1, 1)
    out, _ = attend(q, k, v, scale=1.0, mask=mask)
    want, _ = dense(q, k, v, 1.0, mask)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [80.0, 1e4])
def test_large_scores_do_not_overflow(size: float) -> None:
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([size, 0.0, -size]), random(1, 1, 3, 4)
    out, lse = attend(q, k.view(1, 1, 3, 1), v, scale=1.0)
    assert lse.item() == pytest.approx(size)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, 0])


def test_lower_right_causal() -> None:
    seen = lower_right_causal(2, 4, torch.device("cpu"))
    assert seen.tolist() == [[True, True, True, False], [True] * 4]
    assert lower_right_causal(1, 5, torch.device("cpu")).all()
    assert math.prod(lower_right_causal(3, 3, torch.device("cpu")).shape) == 9
