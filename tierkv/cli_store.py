"""``tierkv store``: what a store holds, whether it is whole, and deleting saved contexts."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from tierkv.config import Config
from tierkv.errors import ConfigError
from tierkv.page import SECTOR
from tierkv.paging import manifest
from tierkv.tiers.cold import ColdStore
from tierkv.units import format_bytes


def store(args: argparse.Namespace) -> int:
    """Run ``tierkv store ls|rm|verify`` and return its exit code.

    Raises:
        ConfigError: no store is given or there is none, or a name is unknown.
        StoreError: the store is in use elsewhere, or damaged.
    """
    directory = args.store or os.environ.get("TIERKV_STORE")
    if not directory:
        raise ConfigError("no store given: --store DIR or TIERKV_STORE")
    if not (Path(directory) / "catalogue").is_dir():
        raise ConfigError(f"there is no store in {directory}")
    budget = Config().disk_budget  # only sizes the catalogue's address space: no page is written
    with ColdStore(directory, frame_bytes=SECTOR, disk_budget=budget, free_floor=0) as cold:
        if args.action == "rm":
            dropped = manifest.forget(cold, args.name)
            print(f"{args.name}: deleted, {dropped} pages that no other context shares")
            return 0
        return _list(cold, args.json) if args.action == "ls" else _verify(cold, args.json)


def _list(cold: ColdStore, as_json: bool) -> int:
    rows: list[dict[str, Any]] = []
    for name in manifest.names(cold):
        found = manifest.read(cold, name)
        assert found is not None
        saved, ids = found
        pages = -(-saved.held // saved.page_tokens) * saved.layers
        rows.append(
            {"name": name, "tokens": len(ids), "bytes": pages * saved.frame_bytes,
             "model": saved.model, "created": saved.created}
        )  # fmt: skip
    if as_json:
        print(json.dumps({"contexts": rows, "pages": len(cold), "used_bytes": cold.used_bytes}))
        return 0
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"]))
        size = format_bytes(row["bytes"])
        print(f"{row['name']:<24} {row['tokens']:>9,} tokens {size:>10}  {when}  {row['model']}")
    print(f"{len(rows)} contexts, {len(cold):,} pages, {format_bytes(cold.used_bytes)} on disk")
    return 0


def _verify(cold: ColdStore, as_json: bool) -> int:
    report = cold.verify()
    if as_json:
        bad = [{"key": key.hex(), "reason": reason} for key, reason in report.bad]
        print(json.dumps({"whole": report.whole, "bad": bad}))
    else:
        for key, reason in report.bad:
            print(f"bad: {key.hex()}: {reason}")
        print(f"{report.whole:,} pages are whole, {len(report.bad)} are bad")
    return 1 if report.bad else 0
