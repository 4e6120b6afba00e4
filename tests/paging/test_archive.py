"""Exported contexts: they come back whole, and a damaged file changes nothing."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.combinations import examples
from tests.paging.store_helpers import contents, kept, save, tokens
from tests.tiers.cold_helpers import FRAME, open_store, read
from tierkv.errors import ArchiveError, ColdReadError, ConfigError, DiskBudgetError
from tierkv.paging import archive, manifest
from tierkv.tiers.chunks import ChunkWriter, read_chunks


@functools.cache
def exported() -> bytes:
    """A file with a context of 3 positions, the last one partial."""
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "s") as cold:
        save(cold, "book", tokens(40))
        file = Path(folder) / "book.tkv"
        archive.export_context(cold, "book", file)
        assert [path.name for path in Path(folder).iterdir() if path.is_file()] == ["book.tkv"]
        return file.read_bytes()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "book.tkv"
    path.write_bytes(exported())
    return path


def test_there_and_back(tmp_path: Path, file: Path) -> None:
    name, head, ids = archive.read_head(file)
    assert (name, head.frame_bytes, ids.tolist()) == ("book", FRAME, list(range(40)))
    with open_store(tmp_path / "from") as cold:
        save(cold, "book", ids)
        want = read(cold, *sorted(head.page_keys(ids)))
    with open_store(tmp_path / "to") as cold:
        save(cold, "half", tokens(16))  # its page of each layer is shared
        assert archive.import_context(cold, file) == 4
        found, found_ids = manifest.find(cold, "book")
        assert found == head
        assert found_ids.tolist() == ids.tolist()
        assert read(cold, *sorted(head.page_keys(ids))) == want
        assert cold.verify().bad == []
        archive.import_context(cold, file, name="twin")
        assert manifest.names(cold) == ["book", "half", "twin"]


def test_names_in_use_and_files_that_exist(tmp_path: Path, file: Path) -> None:
    with open_store(tmp_path / "s") as cold:
        save(cold, "book", tokens(32, changed=0))
        with pytest.raises(ConfigError, match="'book' already; --force"):
            archive.import_context(cold, file)
        assert manifest.find(cold, "book")[1][0] == 1000
        archive.import_context(cold, file, force=True)
        assert manifest.find(cold, "book")[1][0] == 0
        assert len(cold) == 6, "the former context's pages are gone"
        with pytest.raises(ConfigError, match="exists; --force"):
            archive.export_context(cold, "book", file)
        archive.export_context(cold, "book", file, force=True)
        assert archive.read_head(file)[0] == "book"
        with pytest.raises(ConfigError, match="no context 'x'"):
            archive.export_context(cold, "x", tmp_path / "x")
        with pytest.raises(ConfigError, match="cannot write"):
            archive.export_context(cold, "book", tmp_path / "nowhere" / "x")


def test_an_incomplete_context_is_not_exported(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as cold:
        save(cold, "book", tokens(40))
        cold.drop([next(cold.keys())])
        with pytest.raises(ColdReadError, match="missing"):
            archive.export_context(cold, "book", tmp_path / "book.tkv")
    assert os.listdir(tmp_path) == ["s"]


def test_a_full_disk_takes_nothing(tmp_path: Path, file: Path) -> None:
    with open_store(tmp_path / "s") as cold:
        save(cold, "half", tokens(16))
    before = contents(tmp_path / "s")
    with (
        open_store(tmp_path / "s", disk_budget=1 << 16) as cold,
        pytest.raises(DiskBudgetError),
    ):
        archive.import_context(cold, file)
    assert contents(tmp_path / "s") == before


def test_a_failed_manifest_takes_its_pages_back(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise DiskBudgetError("full")

    with open_store(tmp_path / "s") as cold:
        save(cold, "half", tokens(16))
        before = list(cold.keys())
        monkeypatch.setattr(cold, "meta_put", fails)
        with pytest.raises(DiskBudgetError):
            archive.import_context(cold, file)
        assert list(cold.keys()) == before


@settings(deadline=None, derandomize=True, max_examples=examples(60))
@given(data=st.data())
def test_a_damaged_file_changes_nothing(data: st.DataObject) -> None:
    """Flipped, cut, lengthened, or with chunks moved: refused before anything is written."""
    good = exported()
    kind = data.draw(st.sampled_from(["flip", "cut", "more"]))
    at = data.draw(st.integers(0, len(good) - 1))
    if kind == "flip":
        bad = bytearray(good)
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        bad = bytearray(good[:at] if kind == "cut" else good + good[at:])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bad.tkv"
        file.write_bytes(bytes(bad))
        with open_store(Path(folder) / "s") as cold:
            save(cold, "half", tokens(16))
            before = list(cold.keys()), cold.meta_names(), cold.writes.today
            with pytest.raises(ArchiveError, match=r"bad\.tkv"):
                archive.import_context(cold, file)
            assert (list(cold.keys()), cold.meta_names(), cold.writes.today) == before


@pytest.mark.parametrize("change", ["drop a page", "swap pages", "wrong size", "no manifest"])
def test_whole_chunks_that_do_not_make_a_context(tmp_path: Path, file: Path, change: str) -> None:
    """Every checksum is right; what is told apart is what the file means."""
    chunks = list(read_chunks(file))
    if change == "drop a page":
        chunks.pop()
    elif change == "swap pages":
        chunks[2], chunks[3] = chunks[3], chunks[2]
    elif change == "wrong size":
        ids = tokens(40)
        chunks[1] = b"MANI", manifest.pack(kept(ids, frame_bytes=2 * FRAME), ids)
    else:
        del chunks[1]
    bad = tmp_path / "bad.tkv"
    with bad.open("wb") as out:
        writer = ChunkWriter(out)
        for chunk in chunks:
            writer.add(*chunk)
        writer.end()
    with open_store(tmp_path / "s") as cold:
        with pytest.raises(ArchiveError):
            archive.import_context(cold, bad)
        assert (len(cold), cold.meta_names()) == (0, [])


@settings(deadline=None, derandomize=True, max_examples=examples(40))
@given(st.lists(st.tuples(st.binary(min_size=4, max_size=4), st.binary(max_size=50))))
def test_chunks_round_trip(chunks: list[tuple[bytes, bytes]]) -> None:
    chunks = [(kind, payload) for kind, payload in chunks if kind != b"END\0"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        with path.open("wb") as out:
            writer = ChunkWriter(out)
            for chunk in chunks:
                writer.add(*chunk)
            writer.end()
        assert list(read_chunks(path)) == chunks


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"tierkvX\0" + (9).to_bytes(4, "little") + bytes(50))
    with pytest.raises(ArchiveError, match="version 9, this tierkv reads version 1"):
        archive.read_head(path)
    path.write_bytes(bytes(100))
    with pytest.raises(ArchiveError, match="no file that tierkv exported"):
        archive.read_head(path)
    with pytest.raises(ArchiveError, match="No such file"):
        archive.read_head(tmp_path / "y")
