"""Sizes that follow from a geometry, and the geometries that are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tierkv.errors import ConfigError
from tierkv.page import SECTOR, Geometry

LLAMA = Geometry(layers=32, kv_heads=8, k_dim=128, v_dim=128, dtype=torch.bfloat16)


def test_sizes() -> None:
    assert LLAMA.page_tokens == 32
    assert LLAMA.head_page_elements * LLAMA.dtype.itemsize == 16 << 10
    assert LLAMA.page_bytes == 128 << 10
    assert LLAMA.frame_bytes == LLAMA.page_bytes
    assert LLAMA.token_bytes == 128 << 10


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128, 256])
def test_page_is_its_tokens(page_tokens: int) -> None:
    geometry = dataclasses.replace(LLAMA, page_tokens=page_tokens)
    assert geometry.page_bytes * geometry.layers == page_tokens * geometry.token_bytes


@pytest.mark.parametrize(
    ("kv_heads", "k_dim", "v_dim", "dtype"),
    [(1, 16, 16, torch.float32), (3, 64, 64, torch.bfloat16), (1, 512, 64, torch.bfloat16),
     (5, 80, 80, torch.float16), (1, 1, 1, torch.int8)],
)  # fmt: skip
def test_frames_are_whole_sectors(
    kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype
) -> None:
    geometry = Geometry(2, kv_heads, k_dim, v_dim, dtype, 16)
    assert geometry.frame_bytes % SECTOR == 0
    assert 0 <= geometry.frame_bytes - geometry.page_bytes < SECTOR


def test_keys_and_values_may_differ() -> None:
    latents = Geometry(61, 1, 512, 64, torch.bfloat16)
    assert latents.token_bytes == 61 * 576 * 2
    assert latents.page_bytes == 32 * 576 * 2


@pytest.mark.parametrize("tokens", [-32, 0, 1, 2, 4, 8, 15, 24, 31, 48, 96, 255, 257, 512])
def test_page_tokens_out_of_range(tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"got {tokens}$"):
        Geometry(1, 1, 16, 16, torch.float32, tokens)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "k_dim", "v_dim"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_must_be_positive(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be at least 1, got {value}"):
        dataclasses.replace(LLAMA, **{field: value})


def test_geometry_is_a_value() -> None:
    assert dataclasses.replace(LLAMA) == LLAMA
    assert hash(dataclasses.replace(LLAMA)) == hash(LLAMA)
    with pytest.raises(dataclasses.FrozenInstanceError):
        LLAMA.layers = 1  # type: ignore[misc]
