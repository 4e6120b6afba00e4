"""Kernels of codecs on the CPU: the CUDA source emulated, and its arguments."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.combinations import each
from tests.kernels import codec_cases, emulator
from tierkv.codecs import Codec, encoded_bytes
from tierkv.codecs.int4 import INT4
from tierkv.codecs.int4_importance import INT4_IMPORTANCE
from tierkv.codecs.int8 import INT8
from tierkv.kernels import codec as kernels
from tierkv.kernels.decode import PagedKV
from tierkv.kernels.gather import Fetches
from tierkv.page import Geometry

CPU = torch.device("cpu")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    monkeypatch.setattr(kernels, "kernel", emulator.kernel)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("number", "codec"),
    each(list(range(len(codec_cases.GEOMETRIES))), codec_cases.ENCODED),
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_emulated_kernels_give_the_bits_of_the_reference(number: int, codec: Codec) -> None:
    geometry = codec_cases.GEOMETRIES[number]
    for seed in range(2):
        codec_cases.check_encode(seed, codec, geometry, CPU)
        codec_cases.check_decode(seed, codec, geometry, CPU)
    codec_cases.check_fetch(0, codec, geometry, CPU)


@pytest.mark.usefixtures("emulated")
def test_emulated_pages_of_which_whole_groups_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 8 kept tokens; nothing is left of the first groups of 32 tokens and a channel."""
    geometry, randn = Geometry(1, 1, 64, 16, torch.bfloat16, 256), torch.randn

    def outliers(*shape: int, **options: Any) -> torch.Tensor:
        x = randn(*shape, **options)
        x[..., :32, :] += 1e4
        return x

    monkeypatch.setattr(torch, "randn", outliers)
    for seed in range(2):
        codec_cases.check_encode(seed, INT4_IMPORTANCE, geometry, CPU)
        codec_cases.check_decode(seed, INT4_IMPORTANCE, geometry, CPU)


@pytest.mark.usefixtures("emulated")
def test_emulated_pages_of_tiny_numbers_and_narrow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is finer than the finest; scales of channels end within a chunk."""
    geometry, randn = Geometry(1, 1, 12, 20, torch.float32, 16), torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape: 1e-34 * randn(*shape))
    for seed in range(2):
        codec_cases.check_encode(seed, INT4, geometry, CPU)
        codec_cases.check_decode(seed, INT4, geometry, CPU)


@pytest.mark.parametrize("codec", codec_cases.ENCODED, ids=lambda codec: codec.name)
def test_both_sides_agree_on_sizes(codec: Codec) -> None:
    for geometry in codec_cases.GEOMETRIES:
        layout = codec.layout(geometry)
        assert layout is not None and layout.supported
        assert layout.head_bytes * geometry.kv_heads == encoded_bytes(codec, geometry)
    for k_dim, dtype in ((6, torch.bfloat16), (64, torch.float64)):
        odd = codec.layout(Geometry(1, 1, k_dim, 64, dtype, 32))
        assert odd is not None and not odd.supported


GEOMETRY = codec_cases.GEOMETRIES[0]
LAYOUT = INT8.layout(GEOMETRY)
PAGES = torch.zeros(2, 3, 32, 64, dtype=torch.bfloat16)
FRAMES = torch.zeros(3, 12288, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": PAGES[:, :2]}, "V is"),
        ({"k": PAGES.float()}, "float32"),
        ({"k": torch.zeros(2, 3, 64, 32, dtype=torch.bfloat16).transpose(2, 3)}, "strides"),
        ({"frames": FRAMES[:2]}, "frames must be 3"),
        ({"frames": FRAMES[:, :8000].contiguous()}, "takes 8704 bytes"),
        ({"frames": FRAMES.float()}, "uint8"),
    ],
)
def test_wrong_pages_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"k": PAGES, "v": PAGES, "frames": FRAMES} | changes
    with pytest.raises(ValueError, match=message):
        kernels.prepare_encode(LAYOUT, **arguments)


def test_wrong_frames_are_refused() -> None:
    pages = PagedKV(PAGES, PAGES)
    with pytest.raises(ValueError, match="3 frames into 2"):
        kernels.prepare_decode(LAYOUT, FRAMES, PagedKV(PAGES[:, :2], PAGES[:, :2]))
    with pytest.raises(ValueError, match="slots"):
        kernels.prepare_decode(LAYOUT, FRAMES, pages, slots=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="not those of"):
        kernels.prepare_decode(LAYOUT, FRAMES, PagedKV(PAGES, PAGES[..., :32].contiguous()))
    addresses = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 heads do not fit 2"):
        kernels.prepare_fetch(LAYOUT, addresses, Fetches.allocate(3, 2, CPU), pages)
    with pytest.raises(ValueError, match="addresses"):
        kernels.prepare_fetch(LAYOUT, addresses.int(), Fetches.allocate(2, 2, CPU), pages)
