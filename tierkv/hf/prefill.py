"""Chunked prefill, owned by tierkv.

transformers' `prefill_chunk_size` re-feeds the prompt on a non-empty cache (before 5.21) and
builds a ``chunk x keys`` mask for every chunk after the first; this does neither.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from tierkv.errors import TierKVError
from tierkv.hf.attach import cache_argument
from tierkv.hf.cache import TierCache

Progress = Callable[[int, int], None]
CPU_CHUNK_TOKENS = 2048
GPU_CHUNK_TOKENS = 8192
"""On a GPU a chunk's arithmetic has to take longer than streaming its past, and the host has to
keep up: measured on an H200, 8,192 tokens need half the copies and merges of 4,096."""
WORKSPACE_SHARE = 32
"""A chunk's activations take at most this fraction of the device's memory."""


def default_chunk(model: PreTrainedModel) -> int:
    """Return the tokens per forward for a model: many, while their activations stay small."""
    device = model.device
    if device.type != "cuda":
        return CPU_CHUNK_TOKENS
    config = model.config.get_text_config(decoder=True)
    widest = max(getattr(config, "intermediate_size", 0), 4 * config.hidden_size)
    token = (3 * widest + 8 * config.hidden_size) * model.dtype.itemsize
    most = torch.cuda.get_device_properties(device).total_memory // WORKSPACE_SHARE // token
    chunk = GPU_CHUNK_TOKENS
    while chunk > 512 and chunk > most:
        chunk //= 2
    return chunk


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    tier_cache: TierCache,
    *,
    chunk_tokens: int,
    attention_mask: torch.Tensor | None = None,
    on_progress: Progress | None = None,
) -> Any:
    """Run tokens through the model chunk by chunk, for their keys and values.

    Args:
        input_ids: ``[batch, tokens]`` of the whole sequence; what the cache holds is skipped.
        tier_cache: where keys and values go.
        chunk_tokens: tokens per forward.
        attention_mask: ``[batch, tokens]``, 0 for padding; or None.
        on_progress: called with (tokens done, tokens in total) after each chunk.

    Returns:
        The model's output for the last chunk (logits of its last token only), or None if the
        cache already held every token.

    Raises:
        TierKVError: the mask does not cover the tokens, or the cache holds more than them.
    """
    total, done = input_ids.shape[1], tier_cache.get_seq_length()
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise TierKVError(
            f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}"
        )
    if done > total:
        raise TierKVError(f"the cache holds {done} tokens, the prompt only {total}")
    extra: dict[str, Any] = {cache_argument(model): tier_cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        extra["logits_to_keep"] = 1
    positions = _positions(input_ids, attention_mask)
    output = None
    for start in range(done, total, chunk_tokens):
        stop = min(start + chunk_tokens, total)
        if attention_mask is not None:
            extra["attention_mask"] = attention_mask[:, :stop]
        output = model(
            input_ids=input_ids[:, start:stop],
            position_ids=positions[:, start:stop],
            return_dict=True,
            **extra,
        )
        if on_progress is not None:
            on_progress(stop, total)
    return output


def _positions(input_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the rotary position of every token; padding on the left counts nothing."""
    if mask is None:
        return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    positions = mask.long().cumsum(-1) - 1
    return positions.masked_fill(mask == 0, 0)
