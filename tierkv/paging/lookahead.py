"""Upcoming lookups, and the pages already on their way for them.

Layers run in a fixed order, so while layer l attends, the lookups of the next layers (and, past
the last layer, of the next step) are known. Their pages are announced here, in order: disk reads
start as soon as there are warm frames for them, copies to the compute device as soon as a staging
arena is free.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tierkv.paging.plan import Fetch, Plan, Staged
from tierkv.paging.sequences import Sequences
from tierkv.paging.sources import Sources
from tierkv.stats import Stats
from tierkv.tiers.arena import Arena
from tierkv.tiers.transfer import Transfer

MAX_AHEAD = 64
"""Announced fetches in flight at most; warm frames and staging arenas bound them sooner."""
RUN_AHEAD = 8
"""The same for `Lookahead.run`, whose hot pages may have to be gathered outside of any arena."""


class PageSource(Protocol):
    """What the lookahead needs from the page manager."""

    def open_sources(self, fetch: Fetch) -> Sources | None:
        """Pin a fetch's pages and start their disk reads; None when warm frames are short."""

    def plan(self, sequences: Sequences, layer: int) -> Plan:
        """Return the lookup of a layer over the pages its sequences have sealed."""


@dataclass(eq=False)
class Ticket:
    """One announced fetch."""

    fetch: Fetch
    sources: Sources
    buffer: int | None = None
    copied: Future[Any] | None = None
    released: bool = False

    def release_sources(self) -> None:
        """Let go of the source frames once the copy is enqueued; safe to call twice."""
        if not self.released:
            self.released = True
            self.sources.release()


class Lookahead:
    """The pipeline of announced fetches; one consumer."""

    def __init__(self, source: PageSource, transfer: Transfer, layers: int, stats: Stats):
        self._source, self._transfer, self._stats = source, transfer, stats
        self._all_layers = self._layers = layers
        self._sequences: Sequences | None = None
        self._queue: deque[Ticket] = deque()
        self._ahead: deque[Fetch] = deque()
        self._next_layer = 0
        self._layers_left = 0
        self._free_buffers = list(range(transfer.staging_buffers))

    def stream(
        self, sequences: Sequences, layer: int, plan: Plan, cycle: int | None = None
    ) -> Iterator[tuple[Staged, Arena]]:
        """Yield every staged block of a lookup in order, each valid until the next is asked for.

        Args:
            cycle: how many layers, from the first on, will be looked up in turn; all by default.

        Raises:
            ColdReadError: a page could not be read from disk. The lookup may be repeated.
        """
        self._layers = cycle or self._all_layers
        if sequences is not self._sequences:
            self.cancel()
            self._sequences, self._next_layer = sequences, (layer + 1) % self._layers
            self._layers_left = self._layers
        else:
            self._layers_left = min(self._layers_left + 1, self._layers)
        for index, staged in enumerate(plan.staged):
            if not (self._queue and self._queue[0].fetch.same(staged.fetch)):
                self._restart(sequences, layer, [part.fetch for part in plan.staged[index:]])
            with self._next_arena() as arena:
                yield staged, arena
            self._advance()
        if not plan.staged:
            self._advance()

    def run(self, fetches: list[Fetch]) -> Generator[tuple[Fetch, Arena]]:
        """Yield these pages and no others, in order, each valid until the next is asked for.

        Close the generator if it is not used up.

        Raises:
            ColdReadError: a page could not be read from disk.
        """
        self.cancel()
        self._ahead.extend(fetches)
        try:
            for fetch in fetches:
                with self._next_arena(RUN_AHEAD) as arena:
                    yield fetch, arena
        finally:
            self.cancel()

    @contextmanager
    def _next_arena(self, most: int = MAX_AHEAD) -> Iterator[Arena]:
        """Wait for the fetch at the head of the queue; its arena is free again afterwards."""
        self._advance(most)
        ticket = self._queue.popleft()
        try:
            self._wait(ticket)
            assert ticket.buffer is not None
            source = ticket.sources
            arena, free = self._transfer.open_staging(ticket.buffer, source.spans, source.hot)
            if free:
                self._finish(ticket)
                self._advance(most)
            yield arena
        finally:
            self._finish(ticket)

    def cancel(self) -> None:
        """Forget all announcements; returns when no copy for them is running any more."""
        for ticket in self._queue:
            self._stats.cancelled += len(ticket.fetch.blocks)
            self._finish(ticket)
        self._queue.clear()
        self._ahead.clear()
        self._sequences = None

    def _restart(self, sequences: Sequences, layer: int, fetches: list[Fetch]) -> None:
        self.cancel()
        self._stats.unannounced += sum(len(fetch.blocks) for fetch in fetches)
        self._sequences = sequences
        self._ahead.extend(fetches)
        self._next_layer, self._layers_left = (layer + 1) % self._layers, self._layers

    def _next_fetch(self) -> Fetch | None:
        while not self._ahead and self._layers_left > 0 and self._sequences is not None:
            plan = self._source.plan(self._sequences, self._next_layer)
            self._ahead.extend(staged.fetch for staged in plan.staged)
            self._next_layer = (self._next_layer + 1) % self._layers
            self._layers_left -= 1
        return self._ahead[0] if self._ahead else None

    def _advance(self, most: int = MAX_AHEAD) -> None:
        """Announce as far as frames allow, and stage in order while an arena is free."""
        for ticket in self._queue:
            if ticket.copied is not None and ticket.copied.done():
                ticket.release_sources()
        while len(self._queue) < most and (fetch := self._next_fetch()) is not None:
            sources = self._source.open_sources(fetch)
            if sources is None:
                break
            self._ahead.popleft()
            self._queue.append(Ticket(fetch, sources))
        for ticket in self._queue:
            if ticket.copied is None:
                if not self._free_buffers:
                    break
                ticket.buffer = self._free_buffers.pop()
                source = ticket.sources
                ticket.copied = self._transfer.bring_up(
                    ticket.buffer, source.spans, source.frames, source.reads
                )

    def _wait(self, ticket: Ticket) -> None:
        assert ticket.copied is not None, "the head of the queue always finds a free arena"
        stats, source = self._stats, ticket.sources
        on_time = ticket.copied.done()
        if not on_time:
            start = time.perf_counter()
            ticket.copied.exception()
            stats.stall_seconds += time.perf_counter() - start
        on_time &= self._transfer.wait_ready(ticket.copied.result())
        stats.late_arrivals += 0 if on_time else len(ticket.fetch.blocks)
        stats.hits_hot += source.num_hot
        stats.hits_warm += source.num_warm
        stats.hits_cold += source.num_cold

    def _finish(self, ticket: Ticket) -> None:
        """Wait for whatever runs for the ticket, then free its frames and its arena."""
        if ticket.copied is not None and not ticket.copied.cancel():
            ticket.copied.exception()
        ticket.release_sources()
        if ticket.buffer is not None:
            self._free_buffers.append(ticket.buffer)
            ticket.buffer = None
