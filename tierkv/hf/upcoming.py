"""The query that a later layer will ask, foreseen from the residual stream that enters this one.

A layer adds little to the stream, so the later layer's own norm, query projection and rotation,
applied to it early, give nearly its query (InfiniGen, OSDI 2024, looks ahead this way with
partial weights; here the weights are whole).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

Announce = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with the layer foreseen, the stream ``[batch, 1, hidden]``, and the rotation's cos and
sin."""

FIRST_FORESEEN = 3
"""Measured on SmolLM2: the first two layers change the stream so much that the queries of layers
1 and 2 cannot be foreseen (cosine 0.21); from layer 3 on 90% of the pages can."""


class Upcoming:
    """Foresees queries of one model, `depth` layers ahead.

    Args:
        layers: decoder layers, as `of` has found them usable.
        first: first layer worth foreseeing.
    """

    def __init__(self, layers: Any, depth: int, first: int):
        self._layers, self._depth = layers, depth
        self._first = max(first, FIRST_FORESEEN, depth)
        attention = layers[0].self_attn
        self._rotate: Any = getattr(sys.modules[type(attention).__module__], _ROTATE)
        self._rotation: tuple[torch.Tensor, torch.Tensor] | None = None
        self.hidden_size = attention.q_proj.in_features

    @classmethod
    def of(cls, model: PreTrainedModel, depth: int, first: int) -> Upcoming | None:
        """Return what foresees a model's queries; None for models of another build.

        Layers need an `input_layernorm` and a `self_attn` that projects queries by `q_proj`, may
        norm them by `q_norm`, and rotates them by its module's `apply_rotary_pos_emb`.
        """
        layers = getattr(model.get_decoder(), "layers", None)
        if not depth or not layers or not all(_usable(layer) for layer in layers):
            return None
        return cls(layers, depth, first)

    def hook(self, announce: Announce) -> list[Any]:
        """Call `announce` whenever a layer begins whose stream foresees another; returns hooks."""

        def begin(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            announce(module.self_attn.layer_idx + self._depth, hidden, *kwargs[_EMBEDDINGS])

        foreseeing = self._layers[self._first - self._depth : len(self._layers) - self._depth]
        return [layer.register_forward_pre_hook(begin, with_kwargs=True) for layer in foreseeing]

    def keep_rotation(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Copy the rotation of a step to memory that stays."""
        if self._rotation is None:
            self._rotation = torch.empty_like(cos), torch.empty_like(sin)
        for kept, given in zip(self._rotation, (cos, sin), strict=True):
            kept.copy_(given)

    def query(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """Return the foreseen query of a layer, ``[batch, heads, 1, dim]``.

        residual: ``[batch, 1, hidden]``, the stream `depth` layers earlier.
        """
        decoder, attention = self._layers[layer], self._layers[layer].self_attn
        assert self._rotation is not None
        hidden = decoder.input_layernorm(residual)
        query = attention.q_proj(hidden).view(len(residual), 1, -1, attention.head_dim)
        if hasattr(attention, "q_norm"):
            query = attention.q_norm(query)
        query = query.transpose(1, 2)
        rotated: torch.Tensor = self._rotate(query, query, *self._rotation)[0]
        return rotated

    def scale(self, layer: int) -> float:
        """Return what a layer multiplies its scores by."""
        attention = self._layers[layer].self_attn
        return float(getattr(attention, "scaling", attention.head_dim**-0.5))


_ROTATE, _EMBEDDINGS = "apply_rotary_pos_emb", "position_embeddings"


def _usable(layer: Any) -> bool:
    attention = getattr(layer, "self_attn", None)
    projection, heads = getattr(attention, "q_proj", None), getattr(attention, "config", None)
    if projection is None or heads is None or not hasattr(layer, "input_layernorm"):
        return False
    width = heads.num_attention_heads * getattr(attention, "head_dim", 0)
    rotates = hasattr(sys.modules[type(attention).__module__], _ROTATE)
    takes = _EMBEDDINGS in inspect.signature(layer.forward).parameters
    return rotates and takes and getattr(projection, "out_features", 0) == width
