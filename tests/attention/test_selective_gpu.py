"""The kernels' path of selective attention, emulated on the CPU, against plain torch."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.attention.test_selective import settings
from tests.hf.test_exact_tokens import model
from tests.kernels import emulator
from tierkv import api
from tierkv.attention import selective
from tierkv.hf import upcoming
from tierkv.hf.attach import cache_argument
from tierkv.hf.graph import DecodeGraph
from tierkv.kernels import append, decode, fault, gather, merge, score, select
from tierkv.tiers.transfer import Transfer

NEW = 3


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    for module in (append, decode, fault, gather, merge, score, select):
        monkeypatch.setattr(module, "kernel", emulator.kernel)
    for module in (decode, select):
        monkeypatch.setattr(module, "shared_memory", emulator.shared_memory)
    monkeypatch.setattr(select, "THREADS", 64)  # the emulator runs them one by one
    made = api.selective_settings

    def with_slots(*args: Any) -> Any:
        spec = made(*args)
        return dataclasses.replace(spec, slots=2 * max(spec.budget_pages, 1))

    monkeypatch.setattr(selective, "on_gpu", lambda query: True)
    monkeypatch.setattr(api, "selective_settings", with_slots)


def logits(name: str, ids: torch.Tensor, given: dict[str, Any], crop: int = 0) -> torch.Tensor:
    """Return logits of decoding the last `NEW` tokens one by one."""
    with torch.no_grad(), tierkv.wrap(model(name), **given) as wrapped:
        tier_cache = wrapped.cache()
        argument = {cache_argument(model(name)): tier_cache}
        steps = []
        for turn in range(2 if crop else 1):
            wrapped.prefill(ids[:, :-NEW], tier_cache)
            for at in range(ids.shape[1] - NEW, ids.shape[1]):
                steps.append(model(name)(ids[:, at : at + 1], **argument).logits[0, -1])
            if crop and not turn:
                tier_cache.crop(-crop)
        return torch.stack(steps)


@pytest.mark.parametrize(
    ("name", "kind", "selector", "crop", "miss"),
    [
        ("llama", "warm", "cuboid", 0, "wait"), ("gpt_oss", "cold", "mean", 0, "wait"),
        ("gemma2", "warm", "window", 0, "wait"), ("llama", "cold", "bound", 20, "wait"),
        ("llama", "cold", "cuboid", 0, "skip"), ("llama", "cold", "keys2", 20, "wait"),
        ("llama", "warm", "cuboid8", 0, "wait"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("emulated")
def test_kernels_read_what_torch_reads(
    name: str, kind: str, selector: str, crop: int, miss: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Steps cross a page seal; pages come from all tiers; a cut context goes on."""
    torch.manual_seed(0)
    ids = torch.randint(3, 199, (1, 302 + NEW))
    given = settings(kind, name, tmp_path, selector=selector, on_cold_miss=miss)
    got = logits(name, ids, given, crop)
    monkeypatch.undo()
    want = logits(name, ids, given, crop)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "way"), [("warm", "prefix"), ("cold", "prefix"), ("cold", "saved"), ("warm", "fork")]
)
@pytest.mark.usefixtures("emulated")
def test_kernels_read_pages_that_were_there_already(
    kind: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Summaries, addresses, sinks and recent pages of a context that begins with known pages."""
    ids = torch.randint(3, 199, (1, 300 + NEW), generator=torch.Generator().manual_seed(0))
    given, name = settings(kind, "llama", tmp_path), "book" if way == "saved" else None
    argument = cache_argument(model("llama"))
    with (
        torch.no_grad(),
        tierkv.wrap(model("llama"), prefix_cache=way == "prefix", **given) as wrapped,
    ):
        first = wrapped.open(name)
        first.append(ids[:, :-NEW])
        if way == "fork":
            context = first.fork()
            first.append(ids[:, :20])  # takes the turn
            assert context.cache.sequences.waiting is not None
        else:
            if way == "saved":
                first.save()
            first.close()
            context = wrapped.open(name)
        if way == "prefix":
            context.append(ids[:, :-NEW])
            assert wrapped.stats()["prefix"]["reused_tokens"] == 288
        assert context.restored_tokens == (300 if way == "saved" else 0)
        got = []
        for at in range(ids.shape[1] - NEW, ids.shape[1]):
            output = model("llama")(ids[:, at : at + 1], **{argument: context.cache})
            got.append(output.logits[0, -1])
    monkeypatch.undo()
    want = logits("llama", ids, given)
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


class Rerun:
    """Stands in for a CUDA graph: runs the work again into the same memory."""

    def __init__(self, work: Any, result: torch.Tensor):
        self.work, self.result = work, result

    def replay(self) -> None:
        self.result.copy_(self.work())


@pytest.mark.parametrize(("dense_layers", "look_ahead"), [(1, 0), (1, 1), (0, 2), (3, 1)])
@pytest.mark.usefixtures("emulated")
def test_captured_steps_equal_eager_ones(
    dense_layers: int, look_ahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealing between replays leaves what sealing within an append leaves.

    And foreseen lookups, right or wrong, change no result.
    """
    monkeypatch.setattr(upcoming, "FIRST_FORESEEN", 0)

    def rerun(self: Any, work: Any, warmups: int) -> tuple[Rerun, torch.Tensor]:
        graph = Rerun(work, work().clone())
        return graph, graph.result

    monkeypatch.setattr(Transfer, "capture", rerun)
    torch.manual_seed(0)
    ids = torch.randint(3, 199, (1, 302 + NEW))
    given = settings("hot", "llama", tmp_path, dense_layers=dense_layers)
    want = logits("llama", ids, given)
    with torch.no_grad(), tierkv.wrap(model("llama"), **given) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400, look_ahead=look_ahead)
        got = []
        for at in range(ids.shape[1] - NEW, ids.shape[1]):
            assert not graph.obstacle()
            got.append(graph.step(ids[:, at : at + 1])[0, -1].clone())
        assert tier_cache.get_seq_length() == ids.shape[1]
        wrapped.prefill(torch.cat([ids, ids], 1), tier_cache)  # eager appends go on from there
        assert graph.replays == NEW
        counts = wrapped.stats()["selective"]
        assert ("foreseen" in counts) == (dense_layers + look_ahead in (2, 4) and dense_layers < 3)
        if "foreseen" in counts:
            assert counts["foreseen"]["chosen"] >= counts["foreseen"]["used"] > 0
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("emulated")
def test_generate_replays_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that cannot be captured runs as always, with a warning, and gives the same tokens."""

    def rerun(self: Any, work: Any, warmups: int) -> tuple[Rerun, torch.Tensor]:
        graph = Rerun(work, work().clone())
        return graph, graph.result

    def fail(self: Any, work: Any, warmups: int) -> Any:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    torch.manual_seed(0)
    ids = torch.randint(3, 199, (1, 300))
    given = settings("hot", "llama", tmp_path)
    results = []
    for capture in (None, rerun, fail):
        with tierkv.wrap(model("llama"), **given) as wrapped:
            tier_cache = wrapped.cache()
            graph = None if capture is None else DecodeGraph(model("llama"), tier_cache, 400)
            if capture is not None:
                monkeypatch.setattr(Transfer, "capture", capture)
            monkeypatch.setattr(api, "decode_graph", lambda *args, graph=graph: graph)
            argument = {cache_argument(model("llama")): tier_cache}
            warns = pytest.warns(UserWarning, match="not permitted when stream is capturing")
            with warns if capture is fail else nullcontext():
                out = wrapped.generate(ids, max_new_tokens=5, do_sample=False, **argument)
            results.append(out.tolist())
            if capture is rerun:
                assert graph is not None and graph.replays == 5
            assert model("llama").forward.__func__ is type(model("llama")).forward
    assert results[0] == results[1] == results[2]
