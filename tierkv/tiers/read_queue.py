"""Many reads under way at once from one thread: Linux's asynchronous I/O, by its system calls.

A thread that reads page after page gives the disk one request at a time, and threads of Python
take turns: eight of them got half of what one got from the same disk in pages of 64 KiB. Here one
thread hands the kernel a batch and sleeps until all of it has come. It works past the page cache
(O_DIRECT) only; otherwise the kernel reads before it returns.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_DEPTH = 64
"""Reads under way at most; also how many events are taken in one call."""

_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
"""Numbers of io_setup, io_destroy, io_getevents, io_submit."""
_PREADV = 7
_REQUEST = np.dtype(
    [("data", "u8"), ("key", "u4"), ("flags", "i4"), ("operation", "u2"), ("priority", "i2"),
     ("fd", "u4"), ("vectors", "u8"), ("count", "u8"), ("offset", "i8"), ("rest", "u8", 2)]
)  # fmt: skip
_EVENT = np.dtype([("data", "u8"), ("request", "u8"), ("result", "i8"), ("more", "i8")])


class Reads(NamedTuple):
    """What to read, ``[n]`` int64 each, and where to.

    Attributes:
        fds, offsets: open files and byte offsets in them.
        counts: how many rows of `vectors` each fills, one after the other's.
        vectors: ``[m, 2]``, addresses and lengths of memory that stays where it is.
    """

    fds: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    vectors: npt.NDArray[np.int64]


class ReadQueue:
    """A queue of the kernel's; for one thread at a time.

    Raises:
        OSError: the kernel has none for us.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux") or platform.machine() not in _CALLS:
            raise OSError(errno.ENOSYS, f"no asynchronous reads on {platform.machine()}")
        setup, self._destroy, self._events, self._submit = _CALLS[platform.machine()]
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._context = ctypes.c_ulong(0)
        self._taken = np.zeros(MAX_DEPTH, _EVENT)
        self._call(setup, ctypes.c_long(MAX_DEPTH), ctypes.byref(self._context))

    def read(self, reads: Reads, depth: int) -> npt.NDArray[np.int64]:
        """Do all reads, up to `depth` (at most `MAX_DEPTH`) at once.

        Returns ``[n]``: bytes read, fewer than asked for where the file ends, or minus the error
        number. If it raises, no read is under way any more, and the queue is closed.

        Raises:
            OSError: the kernel refused a request.
        """
        requests = np.zeros(len(reads.fds), _REQUEST)
        requests["data"], requests["operation"] = np.arange(len(requests)), _PREADV
        requests["fd"], requests["offset"] = reads.fds, reads.offsets
        vectors, firsts = np.ascontiguousarray(reads.vectors), np.cumsum(reads.counts)
        requests["vectors"] = vectors.ctypes.data + vectors.strides[0] * (firsts - reads.counts)
        requests["count"] = reads.counts
        pointers = requests.ctypes.data + requests.itemsize * np.arange(len(requests))
        results = np.zeros(len(requests), np.int64)
        asked = came = 0
        try:
            while came < len(requests):
                room = min(len(requests), came + depth) - asked
                if room > 0:
                    first = ctypes.c_void_p(pointers.ctypes.data + pointers.itemsize * asked)
                    asked += self._call(self._submit, self._context, ctypes.c_long(room), first)
                under_way = asked - came
                came += self._take(results, under_way if asked == len(requests) else 1)
        except BaseException:
            self.close()  # waits for what is under way
            raise
        return results

    def close(self) -> None:
        """Wait for what is under way and give the queue back. Further calls do nothing."""
        if self._context.value:
            self._call(self._destroy, self._context)
            self._context = ctypes.c_ulong(0)

    def _take(self, results: npt.NDArray[np.int64], least: int) -> int:
        """Wait for at least so many results; return how many came."""
        where, most = ctypes.c_void_p(self._taken.ctypes.data), ctypes.c_long(MAX_DEPTH)
        count = self._call(
            self._events, self._context, ctypes.c_long(least), most, where, ctypes.c_void_p(None)
        )
        taken = self._taken[:count]
        results[taken["data"].astype(np.int64)] = taken["result"]
        return count

    def _call(self, number: int, *arguments: Any) -> int:
        while True:
            done = int(self._libc.syscall(ctypes.c_long(number), *arguments))
            if done >= 0:
                return done
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, f"asynchronous reads: {os.strerror(code)}")
