"""A model's forward for one token whose every length is read from device memory.

While `running` is in force, transformers' attention goes through two custom operators, opaque to
`torch.compile`: one announces an upcoming layer's lookup, one appends the new token to a layer and
attends. The host decides nothing in them, so the forward can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from tierkv.attention.captured import CapturedLookups
from tierkv.errors import UnsupportedModelError
from tierkv.hf.upcoming import Upcoming

NAME = "tierkv_step"
"""What transformers calls the attention of such a forward. No mask function goes by it, so that
transformers makes no mask: a single new token sees everything."""

_lookups: CapturedLookups | None = None  # of the forward that is running
_upcoming: Upcoming | None = None
_residual = torch.zeros(0)  # what announcing reads; orders announcements and attention


class StepLayer(CacheLayerMixin):
    """Hands new keys and values on; they are stored by the attention that follows."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new token's keys and values."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Zero: no length is known on the host."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask would cover."""
        return query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class StepCache(Cache):
    """What the model takes for its cache; the same for every step."""

    def __init__(self, layers: int):
        super().__init__(layers=[StepLayer() for _ in range(layers)])


@contextmanager
def running(
    model: PreTrainedModel, lookups: CapturedLookups, upcoming: Upcoming | None
) -> Iterator[StepCache]:
    """Let forwards of a wrapped model be steps over `lookups`; yields the cache to give them.

    upcoming: foresees queries; None where no lookup is announced.
    """
    global _lookups, _upcoming, _residual
    AttentionInterface.register(NAME, step_attention)
    former = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    device = lookups.manager.device
    hooks = []
    _lookups, _upcoming, _residual = lookups, upcoming, torch.zeros(1, device=device)
    if upcoming is not None:
        shape = max(lookups.sequences.batch, 1), 1, upcoming.hidden_size
        _residual = torch.zeros(shape, dtype=model.dtype, device=device)
        hooks = upcoming.hook(_announce)
    try:
        yield StepCache(model.config.num_hidden_layers)
    finally:
        for hook in hooks:
            hook.remove()
        _lookups = _upcoming = None
        model.set_attn_implementation(former)


def step_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Append one token and attend; shapes as `tier_attention`, one query.

    Raises:
        UnsupportedModelError: the model gives a mask of its own.
    """
    if attention_mask is not None or dropout:
        raise UnsupportedModelError("a captured step takes neither mask nor dropout")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: Any = module.layer_idx
    out = torch.ops.tierkv.attend(
        query, key, value, s_aux, _residual, layer, scale, 0.0 if softcap is None else softcap
    )
    return out, None


def _announce(layer: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    torch.ops.tierkv.announce(_residual, hidden, cos, sin, layer)


@torch.library.custom_op("tierkv::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    residual: torch.Tensor,
    layer: int,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    assert _lookups is not None, "a step of tierkv ran outside of `running`"
    return _lookups.attend(
        query, key, value, layer, scale=scale, softcap=softcap or None, sinks=sinks
    )


@_attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    residual: torch.Tensor,
    layer: int,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty((query.shape[0], 1, query.shape[1], value.shape[3]))


@torch.library.custom_op("tierkv::announce", mutates_args=("residual",))
def _announce_op(
    residual: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int
) -> None:
    assert _lookups is not None and _upcoming is not None
    upcoming = _upcoming
    residual.copy_(hidden)  # what the caller's stream may overwrite before the other has read it
    upcoming.keep_rotation(cos, sin)
    _lookups.announce(layer, lambda: upcoming.query(layer, residual), upcoming.scale(layer))


@_announce_op.register_fake
def _(
    residual: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int
) -> None:
    return None
