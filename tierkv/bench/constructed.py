"""A llama with weights set by hand that repeats what followed a token earlier: the right answer is
known at any length, and a page that is missing or wrong shows.

Layer 0 looks one token back, in channels that RoPE turns fast. Every further layer looks up: its
query is the token, its keys are the tokens before each position, in channels that RoPE turns by
less than 0.01 over `MAX_TOKENS`, and what it finds is the token after the last occurrence. Together
they are an induction circuit (Olsson et al., 2022). Each head of each lookup layer writes a part
of the answer's code, scrambled per layer and KV head, and the model says `MISSING` unless all parts
are there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tierkv.hf import shapes
from tierkv.paging.directory import NOWHERE

MISSING = 0
"""Token that the model says when a head did not find its part of the answer."""
SALIENT = 160
"""Tokens 1 to this number are those of needles; all later ones are filler."""
MAX_TOKENS = 1 << 21
"""Length up to which positions do no harm."""
MAX_PARTS = 32
"""Parts of an answer's code: more could not be told apart in bfloat16."""

_THETA = 1e24
"""Base of RoPE: so large that more than half of the channels hardly turn."""
_DRIFT = 0.01
"""Radians that those turn by over `MAX_TOKENS`."""
_CONSTANT = 128.0
"""Of every embedding; so large that the norms of all residuals are nearly equal."""
_FILLER = 0.125
"""Size of filler's codes; those of needles are 1, so that they show in a page's summary."""
_ALIKE = 0.6
"""Largest agreement of two needle tokens' codes."""
_SHARPNESS, _BACK_SHARPNESS = 128.0, 256.0
"""Scores of what is looked up, and of one token back. Other needles score 51 less at least, filler
112; the nearest of all other distances 12 less. A million of them get less than 0.1% together."""
_BACK_FIRST, _BACK_DECAY = 0.4, 0.8
"""Share of the fastest pair of channels in the score of one token back; of each further one."""
_LOGIT = 32.0
"""Logit of a right answer, about."""


@dataclass(frozen=True, slots=True)
class Needles:
    """A context of filler with needles in it.

    Attributes:
        ids: ``[1, tokens]`` int64, the context.
        keys: the token to ask for, per needle.
        answers: the tokens that follow it, per needle.
        starts: position of each key in the context.
    """

    ids: torch.Tensor
    keys: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]

    def __len__(self) -> int:
        """Return the number of needles."""
        return len(self.keys)


def build(
    *,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 4096,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Any:
    """Return a transformers llama that answers what followed its last token earlier.

    Raises:
        ValueError: the sizes leave no lookup layer, no filler, or more than `MAX_PARTS` parts.
    """
    parts = heads * (layers - 1)
    if layers < 2 or not 1 <= parts <= MAX_PARTS:
        raise ValueError(
            f"{layers} layers of {heads} heads: 2 layers at least, and heads times lookup layers "
            f"at most {MAX_PARTS}"
        )
    if heads % kv_heads or head_dim < 64 or vocab <= SALIENT + 1:
        raise ValueError(
            f"{heads} heads on {kv_heads} KV heads of {head_dim} channels (64 at least), {vocab} "
            f"tokens (more than {SALIENT + 1})"
        )
    fast = _fast_pairs(head_dim)
    width = head_dim - 2 * fast
    hidden = -(-(1 + 3 * width) // 64) * 64
    config = shapes.model_config(
        "llama", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=16, vocab_size=vocab,
        max_position_embeddings=MAX_TOKENS, rms_norm_eps=1e-6, tie_word_embeddings=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
    )  # fmt: skip
    model = shapes.random_model(config, torch.device(device), dtype)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.zeros(weight.shape) for name, weight in model.named_parameters()}
    for name, weight in weights.items():
        if "norm" in name:
            weight.fill_(1.0)
    codes = _codes(vocab, width, generator)
    _set_ends(weights, codes, parts=parts, heads=heads)
    for layer in range(layers):
        _set_layer(weights, layer, (heads, kv_heads, head_dim), width, generator)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def needles(
    tokens: int, *, depths: int = 10, answer: int = 4, vocab: int = 4096, seed: int = 0
) -> Needles:
    """Return a context with one needle at each of `depths` depths, spread evenly.

    answer: tokens that follow each key; they are to be found one after the other.

    Raises:
        ValueError: there are not enough tokens for the needles, or not enough of the vocabulary.
    """
    size = 1 + answer
    if depths * size > SALIENT or tokens < 2 * depths * size:
        raise ValueError(
            f"{depths} needles of {size} tokens need {depths * size} of {SALIENT} tokens and a "
            f"context of {2 * depths * size} tokens, got {tokens}"
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(SALIENT + 1, vocab, (1, tokens), generator=generator)
    chosen = (torch.randperm(SALIENT, generator=generator)[: depths * size] + 1).view(-1, size)
    starts = [int((index + 0.5) / depths * (tokens - size)) for index in range(depths)]
    for start, needle in zip(starts, chosen, strict=True):
        ids[0, start : start + size] = needle
    rows = chosen.tolist()
    return Needles(
        ids, tuple(row[0] for row in rows), tuple(tuple(row[1:]) for row in rows), tuple(starts)
    )


def ask(wrapped: Any, tier_cache: Any, context: Needles, index: int) -> tuple[int, ...]:
    """Return the tokens that a wrapped model says after the key of a needle, greedily.

    The cache holds the context, and no more afterwards.
    """
    key = torch.tensor([[context.keys[index]]])
    ids = torch.cat([context.ids, key], dim=1).to(wrapped.hf_model.device)
    answer = len(context.answers[index])
    out = wrapped.generate(
        ids, do_sample=False, max_new_tokens=answer, **{wrapped.cache_argument(): tier_cache}
    )
    tier_cache.crop(context.ids.shape[1] - tier_cache.get_seq_length())
    return tuple(out[0, ids.shape[1] :].tolist())


def homes(tier_cache: Any, context: Needles, index: int) -> dict[str, int]:
    """Return how many pages of a needle have their fastest copy in each tier, over all layers."""
    manager = tier_cache.live_manager()
    page_tokens, start = manager.geometry.page_tokens, context.starts[index]
    last = start + len(context.answers[index])
    blocks = tier_cache.sequences.blocks[0, start // page_tokens : last // page_tokens + 1]
    hot = manager.tiers.is_hot(blocks)
    warm = (manager.directory.warm[blocks] != NOWHERE) & ~hot
    cold = manager.directory.cold[blocks] & ~hot & ~warm
    return {"hot": int(hot.sum()), "warm": int(warm.sum()), "cold": int(cold.sum())}


def _fast_pairs(head_dim: int) -> int:
    """Return how many pairs of channels turn by more than `_DRIFT` over `MAX_TOKENS`."""
    pairs = head_dim // 2
    return 1 + math.floor(pairs * math.log(MAX_TOKENS / _DRIFT) / math.log(_THETA))


def _codes(vocab: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``[vocab, width]`` signs; those of needles agree with no other too much."""

    def signs(count: int) -> torch.Tensor:
        return torch.randint(0, 2, (count, width), generator=generator).float() * 2 - 1

    kept = signs(1)
    while len(kept) <= SALIENT:
        new = signs(1)
        if float((kept @ new[0]).abs().max()) <= _ALIKE * width:
            kept = torch.cat([kept, new])
    return torch.cat([kept, signs(vocab - len(kept))])


def _set_ends(
    weights: dict[str, torch.Tensor], codes: torch.Tensor, *, parts: int, heads: int
) -> None:
    """Set the embedding (a constant, and the token's code) and the answers' logits."""
    vocab, width = codes.shape
    table, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    loud = torch.arange(vocab) <= SALIENT
    table[:, 0] = _CONSTANT
    table[:, 1 : 1 + width] = torch.where(loud[:, None], codes, _FILLER * codes)
    whole = parts // heads * width  # what the code of the answer sums up to if nothing is missing
    size = math.sqrt((_CONSTANT**2 + (2 + (parts // heads) ** 2) * width) / table.shape[1])
    gain = _LOGIT / whole * size
    head[:, 1 + 2 * width : 1 + 3 * width] = gain * codes
    head[MISSING] = 0.0
    head[MISSING, 0] = gain * (whole - width // heads / 2) / _CONSTANT


def _set_layer(
    weights: dict[str, torch.Tensor],
    layer: int,
    sizes: tuple[int, int, int],
    width: int,
    generator: torch.Generator,
) -> None:
    """Set one layer's attention; its MLP stays 0."""
    (heads, kv_heads, dim), group = sizes, sizes[0] // sizes[1]
    q, k, v, out = (
        weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkvo"
    )
    hidden, fast = q.shape[1], _fast_pairs(dim)
    current, before, found = (torch.arange(width) + 1 + width * part for part in range(3))
    size = math.sqrt((_CONSTANT**2 + min(1 + layer, 2) * width) / hidden)  # root mean square
    content = torch.cat([torch.arange(fast, dim // 2), torch.arange(fast, dim // 2) + dim // 2])
    written = before if layer == 0 else found

    def scrambled(channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = torch.randperm(len(channels), generator=generator)[:width]
        return channels[order], torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1

    for kv_head in range(kv_heads):
        rows = kv_head * dim
        places, signs = scrambled(torch.arange(dim))
        v[rows + places, current] = signs * size
        keys, key_signs = scrambled(content)
        if layer == 0:
            _look_back(k[rows : rows + dim], None, size)
        else:
            k[rows + keys, before] = key_signs * _root(_SHARPNESS / width, dim) * size
        for head in range(kv_head * group, (kv_head + 1) * group):
            if layer == 0:
                _look_back(None, q[head * dim : (head + 1) * dim], size)
            else:
                q[head * dim + keys, current] = key_signs * _root(_SHARPNESS / width, dim) * size
            own = torch.arange(head, width, heads)
            out[written[own], head * dim + places[own]] = signs[own]


def _look_back(k: torch.Tensor | None, q: torch.Tensor | None, size: float) -> None:
    """Set a head's key or query ``[dim, hidden]`` so that one token back scores highest."""
    rows = k if k is not None else q
    assert rows is not None
    dim, fast = rows.shape[0], _fast_pairs(rows.shape[0])
    pairs = torch.arange(fast)
    turn = _THETA ** (-pairs.double() / (dim // 2))
    share = torch.where(turn * MAX_TOKENS > 1, _BACK_DECAY ** (pairs - 1), 0.0)
    share[0] = 0.0
    share *= (1 - _BACK_FIRST) / share.sum()
    share[0] = _BACK_FIRST
    gain = (share * _BACK_SHARPNESS).sqrt() * dim**0.25 * size / _CONSTANT
    angle = torch.zeros_like(turn) if k is not None else turn
    rows[pairs, 0] = (gain * angle.cos()).float()
    rows[pairs + dim // 2, 0] = (-gain * angle.sin()).float()


def _root(score: float, dim: int) -> float:
    """Return the factor for query and key each, if their product is to score this per channel."""
    return math.sqrt(score * math.sqrt(dim))
