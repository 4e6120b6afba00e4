"""One file of checksummed chunks in order: how stored pages travel between stores.

The file starts with a magic and a version. A chunk is its kind, its number, its length, an xxh3-64
over all of that and the payload, then the payload. The last chunk, ``END``, holds the hash of all
hashes before it, so that a cut, flipped, repeated, reordered or foreign chunk is told apart from a
good one. Nothing is ever unpickled.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_64, xxh3_64_intdigest

from tierkv.errors import ArchiveError

VERSION = 1

_MAGIC = b"tierkvX\0"
_FILE = struct.Struct("<8sI")
# kind, number, payload bytes
_CHUNK = struct.Struct("<4sIQ")
_HASH = struct.Struct("<Q")
_END = b"END\0"


class ChunkWriter:
    """Writes chunks to a binary file; call `end` after the last one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._number, self._hashes = file, 0, xxh3_64()
        file.write(_FILE.pack(_MAGIC, VERSION))

    def add(self, kind: bytes, payload: bytes) -> None:
        """Write one chunk. kind: 4 bytes."""
        head = _CHUNK.pack(kind, self._number, len(payload))
        digest = _HASH.pack(xxh3_64_intdigest(head + payload))
        self._file.write(head + digest + payload)
        self._hashes.update(digest)
        self._number += 1

    def end(self) -> None:
        """Write the chunk that says that nothing is missing."""
        self.add(_END, _HASH.pack(self._hashes.intdigest()))


def read_chunks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield (kind, payload) of each chunk, checked, without the last; raise if that is missing.

    A chunk is whole when it is yielded; that the file is, is known only at the end.

    Raises:
        ArchiveError: it is no such file, of another version, damaged, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield from _read(file, path)
    except OSError as error:
        raise ArchiveError(f"cannot read {path}: {error.strerror}") from error


def _read(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, bytes]]:
    left, number, hashes = os.fstat(file.fileno()).st_size, 0, xxh3_64()

    def take(count: int) -> bytes:
        nonlocal left
        if count > left:
            raise ArchiveError(f"{path} is cut off or damaged: chunk {number} is not whole")
        left -= count
        return file.read(count)

    magic, version = _FILE.unpack(take(_FILE.size))
    if magic != _MAGIC:
        raise ArchiveError(f"{path} is no file that tierkv exported")
    if version != VERSION:
        raise ArchiveError(f"{path} has version {version}, this tierkv reads version {VERSION}")
    while True:
        head, digest = take(_CHUNK.size), take(_HASH.size)
        kind, found, num_bytes = _CHUNK.unpack(head)
        payload = take(num_bytes)
        same = _HASH.unpack(digest)[0] == xxh3_64_intdigest(head + payload)
        if not same or found != number:
            raise ArchiveError(f"{path} is damaged: chunk {number} fails its checksum")
        if kind == _END:
            if _HASH.unpack(payload)[0] != hashes.intdigest() or left:
                raise ArchiveError(f"{path} is damaged: its end does not fit its chunks")
            return
        yield kind, payload
        hashes.update(digest)
        number += 1
