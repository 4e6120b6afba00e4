"""Where layers select and there is a disk, warm homes are for the newest pages of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.attention.test_selective import settings
from tests.hf.test_exact_tokens import model
from tests.hf.test_generation import tokens
from tierkv.errors import DiskBudgetError

ROWS, PAGES, CHUNK = 2, 40, 50


def given(path: Path, **more: Any) -> dict[str, Any]:
    """Three tiers with warm frames for a third of two sequences of `PAGES` pages."""
    wanted = settings("cold", "llama", path, dense_layers=1, prefill_chunk=CHUNK)
    wanted["cpu_budget"] *= 10
    return wanted | {"max_batch": ROWS, "gpu_budget": wanted["gpu_budget"] + (4 << 20)} | more


def in_homes(wrapped: Any, cache: Any, layer: int) -> Any:
    """Say which pages have warm homes, ``[rows, pages]``."""
    frames = wrapped.manager.directory.warm[cache.sequences.blocks[:, :PAGES], layer]
    return (frames >= 0) & (frames < wrapped.manager.warm.inbound_start)


@pytest.mark.parametrize("rows", [1, ROWS])
def test_the_newest_pages_of_a_prompt_have_the_warm_homes(rows: int, tmp_path: Path) -> None:
    """The oldest took them, and what a model chooses right after the prompt was on disk."""
    with tierkv.wrap(model("llama"), **given(tmp_path)) as wrapped:
        cache, outflow = wrapped.cache(), wrapped.manager.outflow
        room = [outflow.warm_free(layer) for layer in range(wrapped.manager.geometry.layers)]
        wrapped.prefill(tokens(rows, 16 * PAGES), cache)
        assert outflow.held == 0
        for layer in range(1, wrapped.manager.geometry.layers):
            homes = in_homes(wrapped, cache, layer)
            assert 0 < homes.sum() == room[layer] < homes.size
            # a chunk's first page may go down, and take its home, before the others
            assert homes.any(axis=0).nonzero()[0][0] >= PAGES - 1 - room[layer]
            assert homes[-1, PAGES - room[layer] // rows + 1 :].all()


def test_a_prompt_that_fits_stays_warm(tmp_path: Path) -> None:
    with tierkv.wrap(model("llama"), **given(tmp_path, cpu_budget=1 << 20)) as wrapped:
        cache = wrapped.cache()
        wrapped.prefill(tokens(1, 16 * PAGES), cache)
        assert in_homes(wrapped, cache, 1).all()


def test_homes_held_for_a_prompt_that_failed_are_free(tmp_path: Path) -> None:
    wanted = given(tmp_path, disk_budget="64KiB")
    with tierkv.wrap(model("llama"), **wanted) as wrapped:
        cache = wrapped.cache()
        room = wrapped.manager.outflow.warm_free(1)
        with pytest.raises(DiskBudgetError):
            wrapped.prefill(tokens(1, 16 * PAGES), cache)
        cache.reset()
        assert wrapped.manager.outflow.warm_free(1) == room > 0
        assert cache.sequences.expected == 0
        wrapped.generate(tokens(1, 40), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("rows", [1, ROWS])
def test_tokens_are_those_of_two_tiers(rows: int, tmp_path: Path) -> None:
    ids, got = tokens(rows, 16 * PAGES), []
    two = given(tmp_path, cpu_budget="64MiB")
    for name in ("store", "disk_budget", "disk_floor"):
        del two[name]
    for wanted in (given(tmp_path), two):
        with tierkv.wrap(model("llama"), **wanted) as wrapped:
            out = wrapped.generate(ids, max_new_tokens=20, do_sample=False)
            got.append(out)
    assert torch.equal(*got)
