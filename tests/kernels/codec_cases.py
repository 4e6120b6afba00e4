"""Encoding and decoding against the reference codecs, bit for bit, for CPU and GPU tests."""

from __future__ import annotations

import random

import torch

from tests.kernels.gather_cases import bits
from tierkv.codecs import CODECS, Codec, encoded_bytes
from tierkv.kernels import codec as kernels
from tierkv.kernels.decode import PagedKV
from tierkv.kernels.gather import Fetches
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena

GEOMETRIES = [
    Geometry(1, 2, 64, 64, torch.bfloat16, 32),
    Geometry(1, 3, 40, 24, torch.float16, 16),
    Geometry(1, 1, 32, 96, torch.float32, 64),
    Geometry(1, 1, 64, 512, torch.bfloat16, 32),  # rotary keys and latents
]
ENCODED = [codec for codec in CODECS.values() if not codec.lossless]
SPECIAL = [0.0, -0.0, 1e-40, 3e38, -3e38, 6e4, float("inf"), float("-inf"), float("nan")]


class Problem:
    """Random pages, some of them awkward, and what the reference makes of them."""

    def __init__(self, seed: int, codec: Codec, geometry: Geometry, device: torch.device):
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.codec, self.geometry, self.device = codec, geometry, device
        layout = codec.layout(geometry)
        assert layout is not None
        self.layout = layout
        self.count = self.rng.randint(1, 4)
        tokens, pages = geometry.page_tokens, []
        for dim in (geometry.k_dim, geometry.v_dim):
            x = torch.randn(geometry.kv_heads, self.count, tokens, dim)
            x *= 10.0 ** (3 * torch.rand(dim) - 1)
            x[..., : dim // 8] += 50.0
            x[..., self.rng.randrange(tokens), :] = self.rng.choice([0.0, -0.0, 2.5])
            x = x.to(geometry.dtype)
            flat = x.view(-1)
            for _ in range(self.rng.choice([0, 3])):
                flat[self.rng.randrange(len(flat))] = self.rng.choice(SPECIAL)
            pages.append(x)
        self.frame_bytes = -(-encoded_bytes(codec, geometry) // 64) * 64 + 64
        self.encoded = torch.full((self.count, self.frame_bytes), 0xA5, dtype=torch.uint8)
        codec.encode(geometry, *pages, self.encoded)
        self.decoded = codec.decode(geometry, self.encoded)
        self.k, self.v = (self.strided(x) for x in pages)

    def strided(self, x: torch.Tensor) -> torch.Tensor:
        """Put pages on the device, contiguous or as a model hands them over: head after token."""
        x = x.to(self.device)
        if self.rng.random() < 0.5:
            return x
        return x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)

    def host(self, frames: torch.Tensor) -> torch.Tensor:
        """Return frames in memory that both sides reach."""
        return frames.pin_memory() if self.device.type == "cuda" else frames

    def addresses(self, frames: torch.Tensor) -> torch.Tensor:
        start, step = frames.data_ptr(), frames.shape[1]
        values = [start + i * step for i in range(len(frames))]
        return torch.tensor(values, device=self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether the bits are equal, any NaN taken for any other."""
    found = found.cpu()
    nan = want.isnan()
    return torch.equal(found.isnan(), nan) and torch.equal(
        bits(found).masked_fill(nan, 0), bits(want.contiguous()).masked_fill(nan, 0)
    )


def check_encode(seed: int, codec: Codec, geometry: Geometry, device: torch.device) -> None:
    """Into frames on the device, and into host frames by address; padding is left alone."""
    problem = Problem(seed, codec, geometry, device)
    frames = torch.full_like(problem.encoded, 0xA5, device=device)
    blocks = problem.rng.choice([None, 1, 3])
    kernels.prepare_encode(problem.layout, problem.k, problem.v, frames, blocks=blocks).run()
    assert torch.equal(frames.cpu(), problem.encoded)
    host = problem.host(torch.full_like(problem.encoded, 0xA5))
    addresses = problem.addresses(host)
    addresses[-1] = 0
    kernels.prepare_encode(problem.layout, problem.k, problem.v, addresses).run()
    problem.wait()
    assert torch.equal(host[:-1], problem.encoded[:-1])
    assert (host[-1] == 0xA5).all()


def check_decode(seed: int, codec: Codec, geometry: Geometry, device: torch.device) -> None:
    """From frames on the device and from host frames, into the slots a table names."""
    problem = Problem(seed, codec, geometry, device)
    rng, count = problem.rng, problem.count
    for source in ("device", "host"):
        arena = Arena.allocate(geometry, count + 2, device)[0]
        arena.k.fill_(7.0)
        arena.v.fill_(7.0)
        pages = PagedKV(arena.k_frames, arena.v_frames)
        slots = rng.sample(range(count + 2), count)
        table = torch.tensor(slots, dtype=rng.choice([torch.int32, torch.int64]), device=device)
        if rng.random() < 0.3:
            slots, table = list(range(count)), None
        frames = problem.encoded.to(device)
        host = problem.host(problem.encoded.clone())
        given = frames if source == "device" else problem.addresses(host)
        blocks = rng.choice([None, 1, 2])
        kernels.prepare_decode(problem.layout, given, pages, slots=table, blocks=blocks).run()
        problem.wait()
        untouched = [slot for slot in range(count + 2) if slot not in slots]
        for found, want in zip((pages.k, pages.v), problem.decoded, strict=True):
            assert same(found[:, slots], want)
            assert (found[:, untouched] == 7.0).all()


def check_fetch(seed: int, codec: Codec, geometry: Geometry, device: torch.device) -> None:
    """Head-pages of a list whose length only the device knows."""
    problem = Problem(seed, codec, geometry, device)
    rng, own_heads, count = problem.rng, geometry.kv_heads, problem.count
    heads = rng.choice([1, 2]) * own_heads  # of one sequence or of two
    host = problem.host(problem.encoded.clone())
    addresses = problem.addresses(host)
    arena = Arena.allocate(geometry, count + 1, device)[0]
    arena.k.fill_(7.0)
    arena.v.fill_(7.0)
    pages = PagedKV(arena.k_frames, arena.v_frames)
    want = [x.cpu().clone() for x in (pages.k, pages.v)]
    fetches = Fetches.allocate(heads, 4, device)
    fetches.pages.fill_(1 << 30)
    free = [rng.sample(range(count + 1), count + 1) for _ in range(own_heads)]
    for head in range(heads):
        own = head % own_heads
        number = rng.randint(0, min(count, len(free[own])))
        chosen = rng.sample(range(count), number)
        slots = [free[own].pop() for _ in range(number)]
        fetches.pages[head, :number] = torch.tensor(chosen, device=device)
        fetches.frames[head, :number] = torch.tensor(slots, device=device)
        fetches.counts[head] = number
        for page, slot in zip(chosen, slots, strict=True):
            for whole, decoded in zip(want, problem.decoded, strict=True):
                whole[own, slot] = decoded[own, page]
    blocks = rng.choice([1, 2, 5])
    kernels.prepare_fetch(problem.layout, addresses, fetches, pages, blocks=blocks).run()
    problem.wait()
    assert same(pages.k, want[0]) and same(pages.v, want[1])
