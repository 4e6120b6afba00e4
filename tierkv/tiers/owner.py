"""One owner per store directory: an advisory lock that dies with its process.

`flock` belongs to the open file, so it also refuses a second opening by the same process, and
the kernel drops it when the owner ends in whatever way. The text inside the file only names the
owner in the error message; it is never believed. A forked child closes its copy at once, or it
would keep the lock of a dead parent.
"""

from __future__ import annotations

import fcntl
import os
import socket
import weakref
from datetime import UTC, datetime
from pathlib import Path

from tierkv.errors import StoreLockedError

_held: weakref.WeakSet[OwnerLock] = weakref.WeakSet()


class OwnerLock:
    """The exclusive right to use the store in `path`'s directory, from now until `release`.

    Raises:
        StoreLockedError: somebody holds it; names pid, host and since when.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, _self_description().encode(), 0)
        except BlockingIOError:
            owner = os.pread(fd, 1000, 0).decode(errors="replace").strip() or "an unnamed owner"
            os.close(fd)
            raise StoreLockedError(
                f"the store in {path.parent} is in use by {owner}; "
                "close that one or choose another directory"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        """Give the lock up. Further calls do nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _self_description() -> str:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return f"pid {os.getpid()} on host {socket.gethostname()}, started {since}\n"


def _release_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
