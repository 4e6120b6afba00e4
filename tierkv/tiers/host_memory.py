"""How much host memory may still be taken: what is free, and what the control group allows.

RLIMIT_MEMLOCK is not checked here: whether it applies is up to the driver that pins. When pinning
fails, the error names it.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NamedTuple

from tierkv.units import format_bytes

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


class Room(NamedTuple):
    """Host memory that can be taken before something gives.

    Attributes:
        num_bytes: how much; negative when more is in use than allowed.
        limit: what sets it, for a message.
    """

    num_bytes: int
    limit: str


def room(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> Room | None:
    """Return the tighter of free memory and what the control group leaves; None if unknown."""
    rooms = []
    available = field(meminfo, "MemAvailable")
    if available is not None:
        rooms.append(Room(available, f"{format_bytes(max(available, 0))} of memory are available"))
    for group in _groups(cgroup):
        limit, used = _limit(group), _used(group)
        if limit is not None and used is not None:
            text = (
                f"the control group's limit is {format_bytes(limit)}, "
                f"{format_bytes(used)} of it are in use"
            )
            rooms.append(Room(limit - used, text))
    return min(rooms, default=None)


def total(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> Room | None:
    """Return all the memory there could ever be for this process; None if unknown."""
    rooms = []
    installed = field(meminfo, "MemTotal")
    if installed is not None:
        rooms.append(Room(installed, f"the machine has {format_bytes(installed)}"))
    limit = cgroup_limit_bytes(cgroup)
    if limit is not None:
        rooms.append(Room(limit, f"the control group's limit is {format_bytes(limit)}"))
    return min(rooms, default=None)


def cgroup_limit_bytes(root: Path = CGROUP) -> int | None:
    """Return the tightest memory limit of this process's control groups, or None."""
    limits = [limit for group in _groups(root) if (limit := _limit(group)) is not None]
    return min(limits, default=None)


def memlock_text() -> str:
    """Return the limit on locked memory in words."""
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "none" if memlock == resource.RLIM_INFINITY else format_bytes(memlock)


def field(file: Path, name: str) -> int | None:
    """Return a ``Name:  123 kB`` line of a /proc file in bytes."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> list[Path]:
    """Return the directories of this process's control groups, of version 2 and of 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    parents = [parent for parent in (root / own).parents if root in parent.parents]
    return [root, root / own, *parents, root / "memory"]


def _limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _number(group / name)
        if limit is not None and limit < 1 << 60:  # version 1 says "none" with about 2**63
            return limit
    return None


def _used(group: Path) -> int | None:
    """Return the bytes a group uses, without the page cache of files, which gives way."""
    for name, prefix in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        used = _number(group / name)
        if used is None:
            continue
        try:
            rows = (group / "memory.stat").read_text().split("\n")
        except OSError:
            return used
        stat = dict(row.split() for row in rows if row.count(" ") == 1)
        files = (f"{prefix}active_file", f"{prefix}inactive_file")
        return used - sum(int(stat.get(file, 0)) for file in files)
    return None


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
