"""Every copy path, bit for bit, with poisoned memory and delayed streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierkv
from tests.models import tiny_model
from tests.paging_helpers import budgets
from tierkv.codecs import CODECS
from tierkv.page import Geometry
from tierkv.tiers.device_frames import DeviceFrames
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.transfer import Transfer
from tierkv.tiers.warm import WarmTier


@pytest.fixture(
    params=[
        (torch.bfloat16, "raw"),
        (torch.float16, "raw"),
        (torch.float32, "raw"),
        (torch.bfloat16, "int8"),
        (torch.float16, "int4"),
        (torch.bfloat16, "fp8"),
    ],
    ids=str,
)
def transfer(request: pytest.FixtureRequest) -> Iterator[Transfer]:
    dtype, codec = request.param
    layout = FrameFormat(Geometry(1, 3, 40, 24, dtype, 16), CODECS[codec], on_disk=False)
    device = torch.device("cuda")
    here = DeviceFrames(1, 20, layout.frame_bytes, device)
    warm = WarmTier(layout.frame_bytes, 40, 0, 0, pinned=True, device_frames=here)
    warm.chunk_frames = 7  # copies must stop at the border of two registered chunks
    engine = Transfer(layout, warm, None, device, staging_pages=12, staging_buffers=2, io_threads=1)
    yield engine
    engine.close()
    warm.close()


@pytest.mark.parametrize("seed", range(8))
def test_down_and_up_are_bitwise(transfer: Transfer, seed: int) -> None:
    """To warm frames and to those of encoded pages on the device, and from both at once."""
    rng, geometry = np.random.default_rng(seed), transfer.format.geometry
    count = int(rng.integers(1, 13))
    frames = rng.permutation(60)[:count].astype(np.int64)
    if seed % 2:
        frames = np.sort(frames)
    shape = (geometry.kv_heads, count, geometry.page_tokens)
    k = torch.randn(*shape, geometry.k_dim, device="cuda").to(geometry.dtype)
    v = torch.randn(*shape, geometry.v_dim, device="cuda").to(geometry.dtype)
    stored = torch.zeros(count, transfer.warm.frame_bytes, dtype=torch.uint8)
    transfer.format.write(k.cpu(), v.cpu(), stored)
    want_k, want_v = (x.cuda() for x in transfer.format.pages(stored))
    arena = transfer.staging[0]
    arena.k.fill_(float("nan"))
    arena.v.fill_(float("nan"))
    for part in (frames < transfer.warm.first, frames >= transfer.warm.first):
        pages = torch.from_numpy(part).cuda()
        transfer.write_down(k[:, pages], v[:, pages], frames[part])
    k.fill_(float("nan"))  # the source may be reused at once
    v.fill_(float("nan"))
    slots = np.sort(rng.permutation(12)[:count]).astype(np.int64)
    spans = transfer.spans(slots, frames)
    transfer.wait_ready(transfer.bring_up(seed % 2, spans, frames, []).result())
    arena, free = transfer.open_staging(seed % 2, spans, None)
    got_k, got_v = arena.pages(slots)
    assert free and torch.equal(got_k, want_k) and torch.equal(got_v, want_v)


@pytest.mark.parametrize("seed", range(4))
def test_frames_move_as_they_are(transfer: Transfer, seed: int) -> None:
    """From warm memory to the device and back to other frames, which may be given away at once."""
    rng, size = np.random.default_rng(seed), transfer.warm.frame_bytes
    first, second = rng.permutation(40).reshape(2, 20) + transfer.warm.first
    want = torch.from_numpy(rng.integers(0, 256, (20, size), dtype=np.uint8))
    for frame, content in zip(first.tolist(), want, strict=True):
        transfer.warm.span(np.array([frame]))[0] = content
    here = rng.permutation(20)
    transfer.copy_in(first, here)
    for frame in first.tolist():
        transfer.warm.span(np.array([frame]))[0] = 0
    assert torch.equal(transfer.warm.device_frames.memory[here].cpu(), want)
    transfer.copy_out(here, second)
    transfer.warm.device_frames.memory.zero_()
    transfer.wait_frames(second)
    size = transfer.format.page_bytes  # what lies behind it is padding
    for frame, content in zip(second.tolist(), want, strict=True):
        assert torch.equal(transfer.warm.span(np.array([frame]))[0, :size], content[:size])


def test_delayed_copies_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing wait between streams shows when copies are late.

    The bugs: vLLM issues 31210 and 45704, SGLang pull request 22811.
    """
    hf_model = tiny_model("llama").cuda()
    ids = torch.randint(3, 199, (2, 400), device="cuda")
    want = hf_model.generate(ids, max_new_tokens=24, do_sample=False)
    rng = random.Random(0)

    def late(method: Any, clock: str) -> Any:
        def delayed(self: Transfer, *args: Any) -> Any:
            with torch.cuda.stream(getattr(self, clock).stream):
                torch.cuda._sleep(rng.randrange(0, 400_000))
            return method(self, *args)

        return delayed

    monkeypatch.setattr(Transfer, "_enqueue_up", late(Transfer._enqueue_up, "_up"))
    monkeypatch.setattr(Transfer, "_enqueue_down", late(Transfer._enqueue_down, "_down"))
    for kind in ("warm", "cold"):
        settings = budgets(kind, hf_model, tmp_path, page_tokens=16, rows=2)
        with tierkv.wrap(hf_model, prefill_chunk=100, **settings) as wrapped:
            wrapped.manager.hot.arenas[0].k.fill_(float("nan"))
            for staging in wrapped.manager.transfer.staging:
                staging.k.fill_(float("nan"))
                staging.v.fill_(float("nan"))
            got = wrapped.generate(ids, max_new_tokens=24, do_sample=False)
        assert got.tolist() == want.tolist(), kind
