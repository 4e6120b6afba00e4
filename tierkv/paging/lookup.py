"""A lookup: the K and V of everything a query may attend to, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierkv.paging.directory import Blocks
from tierkv.paging.plan import Plan
from tierkv.tiers.arena import Arena
from tierkv.tiers.frames import Frames, runs

if TYPE_CHECKING:
    from tierkv.paging.manager import PageManager
    from tierkv.paging.sequences import Sequences

MAX_SPANS = 2
"""Resident pages of one sequence in more separate runs than this are read through a table."""


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Part of a lookup as plain tensors, all of it before the newest tokens of several.

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
class Part:
    """Part of a lookup as frames of one arena, valid until the next part is asked for.

    Attributes:
        rows: sequences it belongs to.
        table: ``[rows, pages]`` int64 frames on the compute device; None for one sequence whose
            frames count up from `first`.
        positions: ``[pages]`` page positions in order.
        tokens: tokens to read; the last page may be cut short.
    """

    rows: slice
    arena: Arena
    table: torch.Tensor | None
    first: int
    positions: Blocks
    tokens: int

    def dense(self) -> Segment:
        """Return K and V as plain tensors: a view of a run, or gathered by the table."""
        if self.table is None:
            k, v = self.arena.span(self.first, self.tokens)
        else:
            k, v = self.arena.gather(self.table)
            k, v = k[:, :, : self.tokens], v[:, :, : self.tokens]
        return Segment(self.rows, k, v, self.positions)


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
        """Yield resident pages and the tail, then streamed pages as they arrive, as tensors.

        What has to be gathered comes in pieces of half a staging buffer.
        """
        if self.kept_tail is not None:
            every = slice(0, self.sequences.batch)
            yield Segment(every, *self.kept_tail, np.array([self.past]))
        step = max(1, self.manager.placement.staging_pages // 2 // self.sequences.batch)
        for part in self.parts(step):
            yield part.dense()

    def parts(self, table_pages: int | None = None) -> Iterator[Part]:
        """Yield resident pages and the tail (unless kept), then streamed pages as they arrive.

        Args:
            table_pages: page positions that one table holds at most; None for any number.
        """
        plan = self.manager.plan(self.sequences, self.layer, self.past)
        yield from self._resident(plan, table_pages)
        state, lookahead = self.manager.selective, self.manager.lookahead
        cycle = state.spec.dense_layers if state is not None and self.new_tokens == 1 else None
        for staged, arena in lookahead.stream(self.sequences, self.layer, plan, cycle):
            tokens = len(staged.positions) * arena.page_tokens
            table = None if staged.in_order else staged.slots
            yield Part(staged.rows, arena, table, 0, staged.positions, tokens)

    def _resident(self, plan: Plan, table_pages: int | None) -> Iterator[Part]:
        arena = self.manager.hot.arenas[self.layer]
        page_tokens, batch = arena.page_tokens, self.sequences.batch
        frames, positions, short = plan.frames, plan.positions, 0
        self.manager.stats.hits_hot += frames.size
        if self.kept_tail is None and self.tail_tokens:
            frames = np.concatenate([frames, self.tails[:, None]], axis=1)
            positions = np.append(positions, self.past)
            short = page_tokens - self.tail_tokens
        count, every = len(positions), slice(0, batch)
        spans = runs(frames[0]) if batch == 1 and count else []
        step = table_pages or max(count, 1)
        tables: list[torch.Tensor | None] = []
        if not 0 < len(spans) <= MAX_SPANS:
            spans = [(at, min(at + step, count)) for at in range(0, count, step)]
            tables += [self._table(plan, frames, span) for span in spans]
        else:
            tables += [None] * len(spans)
        for (start, stop), table in zip(spans, tables, strict=True):
            tokens = (stop - start) * page_tokens - (short if stop == count else 0)
            first = int(frames[0, start])
            yield Part(every, arena, table, first, positions[start:stop], tokens)

    def _table(self, plan: Plan, frames: Frames, span: tuple[int, int]) -> torch.Tensor:
        """Return frames as a table on the compute device, made once per plan and tail."""
        part = frames[:, span[0] : span[1]]
        key = (*span, int(part[0, -1]))
        if key not in plan.gathers:
            rows = np.ascontiguousarray(part)  # kernels read rows of a table
            plan.gathers[key] = torch.as_tensor(rows, device=self.manager.device)
        return plan.gathers[key]
