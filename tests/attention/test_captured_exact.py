"""Captured exact steps that stream pages, emulated on the CPU, against eager ones."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tierkv
from tests.hf.test_exact_tokens import model
from tests.kernels import emulator
from tests.paging.test_encoded_hot import below, roomy
from tests.paging_helpers import budgets
from tierkv import api
from tierkv.attention import captured, captured_exact
from tierkv.errors import KernelsUnavailableError, TierKVError, WarmBudgetError
from tierkv.hf.attach import cache_argument
from tierkv.hf.attention import padding_of
from tierkv.hf.geometry import model_geometry
from tierkv.hf.graph import DecodeGraph
from tierkv.kernels import append, codec, decode, gather, merge
from tierkv.paging.adopt import promote
from tierkv.paging.descent import move_down
from tierkv.paging.sequences import Sequences
from tierkv.tiers.transfer import Transfer

NEW = 40


class Rerun:
    """Stands in for a CUDA graph: runs the work again into the same memory."""

    made = 0

    def __init__(self, work: Any, result: torch.Tensor):
        self.work, self.result = work, result
        Rerun.made += 1

    def replay(self) -> None:
        self.result.copy_(self.work())


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    for module in (append, codec, decode, gather, merge):
        monkeypatch.setattr(module, "kernel", emulator.kernel)
    monkeypatch.setattr(decode, "shared_memory", emulator.shared_memory)

    def rerun(self: Any, work: Any, warmups: int) -> tuple[Rerun, torch.Tensor]:
        graph = Rerun(work, work().clone())
        return graph, graph.result

    monkeypatch.setattr(Transfer, "capture", rerun)
    Rerun.made = 0


@torch.no_grad()
def logits_of(
    hf_model: Any, ids: torch.Tensor, given: dict[str, Any], new: int, captured: bool
) -> Any:
    """Return logits of the last `new` tokens, five of them in one chunk, and how it went."""
    argument, steps = cache_argument(hf_model), []
    with tierkv.wrap(hf_model, **given) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-new], tier_cache)
        graph = DecodeGraph(hf_model, tier_cache, 2 * ids.shape[1])
        at = ids.shape[1] - new
        while at < ids.shape[1]:
            count = 5 if at == ids.shape[1] - new // 2 else 1  # a chunk between replays
            part = ids[:, at : at + count]
            if captured and count == 1:
                assert not graph.obstacle()
                steps.append(graph.step(part)[0].clone())
            else:
                steps.append(hf_model(part, **{argument: tier_cache}).logits[0])
            at += count
        stats = wrapped.stats()
    return torch.cat(steps), stats, graph.replays


def padded_graphs(monkeypatch: pytest.MonkeyPatch) -> list[DecodeGraph]:
    """Have `generate` replay steps of padded rows without a GPU; the graphs it makes come here."""
    graphs: list[DecodeGraph] = []

    def made(hf_model: Any, tier_cache: Any, config: Any, tokens: int, seen: Any) -> DecodeGraph:
        hidden = padding_of(seen.bool())[1]
        graphs.append(DecodeGraph(hf_model, tier_cache, 400, padding=hidden, proves=True))
        return graphs[-1]

    monkeypatch.setattr(api, "decode_graph", made)
    return graphs


@pytest.mark.parametrize(
    ("name", "codecs", "more", "later"),
    [
        ("llama", "raw", 0, 1), ("llama", "raw", 40, 128),
        ("qwen3", "int8", 40, 1), ("llama", "int4", 40, 128),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("emulated")
def test_streamed_steps_equal_eager_ones(
    name: str, codecs: str, more: int, later: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Blocks of one page and of several; pages sealed between replays; steps captured anew."""
    monkeypatch.setattr(captured_exact, "MAX_LATER_PAGES", later)
    torch.manual_seed(0)
    ids = torch.randint(3, 199, (1, 200 + 10 * more + NEW))
    given = budgets("warm", model(name), tmp_path, page_tokens=16, rows=1) | {"codec": codecs}
    if more:
        geometry = model_geometry(model(name).config, model(name).dtype, 16)
        assert geometry is not None
        given["gpu_budget"] += more * geometry.page_bytes
    want, eager, _ = logits_of(model(name), ids, given, NEW, captured=False)
    got, stats, replays = logits_of(model(name), ids, given, NEW, captured=True)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    assert replays == NEW - 5
    assert stats["hits"] == eager["hits"]
    assert stats["hits"]["warm"] > 0


@pytest.mark.parametrize("codec", ["int4-importance", "int8"])
@pytest.mark.usefixtures("emulated")
def test_steps_over_encoded_hot_pages_equal_those_over_warm_ones(
    codec: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Whatever frame a page got, also those sealed since the step was captured: bit for bit where
    they are decoded among the streamed ones, else as near as sums in another order are."""
    monkeypatch.setattr(captured_exact, "MAX_LATER_PAGES", 1)
    ids, new = torch.randint(3, 199, (1, 170), generator=torch.Generator().manual_seed(0)), 22
    given = budgets("warm", model("qwen3"), tmp_path, page_tokens=16, rows=1)
    given |= {"codec": f"hot={codec}", "gpu_budget": roomy(model("qwen3"), 3)}
    got, stats, replays = logits_of(model("qwen3"), ids, given, new, captured=True)
    eager, counted, _ = logits_of(model("qwen3"), ids, given, new, captured=False)
    torch.testing.assert_close(got, eager, rtol=2e-4, atol=2e-4)
    assert stats["hits"] == counted["hits"]
    below(monkeypatch)
    want, other, _ = logits_of(model("qwen3"), ids, given, new, captured=True)
    if codec == "int4-importance":
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    assert replays == new - 5
    assert stats["hits"]["hot"] > other["hits"]["hot"] and stats["hits"]["warm"] > 0
    assert sum(stats["hits"].values()) == sum(other["hits"].values())
    moved = [found["moved_bytes"]["warm_to_hot"] for found in (stats, other)]
    assert moved[0] < moved[1]


@pytest.mark.parametrize(("tokens", "padding", "residual"), [(25, 22, 0), (150, 72, 17)])
@pytest.mark.usefixtures("emulated")
def test_steps_of_a_padded_batch_over_encoded_hot_pages(
    tokens: int, padding: int, residual: int, monkeypatch: Any
) -> None:
    """Padding ends in the middle of an encoded page, and in the tail of a row while it is short.

    With a residual window the first pages are raw like the last ones, and no step was replayed.
    """
    ids = torch.randint(3, 199, (2, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    how: dict[str, Any] = {"max_new_tokens": 18, "attention_mask": mask, "do_sample": False}
    given = {"page_tokens": 16, "codec": "hot=int8", "gpu_budget": roomy(model("llama"), 40)}
    given["residual_tokens"] = residual
    with tierkv.wrap(model("llama"), cuda_graph=False, **given) as wrapped:
        want = wrapped.generate(ids, **how)
    graphs = padded_graphs(monkeypatch)
    with tierkv.wrap(model("llama"), **given) as wrapped:
        got = wrapped.generate(ids, **how)
        assert wrapped.stats()["moved_bytes"]["warm_to_hot"] == 0
    assert got.tolist() == want.tolist()
    assert graphs[0].replays >= 17


@pytest.mark.parametrize(
    ("codec", "pages", "reason"),
    [("int4-importance", 40, "no kernel attends to int4-importance"), ("int8", 3, "gpu_budget")],
)
def test_what_keeps_a_batch_from_replays_names_what_helps(
    codec: str, pages: int, reason: str
) -> None:
    """Where no kernel attends to the encoded pages of a batch, the reason was gpu_budget."""
    given = {"page_tokens": 16, "codec": f"hot={codec}", "cpu_budget": "64MiB"}
    given["gpu_budget"] = roomy(model("llama"), pages)
    with torch.no_grad(), tierkv.wrap(model("llama"), **given) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(torch.randint(3, 199, (2, 90)), tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        assert reason in graph.obstacle()


@pytest.mark.usefixtures("emulated")
def test_first_step_is_proved(tmp_path: Path, monkeypatch: Any) -> None:
    """A replay that leaves out what the model needs is found by its logits, and no token is wrong.

    A model that takes positions from the length of its cache would go on from position 0.
    """
    ids = torch.randint(3, 199, (1, 100), generator=torch.Generator().manual_seed(1))
    given = budgets("warm", model("llama"), tmp_path, page_tokens=16, rows=1)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    want = model("llama").generate(ids, output_hidden_states=True, **how)
    made = Transfer.capture

    def wrong(self: Any, work: Any, warmups: int) -> Any:
        return made(self, lambda: -work(), warmups)

    for capture, replays in ((made, 5), (wrong, 1)):  # of 6 tokens
        monkeypatch.setattr(Transfer, "capture", capture)
        with tierkv.wrap(model("llama"), **given) as wrapped:
            tier_cache = wrapped.cache()
            graph = DecodeGraph(model("llama"), tier_cache, 400, proves=True)
            monkeypatch.setattr(api, "decode_graph", lambda *args, graph=graph: graph)
            argument = {cache_argument(model("llama")): tier_cache}
            warns = pytest.warns(UserWarning, match="logits differ from the model's own by 2")
            with warns if capture is wrong else nullcontext():
                got = wrapped.generate(ids, **argument, **how)
            assert got.sequences.tolist() == want.sequences.tolist()
            assert graph.replays == replays
            assert bool(graph.obstacle()) == (capture is wrong)


@pytest.mark.usefixtures("emulated")
def test_what_a_replay_cannot_return_is_not_replayed(tmp_path: Path, monkeypatch: Any) -> None:
    """Replays know logits only; whoever asks for hidden states gets an eager step."""
    ids = torch.randint(3, 199, (1, 100), generator=torch.Generator().manual_seed(1))
    with tierkv.wrap(model("llama"), page_tokens=16) as wrapped:
        tier_cache = wrapped.cache()
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        monkeypatch.setattr(api, "decode_graph", lambda *args: graph)
        argument = {cache_argument(model("llama")): tier_cache}
        got = wrapped.generate(
            ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True,
            output_hidden_states=True, **argument,
        )  # fmt: skip
    assert len(got.hidden_states) == 3
    assert graph.replays == 0


@pytest.mark.usefixtures("emulated")
def test_inference_mode_may_come_and_go(tmp_path: Path, monkeypatch: Any) -> None:
    """Memory made in inference mode could not be written outside of it."""
    ids = torch.randint(3, 199, (1, 100), generator=torch.Generator().manual_seed(1))
    given = budgets("warm", model("llama"), tmp_path, page_tokens=16, rows=1)
    want = model("llama").generate(ids, max_new_tokens=40, do_sample=False)
    with tierkv.wrap(model("llama"), **given) as wrapped:
        tier_cache = wrapped.cache()
        argument = {cache_argument(model("llama")): tier_cache}
        with torch.inference_mode():
            graph = DecodeGraph(model("llama"), tier_cache, 400, proves=True)
            monkeypatch.setattr(api, "decode_graph", lambda *args: graph)
            first = wrapped.generate(ids, max_new_tokens=20, do_sample=False, **argument)
        got = wrapped.generate(first.clone(), max_new_tokens=20, do_sample=False, **argument)
        assert graph.replays == 39
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"num_return_sequences": 2}])
@pytest.mark.usefixtures("emulated")
def test_steps_of_a_padded_batch(how: dict[str, Any], monkeypatch: Any) -> None:
    """Rows of different length, beams that swap places, samples that share a prompt's pages."""
    ids = torch.randint(3, 199, (2, 90), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    given: dict[str, Any] = {"max_new_tokens": 20, "attention_mask": mask, "pad_token_id": 0, **how}
    given["do_sample"] = "num_return_sequences" in how
    torch.manual_seed(0)
    want = model("llama").generate(ids, **given)
    graphs = padded_graphs(monkeypatch)
    with tierkv.wrap(model("llama"), page_tokens=16) as wrapped:
        torch.manual_seed(0)
        got = wrapped.generate(ids, **given)
    assert got.tolist() == want.tolist()
    assert graphs[0].replays >= 19


@pytest.mark.usefixtures("emulated")
def test_a_prompt_of_one_token(tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing is prefilled then, and the first replay found no tail to write to: a RuntimeError."""
    ids = torch.randint(3, 199, (1, 1), generator=torch.Generator().manual_seed(1))
    want = model("llama").generate(ids, max_new_tokens=20, do_sample=False)
    monkeypatch.setattr(api, "decode_graph", lambda *args: DecodeGraph(*args[:2], 400, proves=True))
    with tierkv.wrap(model("llama"), page_tokens=16) as wrapped:
        got = wrapped.generate(ids, max_new_tokens=20, do_sample=False)
    assert got.tolist() == want.tolist()


@pytest.mark.usefixtures("emulated")
def test_a_dropped_cache_is_freed_at_once(monkeypatch: Any) -> None:
    """A cache and its captured step named each other, so its pages stayed until Python's next
    collection of cycles, and the next prompt found the budgets taken.
    """
    ids = torch.randint(3, 199, (1, 40), generator=torch.Generator().manual_seed(1))

    def made(hf_model: Any, tier_cache: Any, *args: Any) -> DecodeGraph:
        tier_cache.graph = DecodeGraph(hf_model, tier_cache, 400)
        return tier_cache.graph

    monkeypatch.setattr(api, "decode_graph", made)
    with tierkv.wrap(model("llama"), page_tokens=16) as wrapped:
        gc.collect()
        gc.disable()
        try:
            wrapped.generate(ids, max_new_tokens=3, do_sample=False)
            wrapped.manager.admit(Sequences(3), 1, 1)
            assert not wrapped.stats()["tiers"]["hot"]["pages"]
        finally:
            gc.enable()


def streaming(tmp_path: Path, new: int) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
    """Return tokens, budgets by which pages are streamed, and the logits of the `new` last ones."""
    ids = torch.randint(3, 199, (1, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model("llama")(ids).logits[0, -new:]
    return ids, budgets("warm", model("llama"), tmp_path, page_tokens=16, rows=2), want


@pytest.mark.usefixtures("emulated")
def test_an_interrupted_step_may_be_repeated(tmp_path: Path, monkeypatch: Any) -> None:
    """Ctrl-C after layer 0 had its new page left the others without theirs, for good: what the
    device knows was told by layer 0's plan alone.
    """
    new = 8  # the last of them is the first after a page is sealed
    ids, given, want = streaming(tmp_path, new)
    with torch.no_grad(), tierkv.wrap(model("llama"), **given) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-new], tier_cache)
        graph, got = DecodeGraph(model("llama"), tier_cache, 400), []
        set_pages = graph.lookups.exact._set_pages
        for at in range(ids.shape[1] - new, ids.shape[1]):
            assert not graph.obstacle()
            if at == 144:
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(graph.lookups.exact, "_set_pages", interrupt_at(1, set_pages))
                    graph.step(ids[:, at : at + 1])
            got.append(graph.step(ids[:, at : at + 1])[0, -1].clone())
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


def interrupt_at(stop: int, set_pages: Any) -> Any:
    def stopped(layer: int, plan: Any) -> None:
        if layer == stop:
            raise KeyboardInterrupt
        set_pages(layer, plan)

    return stopped


@pytest.mark.usefixtures("emulated")
def test_pages_that_changed_homes_are_streamed_from_the_new_ones(tmp_path: Path) -> None:
    """Pages that went up and down again had the same blocks, and the captured copies went on to
    read their former homes, which others had taken.
    """
    new = 4
    ids, given, want = streaming(tmp_path, new)
    with torch.no_grad(), tierkv.wrap(model("llama"), **given) as wrapped:
        manager, other, tier_cache = wrapped.manager, wrapped.cache(), wrapped.cache()
        wrapped.prefill(ids[:, :64], other)  # takes the hot frames there are
        wrapped.prefill(ids[:, :-new], tier_cache)
        graph, got = DecodeGraph(model("llama"), tier_cache, 400), []
        for at in range(ids.shape[1] - new, ids.shape[1]):
            if at == ids.shape[1] - 2:
                other.close()
                first = tier_cache.sequences.blocks[0, :1]
                homes = manager.directory.warm[first[0]].tolist()
                promote(manager, first)
                assert (manager.directory.hot[first] >= 0).all()
                for layer, home in enumerate(homes):
                    move_down(manager, layer, first)
                    assert manager.directory.warm[first[0], layer] != home
                    manager.warm.payload(home)[:] = b"?" * manager.warm.frame_bytes
            assert not graph.obstacle()
            got.append(graph.step(ids[:, at : at + 1])[0, -1].clone())
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("emulated")
def test_a_step_whose_page_cannot_go_down_may_be_repeated(tmp_path: Path, monkeypatch: Any) -> None:
    """All layers counted the token before their tails were sealed: if that failed, a page of the
    others was nowhere, and nothing could be rolled back.
    """
    new = 8  # the second of them fills a page
    ids, given, want = streaming(tmp_path, new)
    with torch.no_grad(), tierkv.wrap(model("llama"), **given) as wrapped:
        tier_cache, outflow = wrapped.cache(), wrapped.manager.outflow
        wrapped.prefill(ids[:, :-new], tier_cache)
        graph, got = DecodeGraph(model("llama"), tier_cache, 400), []
        send_down = outflow.send_down

        def short(layer: int, *pages: Any) -> None:
            if layer == 1:
                raise WarmBudgetError("made up")
            send_down(layer, *pages)

        for at in range(ids.shape[1] - new, ids.shape[1]):
            assert not graph.obstacle()
            if at == 143:
                with monkeypatch.context() as patch, pytest.raises(WarmBudgetError, match="made"):
                    patch.setattr(outflow, "send_down", short)
                    graph.step(ids[:, at : at + 1])
                assert tier_cache.sequences.lengths == [at] * 3
                assert not graph.obstacle()
            got.append(graph.step(ids[:, at : at + 1])[0, -1].clone())
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("emulated")
def test_nothing_is_replayed_after_a_forward_that_stopped_midway(monkeypatch: Any) -> None:
    """A replay took the first layer's length for that of all, and read what was not there."""
    ids = torch.randint(3, 199, (1, 40), generator=torch.Generator().manual_seed(1))
    hf_model = model("llama")

    def stop(*args: Any) -> None:
        raise RuntimeError("stop")

    with torch.no_grad(), tierkv.wrap(hf_model, page_tokens=16) as wrapped:
        tier_cache, argument = wrapped.cache(), cache_argument(hf_model)
        wrapped.prefill(ids[:, :-2], tier_cache)
        graph = DecodeGraph(hf_model, tier_cache, 400)
        monkeypatch.setattr(api, "decode_graph", lambda *args: graph)
        hook = hf_model.model.layers[1].mlp.register_forward_pre_hook(stop)
        with pytest.raises(RuntimeError, match="stop"):
            hf_model(ids[:, -2:-1], **{argument: tier_cache})
        hook.remove()
        with pytest.raises(TierKVError, match="hold 38 to 39 tokens"):
            wrapped.generate(ids, max_new_tokens=2, do_sample=False, **{argument: tier_cache})
        tier_cache.rollback()
        got = wrapped.generate(ids, max_new_tokens=2, do_sample=False, **{argument: tier_cache})
        assert graph.replays == 1
    assert got.tolist() == hf_model.generate(ids, max_new_tokens=2, do_sample=False).tolist()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("reason", ["unexpected keyword argument", "no compiler"])
def test_what_cannot_be_captured_is_decoded_without_a_graph(reason: str, monkeypatch: Any) -> None:
    """A model that takes no positions, or a kernel that cannot be compiled, ended `generate`, where
    others are warnings; these were not given after a reason nobody had to be told.
    """
    ids = torch.randint(3, 199, (1, 40), generator=torch.Generator().manual_seed(1))
    hf_model, reasons = model("llama"), ["made up", ""]
    want = hf_model.generate(ids, max_new_tokens=4, do_sample=False)

    def made(hf_model: Any, tier_cache: Any, *args: Any) -> DecodeGraph:
        graph = DecodeGraph(hf_model, tier_cache, 400)
        forward, obstacle = graph._forward, graph.obstacle

        def strict(input_ids: Any, use_cache: Any, return_dict: Any, past_key_values: Any) -> Any:
            return forward(input_ids)

        def said() -> str:
            return reasons.pop(0) if reasons else obstacle()

        graph.obstacle = said  # type: ignore[method-assign]
        if reason != "no compiler":
            graph._forward = strict
        return graph

    monkeypatch.setattr(api, "decode_graph", made)
    monkeypatch.setattr(captured, "append", Mock(side_effect=KernelsUnavailableError(reason)))
    with (
        tierkv.wrap(hf_model, page_tokens=16) as wrapped,
        pytest.warns(UserWarning, match=f"cannot be captured .*{reason}"),
    ):
        got = wrapped.generate(ids, max_new_tokens=4, do_sample=False)
    assert got.tolist() == want.tolist()
