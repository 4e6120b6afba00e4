"""Saved contexts made of random pages, without a model: what store tools are tested on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.tiers.cold_helpers import FRAME, open_store, page
from tierkv.paging import manifest
from tierkv.paging.keys import Tokens
from tierkv.paging.manifest import Manifest
from tierkv.tiers.cold import ColdStore

ROOT_KEY = "ab" * 32
PAGE_TOKENS, LAYERS = 16, 2


def tokens(count: int, *, changed: int | None = None) -> Tokens:
    """0, 1, 2 ...; from `changed` on, others."""
    ids = np.arange(count, dtype=np.int64)
    if changed is not None:
        ids[changed:] += 1000
    return ids


def kept(ids: Tokens, *, root: str = ROOT_KEY, frame_bytes: int = FRAME) -> Manifest:
    return Manifest(
        root=root, model="TestModel", held=len(ids), page_tokens=PAGE_TOKENS, layers=LAYERS,
        frame_bytes=frame_bytes, created=1000.0, dtype="float32",
    )  # fmt: skip


def save(cold: ColdStore, name: str, ids: Tokens) -> None:
    """Store the pages of a context, each a function of its key, and its manifest."""
    one = kept(ids, frame_bytes=cold.frame_bytes)
    keys = [key for key in sorted(one.page_keys(ids)) if key not in cold]
    cold.put(keys, [page(key, frame_bytes=cold.frame_bytes) for key in keys])
    manifest.write(cold, name, one, ids)


def contents(directory: Path) -> tuple[list[bytes], list[str]]:
    """Keys and metadata names of a closed store."""
    with open_store(directory) as cold:
        return list(cold.keys()), cold.meta_names()
