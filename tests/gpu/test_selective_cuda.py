"""Selective attention and captured decode steps on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tierkv
from tests.attention.test_selective import settings
from tests.gpu.test_exact_tokens_cuda import expected, model
from tests.hf.test_exact_tokens import options, prompt
from tierkv.hf import upcoming
from tierkv.hf.attach import cache_argument
from tierkv.hf.graph import DecodeGraph

NEW = 100


def wide(name: str) -> Any:
    return model(name, torch.float32)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("kind", ["hot", "warm", "cold"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.filterwarnings("ignore:decoding without a CUDA graph")
def test_a_budget_for_everything_is_exact(
    name: str, kind: str, cuda_graph: bool, tmp_path: Path
) -> None:
    ids, mask = (tensor.cuda() for tensor in prompt("single"))
    given = settings(kind, name, tmp_path, token_budget=1024, cuda_graph=cuda_graph)
    given["gpu_budget"] = "64MiB"
    with tierkv.wrap(wide(name), prefill_chunk=50, **given) as wrapped:
        result = wrapped.generate(ids, attention_mask=mask, **options("single"))
    want = expected(name, "single", torch.float32)
    assert result.sequences.tolist() == want.sequences.tolist()


def logits(ids: torch.Tensor, given: dict[str, Any], captured: bool, **how: Any) -> torch.Tensor:
    hf_model = wide("llama")
    with torch.no_grad(), tierkv.wrap(hf_model, **given) as wrapped:
        tier_cache, steps = wrapped.cache(), []
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        graph = DecodeGraph(hf_model, tier_cache, 2 * ids.shape[1], **how)
        for at in range(ids.shape[1] - NEW, ids.shape[1]):
            token = ids[:, at : at + 1]
            if captured:
                assert not graph.obstacle()
                steps.append(graph.step(token)[0, -1].clone())
            else:
                argument = {cache_argument(hf_model): tier_cache}
                steps.append(hf_model(token, **argument).logits[0, -1])
        assert graph.replays == (NEW if captured else 0)
        if how.get("look_ahead") and captured:
            assert wrapped.stats()["selective"]["foreseen"]["used"] > 0
        return torch.stack(steps)


@pytest.mark.parametrize("dense_layers", [0, 1, 3])
@pytest.mark.parametrize("selector", ["cuboid", "cuboid8", "bound", "mean", "window", "keys2"])
def test_captured_eager_and_torch_agree(
    selector: str, dense_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same logits from replays, from single launches, and from plain torch on the CPU."""
    torch.manual_seed(0)
    ids = torch.randint(3, 199, (1, 700 + NEW))
    given = settings("hot", "llama", tmp_path, selector=selector, dense_layers=dense_layers)
    given |= {"token_budget": 96, "max_context": 2048, "gpu_budget": "64MiB"}
    eager, captured = (logits(ids.cuda(), given, way) for way in (False, True))
    torch.testing.assert_close(captured, eager, rtol=1e-5, atol=1e-5)
    if dense_layers < 3 and selector != "window":
        monkeypatch.setattr(upcoming, "FIRST_FORESEEN", 0)
        ahead = logits(ids.cuda(), given, True, look_ahead=1)
        torch.testing.assert_close(ahead, eager, rtol=1e-5, atol=1e-5)
    hf_model = wide("llama").cpu()
    try:
        plain = logits(ids, given, False)
    finally:
        hf_model.cuda()
    near = (eager.cpu() - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert float(near.median()) < 1e-4  # a tie may be broken differently in single steps


@pytest.mark.filterwarnings("error:decoding without a CUDA graph")
def test_generate_replays(tmp_path: Path) -> None:
    """Exact attention with everything hot is replayed as well, and gives the same tokens."""
    ids, mask = (tensor.cuda() for tensor in prompt("single"))
    with tierkv.wrap(wide("llama"), page_tokens=16, cuda_graph=True) as wrapped:
        tier_cache = wrapped.cache()
        result = wrapped.generate(
            ids, attention_mask=mask, **{cache_argument(wide("llama")): tier_cache},
            **options("single"),
        )  # fmt: skip
        assert tier_cache.graph.replays >= 22
    want = expected("llama", "single", torch.float32)
    assert result.sequences.tolist() == want.sequences.tolist()


def greedy(hf_model: Any, ids: torch.Tensor, given: dict[str, Any], new: int) -> list[int]:
    with tierkv.wrap(hf_model, **given) as wrapped:
        tier_cache = wrapped.cache()
        argument = {cache_argument(hf_model): tier_cache}
        result = wrapped.generate(ids, max_new_tokens=new, do_sample=False, **argument)
        replays = tier_cache.graph.replays if tier_cache.graph else 0
        assert replays == (new if given["cuda_graph"] else 0)
        return result[0, ids.shape[1] :].tolist()


def test_replays_give_the_eager_tokens_over_512_steps(tmp_path: Path) -> None:
    """16 seals of every layer lie between the first step and the last."""
    torch.manual_seed(0)
    hf_model = deep()
    ids = torch.randint(3, 199, (1, 900), device="cuda")
    given = settings("hot", "llama", tmp_path, token_budget=128, dense_layers=1)
    given |= {"max_context": 2048, "gpu_budget": "64MiB"}
    eager = greedy(hf_model, ids, given | {"cuda_graph": False}, 512)
    assert greedy(hf_model, ids, given | {"cuda_graph": True}, 512) == eager
    assert len(set(eager)) > 20


def test_compiled_layers_give_the_eager_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf_model = deep()
    ids = torch.randint(3, 199, (1, 900), device="cuda")
    given = settings("hot", "llama", tmp_path, token_budget=128, dense_layers=1)
    given |= {"max_context": 2048, "gpu_budget": "64MiB"}
    eager = greedy(hf_model, ids, given | {"cuda_graph": False}, 48)
    assert greedy(hf_model, ids, given | {"cuda_graph": True, "compile": True}, 48) == eager


def deep() -> Any:
    """Return a float32 model with layers enough for lookups to be foreseen."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=199, head_dim=16, pad_token_id=0, eos_token_id=None,
        initializer_range=0.2, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().cuda()


@pytest.mark.parametrize("way", ["prefix cache", "saved context"])
@pytest.mark.filterwarnings("ignore:decoding without a CUDA graph")
def test_pages_that_were_there_already_are_chosen_alike(way: str, tmp_path: Path) -> None:
    """Captured steps of a context that begins with known pages, some of them still on the GPU."""
    ids = torch.randint(3, 199, (1, 700), generator=torch.Generator().manual_seed(0)).cuda()
    given = settings("warm", "llama", tmp_path) | {"token_budget": 96, "max_context": 2048}
    given |= {"gpu_budget": "64MiB"}
    new: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    with tierkv.wrap(wide("llama"), **given) as wrapped:
        want = wrapped.generate(ids, **new)[0, 700:].tolist()
    if way == "prefix cache":
        with tierkv.wrap(wide("llama"), prefix_cache=True, **given) as wrapped:
            for _ in range(2):
                assert wrapped.generate(ids, **new)[0, 700:].tolist() == want
            assert wrapped.stats()["prefix"]["reused_tokens"] == 699
        return
    store: dict[str, Any] = {"store": str(tmp_path / "store"), "disk_floor": "1MiB"}
    with tierkv.wrap(wide("llama"), **given, **store) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
    with tierkv.wrap(wide("llama"), **given, **store) as wrapped, wrapped.open("book") as context:
        assert context.restored_tokens == 700
        assert context.generate(**new)[0].tolist() == want
        assert context.cache.graph.replays > 30


@pytest.mark.parametrize(("kind", "cuda_graph"), [("hot", False), ("hot", True), ("cold", True)])
@pytest.mark.filterwarnings("error:decoding without a CUDA graph")
def test_a_batch_says_what_its_sequences_say_alone(
    kind: str, cuda_graph: bool, tmp_path: Path
) -> None:
    """Rows of a batch, and samples that share a prompt; on disk, pages are waited for in a step."""
    torch.manual_seed(0)
    hf_model = deep()
    ids = torch.randint(3, 199, (3, 900), device="cuda")
    given = settings(kind, "llama", tmp_path, token_budget=128, dense_layers=int(kind == "hot"))
    given |= {"max_context": 2048, "gpu_budget": "64MiB", "cuda_graph": cuda_graph}
    if kind == "cold":
        given["cpu_budget"] = "2MiB"
    want = [greedy(hf_model, row[None], given, 20) for row in ids]
    with tierkv.wrap(hf_model, **given, max_batch=3) as wrapped:
        tier_cache = wrapped.cache()
        argument = {cache_argument(hf_model): tier_cache}
        got = wrapped.generate(ids, max_new_tokens=20, do_sample=False, **argument)
        assert got[:, 900:].tolist() == want
        assert (tier_cache.graph.replays if tier_cache.graph else 0) == (20 if cuda_graph else 0)
        faults = wrapped.stats()["selective"].get("faults")
        assert kind == "hot" or faults["pages_awaited"] > 0
        same = wrapped.generate(
            ids[:1], max_new_tokens=20, do_sample=True, top_k=1, num_return_sequences=3
        )
        assert same[:, 900:].tolist() == [want[0]] * 3
