"""`TieredModel.generate` does what transformers' own generate does, on shared pages."""

from __future__ import annotations

import functools
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StoppingCriteriaList

import tierkv
from tests.combinations import each
from tests.models import VOCAB, tiny_model
from tests.paging_helpers import budgets
from tierkv.errors import ConfigError, TierKVError
from tierkv.hf.cache import TierCache

SETTINGS: dict[str, Any] = {
    "gpu_budget": "32MiB", "cpu_budget": "16MiB", "page_tokens": 16, "prefill_chunk": 50,
}  # fmt: skip
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@functools.cache
def model(name: str = "llama") -> Any:
    return tiny_model(name)


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.tolist() == want.tolist()


def both(ids: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """Run stock generate and tierkv's with the same seed."""
    hf_model = model()  # before seeding: its weights are random
    torch.manual_seed(3)
    want = hf_model.generate(ids, **options)
    with tierkv.wrap(hf_model, **SETTINGS) as wrapped:
        torch.manual_seed(3)
        return wrapped.generate(ids, **options), want


# -- signature and return ------------------------------------------------------------------


def test_returns_a_tensor() -> None:
    got, want = both(tokens(2, 70), **GREEDY)
    assert type(got) is type(want) is torch.Tensor
    assert got.dtype == want.dtype
    same(got, want)


@pytest.mark.parametrize("beams", [1, 3])
def test_returns_a_model_output(beams: int) -> None:
    options = GREEDY | dict(
        num_beams=beams, return_dict_in_generate=True, output_scores=True, output_logits=True,
        output_hidden_states=True,
    )  # fmt: skip
    got, want = both(tokens(1, 70), **options)
    assert type(got) is type(want)
    assert list(got.keys()) == list(want.keys())
    same(got.sequences, want.sequences)
    assert len(got.scores) == len(want.scores)
    for a, b in zip(got.scores, want.scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    held = next(got[key] for key in ("past_key_values", "cache") if key in got)
    assert isinstance(held, TierCache)


def test_input_ids_by_name() -> None:
    with tierkv.wrap(model(), **SETTINGS) as wrapped:
        same(wrapped.generate(input_ids=tokens(1, 40), **GREEDY),
             wrapped.generate(tokens(1, 40), **GREEDY))  # fmt: skip


def test_no_cache_given_by_name() -> None:
    with tierkv.wrap(model(), **SETTINGS) as wrapped:
        got = wrapped.generate(tokens(1, 40), past_key_values=None, **GREEDY)
        same(got, wrapped.generate(tokens(1, 40), **GREEDY))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 50, 51, 52])
@pytest.mark.parametrize("batch", [1, 3])
def test_short_prompts(batch: int, length: int) -> None:
    same(*both(tokens(batch, length), **GREEDY))


@pytest.mark.parametrize("copies", [{"num_beams": 3}, {"do_sample": True}])
def test_prompt_of_one_token_with_copies(copies: dict[str, Any]) -> None:
    extra = {"num_return_sequences": 3, "max_new_tokens": 20}
    same(*both(tokens(1, 1), **{"do_sample": False} | copies | extra))


def test_one_new_token() -> None:
    same(*both(tokens(2, 40), max_new_tokens=1, do_sample=False))


def test_max_length_counts_the_prompt() -> None:
    same(*both(tokens(1, 60), max_length=70, do_sample=False))


def test_padding_is_inferred_as_transformers_does() -> None:
    ids = tokens(2, 60)
    ids[0, :21] = 0  # the pad token
    same(*both(ids, **GREEDY))
    same(*both(ids, **GREEDY, pad_token_id=0, eos_token_id=0))  # may end the text: hides nothing
    same(*both(ids, **GREEDY, pad_token_id=7, eos_token_id=[5, 9]))


def test_generation_config_object() -> None:
    ids = tokens(2, 60)
    ids[0, :21] = 0
    config = GenerationConfig(max_new_tokens=9, num_beams=2, do_sample=False)  # no pad token
    same(*both(ids, generation_config=config))


def test_the_models_own_generation_config_counts() -> None:
    own = tiny_model("llama")
    own.generation_config.num_beams = 3
    ids, config = tokens(1, 60), GenerationConfig(max_new_tokens=9, do_sample=False)
    want = own.generate(ids, generation_config=config)
    with tierkv.wrap(own, **SETTINGS) as wrapped:
        calls: list[tuple[int, int]] = []
        same(
            wrapped.generate(
                ids, generation_config=config, on_prefill=lambda *at: calls.append(at)
            ),
            want,
        )
        # Prefilled once, then shared: three beams of the prompt are not three prefills.
        assert wrapped.stats()["prefill"]["tokens"] == 59
        assert calls


# -- decoding modes ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sampling_with_the_same_seed(seed: int) -> None:
    options = dict(max_new_tokens=15, do_sample=True, temperature=1.3, top_p=0.9, top_k=0)
    ids, hf_model = tokens(2, 70), model()  # made before seeding: its weights are random
    torch.manual_seed(seed)
    want = hf_model.generate(ids, **options)
    with tierkv.wrap(hf_model, **SETTINGS) as wrapped:
        torch.manual_seed(seed)
        same(wrapped.generate(ids, **options), want)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True, "top_k": 0},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"eos_token_id": list(range(3, 60))},
        {"guidance_scale": 1.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_modes(options: dict[str, Any]) -> None:
    same(*both(tokens(1, 70), **{"do_sample": False, "max_new_tokens": 15} | options))


def test_beams_of_a_padded_batch() -> None:
    ids = tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    same(*both(ids, attention_mask=mask, num_beams=3, num_return_sequences=2, **GREEDY))


@functools.cache
def drafter() -> Any:
    """Agrees with the model now and then, so that drafts are accepted and rejected."""
    draft = tiny_model("llama")
    with torch.no_grad():
        noise = torch.Generator().manual_seed(5)
        for parameter in draft.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=noise)
    return draft


@pytest.mark.parametrize("kind", ["hot", "minimum"])
@pytest.mark.parametrize("draft", ["same", "close", "far"])
def test_assistant_model(draft: str, kind: str, tmp_path: Path) -> None:
    assistant = {"same": tiny_model("llama"), "close": drafter(), "far": tiny_model("llama-mha")}
    ids = tokens(1, 70)
    want = model().generate(ids, max_new_tokens=30, do_sample=False)
    settings = budgets(kind, model(), tmp_path, page_tokens=16, rows=1)
    with tierkv.wrap(model(), prefill_chunk=50, **settings) as wrapped:
        got = wrapped.generate(
            ids, assistant_model=assistant[draft], max_new_tokens=30, do_sample=False
        )
    same(got, want)


def test_assistant_that_is_wrapped_too() -> None:
    """Its own cache is transformers'; its attention runs densely."""
    ids = tokens(1, 70)
    want = model().generate(ids, max_new_tokens=20, do_sample=False)
    with tierkv.wrap(model(), **SETTINGS) as wrapped, tierkv.wrap(drafter(), **SETTINGS):
        same(
            wrapped.generate(ids, assistant_model=drafter(), max_new_tokens=20, do_sample=False),
            want,
        )


class Streamer:
    """Records what generate streams."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer() -> None:
    ours, stock, ids = Streamer(), Streamer(), tokens(1, 60)
    want = model().generate(ids, streamer=stock, **GREEDY)
    with tierkv.wrap(model(), **SETTINGS) as wrapped:
        same(wrapped.generate(ids, streamer=ours, **GREEDY), want)
    assert ours.seen == stock.seen
    assert ours.ended == stock.ended == 1


def test_stopping_criteria() -> None:
    def stop(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 66)

    got, want = both(tokens(1, 60), stopping_criteria=StoppingCriteriaList([stop]), **GREEDY)
    assert got.shape == (1, 66)
    same(got, want)


def test_logits_processor() -> None:
    def only(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(50, VOCAB), -torch.inf)

    got, want = both(tokens(1, 60), logits_processor=[only], **GREEDY)
    assert got[:, 60:].max() < 50
    same(got, want)


# -- sharing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"do_sample": True, "num_return_sequences": 4, "top_k": 0}),
        ("llama", {"do_sample": False, "num_beams": 4}),
        ("gemma2", {"do_sample": True, "num_return_sequences": 4, "top_k": 0}),
        ("deepseek_v3", {"do_sample": False, "num_beams": 4}),
    ],
)
def test_copies_share_the_pages_of_their_prompt(name: str, options: dict[str, Any]) -> None:
    ids, pages, prefilled = tokens(1, 16 * 45 + 3), [], []
    for extra in ({"do_sample": False}, options):
        with tierkv.wrap(model(name), **SETTINGS) as wrapped:
            out = wrapped.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **extra)
            tiers = wrapped.stats()["tiers"]
            pages.append(sum(tiers[tier]["pages"] for tier in ("hot", "warm", "cold")))
            prefilled.append(wrapped.stats()["prefill"]["tokens"])
            del out
    assert pages[0] > 0
    assert pages[0] < pages[1] <= 1.1 * pages[0]
    assert prefilled[0] == prefilled[1] == 16 * 45 + 2


def test_copies_share_warm_and_cold_pages_too(tmp_path: Path) -> None:
    ids, pages = tokens(1, 16 * 45 + 3), []
    for index, extra in enumerate(({"do_sample": False}, {"num_beams": 4, "do_sample": False})):
        settings = budgets("cold", model(), tmp_path / str(index), page_tokens=16, rows=4)
        with tierkv.wrap(model(), **settings) as wrapped:
            out = wrapped.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **extra)
            assert wrapped.manager is not None
            wrapped.manager.transfer.spill(lambda: None).result()  # what is queued is written
            tiers = wrapped.stats()["tiers"]
            assert tiers["cold"]["pages"] > 0
            pages.append(sum(tiers[tier]["pages"] for tier in ("hot", "warm", "cold")))
            del out
    assert pages[1] <= 1.1 * pages[0]


@pytest.mark.parametrize("as_dict", [False, True])
def test_calls_do_not_add_up(as_dict: bool) -> None:
    """A budget for one run is enough for many, without the garbage collector's help."""
    ids = tokens(1, 200)
    settings = budgets("warm", model(), Path(), page_tokens=16, rows=1)
    with tierkv.wrap(model(), **settings | {"cpu_budget": 45 * 4096}) as wrapped:
        gc.collect()
        gc.disable()
        try:
            for _ in range(4):
                out = wrapped.generate(ids, return_dict_in_generate=as_dict, **GREEDY)
                if not as_dict:  # with its output alive
                    assert wrapped.stats()["tiers"]["hot"]["pages"] == 0
                del out
        finally:
            gc.enable()


# -- prefill and kept caches ---------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 30, 59, 60, 500])
def test_on_prefill_counts_up_to_the_end(chunk: int) -> None:
    calls: list[tuple[int, int]] = []
    with tierkv.wrap(model(), **SETTINGS | {"prefill_chunk": chunk}) as wrapped:
        wrapped.generate(
            tokens(2, 61), on_prefill=lambda done, total: calls.append((done, total)), **GREEDY
        )
        stats = wrapped.stats()["prefill"]
    done = [at for at, _ in calls]
    assert done == sorted(set(done))
    assert done[-1] == 60
    assert {total for _, total in calls} == {60}
    assert len(calls) == -(-60 // chunk)
    assert stats["tokens"] == 60
    assert stats["seconds"] > 0


@pytest.mark.parametrize(
    ("name", "kind"), each(["llama", "gemma2", "qwen3_next"], ["minimum", "hot"])
)
def test_two_calls_on_a_kept_cache_equal_a_long_one(kind: str, name: str, tmp_path: Path) -> None:
    ids = tokens(2, 70)
    settings = budgets(kind, model(name), tmp_path, page_tokens=16, rows=4)
    with tierkv.wrap(model(name), prefill_chunk=50, **settings) as wrapped:
        want = wrapped.generate(ids, max_new_tokens=30, do_sample=False)
        cache = wrapped.cache()
        half = wrapped.generate(ids, past_key_values=cache, max_new_tokens=13, do_sample=False)
        assert cache.get_seq_length() == 70 + 12
        before = wrapped.stats()["prefill"]["tokens"]
        got = wrapped.generate(half, past_key_values=cache, max_new_tokens=17, do_sample=False)
        assert wrapped.stats()["prefill"]["tokens"] == before  # nothing was run twice
    same(got, want)


def test_a_conversation_on_a_kept_cache() -> None:
    ids, more = tokens(1, 70), tokens(1, 55, seed=2)
    with tierkv.wrap(model(), **SETTINGS) as wrapped:
        cache = wrapped.cache()
        answer = wrapped.generate(ids, past_key_values=cache, **GREEDY)
        longer = torch.cat([answer, more], dim=1)
        got = wrapped.generate(longer, past_key_values=cache, **GREEDY)
    same(got, model().generate(longer, **GREEDY))


def test_prefill_then_generate() -> None:
    ids = tokens(1, 120)
    want = model().generate(ids, **GREEDY)
    with tierkv.wrap(model(), **SETTINGS) as wrapped:
        cache = wrapped.cache()
        first = tierkv.prefill(wrapped, ids[:, :80], cache)
        assert first.logits.shape[:2] == (1, 1)
        assert tierkv.prefill(wrapped, ids[:, :80], cache) is None  # holds everything already
        output = tierkv.prefill(wrapped, ids, cache)
        assert int(output.logits[0, -1].argmax()) == want[0, 120]
        cache.crop(-1)
        same(wrapped.generate(ids, past_key_values=cache, **GREEDY), want)
        with pytest.raises(TierKVError, match=r"holds 1\d\d tokens, the prompt only 80"):
            tierkv.prefill(wrapped, ids[:, :80], cache)


def test_failed_call_gives_its_pages_back() -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("mine")

    with tierkv.wrap(model(), **SETTINGS) as wrapped:
        with pytest.raises(RuntimeError, match="mine"):
            wrapped.generate(tokens(1, 60), logits_processor=[fail], **GREEDY)
        with pytest.raises(RuntimeError, match="mine"):
            wrapped.generate(tokens(1, 60), on_prefill=fail, **GREEDY)
        assert wrapped.manager is not None
        assert wrapped.manager.hot.pages == 0
        assert "prepare_inputs_for_generation" not in vars(model())
        same(wrapped.generate(tokens(1, 60), **GREEDY), wrapped.generate(tokens(1, 60), **GREEDY))


# -- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["argument", "config"])
@pytest.mark.parametrize(
    "options",
    [{"prefill_chunk_size": 64}, {"cache_implementation": "static"}, {"use_cache": False}],
    ids=lambda options: next(iter(options)),
)
def test_contradicting_settings(options: dict[str, Any], by: str) -> None:
    arguments = options if by == "argument" else {"generation_config": GenerationConfig(**options)}
    name = next(iter(options))
    with (
        tierkv.wrap(model(), **SETTINGS) as wrapped,
        pytest.raises(ConfigError, match=name),
    ):
        wrapped.generate(tokens(1, 40), **arguments)


@pytest.mark.parametrize("name", ["inputs_embeds", "position_ids"])
def test_other_inputs(name: str) -> None:
    with (
        tierkv.wrap(model(), **SETTINGS) as wrapped,
        pytest.raises(ConfigError, match=name),
    ):
        wrapped.generate(tokens(1, 40), **{name: torch.zeros(1, 40)})


def test_no_input() -> None:
    with (
        tierkv.wrap(model(), **SETTINGS) as wrapped,
        pytest.raises(ConfigError, match="needs input_ids"),
    ):
        wrapped.generate(max_new_tokens=1)


def test_caches_of_others() -> None:
    other = tiny_model("llama-mha")
    with tierkv.wrap(model(), **SETTINGS) as wrapped, tierkv.wrap(other, **SETTINGS) as second:
        strange = [DynamicCache(config=model().config), second.cache()]
        for cache, name in zip(strange, ("DynamicCache", "TierCache of another"), strict=True):
            with pytest.raises(ConfigError, match=f"got a {name}"):
                wrapped.generate(tokens(1, 40), past_key_values=cache)
            with pytest.raises(ConfigError, match=f"got a {name}"):
                wrapped.prefill(tokens(1, 40), cache)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_asked_for_replays_that_cannot_be_are_a_warning(name: str) -> None:
    """Bug: ``cuda_graph=True`` was silent where no step could be captured at all, as on a CPU."""
    for asked in (True, None):
        with (
            warnings.catch_warnings(record=True) as told,
            tierkv.wrap(model(name), **SETTINGS, cuda_graph=asked) as wrapped,
        ):
            warnings.simplefilter("always")
            wrapped.generate(tokens(1, 40), **GREEDY)
        found = [str(one.message) for one in told if "without a CUDA graph" in str(one.message)]
        assert len(found) == bool(asked)
        assert not asked or ("sliding windows" if name == "gemma3" else "no NVIDIA GPU") in found[0]
