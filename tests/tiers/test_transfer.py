"""What threads share of the transfer engine; the CUDA events are fake ones."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tierkv.tiers.streams import StreamClock
from tierkv.tiers.transfer import Transfer

COPIES = 5


class Event:
    """Over already; to ask it takes a while, in which other threads run."""

    def query(self) -> bool:
        time.sleep(2e-3)
        return True

    def synchronize(self) -> None: ...


class Stream:
    """As much of a CUDA stream as a clock and `settle` need."""

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None: ...


def test_a_step_may_begin_while_pages_are_written_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """`settle` read the clocks without the lock that the spill thread's `wait_frames` holds.

    Two threads that struck off the same event left a copy under way uncounted, or a KeyError.
    """
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    transfer: Any = object.__new__(Transfer)
    transfer.cuda, transfer.device = True, torch.device("cuda")
    transfer._enqueue, frames = threading.Lock(), np.arange(COPIES)
    transfer._down, transfer._up = StreamClock(Stream()), StreamClock(Stream())
    transfer._frame_written, transfer._frame_read = frames + 1, np.zeros(COPIES, dtype=np.int64)
    for _ in range(COPIES):
        transfer._down.tick()
    with ThreadPoolExecutor(2) as threads:
        for done in (threads.submit(transfer.settle), threads.submit(transfer.wait_frames, frames)):
            done.result()
    assert transfer._down._done == COPIES and not transfer._down._events
