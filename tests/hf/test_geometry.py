"""Geometry and bytes per token of known models, from their configurations alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.models import CONFIGS
from tierkv.errors import ConfigError
from tierkv.hf.geometry import model_geometry, tiered_layers
from tierkv.page import Geometry

KNOWN: dict[str, tuple[str, dict[str, Any], float]] = {
    "Llama-1-65B": (
        "LlamaConfig",
        dict(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64),
        2560,
    ),
    "Llama-2-7B": (
        "LlamaConfig",
        dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32),
        512,
    ),
    "Llama-3-8B": (
        "LlamaConfig",
        dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8),
        128,
    ),
    "Llama-3-70B": (
        "LlamaConfig",
        dict(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8),
        320,
    ),
    "Qwen3-8B": (
        "Qwen3Config",
        dict(num_hidden_layers=36, hidden_size=4096, num_attention_heads=32,
             num_key_value_heads=8, head_dim=128),
        144,
    ),
    "SmolLM2-135M": (
        "LlamaConfig",
        dict(num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3),
        22.5,
    ),
    "one KV head (MQA)": (
        "LlamaConfig",
        dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=1),
        16,
    ),
    "DeepSeek-V3": ("DeepseekV3Config", dict(num_hidden_layers=61), 61 * (512 + 64) * 2 / 1024),
    # 26 layers, every 6th with full attention
    "Gemma-3-1B": (
        "Gemma3TextConfig",
        dict(num_hidden_layers=26, hidden_size=1152, num_attention_heads=4, num_key_value_heads=1,
             head_dim=256),
        4 * 2 * 256 * 2 / 1024,
    ),
    # 42 layers, every 2nd with full attention
    "Gemma-2-9B": (
        "Gemma2Config",
        dict(num_hidden_layers=42, hidden_size=3584, num_attention_heads=16,
             num_key_value_heads=8, head_dim=256),
        21 * 2 * 8 * 256 * 2 / 1024,
    ),
}  # fmt: skip
"""Model -> (configuration class, its arguments, KiB of KV per token in 16-bit)."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", list(KNOWN))
def test_bytes_per_token(name: str, dtype: torch.dtype) -> None:
    kind, arguments, kib = KNOWN[name]
    geometry = model_geometry(getattr(transformers, kind)(**arguments), dtype)
    assert geometry is not None
    assert geometry.token_bytes == kib * 1024
    # A page takes what its tokens take, in every page size, and nothing more.
    for tokens in (16, 32, 64, 128, 256):
        pages = model_geometry(getattr(transformers, kind)(**arguments), dtype, tokens)
        assert pages is not None
        assert pages.page_bytes * pages.layers == tokens * geometry.token_bytes


def test_formula() -> None:
    """2 x layers x KV heads x head dim x bytes."""
    config = transformers.LlamaConfig(
        num_hidden_layers=7, hidden_size=96, num_attention_heads=6, num_key_value_heads=3
    )
    for dtype, size in ((torch.float32, 4), (torch.float16, 2)):
        geometry = model_geometry(config, dtype)
        assert geometry == Geometry(7, 3, 16, 16, dtype, 32)
        assert geometry.token_bytes == 2 * 7 * 3 * 16 * size


def test_deepseek_latents_are_68_6_kib_a_token() -> None:
    geometry = model_geometry(transformers.DeepseekV3Config(), torch.bfloat16)
    assert geometry == Geometry(61, 1, 512, 64, torch.bfloat16, 32)
    assert round(geometry.token_bytes / 1024, 1) == 68.6


def test_latents_that_are_cached_expanded() -> None:
    config = transformers.DeepseekV3Config()
    geometry = model_geometry(config, torch.bfloat16, latents=False)
    assert geometry == Geometry(61, 128, 128 + 64, 128, torch.bfloat16, 32)


def test_explicit_head_dim_wins_over_hidden_size() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=4, head_dim=80
    )
    geometry = model_geometry(config, torch.float32)
    assert geometry is not None
    assert (geometry.k_dim, geometry.v_dim) == (80, 80)


@pytest.mark.parametrize(
    ("name", "tiered"),
    [
        ("llama", [0, 1, 2]),
        ("mistral", [0, 1, 2]),
        ("mistral-sliding", []),
        ("gemma2", [1]),
        ("gemma3", [1, 3]),
        ("gpt_oss", [1, 3]),
        ("qwen3_next", [1, 3]),
        ("deepseek_v3", [0, 1]),
    ],
)
def test_only_full_attention_is_tiered(name: str, tiered: list[int]) -> None:
    kind, arguments = CONFIGS[name]
    config = getattr(transformers, kind)(**arguments)
    assert tiered_layers(config) == tiered
    geometry = model_geometry(config, torch.float32)
    assert (geometry.layers if geometry is not None else 0) == len(tiered)


@pytest.mark.parametrize("tokens", [0, -16, 1, 8, 15, 17, 48, 100, 512])
def test_page_tokens_must_be_a_power_of_two_in_range(tokens: int) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1)
    with pytest.raises(ConfigError, match=rf"page_tokens.* 16 to 256, got {tokens}$"):
        model_geometry(config, torch.float32, tokens)
