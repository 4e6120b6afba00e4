"""What transformers' `generate` is asked for, and needs to start from a prompt in the cache."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from tierkv.errors import CaptureError
from tierkv.hf.attach import cache_argument
from tierkv.hf.cache import TierCache
from tierkv.hf.graph import DecodeGraph
from tierkv.hf.step import StepCache

LOOK_AT_PROMPTS = (
    "min_length", "no_repeat_ngram_size", "sequence_bias", "bad_words_ids", "stop_strings",
    "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
)  # fmt: skip
"""Arguments of `generate` by which more than the set of a prompt's tokens counts."""


REPLAYED = (
    "input_ids", "attention_mask", "position_ids", "cache_position", "use_cache", "return_dict",
    "logits_to_keep",
)  # fmt: skip
"""Arguments of a model's forward, beside its cache, that a replay makes up for."""


@contextmanager
def only_new_tokens(model: PreTrainedModel, tier_cache: TierCache) -> Iterator[None]:
    """Feed a model only the tokens its cache does not hold, while the block runs.

    Assisted decoding (5.17 to 5.24 at least) feeds the whole prompt to its first step even when
    the cache holds most of it; sampling and beams slice by themselves and are not touched.
    """
    prepare = model.prepare_inputs_for_generation
    former = vars(model).get("prepare_inputs_for_generation")  # someone else's patch, or None

    @functools.wraps(prepare)
    def sliced(
        input_ids: torch.Tensor, *args: Any, next_sequence_length: int | None = None, **kwargs: Any
    ) -> Any:
        held = tier_cache.get_seq_length()
        if next_sequence_length is None and 0 < held < input_ids.shape[1]:
            next_sequence_length = input_ids.shape[1] - held
        return prepare(input_ids, *args, next_sequence_length=next_sequence_length, **kwargs)

    model.prepare_inputs_for_generation = sliced
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation
        if former is not None:
            model.prepare_inputs_for_generation = former


@contextmanager
def replayed(hf_model: PreTrainedModel, graph: DecodeGraph, asked: bool) -> Iterator[None]:
    """Replay a captured step whenever the model is called for one token of the graph's cache.

    Unless replays were asked for, nothing is captured before the second token: the first one does
    not wait for that, and may be the only one. What cannot be replayed runs as always; the reason
    is a warning, once, if replays were asked for or a capture failed.
    """
    name, forward = cache_argument(hf_model), hf_model.forward
    former = vars(hf_model).get("forward")  # someone else's patch, or None
    told: set[str] = set()
    captures = asked

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal captures
        ids, own = kwargs.get("input_ids"), kwargs.get(name) is graph.tier_cache
        if args or ids is None or ids.shape != graph.ids.shape or not own:
            return forward(*args, **kwargs)
        others = (kwargs[key] for key in kwargs.keys() - {name, *REPLAYED})
        if any(value is not None and value is not False for value in others):
            return forward(**kwargs)  # it asks for more than logits
        obstacle, warns = graph.obstacle(), asked
        if not (obstacle or graph.captured or captures):
            captures = True
            return forward(**kwargs)
        if not obstacle:
            try:
                logits = graph.step(ids)
                output = {
                    key: graph.tier_cache if isinstance(value, StepCache) else value
                    for key, value in graph.output.items()
                }
                return type(graph.output)(**{**output, "logits": logits.clone()})
            except CaptureError as error:
                obstacle, warns = str(error), True
        if not told and warns:
            warnings.warn(f"decoding without a CUDA graph: {obstacle}", stacklevel=2)
            told.add(obstacle)
        return forward(**kwargs)

    hf_model.forward = call
    try:
        yield
    finally:
        del hf_model.forward
        if former is not None:
            hf_model.forward = former


def setting(hf_model: PreTrainedModel, kwargs: dict[str, Any], name: str) -> Any:
    """Return what transformers will use: an argument, or the given or the model's config."""
    if name in kwargs:
        return kwargs[name]
    value = getattr(kwargs.get("generation_config"), name, None)
    return getattr(hf_model.generation_config, name, None) if value is None else value


def copies_of(hf_model: PreTrainedModel, kwargs: dict[str, Any]) -> int:
    """Return the beams or samples of each prompt."""
    names = ("num_beams", "num_return_sequences")
    return max(setting(hf_model, kwargs, name) or 1 for name in names)


def may_lay_out(hf_model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    """Whether padding may move: one sequence a prompt, and nothing asked for looks at prompts."""
    looks = any(setting(hf_model, kwargs, name) for name in LOOK_AT_PROMPTS)
    new = setting(hf_model, kwargs, "max_new_tokens")
    return copies_of(hf_model, kwargs) == 1 and new is not None and not looks


def infer_mask(
    hf_model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Infer padding as transformers does: pad tokens hide unless they may end the text."""
    pad, eos = (setting(hf_model, kwargs, name) for name in ("pad_token_id", "eos_token_id"))
    ends = set(eos if isinstance(eos, list) else [eos])
    if pad is None or pad in ends:
        return torch.ones_like(input_ids)
    return (input_ids != pad).long()
