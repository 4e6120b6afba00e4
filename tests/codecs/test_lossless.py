"""Packing without loss: every bit comes back, whatever it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.test_codecs import SPECIAL
from tests.combinations import examples
from tierkv.codecs.lossless import Lossless

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def page_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy().reshape(-1).copy()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(40))
@given(st.integers(0, 1 << 30), st.lists(st.sampled_from(SPECIAL), max_size=8), st.booleans())
def test_every_bit_comes_back(
    dtype: torch.dtype, seed: int, special: list[float], random_bits: bool
) -> None:
    """Normal keys with NaN, infinities, denormals and zeros in them, and plain noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, generator=generator).to(dtype)
    if random_bits:
        x.view(torch.uint8).random_(generator=generator)
    for index, value in enumerate(special):
        x[(seed + 97 * index) % len(x)] = value
    page = page_of(x)
    out, lossless = np.full(len(page) + 256, 0xA5, np.uint8), Lossless(dtype.itemsize)
    used = lossless.pack(page, out)
    assert 0 < used <= len(out) and (out[used:] == 0xA5).all()
    back = np.zeros_like(page)
    lossless.unpack(out, back)
    assert np.array_equal(back, page)


def test_constant_and_empty_looking_pages() -> None:
    for value in (0.0, float("nan"), 1e-40):
        page = page_of(torch.full((2048,), value, dtype=torch.bfloat16))
        out, back = np.empty_like(page), np.empty_like(page)
        assert 0 < Lossless(2).pack(page, out) < 0.52 * len(page)
        Lossless(2).unpack(out, back)
        assert np.array_equal(back, page)


def test_normal_numbers_shrink_and_noise_does_not_fit() -> None:
    x = torch.randn(32768, generator=torch.Generator().manual_seed(0))
    for dtype, share in ((torch.bfloat16, 0.7), (torch.float16, 0.93), (torch.float32, 0.85)):
        page = page_of(x.to(dtype))
        assert 0 < Lossless(dtype.itemsize).pack(page, np.empty_like(page)) < share * len(page)
    noise = np.random.default_rng(0).integers(0, 256, 65536, dtype=np.uint8)
    assert Lossless(2).pack(noise, np.empty(65536 * 3 // 4, np.uint8)) == 0


def test_what_was_never_packed_is_refused() -> None:
    page = page_of(torch.randn(1024).to(torch.bfloat16))
    out = np.empty_like(page)
    used = Lossless(2).pack(page, out)
    for damaged in (out[:100], np.zeros_like(out), np.full_like(out, 255)):
        with pytest.raises(ValueError, match="exponents"):
            Lossless(2).unpack(damaged, np.empty_like(page))
    with pytest.raises(ValueError, match="exponents"):
        Lossless(2).unpack(out[:used], np.empty(len(page) // 2, np.uint8))
