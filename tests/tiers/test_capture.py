"""What is done around captures, without a GPU: torch's part is played by a recorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tierkv.tiers import capture

SIDE = SimpleNamespace(wait_stream=lambda other: None)


class Recorder:
    """Stands in for `torch.cuda`: notes captures, pools and the current stream, as torch has them.

    A capture that fails stays under way, with its stream the current one.
    """

    def __init__(self) -> None:
        self.caller = SimpleNamespace(device_index=0, device="cpu", wait_stream=lambda other: None)
        self.current: Any = self.caller
        self.under_way: list[Any] = []
        self.warmups = 0

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    def CUDAGraph(self) -> object:  # noqa: N802
        return object()

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 7)

    @contextmanager
    def graph(self, graph: object, pool: Any = None, **how: Any) -> Iterator[None]:
        self.under_way.append(pool)
        self.current = "capturing"
        yield
        self.under_way.pop()
        self.current = self.caller

    def end(self, index: int, pool: Any) -> None:
        if pool not in self.under_way:
            raise RuntimeError("not currently recording")
        self.under_way.remove(pool)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    core = SimpleNamespace(
        _cuda_endAllocateToPool=made.end, _cuda_releasePool=lambda index, pool: None
    )
    monkeypatch.setattr(
        capture, "torch", SimpleNamespace(cuda=made, _C=core, zeros=torch.zeros, Tensor=Any)
    )
    return made


def test_work_runs_before_it_is_captured(recorder: Recorder) -> None:
    calls: list[bool] = []

    def work() -> Any:
        calls.append(bool(recorder.under_way))
        return "result"

    _, result = capture.capture(work, 2, recorder.caller, SIDE)
    assert calls == [False, False, True] and result == "result"
    assert recorder.current is recorder.caller and not recorder.under_way


def test_work_that_fails_before_it_is_captured_is_waited_for(recorder: Recorder) -> None:
    """What it had enqueued ran on beside the step that was made instead, in the same memory."""
    waited: list[Any] = []
    recorder.caller.wait_stream = waited.append

    def work() -> Any:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        capture.capture(work, 1, recorder.caller, SIDE)
    assert waited == [SIDE]


def test_a_failed_capture_is_ended(recorder: Recorder) -> None:
    """Torch stayed on the capturing stream, took memory for that capture, and refused random
    numbers in the whole process: after a model whose routing takes the host, for instance."""

    def work() -> Any:
        if recorder.under_way:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        capture.capture(work, 1, recorder.caller, SIDE)
    assert recorder.current is recorder.caller and not recorder.under_way
