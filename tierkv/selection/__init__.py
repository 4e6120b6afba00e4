"""Selectors: which pages a layer's attention looks up when it does not read them all.

selector = selector("cuboid")
summaries = selector.summarize(keys)                        # once, when pages are sealed
logits = selector.scores(query, summaries, scale)           # at every step
chosen = choose(page_mass(logits, valid), budget_pages, candidates=candidates)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tierkv.errors import ConfigError
from tierkv.selection.base import Selector, page_mass
from tierkv.selection.bound import Bound
from tierkv.selection.choose import Chosen, choose
from tierkv.selection.cuboid import Cuboid
from tierkv.selection.cuboid8 import Cuboid8
from tierkv.selection.keys2 import Keys2
from tierkv.selection.mean import Mean
from tierkv.selection.oracle import Oracle
from tierkv.selection.window import Window

__all__ = ["DEFAULT", "SELECTORS", "Chosen", "Selector", "choose", "page_mass", "selector"]

DEFAULT = "cuboid"
"""The selector that is used when selection is asked for and none is named."""

SELECTORS: Mapping[str, Callable[[int], Selector]] = {
    "cuboid": lambda page_tokens: Cuboid(),
    "cuboid8": lambda page_tokens: Cuboid8(),
    "bound": lambda page_tokens: Bound(),
    "mean": lambda page_tokens: Mean(),
    "window": lambda page_tokens: Window(),
    "keys2": Keys2,
    "oracle": Oracle,
}
"""Name -> what makes that selector for pages of so many tokens."""


def selector(name: str, page_tokens: int = 32) -> Selector:
    """Return the selector of a name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in SELECTORS:
        raise ConfigError(f"selector must be one of {', '.join(SELECTORS)}, got {name!r}")
    return SELECTORS[name](page_tokens)
