"""Selective attention over pages that were there already chooses what it chooses without reuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.attention.test_selective import settings
from tests.hf.test_exact_tokens import model
from tests.hf.test_generation import tokens
from tierkv.attention import selective
from tierkv.errors import ConfigError, UnsupportedModelError

NEW = {"max_new_tokens": 20, "do_sample": False}
KINDS = ["hot", "warm", "cold"]


@contextmanager
def looked_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[list[int]]]]:
    """Collect the pages that every layer of every step reads."""
    seen: list[list[list[int]]] = []
    look_up = selective.look_up

    def recorded(*args: Any) -> torch.Tensor:
        pages = look_up(*args)
        seen.append(pages.tolist())
        return pages

    with monkeypatch.context() as patch:
        patch.setattr(selective, "look_up", recorded)
        yield seen


def selecting(kind: str, path: Path, **more: Any) -> Any:
    return tierkv.wrap(model("llama"), **settings(kind, "llama", path, **more))


@pytest.mark.parametrize(
    ("selector", "kind", "dense_layers"),
    [("cuboid", "hot", 0), ("cuboid", "warm", 1), ("keys2", "cold", 1), ("mean", "cold", 0)],
)
def test_known_beginnings_are_not_computed_again(
    selector: str, kind: str, dense_layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole pages, then token by token, from whichever tier; same pages chosen, same tokens."""
    how: dict[str, Any] = {"selector": selector, "dense_layers": dense_layers}
    ids = tokens(1, 300)
    other = torch.cat([ids[:, :203], tokens(1, 40, seed=9)], dim=1)
    answers = {}
    for reuse in (False, True):
        with (
            looked_up(monkeypatch) as seen,
            selecting(kind, tmp_path / str(reuse), prefix_cache=reuse, **how) as wrapped,
        ):
            said = [wrapped.generate(prompt, **NEW).tolist() for prompt in (ids, other)]
            if reuse:  # pages of dense layers, if any, go down
                wrapped.manager.prefix.leave_hot(wrapped.manager.prefix.tree.pages)
            said.append(wrapped.generate(ids, **NEW).tolist())
            answers[reuse] = said, seen
            stats = wrapped.stats()
    assert answers[True] == answers[False]
    assert stats["prefix"]["reused_tokens"] == 203 + 299
    assert stats["prefill"]["tokens"] == 299 + 242 - 203
    by_tier = stats["prefix"]["reused_pages"]
    assert by_tier["cold" if kind == "cold" else "warm"] > 0
    assert (by_tier["hot"] > 0) == (dense_layers > 0)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_pages_that_another_process_saved_count(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, store = tokens(1, 200), {"store": str(tmp_path), "disk_floor": "1MiB"}
    with looked_up(monkeypatch) as want, selecting(kind, tmp_path / "w", cpu_budget="1MiB") as one:
        said = one.generate(ids, **NEW).tolist()
    with selecting(kind, tmp_path, **store) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
    more = {"cpu_budget": "1MiB", "prefix_cache": True}
    with looked_up(monkeypatch) as got, selecting(kind, tmp_path, **store, **more) as wrapped:
        assert wrapped.generate(ids, **NEW).tolist() == said
        assert wrapped.stats()["prefix"]["reused_tokens"] == 12 * 16
    assert got == want


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_context_goes_on_as_if_never_closed(
    kind: str, prefix_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is prefilled or written again, and every step reads the same pages."""
    ids, store = tokens(1, 310), {"store": str(tmp_path), "disk_floor": "1MiB"}
    with (
        looked_up(monkeypatch) as want,
        selecting(kind, tmp_path, **store) as wrapped,
        wrapped.open("book") as context,
    ):
        context.append(ids)
        first = context.generate(**NEW)
        context.save()
        want.clear()
        said = context.generate(**NEW).tolist()
    more: dict[str, Any] = store | {"prefix_cache": prefix_cache}
    with (
        looked_up(monkeypatch) as got,
        selecting(kind, tmp_path, **more) as wrapped,
        wrapped.open("book") as context,
    ):
        assert context.restored_tokens == 329
        assert wrapped.stats()["moved_bytes"]["warm_to_cold"] == 0
        assert context.save() == 0
        assert context.generate(**NEW).tolist() == said
        assert wrapped.stats()["prefill"]["tokens"] == 0
        assert context.ids[0, 310:330].tolist() == first[0].tolist()
    assert got == want


def test_a_restored_context_may_be_cut_and_go_on(tmp_path: Path) -> None:
    ids, other = tokens(1, 310), tokens(1, 60, seed=5)
    with selecting("warm", tmp_path) as wrapped:
        want = wrapped.generate(torch.cat([ids[:, :150], other], dim=1), **NEW)[0, 210:].tolist()
    store = {"store": str(tmp_path), "disk_floor": "1MiB"}
    with selecting("cold", tmp_path, **store) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
    with selecting("cold", tmp_path, **store) as wrapped, wrapped.open("book") as context:
        assert context.edit(150, other) == 60
        assert context.generate(**NEW)[0].tolist() == want


def test_what_is_refused_leaves_the_context_that_is_there(tmp_path: Path) -> None:
    ids = tokens(1, 300)
    with selecting("warm", tmp_path, prefix_cache=True) as wrapped, wrapped.open() as context:
        want = wrapped.generate(ids, **NEW)[0, 300:].tolist()
        context.append(ids)
        rows = torch.stack([ids[0], torch.cat([torch.zeros_like(ids[0, :20]), ids[0, 20:]])])
        with pytest.raises(ConfigError, match=r"max_batch is 1, and .* got a batch of 2"):
            wrapped.generate(rows, attention_mask=(rows != 0).long(), **NEW)
        with pytest.raises(UnsupportedModelError, match="cannot hide padding"):
            wrapped.generate(rows[1:], attention_mask=(rows[1:] != 0).long(), **NEW)
        with pytest.raises(ConfigError, match="max_context is 1024 tokens"):
            wrapped.prefill(ids.repeat(1, 10), wrapped.cache())
        assert context.generate(**NEW)[0].tolist() == want
        assert wrapped.generate(ids, **NEW)[0, 300:].tolist() == want
