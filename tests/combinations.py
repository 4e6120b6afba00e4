"""Which combinations of parameters run: enough of them by default, all with TIERKV_SOAK=1."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

SOAK = os.environ.get("TIERKV_SOAK") == "1"
"""Run every combination, and ten times the random examples."""


def each(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which every value of every axis occurs: as many as the longest axis
    has. Shorter axes start over, so axes of equal length would go in step."""
    if SOAK:
        return list(itertools.product(*axes))
    longest = max(map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(longest)]


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which any two values of different axes meet. Greedy, same each time.

    Three axes of 11, 5 and 4 values have 220 combinations; 55 contain every pair.
    """
    everything = list(itertools.product(*axes))
    if SOAK:
        return everything

    def within(combination: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(combination), 2))

    missing = set().union(*map(within, everything))
    chosen = []
    while missing:
        best = max(everything, key=lambda combination: len(within(combination) & missing))
        chosen.append(best)
        missing -= within(best)
    return chosen


def examples(count: int) -> int:
    """Return how many random examples to try where `count` do for every change."""
    return 10 * count if SOAK else count
