"""Random programs over three tiers, homes lent and given back, against the same over two tiers."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from tests.attention.test_faults import captured, given
from tests.attention.test_lent_homes import crowded, settle
from tests.attention.test_selective import settings
from tests.attention.test_selective_gpu import emulated
from tests.hf.test_exact_tokens import model
from tierkv.hf.attach import cache_argument
from tierkv.hf.graph import DecodeGraph
from tierkv.paging.directory import NOWHERE

__all__ = ["captured", "crowded", "emulated"]


class Pair:
    """The same context in three tiers, decoded by captured steps, and in two, eagerly."""

    def __init__(self, programs: Programs, caches: tuple[Any, Any], ids: torch.Tensor):
        self.programs, self.caches, self.ids = programs, caches, ids
        self.graph: DecodeGraph | None = None

    def read(self, ids: torch.Tensor) -> None:
        self.ids = ids
        for wrapped, cache in zip(self.programs.models, self.caches, strict=True):
            wrapped.prefill(ids, cache)

    def step(self, captured: bool) -> None:
        three, two = (wrapped.hf_model for wrapped in self.programs.models)
        token = self.programs.tokens(1, len(self.ids))
        want = two(token, **{cache_argument(two): self.caches[1]}).logits
        if captured:
            self.graph = self.graph or DecodeGraph(three, self.caches[0], 700)
            assert not self.graph.obstacle()
            got = self.graph.step(token)
        else:
            got = three(token, **{cache_argument(three): self.caches[0]}).logits
        torch.testing.assert_close(got, want, rtol=3e-4, atol=3e-4)
        self.ids = torch.cat([self.ids, token], 1)

    def choose(self, rows: list[int]) -> None:
        for cache in self.caches:
            if cache.sequences.batch == len(rows):
                cache.reorder_cache(torch.tensor(rows))
            else:
                cache.batch_repeat_interleave(len(rows))
                self.graph = None
        self.ids = self.ids[rows]


class Programs:
    """What may be done to contexts, drawn by a seed."""

    def __init__(self, models: tuple[Any, Any], rows: int, seed: int):
        self.models, self.rows, self.pairs = models, rows, list[Pair]()
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def tokens(self, count: int, rows: int = 1) -> torch.Tensor:
        return torch.randint(3, 199, (rows, count), generator=self.generator)

    def new(self) -> None:
        caches = self.models[0].cache(), self.models[1].cache()
        self.pairs.append(Pair(self, caches, self.tokens(0)))
        self.pairs[-1].read(self.tokens(self.random.randint(200, 300)))

    def go_on(self) -> None:
        kinds = ["step", "eager", "read", "crop", "fork", "close", "rows"]
        kind = self.random.choices(kinds, [8, 1, 2, 3, 1, 1, 3])[0]
        pair = self.random.choice(self.pairs)
        if kind in ("step", "eager"):
            for _ in range(self.random.randint(2, 9) if kind == "step" else 2):
                pair.step(kind == "step")
                if self.random.random() < 0.7:
                    settle(self.models[0])
        elif kind == "read":
            more = self.tokens(self.random.randint(20, 60), len(pair.ids))
            pair.read(torch.cat([pair.ids, more], 1))
        elif kind == "crop":
            count = min(self.random.choice([1, 5, 20, 40, 90]), pair.ids.shape[1] - 120)
            for cache in pair.caches if count > 0 else ():
                cache.crop(-count)
            pair.ids = pair.ids[:, : pair.ids.shape[1] - max(count, 0)]
        elif kind == "fork" and len(self.pairs) < 3:
            caches = pair.caches[0].fork(), pair.caches[1].fork()
            self.pairs.append(Pair(self, caches, pair.ids))
        elif kind == "close":
            for cache in pair.caches:
                cache.close()
            self.pairs.remove(pair)
            if not self.pairs:
                self.new()
        elif kind == "rows":
            held = len(pair.ids)
            pair.choose([self.random.randrange(held) for _ in range(self.rows)])

    def check(self) -> int:
        """Check that every frame has one use; return how many homes are lent."""
        settle(self.models[0])
        manager = self.models[0].manager
        tables = [pair.caches[0].sequences for pair in self.pairs]
        blocks = np.unique(
            np.concatenate([t.blocks[:, : t.lengths[0] // 16].ravel() for t in tables])
        )
        frames, service = manager.directory.warm[blocks], manager.selective.faults
        held = frames[frames != NOWHERE]
        lent = service.homes.frames if service else held[:0]
        assert len(np.unique(np.concatenate([held, lent]))) == len(held) + len(lent)
        assert manager.warm.homes.used == manager.warm.in_homes(held).sum() + len(lent)
        assert sum(manager.outflow._homes_used) == manager.warm.homes.used
        if service:
            assert len(service.guests.frames) == len(manager.warm.guests) + len(lent)
        for block, layer in np.argwhere(manager.directory.cold[blocks]).tolist():
            assert manager.tiers.key(int(blocks[block]), layer) in manager.cold
        return len(lent)


@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (2, 5)])
@pytest.mark.usefixtures("crowded")
def test_programs_over_three_tiers_are_those_over_two(rows: int, seed: int, tmp_path: Path) -> None:
    """Crops, forks, turns, rows that are chosen anew, captured steps and eager ones."""
    more = {"max_batch": rows, "prefill_chunk": 64}
    wanted = given(tmp_path, 4) | more
    two = settings("warm", "llama", tmp_path, token_budget=48) | more | {"cpu_budget": 64 << 20}
    for budgets in (wanted, two):
        budgets["gpu_budget"] += (rows - 1) * (4 << 20)
    first, second = model("llama"), copy.deepcopy(model("llama"))
    with (
        torch.no_grad(),
        tierkv.wrap(first, **wanted) as three,
        tierkv.wrap(second, **two) as other,
    ):
        programs, lent = Programs((three, other), rows, seed), [0]
        programs.new()
        for _ in range(10):
            programs.go_on()
            lent.append(programs.check())
        for pair in programs.pairs:
            pair.caches[0].close()
        assert max(lent) > 0 and not three.manager.warm.homes.used
