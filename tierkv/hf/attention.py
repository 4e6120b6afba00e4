"""The attention and mask functions that transformers calls, registered under one name."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from tierkv.attention import exact, reference, selective
from tierkv.attention.merge import apply_sinks
from tierkv.errors import UnsupportedModelError
from tierkv.hf.cache import NAME, forget_pending, take_handle

UNSUPPORTED = ("position_bias", "indices", "block_indices", "output_attentions", "cu_seq_lens_q")
"""Arguments of attention functions that change the result and that tierkv does not implement."""


def register() -> None:
    """Make ``attn_implementation="tierkv"`` known to transformers. Safe to repeat."""
    AttentionInterface.register(NAME, tier_attention)
    AttentionMaskInterface.register(NAME, tier_mask)


@torch.compiler.disable
def tier_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by page on tiered layers, densely on all others.

    query: ``[batch, heads, queries, dim]``; key, value: ``[batch, kv_heads, tokens, dim]``, the
    new tokens on tiered layers and everything on others. Returns ``[batch, queries, heads,
    v_dim]`` and None (no attention weights).

    Raises:
        UnsupportedModelError: the call asks for something that would be silently wrong.
    """
    name, handle = type(module).__name__, take_handle(key, getattr(module, "layer_idx", -1))
    for argument in UNSUPPORTED:
        if kwargs.get(argument) is not None and kwargs[argument] is not False:
            raise UnsupportedModelError(f"{name} passes {argument} to attention: not supported")
    if dropout or is_causal is False or getattr(module, "is_causal", True) is False:
        what = f"dropout {dropout}" if dropout else "attention that is not causal"
        raise UnsupportedModelError(f"{name} asks for {what}: not supported")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    with torch.no_grad():
        if handle is None:
            out = _dense(query, key, value, attention_mask, scale, softcap, s_aux)
            return out, None
        mask = attention_mask
        first, padding = getattr(mask, "_tierkv_padding", (None, None))
        if mask is not None:
            wanted = (query.shape[0], 1, 1, handle.lookup.length)
            if mask.shape != wanted or mask.dtype != torch.bool:
                raise UnsupportedModelError(
                    f"{name}: a custom attention mask {tuple(mask.shape)} of {mask.dtype} "
                    f"cannot be applied by page; pass a 2D padding mask"
                )
            if first is None:
                first, padding = padding_of(mask[:, 0, 0])
        if selective.applies(handle.lookup):
            if mask is not None:
                raise UnsupportedModelError(
                    "attention='selective' cannot hide padding; pass sequences of equal length"
                )
            out = selective.attend(query, handle.lookup, scale=scale, softcap=softcap, sinks=s_aux)
            handle.attended()
            return out.contiguous(), None
        out = exact.attend(
            query, key, value, handle.lookup, scale=scale, mask=mask, first_visible=first or 0,
            padding=padding, softcap=softcap, sinks=s_aux,
            expand=getattr(module, "expand_kv", None),
        )  # fmt: skip
    handle.attended()
    return out.contiguous(), None


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over keys that are all at hand; the last query is the last key."""
    queries, keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    if queries > 1 and (mask is None or mask.shape[-2] == 1):
        causal = reference.lower_right_causal(queries, keys, query.device)
        square = mask is None and queries == keys
        mask = causal if mask is None else causal & mask
    else:
        square = False
    if softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, None if square else mask, is_causal=square, scale=scale,
            enable_gqa=group > 1,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous()
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    part = reference.attend(query, key, value, scale=scale, mask=mask, softcap=softcap)
    out = part.out if sinks is None else apply_sinks(part, sinks.view(1, -1, 1))
    return out.transpose(1, 2).to(query.dtype).contiguous()


def tier_mask(
    *args: Any,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return None for a plain causal mask, else what hides padding: ``[batch, 1, 1, keys]``.

    Causality over pages is computed by the attention function, so no ``queries x keys`` tensor
    exists. Sliding-window and other patterns get transformers' own dense mask; they are applied
    on layers whose keys are all at hand.
    """
    forget_pending()  # called before the layers of every forward
    if mask_function is not causal_mask_function:
        return sdpa_mask(
            *args, mask_function=mask_function, attention_mask=attention_mask, **kwargs
        )
    if attention_mask is None:
        return None
    keys, offset = kwargs["kv_length"], kwargs.get("kv_offset", 0)
    visible = attention_mask[:, offset : offset + keys].bool()
    if visible.shape[1] != keys:
        raise UnsupportedModelError(
            f"attention_mask covers {attention_mask.shape[1]} tokens, but past and new tokens "
            f"together are {keys + offset}; pass a mask over all of them"
        )
    first, padding = padding_of(visible)
    if not first:
        return None
    mask = visible[:, None, None, :]
    mask._tierkv_padding = first, padding  # type: ignore[attr-defined]
    return mask


def padding_of(visible: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """Describe a mask ``[batch, keys]``, True where a token is no padding.

    Returns the position from which on it is True everywhere, and ``[batch]`` int32 with the
    number of tokens hidden at the start of each sequence, or None if others are hidden as well.
    """
    keys = visible.shape[1]
    hidden = (~visible).sum(dim=1)
    after_last = torch.where(visible, 0, torch.arange(1, keys + 1, device=visible.device))
    first = after_last.amax(dim=1)
    last, on_the_left = torch.stack([first.max(), (hidden == first).all().long()]).tolist()
    return last, hidden.int() if on_the_left else None
