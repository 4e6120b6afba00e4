"""Sequences that run together in kernels, emulated on the CPU: each attends as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.attention.test_faults import captured, raising
from tests.attention.test_selective import settings
from tests.attention.test_selective_gpu import NEW, emulated, logits
from tests.hf.test_exact_tokens import model
from tierkv.errors import ColdWriteError
from tierkv.hf import upcoming
from tierkv.hf.attach import cache_argument
from tierkv.hf.graph import DecodeGraph

__all__ = ["captured", "emulated"]
ROWS = 2


def prompts() -> torch.Tensor:
    return torch.randint(3, 199, (ROWS, 302 + NEW), generator=torch.Generator().manual_seed(0))


def given(kind: str, path: Path, **more: Any) -> dict[str, Any]:
    wanted = settings(kind, "llama", path, **more)
    if kind == "cold":
        wanted |= {"cpu_budget": 6 * wanted["cpu_budget"]}
    return wanted | {"gpu_budget": "64MiB", "max_batch": 3}


def alone(rows: torch.Tensor, wanted: dict[str, Any]) -> torch.Tensor:
    """Return what each row gives by itself, ``[steps, batch, vocab]``."""
    return torch.stack([logits("llama", row[None], wanted) for row in rows], dim=1)


def stepped(
    wrapped: Any, tier_cache: Any, ids: torch.Tensor, graph: DecodeGraph | None
) -> torch.Tensor:
    """Decode what the cache does not hold yet, one token of each row at a time."""
    argument, got = {cache_argument(model("llama")): tier_cache}, []
    for at in range(tier_cache.get_seq_length(), ids.shape[1]):
        token = ids[:, at : at + 1]
        if graph is None:
            got.append(model("llama")(token, **argument).logits[:, -1])
        else:
            assert not graph.obstacle()
            got.append(graph.step(token)[:, -1].clone())
    return torch.stack(got)


@pytest.mark.parametrize(
    ("kind", "way", "selector"),
    [("warm", "eager", "cuboid"), ("cold", "eager", "keys2"), ("hot", "captured", "cuboid8"),
     ("cold", "captured", "mean"), ("warm", "ahead", "cuboid")],
)  # fmt: skip
@pytest.mark.usefixtures("captured")
def test_rows_read_what_they_read_alone(
    kind: str, way: str, selector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps cross a page seal; pages on disk are waited for on the host or in the step."""
    monkeypatch.setattr(upcoming, "FIRST_FORESEEN", 0)
    ids, dense = prompts(), 0 if kind == "cold" else 1
    wanted = given(kind, tmp_path, selector=selector, dense_layers=dense)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache, graph = wrapped.cache(), None
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        if way != "eager":
            ahead = 1 if way == "ahead" else 0
            graph = DecodeGraph(model("llama"), tier_cache, 400, look_ahead=ahead)
        got = stepped(wrapped, tier_cache, ids, graph)
        counts = wrapped.stats()["selective"]
        assert (counts["awaited"] > 0) == (kind == "cold") == (wrapped.manager.selective.away > 0)
        assert not wrapped.manager.warm.inbound.used
        assert ("foreseen" in counts) == (way == "ahead")
        if kind == "cold" and graph is not None:
            assert counts["faults"]["pages_awaited"] > 0
            guests = wrapped.manager.selective.faults.guests.keys
            most = wrapped.manager.selective.spec.max_pages
            assert set((guests // most % 3).tolist()) == {0, 1}, "pages of both rows stay"
    monkeypatch.undo()
    torch.testing.assert_close(got, alone(ids, wanted), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["warm", "cold"])
@pytest.mark.usefixtures("captured")
def test_rows_that_are_copied_and_swapped(kind: str, tmp_path: Path) -> None:
    """Samples of one prompt part; beams take each other's place, between replays too."""
    ids = prompts()[:1].repeat(3, 1)
    ids[1:, -NEW:] = prompts()[1, -2 * NEW :].view(2, NEW)
    swapped = torch.tensor([1, 0, 0])
    wanted = given(kind, tmp_path, dense_layers=0)
    want = alone(ids, wanted)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:1, :-NEW], tier_cache)
        before = DecodeGraph(model("llama"), tier_cache, 400)
        stepped(wrapped, tier_cache, ids[:1, : 1 - NEW], before)  # brings pages for one row
        tier_cache.crop(-1)
        tier_cache.batch_repeat_interleave(3)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        got = stepped(wrapped, tier_cache, ids[:, : 2 - NEW], graph)
        tier_cache.reorder_cache(swapped)
        rest = stepped(wrapped, tier_cache, ids[swapped], graph)
        tier_cache.batch_select_indices(torch.tensor([1]))
        assert tier_cache.sequences.tails.tolist() == [[0]] * 3
    torch.testing.assert_close(got, want[:2], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(rest, want[2:, swapped], rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("captured")
def test_what_came_from_disk_for_a_row_is_not_the_other_rows(tmp_path: Path) -> None:
    """Rows of different prompts swap places, and pages go by place."""
    ids, swapped = prompts(), torch.tensor([1, 0])
    wanted = given("cold", tmp_path, dense_layers=0)
    want = alone(ids, wanted)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        got = stepped(wrapped, tier_cache, ids[:, : 1 - NEW], graph)
        assert len(wrapped.manager.selective.faults.guests.keys)
        tier_cache.reorder_cache(swapped)
        rest = stepped(wrapped, tier_cache, ids[swapped], graph)
    torch.testing.assert_close(got, want[:1], rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(rest, want[1:, swapped], rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("captured")
def test_rows_that_leave_pages_which_cannot_be_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that was left had its own pages, and what was kept on the device of another row."""
    ids, wanted = prompts(), given("cold", tmp_path, dense_layers=0)
    want = alone(ids[1:], wanted)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-NEW], tier_cache)
        with monkeypatch.context() as patch:
            patch.setattr(wrapped.manager.cold, "drop", raising(ColdWriteError("made up")))
            with pytest.raises(ColdWriteError, match="made up"):
                tier_cache.batch_select_indices(torch.tensor([1]))
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        got = stepped(wrapped, tier_cache, ids[1:], graph)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
