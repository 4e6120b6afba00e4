"""``tierkv store``: what a store holds, whether it is whole, and what to keep of it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierkv.config import Config
from tierkv.errors import ConfigError
from tierkv.paging import archive, inventory, manifest
from tierkv.paging.collect import collect
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.extents import FILE_BYTES, frame_sizes
from tierkv.units import format_bytes, parse_age, parse_bytes

NO_PAGE = FILE_BYTES // 4
"""A frame size that no page has: for tools that read and drop pages of every size."""
ANY_SIZE = 1 << 40
"""Disk budget of tools that add no page: it sizes the catalogue's address space."""
SHOWN_IDS = 8
"""Token ids shown of a context's beginning and end."""
SHOWN_TEXT = 70


def store(args: argparse.Namespace) -> int:
    """Run ``tierkv store ls|inspect|verify|gc|rm|export|import`` and return its exit code.

    Raises:
        ConfigError: no store is given or there is none, or a name is unknown.
        StoreError: the store is in use elsewhere, or damaged.
    """
    action = {"ls": _list, "inspect": _inspect, "verify": _verify, "gc": _gc, "rm": _remove,
              "export": _export, "import": _import}[args.action]  # fmt: skip
    return action(args)


def store_directory(args: argparse.Namespace, *, create: bool = False) -> str:
    """Return the directory that flags or the environment name.

    Raises:
        ConfigError: none is given, or there is no store in it (`create` allows that).
    """
    directory: str | None = args.store or os.environ.get("TIERKV_STORE")
    if not directory:
        raise ConfigError("no store given: --store DIR or TIERKV_STORE")
    if not create and not (Path(directory) / "catalogue").is_dir():
        raise ConfigError(f"there is no store in {directory}")
    return directory


@contextmanager
def opened(
    args: argparse.Namespace, frame_bytes: int = NO_PAGE, **limits: Any
) -> Iterator[ColdStore]:
    """Open the store; without limits nothing is written but names and times."""
    directory = store_directory(args, create=bool(limits))
    limits = limits or {"disk_budget": ANY_SIZE, "free_floor": 0}
    with ColdStore(directory, frame_bytes=frame_bytes, **limits) as cold:
        yield cold


def _list(args: argparse.Namespace) -> int:
    with opened(args) as cold:
        rows: list[dict[str, Any]] = [
            {"name": name, "tokens": len(ids), "bytes": kept.page_bytes, "model": kept.model,
             "created": kept.created, "last_used": manifest.last_used(cold, name, kept)}
            for name, kept, ids in manifest.each(cold)
        ]  # fmt: skip
        totals = {"pages": len(cold), "used_bytes": cold.used_bytes,
                  "written_today_bytes": cold.writes.today}  # fmt: skip
    if args.json:
        print(json.dumps({"contexts": rows, **totals}))
        return 0
    for row in rows:
        size, when = format_bytes(row["bytes"]), _when(row["created"])
        print(f"{row['name']:<24} {row['tokens']:>9,} tokens {size:>10}  {when}  {row['model']}")
    print(f"{len(rows)} contexts, {totals['pages']:,} pages, "
          f"{format_bytes(totals['used_bytes'])} on disk, "
          f"{format_bytes(totals['written_today_bytes'])} written today")  # fmt: skip
    return 0


def _inspect(args: argparse.Namespace) -> int:
    with opened(args) as cold:
        kept, ids = manifest.find(cold, args.name)
        keys = kept.page_keys(ids)
        report: dict[str, Any] = {
            "name": args.name, "tokens": len(ids), "held_tokens": kept.held, "pages": kept.pages,
            "bytes": kept.page_bytes,
            "shared_pages": len(keys & inventory.named(cold, but=args.name)),
            "missing_pages": inventory.incomplete(cold).get(args.name, 0),
            "model": kept.model, "dtype": kept.dtype or "unknown",
            "page_tokens": kept.page_tokens, "layers": kept.layers,
            "frame_bytes": kept.frame_bytes, "root_key": kept.root, "created": kept.created,
            "last_used": manifest.last_used(cold, args.name, kept),
            "messages": len(kept.messages or []),
        }  # fmt: skip
    if args.model is None:
        report |= {"first_ids": ids[:SHOWN_IDS].tolist(), "last_ids": ids[-SHOWN_IDS:].tolist()}
    else:
        from tierkv.hf.loading import load_tokenizer  # transformers, only when needed

        text = load_tokenizer(args.model).decode(ids)
        report |= {"first_text": text[:SHOWN_TEXT], "last_text": text[-SHOWN_TEXT:]}
    if args.json:
        print(json.dumps(report))
        return 0
    for key, value in report.items():
        if key in ("created", "last_used"):
            value = _when(value)
        elif key.endswith("bytes"):
            value = format_bytes(value)
        elif key.endswith("text"):
            value = repr(value)
        elif isinstance(value, int):
            value = f"{value:,}"
        print(f"{key.replace('_', ' '):<14} {value}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    with opened(args) as cold:
        report, bad_names = cold.verify(), dict(cold.meta_verify())
        bad_pages = dict(report.bad)
        lacking = inventory.incomplete(cold, bad_pages, bad_names)
        if args.repair:
            cold.drop(list(bad_pages))
            for name in bad_names:
                cold.meta_delete(name)
    if args.json:
        print(json.dumps({
            "whole": report.whole,
            "bad": [{"key": key.hex(), "reason": why} for key, why in report.bad],
            "bad_metadata": [{"name": name, "reason": why} for name, why in bad_names.items()],
            "incomplete": lacking, "repaired": args.repair,
        }))  # fmt: skip
    else:
        for what, why in [*((key.hex(), why) for key, why in report.bad), *bad_names.items()]:
            print(f"{'dropped' if args.repair else 'bad'}: {what}: {why}")
        for name, pages in lacking.items():
            print(f"incomplete: context {name!r} lacks {pages:,} pages and cannot be resumed; "
                  f"save it anew, or delete it: tierkv store rm")  # fmt: skip
        print(f"{report.whole:,} pages are whole, {len(report.bad)} are bad"
              + (f", {len(bad_names)} metadata values are bad" if bad_names else ""))  # fmt: skip
    damage = bool(bad_pages or bad_names)
    return 1 if lacking or (damage and not args.repair) else 0


def _gc(args: argparse.Namespace) -> int:
    limit = None if args.max_bytes is None else parse_bytes(args.max_bytes, knob="--max-bytes")
    age = None if args.older_than is None else parse_age(args.older_than, knob="--older-than")
    with opened(args) as cold:
        done = collect(cold, now=time.time(), max_bytes=limit, older_than=age,
                       include_saved=args.include_saved)  # fmt: skip
    moved = 0
    if args.compact:
        for size in frame_sizes(Path(store_directory(args)) / "extents"):
            with opened(args, size) as cold:
                moved += cold.compact()
        with opened(args) as cold:
            done.file_bytes = done.file_bytes[0], cold.used_bytes
    over = 0 if limit is None else max(0, done.stored_bytes[1] - limit)
    if args.json:
        print(json.dumps({
            "unnamed_pages": done.unnamed_pages, "evicted": done.evicted, "spared": done.spared,
            "stored_bytes": done.stored_bytes[1],
            "dropped_bytes": done.stored_bytes[0] - done.stored_bytes[1],
            "file_bytes": done.file_bytes[1],
            "freed_bytes": done.file_bytes[0] - done.file_bytes[1],
            "over_bytes": over, "moved_pages": moved,
        }))  # fmt: skip
        return 1 if over else 0
    print(f"dropped {done.unnamed_pages:,} pages that no context names")
    for name, pages in done.evicted.items():
        print(f"evicted context {name!r}: {pages:,} pages")
    if args.compact:
        print(f"moved {moved:,} pages to the front of their files")
    stored, files = map(format_bytes, (done.stored_bytes[1], done.file_bytes[1]))
    freed = format_bytes(done.file_bytes[0] - done.file_bytes[1])
    print(f"pages take {stored} now, files {files}; {freed} were given back to the file system")
    if done.spared:
        print(f"saved contexts are kept without --include-saved: {', '.join(done.spared)}")
    if over:
        print(f"{format_bytes(over)} more than --max-bytes {format_bytes(limit or 0)} are left")
    return 1 if over else 0


def _remove(args: argparse.Namespace) -> int:
    with opened(args) as cold:
        dropped = manifest.forget(cold, args.name)
    print(f"{args.name}: deleted, {dropped} pages that no other context shares")
    return 0


def _export(args: argparse.Namespace) -> int:
    with opened(args) as cold:
        kept, _ = manifest.find(cold, args.name)
    with opened(args, kept.frame_bytes) as cold:
        size = archive.export_context(cold, args.name, Path(args.file), force=args.force)
    print(f"{args.name}: {kept.pages:,} pages in {args.file}, {format_bytes(size)}")
    return 0


def _import(args: argparse.Namespace) -> int:
    name, kept, ids = archive.read_head(Path(args.file))
    name = args.name or name
    budget = parse_bytes(args.disk_budget, knob="--disk-budget")
    with opened(args, kept.frame_bytes, disk_budget=budget, free_floor=Config().disk_floor) as cold:
        new = archive.import_context(cold, Path(args.file), name=name, force=args.force)
    print(f"{name}: {len(ids):,} tokens, {kept.pages:,} pages, {new:,} of them new")
    return 0


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
