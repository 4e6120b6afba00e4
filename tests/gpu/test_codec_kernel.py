"""Codec kernels on the GPU: the bits of the reference, pinned memory, streams, whole models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierkv
from tests.kernels import codec_cases
from tests.models import VOCAB, tiny_model
from tests.paging_helpers import budgets
from tierkv.codecs import CODECS, Codec
from tierkv.codecs.int8 import INT8
from tierkv.kernels import codec as kernels
from tierkv.kernels.build import available
from tierkv.kernels.decode import PagedKV
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena
from tierkv.tiers.frame_format import FrameFormat

GEOMETRY = Geometry(1, 8, 128, 128, torch.bfloat16, 32)


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    usable = available()
    assert usable, usable.reason
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("codec", codec_cases.ENCODED, ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    "geometry",
    [
        *codec_cases.GEOMETRIES,
        GEOMETRY,
        Geometry(1, 2, 256, 256, torch.bfloat16, 256),
        Geometry(1, 1, 576, 512, torch.float32, 32),
    ],
    ids=lambda g: f"{g.k_dim}-{g.v_dim}-{g.page_tokens}",
)
def test_bits_of_the_reference(
    geometry: Geometry, codec: Codec, seed: int, device: torch.device
) -> None:
    codec_cases.check_encode(seed, codec, geometry, device)
    codec_cases.check_decode(seed, codec, geometry, device)
    codec_cases.check_fetch(seed, codec, geometry, device)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_frames_come_back_on_the_device_as_on_the_host(codec: Codec, device: torch.device) -> None:
    """Many pages at once; raw ones without a kernel."""
    layout = FrameFormat(GEOMETRY, codec)
    torch.manual_seed(0)
    k, v = (torch.randn(8, 100, 32, 128, device=device).bfloat16() for _ in range(2))
    frames = torch.zeros(100, layout.frame_bytes, dtype=torch.uint8, device=device)
    layout.write(k, v, frames)
    host = torch.zeros(frames.shape, dtype=torch.uint8)
    layout.write(k.cpu(), v.cpu(), host)
    arena = Arena.allocate(GEOMETRY, 103, device)[0]
    layout.read(frames, arena, 2)
    assert torch.equal(frames.cpu(), host)
    for found, want in zip((arena.k_frames, arena.v_frames), layout.pages(host), strict=True):
        assert torch.equal(found[:, 2:102].cpu(), want)


def test_replays_read_what_the_host_wrote_since(device: torch.device) -> None:
    """Nothing of a pinned frame stays in a GPU cache from one replay to the next."""
    layout = FrameFormat(GEOMETRY, INT8)
    host = torch.zeros(16, layout.frame_bytes, dtype=torch.uint8).pin_memory()
    addresses = torch.tensor(
        [host.data_ptr() + i * layout.frame_bytes for i in range(16)], device=device
    )
    arena = Arena.allocate(GEOMETRY, 16, device)[0]
    pages = PagedKV(arena.k_frames, arena.v_frames)
    launch = kernels.prepare_decode(INT8.layout(GEOMETRY), addresses, pages)
    launch.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for seed in range(10):
        torch.manual_seed(seed)
        layout.write(*(torch.randn(8, 16, 32, 128).bfloat16() for _ in range(2)), host)
        graph.replay()
        torch.cuda.synchronize()
        for found, want in zip((pages.k, pages.v), layout.pages(host), strict=True):
            assert torch.equal(found.cpu(), want), seed


@pytest.mark.parametrize("kind", ["warm", "cold", "minimum"])
@pytest.mark.parametrize("codec", [name for name in CODECS if name != "raw"])
def test_tokens_of_a_model_are_those_of_the_reference(
    codec: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt with the kernels and with plain torch in their place."""
    model = tiny_model("llama", torch.bfloat16).cuda()
    ids = torch.randint(3, VOCAB, (1, 150), generator=torch.Generator().manual_seed(0)).cuda()
    settings = budgets(kind, model, tmp_path, page_tokens=16, rows=1) | {"prefill_chunk": 50}
    found = []
    for reference in (False, True):
        if reference:
            monkeypatch.setattr(FrameFormat, "_on_gpu", lambda *_: False)
        with tierkv.wrap(model, codec=codec, **settings) as wrapped:
            found.append(wrapped.generate(ids, max_new_tokens=24, do_sample=False).tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("codec", [name for name in CODECS if name != "raw"])
def test_selective_attention_reads_encoded_pages(codec: str) -> None:
    """The same logits as on the CPU, where the reference decodes."""
    ids = torch.randint(3, VOCAB, (1, 600), generator=torch.Generator().manual_seed(1))
    settings = {"page_tokens": 16, "cpu_budget": "64MiB", "gpu_budget": "64MiB", "codec": codec,
                "attention": "selective", "token_budget": 1024, "max_context": 1024,
                "sink_tokens": 0, "recent_tokens": 0, "dense_layers": 0}  # fmt: skip
    logits = []
    for device in ("cpu", "cuda"):
        model = tiny_model("llama").to(device)
        with tierkv.wrap(model, **settings) as wrapped, torch.no_grad():
            cache = wrapped.cache()
            wrapped.prefill(ids[:, :-1].to(device), cache)
            step = {wrapped.cache_argument(): cache, "use_cache": True}
            logits.append(model(ids[:, -1:].to(device), **step).logits[0, -1].cpu())
    assert (logits[0] - logits[1]).abs().max() < 1e-3 * logits[0].abs().max()
