"""Warm homes that guests take over while a context decodes: the kernels emulated."""

from __future__ import annotations

import threading
from contextlib import suppress
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
from tierkv.errors import ColdWriteError, DiskBudgetError, WarmBudgetError
from tierkv.hf.attach import cache_argument
from tierkv.hf.graph import DecodeGraph
from tierkv.paging import adopt, faults, outflow
from tierkv.paging.directory import NOWHERE
from tierkv.paging.faults import FaultService
from tierkv.paging.lent import LentHomes
from tierkv.tiers.transfer import Transfer

__all__ = ["captured", "emulated"]
STEPS = 16


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
def test_homes_are_lent_up_to_the_end_of_the_context(tmp_path: Path) -> None:
    """With a tail behind `max_context` tokens tables were longer than what is known of choices."""
    ids, wanted = prompt(), given(tmp_path, 4) | {"max_context": 320}
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :310], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        for stop in range(311, ids.shape[1] + 1):
            stepped(wrapped, tier_cache, ids[:, :stop], graph)
            settle(wrapped)
            check(wrapped, tier_cache)


@pytest.mark.usefixtures("crowded")
def test_pages_that_are_sealed_come_before_guests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was lent used up the disk, and decoding ended early, beside homes held by guests.

    Room on disk for 22 more pages suffices if none is lent.
    """
    ids = torch.randint(3, 199, (1, 420), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), tierkv.wrap(model("llama"), **given(tmp_path, 4)) as wrapped:
        tier_cache, cold, lent = wrapped.cache(), wrapped.manager.cold, list[int]()
        wrapped.prefill(ids[:, :302], tier_cache)
        settle(wrapped)
        graph = DecodeGraph(model("llama"), tier_cache, 500)
        left = 22 + -(-outflow.CATALOGUE_MARGIN_BYTES // cold.frame_bytes) + len(cold)
        monkeypatch.setattr(cold, "room", lambda: left - len(cold))
        for stop in range(303, 421):
            stepped(wrapped, tier_cache, ids[:, :stop], graph)
            settle(wrapped)
            check(wrapped, tier_cache)
            lent.append(len(wrapped.manager.selective.faults.homes.frames))
        assert max(lent) > 0 and not lent[-1]


def bound(monkeypatch: pytest.MonkeyPatch, cold: Any, left: int) -> None:
    """Let a store take so many more pages."""
    stop, put = len(cold) + left, cold.put

    def checked(keys: Any, payloads: Any) -> None:
        if len(cold) + len(keys) > stop:
            raise DiskBudgetError("full")
        put(keys, payloads)

    monkeypatch.setattr(cold, "room", lambda: stop - len(cold))
    monkeypatch.setattr(cold, "put", checked)
    monkeypatch.setattr(outflow, "CATALOGUE_MARGIN_BYTES", 1)


@pytest.mark.parametrize("kind", ["free homes", "copies", "written"])
@pytest.mark.usefixtures("crowded")
def test_a_step_that_seals_finds_what_was_counted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had counted on free homes, or on room on disk, and lending took them in the same step; or
    what was written for lent homes had filled the disk before any was lent: decoding ended."""
    ids = torch.randint(3, 199, (1, 340), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), tierkv.wrap(model("llama"), **given(tmp_path, 4)) as wrapped:
        tier_cache, other, cold = wrapped.cache(), wrapped.cache(), wrapped.manager.cold
        if kind == "free homes":
            wrapped.prefill(ids[:, :100], other)
        wrapped.prefill(ids[:, :302], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 500)
        with monkeypatch.context() as patch:
            patch.setattr(LentHomes, "ask", lambda *arguments: None)
            stepped(wrapped, tier_cache, ids[:, :318], graph)
            if kind != "written":
                stepped(wrapped, tier_cache, ids[:, :319], graph)
            settle(wrapped)
        if kind == "written":
            stepped(wrapped, tier_cache, ids[:, :319], graph)
            settle(wrapped)
            assert not len(wrapped.manager.selective.faults.homes.frames)
        other.close()
        bound(monkeypatch, cold, 13 if kind == "copies" else 0)
        for stop in (320, 335):
            stepped(wrapped, tier_cache, ids[:, :stop], graph)
            settle(wrapped)
            assert not wrapped.manager.outflow._queued
            check(wrapped, tier_cache)


@pytest.mark.usefixtures("crowded")
def test_free_homes_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the page that was there before could come over a guest's."""
    ids, pending, late = prompt(), set[int](), list[int]()
    down, wait, read = Transfer.write_down, Transfer.wait_frames, Transfer.read_cold

    def write_down(self: Transfer, k: Any, v: Any, frames: Any) -> None:
        pending.update(frames.tolist())
        down(self, k, v, frames)

    def wait_frames(self: Transfer, frames: Any) -> None:
        pending.difference_update(frames.tolist())
        wait(self, frames)

    def read_cold(self: Transfer, keys: Any, frames: Any, **more: Any) -> Any:
        late.extend(pending.intersection(frames.tolist()) if more.get("settled") else ())
        return read(self, keys, frames, **more)

    for replacement in (write_down, wait_frames, read_cold):
        monkeypatch.setattr(Transfer, replacement.__name__, replacement)
    with torch.no_grad(), tierkv.wrap(model("llama"), **given(tmp_path, 4)) as wrapped:
        tier_cache, other = wrapped.cache(), wrapped.cache()
        wrapped.prefill(ids[:, :100], other)
        wrapped.prefill(ids[:, :302], tier_cache)
        settle(wrapped)
        other.crop(60)
        wrapped.prefill(ids[:, :100], other)  # pages go into homes again
        other.close()
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        stepped(wrapped, tier_cache, ids[:, :315], graph)
        assert len(wrapped.manager.selective.faults.homes.frames) and not late


@pytest.mark.usefixtures("captured")
def test_an_eager_step_after_an_interrupt_finds_inbound_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of pages that had passed through stayed taken until the next captured step."""
    monkeypatch.setattr(test_selective_gpu, "NEW", STEPS)
    ids, wanted = prompt(), given(tmp_path, 1)
    want = logits("llama", ids, wanted)
    got, settled = list[torch.Tensor](), FaultService._settle

    def interrupted(self: FaultService) -> None:
        if got and self._passed:
            raise KeyboardInterrupt
        settled(self)

    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-STEPS], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(FaultService, "_settle", interrupted)
            for stop in range(ids.shape[1] - STEPS + 1, ids.shape[1] + 1):
                got += stepped(wrapped, tier_cache, ids[:, :stop], graph)
        argument = cache_argument(model("llama"))
        for at in range(tier_cache.get_seq_length(), ids.shape[1]):
            out = model("llama")(ids[:, at : at + 1], **{argument: tier_cache})
            got.append(out.logits[0, -1])
            assert not wrapped.manager.warm.inbound.used
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("crowded")
def test_lent_homes_count_as_room_for_another_context(tmp_path: Path) -> None:
    """Nothing of it was taken from the store, for lent homes would be free a moment later."""
    ids, none = prompt(), np.zeros(0, dtype=np.int64)
    with torch.no_grad(), tierkv.wrap(model("llama"), **given(tmp_path, 4)) as wrapped:
        tier_cache, other = wrapped.cache(), wrapped.cache()
        wrapped.prefill(ids[:, :100], other)
        wrapped.prefill(ids[:, :302], tier_cache)
        other.close()
        room = adopt.room_above(wrapped.manager, none)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        stepped(wrapped, tier_cache, ids[:, :310], graph)
        assert len(wrapped.manager.selective.faults.homes.frames)
        assert adopt.room_above(wrapped.manager, none) >= room > 0


@pytest.mark.usefixtures("crowded")
def test_an_interrupt_before_the_device_forgets_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames were free before the device had forgotten them: steps read what came into them."""
    ids, wanted = prompt(), given(tmp_path, 4)
    want = logits("llama", ids, wanted)
    hits, forget = list[int](), FaultService._forget

    def interrupted(self: FaultService, keys: Any) -> None:
        if len(keys) and len(hits) < 4:
            hits.append(len(keys))
            if len(hits) % 2:
                raise KeyboardInterrupt
        forget(self, keys)

    got: list[torch.Tensor] = []
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache = wrapped.cache()
        wrapped.prefill(ids[:, :-STEPS], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        monkeypatch.setattr(FaultService, "_forget", interrupted)
        for stop in range(ids.shape[1] - STEPS + 1, ids.shape[1] + 1):
            while tier_cache.get_seq_length() < stop:
                with suppress(KeyboardInterrupt):
                    got += stepped(wrapped, tier_cache, ids[:, :stop], graph)
            settle(wrapped)
            check(wrapped, tier_cache)
    assert len(hits) == 4
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("crowded")
def test_an_interrupt_gives_no_home_back_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt()
    with torch.no_grad(), tierkv.wrap(model("llama"), **given(tmp_path, 4)) as wrapped:
        manager, tier_cache, other = wrapped.manager, wrapped.cache(), wrapped.cache()
        wrapped.prefill(ids[:, :-STEPS], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        for stop in range(ids.shape[1] - STEPS + 1, ids.shape[1] + 1):
            stepped(wrapped, tier_cache, ids[:, :stop], graph)
            settle(wrapped)
        give = manager.outflow.give_homes

        def once(*arguments: Any) -> None:
            give(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(manager.outflow, "give_homes", once)
            wrapped.prefill(ids[:, :40], other)
        wrapped.prefill(ids[:, :40], other)
        free = manager.warm.homes._returned
        assert len(free) == len(set(free))
        assert len(manager.selective.faults.guests.frames) == len(manager.warm.guests)


@pytest.mark.usefixtures("crowded")
def test_a_context_that_waited_has_the_free_homes(tmp_path: Path) -> None:
    """Homes once lent stood empty when a context went on, for only homes with pages were lent."""
    ids, wanted = prompt(), given(tmp_path, 4)
    want, got = logits("llama", ids, wanted), list[torch.Tensor]()
    with torch.no_grad(), tierkv.wrap(model("llama"), **wanted) as wrapped:
        tier_cache, other = wrapped.cache(), wrapped.cache()
        wrapped.prefill(ids[:, :-STEPS], tier_cache)
        graph = DecodeGraph(model("llama"), tier_cache, 400)
        for stop in range(ids.shape[1] - STEPS + 1, ids.shape[1] + 1):
            if stop == ids.shape[1] - STEPS // 2:
                wrapped.prefill(ids[:, :60], other)
                other.close()
            got += stepped(wrapped, tier_cache, ids[:, :stop], graph)
            settle(wrapped)
            check(wrapped, tier_cache)
        free = [wrapped.manager.outflow.warm_free(layer) for layer in (1, 2)]
        assert free == [0, 0] and len(wrapped.manager.selective.faults.homes.frames)
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("crowded")
def test_free_homes_that_cannot_be_pinned_stay_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are pinned when they are lent: a thread that pinned them in a step would wait for it."""
    ids, pinned = prompt(), threading.get_ident()
    with torch.no_grad(), tierkv.wrap(model("llama"), **given(tmp_path, 4)) as wrapped:
        manager, tier_cache, other = wrapped.manager, wrapped.cache(), wrapped.cache()
        wrapped.prefill(ids[:, :100], other)
        wrapped.prefill(ids[:, :305], tier_cache)  # no page is sealed before the 320th token
        other.close()
        asked, addresses = list[int](), manager.warm.addresses
        free = [manager.outflow.take_homes(layer, 99) for layer in (1, 2)]
        with manager.tiers.changed:
            for layer, frames in zip((1, 2), free, strict=True):
                manager.outflow.give_homes(layer, frames)

        def fails(frames: Any) -> Any:
            if np.isin(frames, np.concatenate(free)).any():
                asked.append(threading.get_ident())
                raise WarmBudgetError("made up")
            return addresses(frames)

        graph = DecodeGraph(model("llama"), tier_cache, 400)
        monkeypatch.setattr(manager.warm, "addresses", fails)
        for stop in range(306, 320):
            stepped(wrapped, tier_cache, ids[:, :stop], graph)
        assert asked == [pinned] and not len(manager.selective.faults.homes.frames)
        check(wrapped, tier_cache)


@pytest.mark.parametrize("error", [ColdWriteError("made up"), MemoryError("made up")])
@pytest.mark.usefixtures("crowded")
def test_a_disk_that_fails_lends_nothing(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            raise error

        got = []
        for stop in range(ids.shape[1] - STEPS + 1, ids.shape[1] + 1):
            with monkeypatch.context() as patch:
                if stop % 16:  # pages that are sealed have to go somewhere
                    patch.setattr(wrapped.manager.transfer, "put_cold", fails)
                got += stepped(wrapped, tier_cache, ids[:, :stop], graph)
                settle(wrapped)
        assert len(asked) == 1
        check(wrapped, tier_cache)
    torch.testing.assert_close(torch.stack(got), want, rtol=2e-4, atol=2e-4)
