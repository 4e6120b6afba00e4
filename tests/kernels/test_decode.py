"""Decode attention on the CPU: the CUDA source emulated, its launch arguments, and its choices."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.combinations import pairs
from tests.kernels import cases, emulator
from tests.kernels.cases import Case
from tests.kernels.test_compile import SHARED_MEMORY
from tierkv.codecs import CODECS
from tierkv.kernels import build, decode, decode_blocks, encoded, merge
from tierkv.kernels.build import DTYPES
from tierkv.page import Geometry

CPU = torch.device("cpu")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    for module in (decode, merge):
        monkeypatch.setattr(module, "kernel", emulator.kernel)
    monkeypatch.setattr(decode, "shared_memory", emulator.shared_memory)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("group", "dtype", "seed"), pairs([1, 4, 7, 16], list(DTYPES), [0, 1]), ids=str
)
def test_emulated_kernel_equals_float64(group: int, dtype: torch.dtype, seed: int) -> None:
    """Several launches, layouts and page tables with poisoned frames, merged once."""
    dims = {1: (64, 64), 4: (128, 128), 7: (80, 96), 16: (24, 40)}[group]
    rng = random.Random(f"{group} {dtype} {seed}")
    cases.check(
        Case(
            dtype, *dims, group, kv_heads=rng.randint(1, 2), batch=rng.randint(1, 3),
            page_tokens=rng.choice([16, 32, 64]), pages=rng.randint(3, 7),
            launches=rng.randint(1, 3), splits=rng.randint(1, 5), padding=rng.random() < 0.5,
            softcap=rng.choice([None, 5.0]), sinks=rng.random() < 0.5,
            per_head=rng.random() < 0.4, seed=seed,
        ),
        CPU,
    )  # fmt: skip


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("codec", "geometry", "group"), cases.ENCODED, ids=str)
def test_emulated_kernel_reads_encoded_pages(codec: str, geometry: Geometry, group: int) -> None:
    for seed in range(2):
        cases.check_encoded(codec, geometry, group, seed, CPU)


@pytest.mark.parametrize("codec", ["raw", "int4-importance"])
def test_pages_that_attention_does_not_read_are_refused(codec: str) -> None:
    layout = CODECS[codec].layout(Geometry(1, 2, 64, 64, torch.bfloat16, 32))
    assert not encoded.reads(layout)
    if layout is not None:
        frames = torch.zeros(3, 1 << 16, dtype=torch.uint8)
        with pytest.raises(ValueError, match="attention does not read pages of"):
            encoded.EncodedKV(layout, 2, frames)


def test_frames_that_hold_no_encoded_page_are_refused() -> None:
    layout = CODECS["int8"].layout(Geometry(1, 2, 64, 64, torch.bfloat16, 32))
    assert layout is not None
    size = 2 * layout.head_bytes
    encoded.EncodedKV(layout, 2, torch.zeros(3, size, dtype=torch.uint8))
    for wrong, message in (
        (torch.zeros(3, size - 16, dtype=torch.uint8), f"take {size} bytes"),
        (torch.zeros(3, size), "uint8"),
        (torch.zeros(3, 2 * size, dtype=torch.uint8)[:, ::2], "whole chunks"),
    ):
        with pytest.raises(ValueError, match=message):
            encoded.EncodedKV(layout, 2, wrong)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("dtype", "k_dim", "v_dim"),
    [(torch.bfloat16, 192, 128), (torch.float16, 256, 256), (torch.float32, 256, 96)],
    ids=str,
)
def test_emulated_wide_heads(dtype: torch.dtype, k_dim: int, v_dim: int) -> None:
    cases.check(Case(dtype, k_dim, v_dim, 2, kv_heads=1, page_tokens=16, pages=20, splits=2), CPU)


@pytest.mark.usefixtures("emulated")
def test_emulator_sees_a_missing_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would notice if a tile was read before its copies are done."""
    for file in build.source_directory().iterdir():
        shutil.copy(file, tmp_path)
    text = (tmp_path / "decode.cu").read_text()
    early = text.replace("copy_async_wait<STAGES - 2>", "copy_async_wait<STAGES - 1>")
    assert early != text
    (tmp_path / "decode.cu").write_text(early)
    monkeypatch.setattr(emulator, "source_directory", lambda: tmp_path)
    monkeypatch.setattr(emulator, "compile_library", emulator.compile_library.__wrapped__)
    with pytest.raises(AssertionError):
        cases.check(Case(k_dim=16, v_dim=16, batch=1, kv_heads=1, pages=20, splits=1), CPU)


def test_layouts_fit_every_generation() -> None:
    for block, processor in SHARED_MEMORY.values():
        for dtype in DTYPES:
            for dim in (16, 64, 80, 96, 128, 192, 256):
                for group in (1, 7, 16):
                    layout = decode_blocks.choose_layout(
                        dim, dim, dtype.itemsize, group,
                        block_limit=block, processor_limit=processor,
                    )  # fmt: skip
                    assert layout.stages >= 2 and layout.shared_bytes <= block


def test_too_large_heads_are_refused_with_numbers() -> None:
    with pytest.raises(ValueError, match="99000"):
        decode_blocks.choose_layout(1024, 1024, 4, 16, block_limit=99000, processor_limit=100000)


def test_splits_fill_the_device() -> None:
    assert decode_blocks.choose_splits(1 << 17, 8, 264) == 33  # 264 blocks: one whole round
    assert decode_blocks.choose_splits(1 << 17, 32, 264) == 8
    for heads in range(1, 2000, 7):
        splits = decode_blocks.choose_splits(1 << 20, heads, 264)
        blocks = splits * heads
        rounds = -(-blocks // 264)
        assert blocks / (rounds * 264) >= 0.8, (heads, splits)
    assert decode_blocks.choose_splits(600, 8, 264) == 4
    assert decode_blocks.choose_splits(0, 8, 264) == 1


def paged(**changes: Any) -> decode.PagedKV:
    shape = changes.get("shape", (2, 5, 32, 64))
    k = torch.zeros(shape, dtype=changes.get("dtype", torch.bfloat16))
    return decode.PagedKV(k, changes.get("v", k))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (2, 5, 24, 64)}, "page_tokens"),
        ({"shape": (2, 5, 32, 63)}, "16 bytes"),
        ({"shape": (5, 32, 64)}, "no frames"),
        ({"dtype": torch.float64}, "float64"),
        ({"v": torch.zeros(2, 5, 32, 64)}, "float32"),
        ({"v": torch.zeros(2, 4, 32, 64, dtype=torch.bfloat16)}, "no frames"),
        ({"v": torch.zeros(2, 5, 32, 128, dtype=torch.bfloat16)[..., :64]}, "contiguous"),
    ],
)
def test_wrong_frames_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged(**changes)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(1, 4, 64)}, "query"),
        ({"query": torch.zeros(1, 5, 64, dtype=torch.bfloat16)}, "5 query heads"),
        ({"query": torch.zeros(1, 34, 64, dtype=torch.bfloat16)}, "34 query heads"),
        ({"tokens": 161}, "161 tokens"),
        ({"tokens": torch.zeros(1)}, "tokens must be"),
        ({"tokens": torch.zeros(1, 3, dtype=torch.int32)}, "tokens must be"),
        ({"table": torch.zeros(1, 3, 5, dtype=torch.int32)}, "table"),
        ({"table": torch.zeros(2, 5, dtype=torch.int32)}, "table"),
        ({"table": torch.zeros(1, 5)}, "table"),
        ({"first_visible": torch.zeros(1, dtype=torch.int64)}, "first_visible"),
        ({"rows": slice(1, 1)}, "rows"),
        ({"slot": 3, "splits": 2}, "slot"),
        ({"first_frame": 3, "tokens": 96}, "96 tokens"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    query = changes.pop("query", torch.zeros(1, 4, 64, dtype=torch.bfloat16))
    partials = merge.Partials.allocate(4, 1, query.shape[1], 64, CPU)
    arguments = {"slot": 0, "tokens": 5, "scale": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        decode.prepare(query, paged(), partials, **arguments)


def test_without_a_gpu_the_reason_is_given() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not build.available()
    assert "GPU" in build.available().reason
    query = torch.zeros(1, 4, 64, dtype=torch.bfloat16)
    partials = merge.Partials.allocate(4, 1, 4, 64, CPU)
    with pytest.raises(ValueError, match="not on cpu"):
        decode.attend(query, paged(), partials, slot=0, tokens=5, scale=1.0)
