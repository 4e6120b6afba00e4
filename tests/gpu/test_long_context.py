"""An 8B-shaped model at 32K with an eighth of its KV on the GPU. Random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import tierkv
from tierkv.hf.attach import cache_argument

TOKENS, NEW, CHUNK = 32768, 24, 2048


def llama_8b() -> Any:
    """Return a random model with the shape of Llama-3.1-8B, bf16, on the GPU."""
    config = LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def convert(model: Any, dtype: torch.dtype) -> None:
    """Change the type of the weights only: rotary frequencies stay float32, as when loaded."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def decode(model: Any, ids: torch.Tensor, cache: Any, forced: list[int] | None) -> tuple[Any, Any]:
    """Prefill in chunks and decode; return the best token of each step and ``[NEW, vocab]``."""
    argument = {cache_argument(model): cache}
    for start in range(0, TOKENS, CHUNK):
        output = model(input_ids=ids[:, start : start + CHUNK], logits_to_keep=1, **argument)
    tokens, logits = [], []
    for step in range(NEW):
        logits.append(output.logits[0, -1].float())
        tokens.append(int(logits[-1].argmax()))
        following = tokens[-1] if forced is None else forced[step]
        output = model(input_ids=torch.tensor([[following]], device="cuda"), **argument)
    return tokens, torch.stack(logits)


@pytest.mark.filterwarnings("ignore")
def test_32k_with_a_quarter_of_the_kv_on_the_gpu() -> None:
    """In float32 the greedy tokens are equal. In bf16 ours are as near to float32 as stock ones.

    bf16 logits of a random model differ from float32 ones by more than the distance between the
    best two tokens at many steps, for any attention; which one wins there says nothing. So bf16
    is judged by its error against float32, next to the error of stock all-on-GPU attention.
    """
    model = llama_8b()
    ids = torch.randint(0, 128256, (1, TOKENS), device="cuda")
    convert(model, torch.float32)
    want, exact = decode(model, ids, DynamicCache(config=model.config), None)
    with tierkv.wrap(model, gpu_budget="2GiB", cpu_budget="8GiB") as wrapped:
        got, logits = decode(model, ids, wrapped.cache(), None)
    print(f"float32: largest logit difference {(logits - exact).abs().max():.2e}")
    assert got == want

    convert(model, torch.bfloat16)
    _, stock = decode(model, ids, DynamicCache(config=model.config), want)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with tierkv.wrap(model, gpu_budget="1GiB", cpu_budget="4GiB") as wrapped:
        best, ours = decode(model, ids, wrapped.cache(), want)
        stats = wrapped.stats()
    peak = torch.cuda.max_memory_allocated() - weights
    error, stock_error = ((x - exact).norm().item() for x in (ours, stock))
    agree = sum(a == b for a, b in zip(best, stock.argmax(dim=1).tolist(), strict=True))
    print(f"bf16: error {error:.3f}, stock {stock_error:.3f}; {agree}/{NEW} tokens as stock")
    print(f"peak beyond weights {peak / 2**30:.2f} GiB; {stats}")
    assert error <= 1.1 * stock_error
    assert stats["hits"]["warm"] > 2 * stats["hits"]["hot"]
    # Workspace: activations of a 2048-token chunk (MLP 3 x 56 MiB, attention and norms).
    assert peak <= (1 << 30) + (512 << 20)
