"""``tierkv doctor``: what this machine and installation can do, and what is broken.

Each check gives one row: ok, warn (works, but worse than it could) or fail (must be mended).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tierkv.tiers.direct_io import probe_direct_io
from tierkv.tiers.host_memory import cgroup_limit_bytes, memlock_text, room, total
from tierkv.tiers.read_queue import ReadQueue
from tierkv.units import format_bytes

PYTHON = (3, 11)
NEEDED = {
    "torch": ((2, 9), None),
    "transformers": ((5, 15), (6, 0)),
    "lmdb": (None, None),
    "zstandard": (None, None),
    "xxhash": (None, None),
    "numpy": (None, None),
}
"""Package -> (oldest version that works, first version that does not)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One finding: `status` is ``ok``, ``warn`` or ``fail``; `detail` says what and why."""

    name: str
    status: str
    detail: str


def doctor(store: str | None, *, as_json: bool) -> int:
    """Print all findings; return 1 if any of them failed, else 0."""
    rows = examine(store)
    code = int(any(row.status == "fail" for row in rows))
    if as_json:
        print(json.dumps({"ok": not code, "checks": [asdict(row) for row in rows]}))
        return code
    width = max(len(row.name) for row in rows)
    for row in rows:
        print(f"{row.status:<4}  {row.name:<{width}}  {row.detail}")
    return code


def examine(store: str | None = None) -> list[Row]:
    """Run all checks. `store` is the directory of the cold tier, or None for the current one.

    Nothing is left behind on disk, and no check raises.
    """
    rows = [python(), *(package(name) for name in NEEDED)]
    checks: list[Callable[[], Row]] = [gpu, cupy, pinned_memory, free_memory]
    rows += [check() for check in checks]
    rows += disk(Path(store).expanduser() if store else Path.cwd())
    return rows


def python() -> Row:
    """Check the interpreter's version."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < PYTHON:
        return Row("python", "fail", f"{found}; {PYTHON[0]}.{PYTHON[1]} or newer is needed")
    return Row("python", "ok", found)


def package(name: str) -> Row:
    """Check that a needed package can be imported and has a version that works."""
    try:
        importlib.import_module(name)
        version = importlib.metadata.version(name)
    except Exception as error:  # whatever a broken package raises while it is imported
        return Row(name, "fail", f"cannot be imported: {type(error).__name__}: {error}")
    low, high = NEEDED[name]
    number = _release(version)
    if low and number < low:
        return Row(name, "fail", f"{version}; {_dotted(low)} or newer is needed")
    if high and number >= high:
        return Row(name, "fail", f"{version}; a version below {_dotted(high)} is needed")
    return Row(name, "ok", version)


def gpu() -> Row:
    """Check the GPU with a small allocation, or say why there is none."""
    driver = _driver()
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            reason = f"torch {torch.__version__} is built without CUDA"
        elif driver is None:
            reason = "no NVIDIA driver on this machine"
        else:
            reason = f"torch (CUDA {torch.version.cuda}) sees no GPU"
        if driver is None:
            return Row("gpu", "ok", f"none: {reason}; the CPU is used")
        return Row("gpu", "warn", f"NVIDIA driver {driver} is here, but {reason}; the CPU is used")
    try:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        total = torch.cuda.get_device_properties(0).total_memory
        torch.ones(1, device="cuda").sum().item()
    except RuntimeError as error:
        return Row("gpu", "fail", f"a GPU is visible but cannot be used: {error}")
    return Row(
        "gpu",
        "ok",
        f"{', '.join(names)}, {format_bytes(total)}; driver {driver or 'unknown'}, "
        f"torch's CUDA {torch.version.cuda}",
    )


def cupy() -> Row:
    """Say whether CuPy is here. Nothing needs it yet."""
    if importlib.util.find_spec("cupy") is None:
        return Row("cupy", "ok", "not installed, and not needed")
    if not torch.cuda.is_available():
        return Row("cupy", "ok", "installed, not needed without a GPU")
    try:
        version = importlib.import_module("cupy").__version__
    except Exception as error:  # whatever a broken package raises while it is imported
        return Row("cupy", "warn", f"cannot be imported: {type(error).__name__}: {error}")
    return Row("cupy", "ok", f"{version}")


def pinned_memory() -> Row:
    """Check what limits pinned host memory; with a GPU, pin a little."""
    limit = cgroup_limit_bytes()
    text = (
        f"memlock limit {memlock_text()}, "
        f"control-group limit {'none' if limit is None else format_bytes(limit)}"
    )
    if not torch.cuda.is_available():
        return Row("pinned memory", "ok", f"{text}; not used without a GPU")
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Row("pinned memory", "fail", f"{text}; pinning 1 MiB failed: {error}")
    return Row("pinned memory", "ok", f"{text}; pinned 1 MiB")


def free_memory() -> Row:
    """Report the memory that cpu_budget can be taken from."""
    free, most = room(), total()
    if free is None or most is None:
        return Row("free memory", "warn", "unknown: no /proc/meminfo")
    return Row(
        "free memory", "ok", f"{format_bytes(free.num_bytes)} of {format_bytes(most.num_bytes)}"
    )


def disk(directory: Path) -> Iterator[Row]:
    """Check the place of the cold tier: writable, free space, O_DIRECT."""
    place = directory.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    where = f"{directory}" if place == directory.absolute() else f"{directory} (in {place})"
    try:
        scratch = tempfile.mkdtemp(prefix=".tierkv-doctor-", dir=place)
    except OSError as error:
        yield Row("disk", "fail", f"{where}: cannot be written: {error.strerror}")
        return
    try:
        usage = shutil.disk_usage(place)
        free = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free"
        yield Row("disk", "ok", f"{where}: {free}")
        probe = probe_direct_io(Path(scratch))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if probe.works:
        yield Row("o_direct", "ok", probe.reason)
        yield _read_queue()
    else:
        reason = probe.reason.replace(scratch, str(place))
        yield Row("o_direct", "warn", f"{reason}; reads go through the page cache")


def _read_queue() -> Row:
    """Say whether scattered pages can be read together."""
    try:
        ReadQueue().close()
    except OSError as error:
        return Row("read_queue", "warn", f"{error}; scattered pages are read one by one")
    return Row("read_queue", "ok", "scattered pages are read together")


def _driver() -> str | None:
    """Return the NVIDIA driver's version, or None if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: ``2.13.0+cpu`` is (2, 13, 0)."""
    parts = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
