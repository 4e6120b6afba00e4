"""Every codec over pages that hypothesis makes: bounds, special values, layout, determinism."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.combinations import examples
from tierkv.codecs import CHUNK, CODECS, Codec, encoded_bytes
from tierkv.codecs.affine import LIMIT, Affine
from tierkv.page import Geometry

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GEOMETRIES = [
    Geometry(1, 2, 64, 64, BF16, 32),
    Geometry(1, 1, 128, 128, BF16, 64),
    Geometry(1, 3, 24, 40, F16, 16),
    Geometry(2, 2, 4, 8, F32, 16),
    Geometry(1, 1, 5, 3, BF16, 16),  # odd dims
    Geometry(1, 1, 64, 512, BF16, 32),  # rotary keys and latents
]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, -3e38, 6e4, float("inf"), float("-inf"), float("nan")]
LOSSY = [codec for codec in CODECS.values() if not codec.lossless]


def make_pages(seed: int, geometry: Geometry, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pages; some with outlier channels, constant tokens, values of any magnitude."""
    generator = torch.Generator().manual_seed(seed)
    pages = []
    for dim in (geometry.k_dim, geometry.v_dim):
        shape = (geometry.kv_heads, count, geometry.page_tokens, dim)
        x = torch.randn(shape, generator=generator)
        x *= 10.0 ** (4 * torch.rand(dim, generator=generator) - 2)
        x += 100 * (torch.rand(dim, generator=generator) < 0.1)
        x[..., seed % geometry.page_tokens, :] = seed % 7 - 3.5
        pages.append(x.to(geometry.dtype))
    return pages[0], pages[1]


def round_trip(
    codec: Codec, geometry: Geometry, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = encoded_bytes(codec, geometry)
    frames = torch.full((k.shape[1], size + 32), 0xA5, dtype=torch.uint8)
    codec.encode(geometry, k, v, frames)
    assert (frames[:, size:] == 0xA5).all(), "the padding of the frame was written to"
    return frames, *codec.decode(geometry, frames)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@settings(max_examples=examples(25))
@given(st.integers(0, 1 << 30), st.sampled_from(GEOMETRIES), st.integers(1, 3))
def test_error_within_the_stated_bound(
    codec: Codec, seed: int, geometry: Geometry, count: int
) -> None:
    pages = make_pages(seed, geometry, count)
    _, *got = round_trip(codec, geometry, *pages)
    for x, y, bound in zip(pages, got, codec.error_bound(geometry, *pages), strict=True):
        assert y.dtype == x.dtype and y.shape == x.shape == bound.shape
        assert ((x.float() - y.float()).abs() <= bound).all()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@settings(max_examples=examples(25))
@given(st.data())
def test_special_values(codec: Codec, data: st.DataObject) -> None:
    """What is promised a bound keeps it; what is not finite is never turned into a number."""
    geometry = data.draw(st.sampled_from(GEOMETRIES))
    pages = make_pages(data.draw(st.integers(0, 99)), geometry, 2)
    for x in pages:
        flat = x.view(-1)
        for value in data.draw(st.lists(st.sampled_from(SPECIAL), max_size=4)):
            flat[data.draw(st.integers(0, len(flat) - 1))] = value
    _, *got = round_trip(codec, geometry, *pages)
    for x, y, bound in zip(pages, got, codec.error_bound(geometry, *pages), strict=True):
        wrong = (x.float() - y.float()).abs() > bound
        assert not wrong.any()
        if codec.lossless:
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        else:
            assert y[(x.float().abs() > LIMIT) | x.isnan()].isnan().all()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_constant_pages_are_exact(codec: Codec) -> None:
    for geometry in GEOMETRIES:
        for value in (0.0, -0.0, 0.3, -7.0, 1e-40, 6e4):
            k, v = (torch.full_like(x, value) for x in make_pages(0, geometry, 2))
            _, *got = round_trip(codec, geometry, k, v)
            if codec.name != "fp8":  # its scale is not the value
                assert torch.equal(got[0], k) and torch.equal(got[1], v), (geometry, value)
            elif value == 0:
                assert not got[0].any() and not got[1].any()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_layout(codec: Codec) -> None:
    """Head-pages are runs of whole chunks; each depends on nothing but itself."""
    for geometry in GEOMETRIES:
        if codec.lossless and geometry.k_dim % 8:
            continue  # raw pages of odd sizes are never read by kernels
        size = codec.head_bytes(geometry)
        assert size % CHUNK == 0
        k, v = make_pages(3, geometry, 4)
        whole = round_trip(codec, geometry, k, v)[0][:, : encoded_bytes(codec, geometry)]
        one = Geometry(1, 1, geometry.k_dim, geometry.v_dim, geometry.dtype, geometry.page_tokens)
        for head in range(geometry.kv_heads):
            alone = round_trip(codec, one, k[head : head + 1, 2:3], v[head : head + 1, 2:3])[0]
            assert torch.equal(whole[2, head * size : (head + 1) * size], alone[0, :size])


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.name)
def test_sizes_and_errors_are_what_the_documents_say(codec: Codec) -> None:
    """Shape of an 8B model; normal elements with outlier channels among the keys."""
    geometry = Geometry(1, 8, 128, 128, BF16, 32)
    share = {"int8": 0.52, "int8-channel": 0.57, "int4": 0.3, "int4-importance": 0.37, "fp8": 0.517}
    error = {"int8": 0.02, "int8-channel": 0.007, "int4": 0.1, "int4-importance": 0.1, "fp8": 0.04}
    assert encoded_bytes(codec, geometry) / geometry.page_bytes < share[codec.name]
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(8, 4, 32, 128, generator=generator) for _ in range(2))
    k[..., :3] += torch.tensor([8.0, -6.0, 12.0])
    _, *got = round_trip(codec, geometry, k.to(BF16), v.to(BF16))
    for x, y in zip((k, v), got, strict=True):
        assert ((x - y.float()).norm() / x.norm()).item() < error[codec.name]


def test_keys_by_channel_are_better_than_by_token_where_channels_differ() -> None:
    geometry = GEOMETRIES[0]
    k, v = make_pages(5, geometry, 4)
    errors = {}
    for name in ("int8", "int8-channel"):
        got = round_trip(CODECS[name], geometry, k, v)[1]
        errors[name] = (got.float() - k.float()).norm().item()
    assert errors["int8-channel"] < 0.5 * errors["int8"]


def test_importance_keeps_the_tokens_it_is_told_to() -> None:
    geometry = GEOMETRIES[0]
    codec = CODECS["int4-importance"]
    k, v = make_pages(6, geometry, 2)
    scores = torch.zeros(2, 2, 32)
    chosen = [3, 9, 17, 31]
    scores[..., chosen] = 1.0
    frames = torch.empty(2, encoded_bytes(codec, geometry), dtype=torch.uint8)
    codec.encode(geometry, k, v, frames, scores)  # type: ignore[call-arg]
    wide = (codec.decode(geometry, frames)[1].float() - v.float()).abs().mean((0, 1, 3))
    rest = [token for token in range(32) if token not in chosen]
    assert wide[chosen].max() < 0.2 * wide[rest].max()


def test_importance_beats_smaller_groups_at_equal_bytes() -> None:
    """Where a few tokens are unlike the others, as sinks are; error over the other tokens' keys."""
    geometry = Geometry(1, 4, 128, 128, BF16, 32)
    finer, codec = Affine("int4", bits=4, key_tokens=16, channels=16), CODECS["int4-importance"]
    assert encoded_bytes(codec, geometry) <= encoded_bytes(finer, geometry)
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(4, 6, 32, 128, generator=generator) for _ in range(2))
    k[:, :, [0, 13, 29]] *= 6.0
    errors = {}
    for name, one in (("importance", codec), ("finer", finer)):
        got = round_trip(one, geometry, k.to(BF16), v.to(BF16))[1].float()
        errors[name] = ((got - k).norm() / k.norm()).item()
    assert errors["importance"] < 0.7 * errors["finer"]
