"""Contexts on CUDA: forks, saved pages and known beginnings give the tokens of recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.hf.test_generation import tokens
from tests.models import tiny_model
from tests.paging_helpers import budgets

NEW = {"max_new_tokens": 20, "do_sample": False}
KINDS = pytest.mark.parametrize("kind", ["hot", "warm", "cold", "minimum"])


def wrap(hf_model: Any, kind: str, store: Path, **more: Any) -> Any:
    settings = budgets(kind, hf_model, store, page_tokens=16, rows=3) | more
    disk = {"store": str(store), "disk_budget": "256MiB", "disk_floor": 0}
    return tierkv.wrap(hf_model, prefill_chunk=50, **settings | disk)


def plain(ids: torch.Tensor) -> list[int]:
    output = tiny_model("llama").cuda().generate(ids, **NEW)
    return output[0, ids.shape[1] :].tolist()


@KINDS
def test_saved_and_forked(kind: str, tmp_path: Path) -> None:
    hf_model = tiny_model("llama").cuda()
    ids, more = tokens(1, 150).cuda(), tokens(1, 30, seed=2).cuda()
    with wrap(hf_model, kind, tmp_path) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
    with wrap(hf_model, kind, tmp_path) as wrapped, wrapped.open("book") as context:
        assert context.tokens == 150
        with context.fork() as twin:
            twin.append(more)
            assert twin.generate(**NEW)[0].tolist() == plain(torch.cat([ids, more], 1))
        assert context.generate(**NEW)[0].tolist() == plain(ids)
        assert wrapped.stats()["prefill"]["tokens"] == 30


@KINDS
def test_known_beginnings(kind: str, tmp_path: Path) -> None:
    hf_model = tiny_model("llama").cuda()
    first = tokens(1, 150).cuda()
    second = torch.cat([first[:, :103], tokens(1, 40, seed=9).cuda()], 1)
    with wrap(hf_model, kind, tmp_path, prefix_cache=True) as wrapped:
        for ids in (first, second, first):
            assert wrapped.generate(ids, **NEW)[0, ids.shape[1] :].tolist() == plain(ids)
        assert wrapped.stats()["prefix"]["reused_tokens"] == 103 + 149
        prefix = wrapped.manager.prefix
        prefix.leave_hot(prefix.tree.pages)
        assert wrapped.generate(first, **NEW)[0, 150:].tolist() == plain(first)
