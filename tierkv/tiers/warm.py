"""The warm tier: page frames in host memory, pinned when a GPU is in use.

Memory comes from the operating system in chunks as pages arrive, never more than the budget.
torch's pinned allocator rounds to powers of two and never gives back, so the chunks are ours:
page-aligned `mmap`, registered with CUDA, unregistered on close.

Encoded pages may also have frames on the device. Numbers of frames name both: those on the device
come first, so that whoever holds a number need not know where the frame is to read it.
"""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from tierkv.errors import WarmBudgetError
from tierkv.page import SECTOR
from tierkv.tiers import host_memory
from tierkv.tiers.device_frames import DeviceFrames
from tierkv.tiers.frames import FramePool, Frames
from tierkv.units import format_bytes

CHUNK_BYTES = 64 << 20
"""Host memory is taken in steps of this size: the first frames should not wait for many others."""
CHUNKS_AHEAD = 24
"""Chunks that are touched and pinned in the background before a frame in them is needed."""
FREE_FLOOR_BYTES = 256 << 20
"""Host memory that is left to everything else."""
PORTABLE, MAPPED = 1, 2
"""Flags of `cudaHostRegister`."""
PIN_THREADS = 3
"""Threads that touch and pin; the kernel's zeroing of pages is what takes the time."""


class WarmTier:
    """Frames in host memory: `homes` hold pages as long as there are any, `inbound` and `outbound`
    only in transit.

    Pages on their way from disk use `inbound` frames, pages on their way to disk `outbound`
    ones; the two never compete, so neither direction can block the other. `guests` frames hold
    copies of pages that are on disk, as long as they are chosen often (`tierkv.paging.guests`);
    homes may be lent to them (`tierkv.paging.lent`).

    Attributes:
        device_frames: frames ``0 .. first - 1``, on the device; homes too. Only `span`, `addresses`
            and `chunk_of` take their numbers.
        first, inbound_start, outbound_start, stop: frame numbers, where each kind begins.

    Raises:
        WarmBudgetError: the frames exceed what this machine or its control group has; or, on
            first use of a frame, host memory is short or cannot be pinned.
    """

    def __init__(
        self,
        frame_bytes: int,
        homes: int,
        inbound: int,
        outbound: int,
        guests: int = 0,
        *,
        pinned: bool,
        device_frames: DeviceFrames | None = None,
    ):
        self.frame_bytes = frame_bytes
        if device_frames is None:
            device_frames = DeviceFrames(0, 0, frame_bytes, torch.device("cpu"))
        self.device_frames = device_frames
        self.num_frames = homes + inbound + outbound + guests
        self.pinned = pinned
        if pinned:  # cannot be swapped out
            _check_total(self.num_frames * self.frame_bytes)
        self.first = len(self.device_frames)
        self.inbound_start = self.first + homes
        self.outbound_start = self.inbound_start + inbound
        self.stop = self.first + self.num_frames
        self.homes = FramePool(self.first, self.inbound_start)
        self.inbound = FramePool(self.inbound_start, self.outbound_start)
        self.outbound = FramePool(self.outbound_start, self.outbound_start + outbound)
        self.guests: Frames = np.arange(self.outbound_start + outbound, self.stop)
        self.chunk_frames = max(1, CHUNK_BYTES // self.frame_bytes)
        self._chunks: dict[int, Future[tuple[mmap.mmap, torch.Tensor]]] = {}
        self._taking, self._reserving = threading.Lock(), threading.Lock()
        self._reserved = 0  # bytes that are about to be touched
        self._pin_pool = ThreadPoolExecutor(PIN_THREADS, "tierkv-pin") if pinned else None

    def span(self, frames: Frames) -> torch.Tensor:
        """View a run of consecutive frames of one chunk as ``[n, frame_bytes]`` uint8."""
        if frames[0] < self.first:
            return self.device_frames.span(frames)
        chunk, index = divmod(int(frames[0]) - self.first, self.chunk_frames)
        return self._chunk(chunk)[index : index + len(frames)]

    def chunk_of(self, frames: Frames) -> Frames:
        """Chunk index of each frame; a copy must not cross from one to the next."""
        chunks = (frames - self.first) // self.chunk_frames
        return np.where(frames < self.first, self.num_chunks, chunks)

    def chunk_start(self, chunk: int) -> int:
        """Return the first frame of a chunk."""
        return 0 if chunk == self.num_chunks else self.first + chunk * self.chunk_frames

    def on_device(self, frames: Frames) -> npt.NDArray[np.bool_]:
        """Say which frames, of any shape, are on the device; `NOWHERE` is not."""
        return (frames >= 0) & (frames < self.first)

    def in_homes(self, frames: Frames) -> npt.NDArray[np.bool_]:
        """Say which frames, of any shape, are homes in host memory."""
        return (frames >= self.first) & (frames < self.inbound_start)

    def addresses(self, frames: Frames) -> Frames:
        """Return where frames begin in memory, for kernels that read it."""
        here = frames < self.first
        chunks, index = np.divmod(frames[~here] - self.first, self.chunk_frames)
        starts = {chunk: self._chunk(chunk).data_ptr() for chunk in np.unique(chunks).tolist()}
        bases = np.array([starts[chunk] for chunk in chunks.tolist()], dtype=np.int64)
        found = self.device_frames.addresses(frames)
        found[~here] = bases + index * self.frame_bytes
        return found

    def payload(self, frame: int, count: int = 1) -> memoryview:
        """Return the memory of `count` frames of one chunk, `SECTOR`-aligned, writable."""
        assert frame >= self.first, "a frame on the device has no host memory"
        chunk, index = divmod(frame - self.first, self.chunk_frames)
        self._chunk(chunk)
        start, stop = index * self.frame_bytes, (index + count) * self.frame_bytes
        return memoryview(self._chunks[chunk].result()[0])[start:stop]

    def _chunk(self, chunk: int) -> torch.Tensor:
        """Return a chunk's frames, ``[frames, frame_bytes]``; pinned memory is made ahead."""
        self._begin(chunk, chunk + CHUNKS_AHEAD if self.pinned else chunk)
        try:
            return self._chunks[chunk].result()[1]
        except WarmBudgetError:
            with self._taking:
                self._chunks.pop(chunk, None)  # there may be memory next time
            raise

    def _begin(self, chunk: int, last: int) -> None:
        """Take a chunk, and those up to `last` in the background, unless it is taken already."""
        if chunk not in self._chunks:
            with self._taking:
                for near in range(chunk, min(last, self.num_chunks - 1) + 1):
                    if near not in self._chunks:
                        self._chunks[near] = self._take(near)

    def expect_reads(self) -> None:
        """Begin to take and pin what pages from disk pass through, before they are asked for."""
        if self.pinned and self.inbound.capacity:
            begin, end = self.homes.capacity, self.outbound_start - 1 - self.first
            self._begin(begin // self.chunk_frames, end // self.chunk_frames)

    @property
    def num_chunks(self) -> int:
        """Chunks that the budget allows."""
        return -(-self.num_frames // self.chunk_frames)

    def _take(self, chunk: int) -> Future[tuple[mmap.mmap, torch.Tensor]]:
        frames = min(self.chunk_frames, self.num_frames - chunk * self.chunk_frames)
        if self._pin_pool is not None:
            return self._pin_pool.submit(self._map, frames * self.frame_bytes)
        taken: Future[tuple[mmap.mmap, torch.Tensor]] = Future()
        taken.set_result(self._map(frames * self.frame_bytes))
        return taken

    def _map(self, num_bytes: int) -> tuple[mmap.mmap, torch.Tensor]:
        with self._reserving:
            _check_room(self._reserved + num_bytes)
            self._reserved += num_bytes
        try:
            memory = mmap.mmap(-1, num_bytes)
            view = torch.frombuffer(memory, dtype=torch.uint8).view(-1, self.frame_bytes)
            assert view.data_ptr() % SECTOR == 0
            if self.pinned:
                memory.madvise(mmap.MADV_HUGEPAGE)
                view.zero_()  # touches every page, on several threads
                _pin(view)
        except OSError as error:
            raise WarmBudgetError(
                f"host memory for {format_bytes(num_bytes)} of warm pages could not be taken "
                f"({error}); lower cpu_budget"
            ) from error
        finally:
            with self._reserving:
                self._reserved -= num_bytes
        return memory, view

    @property
    def pages(self) -> int:
        """Frames in use."""
        return self.homes.used + self.inbound.used + self.outbound.used

    @property
    def taken_bytes(self) -> int:
        """Host bytes taken from the operating system so far."""
        taken = [chunk for chunk in self._chunks.values() if chunk.done()]
        return sum(chunk.result()[1].numel() for chunk in taken if chunk.exception() is None)

    def close(self) -> None:
        """Unpin and give back all memory. The caller has waited for every copy."""
        if self._pin_pool is not None:
            self._pin_pool.shutdown(wait=True, cancel_futures=True)
            for chunk in self._chunks.values():
                if not chunk.cancelled() and chunk.exception() is None:
                    torch.cuda.cudart().cudaHostUnregister(chunk.result()[1].data_ptr())
        self._chunks.clear()


def _check_total(num_bytes: int) -> None:
    most = host_memory.total()
    if most is not None and num_bytes > most.num_bytes:
        raise WarmBudgetError(
            f"cpu_budget asks for {format_bytes(num_bytes)} of pinned memory, but {most.limit}; "
            f"lower cpu_budget"
        )


def _check_room(num_bytes: int) -> None:
    """Stop before the system has to kill a process for memory."""
    left = host_memory.room()
    if left is not None and num_bytes + FREE_FLOOR_BYTES > left.num_bytes:
        raise WarmBudgetError(
            f"{format_bytes(num_bytes)} more of warm pages would leave less than "
            f"{format_bytes(FREE_FLOOR_BYTES)} of host memory ({left.limit}); lower cpu_budget, "
            f"give a store so that pages can sink to disk, or free memory"
        )


def _pin(view: torch.Tensor) -> None:
    """Register memory with CUDA, for copies from any device and for kernels that read it."""
    status = torch.cuda.cudart().cudaHostRegister(view.data_ptr(), view.numel(), PORTABLE | MAPPED)
    if int(status) != 0:
        raise WarmBudgetError(
            f"{format_bytes(view.numel())} of warm memory could not be pinned (CUDA error "
            f"{int(status)}; limit on locked memory: {host_memory.memlock_text()}); lower "
            f"cpu_budget or raise the limit"
        )


def page_run_keys(warm: WarmTier, frames: Frames) -> Frames:
    """Return a column that counts up by one exactly while frames are neighbours in one chunk."""
    return frames + warm.chunk_of(frames) * np.int64(warm.stop)
