"""Wrapping changes a model only while it lasts, and refuses by name what cannot work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import tierkv
from tests.models import _COMMON, _MLA, VOCAB, tiny_model
from tierkv.errors import HotBudgetError, TierKVError, UnsupportedModelError, WarmBudgetError
from tierkv.hf.attach import cache_argument, compute_device

SETTINGS: dict[str, Any] = {"gpu_budget": "16MiB", "cpu_budget": "16MiB", "page_tokens": 16}
VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    image_size=28, patch_size=14,
)  # fmt: skip


def causal(config: str, **arguments: Any) -> Any:
    return AutoModelForCausalLM.from_config(getattr(transformers, config)(**arguments)).eval()


def encoder_decoder() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, vocab_size=VOCAB
        )
    )


def multimodal() -> Any:
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**_COMMON),
            vision_config=transformers.CLIPVisionConfig(**VISION),
        )
    )


def half_on_meta() -> Any:
    model = tiny_model("llama")
    model.lm_head.to("meta")
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "own attention code": (
        lambda: causal(
            "FalconConfig", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=VOCAB,
        ),
        "FalconForCausalLM computes attention in its own code",
    ),
    "sparse index": (
        lambda: causal(
            "DeepseekV32Config", **_MLA, index_n_heads=4, index_head_dim=16, index_topk=8
        ),
        "deepseek_v32: layer 0 .*sparse index",
    ),
    "attention and recurrent state in one layer": (
        lambda: causal(
            "FalconH1Config", **_COMMON, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
            mamba_d_state=16,
        ),
        "falcon_h1: layer 0",
    ),
    "no attention": (
        lambda: causal(
            "Mamba2Config", hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16,
            state_size=16, n_groups=1, vocab_size=VOCAB,
        ),
        "mamba2",
    ),
    "encoder-decoder": (encoder_decoder, "T5ForConditionalGeneration is an encoder-decoder"),
    "multimodal": (multimodal, "LlavaForConditionalGeneration is a composite"),
    "no weights": (lambda: tiny_model("llama").to("meta"), "LlamaForCausalLM has weights on meta"),
    "several devices": (half_on_meta, "LlamaForCausalLM has weights on cpu, meta"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(REFUSED))
def test_refused_by_name_and_left_unchanged(what: str) -> None:
    build, message = REFUSED[what]
    model = build()
    implementation, attributes = model.config._attn_implementation, set(vars(model))
    with pytest.raises(UnsupportedModelError, match=message):
        tierkv.wrap(model, **SETTINGS)
    assert model.config._attn_implementation == implementation
    assert set(vars(model)) == attributes


def test_a_model_that_is_not_causal_is_refused_at_first_use() -> None:
    model = transformers.BertLMHeadModel(
        transformers.BertConfig(
            hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            vocab_size=VOCAB,
        )
    ).eval()  # fmt: skip
    with (
        tierkv.wrap(model, **SETTINGS) as wrapped,
        pytest.raises(UnsupportedModelError, match=r"BertSelfAttention .*not causal"),
    ):
        wrapped.generate(torch.arange(3, 30)[None], max_new_tokens=2)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"gpu_budget": 1000}, HotBudgetError),
        ({"cpu_budget": 1000, "store": True}, WarmBudgetError),
    ],
)
def test_budgets_below_the_minimum_leave_the_model_unchanged(
    settings: dict[str, Any], error: type[Exception], tmp_path: Any
) -> None:
    model = tiny_model("llama")
    if "store" in settings:
        settings = settings | {"store": str(tmp_path), "disk_floor": 1}
    with pytest.raises(error, match="at least"):
        tierkv.wrap(model, **SETTINGS | settings)
    assert model.config._attn_implementation == "sdpa"
    if "store" in settings:  # the store was given back
        with tierkv.wrap(model, **SETTINGS | {"store": str(tmp_path), "disk_floor": 1}):
            pass


def test_all_sliding_warns_and_works() -> None:
    model = tiny_model("mistral-sliding")
    ids = torch.randint(3, VOCAB, (1, 90), generator=torch.Generator().manual_seed(1))
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    with (
        pytest.warns(UserWarning, match="MistralForCausalLM has no full-attention layer"),
        tierkv.wrap(model, **SETTINGS) as wrapped,
    ):
        assert wrapped.manager is None
        assert wrapped.generate(ids, max_new_tokens=8, do_sample=False).tolist() == want.tolist()
        assert "prefill" in wrapped.stats()


def test_supported_models_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tierkv.wrap(tiny_model("llama"), **SETTINGS):
            pass


def test_wrapping_twice_is_an_error_and_harmless() -> None:
    model = tiny_model("llama")
    ids = torch.arange(3, 60)[None]
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    with tierkv.wrap(model, **SETTINGS) as first:
        with pytest.raises(TierKVError, match="LlamaForCausalLM is already wrapped"):
            tierkv.wrap(model, **SETTINGS)
        assert first.generate(ids, max_new_tokens=6, do_sample=False).tolist() == want.tolist()
    with tierkv.wrap(model, **SETTINGS) as again:
        assert again.generate(ids, max_new_tokens=6, do_sample=False).tolist() == want.tolist()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager"), ("deepseek_v3", "sdpa")],
)
def test_leaving_undoes_everything(name: str, implementation: str) -> None:
    model = tiny_model(name)
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, VOCAB, (2, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    state = {key: value.clone() for key, value in model.state_dict().items()}
    config, attributes = model.config.to_dict(), set(vars(model))
    generation = model.generation_config.to_dict()
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        assert model.config._attn_implementation == "tierkv"
        wrapped.generate(ids, attention_mask=mask, max_new_tokens=3)
        assert set(vars(model)) == attributes  # nothing stays patched between calls
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation
    assert set(vars(model)) == attributes
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, before)


def test_an_exception_inside_undoes_everything_too() -> None:
    model = tiny_model("llama")
    with pytest.raises(RuntimeError, match="mine"), tierkv.wrap(model, **SETTINGS):
        raise RuntimeError("mine")
    assert model.config._attn_implementation == "sdpa"


def test_a_patch_of_someone_else_survives_generate() -> None:
    model = tiny_model("llama")
    original, calls = model.prepare_inputs_for_generation, []

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    model.prepare_inputs_for_generation = patched
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        wrapped.generate(torch.arange(3, 40)[None], max_new_tokens=3)
        assert model.prepare_inputs_for_generation is patched
    assert len(calls) == 3


def test_cache_argument_is_what_forward_takes() -> None:
    model = tiny_model("llama")
    with tierkv.wrap(model, **SETTINGS) as wrapped, torch.no_grad():
        name, cache = cache_argument(model), wrapped.cache()
        model(torch.arange(3, 20)[None], use_cache=True, **{name: cache})
        assert cache.get_seq_length() == 17


def test_compute_device() -> None:
    assert compute_device(tiny_model("llama")) == torch.device("cpu")
