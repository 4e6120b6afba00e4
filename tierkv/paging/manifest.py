"""What the store knows of a saved context: its tokens, and by them the keys of its pages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import zstandard

from tierkv.errors import ColdReadError, ConfigError
from tierkv.paging.keys import Tokens, block_keys, page_key
from tierkv.tiers.cold import ColdStore

META_PREFIX = "context/"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """A saved context.

    Attributes:
        root: hexadecimal root key of the model's pages.
        model: class of the model, for people.
        held: tokens whose keys and values are stored.
        page_tokens, layers, frame_bytes: shape of its pages.
        created: seconds since 1970.
    """

    root: str
    model: str
    held: int
    page_tokens: int
    layers: int
    frame_bytes: int
    created: float

    def block_keys(self, ids: Tokens) -> list[bytes]:
        """Return the key of each page position. ids: all tokens of the context."""
        return block_keys(bytes.fromhex(self.root), ids[: self.held], self.page_tokens)

    def page_keys(self, ids: Tokens) -> set[bytes]:
        """Return the keys of all its pages in the store."""
        blocks = self.block_keys(ids)
        return {page_key(block, layer) for block in blocks for layer in range(self.layers)}


def write(
    cold: ColdStore, name: str, manifest: Manifest, ids: Tokens, in_use: Iterable[bytes] = ()
) -> None:
    """Store a manifest and its token ids.

    One of that name is replaced, and pages that only it used are dropped.

    Args:
        in_use: keys of page positions that open contexts read from the store; never dropped.
    """
    former = read(cold, name)
    header = json.dumps({"version": VERSION, **asdict(manifest)}, sort_keys=True).encode()
    packed = zstandard.ZstdCompressor().compress(ids.astype("<i8").tobytes())
    cold.meta_put(META_PREFIX + name, struct.pack(">I", len(header)) + header + packed)
    if former is not None:
        _drop_unshared(cold, *former, in_use)


def read(cold: ColdStore, name: str) -> tuple[Manifest, Tokens] | None:
    """Return a manifest and its token ids, or None if nothing is saved under the name.

    Raises:
        ColdReadError: it is damaged.
        ConfigError: another version wrote it.
    """
    value = cold.meta_get(META_PREFIX + name)
    if value is None:
        return None
    try:
        (size,) = struct.unpack_from(">I", value)
        header = json.loads(value[4 : 4 + size])
        ids = np.frombuffer(zstandard.ZstdDecompressor().decompress(value[4 + size :]), "<i8")
    except (struct.error, ValueError, zstandard.ZstdError) as error:
        raise ColdReadError(f"what is saved as {name!r} cannot be read: {error}") from error
    if header.pop("version", None) != VERSION:
        raise ConfigError(f"what is saved as {name!r} is of another version, not {VERSION}")
    return Manifest(**header), ids


def names(cold: ColdStore) -> list[str]:
    """Return the names of all saved contexts."""
    return [name.removeprefix(META_PREFIX) for name in cold.meta_names(META_PREFIX)]


def forget(cold: ColdStore, name: str, in_use: Iterable[bytes] = ()) -> int:
    """Delete a saved context and the pages that no other one shares; return how many pages.

    Args:
        in_use: keys of page positions that open contexts read from the store; never dropped.

    Raises:
        ConfigError: there is none of that name; names those there are.
    """
    found = read(cold, name)
    if found is None:
        raise ConfigError(f"no context {name!r} in the store; saved: {', '.join(names(cold))}")
    cold.meta_delete(META_PREFIX + name)
    return _drop_unshared(cold, *found, in_use)


def _drop_unshared(
    cold: ColdStore, manifest: Manifest, ids: Tokens, in_use: Iterable[bytes]
) -> int:
    """Drop the pages of a manifest that is gone, but those that others name or read."""
    keys = manifest.page_keys(ids)
    keys -= {page_key(block, layer) for block in in_use for layer in range(manifest.layers)}
    for name in names(cold):
        found = read(cold, name)
        if found is not None and found[0].root == manifest.root:
            keys -= found[0].page_keys(found[1])
    return cold.drop(sorted(keys))
