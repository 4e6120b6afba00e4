"""The on-disk record: what the catalogue stores under a page's key, and under a metadata name.

A record is fixed-size, little-endian and guarded twice: the payload by its own xxh3-64, the
header by another one that also covers the key. So a flipped bit, a cut value and a value moved
under another key are all told apart from a good one. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

FORMAT_VERSION = 1
MAX_KEY_BYTES = 64

_PAGE_MAGIC = b"TKVP"
_META_MAGIC = b"TKVM"
# magic, version, flags, frame_bytes, file_index, slot, payload_bytes, payload_hash
_PAGE_BODY = struct.Struct("<4sHHIIIIQ")
_PAGE_FIELDS = np.dtype(
    [("magic", "S4"), ("version", "<u2"), ("flags", "<u2"), ("frame_bytes", "<u4"),
     ("file_index", "<u4"), ("slot", "<u4"), ("payload_bytes", "<u4"), ("payload_hash", "<u8"),
     ("hash", "<u8")]
)  # fmt: skip
# magic, version; this layout never changes, so that any tierkv can name any other's version
_FORMAT_MAGIC = b"tierkv\0\0"
_FORMAT_BODY = struct.Struct("<8sI")
# magic, version, flags, value_bytes
_META_BODY = struct.Struct("<4sHHQ")
_HASH = struct.Struct("<Q")

RECORD_BYTES = _PAGE_BODY.size + _HASH.size
"""Bytes of one packed `Record`."""


class BadRecordError(ValueError):
    """Bytes that are no intact record; the text says what is wrong with them."""


class Record(NamedTuple):
    """Where one page's payload lies on disk, and what it must hash to.

    Attributes:
        frame_bytes: bytes of one slot in the extent file.
        file_index: which extent file of that frame size.
        slot: which slot of that file; the payload starts at byte ``slot * frame_bytes``.
        payload_bytes: bytes of the slot that are payload, counted from its start.
        payload_hash: xxh3-64 of the payload.
    """

    frame_bytes: int
    file_index: int
    slot: int
    payload_bytes: int
    payload_hash: int

    def pack(self, key: bytes) -> bytes:
        """Return the `RECORD_BYTES` bytes stored under `key`."""
        return _seal(_PAGE_BODY.pack(_PAGE_MAGIC, FORMAT_VERSION, 0, *self), key)

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> Record:
        """Return the record stored as `value` under `key`.

        Raises:
            BadRecordError: the value is damaged, of another version, or belongs to another key.
        """
        if len(value) != RECORD_BYTES:
            raise BadRecordError(f"{len(value)} bytes instead of {RECORD_BYTES}")
        body = _open(value, key, _PAGE_BODY.size)
        magic, version, flags, *fields = _PAGE_BODY.unpack(body)
        _check_prefix(magic, _PAGE_MAGIC, version, flags)
        return cls(*fields)


def unpack_many(
    keys: Sequence[bytes], values: Sequence[bytes | None]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[Any]]:
    """Unpack the records stored as `values` under `keys`, without an object for each.

    Returns which are intact, ``[n]``, and the fields of those, with the names of `Record`'s. What
    is wrong with the others `Record.unpack` says.
    """
    size = _PAGE_BODY.size
    sums = [
        xxh3_64_intdigest(value[:size] + key) if value and len(value) == RECORD_BYTES else None
        for key, value in zip(keys, values, strict=True)
    ]
    good = np.array([found is not None for found in sums], dtype=bool)
    records = np.frombuffer(
        b"".join(value for value in values if value and len(value) == RECORD_BYTES), _PAGE_FIELDS
    )
    intact = records["hash"] == np.array([x for x in sums if x is not None], dtype=np.uint64)
    intact &= (records["magic"] == _PAGE_MAGIC) & (records["flags"] == 0)
    intact &= records["version"] == FORMAT_VERSION
    good[good] = intact
    return good, records[intact]


def payload_hash(payload: memoryview) -> int:
    """Return the xxh3-64 of a C-contiguous payload."""
    return xxh3_64_intdigest(payload)


def pack_meta(name: bytes, value: bytes) -> bytes:
    """Return the bytes stored under the metadata name `name` for `value`."""
    return _seal(_META_BODY.pack(_META_MAGIC, FORMAT_VERSION, 0, len(value)), name + value) + value


def unpack_meta(name: bytes, stored: bytes) -> bytes:
    """Return the value that `pack_meta` stored under `name`; `BadRecordError` if it is damaged."""
    start = _META_BODY.size + _HASH.size
    value = stored[start:]
    body = _open(stored[:start], name + value, _META_BODY.size)
    magic, version, flags, value_bytes = _META_BODY.unpack(body)
    _check_prefix(magic, _META_MAGIC, version, flags)
    if len(value) != value_bytes:
        raise BadRecordError(f"value of {len(value)} bytes instead of {value_bytes}")
    return value


def pack_format(version: int = FORMAT_VERSION) -> bytes:
    """Return the bytes that stamp a store with its format version."""
    return _seal(_FORMAT_BODY.pack(_FORMAT_MAGIC, version), b"")


def unpack_format(stored: bytes) -> int:
    """Return the format version that a stamp names; `BadRecordError` if it is no intact stamp."""
    magic, version = _FORMAT_BODY.unpack(_open(stored, b"", _FORMAT_BODY.size))
    if magic != _FORMAT_MAGIC or len(stored) != _FORMAT_BODY.size + _HASH.size:
        raise BadRecordError(f"magic {magic!r} in {len(stored)} bytes is no tierkv format stamp")
    return int(version)


def _seal(body: bytes, context: bytes) -> bytes:
    return body + _HASH.pack(xxh3_64_intdigest(body + context))


def _open(sealed: bytes, context: bytes, body_bytes: int) -> bytes:
    """Return the body of `sealed` after checking its hash over body and context."""
    if len(sealed) < body_bytes + _HASH.size:
        raise BadRecordError(f"{len(sealed)} bytes instead of {body_bytes + _HASH.size}")
    body = sealed[:body_bytes]
    (found,) = _HASH.unpack(sealed[body_bytes : body_bytes + _HASH.size])
    if found != xxh3_64_intdigest(body + context):
        raise BadRecordError("header checksum does not match")
    return body


def _check_prefix(magic: bytes, expected_magic: bytes, version: int, flags: int) -> None:
    if magic != expected_magic:
        raise BadRecordError(f"magic {magic!r} instead of {expected_magic!r}")
    if version != FORMAT_VERSION:
        raise BadRecordError(f"version {version} instead of {FORMAT_VERSION}")
    if flags != 0:
        raise BadRecordError(f"unknown flags {flags:#06x}")
