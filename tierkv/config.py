"""Settings: what they are, their defaults, and where each effective value came from.

`Config` is what `tierkv.wrap` takes, `GenerateConfig` what one run of ``tierkv generate`` adds.
A YAML file is flat and may hold keys of both. Later sources win: defaults, then the file, then
the environment (it only locates things), then command-line flags.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tierkv.codec_names import TierCodecs, parse_codecs
from tierkv.errors import ConfigError
from tierkv.units import format_bytes, parse_bytes

SIZES = ("gpu_budget", "cpu_budget", "disk_budget", "disk_floor", "disk_writes_per_day")
"""Settings in bytes; they may be given as text such as ``"2GiB"``."""

PATH_VARIABLES = {"TIERKV_STORE": "store", "TIERKV_MODEL": "model"}
"""Environment variable -> the setting it locates."""

CONVERTED_VARIABLE = "TIERKV_CACHE_DIR"
"""Environment variable that says where converted models are kept."""

ATTENTIONS = ("exact", "selective")
COLD_MISSES = ("wait", "skip")
SELECTORS = ("cuboid", "cuboid8", "bound", "mean", "window", "keys2", "oracle")
DTYPES = ("auto", "bfloat16", "float16", "float32")


def _check_int(knob: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{knob} must be a whole number from {low} to {high}, got {value!r}")


def _check_number(knob: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{knob} must be a number, got {value!r}")


def _check_text(knob: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{knob} must be a text that is not empty, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """What the three tiers may use. Immutable; checked on construction.

    Attributes:
        gpu_budget: bytes of KV pages and their staging buffers on the compute device.
        cpu_budget: bytes of KV pages in (pinned) host memory.
        disk_budget: bytes that the store's files may take on disk.
        store: directory of the cold tier, created if needed; None for no cold tier.
        page_tokens: tokens per page, a power of two from 16 to 256.
        prefill_chunk: prompt tokens per forward; 0 chooses automatically.
        disk_writes_per_day: bytes of pages that may be written to the store in a day (UTC), all
            processes together, because SSDs wear; None for no limit. Saving and spilling beyond it
            is refused; what is stored stays readable.
        disk_floor: bytes of free disk space that are never used.
        io_threads: threads that read pages from disk.
        attention: ``exact`` reads every page at every step; ``selective`` reads, when one token
            is decoded, the pages that matter most to each KV head (approximate).
        selector: how pages are ranked: ``cuboid``, ``cuboid8`` (the same in 8 bits: half the
            memory for summaries), ``bound``, ``mean``, ``window``, ``keys2`` (nearly as good as the
            last) and, on a CPU only, ``oracle``.
        token_budget: tokens that a KV head chooses at most, sinks and recent ones left out.
        mass: stop choosing at this share of the estimated attention; None fills the budget.
        sink_tokens, recent_tokens: first and last tokens, which are always read.
        salt: pages saved under one text are not found under another, nor by the prefix cache.
        dense_layers: first tiered layers, which stay exact.
        on_cold_miss: ``wait`` for chosen pages that are on disk, or ``skip`` them: leave them out
            of the step and count them.
        reuse: size of the reuse cache on the GPU, in token budgets.
        max_context: tokens that selective attention keeps summaries for; 0 takes the model's own
            limit.
        codec: how pages are stored in warm memory and on disk: ``raw``, ``int8``,
            ``int8-channel``, ``int4``, ``int4-importance`` or ``fp8``, all but ``raw`` approximate.
            Also ``warm=int8,cold=int8`` or a mapping; kept as a text. ``hot=int8`` stores them so
            on the device, too, and then in all tiers: `gpu_budget` holds nearly twice the pages,
            which are decoded for every step (exact attention only). ``raw+zstd`` keeps pages raw
            in memory and packs them on disk, without loss, unless the disk is found faster than
            that when the store is first opened so; ``raw+zstd:1``, with a level of zstd, packs
            always.
        residual_tokens: last tokens of each sequence that stay as they were computed where pages
            are encoded: their pages stay hot and raw, which takes as many frames of every exact
            layer. In layers that select, `recent_tokens` stay so.
        max_batch: sequences that selective attention decodes together at most, all of one length
            and without padding; each takes as much of `gpu_budget` as the first.
        cuda_graph: whether `generate` replays decode steps as a CUDA graph. None: where it can, and
            where the first replay gives the logits of the model's own step; True: where it can,
            without comparing, and with a warning where it cannot.
        look_ahead: layers ahead for which selective attention foresees lookups in such steps, so
            that pages are copied before they are asked for; 0 for none. On an H200 scoring
            twice cost what it saved; slower links were not measured.
        compile: run the model's own layers through `torch.compile` in such steps; takes up to a
            minute once.

    Sizes may be given as text such as ``"2GiB"``; they are kept as a number of bytes.

    Raises:
        ConfigError: a value is malformed or out of range; names the setting and the value.
    """

    gpu_budget: int = parse_bytes("2GiB")
    cpu_budget: int = parse_bytes("8GiB")
    disk_budget: int = parse_bytes("64GiB")
    store: str | None = None
    page_tokens: int = 32
    prefill_chunk: int = 0
    disk_floor: int = parse_bytes("1GiB")
    disk_writes_per_day: int | None = None
    io_threads: int = 8
    attention: str = "exact"
    selector: str = "cuboid"
    token_budget: int = 4096
    mass: float | None = None
    sink_tokens: int = 64
    recent_tokens: int = 64
    dense_layers: int = 2
    on_cold_miss: str = "wait"
    reuse: float = 2.0
    max_context: int = 0
    max_batch: int = 1
    codec: str = "raw"
    residual_tokens: int = 0
    salt: str = ""
    cuda_graph: bool | None = None
    look_ahead: int = 0
    compile: bool = False
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            if name == "disk_writes_per_day" and self.disk_writes_per_day is None:
                continue
            object.__setattr__(self, name, parse_bytes(getattr(self, name), knob=name))
        if self.store is not None:
            store = os.fspath(self.store) if isinstance(self.store, os.PathLike) else self.store
            _check_text("store", store)
            object.__setattr__(self, "store", os.path.expanduser(store))
        tokens = self.page_tokens
        _check_int("page_tokens", tokens, 16, 256)
        if tokens & (tokens - 1):
            raise ConfigError(f"page_tokens must be a power of two from 16 to 256, got {tokens}")
        _check_int("prefill_chunk", self.prefill_chunk, 0, 1 << 20)
        _check_int("io_threads", self.io_threads, 1, 64)
        choices = {
            "attention": ATTENTIONS, "selector": SELECTORS, "on_cold_miss": COLD_MISSES
        }  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        _check_int("token_budget", self.token_budget, self.page_tokens, 1 << 24)
        for name in ("sink_tokens", "recent_tokens", "residual_tokens", "max_context"):
            _check_int(name, getattr(self, name), 0, 1 << 30)
        _check_int("dense_layers", self.dense_layers, 0, 1 << 16)
        _check_int("max_batch", self.max_batch, 1, 1024)
        codecs = parse_codecs(self.codec)
        plain = ",".join(f"{tier}={name}" for tier, name in codecs._asdict().items())
        object.__setattr__(self, "codec", "raw" if codecs.cold == "raw" else plain)
        if codecs.hot != "raw" and self.attention == "selective":
            raise ConfigError(
                f"codec: hot={codecs.hot} is for attention='exact'; attention='selective' reads "
                f"raw pages on the device: use hot=raw"
            )
        if self.cuda_graph is not None and not isinstance(self.cuda_graph, bool):
            raise ConfigError(f"cuda_graph must be true or false, got {self.cuda_graph!r}")
        if not isinstance(self.salt, str):
            raise ConfigError(f"salt must be a text, got {self.salt!r}")
        for name in ("compile", "prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        _check_int("look_ahead", self.look_ahead, 0, 8)
        _check_number("reuse", self.reuse)
        if self.reuse < 1:
            raise ConfigError(f"reuse must be at least 1, got {self.reuse}")
        if self.mass is not None:
            _check_number("mass", self.mass)
            if not 0 < self.mass <= 1:
                raise ConfigError(f"mass must be above 0 and at most 1, got {self.mass}")

    @property
    def codecs(self) -> TierCodecs:
        """The codec of each tier."""
        return parse_codecs(self.codec)

    @classmethod
    def from_kwargs(cls, **settings: Any) -> Config:
        """Return a `Config` of keyword arguments.

        Raises:
            ConfigError: an unknown name (suggests the nearest known one) or a bad value.
        """
        _check_known(settings, _names(cls), "wrap()")
        return cls(**settings)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """One run of text generation. Immutable; checked on construction.

    Attributes:
        model: directory of a Hugging Face model, or ``smollm2``; None if not given.
        max_new_tokens: tokens to generate at most.
        temperature: 0 for greedy decoding, else the sampling temperature.
        top_p: share of the probability to sample from.
        seed: of the random generator that samples.
        chat: whether to put the prompt into the model's own chat template, if it has one.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: ``auto`` (as the model says), ``bfloat16``, ``float16`` or ``float32``.

    Raises:
        ConfigError: a value is malformed or out of range; names the setting and the value.
    """

    model: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    chat: bool = True
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.model is not None:
            _check_text("model", self.model)
        _check_int("max_new_tokens", self.max_new_tokens, 1, 1 << 24)
        _check_int("seed", self.seed, 0, (1 << 63) - 1)
        _check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise ConfigError(f"temperature must not be negative, got {self.temperature}")
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not isinstance(self.chat, bool):
            raise ConfigError(f"chat must be true or false, got {self.chat!r}")
        _check_text("device", self.device)
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


class Setting(NamedTuple):
    """One effective value and where it came from."""

    name: str
    value: Any
    origin: str

    @property
    def text(self) -> str:
        """The value as a person would write it: ``2 GiB``, ``true``, ``-`` for nothing."""
        if self.value is None:
            return "-"
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return format_bytes(self.value) if self.name in SIZES else str(self.value)


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective settings. `origins` maps each name to ``default``, a file, variable or flag."""

    tiers: Config
    run: GenerateConfig
    origins: Mapping[str, str]

    def rows(self) -> list[Setting]:
        """Return every setting in declaration order."""
        values = asdict(self.tiers) | asdict(self.run)
        return [Setting(name, value, self.origins[name]) for name, value in values.items()]


def load_settings(
    file: str | Path | None, flags: Mapping[str, Any], environ: Mapping[str, str]
) -> Settings:
    """Merge all sources of settings and remember which one each value came from.

    Args:
        file: YAML file, or None.
        flags: settings given on the command line, by name.
        environ: environment variables; an empty one counts as unset.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is bad; the message
            says where the value came from.
    """
    known = [*_names(Config), *_names(GenerateConfig)]
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")
    if file is not None:
        values = read_yaml(file)
        _check_known(values, known, str(file))
        origins.update(dict.fromkeys(values, str(file)))
    for variable, name in PATH_VARIABLES.items():
        if environ.get(variable):
            values[name], origins[name] = environ[variable], variable
    _check_known(flags, known, "flags")
    for name, value in flags.items():
        values[name], origins[name] = value, _flag(name, value)
    try:
        tiers = Config(**{name: values[name] for name in _names(Config) if name in values})
        run = GenerateConfig(
            **{name: values[name] for name in _names(GenerateConfig) if name in values}
        )
    except ConfigError as error:
        origin = origins.get(str(error).split()[0], "default")
        if origin == "default":
            raise
        raise ConfigError(f"{error} (from {origin})") from None
    return Settings(tiers, run, origins)


def read_yaml(file: str | Path) -> dict[str, Any]:
    """Return the keys of a flat YAML file; an empty file has none.

    Raises:
        ConfigError: the file cannot be read, or is no YAML mapping.
    """
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold 'key: value' lines, got a {type(content).__name__}")
    return content


def converted_dir(environ: Mapping[str, str]) -> Setting:
    """Return the directory for converted models (a `Path`) and where that choice came from."""
    given = environ.get(CONVERTED_VARIABLE)
    path = Path(given or "~/.cache/tierkv").expanduser()
    return Setting("converted models", path, CONVERTED_VARIABLE if given else "default")


def _names(kind: type[Config] | type[GenerateConfig]) -> list[str]:
    return [field.name for field in fields(kind)]


def _flag(name: str, value: Any) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def _check_known(given: Iterable[Any], known: list[str], where: str) -> None:
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
        raise ConfigError(f"unknown key {key!r} in {where}; {hint}")
