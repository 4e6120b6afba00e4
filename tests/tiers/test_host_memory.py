"""What is left of host memory, and the errors that say so before anything is pinned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierkv.errors import WarmBudgetError
from tierkv.page import Geometry
from tierkv.tiers import host_memory, warm
from tierkv.tiers.host_memory import Room
from tierkv.tiers.warm import WarmTier

GEOMETRY = Geometry(1, 2, 64, 64, torch.float16)
MEMINFO = "MemTotal:       4096 kB\nMemFree:  1 kB\nMemAvailable:   2048 kB\n"


def group(root: Path, limit: str, current: int, *, files: int, version: int = 2) -> None:
    root.mkdir(exist_ok=True)
    names = ("memory.max", "memory.current", "")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    (root / names[0]).write_text(f"{limit}\n")
    (root / names[1]).write_text(f"{current}\n")
    half = files // 2
    (root / "memory.stat").write_text(
        f"anon 12\n{names[2]}active_file {half}\n{names[2]}inactive_file {files - half}\n"
    )


def test_control_group_limits(tmp_path: Path) -> None:
    limit = host_memory.cgroup_limit_bytes
    assert limit(tmp_path) is None
    group(tmp_path / "memory", str(2**63 - 4096), 0, files=0, version=1)
    assert limit(tmp_path) is None
    group(tmp_path / "memory", "4096", 0, files=0, version=1)
    assert limit(tmp_path) == 4096
    group(tmp_path, "max", 0, files=0)
    assert limit(tmp_path) == 4096
    group(tmp_path, "1024", 0, files=0)
    assert limit(tmp_path) == 1024


@pytest.mark.parametrize("version", [1, 2])
def test_room_is_the_tighter_of_both(tmp_path: Path, version: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    place = tmp_path / "cgroup"
    assert host_memory.room(place, meminfo) == (2 << 20, "2 MiB of memory are available")
    place.mkdir()
    own = place / "memory" if version == 1 else place
    group(own, str(1 << 20), 700 << 10, files=300 << 10, version=version)
    left = host_memory.room(place, meminfo)
    assert left is not None and left.num_bytes == 624 << 10  # the page cache gives way
    assert "control group's limit is 1 MiB" in left.limit
    most = host_memory.total(place, meminfo)
    assert most is not None and most.num_bytes == 1 << 20


def test_unknown_memory_is_no_limit(tmp_path: Path) -> None:
    assert host_memory.room(tmp_path / "none", tmp_path / "none") is None
    assert host_memory.total(tmp_path / "none", tmp_path / "none") is None


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "total", lambda: Room(1 << 20, "the machine has 1 MiB"))
    frames = 2 * (1 << 20) // GEOMETRY.frame_bytes
    with pytest.raises(WarmBudgetError, match=r"machine has 1 MiB; lower cpu_budget"):
        WarmTier(GEOMETRY.frame_bytes, frames, 0, 0, pinned=True)
    WarmTier(GEOMETRY.frame_bytes, frames, 0, 0, pinned=False).close()


def test_pages_stop_before_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = WarmTier(GEOMETRY.frame_bytes, 8, 0, 0, pinned=False)
    taken = tier.homes.take(1)
    short = Room(warm.FREE_FLOOR_BYTES + 100, "100 bytes are left")
    monkeypatch.setattr(host_memory, "room", lambda: short)
    with pytest.raises(WarmBudgetError, match=r"100 bytes are left.*lower cpu_budget"):
        tier.span(taken)
    assert tier.taken_bytes == 0
    monkeypatch.undo()
    assert tier.span(taken).shape == (1, tier.frame_bytes)  # there is room again
    tier.close()
