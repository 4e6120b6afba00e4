"""``tierkv bench`` from flags to JSON, on a tiny model without a GPU. No time is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tierkv.bench.summary import OFFLOADED, STOCK, TIERKV
from tierkv.cli import main
from tierkv.cli_bench import contexts
from tierkv.errors import ConfigError

Bench = Callable[..., tuple[int, str, str]]
FLAGS = ("--quick", "--device", "cpu", "--steps", "4")


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run ``tierkv bench``; returns (exit code, stdout, stderr)."""

    def run(*flags: str) -> tuple[int, str, str]:
        code = main(["bench", *FLAGS, *flags])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def report(result: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = result
    assert code == 0, err
    loaded: dict[str, Any] = json.loads(out.splitlines()[-1])
    return loaded


def test_smoke(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "out" / "report.json"
    result = bench("--shape", "tiny:1K,2K", "--hot", "1/8,1", "--prefill", "1K",
                   "--json", str(file), "--commit", "abc123")  # fmt: skip
    found = report(result)
    ours = [row for row in found["rows"] if row["system"] == TIERKV]
    assert [(row["tokens"], row["hot_share"]) for row in ours] == [
        (1024, 0.125), (1024, 1.0), (2048, 0.125), (2048, 1.0)
    ]  # fmt: skip
    for row in ours:
        streamed = row["bytes_per_token"]["warm_to_hot"]
        assert row["hot_bytes"] + row["warm_bytes"] >= row["kv_bytes"]
        assert row["hot_bytes"] <= row["gpu_budget"]
        if row["hot_share"] == 1:
            assert streamed == row["warm_bytes"] == 0
        else:
            assert 0.8 * row["kv_bytes"] < streamed <= row["kv_bytes"]
            assert row["gpu_budget"] == row["kv_bytes"] // 8
        assert row["exact"]
        assert row["codec"] == "raw"
        assert (row["prefill_seconds"] is not None) == (row["tokens"] == 1024)
        assert row["speedup"][STOCK] > 0
        assert row["peak_host_bytes"] > 1 << 20
    assert sum(row["system"] == STOCK for row in found["rows"]) == 2
    assert {row["system"] for row in found["skipped"]} == {OFFLOADED}
    assert found["checks"][0]["ok"]
    assert found["machine"]["commit"] == "abc123"
    for name in ("gpu", "cpus", "torch", "transformers", "command"):
        assert found["machine"][name] is not None
    for text in ("measured ceiling: host to device", "random weights", "tierkv 1/8 hot",
                 "exact raw", "skipped tiny 1024"):  # fmt: skip
        assert text in result[1]
    assert "tiny 2K tierkv all hot: decode" in result[2]
    written = json.loads(file.read_text())
    assert written["machine"] == found["machine"]
    assert len(written["rows"]) == len(found["rows"])
    again = report(bench("--report", str(file)))
    assert again["rows"] == found["rows"]
    assert again["seconds"] == found["seconds"]


def test_three_tiers(bench: Bench, tmp_path: Path) -> None:
    found = report(bench("--shape", "tiny:2K", "--cpu-budget", "768KiB", "--store", str(tmp_path),
                         "--without", "transformers", "--without", "offloaded"))  # fmt: skip
    (row,) = found["rows"]
    assert row["cold_bytes"] > 0
    assert row["bytes_per_token"]["cold_to_warm"] > 0
    assert row["warm_bytes"] <= row["cpu_budget"] == 768 << 10
    assert found["ceiling"]["disk_read"] > 0
    assert found["skipped"] == []
    assert list(tmp_path.iterdir()) == [], "nothing is left in the store's directory"


def test_what_does_not_fit_is_skipped_with_the_reason(bench: Bench) -> None:
    found = report(bench("--shape", "tiny:2K", "--cpu-budget", "64KiB", "--without", "offloaded"))
    assert [row["system"] for row in found["rows"]] == [STOCK]
    (skipped,) = found["skipped"]
    assert "raise cpu_budget" in skipped["reason"]


def test_pictures_and_config_file(bench: Bench, tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    config = tiny_model_dir / "config.json"
    result = bench("--shape", str(config), "--tokens", "1K", "--plots", str(tmp_path / "p"))
    assert report(result)["rows"][0]["layers"] == 2
    assert (tmp_path / "p" / "ms_per_token.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shape", "gpt-9"], "'gpt-9' is none of"),
        (["--shape", "tiny:12Q"], "got '12Q'"),
        (["--shape", "tiny", "--hot", "2"], "got '2'"),
        (["--shape", "tiny", "--hot", "1/0"], "got '1/0'"),
        (["--shape", "tiny", "--cpu-budget", "much"], "'much'"),
        (["--report", "nowhere.json"], "nowhere.json is no report"),
    ],
)
def test_errors_are_one_line_and_code_2(bench: Bench, flags: list[str], message: str) -> None:
    code, out, err = bench(*flags)
    assert (code, out) == (2, "")
    assert message in err
    assert err.splitlines()[-1].startswith("tierkv: error: ")


def test_wrong_outputs_are_never_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierkv.bench import workload

    real = workload.append

    def wrong(cache: Any, layer: int, k: Any, v: Any) -> None:
        real(cache, layer, k, v.roll(1, dims=2))

    monkeypatch.setattr(workload, "append", wrong)
    code, out, err = bench("--shape", "tiny:1K")
    assert (code, out) == (2, "")
    assert "nothing was timed" in err


def test_contexts() -> None:
    assert contexts("128K,1M,4096") == (131072, 1048576, 4096)
    with pytest.raises(ConfigError):
        contexts("0K")


def test_the_script_is_the_command() -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "offload.py"), "--help"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(script, capture_output=True, text=True, env=paths, check=True)
    assert "usage: tierkv bench" in done.stdout


def test_codecs_below_hot_and_also_in_hot(bench: Bench) -> None:
    """Within one gpu_budget, encoded hot pages are more, and less crosses the link."""
    rows = report(bench("--shape", "tiny:1K", "--hot", "1/2", "--codec", "int8,hot=int8"))["rows"]
    below, above = (row for row in rows if row["system"] == TIERKV)
    assert [row["codec"] for row in (below, above)] == ["int8", "hot=int8"]
    assert below["gpu_budget"] == above["gpu_budget"] >= above["hot_bytes"]
    assert above["bytes_per_token"]["warm_to_hot"] < 0.8 * below["bytes_per_token"]["warm_to_hot"]
    assert above["hot_bytes"] + above["warm_bytes"] < 0.6 * above["kv_bytes"]
