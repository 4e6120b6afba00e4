"""Warm homes that guests take over while a context decodes: the kernels emulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from tests.attention import test_selective_gpu
from tests.attention.test_faults import captured, given, stepped
from tests.attention.test_selective_gpu import emulated, logits
from tests.hf.test_exact_tokens import model
from tierkv.errors import ColdWriteError
from tierkv.hf.graph import DecodeGraph
from tierkv.paging import faults
from tierkv.paging.directory import NOWHERE

__all__ = ["captured", "emulated"]
STEPS = 24


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch, captured: None) -> None:
    """Room is made at every step, so that guests chosen lately have to leave."""
    monkeypatch.setattr(faults, "ROOM_SHARE", 1)
    monkeypatch.setattr(faults, "LEAVING_SHARE", 1)
    monkeypatch.setattr(test_selective_gpu, "NEW", STEPS)


def prompt() -> torch.Tensor:
    return torch.randint(3, 199, (1, 302 + STEPS), generator=torch.Generator().manual_seed(0))


def settle(wrapped: Any) -> None:
    """Wait for what is being written."""
    wrapped.manager.transfer.spill(lambda: None).result()


def check(wrapped: Any, tier_cache: Any) -> None:
    """The device knows homes and guests, each frame has one use, and every page is somewhere."""
    manager, service = wrapped.manager, wrapped.manager.selective.faults
    lent, frames = service.homes.frames, manager.directory.warm
    blocks = tier_cache.sequences.blocks[0, : tier_cache.get_seq_length() // 16]
    held = frames[blocks][frames[blocks] != NOWHERE]
    assert len(set(held.tolist())) == len(held) and not set(held.tolist()) & set(lent.tolist())
    assert manager.warm.homes.used == manager.warm.in_homes(held).sum() + len(lent)
    for layer in range(1, manager.geometry.layers):
        lies = (frames[blocks, layer] != NOWHERE) | manager.directory.cold[blocks, layer]
        assert lies.all()
        told = manager.selective.addresses[layer - 1, : len(blocks)].numpy()
        home = manager.tiers.home_addresses(blocks, layer)
        keys = (layer - 1) * service._capacity + np.arange(len(blocks))
        guests = service.guests.find(keys)
        here = guests != NOWHERE
        home[here & (home == 0)] = manager.warm.addresses(guests[here & (home == 0)])
        assert not (told[told != 0] != home[told != 0]).any()
        assert (told[manager.warm.in_homes(frames[blocks, layer])] != 0).all()


@pytest.mark.parametrize("crop", [0, 40])
@pytest.mark.usefixtures("crowded")
def test_pages_not_chosen_make_room_for_those_that_are(crop: int, tmp_path: Path) -> None:
    """Homes held pages that nobody chose, and steps read others from disk again and again."""
    ids, wanted = prompt(), given(tmp_path, 4)
    want = logits("llama", ids, wanted, crop)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache, lent, got = wrapped.cache(), list[int](), list[torch.Tensor]()
        for turn in range(2 if crop else 1):
            wrapped.prefill(ids[:, :-STEPS], tier_cache)
            graph = DecodeGraph(model("llama"), tier_cache, 400)
            for stop in range(ids.shape[1] - STEPS + 1, ids.shape[1] + 1):
                got += stepped(wrapped, tier_cache, ids[:, :stop], graph)
                settle(wrapped)
                check(wrapped, tier_cache)
                lent.append(wrapped.stats()["selective"]["faults"]["homes_lent"])
            if crop and not turn:
                tier_cache.crop(-crop)
                check(wrapped, tier_cache)
        report, warm = wrapped.stats()["selective"]["faults"], wrapped.manager.warm
        assert lent[STEPS - 1] >= 4 and sorted(lent) == lent
        assert report["guest_frames"] == len(warm.guests) + lent[-1]
        tier_cache.close()
        assert not warm.homes.used and wrapped.manager.outflow.warm_free(1) > 0
        assert len(wrapped.manager.selective.faults.guests.frames) == len(warm.guests)
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("crowded")
def test_a_disk_that_fails_lends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, wanted = prompt(), given(tmp_path, 4)
    want = logits("llama", ids, wanted)
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-STEPS], tier_cache)
        settle(wrapped)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        asked = []

        def fails(*arguments: Any) -> None:
            asked.append(arguments)
            raise ColdWriteError("made up")

        got = []
        for stop in range(ids.shape[1] - STEPS + 1, ids.shape[1] + 1):
            with monkeypatch.context() as patch:
                if stop % 16:  # pages that are sealed have to go somewhere
                    patch.setattr(wrapped.manager.transfer, "put_cold", fails)
                got += stepped(wrapped, tier_cache, ids[:, :stop], graph)
                settle(wrapped)
        assert len(asked) == 1 and not len(wrapped.manager.selective.faults.homes.frames)
        check(wrapped, tier_cache)
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)
