"""The command line, end to end on a tiny model: what it prints, where, and how it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tierkv
from tests.conftest import ROOT
from tierkv import api
from tierkv.cli import main
from tierkv.cli_generate import encode
from tierkv.cli_stream import Run, StopFlag, TokenStream
from tierkv.tiers.cold import ColdStore

TEXT = "The bell rings when the wind is against the stream. " * 8

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run ``tierkv generate`` on the tiny model; returns (exit code, stdout, stderr)."""

    def run(*flags: str, new: int = 12) -> tuple[int, str, str]:
        argv = ["generate", "--model", str(tiny_model_dir), "--device", "cpu", *flags]
        code = main([*argv, "--max-new-tokens", str(new)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def report(result: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = result
    assert code == 0, err
    assert out.count("\n") == 1, "stdout holds one line"
    loaded: dict[str, Any] = json.loads(out)
    return loaded


def test_text_on_stdout_statistics_on_stderr(cli: Cli) -> None:
    expected = report(cli("--prompt", TEXT, "--json"))["text"]
    code, out, err = cli("--prompt", TEXT)
    assert code == 0
    assert out.rstrip("\n") == expected.rstrip("\n")
    for label in ("prompt tokens", "new tokens", "time to first token", "tokens/s", "ms/token",
                  "hot", "warm", "cold", "hits", "late arrivals", "stalled on pages",
                  "moved hot to warm", "peak host memory", "off (no --store)"):  # fmt: skip
        assert label in err
    assert "prefill ━" not in err, "no progress bar when stderr is no terminal"


def test_json(cli: Cli) -> None:
    result = report(cli("--prompt", TEXT, "--json", "--gpu-budget", "64MiB"))
    assert result["new_tokens"] == len(result["token_ids"]) == 12
    assert result["finish"] == "length"
    assert result["prompt_tokens"] > len(TEXT)
    assert result["timings"]["ttft_seconds"] > 0
    assert result["timings"]["ms_per_token"] > 0
    assert result["timings"]["prefill_tokens_per_second"] > 0
    assert result["peak_memory"]["host_bytes"] > 1 << 20
    assert result["stats"]["tiers"]["hot"]["pages"] > 0
    assert result["config"]["gpu_budget"] == {"value": 64 << 20, "origin": "--gpu-budget"}
    assert result["config"]["cpu_budget"]["origin"] == "default"


def test_tokens_equal_those_of_transformers(cli: Cli, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Greedy, through three tiers, against `DynamicCache` with stock attention."""
    file = tmp_path / "tiers.yaml"
    file.write_text(
        f"gpu_budget: 128KiB\ncpu_budget: 128KiB\nstore: {tmp_path / 'store'}\n"
        "disk_budget: 1GiB\ndisk_floor: 1MiB\npage_tokens: 16\nprefill_chunk: 64\n"
    )
    result = report(cli("--prompt", TEXT * 3, "--config", str(file), "--json", new=24))
    assert result["stats"]["moved_bytes"]["cold_to_warm"] > 0, "the cold tier was not used"
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    ids = encode(tokenizer, (TEXT * 3).strip(), chat=True)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    assert result["token_ids"] == expected[0, ids.shape[1] :].tolist()


def test_document_then_prompt(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "document.txt"
    document.write_text("Über den Hafen.\n\n")
    from_file = report(cli("--prompt-file", str(document), "--prompt", "Who?", "--json"))
    joined = report(cli("--prompt", "Über den Hafen.\n\nWho?", "--json"))
    assert from_file["token_ids"] == joined["token_ids"]
    assert from_file["prompt_tokens"] == joined["prompt_tokens"]
    stdin = io.TextIOWrapper(io.BytesIO("Über den Hafen.".encode()), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    from_stdin = report(cli("--prompt-file", "-", "--prompt", "Who?", "--json"))
    assert from_stdin["token_ids"] == joined["token_ids"]


def test_chat_template_unless_told_otherwise(cli: Cli) -> None:
    plain = report(cli("--prompt", "Hello", "--no-chat", "--json"))
    chat = report(cli("--prompt", "Hello", "--json"))
    assert plain["prompt_tokens"] == 5
    assert chat["prompt_tokens"] > 5
    assert plain["config"]["chat"] == {"value": False, "origin": "--no-chat"}


def test_sampling_is_seeded(cli: Cli) -> None:
    def tokens(*flags: str) -> list[int]:
        result = report(cli("--prompt", TEXT, "--json", "--temperature", "1.5", *flags))
        ids: list[int] = result["token_ids"]
        return ids

    assert tokens("--seed", "1") == tokens("--seed", "1")
    assert tokens("--seed", "1") != tokens("--seed", "2")


def test_no_thread_stays(cli: Cli, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    assert cli("--prompt", TEXT, "--store", str(tmp_path / "s"), "--disk-floor", "1MiB")[0] == 0
    assert set(threading.enumerate()) == before


def test_warns_beyond_the_models_length(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = cli("--prompt", "Hello", "--no-chat")
    assert "warning" not in err
    real = AutoModelForCausalLM.from_pretrained

    def short(*args: Any, **kwargs: Any) -> Any:
        model = real(*args, **kwargs)
        model.config.max_position_embeddings = 10
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", short)
    code, _, err = cli("--prompt", "Hello", "--no-chat")
    assert code == 0
    assert "up to 17 tokens, but the model was made for 10" in err


# -- errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the prompt is empty"),
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt-file", "/nowhere/x.txt"], "/nowhere/x.txt: No such file"),
        (["--prompt", "x", "--gpu-budget", "2 gigs"], "'2 gigs' (from --gpu-budget)"),
        (["--prompt", "x", "--gpu-budget", "1"], "gpu_budget"),
        (["--prompt", "x", "--config", "/nowhere.yaml"], "cannot read /nowhere.yaml"),
        (["--prompt", "x", "--model", "/nowhere"], "no directory '/nowhere'"),
        (["--prompt", "x", "--device", "cuda:99"], "cuda:99"),
    ],
)
def test_errors_are_one_line_and_code_2(cli: Cli, flags: list[str], message: str) -> None:
    code, out, err = cli(*flags)
    assert (code, out) == (2, "")
    assert err.startswith("tierkv: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "x"]) == 2
    assert "--model DIR, --model smollm2 or TIERKV_MODEL" in capsys.readouterr().err


def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_DEBUG", "1")
    with pytest.raises(tierkv.errors.ConfigError):
        cli("--prompt", "x", "--model", "/nowhere")


def test_text_that_is_not_utf8(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_bytes(b"\xff\xfe\x00")
    code, _, err = cli("--prompt-file", str(file))
    assert code == 2
    assert "is not UTF-8" in err


# -- Ctrl-C and closed pipes ---------------------------------------------------------------


def interrupt_at(monkeypatch: pytest.MonkeyPatch, *, prefill: bool, token: int = 0) -> None:
    """Send SIGINT after the first prefill chunk, or when a token is put out."""
    if prefill:
        real = api.TieredModel.generate

        def generate(self: Any, *args: Any, on_prefill: Any, **kwargs: Any) -> Any:
            def hook(done: int, total: int) -> None:
                os.kill(os.getpid(), signal.SIGINT)
                on_prefill(done, total)

            return real(self, *args, on_prefill=hook, **kwargs)

        monkeypatch.setattr(api.TieredModel, "generate", generate)
        return
    real_put = TokenStream.put

    def put(self: TokenStream, tokens: torch.Tensor) -> None:
        real_put(self, tokens)
        if len(self._run.token_ids) == token:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TokenStream, "put", put)


def test_ctrl_c_while_tokens_come(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = report(cli("--prompt", TEXT, "--json"))
    interrupt_at(monkeypatch, prefill=False, token=4)
    former = signal.getsignal(signal.SIGINT)
    code, out, err = cli("--prompt", TEXT, "--json")
    result = json.loads(out)
    assert code == 130
    assert result["finish"] == "interrupted"
    assert result["token_ids"] == expected["token_ids"][: result["new_tokens"]]
    assert 4 <= result["new_tokens"] <= 5
    assert signal.getsignal(signal.SIGINT) is former
    code, out, err = cli("--prompt", TEXT)
    assert code == 130
    assert "(interrupted)" in err, "the statistics are still printed"


def test_ctrl_c_during_prefill(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    interrupt_at(monkeypatch, prefill=True)
    before = set(threading.enumerate())
    store = ["--store", str(tmp_path / "store"), "--disk-floor", "1MiB"]
    code, out, err = cli("--prompt", TEXT, "--prefill-chunk", "64", *store)
    assert (code, out) == (130, "")
    assert "0 (interrupted)" in err
    assert set(threading.enumerate()) == before


def test_second_ctrl_c_aborts(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real_put = TokenStream.put

    def put(self: TokenStream, tokens: torch.Tensor) -> None:
        real_put(self, tokens)
        if len(self._run.token_ids) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TokenStream, "put", put)
    before = set(threading.enumerate())
    code, _, err = cli("--prompt", TEXT)
    assert code == 130
    assert err.endswith("tierkv: interrupted\n")
    assert set(threading.enumerate()) == before


def start(model: Path, *flags: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tierkv.cli", "generate", "--model", str(model), "--device", "cpu",
         "--prompt", TEXT * 4, "--no-chat", "--max-new-tokens", "100000", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip


def test_ctrl_c_in_a_real_process_leaves_a_whole_store(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    flags = ["--page-tokens", "16", "--gpu-budget", "128KiB", "--cpu-budget", "128KiB",
             "--store", str(tmp_path), "--disk-budget", "1GiB", "--disk-floor", "1MiB"]  # fmt: skip
    process = start(tiny_model_dir, *flags)
    assert process.stdout is not None
    first = process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert first
    assert out.endswith(b"\n")
    assert b"(interrupted)" in err
    assert b"Traceback" not in err
    with ColdStore(
        tmp_path, frame_bytes=4096, disk_budget=1 << 30, free_floor=1 << 20
    ) as store:  # the owner lock is free again, and every record is whole
        assert store.verify().bad == []


def test_reader_that_goes_away(tiny_model_dir: Path) -> None:
    process = start(tiny_model_dir)
    assert process.stdout is not None
    process.stdout.read(3)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()


# -- parts ---------------------------------------------------------------------------------


def test_stream_holds_back_half_a_character(tiny_model_dir: Path) -> None:
    """One character may be several tokens: no replacement character may reach the reader."""
    tokenizer, out = AutoTokenizer.from_pretrained(tiny_model_dir), io.StringIO()
    text = "Käse, 船 and 🐟!"
    ids, run = tokenizer(text)["input_ids"], Run(prompt_tokens=1)
    stream = TokenStream(tokenizer, run, out)
    stream.put(torch.tensor([[5, 6, 7]]))
    shown = []
    for token in ids:
        stream.put(torch.tensor([token]))
        shown.append(out.getvalue())
    assert all(text.startswith(part) for part in shown)
    assert len(set(shown)) > 10, "text comes as it is made"
    stream.put(torch.tensor(ids[2:3]))  # half a character at the very end
    stream.end()
    assert out.getvalue() == run.text
    assert run.token_ids == [*ids, ids[2]]


def test_stop_flag_is_a_stopping_criterion() -> None:
    flag, ids = StopFlag(), torch.zeros(3, 5, dtype=torch.long)
    assert flag(ids, None).tolist() == [False] * 3
    flag.stopped = True
    assert flag(ids, None).tolist() == [True] * 3


# -- the other commands --------------------------------------------------------------------


def test_config_show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERKV_STORE", "/kv")
    monkeypatch.setenv("TIERKV_CACHE_DIR", "/models")
    demo = str(ROOT / "configs" / "demo.yaml")
    assert main(["config", "show", "--config", demo, "--top-p", "0.5", "--no-chat"]) == 0
    lines = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "_" in line
    )
    assert lines["gpu_budget"].split("  ")[0] == "48 MiB"
    assert lines["gpu_budget"].endswith(demo)
    assert lines["top_p"].split() == ["0.5", "--top-p"]
    assert lines["io_threads"].split() == ["8", "default"]


def test_config_show_tells_about_paths_and_mistakes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIERKV_STORE", "/kv")
    assert main(["config", "show"]) == 0
    assert "TIERKV_STORE" in capsys.readouterr().out
    file = tmp_path / "x.yaml"
    file.write_text("pagetokens: 32\n")
    assert main(["config", "show", "--config", str(file)]) == 2
    assert "did you mean 'page_tokens'?" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["frobnicate"], ["generate", "--seed", "x"], ["config"]])
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: tierkv" in capsys.readouterr().err


def test_help_shows_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("default: 2 GiB", "default: 32", "--no-chat", "default: 256", "default: auto"):
        assert text in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"tierkv {tierkv.__version__}\n"


def test_import_is_light() -> None:
    """``import tierkv`` loads nothing heavy, starts no thread and touches no GPU."""
    code = (
        "import sys, threading, tierkv\n"
        "heavy = {'torch', 'transformers', 'numpy', 'lmdb', 'cupy', 'rich', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), threading.active_count())\n"
        "from tierkv import Config, TieredModel, errors, prefill, wrap\n"
        "assert TieredModel and errors.TierKVError and prefill and wrap and Config()\n"
        "import torch\n"
        "print('cupy' in sys.modules, torch.cuda.is_initialized(), threading.active_count())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.stdout == "[] 1\nFalse False 1\n", done.stderr


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'warp'"):
        tierkv.warp  # noqa: B018
    assert "wrap" in dir(tierkv)
