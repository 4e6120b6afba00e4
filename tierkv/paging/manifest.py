"""What the store knows of a saved context: its tokens, and by them the keys of its pages."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import zstandard

from tierkv.errors import ColdReadError, ConfigError, DiskBudgetError
from tierkv.paging.keys import Tokens, block_keys, page_key
from tierkv.tiers.cold import ColdStore

META_PREFIX = "context/"
USED_PREFIX = "used/"
VERSION = 1
_TIME = struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A saved context.

    Attributes:
        root: hexadecimal root key of the model's pages.
        model: class of the model, for people.
        held: tokens whose keys and values are stored.
        page_tokens, layers, frame_bytes: shape of its pages.
        created: seconds since 1970.
        dtype: element type of its pages, for people; empty if whoever saved it did not say.
        messages: the conversation it holds, if it is a chat: a dict with role, content and, for
            answers, tokens (of the context, up to the answer's end).
    """

    root: str
    model: str
    held: int
    page_tokens: int
    layers: int
    frame_bytes: int
    created: float
    dtype: str = ""
    messages: list[dict[str, str | int]] | None = None

    @property
    def pages(self) -> int:
        """Pages in all layers, the tail's included."""
        return -(-self.held // self.page_tokens) * self.layers

    @property
    def page_bytes(self) -> int:
        """Bytes of those pages on disk."""
        return self.pages * self.frame_bytes

    def block_keys(self, ids: Tokens) -> list[bytes]:
        """Return the key of each page position. ids: all tokens of the context."""
        return block_keys(bytes.fromhex(self.root), ids[: self.held], self.page_tokens)

    def page_keys(self, ids: Tokens) -> set[bytes]:
        """Return the keys of all its pages in the store."""
        blocks = self.block_keys(ids)
        return {page_key(block, layer) for block in blocks for layer in range(self.layers)}


def pack(manifest: Manifest, ids: Tokens) -> bytes:
    """Return a manifest and its token ids as one value."""
    header = json.dumps({"version": VERSION, **asdict(manifest)}, sort_keys=True).encode()
    packed = zstandard.ZstdCompressor().compress(ids.astype("<i8").tobytes())
    return struct.pack(">I", len(header)) + header + packed


def unpack(name: str, value: bytes) -> tuple[Manifest, Tokens]:
    """Undo `pack`; `name` is for messages.

    Raises:
        ColdReadError: it is damaged.
        ConfigError: another version wrote it.
    """
    try:
        (size,) = struct.unpack_from(">I", value)
        header = json.loads(value[4 : 4 + size])
        ids = np.frombuffer(zstandard.ZstdDecompressor().decompress(value[4 + size :]), "<i8")
    except (struct.error, ValueError, zstandard.ZstdError) as error:
        raise ColdReadError(f"what is saved as {name!r} cannot be read: {error}") from error
    if not isinstance(header, dict) or header.pop("version", None) != VERSION:
        raise ConfigError(f"what is saved as {name!r} is of another version, not {VERSION}")
    try:
        return Manifest(**header), ids
    except TypeError as error:
        raise ColdReadError(f"what is saved as {name!r} cannot be read: {error}") from error


def write(
    cold: ColdStore, name: str, manifest: Manifest, ids: Tokens, in_use: Iterable[bytes] = ()
) -> None:
    """Store a manifest and its token ids.

    One of that name is replaced, and pages that only it used are dropped.

    Args:
        in_use: keys of page positions that open contexts read from the store; never dropped.
    """
    former = read(cold, name)
    cold.meta_put(META_PREFIX + name, pack(manifest, ids))
    touch(cold, name)
    if former is not None:
        _drop_unshared(cold, *former, in_use)


def read(cold: ColdStore, name: str) -> tuple[Manifest, Tokens] | None:
    """Return a manifest and its token ids, or None if nothing is saved under the name.

    Raises:
        ColdReadError: it is damaged.
        ConfigError: another version wrote it.
    """
    value = cold.meta_get(META_PREFIX + name)
    return None if value is None else unpack(name, value)


def names(cold: ColdStore) -> list[str]:
    """Return the names of all saved contexts."""
    return [name.removeprefix(META_PREFIX) for name in cold.meta_names(META_PREFIX)]


def each(cold: ColdStore) -> Iterator[tuple[str, Manifest, Tokens]]:
    """Yield (name, manifest, token ids) of all saved contexts."""
    for name in names(cold):
        found = read(cold, name)
        if found is not None:
            yield name, *found


def find(cold: ColdStore, name: str) -> tuple[Manifest, Tokens]:
    """Return a manifest and its token ids.

    Raises:
        ConfigError: there is none of that name; names those there are.
    """
    found = read(cold, name)
    if found is None:
        known = ", ".join(names(cold)) or "none"
        raise ConfigError(f"no context {name!r} in the store; saved: {known}")
    return found


def touch(cold: ColdStore, name: str) -> None:
    """Note that a context was used now. A store without room for that keeps the old time."""
    try:
        cold.meta_put(USED_PREFIX + name, _TIME.pack(time.time()))
    except DiskBudgetError:
        return  # what is stored must stay readable on a full disk


def last_used(cold: ColdStore, name: str, manifest: Manifest) -> float:
    """Return when a context was last saved or restored, in seconds since 1970."""
    value = cold.meta_get(USED_PREFIX + name)
    return manifest.created if value is None else float(_TIME.unpack(value)[0])


def forget(cold: ColdStore, name: str, in_use: Iterable[bytes] = ()) -> int:
    """Delete a saved context and the pages that no other one shares; return how many pages.

    Args:
        in_use: keys of page positions that open contexts read from the store; never dropped.

    Raises:
        ConfigError: there is none of that name; names those there are.
    """
    found = find(cold, name)
    cold.meta_delete(META_PREFIX + name)
    cold.meta_delete(USED_PREFIX + name)
    return _drop_unshared(cold, *found, in_use)


def _drop_unshared(
    cold: ColdStore, manifest: Manifest, ids: Tokens, in_use: Iterable[bytes]
) -> int:
    """Drop the pages of a manifest that is gone, but those that others name or read."""
    keys = manifest.page_keys(ids)
    keys -= {page_key(block, layer) for block in in_use for layer in range(manifest.layers)}
    for _, other, other_ids in each(cold):
        if other.root == manifest.root:
            keys -= other.page_keys(other_ids)
    return cold.drop(sorted(keys))
