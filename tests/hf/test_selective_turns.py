"""Contexts of selective attention take turns: each goes on as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.attention.test_selective import settings
from tests.hf.test_exact_tokens import model
from tests.hf.test_generation import tokens
from tierkv.errors import ColdReadError

FEW = {"max_new_tokens": 9, "do_sample": False}


def selecting(kind: str, path: Path, **more: Any) -> Any:
    return tierkv.wrap(model("llama"), **settings(kind, "llama", path, **more))


def alone(ids: torch.Tensor, new: int) -> list[int]:
    """What a context of its own says."""
    with selecting("hot", Path()) as wrapped:
        said = wrapped.generate(ids, max_new_tokens=new, do_sample=False)
    return said[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["hot", "cold"])
def test_two_contexts_go_on_side_by_side(kind: str, tmp_path: Path) -> None:
    one, two = tokens(1, 300), tokens(1, 250, seed=7)
    edited = torch.cat([one[:, :100], one[:, 150:200]], dim=1)
    want = alone(one, 27) + alone(edited, 1), alone(two, 27)
    with (
        selecting(kind, tmp_path) as wrapped,
        wrapped.open() as first,
        wrapped.open() as second,
    ):
        first.append(one)
        second.append(two)
        said: dict[Any, list[int]] = {first: [], second: []}
        for _ in range(3):
            for context in (first, second):
                said[context] += context.generate(**FEW)[0].tolist()
        assert wrapped.manager.selective.turns == 6
        second.close()
        assert first.edit(100, one[:, 150:200]) == 50
        said[first].append(int(first.generate(max_new_tokens=1, do_sample=False)[0, 0]))
        assert wrapped.manager.selective.turns == 7
    assert (said[first], said[second]) == want


@pytest.mark.parametrize("kind", ["warm", "cold"])
@pytest.mark.parametrize("length", [300, 304])
def test_forks_share_pages_and_take_turns(kind: str, length: int, tmp_path: Path) -> None:
    """Of a tail, and of none; whichever is closed first, the other one is whole."""
    ids, more = tokens(1, length), tokens(1, 30, seed=3)
    want, wanted = alone(ids, 9), alone(torch.cat([ids, more], dim=1), 18)
    with selecting(kind, tmp_path) as wrapped:
        context = wrapped.open()
        context.append(ids)
        blocks = wrapped.manager.directory.live
        fork = context.fork()
        twin = fork.fork()
        assert wrapped.manager.directory.live <= blocks + 2, "only tails are copied"
        assert wrapped.manager.selective.turns == 0, "a fork costs nothing before it is used"
        fork.append(more)
        assert context.generate(**FEW)[0].tolist() == want
        context.close()
        assert fork.generate(**FEW)[0].tolist() == wanted[:9]
        assert twin.generate(**FEW)[0].tolist() == want
        twin.close()
        assert fork.generate(**FEW)[0].tolist() == wanted[9:]
        fork.close()
        assert wrapped.manager.directory.live == 0
        assert wrapped.manager.hot.pages == wrapped.manager.warm.pages == 0


def test_a_context_that_waits_is_saved_and_closed(tmp_path: Path) -> None:
    ids, other = tokens(1, 300), tokens(1, 100, seed=2)
    store = {"store": str(tmp_path), "disk_floor": "1MiB"}
    want, wanted = alone(ids, 9), alone(other, 9)
    with selecting("cold", tmp_path, **store) as wrapped:
        context, second, third = wrapped.open("book"), wrapped.open(), wrapped.open()
        context.append(ids)
        second.append(other)
        third.append(other)
        assert context.save() > 0
        second.close()
        assert third.generate(**FEW)[0].tolist() == wanted
    with selecting("cold", tmp_path, **store) as wrapped, wrapped.open("book") as context:
        assert context.generate(**FEW)[0].tolist() == want


def test_a_turn_that_fails_may_be_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, other = tokens(1, 300), tokens(1, 200, seed=2)
    want, wanted = alone(ids, 9), alone(other, 9)
    with selecting("cold", tmp_path) as wrapped, wrapped.open() as one, wrapped.open() as two:
        one.append(ids)
        two.append(other)
        with monkeypatch.context() as patch:

            def fails(*_: Any) -> None:
                raise ColdReadError("no disk")

            patch.setattr(wrapped.manager.cold, "read_into", fails)
            with pytest.raises(ColdReadError, match="no disk"):
                one.generate(**FEW)
        assert two.generate(**FEW)[0].tolist() == wanted
        assert one.generate(**FEW)[0].tolist() == want


def test_a_turn_whose_tails_find_no_memory_may_be_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the frames that its tails were on the way to were never free again."""
    ids, other = tokens(1, 300), tokens(1, 200, seed=2)
    want, wanted = alone(ids, 9), alone(other, 9)
    with selecting("cold", tmp_path) as wrapped, wrapped.open() as one, wrapped.open() as two:
        one.append(ids)
        two.append(other)
        with monkeypatch.context() as patch:

            def fails(*_: Any) -> None:
                raise torch.OutOfMemoryError("no memory")

            patch.setattr(torch.Tensor, "index_copy_", fails)
            with pytest.raises(torch.OutOfMemoryError):
                one.generate(**FEW)
        assert two.generate(**FEW)[0].tolist() == wanted
        assert one.generate(**FEW)[0].tolist() == want
