"""``tierkv doctor``: every row has a reason, and what is broken turns the exit code."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tierkv import doctor
from tierkv.cli import main
from tierkv.tiers.direct_io import Probe


def rows(**options: Any) -> dict[str, doctor.Row]:
    return {row.name: row for row in doctor.examine(**options)}


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--store", str(tmp_path / "not" / "yet")]) == 0
    out = capsys.readouterr().out
    for name in ("python", "torch", "transformers", "gpu", "cupy", "pinned memory", "free memory",
                 "disk", "o_direct", "lmdb", "zstandard", "xxhash"):  # fmt: skip
        assert f"  {name} " in out
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--store", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {check["status"] for check in report["checks"]} <= {"ok", "warn"}
    assert all(check["detail"] for check in report["checks"])


def test_store_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIERKV_STORE", str(tmp_path))
    main(["doctor"])
    assert str(tmp_path) in capsys.readouterr().out


def test_broken_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def broken(name: str, package: str | None = None) -> Any:
        if name == "lmdb":
            raise OSError("lmdb.so: cannot open shared object file")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    assert doctor.doctor(None, as_json=False) == 1
    row = doctor.package("lmdb")
    assert row.status == "fail"
    assert "OSError: lmdb.so: cannot open" in row.detail


@pytest.mark.parametrize("version", ["5.14.1", "6.0.0", "4.57.0"])
def test_version_out_of_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    row = doctor.package("transformers")
    assert row.status == "fail"
    assert version in row.detail


@pytest.mark.parametrize("version", ["5.15.0", "5.24.0", "5.17.0.dev1"])
def test_version_in_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert doctor.package("transformers").status == "ok"


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = rows(store=str(file / "store"))
    assert found["disk"].status == "fail"
    assert str(file) in found["disk"].detail
    assert "o_direct" not in found


def test_direct_io_that_does_not_work_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_direct_io", lambda place: Probe(False, f"no, in {place}"))
    row = rows(store=str(tmp_path))["o_direct"]
    assert row.status == "warn"
    assert row.detail.startswith(f"no, in {tmp_path};"), "the scratch directory is not named"


def test_no_queue_for_reads_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(doctor, "probe_direct_io", lambda place: Probe(True, "probed"))
    monkeypatch.setattr(doctor, "ReadQueue", refused)
    row = rows(store=str(tmp_path))["read_queue"]
    assert row.status == "warn"
    assert "not implemented; scattered pages are read one by one" in row.detail


def test_gpu_without_a_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_driver", lambda: "580.1")
    row = doctor.gpu()
    assert row.status == "warn"
    assert "580.1" in row.detail
    monkeypatch.setattr(doctor, "_driver", lambda: None)
    assert doctor.gpu().status == "ok"
    assert "the CPU is used" in doctor.gpu().detail


def test_gpu_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    row = doctor.gpu()
    assert row.status == "fail"
    assert "out of memory" in row.detail


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert rows(store=str(tmp_path))["disk"].status == "fail"
