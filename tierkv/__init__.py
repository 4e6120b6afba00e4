"""Tiered KV cache for Hugging Face models: GPU memory, pinned host memory, disk.

Importing this package starts nothing and loads nothing heavy: each public name is imported when
it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierkv import errors as errors
    from tierkv.api import TieredModel as TieredModel
    from tierkv.api import prefill as prefill
    from tierkv.api import wrap as wrap
    from tierkv.config import Config as Config

__version__ = "0.1.0"

_HOMES = {
    "Config": "tierkv.config",
    "TieredModel": "tierkv.api",
    "prefill": "tierkv.api",
    "wrap": "tierkv.api",
}

__all__ = ["Config", "TieredModel", "__version__", "errors", "prefill", "wrap"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module at first use (PEP 562)."""
    if name == "errors":
        return importlib.import_module("tierkv.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'tierkv' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
