"""Switch a model to tierkv's attention, and back."""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from tierkv.errors import TierKVError, UnsupportedModelError
from tierkv.hf.attention import register
from tierkv.hf.cache import NAME


def cache_argument(model: PreTrainedModel) -> str:
    """Return what the model's forward calls its cache: `past_key_values`, or `cache` from 5.24."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("past_key_values", "cache"):
        if name in parameters:
            return name
    raise UnsupportedModelError(f"{type(model).__name__}.forward takes no key-value cache")


def compute_device(model: PreTrainedModel) -> torch.device:
    """Return the one device all weights are on.

    Raises:
        UnsupportedModelError: weights are spread over several devices.
    """
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(str(device) for device in devices))
        raise UnsupportedModelError(
            f"{type(model).__name__} has weights on {names}; tierkv needs all of them on one "
            f"CPU or CUDA device (load it without device_map)"
        )
    return next(iter(devices))


def attach(model: PreTrainedModel) -> str:
    """Make a model attend through tierkv; return its former attention implementation.

    Raises:
        UnsupportedModelError: the model is of a kind that cannot be switched; the message
            names it and the reason, and the model is unchanged.
        TierKVError: it is wrapped already (two page managers would not know of each other).
    """
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; decoders only")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModelError(
            f"{name} is a composite (multimodal) model; wrap its language model instead"
        )
    cache_argument(model)
    former: str = config._attn_implementation
    if former == NAME:
        raise TierKVError(
            f"{name} is already wrapped by tierkv (its attn_implementation is {former!r}); close "
            f"the other wrapper first, or use it"
        )
    register()
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise UnsupportedModelError(
            f"{name} computes attention in its own code and cannot be switched to another "
            f"implementation (transformers refused)"
        )
    return former


def detach(model: PreTrainedModel, former: str) -> None:
    """Undo `attach`."""
    model.set_attn_implementation(former)
