"""The extent files of one frame size: preallocated space, cut into slots, and their bytes.

Files are named ``<frame_bytes>-<file_index>.kv``. A slot's *position* is one number over all of
them: ``file_index * slots_per_file + slot``. Neighbouring positions of one file are neighbours
on disk and move in one call.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from tierkv.page import SECTOR
from tierkv.tiers.direct_io import (
    MAX_TRANSFER_BYTES,
    MAX_VECTORS,
    open_extent,
    read_frames,
    sync_directory,
    write_frames,
)
from tierkv.tiers.faults import Fault
from tierkv.tiers.frame_views import FrameViews
from tierkv.tiers.frames import Frames
from tierkv.tiers.read_queue import MAX_DEPTH, ReadQueue, Reads
from tierkv.tiers.slots import SlotMap

FILE_BYTES = 4 << 30
"""Bytes one extent file may grow to. Part of the on-disk format."""

DEPTH_BYTES = 2 << 20
"""Bytes that one batch has under way at once, on average; more made reads slower, not faster."""

Place = TypeVar("Place", int, Frames)

_FILE_NAME = re.compile(r"([0-9]+)-([0-9]+)\.kv")


def frame_sizes(directory: Path) -> set[int]:
    """Return the frame sizes, in bytes, of which `directory` holds extent files."""
    matches = (_FILE_NAME.fullmatch(path.name) for path in directory.iterdir())
    return {int(match[1]) for match in matches if match}


class Extents:
    """Files of slots of `frame_bytes` each; `slots` says which of them are free.

    Knows nothing of keys. Every slot of an existing file starts free: claim those in use. The
    caller holds one lock around every method but `read` and `write`, which need only that their
    positions are in use and stay so.
    """

    def __init__(self, directory: Path, frame_bytes: int, *, direct: bool) -> None:
        self.directory = directory
        self.frame_bytes = frame_bytes
        self.slots_per_file = FILE_BYTES // frame_bytes
        self.slots = SlotMap()
        self._direct = direct
        self._run_frames = max(1, min(MAX_VECTORS, MAX_TRANSFER_BYTES // frame_bytes))
        self._fds: dict[int, int] = {}  # file index -> descriptor
        self._num_slots: dict[int, int] = {}  # file index -> slots allocated
        self._queues: list[ReadQueue] = []  # idle ones; appending and popping are atomic
        for path in directory.glob(f"{frame_bytes}-*.kv"):
            if match := _FILE_NAME.fullmatch(path.name):
                self._open_file(int(match[2]))

    def position(self, file_index: Place, slot: Place) -> Place:
        """Return the position of a slot, or of each of several."""
        return file_index * self.slots_per_file + slot

    def place(self, position: int) -> tuple[int, int]:
        """Return (file index, slot) of a position."""
        return divmod(position, self.slots_per_file)

    def claim(self, file_index: int, slot: int) -> bool:
        """Mark a slot as used; False if its file does not reach that far or it is used already."""
        inside = slot < self._num_slots.get(file_index, 0)
        return inside and self.slots.claim(self.position(file_index, slot))

    def read(self, positions: Frames, views: FrameViews, frames: Frames) -> dict[int, Fault]:
        """Fill frames of `views` from positions; both ``[n]``. All at once, if the disk can.

        Returns the faults, by index into them: one bad frame does not spoil its neighbours.
        """
        faults: dict[int, Fault] = {}
        runs = [np.array(run) for run in self._runs(positions.tolist())]
        for run, done in zip(runs, self._read_runs(runs, positions, views, frames), strict=True):
            if done == len(run) * self.frame_bytes:
                continue
            for i in run.tolist():
                place = int(positions[i])
                if len(run) > 1:
                    done = self._read_run(place, [views.view(int(frames[i]))])
                if done != self.frame_bytes:
                    faults[i] = self._fault(place, done)
        return faults

    def write(
        self, positions: Sequence[int], views: Sequence[memoryview], *, durable: bool
    ) -> None:
        """Write each of `views` (``[frame_bytes]`` uint8) to its position.

        Args:
            durable: return only after the bytes have reached the disk.

        Raises:
            OSError: something failed; what lies at these positions is then undefined.
        """
        touched: set[int] = set()
        for run in self._runs(positions):
            fd, offset = self._locate(positions[run[0]])
            write_frames(fd, offset, [views[i] for i in run], direct=self._direct)
            touched.add(fd)
        for fd in touched if durable else ():
            os.fdatasync(fd)

    def grow(self, count: int) -> None:
        """Preallocate `count` more free slots, in as many files as that takes.

        Raises:
            OSError: the file system refused; slots added before that stay.
        """
        file_index = 0
        while count > 0:
            old = self._num_slots.get(file_index, 0)
            added = min(count, self.slots_per_file - old)
            if added > 0:
                if file_index not in self._fds:
                    self._open_file(file_index)
                fd = self._fds[file_index]
                os.posix_fallocate(fd, old * self.frame_bytes, added * self.frame_bytes)
                sync_directory(self.directory)  # or a power cut may lose a new file's name
                self._num_slots[file_index] = old + added
                self.slots.add(self.position(file_index, old), added)
                count -= added
            file_index += 1

    def trim(self) -> None:
        """Give back to the file system what lies after the last used slot of each file."""
        for file_index, old in list(self._num_slots.items()):
            first = self.position(file_index, 0)
            kept = self.slots.used_length(first, old)
            self.slots.remove(first + kept, old - kept)
            self._num_slots[file_index] = kept
            os.ftruncate(self._fds[file_index], kept * self.frame_bytes)
            if kept == 0:
                self._path(file_index).unlink()
                os.close(self._fds.pop(file_index))
                del self._num_slots[file_index]

    def allocated_bytes(self) -> int:
        """Bytes the files take on disk."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._fds.values())

    def close(self) -> None:
        """Close the files. Further calls do nothing."""
        while self._queues:
            self._queues.pop().close()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _path(self, file_index: int) -> Path:
        return self.directory / f"{self.frame_bytes}-{file_index}.kv"

    def _open_file(self, file_index: int) -> None:
        fd = open_extent(self._path(file_index), direct=self._direct)
        self._fds[file_index] = fd
        self._num_slots[file_index] = os.fstat(fd).st_size // self.frame_bytes
        self.slots.add(self.position(file_index, 0), self._num_slots[file_index])

    def _locate(self, position: int) -> tuple[int, int]:
        """Return (descriptor, byte offset) of a position."""
        file_index, slot = self.place(position)
        return self._fds[file_index], slot * self.frame_bytes

    def _runs(self, positions: Sequence[int]) -> Iterator[list[int]]:
        """Yield lists of indices into `positions` which name neighbours on disk, in disk order."""
        run: list[int] = []
        for i in sorted(range(len(positions)), key=positions.__getitem__):
            position = positions[i]
            if run and (
                position != positions[run[-1]] + 1
                or position % self.slots_per_file == 0
                or len(run) == self._run_frames
            ):
                yield run
                run = []
            run.append(i)
        if run:
            yield run

    def _read_runs(
        self, runs: Sequence[Frames], positions: Frames, views: FrameViews, frames: Frames
    ) -> list[int]:
        """Return what each run's read came to, as `_read_run` does.

        What does not come whole from the queue is read again without it.
        """
        places = [int(positions[run[0]]) for run in runs]
        results = self._read_together(runs, places, views, frames) if len(runs) > 1 else None
        return [
            done
            if done == len(run) * self.frame_bytes
            else self._read_run(place, views.pieces(frames[run]))
            for place, run, done in zip(places, runs, results or [0] * len(runs), strict=True)
        ]

    def _read_together(
        self, runs: Sequence[Frames], places: Sequence[int], views: FrameViews, frames: Frames
    ) -> list[int] | None:
        """Do the same with all reads at the disk at once; None if that is not possible."""
        counts = np.array([len(run) for run in runs])
        depth = min(int(DEPTH_BYTES / (self.frame_bytes * counts.mean())), MAX_DEPTH)
        if not self._direct or depth < 2:
            return None
        addresses = views.addresses(frames[np.concatenate(runs)])
        if (addresses % SECTOR).any():
            return None
        files, slots = np.divmod(np.array(places), self.slots_per_file)
        fds = np.array([self._fds[file] for file in files.tolist()])
        vectors = np.stack([addresses, np.full_like(addresses, self.frame_bytes)], axis=1)
        try:
            queue = self._take_queue()
            results = queue.read(Reads(fds, slots * self.frame_bytes, counts, vectors), depth)
        except OSError:  # the kernel has no queue for us, or none of that length
            return None
        self._queues.append(queue)
        return results.tolist()

    def _take_queue(self) -> ReadQueue:
        try:
            return self._queues.pop()
        except IndexError:  # all are in use
            return ReadQueue()

    def _read_run(self, position: int, views: Sequence[memoryview]) -> int:
        """Return how many bytes were read, or minus the error number."""
        fd, offset = self._locate(position)
        try:
            return read_frames(fd, offset, views, direct=self._direct)
        except OSError as error:
            return -(error.errno or errno.EIO)

    def _fault(self, position: int, done: int) -> Fault:
        """Say why one frame was not read, from what its read came to."""
        if done < 0:
            return Fault("io_errors", str(OSError(-done, os.strerror(-done))))
        offset = self._locate(position)[1]
        return Fault("truncated", f"{done} of {self.frame_bytes} bytes at offset {offset}")
