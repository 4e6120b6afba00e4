"""Sizes in bytes and ages in seconds, read from and written for people."""

from __future__ import annotations

import re

from tierkv.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw])\s*")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, *, knob: str = "size") -> int:
    """Return a number of bytes from an integer or a text such as ``"2GiB"`` or ``"500 MB"``.

    Raises:
        ConfigError: the text is no size, or it is negative; names `knob` and the value.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{knob} must be a number of bytes or a text like '2GiB', got {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{knob} must not be negative, got {value}")
        return value
    match = _SIZE.fullmatch(value)
    if not match or match[2].upper() not in _UNITS:
        raise ConfigError(f"{knob} must be a size such as 512MiB, 2GiB or 1TB, got {value!r}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_age(text: str, *, knob: str = "age") -> float:
    """Return seconds from a text such as ``"7d"``, ``"12h"`` or ``"30m"``.

    Raises:
        ConfigError: the text is no age; names `knob` and the value.
    """
    match = _AGE.fullmatch(text)
    if not match:
        raise ConfigError(f"{knob} must be an age such as 45s, 30m, 12h, 7d or 2w, got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(num_bytes: float) -> str:
    """Return `num_bytes` with a binary unit, three significant digits: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1000 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
