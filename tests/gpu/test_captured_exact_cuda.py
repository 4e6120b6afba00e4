"""Captured exact steps that stream pages, on a GPU, against eager ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import tierkv
from tests.attention.test_captured_exact import logits_of
from tests.gpu.test_exact_tokens_cuda import expected, model
from tests.hf.test_exact_tokens import options, prompt
from tests.paging.test_encoded_hot import below, roomy
from tests.paging_helpers import budgets
from tierkv.attention import captured_exact
from tierkv.hf.attach import cache_argument
from tierkv.hf.geometry import model_geometry


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
@pytest.mark.parametrize("later", [2, 128])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_streamed_steps_equal_eager_ones(
    name: str, later: int, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of several pages, pages sealed since, steps captured anew, a chunk in between."""
    monkeypatch.setattr(captured_exact, "MAX_LATER_PAGES", later)
    torch.manual_seed(0)
    new, hf_model = 200, model(name, torch.float32)
    ids = torch.randint(3, 199, (1, 1200 + new), device="cuda")
    given = budgets("warm", hf_model, tmp_path, page_tokens=16, rows=1) | {"codec": codec}
    geometry = model_geometry(hf_model.config, torch.float32, 16)
    assert geometry is not None
    given["gpu_budget"] += 60 * geometry.page_bytes
    want, eager, _ = logits_of(hf_model, ids, given, new, captured=False)
    got, stats, replays = logits_of(hf_model, ids, given, new, captured=True)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    assert replays == new - 5
    assert stats["hits"] == eager["hits"]
    assert stats["hits"]["warm"] > 0


@pytest.mark.parametrize(
    ("codec", "captured"),
    [("int4-importance", True), ("int8", True), ("fp8", True), ("int4", False)],
)
def test_encoded_hot_pages_equal_those_in_warm(
    codec: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them on the device and the rest below, and all on the device. Captured steps attend
    to other pages where they lie, so sums come in another order; the rest is equal bit for bit."""
    monkeypatch.setattr(captured_exact, "MAX_LATER_PAGES", 1)
    torch.manual_seed(0)
    new, hf_model = 60, model("llama", torch.float32)
    ids = torch.randint(3, 199, (1, 900 + new), device="cuda")
    given = budgets("warm", hf_model, tmp_path, page_tokens=16, rows=1) | {"codec": f"hot={codec}"}
    for pages in (10, 200):
        given["gpu_budget"] = roomy(hf_model, pages, copies=7)
        got, stats, replays = logits_of(hf_model, ids, given, new, captured=captured)
        with monkeypatch.context() as patch:
            below(patch)
            want, other, _ = logits_of(hf_model, ids, given, new, captured=captured)
        if codec == "int4-importance" or not captured:
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
        assert replays == (new - 5 if captured else 0)
        assert stats["hits"]["hot"] > 0
        assert (stats["hits"]["warm"] > 0) == (pages == 10)
        assert sum(stats["hits"].values()) == sum(other["hits"].values())
        moved = [found["moved_bytes"]["warm_to_hot"] for found in (stats, other)]
        assert moved[0] < moved[1] and (moved[0] == 0) == (pages == 200)


def test_encoded_hot_pages_of_batches_forks_and_saved_contexts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are those of the same pages in warm memory, wherever they go."""
    hf_model = model("llama", torch.float32)
    ids = torch.randint(3, 199, (2, 300), generator=torch.Generator().manual_seed(0)).cuda()
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}

    def tokens(directory: Path) -> list[Any]:
        given = budgets("cold", hf_model, directory, page_tokens=16, rows=2)
        given |= {"gpu_budget": roomy(hf_model, 40, copies=7), "codec": "hot=int8"}
        with tierkv.wrap(hf_model, **given, prefix_cache=True, prefill_chunk=100) as wrapped:
            found = [wrapped.generate(ids, **how).tolist() for _ in range(2)]
            assert wrapped.stats()["prefix"]["reused_tokens"] > 0
            with wrapped.open("book") as context:
                context.append(ids[:1])
                with context.fork() as twin:
                    found += [each.generate(**how).tolist() for each in (context, twin)]
                context.save()
        with tierkv.wrap(hf_model, **given) as wrapped, wrapped.open("book") as context:
            assert context.restored_tokens > 300
            found.append(context.generate(**how).tolist())
            found.append(wrapped.manager.tiers.device_frames.used)
        return found

    *got, above = tokens(tmp_path / "above")
    below(monkeypatch)
    *want, under = tokens(tmp_path / "below")
    assert got == want
    assert above > 0 == under


@pytest.mark.parametrize("kind", ["hot", "warm", "cold", "minimum"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_eager_generation(name: str, kind: str, tmp_path: Path) -> None:
    """`cuda_graph=False` is the path of everything that cannot be captured."""
    hf_model = model(name, torch.float32)
    ids, mask = (tensor.cuda() for tensor in prompt("single"))
    given = budgets(kind, hf_model, tmp_path, page_tokens=16, rows=1) | {"cuda_graph": False}
    with tierkv.wrap(hf_model, prefill_chunk=50, **given) as wrapped:
        tier_cache = wrapped.cache()
        argument = {cache_argument(hf_model): tier_cache}
        result = wrapped.generate(ids, attention_mask=mask, **argument, **options("single"))
        assert tier_cache.graph is None
    want = expected(name, "single", torch.float32)
    assert result.sequences.tolist() == want.sequences.tolist()


@pytest.mark.filterwarnings("ignore:decoding without a CUDA graph")
def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """Whether its routing can be captured or not, the tokens are those of `DynamicCache`.

    After a capture that failed torch refused random numbers, and stayed on the stream captured.
    """
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, sliding_window=None,
    )  # fmt: skip
    hf_model: Any = MixtralForCausalLM(config).cuda().eval()
    ids = torch.randint(3, 199, (1, 300), device="cuda")
    how: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    want = hf_model.generate(ids, **how).tolist()
    given = budgets("warm", hf_model, tmp_path, page_tokens=16, rows=1)
    for turn in range(2):  # a failed capture must not spoil what follows
        with tierkv.wrap(hf_model, **given) as wrapped:
            assert wrapped.generate(ids, **how).tolist() == want, turn
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert 0 <= float(torch.rand(1, device="cuda")) < 1
