"""Whole frames between memory and a file, past the page cache where the file system allows it.

O_DIRECT wants memory, offset and length aligned; `SECTOR` (4 KiB) satisfies every device we
know of. Buffers that are not aligned go through a bounce buffer. Whether O_DIRECT works at all
is probed once for a directory, with a real write and read, because some file systems accept the
flag and then fail each transfer.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tierkv.page import SECTOR

MAX_VECTORS = min(1024, os.sysconf("SC_IOV_MAX"))
"""Buffers that one preadv or pwritev may take."""

MAX_TRANSFER_BYTES = 32 << 20
"""Bytes per call: far below Linux's cut at 2 GiB, and already as fast as the disk."""


class Probe(NamedTuple):
    """Whether O_DIRECT works in a directory, and why we think so."""

    works: bool
    reason: str


def aligned_buffer(num_bytes: int) -> memoryview:
    """Return `num_bytes` of zeroed, page-aligned, writable memory; freed with its last view."""
    return memoryview(mmap.mmap(-1, num_bytes))


def is_aligned(view: memoryview) -> bool:
    """Whether O_DIRECT can use this contiguous buffer's address and length as they are."""
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % SECTOR == 0 and view.nbytes % SECTOR == 0


def probe_direct_io(directory: Path) -> Probe:
    """Write and read back one sector with O_DIRECT in `directory`; never raises `OSError`."""
    path = directory / "probe"
    written, read = aligned_buffer(SECTOR), aligned_buffer(SECTOR)
    written[:] = os.urandom(SECTOR)
    try:
        fd = open_extent(path, direct=True)
        try:
            write_frames(fd, 0, [written], direct=True)
            num_bytes = read_frames(fd, 0, [read], direct=True)
        finally:
            os.close(fd)
            path.unlink()
    except OSError as error:
        return Probe(False, f"O_DIRECT does not work in {directory}: {error}")
    if num_bytes != SECTOR or written != read:
        return Probe(False, f"O_DIRECT read back other bytes than it wrote in {directory}")
    return Probe(True, "probed: one sector written and read back")


def open_extent(path: Path, *, direct: bool) -> int:
    """Open (or create) a file for reading and writing frames; returns its descriptor."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    return os.open(path, flags, 0o644)


def write_frames(fd: int, offset: int, views: Sequence[memoryview], *, direct: bool) -> None:
    """Write `views` one after another from `offset`, in one call.

    Raises:
        OSError: the write failed or was cut short (as EIO); what lies there is then undefined.
    """
    sources = [_bounced(view) if direct and not is_aligned(view) else view for view in views]
    expected = sum(view.nbytes for view in views)
    done = os.pwritev(fd, sources, offset)
    if done != expected:
        raise OSError(errno.EIO, f"short write: {done} of {expected} bytes at offset {offset}")


def read_frames(fd: int, offset: int, views: Sequence[memoryview], *, direct: bool) -> int:
    """Fill `views` one after another from `offset`, in one call; return the bytes read.

    Fewer bytes than asked for means that the file ends there.

    Raises:
        OSError: the read failed; the views' content is then undefined.
    """
    targets = [
        aligned_buffer(view.nbytes) if direct and not is_aligned(view) else view for view in views
    ]
    done = os.preadv(fd, targets, offset)
    for view, target in zip(views, targets, strict=True):
        if target is not view:
            view[:] = target
    return done


def sync_directory(directory: Path) -> None:
    """Make the names created in `directory` survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _bounced(view: memoryview) -> memoryview:
    bounce = aligned_buffer(view.nbytes)
    bounce[:] = view
    return bounce
