"""Sealed pages on their way down: to a home in warm memory, or through warm memory to disk.

Where hot pages are encoded, they get a home on the device before all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
import torch

from tierkv.errors import ColdWriteError, DiskBudgetError, TierKVError, WarmBudgetError
from tierkv.paging.directory import NOWHERE, Blocks
from tierkv.paging.tierset import TierSet
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.frames import Frames
from tierkv.units import format_bytes

CATALOGUE_MARGIN_BYTES = 64 << 10
"""Disk kept free beyond the pages asked for: several small writes grow the catalogue by more
than the one write that `ColdStore.room` speaks of."""


class Outflow:
    """Writes pages through to the tiers below hot.

    Args:
        make_way: makes upcoming lookups let go of the outbound frames they hold.
    """

    def __init__(self, tiers: TierSet, make_way: Callable[[], None]):
        self.tiers, self._make_way = tiers, make_way
        self._homes_used = [0] * tiers.geometry.layers
        self._queued: list[tuple[int, int, int]] = []  # (block, layer, frame) to be spilled
        self._writing = 0  # entries of the batch on its way to disk
        self._copying = 0  # pages that `copy_down` is about to write
        self._pinned: Counter[int] = Counter()  # outbound frames that upcoming lookups read
        self._orphans: set[int] = set()  # outbound frames dropped by their page while pinned
        self._spill_error: TierKVError | None = None

    def check_room(self, down: Sequence[int], sinking: Sequence[int] = ()) -> None:
        """Check that there is room for `down[layer]` more encoded pages of each layer.

        sinking: of each layer, pages that need room in warm and cold: they leave the device.

        Raises:
            WarmBudgetError, DiskBudgetError: they cannot; the message says what is missing.
            WriteLimitError: a `DiskBudgetError`; the day's writes are used up.
            ColdWriteError: an earlier write to disk failed, and again just now.
        """
        if self._spill_error is not None:
            self.tiers.transfer.spill(self._spill).result()
        if self._spill_error is not None:
            full = isinstance(self._spill_error, DiskBudgetError)
            raise (type(self._spill_error) if full else ColdWriteError)(
                f"pages could not be written to disk and stay in warm memory: {self._spill_error}"
            ) from self._spill_error
        if not any((*down, *sinking)):
            return
        layers = range(self.tiers.geometry.layers)
        with self.tiers.changed:
            quota = [self.warm_free(layer) for layer in layers]
            above = [self.tiers.device_frames.free(layer) for layer in layers]
        below = [max(0, need - room) for need, room in zip(down, above, strict=True)]
        down = [a + b for a, b in zip(below, sinking or [0] * len(below), strict=True)]
        size, warm = self.tiers.warm.frame_bytes, self.tiers.warm.homes.free
        if self.tiers.cold is None:
            if sum(down) > warm:
                raise WarmBudgetError(
                    f"{sum(down)} more pages of {format_bytes(size)} do not fit: warm has room "
                    f"for {warm} of {self.tiers.warm.homes.capacity} and there is no store; raise "
                    f"cpu_budget (now {format_bytes(self.tiers.cpu_budget)}) or gpu_budget by "
                    f"{format_bytes((sum(down) - warm) * size)}, or set store"
                )
            return
        to_disk = sum(max(0, need - room) for need, room in zip(down, quota, strict=True))
        if not to_disk:
            return
        try:
            self._check_disk(self.tiers.cold, to_disk)
        except DiskBudgetError:  # pages that are just being written may have been counted twice
            self.tiers.transfer.spill(self._spill).result()
            self._check_disk(self.tiers.cold, to_disk)

    def _check_disk(self, cold: ColdStore, to_disk: int) -> None:
        size = self.tiers.warm.frame_bytes
        with self.tiers.changed:
            queued = len(self._queued) + self._writing + self._copying
        cold.writes.check((to_disk + queued) * size)
        room = cold.room() - queued - -(-CATALOGUE_MARGIN_BYTES // size)
        if to_disk > room:
            raise DiskBudgetError(
                f"{to_disk} more pages of {format_bytes(size)} must go to disk, which has room "
                f"for {max(room, 0)}; raise disk_budget (now "
                f"{format_bytes(cold.disk_budget)}) by "
                f"{format_bytes((to_disk - room) * size)}, free disk space above disk_floor, or "
                f"raise cpu_budget"
            )

    def warm_free(self, layer: int) -> int:
        """Warm homes that a layer may still take: with a cold tier, every layer has its share."""
        if self.tiers.cold is None:
            return self.tiers.warm.homes.free
        share, extra = divmod(self.tiers.warm.homes.capacity, self.tiers.geometry.layers)
        quota = share + (layer < extra) - self._homes_used[layer]
        return max(0, min(quota, self.tiers.warm.homes.free))

    def send_down(self, layer: int, blocks: Blocks, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write sealed pages to homes while they last, the rest through warm to disk.

        blocks: ``[n]``; k, v: ``[kv_heads, n, page_tokens, dim]`` on the device.
        """

        def write(part: slice, frames: Frames) -> None:
            self.tiers.transfer.write_down(k[:, part], v[:, part], frames)

        with self.tiers.changed:
            device = self.tiers.device_frames
            frames = device.take(layer, min(len(blocks), device.free(layer)))
        self._fill(layer, blocks[: len(frames)], frames, write, slice(0, len(frames)))
        self._below(layer, blocks, len(frames), write)

    def sink(self, layer: int, blocks: Blocks) -> None:
        """Move encoded pages from the device to warm homes while they last, the rest to disk.

        Those that are on disk already are dropped. blocks: ``[n]``, all of them on the device.
        """
        directory, device = self.tiers.directory, self.tiers.device_frames
        frames = directory.warm[blocks, layer]
        durable = directory.cold[blocks, layer]

        def write(part: slice, to: Frames) -> None:
            self.tiers.transfer.copy_out(leaving[part], to)

        with self.tiers.changed:
            directory.warm[blocks[durable], layer] = NOWHERE
            device.give(layer, frames[durable])
        blocks, leaving = blocks[~durable], frames[~durable]
        try:
            self._below(layer, blocks, 0, write)
        finally:
            with self.tiers.changed:
                gone = directory.warm[blocks, layer] != leaving
                device.give(layer, leaving[gone])

    def _below(
        self, layer: int, blocks: Blocks, at: int, write: Callable[[slice, Frames], None]
    ) -> None:
        """Put pages from the `at`-th on into warm homes while they last, then through to disk."""
        tiers = self.tiers
        tiers.stats.hot_to_warm_bytes += (len(blocks) - at) * tiers.format.page_bytes
        frames = self.take_homes(layer, len(blocks) - at)
        part = slice(at, at + len(frames))
        self._fill(layer, blocks[part], frames, write, part)
        at = part.stop
        while at < len(blocks):
            frames = self._take_outbound(len(blocks) - at)
            part = slice(at, at + len(frames))
            self._fill(layer, blocks[part], frames, write, part)
            with self.tiers.changed:
                entries = zip(blocks[part].tolist(), frames.tolist(), strict=True)
                self._queued.extend((block, layer, frame) for block, frame in entries)
            self.tiers.transfer.spill(self._spill)
            at = part.stop

    def send_across(
        self, layers: range, blocks: Blocks, k: torch.Tensor, v: torch.Tensor
    ) -> Frames | None:
        """Write pages of several layers at once: to warm homes, or through warm to disk.

        blocks: ``[n]``; k, v: ``[kv_heads, layers * n, page_tokens, dim]`` on the device. Returns
        the frames, ``[layers, n]``, homes or outbound ones, or None, with nothing done, if there
        are too few of both.
        """
        tiers, warm, each = self.tiers, self.tiers.warm, len(blocks)
        count = len(layers) * each
        with tiers.changed:
            homes = warm.homes.free >= count and min(map(self.warm_free, layers)) >= each
            if homes:
                frames = warm.homes.take(count).reshape(-1, each)
                for layer in layers:
                    self._homes_used[layer] += each
            elif tiers.cold is not None and warm.outbound.free >= count:
                frames = warm.outbound.take(count).reshape(-1, each)
            else:
                return None
        try:
            tiers.transfer.write_down(k, v, frames.reshape(-1))
        except BaseException:
            with tiers.changed:
                for layer, own in zip(layers, frames, strict=True):
                    self.give_homes(layer, own)
            raise
        tiers.stats.hot_to_warm_bytes += count * tiers.format.page_bytes
        with tiers.changed:
            tiers.directory.warm[blocks, layers.start : layers.stop] = frames.T
            for layer, outbound in zip(layers, frames.tolist(), strict=True) if not homes else ():
                entries = zip(blocks.tolist(), outbound, strict=True)
                self._queued.extend((block, layer, frame) for block, frame in entries)
        if not homes:
            tiers.transfer.spill(self._spill)
        return frames

    def _fill(
        self,
        layer: int,
        blocks: Blocks,
        frames: Frames,
        write: Callable[[slice, Frames], None],
        part: slice,
    ) -> None:
        """Have a part of pages written to frames; the frames are free again if that fails."""
        if not len(frames):
            return
        try:
            write(part, frames)
        except BaseException:
            with self.tiers.changed:
                self.give_homes(layer, frames)
            raise
        with self.tiers.changed:
            self.tiers.directory.warm[blocks, layer] = frames

    def take_homes(self, layer: int, count: int) -> Frames:
        """Take up to `count` warm homes, as many as the layer's share has left."""
        with self.tiers.changed:
            frames = self.tiers.warm.homes.take(min(count, self.warm_free(layer)))
            self._homes_used[layer] += len(frames)
        return frames

    def leave_home(self, layer: int, blocks: Blocks) -> None:
        """Free the homes of pages that are raw on the device now. Lock held."""
        frames = self.tiers.directory.warm[blocks, layer]
        home = (frames != NOWHERE) & (frames < self.tiers.warm.inbound_start)
        self.tiers.directory.warm[blocks[home], layer] = NOWHERE
        self.give_homes(layer, frames[home])

    def give_homes(self, layer: int, frames: Frames) -> None:
        """Free a layer's frames, homes and outbound ones. Lock held."""
        warm = self.tiers.warm
        self.tiers.device_frames.give(layer, frames[warm.on_device(frames)])
        homes = frames[warm.in_homes(frames)]
        warm.homes.give(homes)
        self._homes_used[layer] -= len(homes)
        warm.outbound.give(frames[frames >= warm.outbound_start])

    def copy_down(self, blocks: Blocks, layers: Blocks) -> Future[None]:
        """Start writing pages, ``[n]``, to disk whose warm homes stay; not those that are there.

        The future raises `DiskBudgetError`, or what failed; nothing has changed then.
        """

        def write() -> None:
            tiers, directory, cold = self.tiers, self.tiers.directory, self.tiers.cold
            assert cold is not None
            with tiers.changed:
                self._copying -= len(blocks)
                frames = directory.warm[blocks, layers]
                new = tiers.warm.in_homes(frames) & ~directory.cold[blocks, layers]
                self._writing = int(new.sum())
            try:
                self._check_disk(cold, 0)  # for what is being written
                named = zip(blocks[new].tolist(), layers[new].tolist(), strict=True)
                tiers.transfer.put_cold([tiers.key(*page) for page in named], frames[new])
                with tiers.changed:
                    directory.cold[blocks[new], layers[new]] = True
                    tiers.stats.warm_to_cold_bytes += int(new.sum()) * cold.frame_bytes
            finally:
                with tiers.changed:
                    self._writing = 0
                    tiers.changed.notify_all()

        with self.tiers.changed:
            self._copying += len(blocks)
        return self.tiers.transfer.spill(write)

    def _take_outbound(self, count: int) -> Frames:
        with self.tiers.changed:
            self.tiers.changed.wait_for(
                lambda: (
                    self.tiers.warm.outbound.free
                    or self._spill_error
                    or not (self._queued or self._writing)
                )
            )
            pinned = not self.tiers.warm.outbound.free and not self._spill_error
        if pinned:  # every frame is on disk but held for an upcoming lookup, which must yield
            self._make_way()
        if not self.tiers.warm.outbound.free:
            self.check_room([])  # retries what failed, raises if it fails again
        with self.tiers.changed:
            return self.tiers.warm.outbound.take(min(count, self.tiers.warm.outbound.free))

    def _spill(self) -> None:
        """Write everything queued to disk as one batch. Runs on the spill thread.

        A failed batch goes back into the queue: its pages stay readable in warm memory.
        """
        with self.tiers.changed:
            batch, self._queued = self._queued, []
            self._writing = len(batch)
            if not batch:
                self._spill_error = None  # nothing is left that could not be written
                return
        blocks, layers, frames = (
            np.array(column, dtype=np.int64) for column in zip(*batch, strict=True)
        )
        error: TierKVError | None = None
        try:
            self.tiers.transfer.put_cold(
                [self.tiers.key(block, layer) for block, layer, _ in batch], frames
            )
        except TierKVError as failure:
            error = failure
        except Exception as failure:  # whatever it is, the pages did not reach the disk
            error = ColdWriteError(f"{type(failure).__name__}: {failure}")
            error.__cause__ = failure
        with self.tiers.changed:
            self._spill_error, self._writing = error, 0
            if error is not None:
                self._queued = batch + self._queued
            else:
                assert self.tiers.cold is not None
                self.tiers.stats.warm_to_cold_bytes += len(batch) * self.tiers.cold.frame_bytes
                self.tiers.directory.cold[blocks, layers] = True
                self.tiers.directory.warm[blocks, layers] = NOWHERE
                pinned = {frame for frame in frames.tolist() if self._pinned[frame]}
                self._orphans |= pinned
                free = [frame for frame in frames.tolist() if frame not in pinned]
                self.tiers.warm.outbound.give(np.array(free, dtype=np.int64))
            self.tiers.changed.notify_all()

    def unpin(self, frames: list[int]) -> None:
        """Undo `pin`. Lock held."""
        for frame in frames:
            self._pinned[frame] -= 1
            if not self._pinned[frame]:
                del self._pinned[frame]
                if frame in self._orphans:  # its page is on disk by now
                    self._orphans.discard(frame)
                    self.tiers.warm.outbound.give(np.array([frame]))
        self.tiers.changed.notify_all()

    def pin(self, frames: list[int]) -> None:
        """Keep outbound frames until `unpin`, even when their pages reach disk. Lock held."""
        self._pinned.update(frames)

    def take_back(self, layer: int, blocks: Blocks) -> None:
        """Undo `send_down`: free the frames and the disk records of pages that were sent."""
        tiers = self.tiers
        with tiers.changed:
            tiers.changed.wait_for(lambda: not self._writing)
            gone = set(blocks.tolist())
            self._queued = [e for e in self._queued if e[1] != layer or e[0] not in gone]
            self.give_homes(layer, tiers.directory.warm[blocks, layer])
            tiers.directory.warm[blocks, layer] = NOWHERE
            cold = blocks[tiers.directory.cold[blocks, layer]].tolist()
            tiers.directory.cold[blocks, layer] = False
        if cold and tiers.cold is not None:
            tiers.cold.drop([tiers.key(block, layer) for block in cold])

    def free_warm(self, dead: Blocks) -> None:
        """Free the warm frames of blocks that nobody holds. Lock held; waits for a write."""
        tiers = self.tiers
        tiers.changed.wait_for(lambda: not self._writing)
        gone = set(dead.tolist())
        self._queued = [entry for entry in self._queued if entry[0] not in gone]
        if not self._queued:
            self._spill_error = None  # it was about pages that nobody holds any more
        for layer in range(tiers.geometry.layers):
            self.give_homes(layer, tiers.directory.warm[dead, layer])
