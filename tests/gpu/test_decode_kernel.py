"""Decode attention on the GPU against float64: every dim, dtype and group, poisoned memory."""

from __future__ import annotations

import random

import pytest
import torch

from tests.kernels import cases
from tests.kernels.cases import Case
from tierkv.attention import reference
from tierkv.kernels import decode
from tierkv.kernels.build import DTYPES, available
from tierkv.kernels.merge import Partials, merge
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena

DIMS = [
    (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256),
    (192, 128), (64, 256), (256, 80), (24, 40), (16, 16),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    usable = available()
    assert usable, usable.reason
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_dim(dims: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    for group in (1, 4, 7, 16):
        cases.check(Case(dtype, *dims, group, pages=40, splits=None, seed=group), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", range(1, 17))
def test_every_group(group: int, dtype: torch.dtype, device: torch.device) -> None:
    cases.check(Case(dtype, group=group, pages=30, launches=2, seed=group), device)


@pytest.mark.parametrize("seed", range(60))
def test_random_problems(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    case = Case(
        rng.choice(list(DTYPES)), *rng.choice([(64, 64), (128, 128), (192, 128)]),
        rng.choice([2, 4, 7]), kv_heads=rng.choice([1, 3, 8]), batch=rng.randint(1, 5),
        page_tokens=rng.choice([16, 32, 256]), pages=rng.randint(5, 40),
        launches=rng.randint(1, 5), splits=rng.choice([None, 1, 2, 7, 40]),
        padding=rng.random() < 0.5, softcap=rng.choice([None, 3.0, 50.0]),
        sinks=rng.random() < 0.3, per_head=rng.random() < 0.4, seed=seed,
    )  # fmt: skip
    cases.check(case, device)


@pytest.mark.parametrize(("codec", "geometry", "group"), cases.ENCODED, ids=str)
def test_encoded_pages(codec: str, geometry: Geometry, group: int, device: torch.device) -> None:
    for seed in range(20):
        cases.check_encoded(codec, geometry, group, seed, device)


def filled(device: torch.device, tokens: int) -> tuple[Arena, torch.Tensor]:
    """Return a random arena of 8 KV heads and a query of 32 heads."""
    arena = Arena.allocate(Geometry(1, 8, 128, 128, torch.bfloat16), tokens // 32, device)[0]
    arena.k.normal_()
    arena.v.normal_()
    return arena, torch.randn(1, 32, 128, device=device).bfloat16()


@pytest.mark.parametrize("tokens", [1, 31, 33, 5000, 131072 - 5])
def test_long_contexts(tokens: int, device: torch.device) -> None:
    """One launch over everything, split to fill the device."""
    arena, query = filled(device, 131072)
    arena.k[:, tokens:] = float("nan")
    arena.v[:, tokens:] = float("nan")
    partials = Partials.allocate(512, 1, 32, 128, device)
    pages = decode.PagedKV(arena.k_frames, arena.v_frames)
    used = decode.attend(query, pages, partials, slot=0, tokens=tokens, scale=128**-0.5)
    out = torch.empty_like(query)
    merge(partials, used, out)
    exact = reference.attend(
        query.double().view(1, 8, 4, 128), arena.k[None, :, :tokens].double(),
        arena.v[None, :, :tokens].double(), scale=128**-0.5,
    )  # fmt: skip
    want = exact.out.view(1, 32, 128)
    error = float((out.double() - want).norm() / want.norm())
    assert error <= cases.TOLERANCES[torch.bfloat16], error


def test_frames_beyond_two_to_the_31_elements(device: torch.device) -> None:
    """Offsets are 64 bits wide: 8 GiB of K in one arena."""
    frames = (1 << 32) // (4 * 32 * 128) + 2
    geometry = Geometry(1, 4, 128, 128, torch.bfloat16)
    if torch.cuda.mem_get_info()[0] < 2.2 * frames * geometry.page_bytes / 2:
        pytest.skip("less than 19 GB of GPU memory are free")
    arena = Arena.allocate(geometry, frames, device)[0]
    table = torch.tensor([[frames - 1, 0, frames // 2, frames - 2]], device=device)
    for tensor in (arena.k_frames, arena.v_frames):
        tensor[:, table[0]] = torch.randn(4, 4, 32, 128, device=device).bfloat16()
    query = torch.randn(1, 16, 128, device=device).bfloat16()
    partials = Partials.allocate(4, 1, 16, 128, device)
    pages = decode.PagedKV(arena.k_frames, arena.v_frames)
    used = decode.attend(query, pages, partials, slot=0, tokens=128, scale=0.1, table=table)
    out = torch.empty_like(query)
    merge(partials, used, out)
    k, v = arena.gather(table)
    exact = reference.attend(query.double().view(1, 4, 4, 128), k.double(), v.double(), scale=0.1)
    error = float((out.double() - exact.out.view(1, 16, 128)).norm() / exact.out.norm())
    assert error <= cases.TOLERANCES[torch.bfloat16], error


def test_graph_replays_follow_the_length(device: torch.device) -> None:
    """Captured once, replayed as the sequence grows; nothing is allocated on the way."""
    arena, query = filled(device, 4096)
    partials = Partials.allocate(64, 1, 32, 128, device)
    out = torch.empty_like(query)
    length = torch.tensor([1], dtype=torch.int32, device=device)
    launch = decode.prepare(
        query, decode.PagedKV(arena.k_frames, arena.v_frames), partials, slot=0, tokens=length,
        scale=128**-0.5,
    )  # fmt: skip

    def step() -> None:
        launch.run()
        merge(partials, launch.next_slot, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    results = []
    for tokens in (1, 17, 1000, 4096):
        length.fill_(tokens)
        out.fill_(float("nan"))
        partials.out.fill_(float("nan"))
        graph.replay()
        results.append((tokens, out.clone()))
    clones = len(results)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == clones
    for tokens, result in results:
        exact = reference.attend(
            query.double().view(1, 8, 4, 128), arena.k[None, :, :tokens].double(),
            arena.v[None, :, :tokens].double(), scale=128**-0.5,
        )  # fmt: skip
        want = exact.out.view(1, 32, 128)
        error = float((result.double() - want).norm() / want.norm())
        assert error <= cases.TOLERANCES[torch.bfloat16], (tokens, error)


def test_same_bits_every_time(device: torch.device) -> None:
    """No order of arrival enters the result; a moving one is a race."""
    arena, query = filled(device, 65536)
    partials = Partials.allocate(512, 1, 32, 128, device)
    pages = decode.PagedKV(arena.k_frames, arena.v_frames)
    results = []
    for _ in range(20):
        used = decode.attend(query, pages, partials, slot=0, tokens=65536, scale=128**-0.5)
        out = torch.empty_like(query)
        merge(partials, used, out)
        results.append(out)
    assert all(torch.equal(result, results[0]) for result in results)


def test_runs_on_the_callers_stream(device: torch.device) -> None:
    """A long wait on the caller's stream comes before the kernel, although others are idle."""
    arena, query = filled(device, 2048)
    partials = Partials.allocate(64, 1, 32, 128, device)
    pages = decode.PagedKV(arena.k_frames, arena.v_frames)
    out, late = torch.empty_like(query), torch.empty_like(query)
    arguments = {"slot": 0, "tokens": 2048, "scale": 128**-0.5}
    merge(partials, decode.attend(query, pages, partials, **arguments), out)
    values = arena.v.clone()
    arena.v.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        arena.v.copy_(values)
        merge(partials, decode.attend(query, pages, partials, **arguments), late)
    stream.synchronize()
    assert torch.equal(out, late)
