"""Work captured as a CUDA graph, and what torch leaves to put right where that fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def capture(
    work: Callable[[], torch.Tensor], warmups: int, caller: Any, side: Any
) -> tuple[Any, torch.Tensor]:
    """Run work a few times on a side stream, behind what the caller's has, then capture it.

    Returns the graph and the tensor that each replay leaves the result in. Meanwhile other threads
    may pin memory, read and write: what they do is not captured. Where the work cannot be captured
    its error is raised, and torch works on as before.
    """
    side.wait_stream(caller)
    try:
        with torch.cuda.stream(side):
            for _ in range(warmups):
                work()
    finally:  # what failed has left work there, in memory that the caller goes on with
        caller.wait_stream(side)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
    except BaseException:
        _put_right(pool, caller)
        raise
    return graph, result


def _put_right(pool: tuple[int, int], caller: Any) -> None:
    """End a capture that failed, as torch (2.9 to 2.13 at least) does not.

    Its stream stays the current one, memory goes on to be taken for it, and its random generator
    refuses numbers outside of a capture until one succeeds.
    """
    torch.cuda.set_stream(caller)
    index = caller.device_index
    with suppress(RuntimeError):  # it ended: all was captured, and something else failed
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=caller.device)
