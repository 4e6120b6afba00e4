"""A store of packed pages: what goes in comes out, also what does not shrink; damage; accounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from tests.models import VOCAB, tiny_model
from tests.paging.store_helpers import kept, tokens
from tests.paging_helpers import budgets
from tierkv.errors import ColdWriteError, ConfigError, DiskBudgetError, StoreError
from tierkv.page import Geometry
from tierkv.paging import manifest
from tierkv.paging.archive import export_context, import_context
from tierkv.paging.collect import collect
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.direct_io import aligned_buffer
from tierkv.tiers.faults import BadPagesError
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.packed import PackedStore, UnpackedStore, open_store, slot_bytes, stored_codec
from tierkv.tiers.packing import Packing

GEOMETRY = Geometry(1, 2, 64, 60, torch.bfloat16, 64)
LAYOUT = FrameFormat(GEOMETRY)


def open_packed(directory: Path, disk_budget: int = 64 << 20) -> PackedStore:
    store = open_store(
        directory, LAYOUT, 1, threads=2, disk_budget=disk_budget, free_floor=0, durable=False
    )
    assert isinstance(store, PackedStore)
    return store


def make_frames(count: int, seed: int = 0) -> list[memoryview]:
    """Frames of normal numbers; every third one of noise, which does not shrink."""
    rng = np.random.default_rng(seed)
    frames = []
    for index in range(count):
        frame = aligned_buffer(LAYOUT.frame_bytes)
        page = torch.from_numpy(rng.standard_normal(LAYOUT.page_bytes // 2)).to(torch.bfloat16)
        used = page.view(torch.uint8).numpy()
        if index % 3 == 2:
            used = rng.integers(0, 256, LAYOUT.page_bytes, dtype=np.uint8)
        frame[: LAYOUT.page_bytes] = used.tobytes()
        frames.append(frame)
    return frames


def key(index: int) -> bytes:
    return b"session/%03d" % index


def packed_store(wrapped: tierkv.TieredModel) -> PackedStore:
    assert wrapped.manager is not None
    cold = wrapped.manager.cold
    assert isinstance(cold, PackedStore) and cold.frame_bytes < cold.page_frame_bytes
    return cold


def pages_of(store: PackedStore, keys: list[bytes]) -> list[bytes]:
    """The pages under keys of any packed store."""
    buffers = [aligned_buffer(store.page_frame_bytes) for _ in keys]
    store.read_into(keys, buffers)
    return [bytes(buffer) for buffer in buffers]


def read(store: PackedStore, keys: list[bytes]) -> list[memoryview]:
    buffers = [aligned_buffer(LAYOUT.frame_bytes) for _ in keys]
    store.read_into(keys, buffers)
    return buffers


def test_pages_come_back_and_take_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierkv.tiers.packed.BATCH_BYTES", 100_000)  # several batches
    frames, keys = make_frames(20), [key(i) for i in range(20)]
    assert LAYOUT.frame_bytes == 32768 and slot_bytes(32768, torch.bfloat16) == 24576
    with open_packed(tmp_path) as store:
        store.put(keys, frames)
        assert [bytes(x) for x in read(store, keys)] == [bytes(x) for x in frames]
        assert all(one in store for one in keys) and len(store) == 20 + 6
        report = store.report()
        assert (report["pages"], report["not_packed"]) == (20, 6)
        assert report["ratio"] == pytest.approx(20 * 32768 / (26 * 24576))
        assert report["pack_gb_s"] > 0 and report["unpack_gb_s"] > 0
    with open_packed(tmp_path) as store:
        assert [bytes(x) for x in read(store, keys[::-1])] == [bytes(x) for x in frames[::-1]]
        assert store.drop(keys[:3]) == 3
        assert store.drop(keys) == 17
        assert len(store) == 0 and list(store.keys()) == []


def test_damage_is_caught_by_the_checksum(tmp_path: Path) -> None:
    """In a packed page, and in either half of one that is not; the others are still read."""
    frames, keys = make_frames(6), [key(i) for i in range(6)]
    with open_packed(tmp_path) as store:
        store.put(keys, frames)
        (extent,) = (tmp_path / "extents").glob("*.kv")
        content = bytearray(extent.read_bytes())
        for slot in (0, 2, 7):  # page 0, page 2, the rest of page 5
            content[slot * store.frame_bytes + 50] ^= 4
        extent.write_bytes(content)
        buffers = [aligned_buffer(LAYOUT.frame_bytes) for _ in keys]
        with pytest.raises(BadPagesError) as caught:
            store.read_into(keys, buffers)
        assert set(caught.value.faults) == {keys[0], keys[2], keys[5]}
        assert {fault.reason for fault in caught.value.faults.values()} == {"bad_checksum"}
        for index in (1, 3, 4):
            assert bytes(buffers[index]) == bytes(frames[index])
        with pytest.raises(BadPagesError, match="missing"):
            read(store, [b"nothing"])


@pytest.mark.parametrize("how", ["damaged", "missing", "not packed so"])
def test_a_page_with_a_bad_half_is_dropped(how: str, tmp_path: Path) -> None:
    """Bug: only the half that was damaged left the store, which went on to say that it held the
    page: it could not be read, and was never saved again."""
    frames, keys = make_frames(3), [key(i) for i in range(3)]
    with open_packed(tmp_path) as store:
        store.put(keys, frames)
        bad = keys[2]
        if how == "damaged":
            (extent,) = (tmp_path / "extents").glob("*.kv")
            content = bytearray(extent.read_bytes())
            content[3 * store.frame_bytes + 50] ^= 4  # the rest of page 2
            extent.write_bytes(content)
        elif how == "missing":
            store._payloads.free(store._catalogue.delete_many([b"rest/" + bad]))
        else:
            bad, slot = keys[0], aligned_buffer(store.frame_bytes)
            slot[:4] = b"\x08\0\0\0"
            ColdStore.put(store, [bad], [slot])
        with pytest.raises(BadPagesError):
            read(store, keys)
        assert store.missing(keys) == [bad]
        left = 2 if how != "not packed so" else 3
        assert len(store) == left, "no half stays behind"
        store.put([bad], [frames[keys.index(bad)]])
        assert [bytes(x) for x in read(store, keys)] == [bytes(x) for x in frames]


def test_a_batch_is_stored_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.tiers.packed.BATCH_BYTES", 100_000)
    frames, keys = make_frames(20), [key(i) for i in range(20)]
    with open_packed(tmp_path / "small", disk_budget=400_000) as store:
        with pytest.raises(DiskBudgetError):
            store.put(keys, frames)
        assert len(store) == 0
    with open_packed(tmp_path / "failing") as store:
        calls, write = [], store._payloads.own.write

        def failing(*args: object, **kwargs: object) -> None:
            calls.append(args)
            if len(calls) == 3:
                raise OSError("no disk")
            write(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(store._payloads.own, "write", failing)
        with pytest.raises(ColdWriteError, match="no disk"):
            store.put(keys, frames)
        assert len(calls) == 3 and len(store) == 0


def test_pages_of_one_sector_are_not_packed(tmp_path: Path) -> None:
    small = FrameFormat(Geometry(1, 1, 8, 8, torch.bfloat16, 16))
    with open_store(tmp_path, small, 1, threads=1, disk_budget=1 << 20, free_floor=0) as store:
        assert type(store) is ColdStore and store.frame_bytes == small.frame_bytes


def test_a_model_generates_the_same_tokens(tmp_path: Path) -> None:
    """All three tiers, packed on disk; the report says what it gained; a context resumes."""
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (1, 900), generator=torch.Generator().manual_seed(0))
    settings = budgets("cold", model, tmp_path, page_tokens=128, rows=1) | {"prefill_chunk": 300}
    ask = {"max_new_tokens": 8, "do_sample": False}
    want = model.generate(ids, **ask)[0, 900:].tolist()
    with tierkv.wrap(model, codec="raw+zstd:1", **settings) as wrapped:
        assert wrapped.generate(ids, **ask)[0, 900:].tolist() == want
        with wrapped.open("book") as context:
            context.append(ids)
            context.save()
        stats = wrapped.stats()
    assert stats["moved_bytes"]["cold_to_warm"] > 0
    assert stats["packing"]["pages"] > 0 and stats["packing"]["unpack_gb_s"] > 0
    with (
        tierkv.wrap(model, codec="raw+zstd:1", **settings) as wrapped,
        wrapped.open("book") as book,
    ):
        assert book.restored_tokens == 900
        assert book.generate(**ask)[0].tolist() == want
    with tierkv.wrap(model, **settings) as wrapped, pytest.raises(ConfigError, match="codec"):
        wrapped.open("book")


@pytest.mark.parametrize("noisy", [False, True])
def test_a_saved_context_is_exported_with_both_slots_of_a_page(noisy: bool, tmp_path: Path) -> None:
    """Bug: pages that did not shrink lie in two slots, and contexts with such were refused."""
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (1, 300), generator=torch.Generator().manual_seed(0))
    settings = budgets("hot", model, tmp_path, page_tokens=128, rows=1) | {"codec": "raw+zstd:1"}
    store = str(tmp_path / "store")
    with tierkv.wrap(model, store=store, **settings) as wrapped:
        with wrapped.open("book") as context:
            context.append(ids)
            context.save()
        cold = packed_store(wrapped)
        keys = list(cold.keys(b"kept/"))
        if noisy:
            noise = aligned_buffer(cold.page_frame_bytes)
            noise[:] = np.random.default_rng(0).bytes(len(noise))
            cold.put([keys[0], keys[-1]], [noise, noise])
        want, slots, size = pages_of(cold, keys), len(cold), cold.frame_bytes
        assert slots == len(keys) + 2 * noisy
    limits = {"disk_budget": 64 << 20, "free_floor": 0}
    with ColdStore(tmp_path / "store", frame_bytes=size, **limits) as plain:  # as `store export`
        export_context(plain, "book", tmp_path / "book.tkv")
        plain.drop(list(plain.keys()))
        assert import_context(plain, tmp_path / "book.tkv", name="copy") == len(keys)
        assert len(plain) == slots
        assert import_context(plain, tmp_path / "book.tkv", name="again") == 0
    with tierkv.wrap(model, store=store, **settings) as wrapped:
        assert pages_of(packed_store(wrapped), keys) == want
        with wrapped.open("copy") as context:
            assert context.restored_tokens == 300


def test_a_failed_import_takes_both_slots_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, ids = make_frames(6), tokens(48)
    with open_packed(tmp_path / "from") as cold:
        book = kept(ids, frame_bytes=cold.frame_bytes)
        cold.put(sorted(book.page_keys(ids)), frames)
        manifest.write(cold, "book", book, ids)
        assert len(cold) == 8
    limits: dict[str, Any] = {"frame_bytes": book.frame_bytes, "disk_budget": 1 << 26}
    with ColdStore(tmp_path / "from", free_floor=0, **limits) as plain:
        export_context(plain, "book", tmp_path / "book.tkv")

    def fails(*_: object) -> None:
        raise DiskBudgetError("full")

    with ColdStore(tmp_path / "to", free_floor=0, **limits) as plain:
        monkeypatch.setattr(plain, "meta_put", fails)
        with pytest.raises(DiskBudgetError):
            import_context(plain, tmp_path / "book.tkv")
        assert plain.counters["pages_written"] == 8 and list(plain.keys()) == []


def test_halves_without_their_page_are_swept(tmp_path: Path) -> None:
    """Left by an earlier version, whose tools dropped a page but not the rest of it."""
    frames, keys = make_frames(6), [key(i) for i in range(6)]
    with open_packed(tmp_path) as store:
        store.put(keys, frames)
        store._payloads.free(store._catalogue.delete_many(keys[:3]))
        assert len(store) == 5
    with open_packed(tmp_path) as store:
        assert len(store) == 4
        assert bytes(read(store, keys[5:])[0]) == bytes(frames[5])


def plain_store(directory: Path, frame_bytes: int) -> ColdStore:
    """As the command line opens a store."""
    return ColdStore(directory, frame_bytes=frame_bytes, disk_budget=1 << 26, free_floor=0)


def test_tools_drop_both_halves(tmp_path: Path) -> None:
    """Bug: `tierkv store gc` and `rm` left the second slot of pages that did not shrink, counted
    it as stored, and dropped contexts that `--max-bytes` had room for."""
    frames = make_frames(12)
    with open_packed(tmp_path) as cold:
        for at, name in enumerate(("old", "new")):
            ids = tokens(48, changed=at * 24)
            book = kept(ids, root=f"{at:02}" * 32, frame_bytes=cold.frame_bytes)
            cold.put(sorted(book.page_keys(ids)), frames[at * 6 :][:6])
            manifest.write(cold, name, book, ids)
        size = cold.frame_bytes
        assert len(cold) == 16
    with plain_store(tmp_path, 4096) as cold:
        done = collect(cold, now=9.0, max_bytes=8 * size, include_saved=True)
        assert (len(cold), len(done.evicted), done.stored_bytes) == (8, 1, (16 * size, 8 * size))
        assert manifest.forget(cold, "new" if "old" in done.evicted else "old") == 6
        assert len(cold) == 0


def test_verify_names_the_page_of_a_bad_half(tmp_path: Path) -> None:
    """Bug: it named the half, so that no context lacked a page, and repair dropped only that."""
    frames, keys = make_frames(3), [key(i) for i in range(3)]
    with open_packed(tmp_path) as store:
        store.put(keys, frames)
        size = store.frame_bytes
    (extent,) = (tmp_path / "extents").glob("*.kv")
    content = bytearray(extent.read_bytes())
    content[3 * size + 50] ^= 4  # the rest of page 2
    extent.write_bytes(content)
    with plain_store(tmp_path, 4096) as cold:
        report = cold.verify()
        assert (report.whole, [bad for bad, _ in report.bad]) == (3, [keys[2]])
    with plain_store(tmp_path, size) as cold:
        with pytest.raises(BadPagesError):
            cold.read_into([b"rest/" + keys[2]], [aligned_buffer(size)])
        assert list(cold.keys()) == keys[:2]


def test_halves_of_pages_of_another_size_stay(tmp_path: Path) -> None:
    """Bug: opening a store for one model swept the halves of another model's pages."""
    frames, keys = make_frames(6), [key(i) for i in range(6)]
    with open_packed(tmp_path) as store:
        store.put(keys, frames)
    other = FrameFormat(Geometry(1, 4, 64, 60, torch.bfloat16, 64))
    limits = {"disk_budget": 64 << 20, "free_floor": 0, "durable": False}
    with open_store(tmp_path, other, 1, threads=2, **limits) as store:
        assert isinstance(store, PackedStore) and store.page_frame_bytes != LAYOUT.frame_bytes
        assert len(store) == 8
    with open_packed(tmp_path) as store:
        assert [bytes(x) for x in read(store, keys)] == [bytes(x) for x in frames]


def open_as_found(directory: Path, *, always: bool = False, budget: int = 256 << 20) -> ColdStore:
    limits = {"disk_budget": budget, "free_floor": 0, "durable": False}
    return open_store(directory, LAYOUT, 1, threads=2, always=always, **limits)


def with_disk(monkeypatch: pytest.MonkeyPatch, gb_s: float) -> list[Path]:
    """Make the disk as fast as that; return where it was measured."""
    asked: list[Path] = []

    def measure(directory: Path, num_bytes: int) -> tuple[float, bool]:
        asked.append(directory)
        return gb_s * 1e9, True

    monkeypatch.setattr("tierkv.tiers.packing.disk_bandwidth", measure)
    return asked


def test_zstd_is_off_where_the_disk_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured once, said, and remembered: what was stored is found by the next process."""
    asked = with_disk(monkeypatch, 1000.0)
    frames, keys = make_frames(3), [key(i) for i in range(3)]
    with pytest.warns(UserWarning, match=r"zstd is off for .*reads 1000\.00 GB/s.*raw\+zstd:1"):
        store = open_as_found(tmp_path)
    with store:
        assert isinstance(store, UnpackedStore) and store.frame_bytes == LAYOUT.frame_bytes
        store.put(keys, frames)
        report = store.report()
        assert report["on"] is False and report["disk_gb_s"] == 1000.0 > report["unpack_gb_s"] > 0
    assert asked == [tmp_path]
    with_disk(monkeypatch, 0.0)  # as if another disk: the store keeps its way
    with pytest.warns(UserWarning, match="zstd is off"), open_as_found(tmp_path) as store:
        read_back = [aligned_buffer(LAYOUT.frame_bytes) for _ in keys]
        store.read_into(keys, read_back)
        assert [bytes(one) for one in read_back] == [bytes(one) for one in frames]
        assert stored_codec(LAYOUT, 1, store, always=False) == "raw"
        assert stored_codec(LAYOUT, 1, store, always=True) == "raw+zstd"


def test_zstd_stays_on_where_the_disk_is_slower_or_full_or_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_disk(monkeypatch, 0.0)
    with open_as_found(tmp_path / "slow") as store:
        assert isinstance(store, PackedStore) and store.report()["disk_gb_s"] == 0.0
        assert stored_codec(LAYOUT, 1, store, always=False) == "raw+zstd"
    asked = with_disk(monkeypatch, 1000.0)
    with open_as_found(tmp_path / "asked", always=True) as store:
        assert isinstance(store, PackedStore)
    for name, budget in (("slow", 256 << 20), ("asked", 256 << 20), ("full", 8 << 20)):
        with open_as_found(tmp_path / name, budget=budget) as store:
            assert isinstance(store, PackedStore) and store.report()["on"]
    assert not asked, "a store that packs, or has no room to measure in, is not measured"


def test_a_store_of_packed_pages_goes_on_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a store that had been too small to measure in, or of an earlier version, was measured
    when it grew, found to be faster without zstd, and lost sight of all it held."""
    asked, frames = with_disk(monkeypatch, 1000.0), make_frames(3)
    with open_as_found(tmp_path, budget=8 << 20) as store:
        store.put([key(i) for i in range(3)], frames)
    for _ in range(2):
        with open_as_found(tmp_path) as store:
            assert isinstance(store, PackedStore)
            assert [bytes(x) for x in read(store, [key(0)])] == [bytes(frames[0])]
    assert not asked


def test_a_disk_that_cannot_be_measured_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the operating system's error came out as it was, without the store."""

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("tierkv.tiers.packing.disk_bandwidth", fails)
    with pytest.raises(StoreError, match=f"{tmp_path}: no space left"):
        open_as_found(tmp_path)
    with_disk(monkeypatch, 0.0)
    open_as_found(tmp_path).close()


def test_statistics_say_that_zstd_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_disk(monkeypatch, 1000.0)
    model = tiny_model("llama")
    settings = budgets("hot", model, tmp_path, page_tokens=128, rows=1)
    settings |= {"store": str(tmp_path / "store"), "disk_budget": "256MiB", "disk_floor": 0}
    with (
        pytest.warns(UserWarning, match="zstd is off"),
        tierkv.wrap(model, codec="raw+zstd", **settings) as wrapped,
    ):
        packing = wrapped.stats()["packing"]
    assert packing["on"] is False and packing["disk_gb_s"] == 1000.0


def test_the_disk_and_unpacking_are_measured(tmp_path: Path) -> None:
    found = Packing.measured(tmp_path, LAYOUT.page_bytes, torch.bfloat16, level=1, threads=2)
    assert found.disk_gb_s and found.unpack_gb_s
    assert found.on == (found.unpack_gb_s >= found.disk_gb_s)
    assert list(tmp_path.iterdir()) == [], "nothing is left of the measurement"
