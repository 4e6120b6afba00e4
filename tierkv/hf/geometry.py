"""The KV geometry of a Hugging Face model, read from its configuration."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from tierkv.errors import UnsupportedModelError
from tierkv.page import Geometry


def stock_layers(config: PreTrainedConfig) -> list[Any]:
    """Return the cache layers that transformers would use for this model, one a layer."""
    return list(DynamicCache(config=config).layers)


def stores_latents(hf_model: Any) -> bool:
    """Whether a model caches latents from which its attention makes keys and values (MLA)."""
    return any(hasattr(module, "expand_kv") for module in hf_model.modules())


def tiered_layers(config: PreTrainedConfig) -> list[int]:
    """Return the indices of full-attention layers, whose KV grows without bound.

    Sliding-window, chunked and recurrent layers have bounded state; they stay as they are.

    Raises:
        UnsupportedModelError: a layer keeps state of a kind that pages cannot hold, or no layer
            attends.
    """
    tiered, layers = [], stock_layers(config)
    if not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        raise UnsupportedModelError(f"{config.model_type} has no attention layers: no KV to tier")
    for index, layer in enumerate(layers):
        if type(layer) is DynamicLayer:
            tiered.append(index)
        elif not _bounded(layer):
            raise UnsupportedModelError(
                f"{config.model_type}: layer {index} caches with {type(layer).__name__} "
                f"(sparse index, compressed or mixed state), which tierkv cannot page"
            )
    return tiered


def _bounded(layer: Any) -> bool:
    linear = isinstance(layer, LinearAttentionCacheLayerMixin)
    if isinstance(layer, DynamicSlidingWindowLayer):
        return not linear
    if type(layer).__name__ == "DummyLayer":
        return True
    return linear and not isinstance(layer, CacheLayerMixin)


def model_geometry(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    page_tokens: int = 32,
    *,
    latents: bool | None = None,
) -> Geometry | None:
    """Return what a page of this model holds, or None if no layer is tiered.

    Args:
        config: the decoder's configuration (``config.get_text_config(decoder=True)``).
        latents: whether the model caches multi-head latents (DeepSeek-V2 and later) instead of
            expanded keys and values; None assumes so when the configuration has latents.

    Raises:
        UnsupportedModelError: heads differ between layers, or the cache layers cannot be paged.
    """
    layers = len(tiered_layers(config))
    if not layers:
        return None
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        rope = config.qk_rope_head_dim
        if latents is None or latents:
            return Geometry(layers, 1, rank, rope, dtype, page_tokens)
        k_dim = config.qk_nope_head_dim + rope
        return Geometry(layers, heads, k_dim, config.v_head_dim, dtype, page_tokens)
    if not isinstance(kv_heads, int) or not isinstance(heads, int):
        raise UnsupportedModelError(
            f"{config.model_type}: the number of KV heads differs between layers ({kv_heads})"
        )
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(layers, kv_heads, dim, dim, dtype, page_tokens)
