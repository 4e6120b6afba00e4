"""Copies between tiers: the only creator of CUDA streams and events and of worker threads.

Upwards (warm or hot pages into a staging arena) runs on a stream of its own, started by one
worker thread in the order asked for; on a CPU device the thread itself copies. Downwards (sealed
pages to warm) is enqueued behind the computation that made them. Reads from disk run on
`io_threads` threads, writes to disk on one.

Every warm frame carries its pending write and read events. A copy waits for what it depends on
(read after write, write after read, write after write), never for more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from tierkv.page import Geometry
from tierkv.tiers.arena import Arena, split_page
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.frames import Frames, runs
from tierkv.tiers.warm import WarmTier, page_run_keys


class Transfer:
    """Moves page bytes; knows frames and slots, not sequences or blocks.

    Args:
        staging_pages: pages per staging arena.
        staging_buffers: number of staging arenas.
    """

    def __init__(
        self,
        geometry: Geometry,
        warm: WarmTier,
        cold: ColdStore | None,
        device: torch.device,
        *,
        staging_pages: int,
        staging_buffers: int,
        io_threads: int,
    ):
        self.geometry, self.warm, self.cold, self.device = geometry, warm, cold, device
        self.staging = Arena.allocate(geometry, staging_pages, device, staging_buffers)
        self.cuda = device.type == "cuda"
        self._up_pool = ThreadPoolExecutor(1, "tierkv-up")
        self._spill_pool = ThreadPoolExecutor(1, "tierkv-spill")
        self._io_pool = ThreadPoolExecutor(io_threads, "tierkv-io")
        self._io_threads = io_threads
        if self.cuda:
            self._up_stream = torch.cuda.Stream(device, priority=-1)
            self._down_stream = torch.cuda.Stream(device, priority=-1)
            shape = (2 * staging_buffers, staging_pages, geometry.frame_bytes)
            raw = torch.empty(shape, dtype=torch.uint8, device=device)
            self._up_raw, self._down_raw = raw[:staging_buffers], raw[staging_buffers:]
            self._staging_read: list[Any] = [None] * staging_buffers
            self._down_done: list[Any] = [None] * staging_buffers
            self._down_turn = 0
            self._frame_written = np.full(warm.num_frames, None, dtype=object)
            self._frame_read = np.full(warm.num_frames, None, dtype=object)

    # -- upwards ---------------------------------------------------------------------------

    def bring_up(
        self, buffer: int, slots: Frames, frames: Frames, reads: Sequence[Future[None]], hot: Any
    ) -> Future[Any]:
        """Copy warm frames into slots of a staging arena, in the background.

        Args:
            buffer: index of the staging arena; `release_staging` was called for its last use.
            slots, frames: ``[n]`` where to and from where.
            reads: disk reads that fill some of the frames; their errors are passed on.
            hot: ``(slots, k_pages, v_pages)`` of pages to copy on the device, or None.

        Returns:
            A future of the CUDA event after which the slots may be read (None on CPU).
        """
        computed = self._record_compute() if hot is not None else None
        return self._up_pool.submit(self._up, buffer, slots, frames, reads, hot, computed)

    def _up(
        self,
        buffer: int,
        slots: Frames,
        frames: Frames,
        reads: Sequence[Future[None]],
        hot: Any,
        computed: Any,
    ) -> Any:
        for read in reads:
            read.result()
        arena = self.staging[buffer]
        if not self.cuda:
            for start, stop in runs(slots, page_run_keys(self.warm, frames)):
                k, v = split_page(self.warm.span(frames[start:stop]), self.geometry)
                first, last = int(slots[start]), int(slots[stop - 1]) + 1
                arena.k_frames[:, first:last].copy_(k)
                arena.v_frames[:, first:last].copy_(v)
            self._copy_hot(arena, hot)
            return None
        with torch.cuda.device(self.device), torch.cuda.stream(self._up_stream):
            stream = self._up_stream
            if self._staging_read[buffer] is not None:
                stream.wait_event(self._staging_read[buffer])
            for event in _distinct(self._frame_written[frames]):
                stream.wait_event(event)
            raw = self._up_raw[buffer]
            for start, stop in runs(slots, page_run_keys(self.warm, frames)):
                first, last = int(slots[start]), int(slots[stop - 1]) + 1
                raw[first:last].copy_(self.warm.span(frames[start:stop]), non_blocking=True)
            for start, stop in runs(slots):
                first, last = int(slots[start]), int(slots[stop - 1]) + 1
                k, v = split_page(raw[first:last], self.geometry)
                arena.k_frames[:, first:last].copy_(k)
                arena.v_frames[:, first:last].copy_(v)
            if computed is not None:
                stream.wait_event(computed)
            self._copy_hot(arena, hot)
            ready = stream.record_event()
            self._frame_read[frames] = ready
            return ready

    @staticmethod
    def _copy_hot(arena: Arena, hot: Any) -> None:
        if hot is not None:
            slots, k, v = hot
            arena.k_frames.index_copy_(1, slots, k)
            arena.v_frames.index_copy_(1, slots, v)

    def wait_ready(self, ready: Any) -> bool:
        """Make the caller's stream wait for `bring_up`; return whether it was already done."""
        if ready is None:
            return True
        done = bool(ready.query())
        torch.cuda.current_stream(self.device).wait_event(ready)
        return done

    def release_staging(self, buffer: int) -> None:
        """Declare that everything enqueued so far is the last use of a staging arena."""
        if self.cuda:
            self._staging_read[buffer] = self._record_compute()

    def _record_compute(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event() if self.cuda else None

    # -- downwards -------------------------------------------------------------------------

    def write_down(self, k: torch.Tensor, v: torch.Tensor, frames: Frames) -> None:
        """Copy pages from the device to warm frames, behind what made them.

        k, v: ``[kv_heads, n, page_tokens, dim]``; frames: ``[n]``. The sources may be reused by
        work enqueued later on the caller's stream.
        """
        if not self.cuda:
            for start, stop in runs(page_run_keys(self.warm, frames)):
                warm_k, warm_v = split_page(self.warm.span(frames[start:stop]), self.geometry)
                warm_k.copy_(k[:, start:stop])
                warm_v.copy_(v[:, start:stop])
            return
        step = self._down_raw.shape[1]
        for begin in range(0, len(frames), step):
            self._down(k[:, begin : begin + step], v[:, begin : begin + step],
                       frames[begin : begin + step])  # fmt: skip

    def _down(self, k: torch.Tensor, v: torch.Tensor, frames: Frames) -> None:
        turn, compute = self._down_turn, torch.cuda.current_stream(self.device)
        self._down_turn = (turn + 1) % len(self._down_raw)
        if self._down_done[turn] is not None:
            compute.wait_event(self._down_done[turn])
        raw = self._down_raw[turn, : len(frames)]
        raw_k, raw_v = split_page(raw, self.geometry)
        raw_k.copy_(k)
        raw_v.copy_(v)
        stream = self._down_stream
        stream.wait_event(compute.record_event())
        for event in _distinct(self._frame_read[frames], self._frame_written[frames]):
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            for start, stop in runs(page_run_keys(self.warm, frames)):
                self.warm.span(frames[start:stop]).copy_(raw[start:stop], non_blocking=True)
            done = stream.record_event()
        self._frame_written[frames] = done
        self._down_done[turn] = done

    # -- disk ------------------------------------------------------------------------------

    def read_cold(self, keys: Sequence[bytes], frames: Frames) -> list[Future[None]]:
        """Start reading pages from disk into warm frames, spread over the I/O threads."""
        share = -(-len(keys) // self._io_threads)
        return [
            self._io_pool.submit(self._read, keys[at : at + share], frames[at : at + share])
            for at in range(0, len(keys), share)
        ]

    def _read(self, keys: Sequence[bytes], frames: Frames) -> None:
        assert self.cold is not None
        self._wait_frames(frames)
        self.cold.read_into(keys, [self.warm.payload(frame) for frame in frames.tolist()])

    def spill(self, task: Callable[[], None]) -> Future[None]:
        """Run a write to disk on the spill thread, in the order asked for."""
        return self._spill_pool.submit(task)

    def put_cold(self, keys: Sequence[bytes], frames: Frames) -> None:
        """Write warm frames to disk; durable on return. Called on the spill thread.

        Raises:
            ColdWriteError, DiskBudgetError: nothing of the batch became visible.
        """
        assert self.cold is not None
        self._wait_frames(frames)
        self.cold.put(keys, [self.warm.payload(frame) for frame in frames.tolist()])

    def _wait_frames(self, frames: Frames) -> None:
        """Block this thread until no copy to or from the frames is pending."""
        if self.cuda:
            for event in _distinct(self._frame_written[frames], self._frame_read[frames]):
                event.synchronize()

    def close(self) -> None:
        """Wait for all copies and end the threads."""
        for pool in (self._up_pool, self._io_pool, self._spill_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        if self.cuda:
            torch.cuda.synchronize(self.device)


def _distinct(*events: Any) -> list[Any]:
    unique = {id(event): event for column in events for event in column if event is not None}
    return list(unique.values())
