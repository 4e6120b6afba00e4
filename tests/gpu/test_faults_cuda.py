"""Captured steps on a GPU that wait for pages on disk."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.attention.test_selective import settings
from tests.gpu.test_selective_cuda import deep, greedy
from tierkv.errors import ColdReadError, PageFaultError
from tierkv.hf.graph import DecodeGraph
from tierkv.page import Geometry
from tierkv.paging.faults import FaultService

CONTEXT, NEW = 900, 100
GEOMETRY = Geometry(6, 2, 16, 16, torch.float32, 16)


def tiers(path: Path, frames: int) -> dict[str, Any]:
    """Three tiers with room for `frames` of 280 pages in pinned memory; two if that is 0."""
    given = settings("cold" if frames else "hot", "llama", path, token_budget=128, dense_layers=1)
    given |= {"max_context": 2048, "gpu_budget": "64MiB"}
    return given | ({"cpu_budget": frames * GEOMETRY.frame_bytes} if frames else {})


def prompt() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(3, 199, (1, CONTEXT), device="cuda")


@pytest.mark.filterwarnings("error:decoding without a CUDA graph")
def test_three_tiers_give_the_tokens_of_two_over_100_steps(tmp_path: Path) -> None:
    """Captured and eager, with frames for half of the pages and for so few that layers take rounds.

    Six seals of every layer lie between the first step and the last.
    """
    hf_model, ids = deep(), prompt()
    want = greedy(hf_model, ids, tiers(tmp_path, 0) | {"cuda_graph": True}, NEW)
    assert len(set(want)) > 10
    for frames in (140, 60):
        for cuda_graph in (True, False):
            given = tiers(tmp_path / f"{frames}-{cuda_graph}", frames) | {"cuda_graph": cuda_graph}
            assert greedy(hf_model, ids, given, NEW) == want, (frames, cuda_graph)


@pytest.mark.parametrize("compiled", [False, True])
def test_pages_are_awaited_once_and_read_ahead(compiled: bool, tmp_path: Path) -> None:
    hf_model, ids = deep(), prompt()
    with torch.no_grad(), tierkv.wrap(hf_model, **tiers(tmp_path, 200)) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-40], tier_cache)
        graph = DecodeGraph(hf_model, tier_cache, 2048, compiled=compiled)
        for at in range(CONTEXT - 40, CONTEXT):
            graph.step(ids[:, at : at + 1])
        faults = wrapped.stats()["selective"]["faults"]
        assert faults["pages_awaited"] + faults["pages_ahead"] >= faults["guests"] > 0
        assert faults["pages_ahead_failed"] == 0 and faults["seconds_awaited"] > 0


@pytest.mark.parametrize("kind", ["unreadable", "dead"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_without_an_answer_fails_and_can_be_repeated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead thread ends the step after its patience; a page that cannot be read, at once."""
    monkeypatch.setattr(FaultService, "patience", 1.0)
    hf_model, ids, steps = deep(), prompt(), []
    for breaks in (False, True):
        given = tiers(tmp_path / str(breaks), 140)
        with torch.no_grad(), tierkv.wrap(hf_model, **given) as wrapped:
            tier_cache = wrapped.cache()
            wrapped.prefill(ids[:, :-8], tier_cache)
            graph = DecodeGraph(hf_model, tier_cache, 2048)
            got = []
            for at in range(CONTEXT - 8, CONTEXT):
                token = ids[:, at : at + 1]
                if breaks and at in (CONTEXT - 8, CONTEXT - 4):
                    fail(kind, wrapped, graph, token, monkeypatch)
                got.append(graph.step(token)[0, -1].clone())
            steps.append(torch.stack(got))
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-5, atol=1e-5)


def fail(
    kind: str, wrapped: Any, graph: DecodeGraph, token: torch.Tensor, monkeypatch: Any
) -> None:
    """Break reading from disk until a step fails for it."""
    state, length = wrapped.manager.selective, graph.tier_cache.get_seq_length()
    if state.faults is not None:  # or nothing would be missing any more
        keys = state.faults.guests.keys
        state.faults.truncate(0)
        state.addresses.view(-1)[torch.from_numpy(keys).cuda()] = 0
        state.forget_frames()
    with monkeypatch.context() as broken:
        if kind == "dead":
            broken.setattr(FaultService, "_answer", lambda *_: sys.exit())
            error, text = PageFaultError, "had no answer for 1 s"
        else:
            broken.setattr(wrapped.manager.cold, "read_into", unreadable)
            error, text = ColdReadError, "made up"
        start = time.perf_counter()
        with pytest.raises(error, match=text):
            graph.step(token)
        assert time.perf_counter() - start < 20
        assert graph.tier_cache.get_seq_length() == length


def unreadable(keys: Any, buffers: Any) -> None:
    raise ColdReadError("made up")
