"""Show what attention is called with: queries, and the new keys and values, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface

from tierkv.hf.attention import register, tier_attention
from tierkv.hf.cache import NAME

Seen = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float, bool], None]
"""Called with the model's layer, query ``[batch, heads, tokens, dim]``, new keys and values
``[batch, kv_heads, tokens, dim]`` after the rotary embedding, the factor on scores, and whether
that is all: no soft cap and no sink logits."""


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Call `seen` before every attention of every wrapped model in this process.

    Layers with sliding windows show all keys that their own cache holds. A CUDA graph that was
    captured before shows nothing.
    """

    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        *args: Any, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        plain = kwargs.get("softcap") is None and kwargs.get("s_aux") is None
        seen(getattr(module, "layer_idx", -1), query, key, value, scale, plain)
        return tier_attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(NAME, attention)
    try:
        yield
    finally:
        register()
