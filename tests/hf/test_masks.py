"""Padding hides what it should, and masks that cannot be applied by page are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface

import tierkv
from tests.models import VOCAB, tiny_model
from tierkv.errors import TierKVError, UnsupportedModelError
from tierkv.hf.attach import cache_argument
from tierkv.hf.attention import NAME, UNSUPPORTED, tier_attention, tier_mask

SETTINGS: dict[str, Any] = {"gpu_budget": "16MiB", "cpu_budget": "16MiB", "page_tokens": 16}
ARCHITECTURES = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"]


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def forward(model: Any, cache: Any, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Logits of new tokens, positions counted from the padding mask."""
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, use_cache=True, **{cache_argument(model): cache}, **kwargs).logits


def test_mask_function_is_registered() -> None:
    with tierkv.wrap(tiny_model("llama"), **SETTINGS):
        assert AttentionMaskInterface()[NAME] is tier_mask


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_left_padding_equals_no_padding(name: str) -> None:
    model, ids, pad = tiny_model(name), tokens(2, 60), 23
    mask = torch.ones_like(ids)
    ids[0, :pad], mask[0, :pad] = 0, 0
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        padded, alone = wrapped.cache(), wrapped.cache()
        for start, stop in ((0, 40), (40, 41), (41, 60)):
            part = forward(model, padded, ids[:, start:stop], attention_mask=mask[:, :stop])
            skip = max(pad - start, 0)
            want = forward(model, alone, ids[:1, start + skip : stop])
            assert not part.isnan().any()
            torch.testing.assert_close(part[:1, skip:], want, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_any_padding_equals_stock_attention(name: str) -> None:
    """Left, right and in the middle; what is hidden does not matter, so it is not compared."""
    model, ids = tiny_model(name), tokens(4, 70)
    mask = torch.ones_like(ids)
    mask[0, :50] = 0
    mask[1, 60:] = 0
    mask[2, 20:45] = 0
    cuts, want = ((0, 33), (33, 34), (34, 70)), []
    stock = DynamicCache(config=model.config)
    for start, stop in cuts:
        want.append(forward(model, stock, ids[:, start:stop], attention_mask=mask[:, :stop]))
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        for (start, stop), logits in zip(cuts, want, strict=True):
            got = forward(model, cache, ids[:, start:stop], attention_mask=mask[:, :stop])
            seen = mask[:, start:stop].bool()
            torch.testing.assert_close(got[seen], logits[seen], atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_row_of_nothing_but_padding_is_finite(name: str) -> None:
    model, ids = tiny_model(name), tokens(2, 50)
    mask = torch.ones_like(ids)
    mask[1] = 0
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache, alone = wrapped.cache(), wrapped.cache()
        for start, stop in ((0, 30), (30, 49), (49, 50)):
            logits = forward(model, cache, ids[:, start:stop], attention_mask=mask[:, :stop])
            assert logits.isfinite().all()
            want = forward(model, alone, ids[:1, start:stop])
            torch.testing.assert_close(logits[:1], want, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 8, 20), (1, 1, 8, 8), (1, 4, 1, 20), (1, 1, 1, 19)])
def test_4d_mask_is_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, tokens(1, 12))
        with pytest.raises(UnsupportedModelError, match="custom attention mask"):
            forward(model, cache, tokens(1, 8), attention_mask=torch.ones(shape, dtype=dtype))
        cache.rollback()
        assert cache.get_seq_length() == 12


@pytest.mark.parametrize("covered", [1, 8, 12, 19])
def test_mask_must_cover_past_and_new_tokens(covered: int) -> None:
    model = tiny_model("llama")
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, tokens(1, 12))
        with pytest.raises(UnsupportedModelError, match=rf"covers {covered} tokens.* are 20"):
            model(
                tokens(1, 8), use_cache=True,
                attention_mask=torch.ones(1, covered, dtype=torch.long),
                **{cache_argument(model): cache},
            )  # fmt: skip
        assert cache.get_seq_length() == 12


@pytest.mark.parametrize("shape", [(1, 19), (1, 21), (2, 20), (1, 1, 20, 20)])
def test_prefill_checks_its_mask(shape: tuple[int, ...]) -> None:
    with tierkv.wrap(tiny_model("llama"), **SETTINGS) as wrapped:
        cache = wrapped.cache()
        with pytest.raises(TierKVError, match="attention_mask is"):
            wrapped.prefill(tokens(1, 20), cache, attention_mask=torch.ones(shape))
        with pytest.raises(TierKVError, match="attention_mask is"):
            wrapped.generate(tokens(1, 20), attention_mask=torch.ones(shape), max_new_tokens=1)


def test_tier_mask_is_as_small_as_can_be() -> None:
    sizes = dict(batch_size=2, q_length=3, kv_length=5, q_offset=2, kv_offset=0)
    assert tier_mask(**sizes, attention_mask=None) is None
    assert tier_mask(**sizes, attention_mask=torch.ones(2, 5, dtype=torch.bool)) is None
    visible = torch.tensor([[False, True, True, True, True], [True] * 5])
    mask = tier_mask(**sizes, attention_mask=visible)
    assert mask is not None
    assert mask.shape == (2, 1, 1, 5)
    assert torch.equal(mask[:, 0, 0], visible)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral-sliding"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.filterwarnings("ignore:.*has no full-attention layer")
def test_without_a_tier_cache_attention_is_dense(name: str, cached: bool) -> None:
    """A wrapped model used with transformers' own cache, or none, stays right."""
    model, ids = tiny_model(name), tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :17] = 0

    def run() -> torch.Tensor:
        with torch.no_grad():
            if not cached:
                return model(ids, attention_mask=mask, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        parts = [
            forward(model, cache, ids[:, a:b], attention_mask=mask[:, :b])
            for a, b in ((0, 30), (30, 31), (31, 60))
        ]
        return torch.cat(parts, dim=1)

    want, seen = run(), mask.bool()
    with tierkv.wrap(model, **SETTINGS):
        torch.testing.assert_close(run()[seen], want[seen], atol=3e-4, rtol=1e-3)


class Layer(torch.nn.Module):
    """Stands for a model's attention module."""

    is_causal = True
    layer_idx = 0


def attend(**kwargs: Any) -> torch.Tensor:
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    return tier_attention(Layer(), q, k, v, None, **kwargs)[0]


@pytest.mark.parametrize("argument", UNSUPPORTED)
def test_arguments_that_change_the_result_are_refused(argument: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"Layer passes {argument}"):
        attend(**{argument: torch.ones(1)})
    assert attend(**{argument: None}).shape == (1, 6, 4, 8)


def test_dropout_and_non_causal_attention_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"dropout 0\.1"):
        attend(dropout=0.1)
    with pytest.raises(UnsupportedModelError, match="not causal"):
        attend(is_causal=False)


@pytest.mark.parametrize("by", ["forward", "generate"])
def test_output_attentions_is_refused(by: str) -> None:
    model, ids = tiny_model("llama"), tokens(1, 30)
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        with pytest.raises((TierKVError, ValueError), match="output_attentions"):
            if by == "forward":
                forward(model, wrapped.cache(), ids, output_attentions=True)
            else:
                wrapped.generate(
                    ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True
                )
        assert wrapped.generate(ids, max_new_tokens=2).shape == (1, 32)
