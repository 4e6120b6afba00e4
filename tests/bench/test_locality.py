"""Recorded choices of pages: kept in a file, and replayed at other sizes with the same locality."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from tierkv.bench.locality import Player, Recording, replay
from tierkv.selection import choose
from tierkv.selection.quality import reuse_misses

FILE = ROOT / "benchmarks" / "data" / "locality.npz"
STEPS, LAYERS, HEADS, PAGES, BUDGET, OLD = 12, 3, 2, 40, 5, 37


def recording() -> Recording:
    """Each head drops one of its pages and takes another, at every second step."""
    chance = np.random.default_rng(5)
    made = []
    for _ in range(2):
        masks = np.zeros((STEPS, LAYERS, HEADS, PAGES), dtype=bool)
        for layer in range(LAYERS):
            for head in range(HEADS):
                now = chance.permutation(PAGES)[:BUDGET].tolist()
                for step in range(STEPS):
                    if step % 2:
                        now = [*now[1:], chance.choice(sorted(set(range(PAGES)) - set(now)))]
                    masks[step, layer, head, now] = True
        made.append(masks)
    nearly = np.zeros_like(made[0])
    nearly[1:] = made[0][:-1] & ~made[0][1:]
    return Recording(made[0], made[1], nearly, OLD, "made up")


def masks(pages: np.ndarray, count: int) -> torch.Tensor:
    """Return ``[steps, kv_heads, count]`` of one layer's pages ``[steps, kv_heads, n]``."""
    found = torch.zeros(*pages.shape[:2], count, dtype=torch.bool)
    return found.scatter_(-1, torch.from_numpy(pages), True)


def test_a_file_holds_everything(tmp_path: Path) -> None:
    made = recording()
    made.save(tmp_path / "sub" / "made.npz")
    found = Recording.load(tmp_path / "sub" / "made.npz")
    np.testing.assert_array_equal(found.chosen, made.chosen)
    np.testing.assert_array_equal(found.guessed, made.guessed)
    np.testing.assert_array_equal(found.nearly, made.nearly)
    assert (found.source, found.budget_pages, found.prompt_pages) == ("made up", BUDGET, OLD)


def test_a_replay_has_the_locality_of_the_recording() -> None:
    made, times = recording(), 3
    found = replay(
        made, layers=5, kv_heads=4, budget_pages=times * BUDGET, first=2, stop=500, steps=STEPS
    )
    sources = [0, 0, 1, 2, 2]  # five layers spread over three; round(0.5) is 0, round(1.5) is 2
    for part, taken in zip(found[:2], (made.chosen, made.guessed), strict=True):
        assert part.shape == (STEPS, 5, 4, times * BUDGET)
        assert part.min() >= 2
        assert part.max() < 500
        for layer, source in enumerate(sources):
            selected = masks(part[:, layer], 500)
            assert (selected.sum(-1) == times * BUDGET).all(), "all different"
            heads = [(layer + head) % HEADS for head in range(4)]
            recorded = torch.from_numpy(taken[:, source][:, heads])
            for slots in (1, 2):
                want = reuse_misses(recorded, slots * BUDGET)
                got = reuse_misses(selected, slots * times * BUDGET)
                torch.testing.assert_close(got, times * want)
    for layer, source in enumerate(sources):
        for head in range(4):
            right = made.chosen & made.guessed
            want = right[:, source, (layer + head) % HEADS].sum(-1)
            pairs = zip(found.chosen[:, layer, head], found.guessed[:, layer, head], strict=True)
            assert [len(np.intersect1d(*pair)) for pair in pairs] == (times * want).tolist()
    heads_differ = found.chosen[0, 0, 0] != found.chosen[0, 0, 2]
    assert heads_differ.any(), "two heads with one source choose other pages"


def test_pages_sealed_in_the_recording_are_the_first_ones() -> None:
    """They were at random places, on disk half of the time; pages sealed while decoding never are.

    A tenth of what was read from disk was read for them.
    """
    made, times = recording(), 2
    found = replay(
        made, layers=LAYERS, kv_heads=HEADS, budget_pages=times * BUDGET, first=3, stop=99,
        steps=STEPS,
    )  # fmt: skip
    stop = 3 + (PAGES - OLD) * times
    assert made.chosen[..., OLD:].any()
    for layer in range(LAYERS):
        for head in range(HEADS):
            young = made.chosen[:, layer, (layer + head) % HEADS, OLD:].sum(-1)
            pages = found.chosen[:, layer, head]
            np.testing.assert_array_equal((pages < stop).sum(-1), times * young)


def test_longer_than_the_recording_it_turns_round() -> None:
    found = replay(
        recording(), layers=1, kv_heads=1, budget_pages=BUDGET, first=0, stop=PAGES, steps=30
    ).chosen[:, 0, 0]
    shared = [len(np.intersect1d(*pair)) for pair in pairwise(found)]
    assert min(shared) == BUDGET - 1
    np.testing.assert_array_equal(found[STEPS : 2 * STEPS - 2], found[STEPS - 2 : 0 : -1])
    np.testing.assert_array_equal(found[2 * STEPS - 2 :], found[: 30 - (2 * STEPS - 2)])


def test_a_player_decides_what_is_chosen() -> None:
    """Whatever the scores are, also those of pages at the ends."""
    made = replay(recording(), layers=2, kv_heads=2, budget_pages=BUDGET, first=3, stop=60, steps=4)
    mass, player = torch.zeros(2, 64), Player(made, torch.device("cpu"), nearly=True)

    class Random:
        def run(self) -> None:
            mass.copy_(torch.rand(2, 64))
            mass[:, 0] = mass[:, 63] = 1.0

    candidates = (torch.arange(64) >= 3) & (torch.arange(64) < 60)
    launches = [[player.overrule(Random(), mass, layer, guessed=part) for part in (False, True)]
                for layer in range(2)]  # fmt: skip
    for step in (0, 1, 2, 3, 0):
        player.advance()
        for layer in range(2):
            for overruled, part in zip(launches[layer], made[:2], strict=True):
                overruled.run()
                if part is made.chosen:
                    near = set(made.nearly[step, layer, 0].tolist()) - {2}
                    assert near == set((mass[0] == 1).nonzero()[:, 0].tolist()) - {0, 2, 63}
                    assert bool(near) == (step % 2 == 1)
                found = choose(mass[None], BUDGET, candidates=candidates[None, None])
                want = np.sort(part[step, layer], axis=-1)
                np.testing.assert_array_equal(found.pages[0].numpy(), want)


def test_the_recorded_file() -> None:
    """What `benchmarks/locality.py` printed when it wrote the file."""
    found = Recording.load(FILE)
    assert found.chosen.shape == found.guessed.shape == (256, 28, 3, 228)
    assert (found.chosen.sum(-1) == 32).all()
    assert (found.guessed.sum(-1) == 32).all()
    shared = (found.chosen[1:] & found.chosen[:-1]).sum() / found.chosen[1:].sum()
    assert shared == pytest.approx(0.8112, abs=1e-4)
    right = (found.chosen & found.guessed)[:, 1:].sum() / found.chosen[:, 1:].sum()
    assert right == pytest.approx(0.9049, abs=1e-4)
    first = (found.chosen.cumsum(0) == 1) & found.chosen
    first[0] = False
    assert (first & (found.nearly.cumsum(0) > 0)).sum() / first.sum() == pytest.approx(
        0.9013, abs=1e-4
    )
    assert not (found.nearly & found.chosen).any()
    assert found.prompt_pages == 218
    per_step = first[..., :218].sum((1, 2, 3)).reshape(4, 64).mean(1) / (28 * 3)
    np.testing.assert_allclose(per_step, [0.6923, 0.2805, 0.0945, 0.0545], atol=1e-4)
    assert FILE.stat().st_size < 700 << 10


def test_sizes_that_cannot_be() -> None:
    sizes = {"layers": 1, "kv_heads": 1, "first": 0, "steps": 1}
    with pytest.raises(ValueError, match="multiple of the 5 recorded, got 12"):
        replay(recording(), budget_pages=12, stop=500, **sizes)
    with pytest.raises(ValueError, match="40 recorded pages stand for 80; only 79"):
        replay(recording(), budget_pages=10, stop=79, **sizes)
