"""The page manager: the only mover of pages.

Where a page lives is decided when it is sealed: in hot while its layer's share lasts, else in
warm, else on disk. In exact mode that never changes, because every step reads everything once
and any other choice misses as often. Eviction is always a drop: a page leaves a tier only after
the tier below holds it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from tierkv.codecs import RAW, Codec
from tierkv.errors import ClosedError, HotBudgetError
from tierkv.page import Geometry
from tierkv.paging.descent import make_room, move_down
from tierkv.paging.directory import NOWHERE, Blocks
from tierkv.paging.lookahead import Lookahead
from tierkv.paging.lookup import Lookup
from tierkv.paging.outflow import Outflow
from tierkv.paging.placement import budget_for_tails
from tierkv.paging.plan import Fetch, Plan, make_plan
from tierkv.paging.prefix import PrefixCache
from tierkv.paging.selective import Selective
from tierkv.paging.sequences import Sequences
from tierkv.paging.sources import Sources, open_sources
from tierkv.paging.tierset import TierSet
from tierkv.paging.turns import activate
from tierkv.paging.window import slide, window_pages
from tierkv.paging.writer import Writer
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.frames import Frames
from tierkv.tiers.hot import TAIL
from tierkv.units import format_bytes


class PageManager:
    """Pages of all sequences of one model, in three tiers.

    Args:
        geometry: shape of the KV cache.
        device: compute device.
        gpu_budget, cpu_budget: bytes on the compute device and in host memory.
        cold: the store on disk, owned by the manager from now on; None for two tiers.
        selective: what layers that select keep on the device; None where all are exact.
        codec: how pages are stored below hot.
        encode_hot: store them so in hot, too; only tails and residual windows are raw then.
        residual_tokens: last tokens of each sequence that stay hot where pages are encoded.
        salt: part of the keys of pages that are kept.
        prefix_cache: keep pages findable by their tokens after their sequences are closed.

    Raises:
        HotBudgetError, WarmBudgetError: a budget is below the minimum; the message says which.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        *,
        gpu_budget: int,
        cpu_budget: int,
        cold: ColdStore | None,
        io_threads: int = 4,
        selective: Selective | None = None,
        codec: Codec = RAW,
        encode_hot: bool = False,
        residual_tokens: int = 0,
        salt: str = "",
        prefix_cache: bool = False,
    ):
        self.tiers = TierSet(
            geometry, device, gpu_budget=gpu_budget, cpu_budget=cpu_budget, cold=cold,
            io_threads=io_threads, selective=selective, codec=codec, salt=salt,
            raw_pages=1 - -residual_tokens // geometry.page_tokens if encode_hot else None,
        )  # fmt: skip
        self.geometry, self.device, self.cold = geometry, device, cold
        self.hot, self.warm, self.directory = self.tiers.hot, self.tiers.warm, self.tiers.directory
        self.transfer, self.placement = self.tiers.transfer, self.tiers.placement
        self.stats, self.selective = self.tiers.stats, self.tiers.selective
        self.encode_hot, self.window_pages = encode_hot, 0
        if not codec.lossless:
            try:
                self.window_pages = window_pages(residual_tokens, geometry, self.placement)
            except BaseException:
                self.tiers.close()
                raise
        self.lookahead = Lookahead(self, self.transfer, geometry.layers, self.stats)
        self.outflow = Outflow(self.tiers, self.lookahead.cancel)
        self._writer = Writer(self.tiers, self.outflow)
        self.prefix = PrefixCache(self) if prefix_cache else None
        self.placement_epoch = 0
        self.closed = False
        self._open: set[Sequences] = set()
        self._discarded: deque[Sequences] = deque()

    # -- appending -------------------------------------------------------------------------

    def append(self, sequences: Sequences, layer: int, k: torch.Tensor, v: torch.Tensor) -> Lookup:
        """Append tokens to one layer of a batch of sequences; seal the pages they fill.

        k, v: ``[batch, kv_heads, new_tokens, dim]``. The first layer of a step checks that there
        is room for the step in all layers, so that running out leaves every sequence whole.

        Raises:
            HotBudgetError, WarmBudgetError, DiskBudgetError: no room; nothing was appended.
            ColdWriteError: an earlier write to disk failed; its pages stay in warm memory.
        """
        self._check_open()
        k, v = k.detach(), v.detach()
        batch, new = k.shape[0], k.shape[2]
        self.admit(sequences, batch, sequences.lengths[layer] + new)
        if sequences not in self._open:
            self.start(sequences, batch)
        tokens = self.geometry.page_tokens
        length = sequences.lengths[layer]
        past, offset = divmod(length, tokens)
        if length == max(sequences.lengths):
            self._reserve(sequences, new)
        missing = -(-(length + new) // tokens) - sequences.num_blocks
        if missing > 0:
            sequences.extend(self.new_blocks(batch * missing).reshape(batch, missing))
        tails = sequences.tails[layer].copy()
        kept = self._writer.keep_tail(layer, tails, offset) if new > 1 and offset else None
        self._write(sequences, layer, k, v)
        visible = offset + 1 if new == 1 else offset
        return Lookup(self, sequences, layer, past, tails, visible, kept, new)

    def _write(self, sequences: Sequences, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write tokens of one layer; pages that the residual window holds after all others."""
        length, new, tokens = sequences.lengths[layer], k.shape[2], self.geometry.page_tokens
        past, offset = divmod(length, tokens)
        sealed = (offset + new) // tokens
        if sealed and self.window_pages:
            spare = slide(self, sequences, layer, past, sealed)  # what can fail comes first
            down = sealed - spare // sequences.batch
            at = down * tokens - offset
            if down and spare:
                first = k[:, :, :at], v[:, :, :at]
                self._writer.write(sequences, layer, *first, past, offset, spare=spare)
                k, v, past, offset = k[:, :, at:], v[:, :, at:], past + down, 0
        self._writer.write(sequences, layer, k, v, past, offset)
        sequences.lengths[layer] = length + new

    def begin_token(self, sequences: Sequences) -> None:
        """Make room for one token of each sequence, of one if they are new, for a captured step.

        Raises:
            HotBudgetError, WarmBudgetError, DiskBudgetError: no room; nothing was appended.
        """
        self._check_open()
        length = sequences.lengths[0]
        self.admit(sequences, max(sequences.batch, 1), length + 1)
        if sequences not in self._open:
            self.start(sequences, 1)
        self._reserve(sequences, 1)
        if -(-(length + 1) // self.geometry.page_tokens) > sequences.num_blocks:
            sequences.extend(self.new_blocks(sequences.batch).reshape(-1, 1))

    def end_token(self, sequences: Sequences) -> None:
        """Count the tokens that a captured step has written; seal the pages they fill.

        Raises:
            TierKVError: a page could not go down; only layers sealed before count their token.
        """
        length, tokens = sequences.lengths[0] + 1, self.geometry.page_tokens
        if length % tokens:
            sequences.lengths = [length] * self.geometry.layers
            return
        for layer in range(self.geometry.layers) if self.window_pages else ():
            slide(self, sequences, layer, length // tokens - 1, 1)
        self._writer.seal_tails(sequences)

    def admit(self, sequences: Sequences, batch: int, length: int) -> None:
        """Let sequences go on, up to `length` tokens each; where attention is selective, in turn.

        Raises:
            ConfigError: attention is selective, and `max_batch` or `max_context` is less.
            BudgetError, ColdReadError: see `turns.activate`.
        """
        self._close_discarded()
        if self.selective is not None:
            tokens = self.geometry.page_tokens
            self.selective.check_room(batch, length // tokens, tokens)
            if self.selective.faults is not None:
                self.selective.faults.recover()
            activate(self, sequences)

    def new_blocks(self, count: int) -> Blocks:
        """Make blocks with one reference each."""
        with self.tiers.changed:
            return self.directory.new_blocks(count)

    def start(self, sequences: Sequences, batch: int) -> None:
        """Make `sequences`, new ones, an empty batch: only tails take frames, unless they wait.

        Raises:
            HotBudgetError, WarmBudgetError, DiskBudgetError: no room for the tails.
        """
        self._check_open()
        self._close_discarded()
        if sequences.waiting is None:
            sequences.tails = self.take_tails(batch)
        sequences.batch = batch
        sequences.blocks = np.zeros((batch, 0), dtype=np.int64)
        sequences.changed()
        self._open.add(sequences)
        if self.selective is not None and sequences.waiting is None:
            self.selective.owner = sequences

    def take_tails(self, count: int) -> Frames:
        """Take `count` tail frames in every layer, ``[layers, count]``; demotes if it must.

        Raises:
            HotBudgetError: the tails of all open sequences need more frames than there are.
        """
        held = sum(sequences.batch for sequences in self._open if sequences.waiting is None)
        if held + count > self.hot.frames_per_layer:
            raise HotBudgetError(self._too_many(held + count))
        every = range(self.geometry.layers)
        short = make_room(self, lambda: [max(0, count - self.hot.free(layer)) for layer in every])
        for layer, pages in enumerate(short):
            if pages:
                owner = self.hot.owner[layer]
                move_down(self, layer, owner[owner >= 0][-pages:])
        return np.stack([self.hot.take(layer, TAIL, count) for layer in every])

    def _too_many(self, tails: int) -> str:
        page, layers = self.geometry.page_bytes, self.geometry.layers
        budget, there = self.tiers.gpu_budget, self.hot.frames_per_layer
        more, way_out = (tails - there) * page * layers, ""
        if self.encode_hot:
            more = budget_for_tails(self.geometry, tails) - budget
            way_out = ", or keep hot pages raw: codec hot=raw"
        return (
            f"{tails} sequences need a tail page of {format_bytes(page)} in each of {layers} "
            f"layers; gpu_budget {format_bytes(budget)} leaves {there} pages a layer "
            f"(raise gpu_budget by {format_bytes(more)}{way_out})"
        )

    # -- downwards -------------------------------------------------------------------------

    def _reserve(self, sequences: Sequences, new: int) -> None:
        """Check that the pages a step will seal fit below what hot can keep."""
        tokens, batch = self.geometry.page_tokens, sequences.batch

        def down() -> list[int]:
            pages = []
            for layer, length in enumerate(sequences.lengths):
                sealed = (length + new) // tokens - length // tokens
                kept = min(sealed, self.hot.homes_free(layer) // batch) if sealed else 0
                pages.append((sealed - kept) * batch)
            return pages

        make_room(self, down)

    # -- upwards ---------------------------------------------------------------------------

    def plan(self, sequences: Sequences, layer: int, past: int | None = None) -> Plan:
        """Return the lookup of a layer over its sealed pages (or the first `past` of them)."""
        if past is None:
            past = sequences.lengths[layer] // self.geometry.page_tokens
        plan = sequences.plans.get(layer)
        if plan is None or plan.past != past or plan.placement_epoch != self.placement_epoch:
            plan = make_plan(
                sequences,
                layer,
                past,
                self.directory,
                staging_pages=self.placement.staging_pages,
                placement_epoch=self.placement_epoch,
                device=self.device,
                earlier=plan,
            )
            sequences.plans[layer] = plan
        return plan

    def open_sources(self, fetch: Fetch, *, encoded: bool = False) -> Sources | None:
        """Pin a fetch's pages and start their disk reads; see `sources.open_sources`."""
        return open_sources(self, fetch, encoded=encoded)

    # -- releasing -------------------------------------------------------------------------

    def release(self, blocks: Blocks) -> None:
        """Drop one reference to each block; free the pages nobody holds any more."""
        self.lookahead.cancel()
        self.transfer.wait_replay()
        with self.tiers.changed:
            dead = self.directory.release(blocks)
            if not len(dead):
                return
            self.outflow.free_warm(dead)
            for layer in range(self.geometry.layers):
                frames = self.directory.hot[dead, layer]
                self.hot.give(layer, frames[frames != NOWHERE])
            cold = np.argwhere(self.directory.cold[dead])
            pages = [(int(dead[row]), layer) for row, layer in cold.tolist()]
            keys = [self.tiers.key(*page) for page in pages if page[0] not in self.directory.saved]
            self.directory.forget(dead)
        if keys and self.cold is not None:
            self.cold.drop(keys)

    def close_sequences(self, sequences: Sequences) -> None:
        """Release everything a batch of sequences holds. Safe to call twice.

        Raises:
            ColdWriteError: their pages on disk could not be dropped; all frames are free.
        """
        if self.closed or sequences not in self._open:
            return
        self._open.discard(sequences)
        if self.prefix is not None:
            self.prefix.forget(sequences)
        if self.selective is not None and self.selective.owner is sequences:
            self.selective.forget()
        self.lookahead.cancel()
        for layer, tails in enumerate(sequences.tails):
            self.hot.give(layer, tails)
        sequences.changed()
        self.release(sequences.blocks)

    def discard(self, sequences: Sequences) -> None:
        """Close sequences from a finalizer: any thread, any moment; done at the next append."""
        self._discarded.append(sequences)

    def _close_discarded(self) -> None:
        while self._discarded:
            self.close_sequences(self._discarded.popleft())

    def close(self) -> None:
        """Wait for all copies, drop this session's pages, give back all memory."""
        if self.closed:
            return
        try:
            for sequences in list(self._open):
                self.close_sequences(sequences)
            if self.prefix is not None:
                self.prefix.clear()
        finally:
            self.lookahead.cancel()
            if self.selective is not None and self.selective.faults is not None:
                self.selective.faults.close()
            self.closed = True
            self.tiers.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the model was closed; wrap it again")

    def report(self) -> dict[str, Any]:
        """Return counters and the state of the tiers as plain JSON types."""
        report = self.tiers.report()
        return report if self.prefix is None else {**report, "prefix": self.prefix.report()}
