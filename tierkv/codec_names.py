"""The setting `codec`: names of codecs, and which tier has which."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tierkv.errors import ConfigError

CODECS = ("raw", "int8", "int8-channel", "int4", "int4-importance", "fp8")
"""How pages may be stored in a tier; `tierkv.codecs` has one file for each."""
_ZSTD = re.compile(r"raw\+zstd(:([1-9]|1[0-9]))?")


class TierCodecs(NamedTuple):
    """The codec of each tier. Pages are encoded once: hot ones are raw or have warm's codec, cold
    ones have warm's too, or are raw ones packed."""

    hot: str
    warm: str
    cold: str

    @property
    def zstd_level(self) -> int | None:
        """The level at which pages are packed on disk; None if they are not."""
        _, packed, level = self.cold.partition("+zstd")
        return int(level.removeprefix(":") or 1) if packed else None

    @property
    def always_zstd(self) -> bool:
        """Whether pages are packed even if the disk is faster: the level is named."""
        return ":" in self.cold


def parse_codecs(value: Any) -> TierCodecs:
    """Return the codecs of ``int8``, of ``warm=raw,cold=raw+zstd``, or of such a mapping.

    One name alone is for warm and cold. Of tiers not named hot has raw pages, and each other one
    what the tier above it has.
    ``raw+zstd`` packs raw pages on disk without loss, if the disk is not faster than that;
    ``raw+zstd:3`` says the level and packs them always.

    Raises:
        ConfigError: names the setting, the value and what is possible.
    """
    tiers: dict[Any, Any]
    if isinstance(value, Mapping):
        tiers = dict(value)
    elif isinstance(value, str) and "=" in value:
        parts = [part.partition("=") for part in value.split(",")]
        tiers = {name.strip(): codec.strip() for name, _, codec in parts}
    else:
        tiers = {"warm": value} if value in CODECS else {"cold": value}
    for tier, name in tiers.items():
        if tier not in TierCodecs._fields:
            raise ConfigError(f"codec: tiers are hot, warm and cold, got {tier!r} in {value!r}")
        if tier == "cold" and isinstance(name, str) and _ZSTD.fullmatch(name):
            continue
        if name not in CODECS:
            more = " or raw+zstd" if tier == "cold" else ""
            raise ConfigError(
                f"codec: {tier} must be one of {', '.join(CODECS)}{more}, got {name!r}"
            )
    hot = tiers.get("hot", "raw")
    warm = tiers.get("warm", hot)
    codecs = TierCodecs(hot, warm, tiers.get("cold", warm))
    if hot not in ("raw", warm):
        raise ConfigError(
            f"codec: hot={hot!r} needs warm={hot!r} (a page is encoded once and moved as it is), "
            f"got warm={warm!r}"
        )
    if codecs.cold != warm and (warm != "raw" or codecs.zstd_level is None):
        raise ConfigError(
            f"codec: cold must be {warm!r} like warm (a page is encoded once and moved as it is; "
            f"raw ones may be 'raw+zstd'), got {codecs.cold!r}"
        )
    return codecs
