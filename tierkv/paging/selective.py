"""What selective attention keeps on the compute device, and how much memory that is.

For every layer that selects: a summary of each sealed page and, on a GPU, the host address of each
page and a reuse cache of head-page frames. Sealed pages of such a layer go down at once; its
frames hold copies, so that leaving one is a drop. Frames of a layer: the tails of the sequences
that run together, then for each sequence the sinks, a ring of recent pages (one more than are read,
for the page that is being sealed), and the slots of the reuse cache, which every KV head fills as
it likes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tierkv.errors import ConfigError
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena
from tierkv.tiers.device_memory import free
from tierkv.tiers.frames import Frames

if TYPE_CHECKING:
    from tierkv.paging.faults import FaultService
    from tierkv.paging.sequences import Sequences

NONE = -1
TAIL_FRAME = 0
"""Frame of the first sequence's tail; those of the others follow."""


@dataclass(frozen=True, slots=True)
class Selective:
    """Sizes of selective attention, in pages, and who ranks them.

    Attributes:
        dense_layers: first tiered layers, which stay exact.
        budget_pages: pages that a KV head chooses at most.
        sink_pages, recent_pages: first and last sealed pages, which are always read.
        slots: frames of the reuse cache, per layer and KV head; 0 where pages are read from warm
            memory itself (CPU).
        max_pages: sealed pages of a sequence at most.
        parts: vectors of `k_dim` elements in a page's summary.
        selector: ranks pages; `tierkv.selection.Selector`.
        mass_target: share of the estimated attention at which choosing stops, or None.
        skips: whether chosen pages that are on disk are left out instead of waited for.
        sequences: sequences that run together at most; each has memory of its own.
    """

    dense_layers: int
    budget_pages: int
    sink_pages: int
    recent_pages: int
    slots: int
    max_pages: int
    parts: int
    selector: Any
    mass_target: float | None
    skips: bool = False
    sequences: int = 1

    @property
    def kept_pages(self) -> int:
        """Pages that are always read."""
        return self.sink_pages + self.recent_pages

    @property
    def frames(self) -> int:
        """Frames of a layer and sequence beyond the tail."""
        return self.kept_pages + 1 + self.slots if self.slots else 0

    def first_frame(self, sequence: int) -> int:
        """Frame of a sequence's first sink."""
        return self.sequences + sequence * self.frames

    @property
    def first_slot(self) -> int:
        """Frame of the first sequence's first slot: behind its sinks and its ring."""
        return self.first_frame(0) + self.kept_pages + 1

    def kept_frames(self, sealed: int) -> Frames:
        """Return the first sequence's frames of sinks and recent pages, of `sealed` pages."""
        recent = np.arange(sealed - self.recent_pages, sealed) % (self.recent_pages + 1)
        sinks = np.arange(self.sink_pages)
        return self.first_frame(0) + np.concatenate([sinks, self.sink_pages + recent])

    def selects(self, layer: int) -> bool:
        """Whether a tiered layer selects."""
        return layer >= self.dense_layers

    def state_bytes(self, geometry: Geometry) -> int:
        """Device bytes of one selecting layer."""
        return self.sequences * self.sequence_bytes(geometry)

    def sequence_bytes(self, geometry: Geometry) -> int:
        """Those of one sequence."""
        heads = geometry.kv_heads
        page = heads * self.parts * geometry.k_dim * geometry.dtype.itemsize
        if self.slots:
            page += 8 + 4 * heads  # its address, and which frame holds each head-page
        frames = (1 + self.frames) * geometry.page_bytes + 8 * heads * self.slots
        return frames + self.max_pages * page


class SelectiveState:
    """Summaries, addresses and the reuse cache of one context, for all layers that select.

    A context is one sequence, or a few of equal length that run together: `n` at most. The tail of
    the i-th is frame i, because tails take the lowest frames and only one context has any.

    Attributes (`s` layers that select, on the compute device):
        summaries: ``[s, n, kv_heads, max_pages, parts, k_dim]`` by page position.
        addresses: ``[s, n * max_pages]`` int64, host address of a page; 0 while in no warm home.
        where: ``[s, n, kv_heads, max_pages]`` int32, frame of each page in the reuse cache, or -1.
        held, stamp: ``[s, n, kv_heads, slots]`` int32, page in each slot, and the step that last
            chose it.
        step: ``[1]`` int32, counts steps; stamps are of its kind. `steps` is the host's count,
            which leaves out what is run before a step is captured.
        counters: ``[n * kv_heads, 4]`` int64, chosen head-pages that were in the reuse cache, that
            had to be fetched, and that were on disk; and of the first those foreseen in their step.
        announced: the same of the choices made ahead of their layer.
        away: pages without a warm home, as far as read by address.
        owner: the sequences whose pages these are.
        turns: how often a context took over that had waited.
        reader: what the attention keeps per layer; opaque here.
        faults: brings pages on disk that captured steps wait for; None until one does.
    """

    def __init__(self, spec: Selective, geometry: Geometry, device: torch.device):
        self.spec, self.device = spec, device
        layers, heads = max(geometry.layers - spec.dense_layers, 0), geometry.kv_heads
        pages, mapped = spec.max_pages, spec.max_pages if spec.slots else 0
        rows = layers, spec.sequences, heads
        integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.summaries = torch.empty(
            (*rows, pages, spec.parts, geometry.k_dim), dtype=geometry.dtype, device=device
        )
        self.addresses = torch.zeros(
            (layers, spec.sequences * mapped), dtype=torch.int64, device=device
        )
        self.where = torch.full((*rows, mapped), NONE, **integers)
        self.held = torch.full((*rows, spec.slots), NONE, **integers)
        self.stamp = torch.zeros_like(self.held)
        self.step, self.steps = torch.zeros(1, **integers), 0
        self.counters, self.announced = torch.zeros(
            (2, spec.sequences * heads, 4), dtype=torch.int64, device=device
        )
        self.away = 0
        self.owner: Sequences | None = None
        self.turns = 0
        self.reader: object | None = None
        self.faults: FaultService | None = None

    def index(self, layer: int) -> int:
        """Return a tiered layer's position among those that select."""
        return layer - self.spec.dense_layers

    def report(self) -> dict[str, Any]:
        """Return how many head-pages were chosen and where they came from.

        `foreseen` speaks of lookups announced ahead of their layer: of `chosen` head-pages
        `fetched` came that way, and `used` were chosen by the true query too.
        """
        names = ("reused", "fetched", "skipped" if self.spec.skips else "awaited")
        *counts, used = self.counters.sum(dim=0).tolist()
        reused, fetched, awaited, _ = self.announced.sum(dim=0).tolist()
        report: dict[str, Any] = dict(zip(names, counts, strict=True))
        if self.turns:
            report["turns"] = self.turns
        chosen = reused + fetched + awaited
        if chosen:
            report["foreseen"] = {"chosen": chosen, "fetched": fetched, "used": used}
        if self.faults is not None:
            report["faults"] = self.faults.report()
        return report

    def check_room(self, sequences: int, pages: int, page_tokens: int) -> None:
        """Check that a context of so many sequences, of `pages` sealed pages each, fits.

        Raises:
            ConfigError: it does not; names `max_batch` or `max_context`.
        """
        if sequences > self.spec.sequences:
            raise ConfigError(
                f"max_batch is {self.spec.sequences}, and attention='selective' got a batch of "
                f"{sequences}; raise max_batch (summaries and frames of so many sequences are kept "
                f"on the device)"
            )
        if pages > self.spec.max_pages:
            raise ConfigError(
                f"max_context is {self.spec.max_pages * page_tokens} tokens, and the context would "
                f"grow to {pages * page_tokens}; raise max_context (summaries of so many tokens "
                f"are kept on the device)"
            )

    def sealed(
        self,
        layer: int,
        sequence: int,
        first: int,
        k: torch.Tensor,
        v: torch.Tensor,
        arena: Arena,
        addresses: Frames | None,
    ) -> None:
        """Take note of a sequence's sealed pages ``first ..``, before their memory is used again.

        k, v: ``[kv_heads, n, page_tokens, dim]``; addresses: ``[n]`` in host memory, 0 for pages
        on their way to disk; None where pages are not read by address.
        """
        at, stop = self.index(layer), first + k.shape[1]
        if self.spec.parts:
            self.summaries[at, sequence, :, first:stop] = self.spec.selector.summarize(k).to(
                self.summaries.dtype
            )
        if addresses is None:
            return
        self.away += int((addresses == 0).sum())
        self.by_sequence(self.addresses[at])[sequence, first:stop] = torch.from_numpy(addresses).to(
            self.device, non_blocking=True
        )
        sinks, recent = self.spec.sink_pages, self.spec.recent_pages
        if first < sinks:
            kept = np.arange(first, min(sinks, stop))
            _keep(arena, self.spec.first_frame(sequence) + kept, k, v)
        start = max(first, stop - recent - 1)
        self.keep_recent(sequence, start, k[:, start - first :], v[:, start - first :], arena)

    def sealed_across(
        self,
        position: int,
        k: torch.Tensor,
        v: torch.Tensor,
        frames: tuple[torch.Tensor, torch.Tensor],
        addresses: Frames,
        *,
        away: bool,
    ) -> None:
        """Take note of one sealed page of each sequence in every layer that selects, on a GPU.

        k, v: ``[s, kv_heads, batch, page_tokens, dim]``; frames: the layers' K and V by frame,
        ``[s, kv_heads, frames, page_tokens, dim]``; addresses: ``[s, batch]`` in host memory; away:
        whether they have no warm home.
        """
        batch, spec = addresses.shape[1], self.spec
        self.away += addresses.size if away else 0
        if spec.parts:
            self.summaries[:, :batch, :, position] = spec.selector.summarize(k).transpose(1, 2)
        hosts = torch.from_numpy(addresses).to(self.device)
        self.by_sequence(self.addresses)[:, :batch, position] = hosts
        kept = [spec.sink_pages + position % (spec.recent_pages + 1)]
        if position < spec.sink_pages:
            kept.append(position)
        for frame in kept:
            own = slice(spec.first_frame(0) + frame, spec.first_frame(batch), spec.frames)
            frames[0][:, :, own].copy_(k)
            frames[1][:, :, own].copy_(v)

    def keep_recent(
        self, sequence: int, first: int, k: torch.Tensor, v: torch.Tensor, arena: Arena
    ) -> None:
        """Put a sequence's pages ``first ..`` into the ring of recent ones."""
        if k.shape[1]:
            ring = np.arange(first, first + k.shape[1]) % (self.spec.recent_pages + 1)
            ring += self.spec.first_frame(sequence) + self.spec.sink_pages
            _keep(arena, ring, k, v)

    def by_sequence(self, addresses: torch.Tensor) -> torch.Tensor:
        """View ``[..., n * max_pages]`` as ``[..., n, max_pages]``."""
        return addresses.unflatten(-1, (self.spec.sequences, -1))

    def remap(self, rows: Frames, arenas: list[Arena], addresses: list[Frames]) -> None:
        """Make sequence i what sequence ``rows[i]`` was, which has read the same pages.

        arenas: of the layers that select; addresses: theirs, ``[len(rows) * pages]``, as they are
        then. What was brought from disk for a while counts as gone.
        """
        if self.faults is not None:
            self.faults.truncate(0)
        count, frames = len(rows), self.spec.frames
        sources = torch.from_numpy(rows).to(self.device)
        shift = (torch.arange(count, device=self.device) - sources).int()[:, None, None] * frames
        for at, (arena, hosts) in enumerate(zip(arenas, addresses, strict=True)):
            for tensor in (self.summaries[at], self.held[at], self.stamp[at]):
                tensor[:count] = tensor[sources]
            where = self.where[at, sources]
            self.where[at, :count] = torch.where(where == NONE, NONE, where + shift)
            if not self.spec.slots:
                continue
            told = self.by_sequence(self.addresses[at])[:count]
            told.zero_()
            told[:, : len(hosts) // count] = torch.from_numpy(hosts).view(count, -1).to(self.device)
            for paged in (arena.k_frames, arena.v_frames):
                own = paged[:, self.spec.sequences :].unflatten(1, (self.spec.sequences, frames))
                own[:, :count] = own[:, sources]

    def truncate(self, pages: int) -> None:
        """Forget pages from position `pages` on: others may take their positions."""
        if self.faults is not None:
            self.faults.truncate(pages)
        if self.spec.slots:
            self.by_sequence(self.addresses)[:, :, pages:] = 0
        gone = self.held >= pages
        self.held.masked_fill_(gone, NONE)
        self.stamp.masked_fill_(gone, 0)
        self.where[..., pages:] = NONE

    def forget_frames(self) -> None:
        """Forget what is in the reuse cache."""
        self.held.fill_(NONE)
        self.stamp.zero_()
        self.where.fill_(NONE)

    def forget(self) -> None:
        """Forget everything; the next sequences may take over."""
        self.truncate(0)
        self.owner, self.away = None, 0

    def close(self) -> None:
        """Give back what is large."""
        free((self.summaries, self.addresses, self.where, self.held, self.stamp))


def _keep(arena: Arena, frames: Frames, k: torch.Tensor, v: torch.Tensor) -> None:
    for page, frame in enumerate(frames.tolist()):
        arena.k_frames[:, frame].copy_(k[:, page])
        arena.v_frames[:, frame].copy_(v[:, page])
