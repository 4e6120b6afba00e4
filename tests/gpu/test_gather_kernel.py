"""Copies of pages by table on the GPU: pinned frames, graph replay, streams, 64-bit offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels import gather_cases
from tests.kernels.gather_cases import Problem, bits
from tierkv.codecs import RAW
from tierkv.kernels import gather
from tierkv.kernels.build import available
from tierkv.kernels.decode import PagedKV
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena
from tierkv.tiers.warm import WarmTier

GEOMETRY = Geometry(1, 8, 128, 128, torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    usable = available()
    assert usable, usable.reason
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("geometry", gather_cases.GEOMETRIES, ids=lambda g: f"{g.k_dim}-{g.v_dim}")
def test_random_copies(geometry: Geometry, seed: int, device: torch.device) -> None:
    gather_cases.check_pages(seed, geometry, device, to_host=False)
    gather_cases.check_pages(seed, geometry, device, to_host=True)
    gather_cases.check_fetch(seed, geometry, device)


@pytest.mark.parametrize("to_host", [False, True])
def test_copies_of_frames(to_host: bool, device: torch.device) -> None:
    for seed in range(4):
        gather_cases.check_frames(seed, device, to_host=to_host)


def test_replays_read_what_the_host_wrote_since(device: torch.device) -> None:
    """Nothing stays in a GPU cache from one replay to the next, in either direction."""
    problem = Problem(0, GEOMETRY, device, host_frames=32)
    addresses = problem.address_of(list(range(16)))
    back = problem.address_of(list(range(16, 32)))
    launches = [
        gather.prepare(addresses, problem.pages),
        gather.prepare(back, problem.pages, to_host=True),
    ]
    for launch in launches:
        launch.run()
    problem.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch.run()
    for _ in range(20):
        problem.host[:16] = torch.randint(0, 256, problem.host[:16].shape, dtype=torch.uint8)
        problem.host[16:] = 0
        graph.replay()
        problem.wait()
        used = GEOMETRY.page_bytes
        assert torch.equal(problem.host[:16, :used], problem.host[16:, :used])


def test_replays_follow_tables_and_counts(device: torch.device) -> None:
    """A captured fetch takes its list, lengths and addresses from the device at every replay."""
    problem = Problem(1, GEOMETRY, device, host_frames=64)
    addresses = problem.address_of(list(range(64)))
    fetches = gather.Fetches.allocate(8, 32, device)
    launch = gather.prepare_fetch(addresses, fetches, problem.pages)
    launch.run()
    problem.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.run()
    for count in (0, 1, 5, 32):
        order = torch.stack([torch.randperm(64)[:count] for _ in range(8)])
        slots = torch.stack([torch.randperm(problem.frames)[:count] for _ in range(8)])
        fetches.pages[:, :count] = order.to(device)
        fetches.frames[:, :count] = slots.to(device)
        fetches.counts.fill_(count)
        want = problem.device_pages()
        for head in range(8):
            for on_host, on_device in zip(problem.host_pages(), want, strict=True):
                on_device[head, slots[head]] = on_host[head, order[head]]
        graph.replay()
        problem.wait()
        assert all(map(torch.equal, problem.device_pages(), want)), count


def test_runs_on_the_callers_stream(device: torch.device) -> None:
    """A scatter waits for what the caller's stream was still to write."""
    problem = Problem(2, GEOMETRY, device)
    count = len(problem.host)
    launch = gather.prepare(problem.address_of(list(range(count))), problem.pages, to_host=True)
    launch.run()
    problem.wait()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        problem.pages.k.fill_(3.0)
        launch.run()
    stream.synchronize()
    assert bool((RAW.decode(GEOMETRY, problem.host)[0] == 3.0).all())


def test_warm_memory_is_mapped(device: torch.device) -> None:
    """Frames of the warm tier, in several registered chunks, are read and written in place."""
    warm = WarmTier(GEOMETRY.frame_bytes, 40, 0, 0, pinned=True)
    warm.chunk_frames = 7
    try:
        spans = [warm.span(np.array([frame])) for frame in range(40)]
        for span in spans:
            span.random_()
        addresses = torch.tensor([span.data_ptr() for span in spans], device=device)
        arena = Arena.allocate(GEOMETRY, 40, device)[0]
        frames = PagedKV(arena.k_frames, arena.v_frames)
        gather.prepare(addresses, frames).run()
        gather.prepare(
            addresses[:20].contiguous(), PagedKV(frames.k[:, 20:], frames.v[:, 20:]), to_host=True
        ).run()
        torch.cuda.synchronize()
        for frame, span in enumerate(spans):
            held = 20 + frame if frame < 20 else frame
            for on_host, on_device in zip(
                RAW.decode(GEOMETRY, span), (frames.k, frames.v), strict=True
            ):
                assert torch.equal(bits(on_host[:, 0]), bits(on_device[:, held].cpu())), frame
    finally:
        torch.cuda.synchronize()
        warm.close()


def test_frames_past_2_to_the_32_elements(device: torch.device) -> None:
    frames = (1 << 32) // (2 * 256 * 128) + 2
    geometry = Geometry(1, 2, 128, 128, torch.bfloat16, 256)
    if torch.cuda.mem_get_info()[0] < 2.2 * frames * geometry.page_bytes / 2:
        pytest.skip("less than 19 GB of GPU memory are free")
    arena = Arena.allocate(geometry, frames, device)[0]
    host = torch.randint(0, 256, (2, geometry.frame_bytes), dtype=torch.uint8, pin_memory=True)
    addresses = torch.tensor(
        [host.data_ptr(), host.data_ptr() + geometry.frame_bytes], device=device
    )
    slots = torch.tensor([frames - 1, 0], device=device)
    gather.prepare(addresses, PagedKV(arena.k_frames, arena.v_frames), slots=slots).run()
    for on_host, on_device in zip(
        RAW.decode(geometry, host), (arena.k_frames, arena.v_frames), strict=True
    ):
        assert torch.equal(bits(on_device[:, slots].cpu()), bits(on_host))
