"""Names of pages that mean the same in every process: a chain of hashes over the tokens.

A page's key covers the model, the geometry and every token up to the page's last, because keys and
values depend on all of them. Parts of a hash are typed and counted, so that no two lists of parts
can look alike.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from tierkv.page import Geometry

KEPT_PREFIX = b"kept/"
"""Keys of pages that outlive the process."""

Tokens = npt.NDArray[np.int64]


def root_key(
    fingerprint: bytes, geometry: Geometry, salt: str = "", *, codec: str = "raw"
) -> bytes:
    """Return what the keys of one model's pages begin from.

    fingerprint: names weights and configuration, rotary settings among them.
    codec: how the pages are stored, as far as it changes them.
    """
    parts = [fingerprint, repr(geometry).encode(), salt.encode()]
    return _digest(b"root", *parts, *([] if codec == "raw" else [codec.encode()]))


def block_keys(root: bytes, tokens: Tokens, page_tokens: int) -> list[bytes]:
    """Return one key per page of a context, the partial last page included."""
    keys, parent = [], root
    for start in range(0, len(tokens), page_tokens):
        part = tokens[start : start + page_tokens].astype("<i8")
        parent = _digest(b"page", parent, part.tobytes())
        keys.append(parent)
    return keys


def page_key(block_key: bytes, layer: int) -> bytes:
    """Return the key of one layer's page in the store."""
    return KEPT_PREFIX + block_key + struct.pack(">H", layer)


def block_of(key: bytes) -> bytes:
    """Return the key of the page position that a key from `page_key` belongs to."""
    return key[len(KEPT_PREFIX) : -2]


def _digest(kind: bytes, *parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in (kind, *parts):
        digest.update(struct.pack(">Q", len(part)) + part)
    return digest.digest()
