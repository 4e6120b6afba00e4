"""What tells one model's pages from another's."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from typing import Any

import torch

from tierkv.paging.keys import root_key
from tierkv.paging.manager import PageManager

SAMPLES = 1024
"""Elements read of each weight: a fine-tuned or merged model differs in almost all of them."""
VOLATILE = ("_name_or_path", "transformers_version", "_attn_implementation", "torch_dtype")
"""Configuration that says where a model came from, not what it computes."""


def model_root(hf_model: Any, manager: PageManager) -> bytes:
    """Return what the keys of a wrapped model's pages begin from."""
    tiers = manager.tiers
    name = fingerprint(hf_model)
    return root_key(name, manager.geometry, tiers.salt, codec=tiers.stored_codec)


@torch.no_grad()
def fingerprint(hf_model: Any) -> bytes:
    """Return 32 bytes that name a model's configuration (rotary settings, dtype) and weights.

    Every weight's name, shape, dtype and `SAMPLES` of its elements, evenly spaced, are hashed;
    adapters count as weights. The same in every process.
    """
    config = hf_model.config.to_dict()
    for name in VOLATILE:
        config.pop(name, None)
    text = json.dumps(config, sort_keys=True, default=str)
    digest = hashlib.sha256(f"{type(hf_model).__name__} {hf_model.dtype} {text}".encode())
    weights, picked = sorted(hf_model.named_parameters()), list[torch.Tensor]()
    for _, weight in weights:
        flat = weight.detach().reshape(-1)
        picked.append(flat[:: max(1, len(flat) // SAMPLES)][: 2 * SAMPLES].to(torch.float32))
    for (name, weight), samples in zip(weights, _to_host(picked), strict=True):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(samples.numpy().tobytes())
    return digest.digest()


def _to_host(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy vectors to the host, those of one device at once: each copy waits for the device."""
    copies: dict[torch.device, deque[torch.Tensor]] = {}
    for device in {part.device for part in parts}:
        own = [part for part in parts if part.device == device]
        copies[device] = deque(torch.cat(own).cpu().split([len(part) for part in own]))
    return [copies[part.device].popleft() for part in parts]
