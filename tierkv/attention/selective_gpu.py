"""Selective attention in kernels: score, choose and plan, fetch, attend, without the host.

Everything is prepared once per layer on fixed memory; a step only changes what that memory holds
(the query, the lengths), so it can be replayed as a CUDA graph. `selective` is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tierkv.kernels import decode, fault, score, select
from tierkv.kernels.build import Launch
from tierkv.kernels.decode import PagedKV
from tierkv.kernels.merge import Partials, merge
from tierkv.paging.faults import FaultService
from tierkv.paging.headpages import open_pages
from tierkv.paging.lookup import Lookup
from tierkv.paging.manager import PageManager
from tierkv.paging.plan import Fetch
from tierkv.paging.selective import TAIL_FRAME, SelectiveState
from tierkv.paging.sequences import Sequences

MAX_SPLITS = 64
"""Splits over the chosen pages at most."""
MAX_ROUNDS = 8
"""Rounds in which a captured step may bring the missing pages of a layer at most."""
NEARLY = 0.1
"""A page with this share of the mass of the least chosen page is nearly chosen, and read ahead. Of
SmolLM2's pages chosen for the first time, 9 in 10 were nearly chosen before
(`benchmarks/locality.py`)."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerLaunches:
    """The launches of one layer, in order; choosing is left out if there is no budget."""

    choosing: Choosing | None
    attend: decode.Launch


@dataclass(frozen=True, slots=True, eq=False)
class Choosing:
    """Launches that bring the pages a query chooses into frames."""

    score: score.ScoreLaunch
    select: Launch
    fetch: Launch
    faults: tuple[Launch, ...] = ()

    def run(self) -> None:
        """Enqueue all of them; a wait for missing pages comes before each fetch."""
        self.score.run()
        self.select.run()
        for asking in self.faults:
            asking.run()
            self.fetch.run()
        if not self.faults:
            self.fetch.run()


class Reader:
    """Fixed memory and prepared launches for the layers of one model.

    A batch of sequences is one sequence of as many KV heads to the kernels that choose, and costs
    no more launches.

    Attributes:
        sealed, tail_tokens: ``[1]`` int32, sealed pages and tokens in the tail; the same for all
            layers of a step, and for all sequences.
        query: ``[batch, heads, dim]``, what is asked; where the prepared launches look for it.
    """

    def __init__(self, manager: PageManager, state: SelectiveState, query: torch.Tensor):
        geometry, spec, device = manager.geometry, state.spec, manager.device
        self.manager, self.state, (self.batch, heads) = manager, state, query.shape[:2]
        self.query, self.foreseen = torch.empty(
            (2, self.batch, heads, geometry.k_dim), dtype=query.dtype, device=device
        )
        self.sealed, self.tail_tokens = torch.zeros((2, 1), dtype=torch.int32, device=device)
        kept, group = spec.kept_pages, heads // geometry.kv_heads
        self.rows = self.batch * geometry.kv_heads
        self.scores = score.Scores.allocate(self.rows, group, spec.max_pages, device)
        self.plan = self._allocate_plan(state.counters)
        self.foreseen_scores: score.Scores | None = None  # until something is announced
        self.foreseen_plan: select.Plan | None = None
        tails = TAIL_FRAME + torch.arange(self.batch, device=device)
        self._tables()[:, :, kept] = tails[:, None]  # stays there if nothing is chosen
        self.partials = Partials.allocate(MAX_SPLITS, self.batch, heads, geometry.v_dim, device)
        self._layers: dict[int, LayerLaunches] = {}
        self._announcing: dict[int, Choosing] = {}
        self._waiting: dict[int, Choosing] = {}
        self._sealed, self._begun = -1, (-1, -1, -1)

    def begin(self, sealed: int, tail_tokens: int) -> None:
        """Set the lengths of a step; the new token is in the tail."""
        begun = (sealed, tail_tokens, self.manager.stats.pages_sealed)
        if begun == self._begun:
            return
        self._set_sealed(sealed)
        self._begun = begun
        self.start(torch.tensor([tail_tokens], dtype=torch.int32))
        self.state.steps += 1
        self.manager.transfer.settle()

    def expect(self, sealed: int) -> None:
        """Set on the device what differs from step to step before `start` is replayed, once."""
        self._set_sealed(sealed)
        self._begun = (-1, -1, -1)
        self.state.steps += 1

    def start(self, tail_tokens: torch.Tensor) -> None:
        """Begin a step on the device. tail_tokens: ``[1]`` int32, of a tail with the new token."""
        self.tail_tokens.copy_(tail_tokens, non_blocking=True)
        if not self.state.spec.budget_pages:
            kept_tokens = self.state.spec.kept_pages * self.manager.geometry.page_tokens
            self.plan.tokens.copy_(self.tail_tokens + kept_tokens)
        self.state.step.add_(1)

    def _set_sealed(self, sealed: int) -> None:
        if sealed != self._sealed:
            spec, rows = self.state.spec, np.arange(self.batch)[:, None]
            kept = torch.from_numpy(spec.kept_frames(sealed) + rows * spec.frames)
            self._tables()[:, :, : kept.shape[1]] = kept.to(self.query.device)[:, None]
            self.sealed.fill_(sealed)
            self._sealed = sealed

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        waits: Sequences | None,
        faults: bool = False,
    ) -> torch.Tensor:
        """Attend in one layer of the step begun.

        Args:
            query: ``[batch, heads, 1, dim]``.
            waits: whose pages may be on disk, to be waited for on the host; None if there is no
                disk, or to go without what is there.
            faults: wait for pages on disk on the device, inside of `FaultService.serving`.

        Returns:
            ``[batch, 1, heads, v_dim]`` in the query's dtype.
        """
        self.query.copy_(query[:, :, 0])
        return self.answer(
            layer, scale=scale, softcap=softcap, sinks=sinks, waits=waits, faults=faults
        )

    def answer(
        self,
        layer: int,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        waits: Sequences | None,
        faults: bool = False,
    ) -> torch.Tensor:
        """Attend as `attend` does, for the query that lies in `query`."""
        if layer not in self._layers:
            self._layers[layer] = self._prepare(layer, scale, softcap)
        launches = self._layers[layer]
        if faults and launches.choosing is not None:
            if layer not in self._waiting:
                self._waiting[layer] = self._choosing(
                    layer, self.query, self.scores, self.plan, scale, faults=True
                )
            launches = replace(launches, choosing=self._waiting[layer])
        self._run(launches, layer, waits)
        out = self.query.new_empty((*self.query.shape[:2], self.manager.geometry.v_dim))
        slots = launches.attend.next_slot
        merge(self.partials, slots, out, sinks=None if sinks is None else sinks.float())
        return out.unsqueeze(1)

    def announce(self, query: torch.Tensor, layer: int, *, scale: float) -> None:
        """Choose and fetch for the query that a layer is likely to ask in this step.

        What it brings counts as chosen in this step, so that the true choice leaves it in place.
        query: ``[batch, heads, 1, dim]``.
        """
        if not self.state.spec.budget_pages:
            return
        if self.foreseen_scores is None or self.foreseen_plan is None:
            made = (self.scores.logits, self.scores.mass, self.scores.states)
            self.foreseen_scores = score.Scores(*map(torch.empty_like, made))
            self.foreseen_plan = self._allocate_plan(self.state.announced)
        if layer not in self._announcing:
            self._announcing[layer] = self._choosing(
                layer, self.foreseen, self.foreseen_scores, self.foreseen_plan, scale
            )
        self.foreseen.copy_(query[:, :, 0])
        self._announcing[layer].run()

    def _allocate_plan(self, stats: torch.Tensor) -> select.Plan:
        budget, kept = max(self.state.spec.budget_pages, 1), self.state.spec.kept_pages
        plan = select.Plan.allocate(self.rows, budget, self.query.device, kept)
        return replace(plan, stats=stats[: self.rows])

    def _tables(self) -> torch.Tensor:
        """View the plan's table by sequence, ``[batch, kv_heads, entries]``."""
        return self.plan.table.unflatten(0, (self.batch, -1))

    def _prepare(self, layer: int, scale: float, softcap: float | None) -> LayerLaunches:
        plan, arena = self.plan, self.manager.hot.arenas[layer]
        frames = PagedKV(arena.k_frames, arena.v_frames)
        attend = decode.prepare(
            self.query, frames, self.partials, slot=0, tokens=plan.tokens.view(self.batch, -1),
            table=self._tables(), max_splits=MAX_SPLITS, scale=scale, softcap=softcap,
        )  # fmt: skip
        if not self.state.spec.budget_pages:
            return LayerLaunches(None, attend)
        choosing = self._choosing(layer, self.query, self.scores, plan, scale)
        return LayerLaunches(choosing, attend)

    def _choosing(
        self,
        layer: int,
        query: torch.Tensor,
        scores: score.Scores,
        plan: select.Plan,
        scale: float,
        faults: bool = False,
    ) -> Choosing:
        state, spec, at = self.state, self.state.spec, self.state.index(layer)
        summaries, where, held, stamp = (
            tensor[at, : self.batch].flatten(0, 1)
            for tensor in (state.summaries, state.where, state.held, state.stamp)
        )
        addresses = state.addresses[at, : self.batch * spec.max_pages]
        candidates: dict[str, Any] = {
            "sealed": self.sealed, "first": spec.sink_pages, "recent": spec.recent_pages,
        }  # fmt: skip
        scoring = score.prepare(
            query.flatten(0, 1), summaries, scores, scale=scale, stem=spec.selector.kernel,
            **candidates,
        )  # fmt: skip
        reuse = select.ReuseCache(where, held, stamp, spec.first_slot, spec.frames)
        choosing = select.prepare(
            scores.mass, addresses, reuse, plan, step=state.step,
            page_tokens=self.manager.geometry.page_tokens, mass_target=spec.mass_target,
            last_frame=TAIL_FRAME, last_tokens=self.tail_tokens, waits=faults, **candidates,
        )  # fmt: skip
        arena = self.manager.hot.arenas[layer]
        frames = PagedKV(arena.k_frames, arena.v_frames)
        fetching = self.manager.tiers.format.prepare_fetch(addresses, plan.fetches, frames)
        if not faults:
            return Choosing(scoring, choosing, fetching)
        service = faults_of(self.manager)
        questions = tuple(
            fault.prepare(
                service.mailbox, at, turn, plan, addresses, mass=scores.mass,
                where=where, step=state.step, share=NEARLY, patience=service.patience,
                **candidates,
            )
            for turn in range(rounds(self.manager, self.batch))
        )  # fmt: skip
        return Choosing(scoring, choosing, fetching, questions)

    def _run(self, launches: LayerLaunches, layer: int, sequences: Sequences | None) -> None:
        if launches.choosing is not None:
            launches.choosing.run()
            if sequences is not None:
                self._wait_for_missing(launches.choosing, layer, sequences)
        launches.attend.run()

    def _wait_for_missing(self, choosing: Choosing, layer: int, sequences: Sequences) -> None:
        """Bring chosen pages from disk to warm memory and fetch them, as many as fit at once.

        They count as awaited, however often it takes to plan.
        """
        addresses, manager = self.state.addresses[self.state.index(layer)], self.manager
        counted: torch.Tensor | None = None
        while any(counts := self.plan.missing_counts.tolist()):
            counted = self.plan.stats.clone() if counted is None else counted
            rows = self.plan.missing.cpu().numpy()
            missing = np.unique(np.concatenate([r[:c] for r, c in zip(rows, counts, strict=True)]))
            part = missing[: manager.warm.inbound.capacity].astype(np.int64)
            blocks = sequences.blocks[np.divmod(part, self.state.spec.max_pages)]
            sources = open_pages(manager, Fetch(layer, blocks))
            index = torch.from_numpy(part).to(self.query.device)
            try:
                for read in sources.reads:
                    read.result()
                hosts = torch.from_numpy(manager.warm.addresses(sources.frames))
                addresses[index] = hosts.to(self.query.device)
                choosing.select.run()
                choosing.fetch.run()
                addresses[index] = 0
                self.plan.stats.copy_(counted)
                manager.transfer.finish()
            finally:
                sources.release()


def rounds(manager: PageManager, batch: int) -> int:
    """Return in how many parts the missing pages of a layer fit into inbound frames."""
    assert manager.selective is not None
    pages = manager.selective.spec.budget_pages * manager.geometry.kv_heads * batch
    return -(-pages // max(manager.warm.inbound.capacity, 1))


def faults_of(manager: PageManager) -> FaultService:
    """Return what answers the captured steps of a model, made at the first call."""
    state, geometry = manager.selective, manager.geometry
    assert state is not None
    if state.faults is None:
        heads, budget = geometry.kv_heads * state.spec.sequences, max(state.spec.budget_pages, 1)
        layers, pages = state.addresses.shape
        mailbox = fault.Mailbox.allocate(layers, pages, heads, budget, manager.device)
        state.faults = FaultService(manager, mailbox)
    return state.faults


def reader_of(manager: PageManager, query: torch.Tensor) -> Reader:
    """Return the reader of a model, made for a batch. query: ``[batch, heads, 1, dim]``."""
    state = manager.selective
    assert state is not None
    if not isinstance(state.reader, Reader) or state.reader.batch != len(query):
        with torch.inference_mode(False):  # or only steps in inference mode could write to it
            state.reader = Reader(manager, state, query)
    return state.reader


def attend(
    query: torch.Tensor,
    lookup: Lookup,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend to what matters most; see `selective.attend`."""
    manager, layer = lookup.manager, lookup.layer
    reader = reader_of(manager, query)
    reader.begin(lookup.past, lookup.tail_tokens)
    assert manager.selective is not None
    waiting = manager.selective.away and not manager.selective.spec.skips
    waits = lookup.sequences if waiting else None
    return reader.attend(query, layer, scale=scale, softcap=softcap, sinks=sinks, waits=waits)
