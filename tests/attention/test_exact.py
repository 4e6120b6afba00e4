"""Exact attention over a page manager against dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.combinations import examples
from tierkv.attention import exact
from tierkv.page import Geometry
from tierkv.paging.manager import PageManager
from tierkv.paging.sequences import Sequences
from tierkv.tiers.cold import ColdStore

LAYERS = 2


def make_manager(
    page_tokens: int, hot_pages: int, *, kv_heads: int = 2, k_dim: int = 16, v_dim: int = 16,
    store: Path | None = None,
) -> PageManager:  # fmt: skip
    """Return a manager with `hot_pages` pages a layer; what does not fit streams."""
    geometry = Geometry(LAYERS, kv_heads, k_dim, v_dim, torch.float32, page_tokens)
    cold, warm = None, 64 << 20
    if store is not None:
        cold = ColdStore(
            str(store), frame_bytes=geometry.frame_bytes, disk_budget=64 << 20, free_floor=1 << 20
        )
        warm = 5 * geometry.frame_bytes
    return PageManager(
        geometry, torch.device("cpu"), gpu_budget=geometry.page_bytes * (hot_pages * LAYERS + 3),
        cpu_budget=warm, cold=cold,
    )  # fmt: skip


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[batch, queries, heads, v_dim]``, the last query being the last key; float64."""
    group, queries, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    seen = seen if mask is None else seen & mask
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., :keys]
    return (weights @ v).transpose(1, 2)


class Run:
    """Appends random tokens to every layer and compares what attention returns."""

    def __init__(self, manager: PageManager, batch: int, heads: int, seed: int = 0):
        self.manager, self.heads, self.batch = manager, heads, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.sequences = Sequences(LAYERS)
        geometry = manager.geometry
        self.k = [torch.zeros(batch, geometry.kv_heads, 0, geometry.k_dim) for _ in range(LAYERS)]
        self.v = [torch.zeros(batch, geometry.kv_heads, 0, geometry.v_dim) for _ in range(LAYERS)]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def step(
        self,
        tokens: int,
        *,
        queries: int | None = None,
        padding: list[int] | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Append `tokens`, attend with the last `queries` of them. padding: hidden on the left."""
        geometry, scale = self.manager.geometry, 0.25
        for layer in range(LAYERS):
            k = self.random(self.batch, geometry.kv_heads, tokens, geometry.k_dim)
            v = self.random(self.batch, geometry.kv_heads, tokens, geometry.v_dim)
            q = self.random(self.batch, self.heads, queries or tokens, geometry.k_dim)
            self.k[layer] = torch.cat([self.k[layer], k], dim=2)
            self.v[layer] = torch.cat([self.v[layer], v], dim=2)
            length = self.k[layer].shape[2]
            mask, first = None, 0
            if padding is not None:
                hidden = torch.tensor(padding).view(-1, 1, 1, 1)
                mask, first = torch.arange(length) >= hidden, min(max(padding), length)
            lookup = self.manager.append(self.sequences, layer, k, v)
            assert lookup.length == length
            out = exact.attend(
                q, k, v, lookup, scale=scale, mask=mask, first_visible=first, softcap=softcap,
                sinks=sinks,
            )  # fmt: skip
            want = dense(q, self.k[layer], self.v[layer], scale, mask, softcap, sinks)
            assert out.shape == want.shape
            assert out.dtype == q.dtype
            torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=1e-4)


@pytest.fixture(params=["hot", "warm", "cold"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, Path | None]]:
    """(hot pages a layer, store): where most pages live."""
    yield {"hot": (80, None), "warm": (5, None), "cold": (5, tmp_path)}[request.param]


@settings(max_examples=examples(40))
@given(
    steps=st.lists(st.one_of(st.just(1), st.integers(1, 90)), min_size=1, max_size=8),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(2, 2), (4, 2), (6, 1)]),
    page_tokens=st.sampled_from([16, 32, 64]),
    hot_pages=st.sampled_from([3, 4, 7, 100]),
    padded=st.booleans(),
    data=st.data(),
)
def test_random_lengths(
    steps: list[int], batch: int, heads: tuple[int, int], page_tokens: int, hot_pages: int,
    padded: bool, data: st.DataObject,
) -> None:  # fmt: skip
    padding = None
    if padded:
        padding = [data.draw(st.integers(0, sum(steps))) for _ in range(batch)]
    manager = make_manager(page_tokens, hot_pages, kv_heads=heads[1])
    try:
        run = Run(manager, batch, heads[0])
        for tokens in steps:
            run.step(tokens, padding=padding)
    finally:
        manager.close()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", ["plain", "padded", "softcap", "sinks"])
def test_every_tier(options: str, batch: int, tier: tuple[int, Path | None]) -> None:
    extra = {
        "plain": {},
        "padded": {"padding": [0, 37, 80][:batch] if batch > 1 else [37]},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    }[options]
    manager = make_manager(16, tier[0], store=tier[1])
    try:
        run = Run(manager, batch, 4)
        for tokens in (70, 1, 1, 33, 16, 1, 15, 1, 1):
            run.step(tokens, **extra)
        stats = manager.stats
        if tier[1] is not None:
            assert stats.cold_to_warm_bytes > 0
        elif tier[0] == 5:
            assert stats.warm_to_hot_bytes > 0
        else:
            assert stats.warm_to_hot_bytes == stats.hot_to_warm_bytes == 0
    finally:
        manager.close()


@pytest.mark.parametrize("queries", [1, 5, 20])
def test_queries_are_the_last_of_the_append(queries: int) -> None:
    manager = make_manager(16, 5)
    try:
        run = Run(manager, 2, 4)
        run.step(50)
        run.step(20, queries=queries)
        run.step(20, queries=queries, padding=[60, 3])
    finally:
        manager.close()


def test_key_dim_differs_from_value_dim() -> None:
    manager = make_manager(16, 4, k_dim=24, v_dim=8)
    try:
        run = Run(manager, 2, 4)
        for tokens in (40, 1, 30, 1):
            run.step(tokens)
    finally:
        manager.close()


def test_sequence_of_nothing_but_padding_is_zero() -> None:
    manager = make_manager(16, 4)
    try:
        sequences = Sequences(LAYERS)
        k, v, q = (torch.randn(2, heads, 40, 16) for heads in (2, 2, 4))
        mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
        mask[1] = False
        lookup = manager.append(sequences, 0, k, v)
        out = exact.attend(q, k, v, lookup, scale=0.25, mask=mask, first_visible=40)
        assert not out.isnan().any()
        assert (out[1] == 0).all()
    finally:
        manager.close()


@pytest.mark.parametrize("expanded_tokens", [16, 48, 4096])
@pytest.mark.parametrize("hot_pages", [4, 40])
def test_latents_are_expanded_by_part(
    hot_pages: int, expanded_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored: one head of latents and rotary keys. Attended: four heads of keys and values."""
    monkeypatch.setattr(exact, "MAX_EXPANDED_TOKENS", expanded_tokens)
    rank, rope, heads, dim = 12, 4, 4, 8
    up = torch.randn(heads, rank, 2 * dim, generator=torch.Generator().manual_seed(5))
    widest = 0

    def expand(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal widest
        widest = max(widest, latent.shape[2])
        k, v = (latent @ up).split(dim, dim=-1)
        return torch.cat([k, rotary.expand(-1, heads, -1, -1)], dim=-1), v

    manager = make_manager(16, hot_pages, kv_heads=1, k_dim=rank, v_dim=rope)
    try:
        sequences = Sequences(LAYERS)
        latents, rotaries = torch.zeros(2, 1, 0, rank), torch.zeros(2, 1, 0, rope)
        for tokens in (70, 1, 40, 1):
            latent, rotary = torch.randn(2, 1, tokens, rank), torch.randn(2, 1, tokens, rope)
            latents = torch.cat([latents, latent], dim=2)
            rotaries = torch.cat([rotaries, rotary], dim=2)
            q, hidden = torch.randn(2, heads, tokens, dim + rope), torch.tensor([0, 20])
            mask = torch.arange(latents.shape[2]) >= hidden.view(2, 1, 1, 1)
            for layer in range(LAYERS):
                lookup = manager.append(sequences, layer, latent, rotary)
                k, v = expand(latent, rotary)
                widest = 0
                out = exact.attend(
                    q, k, v, lookup, scale=0.3, mask=mask, first_visible=20, expand=expand
                )
                assert widest <= expanded_tokens
                want = dense(q, *expand(latents, rotaries), 0.3, mask)
                torch.testing.assert_close(out.double(), want, atol=2e-5, rtol=1e-4)
    finally:
        manager.close()
