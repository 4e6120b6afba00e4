"""Models with random weights, by the shape of a known one, and transformers' own cache for them.

Speed depends on shapes, not on what the weights say, so a benchmark needs no download.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tierkv.errors import ConfigError

_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("llama", dict(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
        rope_parameters={**_LLAMA3_ROPE, "factor": 8.0},
    )),
    "llama-3.2-1b": ("llama", dict(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, intermediate_size=8192, vocab_size=128256, max_position_embeddings=131072,
        tie_word_embeddings=True, rope_parameters={**_LLAMA3_ROPE, "factor": 32.0},
    )),
    "llama-3-70b": ("llama", dict(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        intermediate_size=28672, vocab_size=128256, max_position_embeddings=131072,
        rope_parameters={**_LLAMA3_ROPE, "factor": 8.0},
    )),
    "qwen2.5-7b-1m": ("qwen2", dict(
        hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
        intermediate_size=18944, vocab_size=152064, max_position_embeddings=1010000,
        rope_parameters={"rope_type": "default", "rope_theta": 10000000.0},
    )),
    "tiny": ("llama", dict(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        intermediate_size=256, vocab_size=512, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )),
}  # fmt: skip
"""Name -> (transformers' model type, fields of its configuration)."""


def shape_config(name_or_path: str) -> Any:
    """Return the configuration of a named shape, or of a config.json (or a directory with one).

    Raises:
        ConfigError: there is no such shape or file.
    """
    if name_or_path in SHAPES:
        model_type, fields = SHAPES[name_or_path]
        return AutoConfig.for_model(model_type, **copy.deepcopy(fields))
    if not Path(name_or_path).expanduser().exists():
        raise ConfigError(f"shape {name_or_path!r} is none of {', '.join(SHAPES)}, and no file")
    try:
        path = Path(name_or_path).expanduser()
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"shape: {name_or_path} cannot be read: {error}") from error
    return config.get_text_config(decoder=True)


def model_config(model_type: str, **fields: Any) -> Any:
    """Return a configuration of one of transformers' own architectures."""
    return AutoConfig.for_model(model_type, **fields)


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights without making it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    return sum(weight.numel() for weight in model.parameters()) * dtype.itemsize


def cut_to_fit(config: Any, dtype: torch.dtype, room: int) -> Any:
    """Return the configuration with as many layers as fit into `room` bytes of weights.

    Raises:
        ConfigError: not even one layer fits.
    """
    one, two = (weight_bytes(_with_layers(config, count), dtype) for count in (1, 2))
    count = min(config.num_hidden_layers, 1 + (room - one) // (two - one))
    if count < 1:
        raise ConfigError(f"one layer takes {one} bytes of weights, there is room for {room}")
    return config if count == config.num_hidden_layers else _with_layers(config, count)


def _with_layers(config: Any, count: int) -> Any:
    config = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    config.num_hidden_layers = count
    return config


def random_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a model with random weights made on its device; rotary frequencies stay float32."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def stock_cache(model: Any, *, offloading: bool = False) -> Any:
    """Return transformers' own cache for a model, on the device or offloaded to the host."""
    return DynamicCache(config=model.config, offloading=offloading)
