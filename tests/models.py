"""Tiny random models, one per architecture that tierkv claims to support."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB = 199

_COMMON = dict(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, vocab_size=VOCAB, max_position_embeddings=4096, head_dim=16,
    pad_token_id=0, bos_token_id=1, eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip

_MLA = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    intermediate_size=96, moe_intermediate_size=32, vocab_size=VOCAB, kv_lora_rank=32,
    q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, head_dim=8,
    n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1,
    first_k_dense_replace=1, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    max_position_embeddings=4096,
)  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _COMMON),
    "llama-mha": ("LlamaConfig", {**_COMMON, "num_key_value_heads": 4}),
    "llama-mqa": ("LlamaConfig", {**_COMMON, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", _COMMON),
    "gemma2": ("Gemma2Config", {**_COMMON, "sliding_window": 40, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "mistral": ("MistralConfig", {**_COMMON, "sliding_window": None}),
    "mistral-sliding": ("MistralConfig", {**_COMMON, "sliding_window": 40}),
    "deepseek_v3": ("DeepseekV3Config", _MLA),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **_COMMON,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
}
"""Architecture -> (configuration class, its arguments)."""

STATEFUL = {"qwen3_next"}
"""Recurrent layers cannot be rolled back; transformers itself refuses assisted decoding."""


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a small random model of an architecture, seeded by its name."""
    kind, arguments = CONFIGS[name]
    config = getattr(transformers, kind)(**{**arguments, **changes})
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():  # tiny random models repeat one token: spread the weights
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
