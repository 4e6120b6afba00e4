"""Encoded hot pages: the same bytes as below, moved as they are, within the budget."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from tests.combinations import each
from tests.models import VOCAB, tiny_model
from tests.paging.manager_helpers import (
    Batch,
    FailNth,
    check_books,
    close_all,
    make_manager,
    open_store,
)
from tests.paging.test_codecs import GEOMETRY, INT8, Encoded, wait_for_disk
from tests.paging_helpers import budgets
from tierkv.codecs import CODECS, encoded_bytes
from tierkv.errors import ColdReadError, ConfigError, HotBudgetError, WarmBudgetError
from tierkv.hf.geometry import model_geometry
from tierkv.page import Geometry
from tierkv.paging import saved
from tierkv.paging.adopt import promote, room_above
from tierkv.paging.descent import demote
from tierkv.paging.directory import NOWHERE
from tierkv.paging.manager import PageManager
from tierkv.paging.placement import Placement, budget_for_tails
from tierkv.paging.sequences import Sequences
from tierkv.paging.whereabouts import tokens_by_tier

TOKENS = GEOMETRY.page_tokens


def tiers_of(batch: Batch) -> list[dict[str, int]]:
    """Return how many pages of each layer are where."""
    manager = batch.manager
    blocks = batch.sequences.blocks[:, : batch.length // TOKENS].reshape(-1)
    found = []
    for layer in range(GEOMETRY.layers):
        raw = manager.directory.hot[blocks, layer] != NOWHERE
        frames = manager.directory.warm[blocks, layer]
        encoded = manager.warm.on_device(frames)
        warm = (frames != NOWHERE) & ~encoded
        names = {"raw": raw, "encoded": encoded, "warm": warm, "cold": ~raw & (frames == NOWHERE)}
        found.append({name: int(mask.sum()) for name, mask in names.items()})
    return found


def small(tmp_path: Path, *, encoded: int, homes: int) -> PageManager:
    """Make a manager with two raw frames a layer, and so many encoded ones and warm homes."""
    return make_manager(
        open_store(tmp_path, GEOMETRY, codec=INT8), geometry=GEOMETRY, codec=INT8, hot=2,
        encoded=encoded, homes=homes, staging=2, transit=2,
    )  # fmt: skip


@pytest.mark.parametrize("name", list(CODECS))
def test_pages_take_the_device_first(name: str, tmp_path: Path) -> None:
    """Every sealed page is what the codec makes of it once, on the device, in warm, on disk."""
    codec = CODECS[name]
    manager = make_manager(
        open_store(tmp_path, GEOMETRY, codec=codec), geometry=GEOMETRY, codec=codec, hot=3,
        encoded=6, homes=8, staging=2, transit=2,
    )  # fmt: skip
    batch = Encoded.new(manager, 2)
    for count in (70, 1, 40, 1, 1, 33, *[1] * 20, 100):
        batch.append(count)
        check_books(manager, [batch])
    wait_for_disk(manager)
    assert tiers_of(batch) == 2 * [{"raw": 0, "encoded": 6, "warm": 4, "cold": 6}]
    where = tokens_by_tier(manager, batch.sequences)
    assert where["hot"] == batch.length - where["warm"] - where["cold"] > 2 * TOKENS
    report = manager.report()
    size, frame = encoded_bytes(codec, GEOMETRY), manager.warm.frame_bytes
    assert report["moved_bytes"]["hot_to_warm"] == 2 * 10 * size
    assert report["tiers"]["hot"]["pages"] == 2 * (6 + 2)
    assert report["tiers"]["hot"]["bytes"] == 2 * (6 * frame + 2 * GEOMETRY.page_bytes)
    before = report["hits"]["hot"], report["moved_bytes"]["warm_to_hot"]
    manager.lookahead.cancel()
    batch.check()
    manager.lookahead.cancel()
    check_books(manager, [batch])
    report = manager.report()
    # Those of the next lookups are announced, and moved, but not looked up.
    assert report["hits"]["hot"] == before[0] + 2 * 6
    assert report["moved_bytes"]["warm_to_hot"] >= before[1] + 2 * 10 * size
    close_all(manager, [batch])


@pytest.mark.parametrize(
    ("tiers", "homes", "transit"), [(2, 4, 2), (3, 4, 1), (3, 40, 2), (3, 4, 5)]
)
def test_pages_move_as_they_are(
    tiers: int, homes: int, transit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to warm and to disk, up again, and to a saved context: encoded once, never again.

    With a single frame for pages from disk the next one was to be read while the first one was
    copied, which is one frame too few.
    """
    store = open_store(tmp_path, GEOMETRY, codec=INT8) if tiers == 3 else None
    manager = make_manager(
        store, geometry=GEOMETRY, codec=INT8, hot=2, encoded=5, homes=homes + 12 * (store is None),
        staging=1, transit=transit, chunk_frames=3,
    )  # fmt: skip
    batch = Encoded.new(manager, 1)
    batch.append(5 * TOKENS + 7)
    blocks = batch.sequences.blocks[0, :5].copy()
    assert tiers_of(batch) == 2 * [{"raw": 0, "encoded": 5, "warm": 0, "cold": 0}]
    monkeypatch.setattr(manager.tiers.format, "write", lambda *_: pytest.fail("encoded again"))
    for down in (blocks[:2], blocks, blocks[3:]):
        demote(manager, down)
        check_books(manager, [batch])
        wait_for_disk(manager)
        assert tiers_of(batch)[0]["encoded"] == 5 - len(down)
        batch.check()
        promote(manager, blocks)
        assert tiers_of(batch) == 2 * [{"raw": 0, "encoded": 5, "warm": 0, "cold": 0}]
        batch.check()
        check_books(manager, [batch])
    if store is not None:
        manager.lookahead.cancel()
        keys = [bytes([i]) * 32 for i in range(6)]
        monkeypatch.undo()  # tails are encoded to be saved
        assert saved.save(manager, batch.sequences, keys) == 2 * 6
        other = Sequences(GEOMETRY.layers)
        batch.close()
        saved.restore(manager, other, keys, batch.length)
        batch.sequences = other
        assert tiers_of(batch) == 2 * [{"raw": 0, "encoded": 5, "warm": 0, "cold": 0}]
        batch.keys = [x.clone() for x in batch.keys]
        for layer in range(2):  # the tail came back as it was saved
            tail = manager.hot.arenas[layer].pages(other.tails[layer])
            for whole, page in zip((batch.keys, batch.values), tail, strict=True):
                whole[layer][0, :, 5 * TOKENS :] = page[:, 0, :7]
        batch.check()
        check_books(manager, [batch])
    close_all(manager, [batch])


def test_a_page_that_cannot_be_read_stays_where_it_is(tmp_path: Path) -> None:
    """Promotion stops there; no frame is lost, and it may be repeated."""
    manager = small(tmp_path, encoded=4, homes=0)
    batch = Encoded.new(manager, 1)
    batch.append(4 * TOKENS)
    blocks = batch.sequences.blocks[0].copy()
    demote(manager, blocks)
    wait_for_disk(manager)
    FailNth(manager.cold, "read_into", 2, ColdReadError("made up"))
    with pytest.raises(ColdReadError, match="made up"):
        promote(manager, blocks)
    check_books(manager, [batch])
    batch.check()
    for _ in range(2):  # each time as many blocks as find room in every layer
        promote(manager, blocks)
    assert tiers_of(batch) == 2 * [{"raw": 0, "encoded": 4, "warm": 0, "cold": 0}]
    batch.check()
    close_all(manager, [batch])


def test_pages_from_the_store_are_no_more_than_every_layer_takes(tmp_path: Path) -> None:
    """Room on the device in one layer and in warm memory in another was added up: pages that
    stayed on disk counted as known before they were ever read."""
    manager = small(tmp_path, encoded=4, homes=4)
    none = np.zeros(0, dtype=np.int64)
    assert room_above(manager, none) == 4 + 2
    device, outflow = manager.tiers.device_frames, manager.outflow
    taken, homes = device.take(0, 3), outflow.take_homes(1, 2)
    assert room_above(manager, none) == 1
    outflow.give_homes(0, taken)
    outflow.give_homes(1, homes)
    close_all(manager, [])


def test_only_what_goes_up_is_counted(tmp_path: Path) -> None:
    """Encoded pages that were saved counted as brought up to the device, where they did not go."""
    manager = small(tmp_path, encoded=2, homes=4)
    batch = Encoded.new(manager, 1)
    batch.append(6 * TOKENS)
    manager.lookahead.cancel()
    wait_for_disk(manager)

    def moved() -> int:
        return int(manager.report()["moved_bytes"]["warm_to_hot"])

    before, blocks = moved(), batch.sequences.blocks[0]
    assert saved.save(manager, batch.sequences, [bytes([i]) * 32 for i in range(6)]) == 2 * 6
    assert moved() == before
    demote(manager, blocks[:2])
    wait_for_disk(manager)
    promote(manager, blocks[4:])
    assert moved() == before + 2 * 2 * encoded_bytes(INT8, GEOMETRY)
    close_all(manager, [batch])


def test_a_failed_move_down_leaves_pages_on_the_device(tmp_path: Path) -> None:
    manager = make_manager(geometry=GEOMETRY, codec=INT8, hot=2, encoded=4, homes=8)
    batch = Encoded.new(manager, 1)
    batch.append(4 * TOKENS)
    FailNth(manager.transfer, "copy_out", 1, RuntimeError("made up"))
    with pytest.raises(RuntimeError, match="made up"):
        demote(manager, batch.sequences.blocks[0])
    assert [where["encoded"] for where in tiers_of(batch)] == [0, 4]
    check_books(manager, [batch])
    batch.check()
    close_all(manager, [batch])


def test_running_out_says_what_is_missing() -> None:
    """What the device has no room for goes below; where it finds none, nothing is appended."""
    manager = make_manager(geometry=GEOMETRY, codec=INT8, hot=2, encoded=3, homes=2)
    batch = Encoded.new(manager, 1)
    batch.append(4 * TOKENS)
    with pytest.raises(WarmBudgetError, match=r"raise cpu_budget .* or gpu_budget"):
        batch.append(TOKENS)
    batch.check()
    check_books(manager, [batch])
    close_all(manager, [batch])


@pytest.mark.parametrize("rows", [2, 40])
def test_the_budget_for_more_tails_is_enough(rows: int) -> None:
    """The message says how much, and that raw hot pages need less."""
    geometry = dataclasses.replace(GEOMETRY, layers=4)

    def managed(gpu_budget: int) -> PageManager:
        return PageManager(
            geometry, torch.device("cpu"), gpu_budget=gpu_budget, cpu_budget=1 << 30, cold=None,
            codec=INT8, encode_hot=True,
        )  # fmt: skip

    manager = managed(12 * geometry.page_bytes)
    assert manager.tiers.device_frames.share and manager.hot.frames_per_layer == 1
    with pytest.raises(HotBudgetError, match=f"{rows} sequences .*, or keep hot pages raw"):
        manager.take_tails(rows)
    manager.close()
    manager = managed(budget_for_tails(geometry, rows))
    assert len(manager.take_tails(rows)[0]) == rows
    manager.close()


def test_the_residual_window_stays_raw(tmp_path: Path) -> None:
    manager = make_manager(
        open_store(tmp_path, GEOMETRY, codec=INT8), geometry=GEOMETRY, codec=INT8, hot=3,
        encoded=4, homes=4, staging=2, transit=2, residual_tokens=2 * TOKENS,
    )  # fmt: skip
    batch = Encoded.new(manager, 1)
    for count in (70, 1, 40, 100, *[1] * 70):
        batch.append(count)
        check_books(manager, [batch])
    sealed = batch.length // TOKENS
    raw = manager.directory.hot[batch.sequences.blocks[0, :sealed]] != NOWHERE
    assert (raw.all(axis=1) == (np.arange(sealed) >= sealed - 2)).all()
    assert tiers_of(batch)[0]["encoded"] == 4
    close_all(manager, [batch])


# -- on models ---------------------------------------------------------------------------------


def roomy(hf_model: Any, pages: int, raw: int = 2, copies: int = 3) -> int:
    """Return a gpu_budget for so many encoded pages of each layer beside `raw` frames."""
    geometry = model_geometry(hf_model.config, hf_model.dtype, 16)
    assert geometry is not None
    return geometry.page_bytes * (geometry.layers * (raw + pages) + copies)


def below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the frames that encoded hot pages would have into warm memory."""
    choose = Placement.choose

    def chosen(geometry: Geometry, **given: Any) -> Placement:
        place = choose(geometry, **given)
        more = place.device_frames * geometry.layers
        return dataclasses.replace(place, device_frames=0, warm_homes=place.warm_homes + more)

    monkeypatch.setattr(Placement, "choose", chosen)


@pytest.mark.parametrize(("name", "kind"), each(["int8", "int4", "fp8"], ["warm", "cold"]))
def test_logits_equal_those_of_the_same_pages_in_warm(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (1, 190), generator=torch.Generator().manual_seed(0))
    given = budgets(kind, model, tmp_path, page_tokens=16, rows=1)
    given |= {"codec": f"hot={name}", "gpu_budget": roomy(model, 4), "prefill_chunk": 50}

    @torch.no_grad()
    def logits() -> tuple[torch.Tensor, dict[str, Any]]:
        with tierkv.wrap(model, **given) as wrapped:
            cache, steps = wrapped.cache(), []
            wrapped.prefill(ids[:, :-20], cache)
            for at in range(170, 190):
                step = {wrapped.cache_argument(): cache, "use_cache": True}
                steps.append(model(ids[:, at : at + 1], **step).logits[0, -1])
            return torch.stack(steps), wrapped.stats()

    got, above = logits()
    below(monkeypatch)
    want, under = logits()
    assert torch.equal(got, want)
    moved = [stats["moved_bytes"]["warm_to_hot"] for stats in (above, under)]
    assert moved[0] < moved[1]
    assert above["hits"]["hot"] > under["hits"]["hot"]
    assert sum(above["hits"].values()) == sum(under["hits"].values())


def test_selective_attention_refuses_encoded_hot_pages() -> None:
    with pytest.raises(ConfigError, match=r"codec: hot=int8 .*attention='selective'.*hot=raw"):
        tierkv.Config(codec="hot=int8", attention="selective")


def test_minimum_budget_still_works(tmp_path: Path) -> None:
    """No room for a single encoded page on the device: all of them are below."""
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (1, 100), generator=torch.Generator().manual_seed(0))
    given = budgets("minimum", model, tmp_path, page_tokens=16, rows=1)
    with tierkv.wrap(model, codec="hot=int8", **given) as wrapped:
        assert wrapped.generate(ids, max_new_tokens=4, do_sample=False).shape[1] == 104
        assert wrapped.manager is not None
        assert wrapped.manager.tiers.device_frames.share == 0
