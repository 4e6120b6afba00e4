"""Block bookkeeping: references, reuse of ids, growth; and free frames of a tier."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierkv.page import Geometry
from tierkv.paging.directory import NOWHERE, PageDirectory
from tierkv.tiers.arena import Arena
from tierkv.tiers.frames import FramePool, runs


def test_new_blocks_are_nowhere_and_held_once() -> None:
    directory = PageDirectory(3)
    blocks = directory.new_blocks(5)
    assert blocks.tolist() == [0, 1, 2, 3, 4]
    assert directory.live == 5
    assert (directory.refs[blocks] == 1).all()
    for places in (directory.hot, directory.warm):
        assert places[blocks].shape == (5, 3)
        assert (places[blocks] == NOWHERE).all()
    assert not directory.cold[blocks].any()


def test_no_blocks() -> None:
    directory = PageDirectory(1)
    assert directory.new_blocks(0).tolist() == []
    assert directory.live == 0
    assert directory.release(np.zeros((2, 0), dtype=np.int64)).tolist() == []


def test_repeated_blocks_count_every_occurrence() -> None:
    """Beams repeat a block within one table; `refs[blocks] += 1` would count it once."""
    directory = PageDirectory(1)
    (block,) = directory.new_blocks(1)
    table = np.full((3, 1), block)
    directory.retain(table)
    assert directory.refs[block] == 4
    assert directory.release(table).tolist() == []
    assert directory.release(np.array([block])).tolist() == [block]
    assert directory.live == 0


def test_a_dead_block_is_reported_once() -> None:
    directory = PageDirectory(1)
    blocks = directory.new_blocks(2)
    directory.retain(blocks)
    assert directory.release(np.concatenate([blocks, blocks])).tolist() == blocks.tolist()


def test_releasing_too_often_is_caught() -> None:
    directory = PageDirectory(1)
    blocks = directory.new_blocks(1)
    directory.release(blocks)
    with pytest.raises(AssertionError, match="released more often than held"):
        directory.release(blocks)


def test_forgotten_ids_are_reused_lowest_first_and_clean() -> None:
    directory = PageDirectory(2)
    blocks = directory.new_blocks(4)
    directory.hot[blocks] = 7
    directory.warm[blocks] = 8
    directory.cold[blocks] = True
    dead = directory.release(blocks[[3, 1]])
    directory.forget(dead)
    again = directory.new_blocks(2)
    assert again.tolist() == [1, 3]
    assert (directory.hot[again] == NOWHERE).all()
    assert (directory.warm[again] == NOWHERE).all()
    assert not directory.cold[again].any()
    assert (directory.hot[blocks[[0, 2]]] == 7).all()


def test_growth_keeps_what_is_there() -> None:
    directory = PageDirectory(2)
    first = directory.new_blocks(64)
    directory.hot[first] = np.arange(128).reshape(64, 2)
    directory.cold[first[3]] = True
    more = directory.new_blocks(1000)
    assert len(set(first.tolist()) | set(more.tolist())) == 1064
    assert (directory.hot[first] == np.arange(128).reshape(64, 2)).all()
    assert directory.cold.sum() == 2
    assert (directory.hot[more] == NOWHERE).all()
    directory.warm[more] = 5  # hot and warm are separate memory
    assert (directory.hot[more] == NOWHERE).all()


@given(
    st.lists(
        st.tuples(st.sampled_from(["new", "retain", "release"]), st.integers(0, 9)), max_size=60
    )
)
def test_references_against_a_counter(calls: list[tuple[str, int]]) -> None:
    directory, held = PageDirectory(1), Counter[int]()
    for what, number in calls:
        live = sorted(held)
        if what == "new":
            blocks = directory.new_blocks(number).tolist()
            assert not set(blocks) & set(held)
            held.update(blocks)
        elif live:
            picked = [live[(number * i) % len(live)] for i in range(1, 4)]
            if what == "retain":
                held.update(picked)
                directory.retain(np.array(picked))
                continue
            picked = [block for block, count in Counter(picked).items() if held[block] >= count]
            before = set(held)
            held = +(held - Counter(picked))
            dead = directory.release(np.array(picked, dtype=np.int64))
            assert set(dead.tolist()) == before - set(held)
            directory.forget(dead)
        assert directory.live == len(held)
        assert all(directory.refs[block] == count for block, count in held.items())


@given(st.integers(0, 5), st.integers(0, 20), st.lists(st.integers(0, 6), max_size=30))
def test_frames_are_handed_out_once(start: int, capacity: int, counts: list[int]) -> None:
    pool, held = FramePool(start, start + capacity), set[int]()
    for turn, count in enumerate(counts):
        if turn % 3 == 2:
            back = sorted(held)[::-1][:count]
            pool.give(np.array(back, dtype=np.int64))
            held -= set(back)
        elif count <= pool.free:
            frames = pool.take(count).tolist()
            assert frames == sorted(frames)
            assert not held & set(frames)
            held |= set(frames)
        else:
            with pytest.raises(AssertionError, match="free frames"):
                pool.take(count)
        assert held <= set(range(start, start + capacity))
        assert pool.used == len(held) == pool.capacity - pool.free


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_runs_cover_everything_and_count_up(pairs: list[tuple[int, int]]) -> None:
    columns = [np.array([pair[i] for pair in pairs], dtype=np.int64) for i in range(2)]
    ranges = runs(*columns)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(len(pairs)))
    for start, stop in ranges:
        for column in columns:
            assert (np.diff(column[start:stop]) == 1).all()
    for _, stop in ranges[:-1]:
        assert any(column[stop] - column[stop - 1] != 1 for column in columns)


@pytest.mark.parametrize("frames", [[1], [2, 3, 4], [4, 3, 2], [0, 5], [1, 5, 3], [2, 0, 4, 5]])
def test_pages_of_an_arena_come_in_the_order_asked_for(frames: list[int]) -> None:
    """Frames 1, 5, 3 were taken for the run 1, 2, 3: first and last alone do not make a run."""
    geometry = Geometry(1, 2, 4, 8, torch.float32, 16)
    (arena,) = Arena.allocate(geometry, 6, torch.device("cpu"))
    arena.k.copy_(torch.randn_like(arena.k))
    arena.v.copy_(torch.randn_like(arena.v))
    k, v = arena.pages(np.array(frames))
    assert torch.equal(k, arena.k_frames[:, frames])
    assert torch.equal(v, arena.v_frames[:, frames])
