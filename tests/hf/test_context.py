"""Contexts that outlive the process: saved, resumed, cut, edited, and refused when they differ."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.hf.test_exact_tokens import model, prompt
from tests.models import tiny_model
from tests.paging_helpers import budgets
from tierkv import cli
from tierkv.errors import (
    ColdReadError,
    ColdWriteError,
    ConfigError,
    DiskBudgetError,
    UnsupportedModelError,
)
from tierkv.hf.fingerprint import fingerprint
from tierkv.paging import manifest
from tierkv.paging.keys import KEPT_PREFIX, block_keys, root_key
from tierkv.paging.tierset import SESSION_PREFIX
from tierkv.tiers.direct_io import aligned_buffer

NEW = {"max_new_tokens": 20, "do_sample": False}


def wrap(name: str, store: Path, kind: str = "cold", **more: Any) -> Any:
    settings = budgets(kind, model(name), store, page_tokens=16, rows=1)
    return tierkv.wrap(model(name), prefill_chunk=50, **settings | more)


@pytest.mark.parametrize("kind", ["cold", "minimum"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v3"])
def test_resume_computes_nothing_again(name: str, kind: str, tmp_path: Path) -> None:
    """Tokens after a restart equal those of the run that was never interrupted."""
    ids, _ = prompt("single")
    with wrap(name, tmp_path, kind) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        first = context.generate(**NEW)
        context.save()
        want = context.generate(**NEW)
    with wrap(name, tmp_path, kind) as wrapped:
        assert wrapped.saved() == ["book"]
        with wrapped.open("book") as context:
            assert context.restored_tokens == context.tokens == ids.shape[1] + 19
            assert context.ids[0, -20:].tolist() == first[0].tolist()
            got = context.generate(**NEW)
        assert wrapped.stats()["prefill"]["tokens"] == 0
    assert got.tolist() == want.tolist()


def test_shared_pages_are_written_once(tmp_path: Path) -> None:
    ids, _ = prompt("single")
    with wrap("llama", tmp_path) as wrapped:
        with wrapped.open("one") as context:
            context.append(ids)
            assert context.save() == 3 * 10  # layers x pages, the tail's among them
            assert context.save() == 0
        with wrapped.open("two") as context:
            context.append(ids[:, :100])
            context.append(ids[:, :60])
            assert context.save() == 3 * (10 - 6)
        assert wrapped.forget("one") == 3 * 4  # the others are shared
        with wrapped.open("two") as context:
            assert context.tokens == 160
        assert wrapped.forget("two") == 3 * 10
        assert not list(wrapped.manager.cold.keys(KEPT_PREFIX))


def test_pages_that_nobody_names_make_way(tmp_path: Path) -> None:
    """A full disk: what a killed save left goes before a save is refused; named pages never do."""
    ids, _ = prompt("single")
    place = {"store": str(tmp_path), "disk_budget": "1MiB", "disk_floor": "1MiB"}
    with tierkv.wrap(model("llama"), page_tokens=16, **place) as wrapped:
        cold = wrapped.manager.cold
        with wrapped.open("kept") as context:
            context.append(ids)
            context.save()
        frame = aligned_buffer(cold.frame_bytes)
        left = [KEPT_PREFIX + bytes([i]) * 34 for i in range(cold.room())]
        cold.put(left, [frame] * len(left))
        with wrapped.open("new") as context:
            context.append(ids.flip(1))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(wrapped.manager.directory, "saved", {-1: b"\0" * 32})
                assert context.save() == 30
        assert set(cold.keys(KEPT_PREFIX)) & set(left) == set(left[:1]), "one is being read"
        wrapped.open("kept").close()
        with wrapped.open("more") as context:
            cold.put(left[1 : 1 + cold.room()], [frame] * cold.room())
            context.append(torch.cat([ids.flip(1)] * 9, dim=1))
            with pytest.raises(DiskBudgetError):
                context.save()
        assert wrapped.saved() == ["kept", "new"]


def test_a_restore_is_a_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is evicted first is what was not used for longest, not what is oldest."""
    ids, _ = prompt("single")
    with wrap("llama", tmp_path) as wrapped:
        with wrapped.open("book") as context:
            context.append(ids)
            context.save()
        cold = wrapped.manager.cold
        kept, _ = manifest.find(cold, "book")
        assert (kept.dtype, kept.messages) == ("float32", None)
        monkeypatch.setattr(manifest.time, "time", lambda: 5e9)
        wrapped.open("book").close()
        assert manifest.last_used(cold, "book", kept) == 5e9


def test_a_use_that_cannot_be_noted_leaves_no_pages_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: pages that had come up were nobody's, and kept their frames, where the catalogue then
    failed to note that the context was used."""
    with wrap("llama", tmp_path) as wrapped:
        with wrapped.open("book") as context:
            context.append(prompt("single")[0])
            context.save()

        def fails(*_: object) -> None:
            raise ColdWriteError("no disk")

        with monkeypatch.context() as patch:
            patch.setattr(manifest, "touch", fails)
            with pytest.raises(ColdWriteError):
                wrapped.open("book")
        assert wrapped.manager.directory.live == wrapped.manager.hot.pages == 0
        with wrapped.open("book") as context:
            assert context.restored_tokens == context.tokens > 0


def test_edit_and_rewind_keep_the_common_prefix(tmp_path: Path) -> None:
    ids, _ = prompt("single")
    changed = torch.cat([ids[:, :77], ids[:, 5:60]], dim=1)
    with wrap("llama", tmp_path) as wrapped:
        with wrapped.open("plain") as context:
            context.append(changed)
            want = context.generate(**NEW)
        with wrapped.open("edited") as context:
            context.append(ids)
            assert context.edit(77, ids[:, 5:60]) == changed.shape[1] - 77
            assert context.generate(**NEW).tolist() == want.tolist()
            assert context.rewind(changed[:, :90]) == 89
            with pytest.raises(ConfigError, match="from_token must be 0 to 90"):
                context.edit(91, ids)


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    ids, _ = prompt("single")
    with wrap("llama", tmp_path) as wrapped, wrapped.open("mine") as context:
        context.append(ids)
        context.save()
    with wrap("qwen3", tmp_path) as wrapped, pytest.raises(ConfigError, match="another model"):
        wrapped.open("mine")
    with wrap("llama", tmp_path) as wrapped:
        cold = wrapped.manager.cold
        cold.drop([next(iter(cold.keys(KEPT_PREFIX)))])
        reason = "are not in the store|could not be read.*no such key"
        with pytest.raises(ColdReadError, match=rf"context 'mine': 1 of .* ({reason})"):
            wrapped.open("mine")
        assert wrapped.cache().get_seq_length() == 0
        with pytest.raises(ConfigError, match="name must be"):
            wrapped.open("a\nb")
    with wrap("llama", tmp_path, cpu_budget="64MiB") as wrapped:  # all would come up
        with pytest.raises(ColdReadError, match=r"context 'mine': 1 of .* not be read; .* missing"):
            wrapped.open("mine")
        assert wrapped.manager.directory.live == 0
    with tierkv.wrap(model("llama")) as wrapped, pytest.raises(ConfigError, match="need a store"):
        wrapped.open("mine")
    with wrap("gemma3", tmp_path) as wrapped, pytest.raises(UnsupportedModelError, match="window"):
        wrapped.open("mine")


def test_a_full_disk_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = prompt("single")
    with wrap("llama", tmp_path) as wrapped, wrapped.open("x") as context:
        context.append(ids)
        cold, put, calls = wrapped.manager.cold, wrapped.manager.cold.put, []

        def failing(keys: Any, payloads: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise DiskBudgetError("full")
            put(keys, payloads)

        monkeypatch.setattr(cold, "put", failing)
        with pytest.raises(DiskBudgetError):
            context.save()
        assert not list(cold.keys(KEPT_PREFIX))
        assert wrapped.saved() == []


def test_restored_pages_are_not_written_again(tmp_path: Path) -> None:
    """Pages that sank to disk after a restore were written a second time, under session keys."""
    ids, _ = prompt("single")
    with wrap("llama", tmp_path, "minimum") as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
        want = context.generate(**NEW)
    settings = budgets("minimum", model("llama"), tmp_path, page_tokens=16, rows=2)
    with tierkv.wrap(model("llama"), **settings) as wrapped:
        cold = wrapped.manager.cold
        with wrapped.open("book") as context, context.fork() as twin:
            assert cold.counters["pages_written"] == 0
            assert wrapped.manager.directory.cold.sum() == 3 * 9  # whole pages, by reference
            assert context.generate(**NEW).tolist() == want.tolist()
            assert twin.generate(**NEW).tolist() == want.tolist()
        assert cold.counters["pages_written"] == 2 * 3  # each filled its own tail
        assert not list(cold.keys(SESSION_PREFIX))
        assert len(list(cold.keys(KEPT_PREFIX))) == 3 * 10, "a page was dropped from the store"


def test_hot_pages_of_the_store_leave_without_a_write(tmp_path: Path) -> None:
    """Frames that tails need are freed by a drop when their pages are on disk already."""
    ids, _ = prompt("single")
    with wrap("llama", tmp_path) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
        want = context.generate(**NEW)
    with wrap("llama", tmp_path) as wrapped, wrapped.open("book") as context:
        assert (wrapped.manager.directory.hot >= 0).sum() == 3 * 2
        twins = [context.fork(), context.fork()]
        stats = wrapped.stats()
        assert stats["pages_demoted"] == 3 * 2
        assert stats["moved_bytes"]["hot_to_warm"] == 0
        for one in (context, *twins):
            assert one.generate(**NEW).tolist() == want.tolist()


def test_pages_in_use_survive_their_name(tmp_path: Path) -> None:
    """Forgetting what an open context reads from the store must not take its pages away."""
    ids, _ = prompt("single")
    with wrap("llama", tmp_path, "minimum") as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
        want = context.generate(**NEW)
    with wrap("llama", tmp_path, "minimum") as wrapped, wrapped.open("book") as context:
        assert wrapped.forget("book") == 3  # the tail's pages were copied
        assert context.generate(**NEW).tolist() == want.tolist()
        context.save()
        context.edit(20, ids[:, :5])
        context.save()
        assert wrapped.saved() == ["book"]
    with wrap("llama", tmp_path, "minimum") as wrapped, wrapped.open("book") as context:
        assert context.tokens == 25


def test_a_failed_restore_leaves_the_context_as_it_was(tmp_path: Path) -> None:
    ids, _ = prompt("single")
    with wrap("llama", tmp_path) as wrapped, wrapped.open("book") as context:
        context.append(ids)
        context.save()
        context.append(ids[:, :7])
        want = context.generate(**NEW)
        context.rewind(context.ids[:, :158])
        cold, before = wrapped.manager.cold, wrapped.manager.directory.live
        read, failures = cold.read_into, []

        def failing(keys: Any, buffers: Any) -> None:
            failures.append(1)
            if len(failures) == 2:
                raise ColdReadError("a bad sector")
            read(keys, buffers)

        cold.read_into = failing
        with pytest.raises(ColdReadError, match="a bad sector"):
            context.restore()
        cold.read_into = read
        assert wrapped.manager.directory.live == before
        context.ids = context.ids[:, :157]
        assert context.generate(**NEW).tolist() == want.tolist()


def test_keys_are_the_same_in_every_process() -> None:
    """Under different hash seeds, and typed so that no two inputs look alike."""
    code = (
        "import numpy, torch; from tierkv.page import Geometry; from tierkv.paging.keys import *;"
        "g = Geometry(2, 2, 8, 8, torch.float16);"
        "print(block_keys(root_key(b'f', g, 's'), numpy.arange(70), 32)[-1].hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True, text=True, check=True, cwd=Path(tierkv.__file__).parents[1],
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(seen) == 1
    geometry = wrapped_geometry()
    assert root_key(b"ab", geometry, "c") != root_key(b"a", geometry, "bc")
    ids = torch.arange(70).numpy()
    longer = block_keys(b"r", ids, 32)
    assert block_keys(b"r", ids[:64], 32) == longer[:2]
    assert block_keys(b"r", ids[:65], 32)[2] != longer[2]


def wrapped_geometry() -> Any:
    with tierkv.wrap(model("llama")) as wrapped:
        return wrapped.manager.geometry


def test_fingerprints_tell_weights_apart() -> None:
    first, second = tiny_model("llama"), tiny_model("llama")
    assert fingerprint(first) == fingerprint(second)
    with torch.no_grad():
        second.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    assert fingerprint(first) != fingerprint(second)


def test_a_salt_keeps_contexts_apart(tmp_path: Path) -> None:
    """Pages saved under another salt are neither restored nor begun with, and stay as they are."""
    ids = prompt("single")[0][:, :100]
    store = {"store": str(tmp_path), "disk_budget": "64MiB", "disk_floor": 0}
    with tierkv.wrap(model("llama"), salt="one", **store) as wrapped, wrapped.open("book") as book:
        book.append(ids)
        book.save()
    with tierkv.wrap(model("llama"), salt="two", prefix_cache=True, **store) as wrapped:
        with pytest.raises(ConfigError, match="another model"):
            wrapped.open("book")
        wrapped.generate(ids, max_new_tokens=2, do_sample=False)
        assert wrapped.stats()["prefix"]["reused_tokens"] == 0
    with tierkv.wrap(model("llama"), salt="one", **store) as wrapped, wrapped.open("book") as book:
        assert book.tokens == 100


def test_command_line(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 6
    common = ["generate", "--model", str(tiny_model_dir), "--store", str(tmp_path / "s"),
              "--page-tokens", "16", "--max-new-tokens", "5", "--json"]  # fmt: skip

    def run(*more: str) -> Any:
        assert cli.main([*common, *more]) == 0
        return json.loads(capsys.readouterr().out)

    plain = run("--prompt", text + "One?")
    saved = run("--prompt", text + "Two?", "--save", "fox")
    resumed = run("--prompt", text + "One?", "--resume", "fox", "--save", "fox")
    assert plain["resumed_tokens"] == saved["resumed_tokens"] == 0
    assert resumed["resumed_tokens"] >= 270
    assert resumed["stats"]["prefill"]["tokens"] < 20 < plain["stats"]["prefill"]["tokens"]
    assert resumed["token_ids"] == plain["token_ids"]
    assert cli.main([*common, "--prompt", text, "--resume", "cat"]) == 2
    assert "no such context in the store; saved: fox" in capsys.readouterr().err
    place = ["--store", str(tmp_path / "s")]
    assert cli.main(["store", "ls", *place, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["contexts"]
    assert row["name"] == "fox" and row["tokens"] == resumed["prompt_tokens"] + 5
    assert cli.main(["store", "verify", *place]) == 0
    assert " 0 are bad" in capsys.readouterr().out
    assert cli.main(["store", "rm", "cat", *place]) == 2
    assert "saved: fox" in capsys.readouterr().err
    assert cli.main(["store", "rm", "fox", *place]) == 0
    assert cli.main(["store", "ls", *place]) == 0
    assert "0 contexts, 0 pages" in capsys.readouterr().out
    assert cli.main(["store", "ls", "--store", str(tmp_path / "none")]) == 2
