"""The page manager: the only mover of pages.

Where a page lives is decided when it is sealed: in hot while its layer's share lasts, else in
warm, else on disk. In exact mode that never changes, because every step reads everything once
and any other choice misses as often. Eviction is always a drop: a page leaves a tier only after
the tier below holds it.
"""

from __future__ import annotations

import secrets
import struct
import threading
from collections import Counter, deque
from typing import Any

import numpy as np
import torch

from tierkv.errors import (
    ClosedError,
    ColdWriteError,
    DiskBudgetError,
    HotBudgetError,
    TierKVError,
    WarmBudgetError,
)
from tierkv.page import Geometry
from tierkv.paging.directory import NOWHERE, Blocks, PageDirectory
from tierkv.paging.lookahead import Lookahead, Sources
from tierkv.paging.lookup import Lookup
from tierkv.paging.placement import STAGING_BUFFERS, Placement
from tierkv.paging.plan import Fetch, Plan, make_plan
from tierkv.paging.sequences import Sequences
from tierkv.stats import Stats
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.frames import Frames
from tierkv.tiers.hot import TAIL, HotTier
from tierkv.tiers.transfer import Transfer
from tierkv.tiers.warm import WarmTier
from tierkv.units import format_bytes

SESSION_PREFIX = b"session/"
"""Keys of pages that belong to one process and mean nothing to the next."""


class PageManager:
    """Pages of all sequences of one model, in three tiers.

    Args:
        geometry: shape of the KV cache.
        device: compute device.
        gpu_budget, cpu_budget: bytes on the compute device and in host memory.
        cold: the store on disk, owned by the manager from now on; None for two tiers.

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
    ):
        self.geometry, self.device, self.cold = geometry, device, cold
        self.stats = Stats()
        cuda = device.type == "cuda"
        self.placement = place = Placement.choose(
            geometry,
            gpu_budget=gpu_budget,
            cpu_budget=cpu_budget,
            has_cold=cold is not None,
            cuda=cuda,
        )
        self.gpu_budget, self.cpu_budget = gpu_budget, cpu_budget
        with torch.inference_mode(False):
            self.hot = HotTier(geometry, place.hot_frames, device)
            self.warm = WarmTier(
                geometry, place.warm_homes, place.warm_inbound, place.warm_outbound, pinned=cuda
            )
            self.transfer = Transfer(
                geometry,
                self.warm,
                cold,
                device,
                staging_pages=place.staging_pages,
                staging_buffers=STAGING_BUFFERS,
                io_threads=io_threads,
            )
        self.directory = PageDirectory(geometry.layers)
        self.lookahead = Lookahead(self, self.transfer, geometry.layers, self.stats)
        self.placement_epoch = 0
        self.closed = False
        self._open: set[Sequences] = set()
        self._discarded: deque[Sequences] = deque()
        self._changed = threading.Condition()  # guards directory, warm pools and what follows
        self._pinned: Counter[int] = Counter()
        self._homes_used = [0] * geometry.layers
        self._queued: list[tuple[int, int, int]] = []  # (block, layer, frame) to be spilled
        self._writing = 0  # entries of the batch on its way to disk
        self._orphans: set[int] = set()  # outbound frames dropped by their page while pinned
        self._spill_error: TierKVError | None = None
        self._session = SESSION_PREFIX + secrets.token_bytes(8)
        if cold is not None:
            cold.drop(list(cold.keys(SESSION_PREFIX)))

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
        if sequences not in self._open:
            while self._discarded:
                self.close_sequences(self._discarded.popleft())
            self._start(sequences, batch)
        tokens = self.geometry.page_tokens
        length = sequences.lengths[layer]
        past, offset = divmod(length, tokens)
        if length == max(sequences.lengths):
            self._reserve(sequences, new)
        missing = -(-(length + new) // tokens) - sequences.num_blocks
        if missing > 0:
            sequences.extend(self.new_blocks(batch * missing).reshape(batch, missing))
        tails = sequences.tails[layer].copy()
        kept = self._keep_tail(layer, tails, offset) if new > 1 and offset else None
        self._write(sequences, layer, k, v, past, offset)
        sequences.lengths[layer] = length + new
        visible = offset + 1 if new == 1 else offset
        return Lookup(self, sequences, layer, past, tails, visible, kept, new)

    def new_blocks(self, count: int) -> Blocks:
        """Make blocks with one reference each."""
        with self._changed:
            return self.directory.new_blocks(count)

    def _keep_tail(
        self, layer: int, tails: Frames, offset: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.as_tensor(tails[:, None], device=self.device)
        k, v = self.hot.arenas[layer].gather(index)
        return k[:, :, :offset], v[:, :, :offset]

    def _write(
        self,
        sequences: Sequences,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        past: int,
        offset: int,
    ) -> None:
        """Write tokens to tails and homes on the device, and pages without a home downwards."""
        tokens, batch, new = self.geometry.page_tokens, k.shape[0], k.shape[2]
        arena = self.hot.arenas[layer]
        sealed, rest = divmod(offset + new, tokens)
        tails = sequences.tails[layer]
        if not sealed:
            if batch > 1 and new == 1:
                self._write_one(sequences, layer, offset, k, v)
            else:
                for row in range(batch):
                    arena.write_tokens(int(tails[row]) * tokens + offset, k[row], v[row])
            return
        self.stats.pages_sealed += sealed * batch
        homes = min(sealed, self.hot.free(layer) // batch)
        chain = tails[:, None]
        if homes:
            fresh = self.hot.take(layer, TAIL, homes * batch).reshape(batch, homes)
            chain = np.concatenate([chain, fresh], axis=1)
            blocks = sequences.blocks[:, past : past + homes]
            self.hot.owner[layer, chain[:, :homes]] = blocks
            self.directory.hot[blocks, layer] = chain[:, :homes]
            sequences.tails[layer] = chain[:, homes]
        homed = new if homes == sealed else max(homes * tokens - offset, 0)
        for row in range(batch):
            self._write_chain(arena, chain[row], offset, k[row, :, :homed], v[row, :, :homed])
        if homes < sealed:
            self._seal_down(sequences, layer, k, v, past, offset, homes, sealed)
            if rest:
                for row, frame in enumerate(sequences.tails[layer].tolist()):
                    arena.write_tokens(frame * tokens, k[row, :, -rest:], v[row, :, -rest:])
        sequences.sealed(layer)

    def _write_one(
        self, sequences: Sequences, layer: int, offset: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        arena = self.hot.arenas[layer]
        index = sequences.tail_index(layer, self.device)
        arena.k_frames.select(2, offset).index_copy_(1, index, k[:, :, 0].transpose(0, 1))
        arena.v_frames.select(2, offset).index_copy_(1, index, v[:, :, 0].transpose(0, 1))

    def _write_chain(
        self, arena: Any, chain: Frames, offset: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write consecutive tokens of one sequence over a chain of frames, run by run."""
        tokens, done = self.geometry.page_tokens, 0
        starts = np.flatnonzero(np.diff(chain, prepend=chain[0] - 2) != 1)
        stops = np.append(starts[1:], len(chain))
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            count = min((stop - start) * tokens - offset, k.shape[1] - done)
            if count <= 0:
                return
            slot = int(chain[start]) * tokens + offset
            arena.write_tokens(slot, k[:, done : done + count], v[:, done : done + count])
            done, offset = done + count, 0

    def _seal_down(
        self,
        sequences: Sequences,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        past: int,
        offset: int,
        homes: int,
        sealed: int,
    ) -> None:
        """Send the sealed pages that found no hot home to the tiers below."""
        tokens, arena = self.geometry.page_tokens, self.hot.arenas[layer]
        start = homes * tokens - offset if homes else 0
        first = past + homes
        for row in range(k.shape[0]):
            at, position = start, first
            if not homes and offset:  # the tail's first tokens lie in its frame
                frame = sequences.tails[layer, row : row + 1]
                at = tokens - offset
                arena.write_tokens(int(frame[0]) * tokens + offset, k[row, :, :at], v[row, :, :at])
                page_k, page_v = arena.pages(frame)
                self._send_down(layer, sequences.blocks[row, past : past + 1], page_k, page_v)
                position += 1
            count = past + sealed - position
            if count:
                pages = slice(at, at + count * tokens)
                self._send_down(
                    layer,
                    sequences.blocks[row, position : position + count],
                    k[row, :, pages].unflatten(1, (count, tokens)),
                    v[row, :, pages].unflatten(1, (count, tokens)),
                )

    def _start(self, sequences: Sequences, batch: int) -> None:
        sequences.batch = batch
        sequences.tails = np.zeros((self.geometry.layers, batch), dtype=np.int64)
        sequences.blocks = np.zeros((batch, 0), dtype=np.int64)
        sequences.tails = self.take_tails(batch)
        self._open.add(sequences)

    def take_tails(self, count: int) -> Frames:
        """Take `count` tail frames in every layer, ``[layers, count]``; demotes if it must.

        Raises:
            HotBudgetError: the tails of all open sequences need more frames than there are.
        """
        held = sum(sequences.batch for sequences in self._open)
        if held + count > self.hot.frames_per_layer:
            page, layers = self.geometry.page_bytes, self.geometry.layers
            raise HotBudgetError(
                f"{held + count} sequences need a tail page of {format_bytes(page)} in each of "
                f"{layers} layers; gpu_budget {format_bytes(self.gpu_budget)} leaves "
                f"{self.hot.frames_per_layer} pages a layer (raise gpu_budget by "
                f"{format_bytes((held + count - self.hot.frames_per_layer) * page * layers)})"
            )
        short = [max(0, count - self.hot.free(layer)) for layer in range(self.geometry.layers)]
        self._check_room(short)
        for layer, pages in enumerate(short):
            if pages:
                self._demote(layer, pages)
        layers = range(self.geometry.layers)
        return np.stack([self.hot.take(layer, TAIL, count) for layer in layers])

    # -- downwards -------------------------------------------------------------------------

    def _reserve(self, sequences: Sequences, new: int) -> None:
        """Check that the pages a step will seal fit below what hot can keep."""
        tokens, batch = self.geometry.page_tokens, sequences.batch
        down = []
        for layer, length in enumerate(sequences.lengths):
            sealed = (length + new) // tokens - length // tokens
            down.append((sealed - min(sealed, self.hot.free(layer) // batch)) * batch)
        self._check_room(down)

    def _check_room(self, down: list[int]) -> None:
        """Check that warm and cold can take `down[layer]` more pages of each layer.

        Raises:
            WarmBudgetError, DiskBudgetError: they cannot; the message says what is missing.
            ColdWriteError: an earlier write to disk failed, and again just now.
        """
        if self._spill_error is not None:
            self.transfer.spill(self._spill).result()
        if self._spill_error is not None:
            raise ColdWriteError(
                f"pages could not be written to disk and stay in warm memory: {self._spill_error}"
            ) from self._spill_error
        if not any(down):
            return
        with self._changed:
            quota = [self._home_quota(layer) for layer in range(self.geometry.layers)]
            queued = self.warm.outbound.used
        size, warm = self.geometry.frame_bytes, self.warm.homes.free
        if self.cold is None:
            if sum(down) > warm:
                raise WarmBudgetError(
                    f"{sum(down)} more pages of {format_bytes(size)} do not fit: warm has room "
                    f"for {warm} of {self.warm.homes.capacity} and there is no store; raise "
                    f"cpu_budget (now {format_bytes(self.cpu_budget)}) or gpu_budget by "
                    f"{format_bytes((sum(down) - warm) * size)}, or set store"
                )
            return
        to_disk = sum(max(0, need - room) for need, room in zip(down, quota, strict=True))
        room = self.cold.room() - queued
        if to_disk > room:
            raise DiskBudgetError(
                f"{to_disk} more pages of {format_bytes(size)} must go to disk, which has room "
                f"for {max(room, 0)}; raise disk_budget (now "
                f"{format_bytes(self.cold.disk_budget)}) by "
                f"{format_bytes((to_disk - room) * size)}, free disk space above disk_floor, or "
                f"raise cpu_budget"
            )

    def _home_quota(self, layer: int) -> int:
        """Warm homes that a layer may still take: with a cold tier, every layer has its share."""
        if self.cold is None:
            return self.warm.homes.free
        share, extra = divmod(self.warm.homes.capacity, self.geometry.layers)
        quota = share + (layer < extra) - self._homes_used[layer]
        return max(0, min(quota, self.warm.homes.free))

    def _send_down(self, layer: int, blocks: Blocks, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write sealed pages to warm homes while they last, the rest through warm to disk.

        blocks: ``[n]``; k, v: ``[kv_heads, n, page_tokens, dim]`` on the device.
        """
        self.stats.hot_to_warm_bytes += len(blocks) * self.geometry.page_bytes
        with self._changed:
            homes = min(len(blocks), self._home_quota(layer))
            frames = self.warm.homes.take(homes)
            self._homes_used[layer] += homes
        if homes:
            self.transfer.write_down(k[:, :homes], v[:, :homes], frames)
            with self._changed:
                self.directory.warm[blocks[:homes], layer] = frames
        at = homes
        while at < len(blocks):
            frames = self._take_outbound(len(blocks) - at)
            part = slice(at, at + len(frames))
            self.transfer.write_down(k[:, part], v[:, part], frames)
            with self._changed:
                self.directory.warm[blocks[part], layer] = frames
                entries = zip(blocks[part].tolist(), frames.tolist(), strict=True)
                self._queued.extend((block, layer, frame) for block, frame in entries)
            self.transfer.spill(self._spill)
            at = part.stop

    def _take_outbound(self, count: int) -> Frames:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self.warm.outbound.free
                    or self._spill_error
                    or not (self._queued or self._writing)
                )
            )
            pinned = not self.warm.outbound.free and not self._spill_error
        if pinned:  # every frame is on disk but held for an upcoming lookup, which must yield
            self.lookahead.cancel()
        if not self.warm.outbound.free:
            self._check_room([])  # retries what failed, raises if it fails again
        with self._changed:
            return self.warm.outbound.take(min(count, self.warm.outbound.free))

    def _spill(self) -> None:
        """Write everything queued to disk as one batch. Runs on the spill thread.

        A failed batch goes back into the queue: its pages stay readable in warm memory.
        """
        with self._changed:
            batch, self._queued = self._queued, []
            self._writing = len(batch)
        if not batch:
            return
        blocks, layers, frames = (
            np.array(column, dtype=np.int64) for column in zip(*batch, strict=True)
        )
        error: TierKVError | None = None
        try:
            self.transfer.put_cold([self._key(block, layer) for block, layer, _ in batch], frames)
        except TierKVError as failure:
            error = failure
        with self._changed:
            self._spill_error, self._writing = error, 0
            if error is not None:
                self._queued = batch + self._queued
            else:
                self.stats.warm_to_cold_bytes += len(batch) * self.geometry.frame_bytes
                self.directory.cold[blocks, layers] = True
                self.directory.warm[blocks, layers] = NOWHERE
                pinned = {frame for frame in frames.tolist() if self._pinned[frame]}
                self._orphans |= pinned
                free = [frame for frame in frames.tolist() if frame not in pinned]
                self.warm.outbound.give(np.array(free, dtype=np.int64))
            self._changed.notify_all()

    def _demote(self, layer: int, count: int) -> None:
        """Move resident pages of a layer down to free their frames for tails."""
        owner = self.hot.owner[layer]
        frames = np.flatnonzero(owner >= 0)[-count:]
        blocks = owner[frames].copy()
        k, v = self.hot.arenas[layer].pages(frames)
        self.lookahead.cancel()
        self._send_down(layer, blocks, k, v)
        self.directory.hot[blocks, layer] = NOWHERE
        self.hot.give(layer, frames)
        self.stats.pages_demoted += count
        self.placement_epoch += 1

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
            )
            sequences.plans[layer] = plan
        return plan

    def open_sources(self, fetch: Fetch) -> Sources | None:
        """Pin a fetch's pages and start their disk reads; None when warm frames are short."""
        if fetch.settled:
            self.stats.warm_to_hot_bytes += len(fetch.blocks) * self.geometry.page_bytes
            sources: Sources = fetch.settled[0]
            return sources
        layer, blocks = fetch.layer, fetch.blocks
        with self._changed:
            hot, frames = self.directory.hot[blocks, layer], self.directory.warm[blocks, layer]
            on_device = np.flatnonzero(hot != NOWHERE)
            missing = np.flatnonzero((hot == NOWHERE) & (frames == NOWHERE))
            if len(missing) > self.warm.inbound.free:
                return None
            inbound = self.warm.inbound.take(len(missing))
            frames[missing] = inbound
            slots = np.flatnonzero(hot == NOWHERE)
            frames = frames[slots]
            pinned = frames[frames >= self.warm.outbound_start].tolist()
            self._pinned.update(pinned)
        reads = []
        if len(missing):
            keys = [self._key(block, layer) for block in blocks[missing].tolist()]
            reads = self.transfer.read_cold(keys, inbound)
            self.stats.cold_to_warm_bytes += len(missing) * self.geometry.frame_bytes
        self.stats.warm_to_hot_bytes += len(slots) * self.geometry.page_bytes
        resident = None
        if len(on_device):
            pages = self.hot.arenas[layer].pages(hot[on_device])
            resident = (torch.as_tensor(on_device, device=self.device), *pages)

        def release() -> None:
            if len(inbound) or pinned:
                with self._changed:
                    self.warm.inbound.give(inbound)
                    self._unpin(pinned)

        spans = self.transfer.spans(slots, frames)
        sources = Sources(
            spans, frames, reads, resident, len(on_device), len(slots) - len(missing),
            len(missing), release,
        )  # fmt: skip
        if not (len(missing) or len(on_device) or pinned):
            fetch.settled.append(sources)
        return sources

    def _unpin(self, frames: list[int]) -> None:
        for frame in frames:
            self._pinned[frame] -= 1
            if not self._pinned[frame]:
                del self._pinned[frame]
                if frame in self._orphans:  # its page is on disk by now
                    self._orphans.discard(frame)
                    self.warm.outbound.give(np.array([frame]))
        self._changed.notify_all()

    # -- releasing -------------------------------------------------------------------------

    def release(self, blocks: Blocks) -> None:
        """Drop one reference to each block; free the pages nobody holds any more."""
        self.lookahead.cancel()
        with self._changed:
            dead = self.directory.release(blocks)
            if not len(dead):
                return
            self._changed.wait_for(lambda: not self._writing)
            gone = set(dead.tolist())
            self._queued = [entry for entry in self._queued if entry[0] not in gone]
            warm = self.directory.warm[dead]
            for layer in range(self.geometry.layers):
                frames = self.directory.hot[dead, layer]
                self.hot.give(layer, frames[frames != NOWHERE])
                homes = warm[:, layer]
                homes = homes[(homes != NOWHERE) & (homes < self.warm.homes.capacity)]
                self.warm.homes.give(homes)
                self._homes_used[layer] -= len(homes)
            self.warm.outbound.give(warm[warm >= self.warm.outbound_start])
            cold = np.argwhere(self.directory.cold[dead])
            keys = [self._key(int(dead[row]), layer) for row, layer in cold.tolist()]
            self.directory.forget(dead)
        if keys and self.cold is not None:
            self.cold.drop(keys)

    def close_sequences(self, sequences: Sequences) -> None:
        """Release everything a batch of sequences holds. Safe to call twice."""
        if self.closed or sequences not in self._open:
            return
        self._open.discard(sequences)
        self.release(sequences.blocks)
        for layer in range(self.geometry.layers):
            self.hot.give(layer, sequences.tails[layer])
        sequences.changed()

    def discard(self, sequences: Sequences) -> None:
        """Close sequences from a finalizer: any thread, any moment; done at the next append."""
        self._discarded.append(sequences)

    def close(self) -> None:
        """Wait for all copies, drop this session's pages, give back all memory."""
        if self.closed:
            return
        for sequences in list(self._open):
            self.close_sequences(sequences)
        self.lookahead.cancel()
        self.closed = True
        self.transfer.close()
        self.warm.close()
        if self.cold is not None:
            self.cold.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the model was closed; wrap it again")

    def _key(self, block: int, layer: int) -> bytes:
        return self._session + struct.pack(">IH", block, layer)

    def report(self) -> dict[str, Any]:
        """Return counters and the state of the tiers as plain JSON types."""
        page, frame = self.geometry.page_bytes, self.geometry.frame_bytes
        cold_pages = len(self.cold) if self.cold is not None else 0
        return {
            "tiers": {
                "hot": {
                    "pages": self.hot.pages,
                    "bytes": self.hot.pages * page,
                    "budget_bytes": self.gpu_budget,
                },
                "warm": {
                    "pages": self.warm.pages,
                    "bytes": self.warm.pages * frame,
                    "budget_bytes": self.cpu_budget,
                },
                "cold": {
                    "pages": cold_pages,
                    "bytes": cold_pages * frame,
                    "budget_bytes": self.cold.disk_budget if self.cold is not None else 0,
                },
            },
            **self.stats.as_dict(),
        }
