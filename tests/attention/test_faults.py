"""Captured steps over pages on disk: the kernels emulated, the thread that answers a real one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from tests.attention.test_selective import settings
from tests.attention.test_selective_gpu import Rerun, emulated, logits
from tests.hf.test_exact_tokens import model
from tierkv.errors import ColdReadError, ColdWriteError, PageFaultError
from tierkv.hf.attach import cache_argument
from tierkv.hf.graph import DecodeGraph
from tierkv.paging.faults import FaultService
from tierkv.tiers.transfer import Transfer

__all__ = ["emulated"]
NEW = 3


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, emulated: None) -> None:
    def rerun(self: Any, work: Any, warmups: int) -> tuple[Rerun, torch.Tensor]:
        graph = Rerun(work, work().clone())
        return graph, graph.result

    monkeypatch.setattr(Transfer, "capture", rerun)


def prompt() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(3, 199, (1, 302 + NEW))


def given(tmp_path: Path, guests: int) -> dict[str, Any]:
    """Three tiers with `guests` times the least pinned memory; one guest frame in eight."""
    wanted = settings("cold", "llama", tmp_path, token_budget=16 * min(guests, 3))
    wanted["cpu_budget"] *= guests
    return wanted


def stepped(wrapped: Any, tier_cache: Any, ids: torch.Tensor, graph: DecodeGraph) -> list[Any]:
    got = []
    for at in range(tier_cache.get_seq_length(), ids.shape[1]):
        assert not graph.obstacle()
        got.append(graph.step(ids[:, at : at + 1])[0, -1].clone())
    return got


@pytest.mark.parametrize("guests", [1, 4])
@pytest.mark.usefixtures("captured")
def test_captured_steps_wait_for_pages_on_disk(guests: int, tmp_path: Path) -> None:
    """With one inbound frame a layer's pages come in several rounds; steps cross a seal."""
    ids, wanted = prompt(), given(tmp_path, guests)
    want = logits("llama", ids, wanted)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        got = stepped(wrapped, tier_cache, ids, graph)
        counts = wrapped.stats()["selective"]
        assert counts["awaited"] > 0 and counts["faults"]["pages_awaited"] > 0
        assert counts["faults"]["guests"] == (3 if guests == 4 else 0)
        assert not wrapped.manager.warm.inbound.used
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("captured")
def test_pages_are_counted_alike_whoever_waits_for_them(tmp_path: Path) -> None:
    """Where the host waited, it planned again, once more for every inbound frame: all pages were
    counted as many times, and those awaited as reused and fetched, too."""
    ids, counts = prompt(), []
    for way in ("eager", "captured"):
        with torch.no_grad(), tierkv.wrap(model("llama"), **given(tmp_path, 1)) as wrapped:
            tier_cache = wrapped.cache()
            wrapped.prefill(ids[:, :-NEW], tier_cache)
            if way == "eager":
                decode_eagerly(tier_cache, ids)
            else:
                stepped(wrapped, tier_cache, ids, DecodeGraph(model("llama"), tier_cache, 400))
            counts.append(wrapped.stats()["selective"])
    names = ("reused", "fetched", "awaited")
    eager, replayed = (np.array([count[name] for name in names]) for count in counts)
    assert eager.sum() == replayed.sum() > 0, "of a few, the warm-up has brought pages"
    assert eager[1] == replayed[1] and eager[2] > replayed[2] > 0


def decode_eagerly(tier_cache: Any, ids: torch.Tensor) -> None:
    """Decode what the cache does not hold yet through the model itself."""
    for at in range(tier_cache.get_seq_length(), ids.shape[1]):
        model("llama")(ids[:, at : at + 1], **{cache_argument(model("llama")): tier_cache})


@pytest.mark.parametrize("kind", ["unreadable", "dead"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("captured")
def test_a_step_without_an_answer_fails_and_can_be_repeated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that cannot be read, or a dead thread, ends the step with an error that says so.

    Nothing of it is appended, nothing hangs, and the same token can be decoded again.
    """
    ids, wanted = prompt(), given(tmp_path, 4)
    want = logits("llama", ids, wanted)
    monkeypatch.setattr(FaultService, "patience", 1.0)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        with monkeypatch.context() as broken:
            if kind == "dead":
                broken.setattr(FaultService, "_answer", lambda *_: sys.exit())
                error, text = PageFaultError, "1 s: the thread that reads them has died"
            else:
                broken.setattr(wrapped.manager.cold, "read_into", unreadable)
                error, text = ColdReadError, "made up"
            for _ in range(2):
                with pytest.raises(error, match=text):
                    graph.step(ids[:, -NEW : 1 - NEW])
                assert tier_cache.get_seq_length() == ids.shape[1] - NEW
                assert not wrapped.manager.warm.inbound.used
        got = stepped(wrapped, tier_cache, ids, graph)
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


def unreadable(keys: Any, buffers: Any) -> None:
    raise ColdReadError("made up")


@pytest.mark.usefixtures("captured")
def test_captured_contexts_take_turns(tmp_path: Path) -> None:
    """A context and its fork, each with a graph of its own; guests are of whose turn it is."""
    ids, wanted = prompt(), given(tmp_path, 4)
    want = logits("llama", ids, wanted)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        first = wrapped.cache()
        wrapped.prefill(ids[:, :-NEW], first)
        second = first.fork()
        graphs = [DecodeGraph(model("llama"), cache, 400) for cache in (first, second)]
        got: list[list[torch.Tensor]] = [[], []]
        for length in range(ids.shape[1] - NEW + 1, ids.shape[1] + 1):
            for cache, graph, steps in zip((first, second), graphs, got, strict=True):
                steps += stepped(wrapped, cache, ids[:, :length], graph)
        assert wrapped.manager.selective.turns == 2 * NEW - 1
    for steps in got:
        torch.testing.assert_close(torch.stack(steps), want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("captured")
def test_a_step_whose_pages_are_not_shown_may_be_repeated(tmp_path: Path, monkeypatch: Any) -> None:
    """Pages sent down from all layers at once stayed below, for nobody, when what followed failed;
    the token counted all the same.
    """
    ids, wanted = prompt(), given(tmp_path, 4)  # the second step fills a page
    want = logits("llama", ids, wanted)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        got = stepped(wrapped, tier_cache, ids[:, :303], graph)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="made up"):
            patch.setattr(wrapped.manager.selective, "sealed_across", fails)
            graph.step(ids[:, 303:304])
        assert tier_cache.sequences.lengths == [303] * 3
        got += stepped(wrapped, tier_cache, ids, graph)
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


def fails(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("made up")


@pytest.mark.usefixtures("captured")
def test_an_eager_step_may_have_been_in_inference_mode(tmp_path: Path) -> None:
    """What layers that select keep was made in inference mode then: no replay could write to it."""
    ids, wanted = prompt(), given(tmp_path, 4)
    want, argument = logits("llama", ids, wanted), cache_argument(model("llama"))
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        with torch.inference_mode():
            output = model("llama")(ids[:, -NEW : 1 - NEW], **{argument: tier_cache})
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        got = [output.logits[0, -1].clone(), *stepped(wrapped, tier_cache, ids, graph)]
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("broken", "keep", "error"), [("read_into", 288, ColdReadError), ("drop", 192, ColdWriteError)]
)
@pytest.mark.usefixtures("captured")
def test_a_crop_that_fails_leaves_nothing_of_what_it_cut(
    broken: str, keep: int, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that is recent again could not be read, or those cut off not dropped from disk: what
    was kept on the device stayed that of the longer context, and later steps read it."""
    ids, wanted = prompt(), given(tmp_path, 4)
    other = torch.cat([ids[:, :keep], ids.flip(1)[:, :140]], dim=1)
    if broken == "read_into":
        ids = ids[:, : keep + NEW]  # what is recent then is read at once
    want = logits("llama", ids, wanted)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache, cold = wrapped.cache(), wrapped.manager.cold
        wrapped.prefill(other[:, :-NEW], tier_cache)
        decode_eagerly(tier_cache, other)
        with monkeypatch.context() as patch:
            patch.setattr(cold, broken, raising(error("made up")))
            with pytest.raises(error, match="made up"):
                tier_cache.crop(keep - tier_cache.get_seq_length())
        assert tier_cache.get_seq_length() == keep
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        got = stepped(wrapped, tier_cache, ids, graph)
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


def raising(error: Exception) -> Any:
    def fails(*arguments: Any) -> None:
        raise error

    return fails
