"""Every kernel compiles for every generation we run on, without spilling registers. Needs no GPU.

The compiler is NVRTC, what CuPy compiles with, from the package nvidia-cuda-nvrtc of the extra
`test` or from the one that a torch with CUDA brings; sm_120 needs CUDA 12.8. CI fails without it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.combinations import each
from tierkv.codecs import CODECS
from tierkv.kernels import build, select
from tierkv.kernels.decode import constants
from tierkv.kernels.decode_blocks import choose_layout
from tierkv.kernels.encoded import EncodedKV
from tierkv.page import Geometry

SHARED_MEMORY = {80: (166912, 167936), 90: (232448, 233472), 120: (101376, 102400)}
"""Compute capability -> largest shared memory of a block and of a multiprocessor, in bytes."""

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DECODE = [
    (BF16, 128, 128, 4, 32),
    (BF16, 128, 128, 7, 16),
    (F16, 64, 64, 1, 256),
    (F16, 80, 80, 12, 64),
    (BF16, 192, 128, 16, 32),
    (BF16, 256, 256, 8, 32),
    (BF16, 256, 256, 16, 32),
    (F16, 24, 40, 3, 16),
    (F32, 96, 96, 4, 32),
    (F32, 256, 256, 16, 32),
]
"""Element type, K dim, V dim, group, page tokens."""
DECODE_ENCODED = [
    ("int8", BF16, 128, 128, 4, 32),
    ("int8", BF16, 128, 128, 7, 32),
    ("int4", BF16, 128, 128, 8, 32),
    ("int8-channel", F16, 64, 64, 1, 256),
    ("int4", BF16, 256, 256, 16, 16),
    ("int8", F32, 96, 96, 4, 32),
    ("fp8", BF16, 128, 128, 4, 32),
    ("fp8", F16, 80, 64, 7, 16),
]
"""The same, behind the codec of the pages."""
MERGE = [(F32, 80), (F16, 96), (BF16, 128), (BF16, 256)]
"""Element type, V dim."""
FOLD = [(F32, BF16, F32, 128, 8), (F16, F16, BF16, 80, 4)]
"""Element types of both sides and the result, V dim, elements per thread."""
SCORE = [(BF16, 128, 4, 2), (F16, 256, 16, 2), (F32, 80, 7, 1)]
"""Element type, K dim, group, parts of a summary."""
SCORE_BYTES = [(BF16, 128, 7, 1), (BF16, 256, 16, 1), (F16, 64, 4, 1), (F32, 128, 7, 1)]
"""The same, of 8-bit summaries."""

CODEC = [
    (BF16, 128, 128, 32),
    (BF16, 64, 512, 32),
    (BF16, 256, 256, 256),
    (F16, 80, 96, 64),
    (F32, 40, 32, 16),
]
"""Element type, K dim, V dim, page tokens."""
SCORE_KEYS = [
    (BF16, 128, 4, 6),
    (BF16, 128, 7, 4),
    (BF16, 256, 16, 6),
    (F16, 64, 8, 34),
    (F32, 128, 4, 6),
    (F32, 256, 16, 6),
]
"""The same, with all keys of a page for a summary."""
GROUPS = [1, 7, 16]

Defines = tuple[tuple[str, int], ...]


def variants(capability: int) -> list[tuple[str, Defines]]:
    """List (stem, macros) of what is compiled."""
    block, processor = SHARED_MEMORY[capability]
    found: list[tuple[str, Defines]] = []
    for dtype, k_dim, v_dim, group, page_tokens in DECODE:
        layout = choose_layout(
            k_dim, v_dim, dtype.itemsize, group, block_limit=block, processor_limit=processor
        )
        found.append(("decode", constants(dtype, k_dim, v_dim, group, page_tokens, layout)))
    for codec, dtype, k_dim, v_dim, group, page_tokens in DECODE_ENCODED:
        page = CODECS[codec].layout(Geometry(1, 1, k_dim, v_dim, dtype, page_tokens))
        assert page is not None
        frames = EncodedKV(page, 1, torch.zeros(1, page.head_bytes, dtype=torch.uint8))
        layout = choose_layout(
            k_dim, v_dim, dtype.itemsize, group, block_limit=block, processor_limit=processor,
            tile_bytes=frames.tile_bytes,
        )  # fmt: skip
        sizes = constants(dtype, k_dim, v_dim, group, page_tokens, layout)
        found.append(("decode", sizes + frames.defines))
    for dtype, v_dim in MERGE:
        found.append(("merge", (("DTYPE", build.DTYPES[dtype]), ("V_DIM", v_dim))))
    for *dtypes, v_dim, width in FOLD:
        a, b, out = (build.DTYPES[dtype] for dtype in dtypes)
        sizes = (("V_DIM", v_dim), ("WIDTH", width))
        found.append(("fold", (("A_DTYPE", a), ("B_DTYPE", b), ("OUT_DTYPE", out), *sizes)))
    for coding, sizes in each([codec for codec in CODECS.values() if not codec.lossless], CODEC):
        dtype, k_dim, v_dim, page_tokens = sizes
        codec_layout = coding.layout(Geometry(1, 1, k_dim, v_dim, dtype, page_tokens))
        assert codec_layout is not None
        found.append(("codec", codec_layout.defines))
    scoring = (("score", SCORE), ("score_bytes", SCORE_BYTES), ("score_keys", SCORE_KEYS))
    for stem, shapes in scoring:
        for dtype, k_dim, group, parts in shapes:
            sizes = (("K_DIM", k_dim), ("GROUP", group), ("PARTS", parts))
            found.append((stem, (("DTYPE", build.DTYPES[dtype]), *sizes)))
    found += [("weigh", (("GROUP", group),)) for group in GROUPS]
    found += [("append", ()), ("fault", ()), ("gather", ())]
    return [*found, ("select", (("THREADS", select.THREADS),))]


@functools.cache
def find_nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC from an installed package."""
    for folder in (Path(entry) for entry in sys.path):
        for library in sorted(folder.glob("nvidia/*/lib/libnvrtc.so.1[0-9]")):
            for builtins in library.parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    return None


@pytest.fixture
def nvrtc() -> ctypes.CDLL:
    library = find_nvrtc()
    if library is None:
        reason = "the package nvidia-cuda-nvrtc is not installed"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and CI is set")
        pytest.skip(reason)
    return library


def compile_kernel(library: ctypes.CDLL, stem: str, options: list[str]) -> str:
    """Compile to machine code; return the log, or fail with it."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = build.source(stem).encode()
    name = f"{stem}.cu".encode()
    created = library.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    assert created == 0, f"nvrtcCreateProgram returned {created}"
    encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    result = library.nvrtcCompileProgram(program, len(options), encoded)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert result == 0, log.value.decode()
    return log.value.decode()


@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("number", range(len(variants(90))))
def test_kernel_compiles_without_spills(number: int, capability: int, nvrtc: ctypes.CDLL) -> None:
    stem, defines = variants(capability)[number]
    options = [f"-arch=sm_{capability}", "--ptxas-options=-v", *build.options(defines)]
    log = compile_kernel(nvrtc, stem, options)
    used = re.search(r"Used (\d+) registers", log)
    assert used is not None, log
    assert "0 bytes spill stores" in log, log
    assert not re.search(r"[1-9]\d* bytes spill", log), log
    assert "warning" not in log, log


def test_every_source_is_compiled_here() -> None:
    sources = {file.stem for file in build.source_directory().glob("*.cu")}
    assert sources == {stem for stem, _ in variants(90)}


def test_source_names_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's key covers the source only, so a changed header must change the source."""
    for file in build.source_directory().glob("*.cu*"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(build, "source_directory", lambda: tmp_path)
    before = build.source("decode")
    (tmp_path / "ptx.cuh").write_text((tmp_path / "ptx.cuh").read_text() + "\n")
    after = build.source("decode")
    assert before != after and before.split("\n")[1:] == after.split("\n")[1:]
