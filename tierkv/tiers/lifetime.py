"""Who may still use an object: its own process only, and nobody after it was closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tierkv.errors import ClosedError, StoreError


class Lifetime:
    """Counts the calls under way in an object, so that closing it can wait for them.

    Args:
        name: of the object, for error messages: ``the store in /data``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._idle = threading.Condition()
        self._num_active = 0
        self._ended = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """Keep the object open meanwhile.

        Raises:
            ClosedError: it is closed.
            StoreError: this is a forked child of the process that opened it.
        """
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self._name} was opened by pid {self._pid} and cannot be used in its forked "
                f"child {os.getpid()}; open it after the fork, in one process"
            )
        with self._idle:
            if self._ended:
                raise ClosedError(f"{self._name} is closed")
            self._num_active += 1
        try:
            yield
        finally:
            with self._idle:
                self._num_active -= 1
                self._idle.notify_all()

    def end(self) -> bool:
        """Refuse further use and wait for the calls under way.

        Returns False if there is nothing left to close: an earlier call did, or this is a forked
        child, in which the object belongs to the parent.
        """
        if os.getpid() != self._pid:
            return False
        with self._idle:
            first, self._ended = not self._ended, True
            self._idle.wait_for(lambda: self._num_active == 0)
        return first
