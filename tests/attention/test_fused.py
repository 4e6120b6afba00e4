"""torch's fused kernels against the reference, for every shape that models bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tierkv.attention import fused, reference
from tierkv.attention.merge import Partial

HEAD_DIMS = [1, 7, 16, 33, 64, 80, 96, 128, 192, 256, 320]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(part: Partial, want: Partial, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        part.out.float(), want.out.float(), atol=tolerance, rtol=tolerance, check_dtype=False
    )
    torch.testing.assert_close(part.lse, want.lse, atol=1e-5, rtol=1e-5)


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make the fallback fail, so that a test proves which path it took; return the original."""
    original = reference.attend

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("fell back to the reference")

    monkeypatch.setattr(reference, "attend", fail)
    return original


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("queries", [1, 6])
def test_attend(dim: int, queries: int, no_reference: Callable[..., Partial]) -> None:
    q, k, v = (
        random(2, 3, queries, dim),
        random(2, 3, 77, dim, seed=1),
        random(2, 3, 77, dim, seed=2),
    )
    scale = dim**-0.5
    close(fused.attend(q, k, v, scale=scale), no_reference(q, k, v, scale=scale))


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attend_causal(
    dim: int, heads: int, kv_heads: int, no_reference: Callable[..., Partial]
) -> None:
    tokens, scale = 45, dim**-0.5
    q = random(2, heads, tokens, dim)
    k, v = random(2, kv_heads, tokens, dim, seed=1), random(2, kv_heads, tokens, dim, seed=2)
    part = fused.attend_causal(q, k, v, scale=scale)
    group = heads // kv_heads
    want = no_reference(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), scale=scale,
        mask=torch.ones(tokens, tokens, dtype=torch.bool).tril(),
    )  # fmt: skip
    close(part, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_half_precision(dim: int, dtype: torch.dtype) -> None:
    q, k, v = (random(1, 2, 40, dim, seed=seed, dtype=dtype) for seed in range(3))
    part = fused.attend(q, k, v, scale=dim**-0.5)
    assert part.lse.dtype == torch.float32
    close(part, reference.attend(q, k, v, scale=dim**-0.5), tolerance=2e-2)


def test_scale_is_honoured() -> None:
    q, k, v = random(1, 1, 4, 16), random(1, 1, 9, 16, seed=1), random(1, 1, 9, 16, seed=2)
    close(fused.attend(q, k, v, scale=0.9), reference.attend(q, k, v, scale=0.9))


def test_views_of_an_arena() -> None:
    """Keys and values as pages give them: transposed, cut, not contiguous."""
    k, v = random(2, 100, 3, 32, seed=1).transpose(1, 2), random(2, 100, 3, 32, seed=2)
    k, v = k[:, :, 5:60], v.transpose(1, 2)[:, :, 5:60]
    q = random(2, 7, 3, 32).transpose(1, 2)
    want = reference.attend(q.contiguous(), k.contiguous(), v.contiguous(), scale=0.2)
    close(fused.attend(q, k, v, scale=0.2), want)


def test_folded_groups_equal_repeated_heads() -> None:
    """The query heads of a KV head may lie along the queries."""
    q, k, v = random(2, 6, 5, 16), random(2, 2, 31, 16, seed=1), random(2, 2, 31, 16, seed=2)
    folded = fused.attend(q.reshape(2, 2, 15, 16), k, v, scale=0.25)
    want = reference.attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), scale=0.25)
    close(Partial(folded.out.reshape(2, 6, 5, 16), folded.lse.reshape(2, 6, 5)), want)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(24, 16), (192, 128), (40, 32)])
@pytest.mark.parametrize("causal", [False, True])
def test_key_dim_differs_from_value_dim(k_dim: int, v_dim: int, causal: bool) -> None:
    q, k, v = random(2, 2, 12, k_dim), random(2, 2, 12, k_dim, seed=1), random(2, 2, 12, v_dim)
    attend = fused.attend_causal if causal else fused.attend
    mask = torch.ones(12, 12, dtype=torch.bool).tril() if causal else None
    part = attend(q, k, v, scale=0.2)
    assert part.out.shape == (2, 2, 12, v_dim)
    close(part, reference.attend(q, k, v, scale=0.2, mask=mask))


@pytest.mark.parametrize(
    "options", [{"softcap": 2.0}, {"mask": True}, {"mask": True, "softcap": 2.0}]
)
def test_soft_cap_and_masks(options: dict[str, Any]) -> None:
    q, k, v = random(2, 2, 4, 16), random(2, 2, 20, 16, seed=1), random(2, 2, 20, 16, seed=2)
    if "mask" in options:
        options = options | {"mask": torch.arange(20).view(1, 1, 1, 20) >= 6}
    part = fused.attend(q, k, v, scale=0.3, **options)
    close(part, reference.attend(q, k, v, scale=0.3, **options))


@pytest.mark.parametrize("queries", [1, 2, 9, 29])
def test_fewer_queries_than_tokens_are_the_last(queries: int) -> None:
    q, k, v = random(2, 4, 30, 16), random(2, 2, 30, 16, seed=1), random(2, 2, 30, 16, seed=2)
    whole = fused.attend_causal(q, k, v, scale=0.25)
    part = fused.attend_causal(q[:, :, -queries:], k, v, scale=0.25)
    close(part, Partial(whole.out[:, :, -queries:], whole.lse[:, :, -queries:]))


def test_causal_with_padding() -> None:
    q, k, v = random(2, 4, 30, 16), random(2, 2, 30, 16, seed=1), random(2, 2, 30, 16, seed=2)
    mask = torch.arange(30).view(1, 1, 1, 30) >= torch.tensor([0, 12]).view(2, 1, 1, 1)
    part = fused.attend_causal(q, k, v, scale=0.25, mask=mask)
    alone = fused.attend_causal(q[1:, :, 12:], k[1:, :, 12:], v[1:, :, 12:], scale=0.25)
    close(Partial(part.out[1:, :, 12:], part.lse[1:, :, 12:]), alone)
    assert (part.out[1, :, :12] == 0).all()
    assert (part.lse[1, :, :12] == -torch.inf).all()
