"""The only door to CuPy: compile what is in ``cuda/`` at run time, launch it on torch's stream.

A kernel is compiled once per process, device and set of constants, and CuPy keeps the binary on
disk for the next process. CuPy's key covers the source and the options but not the headers, so a
hash of every header goes into the source.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierkv.errors import KernelsUnavailableError

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Element types a kernel may be compiled for, as the macro DTYPE; see ``cuda/ptx.cuh``."""

OLDEST_CAPABILITY = (8, 0)
"""Ampere: asynchronous copies and bf16 tensor cores."""

REGISTERS = 65536
"""32-bit registers of a multiprocessor, on every capability since 5.0."""

BLOCK_RESERVE = 1024
"""Bytes of shared memory the system takes for each block."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether kernels can run; true if they can. `reason` says why not, or is empty."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


@functools.cache
def available() -> Availability:
    """Say whether CuPy and a GPU it can compile for are here. Asked once per process."""
    if not torch.cuda.is_available():
        return Availability(f"torch {torch.__version__} sees no GPU")
    capability = torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (capability, OLDEST_CAPABILITY))
        return Availability(f"the GPU has compute capability {have}, {need} is needed")
    try:
        import cupy

        cupy.cuda.nvrtc.getVersion()
        cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return Availability(f"CuPy is missing ({error}); install the extra 'gpu' or 'gpu13'")
    except Exception as error:  # CuPy has a class of its own for each library that fails
        return Availability(f"CuPy does not work here: {type(error).__name__}: {error}")
    try:
        source_directory()
    except KernelsUnavailableError as error:
        return Availability(str(error))
    return Availability()


def source_directory() -> Path:
    """Return where the CUDA sources are: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "cuda", package.parent / "cuda")
    for place in places:
        if (place / "ptx.cuh").is_file():
            return place
    raise KernelsUnavailableError(f"no CUDA sources in {' or '.join(map(str, places))}")


def source(stem: str) -> str:
    """Return ``cuda/<stem>.cu`` behind a comment with the hash of every header."""
    directory = source_directory()
    headers = hashlib.sha256()
    for header in sorted(directory.glob("*.cuh")):
        headers.update(header.name.encode() + b"\0" + header.read_bytes())
    text = (directory / f"{stem}.cu").read_text()
    return f"// headers {headers.hexdigest()}\n{text}"


def options(defines: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Return compiler options, the same for NVRTC and nvcc."""
    macros = (f"-D{name}={value}" for name, value in defines)
    return ("-std=c++17", f"-I{source_directory()}", *macros)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled function on one device.

    Attributes:
        blocks_at_once: blocks that the whole device runs at the same time.
    """

    function: Any
    device: torch.device
    threads: int
    shared_bytes: int
    blocks_at_once: int

    def launch(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        """Enqueue on torch's current stream. Arguments are numpy scalars of the right width."""
        index = self.device.index
        if torch.cuda.current_device() != index:  # entering a device costs more than a launch
            with torch.cuda.device(self.device):
                return self.launch(grid, arguments)
        stream = _stream(torch._C._cuda_getCurrentRawStream(index))
        self.function(
            grid, (self.threads, 1, 1), arguments, shared_mem=self.shared_bytes, stream=stream
        )
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Checked arguments of one launch. `run` may be repeated while the tensors stay in place.

    Attributes:
        held: the tensors whose bare addresses are among the arguments.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    held: tuple[torch.Tensor | None, ...]

    def run(self) -> None:
        """Enqueue on torch's current stream. Run once before capturing it in a CUDA graph."""
        if all(self.grid):
            self.kernel.launch(self.grid, self.arguments)


@functools.cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Return the largest shared memory of a block, and that of a multiprocessor, in bytes."""
    _require(device)
    import cupy

    attributes = cupy.cuda.Device(device.index).attributes
    return (
        attributes["MaxSharedMemoryPerBlockOptin"],
        attributes["MaxSharedMemoryPerMultiprocessor"],
    )


@functools.cache
def kernel(
    stem: str,
    name: str,
    defines: tuple[tuple[str, int], ...],
    device: torch.device,
    threads: int,
    shared_bytes: int = 0,
) -> Kernel:
    """Compile and load function `name` of ``cuda/<stem>.cu``; seconds if CuPy has not seen it.

    Args:
        device: a CUDA device with its index.
        shared_bytes: dynamic shared memory of a block.

    Raises:
        KernelsUnavailableError: says what is missing.
    """
    _require(device)
    import cupy

    with torch.cuda.device(device):
        module = cupy.RawModule(code=source(stem), options=options(defines))
        function = module.get_function(name)
        if shared_bytes:
            # CuPy hands out one function for all sizes: allow each of them.
            most = shared_memory(device)[0] - function.shared_size_bytes
            function.max_dynamic_shared_size_bytes = most
            function.preferred_shared_memory_carveout = 100  # percent: L1 is of no use here
        registers = -(-function.num_regs // 8) * 8 * threads
        held = shared_bytes + function.shared_size_bytes + BLOCK_RESERVE
    properties = torch.cuda.get_device_properties(device)
    per_processor = min(
        REGISTERS // registers,
        properties.shared_memory_per_multiprocessor // held,
        properties.max_threads_per_multi_processor // threads,
    )
    blocks = properties.multi_processor_count * max(1, per_processor)
    return Kernel(function, device, threads, shared_bytes, blocks)


def _require(device: torch.device) -> None:
    if device.type != "cuda" or device.index is None:
        raise ValueError(f"kernels run on a CUDA device with an index, not on {device}")
    usable = available()
    if not usable:
        raise KernelsUnavailableError(usable.reason)


class _Pointer:
    """A CUDA stream by address, in the CUDA stream protocol."""

    def __init__(self, address: int):
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@functools.lru_cache(maxsize=256)
def _stream(address: int) -> Any:
    """Return CuPy's view of a stream that torch owns."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Pointer(address))
    return cupy.cuda.ExternalStream(address)
