"""Queries foreseen from the residual stream, and steps that go through opaque operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.hf.test_exact_tokens import model
from tests.models import VOCAB
from tierkv.hf import step
from tierkv.hf.attach import cache_argument
from tierkv.hf.step import StepCache, running
from tierkv.hf.upcoming import Upcoming
from tierkv.paging.sequences import Sequences

LAYERS = 6


class Recorder:
    """Takes the place of captured lookups: keeps queries, gives plausible attention."""

    def __init__(self) -> None:
        self.manager = self
        self.device, self.sequences = torch.device("cpu"), Sequences(LAYERS)
        self.asked: dict[int, torch.Tensor] = {}
        self.foreseen: dict[int, torch.Tensor] = {}

    def announce(self, layer: int, query: Any, scale: float) -> None:
        assert layer not in self.asked, "announced after it was asked"
        self.foreseen[layer] = query().clone()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, **kwargs: Any
    ) -> torch.Tensor:
        self.asked[layer] = query.clone()
        group = query.shape[1] // value.shape[1]
        return value.repeat_interleave(group, 1).transpose(1, 2).contiguous()


def deep(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config: PreTrainedConfig = getattr(transformers, kind)(
        hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=VOCAB, head_dim=16, pad_token_id=0, **more,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def run(hf_model: Any, recorder: Recorder, upcoming: Upcoming | None, call: Any = None) -> Any:
    with torch.no_grad(), running(hf_model, recorder, upcoming) as step_cache:  # type: ignore[arg-type]
        assert isinstance(step_cache, StepCache)
        return (call or hf_model.forward)(
            input_ids=torch.tensor([[7]]),
            position_ids=torch.tensor([[41]]),
            use_cache=True,
            **{cache_argument(hf_model): step_cache},
        ).logits


KINDS = ["LlamaConfig", "Qwen2Config", "Qwen3Config"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_that_layers_leave_alone_foresees_exactly(kind: str, depth: int) -> None:
    """With layers that add nothing, the foreseen query is the query; with others it is near."""
    hf_model = deep(kind)
    upcoming = Upcoming.of(hf_model, depth, 2)
    assert upcoming is not None
    recorder = Recorder()
    run(hf_model, recorder, upcoming)
    assert sorted(recorder.foreseen) == list(range(3, LAYERS))
    for layer, query in recorder.foreseen.items():
        assert not torch.equal(query, recorder.asked[layer])
    for layer in hf_model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    recorder = Recorder()
    run(hf_model, recorder, upcoming)
    for layer, query in recorder.foreseen.items():
        torch.testing.assert_close(query, recorder.asked[layer])


def test_models_of_another_build_are_not_foreseen() -> None:
    assert Upcoming.of(model("deepseek_v3"), 1, 2) is None
    assert Upcoming.of(deep("LlamaConfig"), 0, 2) is None


@pytest.mark.parametrize("kind", KINDS)
def test_steps_compile_whole_and_once(kind: str) -> None:
    """One graph without a break, the same operators in the same order, for every later cache."""
    hf_model = deep(kind)
    upcoming = Upcoming.of(hf_model, 1, 2)
    want, first, second = Recorder(), Recorder(), Recorder()
    expected = run(hf_model, want, upcoming)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(hf_model.forward, fullgraph=True, backend=backend)
    for recorder in (first, second):
        torch.testing.assert_close(run(hf_model, recorder, upcoming, compiled), expected)
        assert list(recorder.asked) == list(range(LAYERS))
        assert recorder.foreseen.keys() == want.foreseen.keys()
    assert len(graphs) == 1


def test_nothing_is_left_behind() -> None:
    hf_model = deep("LlamaConfig")
    former = hf_model.config._attn_implementation
    run(hf_model, Recorder(), Upcoming.of(hf_model, 1, 2))
    assert hf_model.config._attn_implementation == former
    assert step._lookups is None and step._upcoming is None
    assert not any(layer._forward_pre_hooks for layer in hf_model.model.layers)
