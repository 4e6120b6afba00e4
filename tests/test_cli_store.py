"""``tierkv store``: what each action prints, changes, and returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.paging.store_helpers import contents, save, tokens
from tests.paging.test_collect import spoil
from tests.tiers.cold_helpers import FRAME, extent_path, open_store, put
from tierkv.cli import main
from tierkv.paging.keys import KEPT_PREFIX

Store = Callable[..., tuple[int, str]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with two contexts that share their first page, and a page that nobody names."""
    with open_store(tmp_path / "s") as cold:
        save(cold, "book", tokens(40))
        save(cold, "note", tokens(32, changed=16))
        put(cold, KEPT_PREFIX + b"nobody")
    return tmp_path / "s"


@pytest.fixture
def run(place: Path, capsys: pytest.CaptureFixture[str]) -> Store:
    def run(action: str, *argv: str, store: Path = place) -> tuple[int, str]:
        code = main(["store", action, *argv, "--store", str(store)])
        out, err = capsys.readouterr()
        return code, out or err

    return run


def as_json(result: tuple[int, str]) -> Any:
    return json.loads(result[1])


def test_ls(run: Store) -> None:
    report = as_json(run("ls", "--json"))
    assert [row["name"] for row in report["contexts"]] == ["book", "note"]
    assert report["pages"] == 9
    assert report["written_today_bytes"] == 9 * FRAME
    assert "2 contexts, 9 pages" in run("ls")[1]


def test_inspect(run: Store, tiny_model_dir: Path) -> None:
    report = as_json(run("inspect", "book", "--json"))
    assert {key: report[key] for key in ("tokens", "pages", "shared_pages", "missing_pages")} == {
        "tokens": 40, "pages": 6, "shared_pages": 2, "missing_pages": 0,
    }  # fmt: skip
    assert report["bytes"] == 6 * FRAME
    assert (report["model"], report["dtype"]) == ("TestModel", "float32")
    assert report["first_ids"] == list(range(8))
    assert report["last_ids"] == list(range(32, 40))
    code, text = run("inspect", "note", "--model", str(tiny_model_dir))
    assert code == 0
    assert "first text     '<pad><s></s>" in text
    assert "root key       abab" in text
    assert run("inspect", "nothing")[0] == 2


def test_verify_and_repair(run: Store, place: Path) -> None:
    """It reads every record; repair drops exactly the bad ones."""
    with open_store(place) as cold:
        spoil(cold, "context/note")
    with extent_path(cold).open("r+b") as file:
        file.write(b"\xff")  # some page of "book"
    pages, names = contents(place)
    report = as_json(run("verify", "--json"))
    assert contents(place) == (pages, names), "verify alone changes nothing"
    (bad,) = report["bad"]
    assert "bad_checksum" in bad["reason"]
    assert [row["name"] for row in report["bad_metadata"]] == ["context/note"]
    assert (report["whole"], report["incomplete"]) == (8, {"book": 1})
    code, text = run("verify")
    assert code == 1
    assert "context 'book' lacks 1 pages and cannot be resumed" in text
    code, text = run("verify", "--repair")
    assert code == 1, "a context cannot be resumed any more"
    assert text.count("dropped: ") == 2
    after = contents(place)
    assert set(pages) - set(after[0]) == {bytes.fromhex(bad["key"])}
    assert set(names) - set(after[1]) == {"context/note"}
    run("rm", "book")
    assert run("verify") == (0, "3 pages are whole, 0 are bad\n")


def test_gc(run: Store, place: Path) -> None:
    report = as_json(run("gc", "--json"))
    assert (report["unnamed_pages"], report["dropped_bytes"]) == (1, FRAME)
    code, text = run("gc", "--max-bytes", "0")
    assert code == 1, "the goal was not reached"
    assert "kept without --include-saved: book, note" in text
    assert "32 KiB more than --max-bytes 0 B are left" in text
    code, text = run("gc", "--older-than", "7d", "--include-saved")
    assert (code, text.count("evicted")) == (0, 0)
    code, text = run("gc", "--max-bytes", "5 KiB", "--include-saved")
    assert code == 0
    assert "evicted context 'book': 4 pages" in text
    assert contents(place) == ([], [])
    assert not list((place / "extents").iterdir()), "the space is the file system's again"
    assert run("gc", "--include-saved")[0] == 2
    assert "--older-than must be an age such as 45s" in run("gc", "--older-than", "7")[1]


def test_gc_compacts(run: Store, place: Path) -> None:
    with open_store(place) as cold:
        save(cold, "late", tokens(200, changed=0))
    run("rm", "book")
    before = extent_path(cold).stat().st_size
    code, text = run("gc", "--compact")
    assert code == 0
    assert "pages to the front of their files" in text
    assert extent_path(cold).stat().st_size == (4 + 26) * FRAME < before
    assert run("verify") == (0, "30 pages are whole, 0 are bad\n")
    assert as_json(run("gc", "--compact", "--json"))["moved_pages"] == 0


def test_export_and_import(run: Store, place: Path, tmp_path: Path) -> None:
    file = str(tmp_path / "book.tkv")
    assert run("export", "book", file)[0] == 0
    other = tmp_path / "other"
    code, text = run("import", file, store=other)
    assert (code, text) == (0, "book: 40 tokens, 6 pages, 6 of them new\n")
    assert run("import", file, store=other)[0] == 2
    assert run("import", file, "--name", "copy", store=other)[1].endswith("0 of them new\n")
    assert run("import", file, "--force", store=other)[0] == 0
    assert run("verify", store=other) == (0, "6 pages are whole, 0 are bad\n")
    Path(file).write_bytes(Path(file).read_bytes()[:-1])
    code, text = run("import", file, "--force", store=place)
    assert code == 2
    assert "cut off or damaged" in text


def test_explain(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hits of a saved prompt, the texts where another one parts from it, and other settings."""
    text = "The bell rings when the wind is against the stream. " * 3
    common = ["--model", str(tiny_model_dir), "--store", str(tmp_path), "--page-tokens", "16"]
    assert main(["generate", *common, "--prompt", text + "One?", "--save", "bell",
                 "--max-new-tokens", "3"]) == 0  # fmt: skip
    capsys.readouterr()

    def explain(*more: str) -> tuple[Any, str]:
        assert main(["store", "explain", *common, *more]) == 0
        shown = capsys.readouterr().out
        assert main(["store", "explain", *common, *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out), shown

    report, shown = explain("--prompt", text + "Two?")
    assert report["hit_pages"] == len(f"<s>user: {text}") // 16
    assert report["difference"]["name"] == "bell"
    assert report["difference"]["saved_text"].startswith("stream. One?")
    assert report["difference"]["prompt_text"].startswith("stream. Two?")
    assert report["resume_tokens"] == report["difference"]["token"]
    assert {page["tier"] for page in report["pages"]} == {"cold", None}
    assert f"pages 0-{report['hit_pages'] - 1} (tokens 0-" in shown
    assert "differs from 'bell' at token" in shown
    assert "prompt: 'stream. Two?" in shown
    assert f"--resume bell takes {report['resume_tokens']} of" in shown
    report, shown = explain("--prompt", text + "One?", "--no-chat")
    assert "with another chat template, or without one" in shown
    report, shown = explain("--prompt", text + "One?", "--dtype", "bfloat16")
    assert "in another dtype (float32, not bfloat16)" in shown
    report, shown = explain("--prompt", text + "One?", "--page-tokens", "32")
    assert "with other pages (16 tokens, not 32)" in shown
    assert "no saved context begins like this prompt" in shown
