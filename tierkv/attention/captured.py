"""Attention of decode steps that are captured as a CUDA graph: one sequence, nothing streamed.

A captured step reads every length, slot and table from device memory, which `begin` sets before
each replay. Layers that select read through their `Reader`; the others have all pages hot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from tierkv.attention import selective_gpu
from tierkv.attention.selective_gpu import MAX_ROUNDS, rounds
from tierkv.kernels import decode
from tierkv.kernels.decode import PagedKV
from tierkv.kernels.merge import Partials, merge
from tierkv.paging.manager import PageManager
from tierkv.paging.plan import Plan
from tierkv.paging.sequences import Sequences

MAX_SPLITS = 96
"""Splits over the pages of an exact layer at most."""


class CapturedLookups:
    """Fixed memory of captured steps of one sequence.

    Args:
        max_pages: pages that the context may grow to, the tail included.
    """

    def __init__(self, manager: PageManager, sequences: Sequences, max_pages: int):
        device, layers = manager.device, manager.geometry.layers
        self.manager, self.sequences = manager, sequences
        spec = manager.selective.spec if manager.selective is not None else None
        self.exact_layers = layers if spec is None else min(spec.dense_layers, layers)
        self.slots = torch.zeros((layers, 1), dtype=torch.int64, device=device)
        self.tokens = torch.zeros(1, dtype=torch.int32, device=device)
        shape = (self.exact_layers, 1, max_pages)
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._reader: selective_gpu.Reader | None = None
        self._partials: Partials | None = None
        self._query: torch.Tensor | None = None
        self._launches: dict[int, decode.Launch] = {}
        self._plans: dict[int, Plan] = {}

    def obstacle(self) -> str:
        """Say why the next step cannot be captured or replayed; empty if it can."""
        selective, past = self.manager.selective, self._past()
        if selective is not None and past <= selective.spec.kept_pages:
            return "the context is still shorter than what is always read"
        if past + 2 > self.tables.shape[2]:
            return f"the context outgrew the {self.tables.shape[2]} pages that were captured"
        for layer in range(self.exact_layers):
            plan = self.manager.plan(self.sequences, layer, past)
            if len(plan.streamed):
                return f"layer {layer} is exact and {len(plan.streamed)} of its pages are not hot"
        if self.waits and selective is not None and rounds(self.manager) > MAX_ROUNDS:
            missing = selective.spec.budget_pages * self.manager.geometry.kv_heads
            return (
                f"a layer may wait for {missing} pages on disk, and cpu_budget leaves room for "
                f"{self.manager.warm.inbound.capacity} at once"
            )
        return ""

    @property
    def waits(self) -> bool:
        """Whether steps may choose pages on disk and wait for them."""
        selective = self.manager.selective
        return selective is not None and selective.away > 0 and not selective.spec.skips

    def answered(self) -> AbstractContextManager[None]:
        """Answer, while the block runs a step, what it asks for; see `FaultService.serving`."""
        if not self.waits:
            return nullcontext()
        return selective_gpu.faults_of(self.manager).serving(self.sequences)

    def _past(self) -> int:
        return self.sequences.lengths[0] // self.manager.geometry.page_tokens

    def begin(self) -> None:
        """Set what a step for the next token reads from device memory."""
        sequences, page_tokens = self.sequences, self.manager.geometry.page_tokens
        past, offset = divmod(sequences.lengths[0], page_tokens)
        slots = sequences.tails[:, :1] * page_tokens + offset
        self.slots.copy_(torch.from_numpy(slots), non_blocking=True)
        self.tokens.fill_(sequences.lengths[0] + 1)
        for layer in range(self.exact_layers):
            plan = self.manager.plan(sequences, layer, past)
            if plan is self._plans.get(layer):
                continue
            frames = np.append(plan.frames[0], sequences.tails[layer, 0]).astype(np.int32)
            table = torch.from_numpy(frames).to(self.tables.device)
            self.tables[layer, 0, : len(frames)] = table
            self._plans[layer] = plan
        if self._reader is not None:
            self._reader.begin(past, offset + 1)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave steps run inside the block, which come again, out of the counts."""
        state = self.manager.selective
        if state is None:
            yield
            return
        counts = state.counters.clone(), state.announced.clone()
        try:
            yield
        finally:
            state.counters.copy_(counts[0])
            state.announced.copy_(counts[1])
            state.next_step()

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the new token of a layer to its tail. k, v: ``[1, kv_heads, 1, dim]``."""
        arena = self.manager.hot.arenas[layer]
        arena.k.index_copy_(1, self.slots[layer], k[0])
        arena.v.index_copy_(1, self.slots[layer], v[0])

    def announce(self, layer: int, query: Callable[[], torch.Tensor], scale: float) -> None:
        """Choose and fetch for an upcoming layer beside what the caller's stream does meanwhile.

        query: computes the foreseen query, ``[1, heads, 1, dim]``; called on the other stream.
        """
        if layer < self.exact_layers:
            return
        with self.manager.transfer.aside(layer):
            foreseen = query()
            self._reader_of(foreseen).announce(foreseen, layer, scale=scale)

    def attend(
        self,
        query: torch.Tensor,
        layer: int,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend in one layer. query: ``[1, heads, 1, dim]``; returns ``[1, 1, heads, v_dim]``."""
        if layer >= self.exact_layers:
            self.manager.transfer.join(layer)
            return self._reader_of(query).attend(
                query, layer, scale=scale, softcap=softcap, sinks=sinks, waits=None,
                faults=self.waits,
            )  # fmt: skip
        return self._exact(query, layer, scale, softcap, sinks)

    def _reader_of(self, query: torch.Tensor) -> selective_gpu.Reader:
        if self._reader is None:
            self._reader = selective_gpu.reader_of(self.manager, query)
            past, offset = divmod(self.sequences.lengths[0], self.manager.geometry.page_tokens)
            self._reader.begin(past, offset + 1)
        return self._reader

    def _exact(
        self,
        query: torch.Tensor,
        layer: int,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        heads, geometry = query.shape[1], self.manager.geometry
        if self._query is None or self._partials is None:
            self._query = torch.empty_like(query[:, :, 0], memory_format=torch.contiguous_format)
            self._partials = Partials.allocate(MAX_SPLITS, 1, heads, geometry.v_dim, query.device)
        if layer not in self._launches:
            arena = self.manager.hot.arenas[layer]
            self._launches[layer] = decode.prepare(
                self._query, PagedKV(arena.k_frames, arena.v_frames), self._partials, slot=0,
                tokens=self.tokens, table=self.tables[layer], scale=scale, softcap=softcap,
                max_splits=MAX_SPLITS,
            )  # fmt: skip
        self._query.copy_(query[:, :, 0])
        launch = self._launches[layer]
        launch.run()
        out = query.new_empty((1, heads, geometry.v_dim))
        merge(self._partials, launch.next_slot, out, sinks=None if sinks is None else sinks.float())
        return out.unsqueeze(1)
