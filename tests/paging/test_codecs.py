"""Encoded pages in the tiers: what a lookup yields, how much moves, damage, identity, settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from tests.combinations import each
from tests.models import VOCAB, tiny_model
from tests.paging.manager_helpers import Batch, check_books, close_all, make_manager, open_store
from tests.paging_helpers import budgets
from tierkv.codecs import CODECS, RAW, encoded_bytes
from tierkv.errors import ColdReadError, ConfigError
from tierkv.page import Geometry
from tierkv.paging import saved
from tierkv.paging.adopt import promote
from tierkv.paging.descent import demote
from tierkv.paging.directory import NOWHERE
from tierkv.paging.headpages import read_head_pages
from tierkv.paging.keys import page_key, root_key
from tierkv.paging.lookup import Lookup
from tierkv.paging.manager import PageManager
from tierkv.tiers.direct_io import aligned_buffer
from tierkv.tiers.frame_format import FrameFormat

GEOMETRY = Geometry(layers=2, kv_heads=2, k_dim=64, v_dim=32, dtype=torch.float32, page_tokens=32)
LATENTS = Geometry(layers=2, kv_heads=1, k_dim=8, v_dim=48, dtype=torch.float32, page_tokens=16)
INT8 = CODECS["int8"]


class Encoded(Batch):
    """A batch whose pages below hot must be what the reference codec makes of them, once."""

    def expected(self, layer: int, past: int) -> tuple[torch.Tensor, torch.Tensor]:
        g, codec = self.manager.geometry, self.manager.tiers.format.codec
        seen = self.keys[layer].clone(), self.values[layer].clone()
        for row, blocks in enumerate(self.sequences.blocks[:, :past]):
            for position in np.flatnonzero(self.manager.directory.hot[blocks, layer] == NOWHERE):
                span = slice(position * g.page_tokens, (position + 1) * g.page_tokens)
                frame = torch.zeros(1, self.manager.warm.frame_bytes, dtype=torch.uint8)
                codec.encode(g, seen[0][row, :, None, span], seen[1][row, :, None, span], frame)
                for x, page in zip(seen, codec.decode(g, frame), strict=True):
                    x[row, :, span] = page[:, 0]
        return seen

    def check_lookup(self, lookup: Lookup) -> None:
        layer = lookup.layer
        whole = self.keys[layer], self.values[layer]
        self.keys[layer], self.values[layer] = self.expected(layer, lookup.past)
        try:
            super().check_lookup(lookup)
        finally:
            self.keys[layer], self.values[layer] = whole


@pytest.mark.parametrize(
    ("name", "tiers", "geometry"), each(list(CODECS), [3, 2], [GEOMETRY, GEOMETRY, LATENTS])
)
def test_a_page_is_encoded_once(name: str, tiers: int, geometry: Geometry, tmp_path: Path) -> None:
    """Bit for bit the reference codec, from warm memory and from disk; tails and hot are raw."""
    codec = CODECS[name]
    store = open_store(tmp_path, geometry, codec=codec) if tiers == 3 else None
    manager = make_manager(
        store,
        geometry=geometry,
        codec=codec,
        hot=4,
        staging=2,
        homes=3 if tiers == 3 else 40,
        transit=2,
    )
    with torch.inference_mode():
        batch = Encoded.new(manager, 2)
        for count in (70, 1, 40, 1, 1, 33):
            batch.append(count)
        batch.check()
        check_books(manager, [batch])
        moved = manager.report()["moved_bytes"]
        assert (moved["cold_to_warm"] > 0) == (tiers == 3)
        assert moved["hot_to_warm"] > 0
        assert moved["hot_to_warm"] % encoded_bytes(codec, geometry) == 0
        close_all(manager, [batch])


def wait_for_disk(manager: PageManager) -> None:
    """Wait until every page on its way down has arrived."""
    outflow = manager.outflow
    with manager.tiers.changed:
        assert manager.tiers.changed.wait_for(
            lambda: not outflow._writing and not outflow._queued, 20
        )


def test_encoded_frames_are_smaller() -> None:
    geometry = Geometry(32, 8, 128, 128, torch.bfloat16, 32)
    raw = make_manager(geometry=GEOMETRY)
    encoded = make_manager(geometry=GEOMETRY, codec=INT8)
    assert encoded.warm.frame_bytes < 0.6 * raw.warm.frame_bytes
    raw.close()
    encoded.close()
    assert encoded_bytes(RAW, geometry) == geometry.page_bytes


def test_damage_is_caught_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoded page on disk with one flipped bit never reaches the codec."""
    manager = make_manager(
        open_store(tmp_path, GEOMETRY, codec=INT8), geometry=GEOMETRY, codec=INT8, homes=0
    )
    batch = Batch.new(manager, 1)
    for layer, new in enumerate(batch.tokens(5 * GEOMETRY.page_tokens)):
        batch.append_layer(layer, new)
    wait_for_disk(manager)
    (extent,) = (tmp_path / "extents").glob("*.kv")
    content = bytearray(extent.read_bytes())
    for start in range(0, len(content), manager.warm.frame_bytes):
        content[start + 100] ^= 1
    extent.write_bytes(content)
    decoded = []
    monkeypatch.setattr(
        type(INT8), "decode", lambda *args: decoded.append(args) or pytest.fail("decoded")
    )
    with pytest.raises(ColdReadError, match="xxh3"):
        batch.check()
    assert not decoded
    monkeypatch.undo()
    manager.close()


def test_single_head_pages_are_decoded() -> None:
    """What selective attention reads on the CPU, from several chunks of warm memory."""
    manager = make_manager(geometry=GEOMETRY, codec=INT8, homes=20, hot=1, chunk_frames=3)
    batch = Encoded.new(manager, 1)
    batch.append(7 * GEOMETRY.page_tokens)
    wanted = torch.tensor([[5, 0, -1, 3], [6, 5, 1, -1]])
    k, v = read_head_pages(manager, batch.sequences, 1, wanted)
    for got, whole in zip((k, v), batch.expected(1, 7), strict=True):
        pages = whole[0].unflatten(1, (7, -1))
        for head, row in enumerate(wanted.tolist()):
            for entry, page in enumerate(row):
                want = pages[head, page] if page >= 0 else torch.zeros_like(got[0, 0])
                assert torch.equal(got[head, entry], want)
    manager.close()


def test_keys_of_stored_pages_name_the_codec() -> None:
    """A page of another codec is a miss; keys of raw pages are what they were before codecs."""
    raw = root_key(b"f", GEOMETRY)
    keys = {raw, root_key(b"f", GEOMETRY, codec="int8"), root_key(b"f", GEOMETRY, codec="int4")}
    assert len(keys) == 3
    assert raw == root_key(b"f", GEOMETRY, codec="raw")


@pytest.mark.parametrize("name", [*(name for name in CODECS if name != "raw"), "hot=int8"])
def test_generate_and_resume(name: str, tmp_path: Path) -> None:
    """The whole way on a small model; a context of another codec is refused by name. Whether hot
    pages are encoded, too, makes no difference to what is stored."""
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (1, 150), generator=torch.Generator().manual_seed(0))
    settings = budgets("cold", model, tmp_path, page_tokens=16, rows=1) | {"prefill_chunk": 50}
    with tierkv.wrap(model, codec=name, **settings) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
        assert context.generate(max_new_tokens=8, do_sample=False).shape[1] == 8
        assert wrapped.stats()["moved_bytes"]["cold_to_warm"] > 0
    other = {"int8": "hot=int8", "hot=int8": "int8"}.get(name, name)
    with tierkv.wrap(model, codec=other, **settings) as wrapped, wrapped.open("book") as context:
        assert context.restored_tokens == 150
    with tierkv.wrap(model, **settings) as wrapped, pytest.raises(ConfigError, match="codec"):
        wrapped.open("book")


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2"])
def test_other_models(name: str, tmp_path: Path) -> None:
    """Latents with K and V of different dims, and windows beside pages: 8 bits stay near raw."""
    model = tiny_model(name)
    ids = torch.randint(3, VOCAB, (1, 150), generator=torch.Generator().manual_seed(0))
    settings = budgets("cold", model, tmp_path, page_tokens=16, rows=1)
    logits = {codec: last_logits(model, ids, codec=codec, **settings) for codec in ("raw", "int8")}
    gap = (logits["raw"] - logits["int8"]).abs().max()
    assert 0 < gap < 0.1 * logits["raw"].abs().max()


def test_selective_attention_reads_encoded_pages() -> None:
    """On the CPU; with a budget for everything and nothing hot it is exact over those pages."""
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (1, 300), generator=torch.Generator().manual_seed(0))
    common = {"page_tokens": 16, "codec": "int4", "gpu_budget": "64MiB", "cpu_budget": "64MiB"}
    selective = {"attention": "selective", "token_budget": 512, "max_context": 512,
                 "dense_layers": 0, "sink_tokens": 0, "recent_tokens": 0}  # fmt: skip
    got = last_logits(model, ids, **common | selective)
    nothing_hot = common | {"gpu_budget": budgets("minimum", model, Path(), page_tokens=16, rows=1)
                            ["gpu_budget"]}  # fmt: skip
    want = last_logits(model, ids, **nothing_hot)
    raw = last_logits(model, ids, **common | {"codec": "raw"})
    assert (got - want).abs().max() < 1e-3 < 0.01 < (got - raw).abs().max()


def last_logits(model: Any, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Prefill all but the last token, decode that one."""
    with tierkv.wrap(model, **settings) as wrapped, torch.no_grad():
        cache = wrapped.cache()
        wrapped.prefill(ids[:, :-1], cache)
        step = {wrapped.cache_argument(): cache, "use_cache": True}
        return model(ids[:, -1:], **step).logits[0, -1]


def test_8_bits_keep_the_tokens_of_a_small_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = torch.randint(3, VOCAB, (1, 150), generator=torch.Generator().manual_seed(0))
    settings = budgets("warm", model, tmp_path, page_tokens=16, rows=1)
    logits = {
        codec: last_logits(model, ids, codec=codec, **settings).log_softmax(-1)
        for codec in ("raw", "int8-channel", "int4")
    }
    near, far = ((logits["raw"] - logits[name]).abs().max() for name in ("int8-channel", "int4"))
    assert 0 < near < 0.3 * far


def test_pages_that_no_kernel_fetches_are_named() -> None:
    """What selective attention on a GPU asks before anything runs, and exact captured steps whose
    reason was selective attention, too."""
    odd = replace(GEOMETRY, k_dim=5, dtype=torch.bfloat16)
    for name, codec in CODECS.items():
        FrameFormat(replace(GEOMETRY, dtype=torch.bfloat16), codec).check_fetch()
        if name != "raw":
            with pytest.raises(ConfigError, match=f"captured steps .*'{name}' pages of 5"):
                FrameFormat(odd, codec).check_fetch()


@pytest.mark.parametrize("homes", [4, 40])
@pytest.mark.parametrize("name", [name for name in CODECS if name != "raw"])
def test_a_page_that_came_up_is_not_encoded_again(
    name: str, homes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a page that the prefix cache brought up lost its warm frame, and was encoded from what
    it had been decoded to when it went down, and when it was saved."""
    codec = CODECS[name]
    manager = make_manager(
        open_store(tmp_path, GEOMETRY, codec=codec), geometry=GEOMETRY, codec=codec, homes=homes,
        hot=9, staging=2, transit=2,
    )  # fmt: skip
    first, batch = Batch.new(manager, 1, seed=1), Encoded.new(manager, 1)
    first.append(6 * GEOMETRY.page_tokens)  # takes hot memory for now
    batch.append(6 * GEOMETRY.page_tokens)
    first.close()
    blocks = batch.sequences.blocks[0].copy()
    below = {layer: manager.directory.hot[blocks, layer] == NOWHERE for layer in range(2)}
    assert all(pages.sum() == 5 for pages in below.values())
    want = {layer: batch.expected(layer, 6) for layer in below}
    wait_for_disk(manager)
    written, write = [], manager.tiers.format.write

    def noted(k: torch.Tensor, v: torch.Tensor, frames: torch.Tensor) -> None:
        written.append(len(frames))
        write(k, v, frames)

    monkeypatch.setattr(manager.tiers.format, "write", noted)
    promote(manager, blocks)
    assert (manager.directory.hot[blocks] != NOWHERE).all()
    check_books(manager, [batch])
    keys = [bytes([i]) * 32 for i in range(6)]
    saved.save(manager, batch.sequences, keys)
    assert sum(written) == 2, "only the page of each layer that was never encoded"
    demote(manager, blocks)
    assert sum(written) == 4
    assert (manager.directory.hot[blocks] == NOWHERE).all()
    for layer, pages in want.items():
        assert manager.cold is not None
        frames = [aligned_buffer(manager.warm.frame_bytes) for _ in keys]
        manager.cold.read_into([page_key(key, layer) for key in keys], frames)
        raw = torch.stack([torch.frombuffer(frame, dtype=torch.uint8) for frame in frames])
        for got, whole in zip(manager.tiers.format.pages(raw), pages, strict=True):
            was_below = torch.from_numpy(below[layer])
            assert torch.equal(got[:, was_below], whole[0].unflatten(1, (6, -1))[:, was_below])
    batch.check()
    check_books(manager, [batch])
    close_all(manager, [batch])


@pytest.mark.parametrize("homes", [2, 20])
def test_saved_pages_are_those_that_were_encoded_first(homes: int, tmp_path: Path) -> None:
    """Saving used to decode pages in warm memory and on disk, and to encode them once more."""
    manager = make_manager(
        open_store(tmp_path, GEOMETRY, codec=INT8), geometry=GEOMETRY, codec=INT8, homes=homes,
        hot=2, staging=2, transit=2,
    )  # fmt: skip
    batch, blocks = Encoded.new(manager, 1), [bytes([i]) * 32 for i in range(8)]
    batch.append(7 * GEOMETRY.page_tokens + 5)
    assert saved.save(manager, batch.sequences, blocks) == 2 * 8
    for layer in range(2):
        frames = [aligned_buffer(manager.warm.frame_bytes) for _ in blocks]
        assert manager.cold is not None
        manager.cold.read_into([page_key(block, layer) for block in blocks], frames)
        hot = manager.directory.hot[batch.sequences.blocks[0, :7], layer] != NOWHERE
        assert 0 < hot.sum() < 7
        for position, frame in enumerate(frames):
            span = slice(position * 32, (position + 1) * 32)
            page = [x[layer][0, :, span] for x in (batch.keys, batch.values)]
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, 32 - x.shape[1])) for x in page)
            want = torch.zeros(1, len(frame), dtype=torch.uint8)
            INT8.encode(GEOMETRY, k[:, None], v[:, None], want)
            size = manager.tiers.format.page_bytes
            assert bytes(frame[:size]) == want[0, :size].numpy().tobytes(), (layer, position)
    close_all(manager, [batch])
