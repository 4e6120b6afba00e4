"""Copies of random pages by table, compared bit for bit, for CPU and GPU tests."""

from __future__ import annotations

import random

import torch

from tierkv.codecs import RAW
from tierkv.kernels import gather
from tierkv.kernels.decode import PagedKV
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena

BITS = {2: torch.int16, 4: torch.int32}
GEOMETRIES = [
    Geometry(1, 3, 40, 24, torch.float16, 16),
    Geometry(1, 2, 128, 128, torch.bfloat16, 32),
    Geometry(1, 1, 192, 128, torch.float32, 64),
]


class Problem:
    """Host frames and device frames of random bytes, and which pages of one lie where."""

    def __init__(self, seed: int, geometry: Geometry, device: torch.device, host_frames: int = 17):
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.geometry, self.device = geometry, device
        self.host = torch.randint(
            0, 256, (host_frames, geometry.frame_bytes), dtype=torch.uint8,
            pin_memory=device.type == "cuda",
        )  # fmt: skip
        self.frames = host_frames + self.rng.randint(0, 3)
        if self.rng.random() < 0.5:
            arena = Arena.allocate(geometry, self.frames, device)[0]
            for tensor in (arena.k, arena.v):
                tensor.view(torch.uint8).random_()
            self.pages = PagedKV(arena.k_frames, arena.v_frames)
        else:
            raw = torch.empty(
                (self.frames, geometry.frame_bytes), dtype=torch.uint8, device=device
            ).random_()
            self.pages = PagedKV(*RAW.decode(geometry, raw))

    def address_of(self, frames: list[int]) -> torch.Tensor:
        """Return the addresses of host frames; of frame -1, 0."""
        start, step = self.host.data_ptr(), self.geometry.frame_bytes
        values = [0 if frame < 0 else start + frame * step for frame in frames]
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def pick(self, count: int) -> list[int]:
        """Return host frames in random order, some of them -1."""
        frames = self.rng.sample(range(len(self.host)), count)
        return [frame if self.rng.random() < 0.9 else -1 for frame in frames]

    def host_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """View the host frames as bits of K and V, ``[kv_heads, n, page_tokens, dim]``."""
        k, v = RAW.decode(self.geometry, self.host)
        return bits(k), bits(v)

    def device_pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the device frames to the host, likewise."""
        return bits(self.pages.k.cpu()), bits(self.pages.v.cpu())

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(BITS[tensor.itemsize])


def check_pages(seed: int, geometry: Geometry, device: torch.device, *, to_host: bool) -> None:
    """Copy whole pages; nothing else changes on either side."""
    problem = Problem(seed, geometry, device)
    rng = problem.rng
    count = rng.randint(0, len(problem.host))
    sources = problem.pick(count)
    slots = rng.sample(range(problem.frames), count)
    table = torch.tensor(slots, dtype=rng.choice([torch.int32, torch.int64]), device=device)
    if rng.random() < 0.3:
        slots, table = list(range(count)), None
    want_host, want = problem.host.clone(), problem.device_pages()
    host_side = RAW.decode(geometry, want_host)
    for page, slot in zip(sources, slots, strict=True):
        for on_host, on_device in zip(host_side, want, strict=True):
            if page >= 0 and to_host:
                bits(on_host)[:, page] = on_device[:, slot]
            elif page >= 0:
                on_device[:, slot] = bits(on_host)[:, page]
    addresses, blocks = problem.address_of(sources), rng.choice([1, 3, 16])
    gather.prepare(addresses, problem.pages, slots=table, to_host=to_host, blocks=blocks).run()
    problem.wait()
    assert torch.equal(problem.host, want_host)
    assert all(map(torch.equal, problem.device_pages(), want))


def check_fetch(seed: int, geometry: Geometry, device: torch.device) -> None:
    """Copy head-pages of a list whose length only the device knows; the rest of it is nonsense."""
    problem = Problem(seed, geometry, device)
    rng, own_heads = problem.rng, geometry.kv_heads
    sequences = rng.choice([1, 1, 2, 3])
    heads = sequences * own_heads
    capacity, entries = len(problem.host), rng.randint(1, 12)
    hosts = problem.pick(capacity)
    fetches = gather.Fetches.allocate(heads, entries, device)
    fetches.pages.fill_(1 << 30)
    fetches.frames.fill_(1 << 30)
    addresses = problem.address_of(hosts)
    launch = gather.prepare_fetch(addresses, fetches, problem.pages, blocks=rng.choice([1, 2, 16]))
    for _ in range(2):
        want = problem.device_pages()
        free = [rng.sample(range(problem.frames), problem.frames) for _ in range(own_heads)]
        for head in range(heads):
            own = head % own_heads
            count = min(rng.choice([0, 1, entries]), len(free[own]))
            pages = rng.sample(range(capacity), count)
            slots = [free[own].pop() for _ in range(count)]
            fetches.pages[head, :count] = torch.tensor(pages, device=device)
            fetches.frames[head, :count] = torch.tensor(slots, device=device)
            fetches.counts[head] = count
            for page, slot in zip(pages, slots, strict=True):
                for on_host, on_device in zip(problem.host_pages(), want, strict=True):
                    if hosts[page] >= 0:
                        on_device[own, slot] = on_host[own, hosts[page]]
        launch.run()
        problem.wait()
        assert all(map(torch.equal, problem.device_pages(), want))


def check_frames(seed: int, device: torch.device, *, to_host: bool) -> None:
    """Copy the first bytes of frames of any content."""
    torch.manual_seed(seed)
    count, size, used = 9, 1024, (1000, 544)[seed % 2]
    host = torch.randint(0, 256, (count, size), dtype=torch.uint8, pin_memory=device.type == "cuda")
    near = torch.randint(0, 256, (count + 2, size), dtype=torch.uint8).to(device)
    order, slots = torch.randperm(count), torch.randperm(count + 2)[:count]
    addresses = (host.data_ptr() + order * size).to(device)
    moved = -(-used // 16) * 16
    want_host, want_near = host.clone(), near.cpu()
    if to_host:
        want_host[order, :moved] = want_near[slots, :moved]
    else:
        want_near[slots, :moved] = want_host[order, :moved]
    gather.prepare_frames(addresses, near, used, slots=slots.to(device), to_host=to_host).run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host, want_host) and torch.equal(near.cpu(), want_near)
