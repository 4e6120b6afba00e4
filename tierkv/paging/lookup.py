"""A lookup: the K and V of everything a query may attend to, segment by segment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierkv.paging.directory import Blocks
from tierkv.paging.plan import Plan
from tierkv.tiers.frames import Frames, runs

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager
    from tierkv.paging.sequences import Sequences

MAX_SPANS = 2
"""Resident pages in more separate runs than this are gathered instead of attended run by run."""


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Part of a lookup, all of it before the newest tokens of an append of several.

    Attributes:
        rows: sequences it belongs to.
        k, v: ``[rows, kv_heads, tokens, dim]``, valid until the next segment is asked for.
        positions: page positions in order; the last page may be cut short.
    """

    rows: slice
    k: torch.Tensor
    v: torch.Tensor
    positions: Blocks

    def columns(self, page_tokens: int, device: torch.device) -> torch.Tensor:
        """Return the token position of each key, ``[tokens]``."""
        index = self.positions[:, None] * page_tokens + np.arange(page_tokens)
        return torch.as_tensor(index.reshape(-1)[: self.k.shape[2]], device=device)


@dataclass(frozen=True, eq=False, slots=True)
class Lookup:
    """What attention reads for one append to one layer.

    Attributes:
        past: page positions before the append's tail.
        tails: ``[batch]`` hot frames of the tails.
        tail_tokens: tokens to read there; with one new token it is among them.
        kept_tail: tail tokens that the append moved out of the way, or None.
        new_tokens: tokens appended; attention handles them itself when there are several.
    """

    manager: PageManager
    sequences: Sequences
    layer: int
    past: int
    tails: Frames
    tail_tokens: int
    kept_tail: tuple[torch.Tensor, torch.Tensor] | None
    new_tokens: int

    @property
    def length(self) -> int:
        """Tokens of each sequence, the new ones included."""
        page_tokens = self.manager.geometry.page_tokens
        before = self.past * page_tokens + self.tail_tokens
        return before if self.new_tokens == 1 else before + self.new_tokens

    def segments(self) -> Iterator[Segment]:
        """Yield resident pages and the tail, then streamed pages as they arrive."""
        plan = self.manager.plan(self.sequences, self.layer, self.past)
        yield from self._resident(plan)
        yield from self._streamed(plan)

    def _resident(self, plan: Plan) -> Iterator[Segment]:
        arena = self.manager.hot.arenas[self.layer]
        tokens, batch = arena.page_tokens, self.sequences.batch
        every = slice(0, batch)
        frames, positions, last = plan.frames, plan.positions, tokens
        self.manager.stats.hits_hot += frames.size
        if self.kept_tail is not None:
            yield Segment(every, *self.kept_tail, np.array([self.past]))
        elif self.tail_tokens:
            frames = np.concatenate([frames, self.tails[:, None]], axis=1)
            positions = np.append(positions, self.past)
            last = self.tail_tokens
        if not len(positions):
            return
        if batch == 1:
            spans = runs(frames[0])
            if len(spans) <= MAX_SPANS:
                for start, stop in spans:
                    count = (stop - start) * tokens
                    count -= tokens - last if stop == len(positions) else 0
                    k, v = arena.span(int(frames[0, start]), count)
                    yield Segment(every, k, v, positions[start:stop])
                return
        step = max(1, self.manager.placement.staging_pages // batch)
        for at in range(0, len(positions), step):
            part = frames[:, at : at + step]
            key = (at, part.shape[1], int(part[0, -1]))
            if key not in plan.gathers:
                plan.gathers[key] = torch.as_tensor(part, device=arena.k.device)
            k, v = arena.gather(plan.gathers[key])
            if at + step >= len(positions) and last < tokens:
                k, v = k[:, :, : last - tokens], v[:, :, : last - tokens]
            yield Segment(every, k, v, positions[at : at + step])

    def _streamed(self, plan: Plan) -> Iterator[Segment]:
        for staged, arena in self.manager.lookahead.stream(self.sequences, self.layer, plan):
            if staged.in_order:
                k, v = arena.span(0, len(staged.positions) * arena.page_tokens)
            else:
                k, v = arena.gather(staged.slots)
            yield Segment(staged.rows, k, v, staged.positions)
