"""Settings: defaults, checks, the order of sources, and where each value came from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tierkv import codecs
from tierkv.codec_names import CODECS
from tierkv.config import Config, GenerateConfig, converted_dir, load_settings
from tierkv.errors import ConfigError

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults() -> None:
    config = Config()
    assert (config.gpu_budget, config.cpu_budget, config.disk_budget) == (
        2 << 30,
        8 << 30,
        64 << 30,
    )
    assert config.store is None
    assert config.page_tokens == 32
    assert GenerateConfig().temperature == 0


def test_sizes_are_parsed_and_the_object_is_frozen() -> None:
    config = Config.from_kwargs(gpu_budget="48MiB", disk_floor=7)
    assert (config.gpu_budget, config.disk_floor) == (48 << 20, 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.gpu_budget = 1  # type: ignore[misc]


def test_store_may_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config.from_kwargs(store=tmp_path).store == str(tmp_path)
    assert Config.from_kwargs(store="~/kv").store == str(tmp_path / "kv")


def test_no_setting_is_called_cache() -> None:
    """transformers 5.24 uses that keyword itself."""
    for kind in (Config, GenerateConfig):
        assert "cache" not in {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("gpu_budget", "2 gigs"),
        ("cpu_budget", -5),
        ("page_tokens", 48),
        ("page_tokens", 8),
        ("page_tokens", 512),
        ("page_tokens", "32"),
        ("prefill_chunk", -1),
        ("io_threads", 0),
        ("store", ""),
        ("store", 5),
    ],
)
def test_bad_tier_settings_name_the_knob_and_echo_the_value(setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_kwargs(**{setting: value})
    assert str(caught.value).startswith(setting)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("seed", -1),
        ("chat", "yes"),
        ("model", ""),
        ("dtype", "int3"),
    ],
)
def test_bad_generate_settings(setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerateConfig(**{setting: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(setting)
    assert str(value) in str(caught.value)


def test_unknown_keyword_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'gpu_bugdet' in wrap.*'gpu_budget'"):
        Config.from_kwargs(gpu_bugdet="1GiB")
    with pytest.raises(ConfigError, match="known keys: gpu_budget, "):
        Config.from_kwargs(zzz=1)


def test_unknown_key_in_a_file_has_a_suggestion(tmp_path: Path) -> None:
    file = write(tmp_path / "small.yaml", "gpu_bugdet: 1GiB\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(file, {}, {})
    assert str(caught.value) == (f"unknown key 'gpu_bugdet' in {file}; did you mean 'gpu_budget'?")


def test_order_of_sources_and_their_origins(tmp_path: Path) -> None:
    file = write(
        tmp_path / "x.yaml", "gpu_budget: 1GiB\ncpu_budget: 2GiB\nstore: a\nmodel: m\nseed: 1\n"
    )
    environ = {"TIERKV_STORE": "b", "TIERKV_MODEL": "", "TIERKV_GPU_BUDGET": "9GiB"}
    settings = load_settings(file, {"cpu_budget": "3GiB", "chat": False}, environ)
    found = {row.name: (row.value, row.origin) for row in settings.rows()}
    assert found["disk_budget"] == (64 << 30, "default")
    assert found["gpu_budget"] == (1 << 30, str(file)), "variables hold paths only"
    assert found["cpu_budget"] == (3 << 30, "--cpu-budget")
    assert found["store"] == ("b", "TIERKV_STORE")
    assert found["model"] == ("m", str(file)), "an empty variable counts as unset"
    assert found["chat"] == (False, "--no-chat")
    assert (settings.tiers.store, settings.run.seed) == ("b", 1)
    assert load_settings(file, {"store": "c"}, environ).tiers.store == "c"


def test_bad_value_says_where_it_came_from(tmp_path: Path) -> None:
    file = write(tmp_path / "x.yaml", "page_tokens: 48\n")
    with pytest.raises(ConfigError, match=r"page_tokens must .* got 48 \(from .*x.yaml\)"):
        load_settings(file, {}, {})
    with pytest.raises(ConfigError, match=r"gpu_budget must .* 'x' \(from --gpu-budget\)"):
        load_settings(None, {"gpu_budget": "x"}, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n- b\n", "got a list"), ("a: [1", "is not YAML"), ("gpu_budget: {a: 1}", "gpu_budget")],
)
def test_files_that_are_no_settings(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(write(tmp_path / "x.yaml", text), {}, {})


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.yaml: No such file"):
        load_settings(tmp_path / "nowhere.yaml", {}, {})
    assert load_settings(write(tmp_path / "x.yaml", "# nothing\n"), {}, {}).tiers == Config()


def test_place_of_converted_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert converted_dir({})[1:] == (tmp_path / ".cache" / "tierkv", "default")
    assert converted_dir({"TIERKV_CACHE_DIR": "/x"})[1:] == (Path("/x"), "TIERKV_CACHE_DIR")


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_shipped_file_loads(file: Path) -> None:
    settings = load_settings(file, {}, {})
    assert str(file) in settings.origins.values()


def test_files_are_shipped() -> None:
    assert len(CONFIGS) >= 3


def test_codecs_are_those_there_are() -> None:
    assert list(codecs.CODECS) == list(CODECS)


@pytest.mark.parametrize(
    ("value", "kept", "warm"),
    [
        ("raw", "raw", "raw"),
        ("int8", "hot=raw,warm=int8,cold=int8", "int8"),
        ("warm=int4", "hot=raw,warm=int4,cold=int4", "int4"),
        ({"hot": "raw", "warm": "fp8", "cold": "fp8"}, "hot=raw,warm=fp8,cold=fp8", "fp8"),
        ({"warm": "raw"}, "raw", "raw"),
        ("hot=int8", "hot=int8,warm=int8,cold=int8", "int8"),
        ("raw+zstd", "hot=raw,warm=raw,cold=raw+zstd", "raw"),
        ({"cold": "raw+zstd:3"}, "hot=raw,warm=raw,cold=raw+zstd:3", "raw"),
    ],
)
def test_codec(value: object, kept: str, warm: str) -> None:
    config = Config.from_kwargs(codec=value)
    assert config.codec == kept and config.codecs.warm == warm
    assert Config.from_kwargs(codec=config.codec) == config


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"warm": "int3"}, r"codec: warm must be one of raw, int8, .*, got 'int3'"),
        (8, "got 8"),
        ({"warm": ["int8"]}, "got"),
        ("warn=int8", "hot, warm and cold, got 'warn'"),
        ({"hot": "int8", "warm": "raw"}, "codec: hot='int8' needs warm='int8' .* got warm='raw'"),
        ("raw+zstd:20", "cold must be one of .* or raw.zstd, got 'raw.zstd:20'"),
        ({"warm": "raw+zstd"}, "warm must be one of .*'raw.zstd'"),
        ({"warm": "int8", "cold": "raw+zstd"}, "cold must be 'int8' like warm .* got 'raw.zstd'"),
        ("int8+zstd", "got 'int8.zstd'"),
        ({"warm": "int8", "cold": "int4"}, "codec: cold must be 'int8' like warm .* got 'int4'"),
    ],
)
def test_bad_codecs(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_kwargs(codec=value)
