"""Shared fixtures, the hypothesis profiles, and the rule for tests that need a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Tiny models gain nothing from threads, and lose much when cores are shared.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parent.parent


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests/gpu without a GPU; TIERKV_REQUIRE_GPU=1 turns the skip into a failure."""
    needs_gpu = "gpu" in item.path.relative_to(ROOT).parts
    if not needs_gpu or torch.cuda.is_available():
        return
    reason = f"torch {torch.__version__} sees no GPU"
    if os.environ.get("TIERKV_REQUIRE_GPU") == "1":
        pytest.fail(f"{reason}, and TIERKV_REQUIRE_GPU=1")
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the user has set; where converted models lie is kept."""
    for name in ("TIERKV_STORE", "TIERKV_MODEL", "TIERKV_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a random two-layer llama and a byte-level tokenizer with a chat template."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}</s>{% endif %}"
    )
    fast.save_pretrained(directory)
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocab), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0,
            bos_token_id=1, eos_token_id=None, max_position_embeddings=1 << 17,
        )
    )  # fmt: skip
    with torch.no_grad():  # or it would repeat one token
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    return directory
