"""Copies between tiers: the only creator of CUDA streams and events and of worker threads.

Upwards (warm pages to the compute device) has a CUDA stream of its own; on a CPU device a worker
thread copies. Copies that first need a disk read are started by that worker, in order, all others
by the caller at once. Downwards (sealed pages to warm) is enqueued behind the computation that
made them. Reads from disk run on `io_threads` threads, writes to disk on one.

Work on a stream is numbered, and every warm frame carries the numbers of its last write and read:
a copy waits for what it depends on (read after write, write after read), never for more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierkv.kernels import build, gather
from tierkv.tiers.arena import Arena
from tierkv.tiers.capture import capture
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.device_memory import free
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.frames import Frames, runs
from tierkv.tiers.lay_out import LayOut
from tierkv.tiers.staged_copies import StagedCopies
from tierkv.tiers.streams import Span, StreamClock
from tierkv.tiers.warm import WarmTier, page_run_keys

MIN_COPY_BYTES = 512 << 10
"""Below this many bytes a copy, on average, one gather by a kernel beats the copy engine: issuing
a copy takes as long as moving that much."""
MIN_READ_BYTES = 512 << 10
"""Reads from disk of fewer bytes are not divided among threads: each costs the host, too."""


class Transfer:
    """Moves page bytes; knows frames and slots, not sequences or blocks.

    Args:
        staging_pages: pages per staging arena.
        staging_buffers: number of staging arenas.
    """

    def __init__(
        self,
        frame_format: FrameFormat,
        warm: WarmTier,
        cold: ColdStore | None,
        device: torch.device,
        *,
        staging_pages: int,
        staging_buffers: int,
        io_threads: int,
    ):
        self.format, self.warm, self.cold, self.device = frame_format, warm, cold, device
        self.cuda = device.type == "cuda"
        arenas = 1 if self.cuda else staging_buffers
        self.staging = Arena.allocate(frame_format.geometry, staging_pages, device, arenas)
        self.staging_buffers = staging_buffers
        self._up_pool = ThreadPoolExecutor(1, "tierkv-up")
        self._spill_pool = ThreadPoolExecutor(1, "tierkv-spill")
        self._io_pool = ThreadPoolExecutor(io_threads, "tierkv-io")
        self.io_threads, self.min_read_bytes = io_threads, MIN_READ_BYTES
        self._asides: dict[int, Any] = {}
        if self.cuda:
            self._up = StreamClock(torch.cuda.Stream(device, priority=-1))
            self._down = StreamClock(torch.cuda.Stream(device, priority=-1))
            self._aside = torch.cuda.Stream(device)
            half = -(-staging_pages // 2)  # pages go down in pieces of this size
            up, down = (staging_buffers, staging_pages), (staging_buffers, half)
            self._up_raw, self._down_raw = (
                torch.empty((*shape, warm.frame_bytes), dtype=torch.uint8, device=device)
                for shape in (up, down)
            )
            self._raw_read: list[Any] = [None] * staging_buffers
            self._down_done: list[Any] = [None] * staging_buffers
            self._down_turn = 0
            self._replayed: Any = None  # end of the last replay, which may still use staging
            self._frame_written = np.zeros(warm.stop, dtype=np.int64)
            self._frame_read = np.zeros(warm.stop, dtype=np.int64)
            self._enqueue = threading.Lock()  # guards the clocks and the frames' numbers
        raw = self._up_raw if self.cuda else None
        self._lay_out = LayOut(frame_format, raw, self.staging[0])

    # -- upwards ---------------------------------------------------------------------------

    def spans(self, slots: Frames, frames: Frames) -> list[Span]:
        """Group frames and the staging slots they go to (``[n]`` each) into few copies."""
        return [
            Span(int(slots[start]), int(slots[stop - 1]) + 1, self.warm.span(frames[start:stop]))
            for start, stop in runs(slots, page_run_keys(self.warm, frames))
        ]

    def bring_up(
        self, buffer: int, spans: list[Span], frames: Frames, reads: Sequence[Future[None]]
    ) -> Future[Any]:
        """Start copying warm frames into a staging buffer; those on the device stay where they are.

        Args:
            buffer: index of a staging buffer whose last block was opened by `open_staging`, if any.
            spans, frames: what `spans` returned, and the frames it was made of.
            reads: disk reads that fill some of the frames; their errors are passed on.

        Returns:
            A future of the CUDA event that ends the copy; of None if there is nothing to wait for.
        """
        if self.cuda and not reads:
            done: Future[Any] = Future()
            done.set_result(self._enqueue_up(buffer, spans, frames))
            return done
        return self._up_pool.submit(self._bring_up, buffer, spans, frames, reads)

    def _bring_up(
        self, buffer: int, spans: list[Span], frames: Frames, reads: Sequence[Future[None]]
    ) -> Any:
        wait(reads)  # all of them: a frame must not be reused while one still fills it
        for read in reads:
            read.result()
        if self.cuda:
            return self._enqueue_up(buffer, spans, frames)
        arena = self.staging[buffer]
        for span in spans:
            self.format.read(span.frames, arena, span.first)
        return None

    def _enqueue_up(self, buffer: int, spans: list[Span], frames: Frames) -> Any:
        spans, frames = (
            [span for span in spans if not span.on_gpu],
            frames[frames >= self.warm.first],
        )
        if not spans:
            return None
        with self._enqueue, torch.cuda.stream(self._up.stream):
            if self._replayed is not None:
                self._up.stream.wait_event(self._replayed)
            if self._raw_read[buffer] is not None:
                self._up.stream.wait_event(self._raw_read[buffer])
            written = self._down.pending(self._frame_written[frames])
            if written is not None:
                self._up.stream.wait_event(written)
            raw = self._up_raw[buffer]
            if self._scattered(len(spans), len(frames)):
                slots = np.concatenate([np.arange(span.first, span.stop) for span in spans])
                self._gather(frames, raw, slots, to_host=False)
            else:
                for span in spans:
                    raw[span.first : span.stop].copy_(span.frames, non_blocking=True)
            number, event = self._up.tick()
            self._frame_read[frames] = number
            return event

    def wait_ready(self, copied: Any) -> bool:
        """Make the caller's stream wait for a copy; return whether it was already over."""
        if copied is None:
            return True
        over = bool(copied.query())
        torch.cuda.current_stream(self.device).wait_event(copied)
        return over

    def open_staging(self, buffer: int, spans: list[Span], hot: Any) -> tuple[Arena, bool]:
        """Return the arena that holds a staged block, and whether the buffer is free again.

        On CUDA the frames are decoded and laid out for attention here, behind the caller's own
        work, so that the copy stream does nothing but copy.

        Args:
            hot: ``(slots, k_pages, v_pages)`` of pages to add from the device, or None.
        """
        if not self.cuda:
            arena = self.staging[buffer]
        else:
            arena = self.staging[0]
            self._lay_out(buffer, spans)
            self._raw_read[buffer] = torch.cuda.current_stream(self.device).record_event()
        if hot is not None:
            slots, k, v = hot
            arena.k_frames.index_copy_(1, slots, k)
            arena.v_frames.index_copy_(1, slots, v)
        return arena, self.cuda

    def copy_in(self, sources: Frames, frames: Frames) -> None:
        """Copy warm frames to frames on the device, as they are; done on return."""
        self.settle()
        for start, stop in runs(frames, page_run_keys(self.warm, sources)):
            target = self.warm.span(frames[start:stop])
            target.copy_(self.warm.span(sources[start:stop]), non_blocking=True)
        self.finish()

    # -- downwards -------------------------------------------------------------------------

    def write_down(self, k: torch.Tensor, v: torch.Tensor, frames: Frames) -> None:
        """Encode pages on the device into frames, behind what made them.

        k, v: ``[kv_heads, n, page_tokens, dim]``; frames: ``[n]``, all on the device or none. The
        sources may be reused by work enqueued later on the caller's stream.
        """

        def write(part: slice, raw: torch.Tensor) -> None:
            self.format.write(k[:, part], v[:, part], raw)

        self._down_to(frames, write)

    def copy_out(self, sources: Frames, frames: Frames) -> None:
        """Copy frames on the device to warm frames, as they are; like `write_down`."""

        def copy(part: slice, raw: torch.Tensor) -> None:
            for start, stop in runs(sources[part]):
                raw[start:stop].copy_(self.warm.span(sources[part][start:stop]))

        self._down_to(frames, copy)

    def _down_to(self, frames: Frames, write: Callable[[slice, torch.Tensor], None]) -> None:
        """Fill frames by ``write(part, raw)``: those of a part, into ``[n, frame_bytes]``."""
        if not self.cuda or (len(frames) and frames[0] < self.warm.first):
            for start, stop in runs(page_run_keys(self.warm, frames)):
                write(slice(start, stop), self.warm.span(frames[start:stop]))
            return
        step = self._down_raw.shape[1]
        for begin in range(0, len(frames), step):
            part = slice(begin, min(begin + step, len(frames)))
            self._enqueue_down(partial(write, part), frames[part])

    def _enqueue_down(self, write: Callable[[torch.Tensor], None], frames: Frames) -> None:
        turn, compute = self._down_turn, torch.cuda.current_stream(self.device)
        self._down_turn = (turn + 1) % len(self._down_raw)
        if self._down_done[turn] is not None:
            compute.wait_event(self._down_done[turn])
        raw = self._down_raw[turn, : len(frames)]
        write(raw)
        self._down.stream.wait_event(compute.record_event())
        with self._enqueue:
            read = self._up.pending(self._frame_read[frames])
        if read is not None:
            self._down.stream.wait_event(read)
        with torch.cuda.stream(self._down.stream):
            ranges = runs(page_run_keys(self.warm, frames))
            if self._scattered(len(ranges), len(frames)):
                self._gather(frames, raw, np.arange(len(frames)), to_host=True)
            else:
                for start, stop in ranges:
                    self.warm.span(frames[start:stop]).copy_(raw[start:stop], non_blocking=True)
            with self._enqueue:
                number, self._down_done[turn] = self._down.tick()
                self._frame_written[frames] = number

    def settle(self) -> None:
        """Make the caller's stream, which is to read warm memory, wait for all copies."""
        if self.cuda:
            with self._enqueue:
                copies = self._down.last(), self._up.last()
            for last in copies:
                if last is not None:
                    torch.cuda.current_stream(self.device).wait_event(last)

    def replayed(self) -> None:
        """Make later copies wait for a replay that was just enqueued."""
        if self.cuda:
            self._replayed = torch.cuda.current_stream(self.device).record_event()

    def wait_replay(self) -> None:
        """Block until the last replay is over; the frames it reads may then be given away."""
        if self.cuda and self._replayed is not None:
            self._replayed.synchronize()

    def staged_copies(self, blocks: Sequence[Sequence[Span]]) -> StagedCopies:
        """Return copies of these blocks, of one staging buffer each, for a captured step."""
        stream, raw = (self._up.stream, self._up_raw) if self.cuda else (None, torch.empty((1, 0)))
        return StagedCopies(stream, raw, self._lay_out, blocks, self.staging[0])

    def finish(self) -> None:
        """Block until the work on the caller's stream is over."""
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def capture(self, work: Callable[[], torch.Tensor], warmups: int) -> tuple[Any, torch.Tensor]:
        """Run work a few times, then capture it as a CUDA graph on the caller's device."""
        caller, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        return capture(work, warmups, caller, side)

    @contextmanager
    def aside(self, name: int) -> Iterator[None]:
        """Enqueue the block's work beside the caller's stream, after what that has so far.

        `join` with the same name makes the caller's stream wait for it. Without a GPU the work is
        done at once.
        """
        if not self.cuda:
            yield
            return
        stream = self._aside
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield
            self._asides[name] = stream.record_event()

    def join(self, name: int) -> None:
        """Wait, on the caller's stream, for the work set aside by a name, if there is any."""
        event = self._asides.pop(name, None)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def _scattered(self, copies: int, pages: int) -> bool:
        """Whether pages lie so far apart that our kernel moves them faster than copies."""
        short = pages * self.warm.frame_bytes < copies * MIN_COPY_BYTES
        return short and copies > 2 and bool(build.available())

    def _gather(
        self,
        frames: Frames,
        raw: torch.Tensor,
        slots: npt.NDArray[np.int64],
        *,
        to_host: bool,
    ) -> None:
        """Copy between warm frames and frames on the device, in one launch."""
        table = np.stack([self.warm.addresses(frames), slots])
        on_device = torch.from_numpy(table).to(self.device, non_blocking=True)
        size = self.format.page_bytes
        gather.prepare_frames(on_device[0], raw, size, slots=on_device[1], to_host=to_host).run()

    # -- disk ------------------------------------------------------------------------------

    def read_cold(
        self, keys: Sequence[bytes], frames: Frames, *, settled: bool = False, share: int = 0
    ) -> list[Future[None]]:
        """Start reading pages from disk into warm frames, spread over the I/O threads.

        settled: no copy to or from the frames is pending, so that no thread has to ask CUDA.
        share: pages that one thread reads; equal shares by default, of `MIN_READ_BYTES` or more.
        """
        least = -(-self.min_read_bytes // self.warm.frame_bytes)
        share = share or max(-(-len(keys) // self.io_threads), least)
        return [
            self._io_pool.submit(
                self._read, keys[at : at + share], frames[at : at + share], settled
            )
            for at in range(0, len(keys), share)
        ]

    def _read(self, keys: Sequence[bytes], frames: Frames, settled: bool) -> None:
        assert self.cold is not None
        if not settled:
            self.wait_frames(frames)
        neighbours = runs(page_run_keys(self.warm, frames))
        self.cold.read_into(
            keys, [self.warm.payload(int(frames[at]), stop - at) for at, stop in neighbours]
        )

    def spill(self, task: Callable[[], None]) -> Future[None]:
        """Run a write to disk on the spill thread, in the order asked for."""
        return self._spill_pool.submit(task)

    def put_cold(self, keys: Sequence[bytes], frames: Frames) -> None:
        """Write warm frames to disk; durable on return. Called on the spill thread.

        Raises:
            ColdWriteError, DiskBudgetError: nothing of the batch became visible.
        """
        assert self.cold is not None
        self.wait_frames(frames)
        self.cold.put(keys, [self.warm.payload(frame) for frame in frames.tolist()])

    def wait_frames(self, frames: Frames) -> None:
        """Block this thread until no copy to or from the frames is pending."""
        if self.cuda:
            with self._enqueue:
                events = (
                    self._down.pending(self._frame_written[frames]),
                    self._up.pending(self._frame_read[frames]),
                )
            for event in events:
                if event is not None:
                    event.synchronize()

    def close(self) -> None:
        """Wait for all copies, end the threads and give back staging memory."""
        for pool in (self._up_pool, self._io_pool, self._spill_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        if self.cuda:
            torch.cuda.synchronize(self.device)
            free((self._up_raw, self._down_raw))
        free(paged for arena in self.staging for paged in (arena.k, arena.v))
