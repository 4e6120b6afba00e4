"""A saved context as one file, and back.

Chunks (see `tierkv.tiers.chunks`): ``NAME``, ``MANI`` (manifest and tokens as the store keeps
them), then one ``PAGE`` for each page, in the order of keys: the key, and the frame under zstd. A
page that a packed store keeps in two slots is followed by a ``REST`` with the other one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import zstandard

from tierkv.errors import ArchiveError, ConfigError, TierKVError
from tierkv.paging import inventory, manifest
from tierkv.paging.keys import Tokens
from tierkv.paging.manifest import Manifest
from tierkv.tiers.chunks import ChunkWriter, read_chunks
from tierkv.tiers.cold import REST, ColdStore
from tierkv.tiers.direct_io import aligned_buffer

_PAGE, _REST = b"PAGE", b"REST"
BATCH_BYTES = 8 << 20
"""Bytes of pages read or written at once."""


def export_context(cold: ColdStore, name: str, path: Path, *, force: bool = False) -> int:
    """Write a saved context to a file, which appears whole or not at all; return its bytes.

    cold: opened with the frame size of the context's pages.

    Raises:
        ConfigError: there is no such context, the file exists (`force` replaces it), or it cannot
            be written.
        ColdReadError: a page is missing or damaged.
    """
    kept, ids = manifest.find(cold, name)
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; --force replaces it")
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("xb") as file:
            chunks = ChunkWriter(file)
            chunks.add(b"NAME", name.encode())
            chunks.add(b"MANI", manifest.pack(kept, ids))
            compressor = zstandard.ZstdCompressor()
            for key, frame in _frames(cold, _slots(cold, kept.page_keys(ids))):
                kind, page = (_REST, key[len(REST) :]) if key.startswith(REST) else (_PAGE, key)
                chunks.add(kind, bytes([len(page)]) + page + compressor.compress(frame))
            chunks.end()
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path.stat().st_size


def read_head(path: Path) -> tuple[str, Manifest, Tokens]:
    """Return name, manifest and token ids of an exported file, without reading its pages.

    Raises:
        ArchiveError: it is damaged or not such a file.
    """
    return _head(path, read_chunks(path))


def import_context(
    cold: ColdStore, path: Path, *, name: str | None = None, force: bool = False
) -> int:
    """Store the context of an exported file; return how many of its pages were new.

    The whole file is checked before anything is written. Pages are taken at their word: whoever
    made the file decides what the model will remember.

    Args:
        cold: opened with the frame size of the context's pages.
        name: what to save it under; None for the name in the file.
        force: replace a context of that name.

    Raises:
        ArchiveError: the file is damaged or cut off; nothing changed.
        ConfigError: there is a context of that name; nothing changed.
        DiskBudgetError, ColdWriteError: what was written of it is dropped again.
    """
    own_name, kept, ids = read_head(path)
    name = own_name if name is None else name
    if not force and manifest.read(cold, name) is not None:
        raise ConfigError(f"there is a context {name!r} already; --force replaces it")
    for _ in _pages(path):
        pass
    written: list[bytes] = []
    try:
        batch: list[tuple[bytes, bytes]] = []
        for slots in _pages(path):
            if slots[0][0] not in cold:
                batch += slots
            if len(batch) * kept.frame_bytes >= BATCH_BYTES:
                written += _put(cold, batch)
                batch = []
        written += _put(cold, batch)
        manifest.write(cold, name, kept, ids)
    except BaseException:
        keep = inventory.named(cold)
        cold.drop([key for key in written if key.removeprefix(REST) not in keep])
        raise
    return sum(not key.startswith(REST) for key in written)


def _slots(cold: ColdStore, pages: set[bytes]) -> list[bytes]:
    """Return the keys of all slots that pages are in: a page's own, then that of its rest."""
    ordered = sorted(pages)
    whole = set(cold.missing([REST + key for key in ordered]))
    return [slot for key in ordered for slot in (key, REST + key) if slot not in whole]


def _put(cold: ColdStore, batch: list[tuple[bytes, bytes]]) -> list[bytes]:
    keys = [key for key, _ in batch]
    cold.put(keys, [memoryview(frame) for _, frame in batch])
    return keys


def _frames(cold: ColdStore, keys: list[bytes]) -> Iterator[tuple[bytes, memoryview]]:
    """Yield (key, frame) of stored pages; a frame is valid until the next one is asked for."""
    size = cold.frame_bytes
    count = max(1, BATCH_BYTES // size)
    memory = aligned_buffer(min(count, max(1, len(keys))) * size)
    for start in range(0, len(keys), count):
        batch = keys[start : start + count]
        views = [memory[i * size : (i + 1) * size] for i in range(len(batch))]
        cold.read_into(batch, views)
        yield from zip(batch, views, strict=True)


def _head(path: Path, chunks: Iterator[tuple[bytes, bytes]]) -> tuple[str, Manifest, Tokens]:
    (first, name), (second, packed) = next(chunks, (b"", b"")), next(chunks, (b"", b""))
    if (first, second) != (b"NAME", b"MANI"):
        raise ArchiveError(f"{path} holds no saved context")
    try:
        text = name.decode()
        kept, ids = manifest.unpack(text, packed)
    except (UnicodeDecodeError, TierKVError) as error:
        raise ArchiveError(f"{path}: {error}") from error
    if not 0 <= kept.held <= len(ids):
        raise ArchiveError(f"{path} holds {len(ids)} tokens but pages of {kept.held}")
    return text, kept, ids


def _pages(path: Path) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield the slots of each page, (key, frame), checked: pages of the manifest, all, in order."""
    chunks = read_chunks(path)
    _, kept, ids = _head(path, chunks)
    decompressor = zstandard.ZstdDecompressor()
    expected = iter(sorted(kept.page_keys(ids)))
    page: list[tuple[bytes, bytes]] = []
    for kind, payload in chunks:
        length = payload[0] if payload else 0
        key, packed = payload[1 : 1 + length], payload[1 + length :]
        rest = kind == _REST and [key] == [slot for slot, _ in page]
        if not rest and (kind != _PAGE or key != next(expected, None)):
            raise ArchiveError(f"{path} holds other pages than its context names")
        try:
            fits = zstandard.frame_content_size(packed) == kept.frame_bytes
            frame = decompressor.decompress(packed) if fits else b""
        except zstandard.ZstdError as error:
            raise ArchiveError(f"{path}: page {key.hex()}: {error}") from error
        if len(frame) != kept.frame_bytes:
            raise ArchiveError(f"{path}: page {key.hex()} is not of {kept.frame_bytes} bytes")
        if rest:
            page.append((REST + key, frame))
            continue
        if page:
            yield page
        page = [(key, frame)]
    if next(expected, None) is not None:
        raise ArchiveError(f"{path} lacks pages of its context")
    if page:
        yield page
