"""Frames in buffers: numbered through, joined where they are neighbours, in few objects."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.cold_helpers import FRAME, open_store, page
from tierkv.tiers.direct_io import aligned_buffer
from tierkv.tiers.frame_views import FrameViews

SIZE = 4


@given(counts=st.lists(st.integers(1, 5), max_size=6), data=st.data())
def test_pieces_are_the_frames_in_order(counts: list[int], data: st.DataObject) -> None:
    total = sum(counts)
    content = bytes(range(total * SIZE))
    buffers, at = [], 0
    for count in counts:
        buffers.append(memoryview(bytearray(content[at : at + count * SIZE])))
        at += count * SIZE
    views = FrameViews(buffers, SIZE, total)
    assert len(views) == total
    assert [bytes(view) for view in views.each()] == [
        content[i * SIZE : (i + 1) * SIZE] for i in range(total)
    ]
    if not total:
        return
    frames = data.draw(st.lists(st.integers(0, total - 1), min_size=1, unique=True))
    pieces = views.pieces(np.array(frames))
    assert b"".join(pieces) == b"".join(content[i * SIZE : (i + 1) * SIZE] for i in frames)
    starts = [np.frombuffer(views.view(i), np.uint8).ctypes.data for i in frames]
    assert views.addresses(np.array(frames)).tolist() == starts
    if frames == list(range(total)):
        assert len(pieces) == len(counts)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_read_makes_no_object_per_page(
    in_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: several objects lived for each page while it was read. Python then looked through all
    the objects of the process, 0.3 s (2-core CPU) in which no thread went on, in every resume."""
    keys = [b"%05d" % i for i in range(2000)]
    alive, preadv = [], os.preadv

    def counted(*args: Any) -> int:
        alive.append(len(gc.get_objects()))
        return preadv(*args)

    with open_store(tmp_path, disk_budget=64 << 20) as store:
        memory = aligned_buffer(len(keys) * FRAME)
        store.put(keys, [page(0)] * len(keys))
        asked = keys if in_order else [*keys[1000:], *keys[:1000]]
        store.read_into(keys[:1], [memory[:FRAME]])
        monkeypatch.setattr(os, "preadv", counted)
        before = len(gc.get_objects())
        gc.disable()
        try:
            store.read_into(asked, [memory])
        finally:
            gc.enable()
        assert max(alive) - before < 300
    assert memory[-FRAME:] == page(0)
