"""Attention of decode steps that are captured as a CUDA graph.

A captured step reads every length, slot and table from device memory, which `begin` sets before
each replay. Layers that select read through their `Reader`, the others through `CapturedExact`.
Pages on disk are waited for within the step where layers select; no other layer may have any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tierkv.attention import selective_gpu
from tierkv.attention.captured_exact import CapturedExact
from tierkv.attention.selective_gpu import MAX_ROUNDS, rounds
from tierkv.attention.step_numbers import StepNumbers
from tierkv.kernels.append import append
from tierkv.paging.manager import PageManager
from tierkv.paging.sequences import Sequences


class CapturedLookups:
    """Fixed memory of captured steps of sequences that run together.

    Args:
        padding: ``[batch]`` int32, tokens hidden before each sequence; None for none.
        max_pages: pages that the context may grow to, the tail included.
    """

    def __init__(
        self,
        manager: PageManager,
        sequences: Sequences,
        max_pages: int,
        padding: torch.Tensor | None = None,
    ):
        device, layers = manager.device, manager.geometry.layers
        self.manager, self.sequences = manager, sequences
        spec = manager.selective.spec if manager.selective is not None else None
        self.exact_layers = layers if spec is None else min(spec.dense_layers, layers)
        rows = max(sequences.batch, 1)
        self.numbers = StepNumbers(layers, self.exact_layers, rows, device)
        self.exact = CapturedExact(manager, sequences, self.numbers, max_pages, padding)
        self._hidden = 0 if padding is None else padding.cpu().numpy()[:, None]
        self._reader: selective_gpu.Reader | None = None

    def obstacle(self) -> str:
        """Say why the next step cannot be captured or replayed; empty if it can."""
        selective, past = self.manager.selective, self._past()
        if selective is not None and past <= selective.spec.kept_pages:
            return "the context is still shorter than what is always read"
        if past + 2 > self.exact.max_pages:
            return f"the context outgrew the {self.exact.max_pages} pages that were captured"
        if obstacle := self.exact.obstacle(past):
            return obstacle
        batch = max(self.sequences.batch, 1)
        if self.waits and selective is not None and rounds(self.manager, batch) > MAX_ROUNDS:
            missing = selective.spec.budget_pages * self.manager.geometry.kv_heads * batch
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
        host = self.numbers.host
        host.position[:] = sequences.lengths[0] - self._hidden
        host.slots[:] = sequences.tails * page_tokens + offset
        host.tail_tokens[:] = offset + 1
        self.exact.begin(past, offset + 1)
        self.numbers.upload()
        if self._reader is not None:
            self._reader.expect(past)

    def start(self) -> None:
        """Begin a step on the device, before its first layer."""
        self.exact.start()
        if self._reader is not None:
            self._reader.start(self.numbers.device.tail_tokens)

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

    def announce(self, layer: int, query: Callable[[], torch.Tensor], scale: float) -> None:
        """Choose and fetch for an upcoming layer beside what the caller's stream does meanwhile.

        query: computes the foreseen query, ``[batch, heads, 1, dim]``; called on the other stream.
        """
        if layer < self.exact_layers:
            return
        with self.manager.transfer.aside(layer):
            foreseen = query()
            self._reader_of(foreseen).announce(foreseen, layer, scale=scale)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        *,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write the new token of each sequence to a layer's tails, and attend.

        Args:
            query: ``[batch, heads, 1, k_dim]``.
            key, value: ``[batch, kv_heads, 1, dim]``.

        Returns:
            ``[batch, 1, heads, v_dim]``.
        """
        selects, arena = layer >= self.exact_layers, self.manager.hot.arenas[layer]
        queries = self._reader_of(query).query if selects else self.exact.queries(query)
        append(
            query[:, :, 0], key[:, :, 0], value[:, :, 0], queries=queries, k=arena.k, v=arena.v,
            slots=self.numbers.device.slots[layer],
        )  # fmt: skip
        if selects:
            self.manager.transfer.join(layer)
            return self._reader_of(query).answer(
                layer, scale=scale, softcap=softcap, sinks=sinks, waits=None, faults=self.waits
            )
        return self.exact.attend(layer, scale=scale, softcap=softcap, sinks=sinks)

    def _reader_of(self, query: torch.Tensor) -> selective_gpu.Reader:
        if self._reader is None:
            self._reader = selective_gpu.reader_of(self.manager, query)
            past, offset = divmod(self.sequences.lengths[0], self.manager.geometry.page_tokens)
            self._reader.begin(past, offset + 1)
        return self._reader
