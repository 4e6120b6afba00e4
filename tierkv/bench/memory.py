"""Memory of this process and machine: what is left, what was used at most, and giving it back."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import torch

from tierkv.tiers import host_memory

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def available_host_bytes() -> int:
    """Return the host memory that may still be taken."""
    room = host_memory.room()
    return 1 << 62 if room is None else room.num_bytes


def host_bytes() -> int:
    """Return the resident bytes of this process, pinned memory included."""
    return host_memory.field(_STATUS, "VmRSS") or peak_host_bytes()


def peak_host_bytes() -> int:
    """Return the most resident bytes since `reset_peaks`, or ever where it cannot be reset."""
    return (
        host_memory.field(_STATUS, "VmHWM")
        or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


def reset_peaks(device: torch.device) -> bool:
    """Start counting peaks anew; return whether the host's could be reset (Linux only)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return host_memory.field(_STATUS, "VmHWM") is not None


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the most GPU bytes allocated since `reset_peaks`; None without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def free_device_bytes(device: torch.device) -> int:
    """Return the GPU bytes that are free; without a GPU, more than anyone asks for."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 62


def total_device_bytes(device: torch.device) -> int:
    """Return the GPU's memory; without a GPU, the host's that is available."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return available_host_bytes()


def give_back() -> None:
    """Return freed memory to the system: torch keeps GPU memory, and pinned memory even more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        empty_pinned = getattr(torch._C, "_host_emptyCache", None)
        if empty_pinned is not None:
            empty_pinned()


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
