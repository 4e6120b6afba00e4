"""A context with a name: tokens and their pages, kept on disk between processes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
import zstandard

from tierkv.errors import ColdReadError, ConfigError, UnsupportedModelError
from tierkv.hf.fingerprint import fingerprint
from tierkv.paging import saved
from tierkv.paging.keys import block_keys, root_key

META_PREFIX = "context/"
VERSION = 1
MAX_NAME = 200


class Context:
    """One growing sequence of a wrapped model; made by `TieredModel.open`.

    Attributes:
        name: what it is saved under.
        ids: ``[1, tokens]`` all tokens of the context, on the model's device. The last one may
            not have been computed yet.
        restored_tokens: tokens that came from the store instead of a forward pass.

    Raises:
        ConfigError: there is no store, or the name cannot be used.
        UnsupportedModelError: some layers keep state that is not in pages.
    """

    def __init__(self, model: Any, name: str):
        if not name or len(name.encode()) > MAX_NAME or not name.isprintable():
            raise ConfigError(f"a context's name must be 1 to {MAX_NAME} printable bytes: {name!r}")
        self.model, self.name = model, name
        self.cache = model.cache()
        self.restored_tokens = 0
        if self.cache.tiered_in_part:
            raise UnsupportedModelError(
                f"{type(model.hf_model).__name__} has layers with bounded state of their own "
                f"(windows, recurrence), which is not in pages: its contexts cannot be saved"
            )
        self._manager = self.cache.live_manager()
        self._store = saved.store_of(self._manager)
        self._root = root_key(fingerprint(model.hf_model), self._manager.geometry)
        self.ids = torch.zeros((1, 0), dtype=torch.long, device=self._manager.device)

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return self.cache.get_seq_length()

    def restore(self) -> bool:
        """Bring back what was saved under the name; return whether there was anything.

        Raises:
            ColdReadError: pages are missing or damaged; the context is empty, and what else is in
                the store is untouched.
            ConfigError: it was saved by another model or with other pages.
        """
        value = self._store.meta_get(META_PREFIX + self.name)
        if value is None:
            return False
        header, ids = unpack(value)
        if header["root"] != self._root.hex():
            raise ConfigError(
                f"context {self.name!r} was saved by another model, dtype or page size "
                f"({header['model']}, {header['page_tokens']} tokens a page)"
            )
        keys = block_keys(self._root, ids[: header["held"]], self._manager.geometry.page_tokens)
        gone = saved.missing(self._manager, keys)
        if gone:
            raise ColdReadError(f"{gone} pages of context {self.name!r} are not in the store")
        self.cache.reset()
        saved.restore(self._manager, self.cache.sequences, keys, header["held"])
        self.ids = torch.from_numpy(ids.copy())[None].to(self._manager.device)
        self.restored_tokens = header["held"]
        return True

    def save(self) -> int:
        """Write what the store does not hold yet; return the number of new pages.

        Raises:
            DiskBudgetError, ColdWriteError: nothing changed in the store.
        """
        held = self.tokens
        ids = self.ids[0].cpu().numpy()
        keys = block_keys(self._root, ids[:held], self._manager.geometry.page_tokens)
        written = saved.save(self._manager, self.cache.sequences, keys) if held else 0
        header = {
            "version": VERSION, "root": self._root.hex(), "held": held,
            "model": type(self.model.hf_model).__name__,
            "page_tokens": self._manager.geometry.page_tokens,
        }  # fmt: skip
        self._store.meta_put(META_PREFIX + self.name, pack(header, ids))
        return written

    def append(
        self, ids: torch.Tensor, on_prefill: Callable[[int, int], None] | None = None
    ) -> None:
        """Add tokens, ``[1, n]``, and compute their keys and values."""
        self.ids = torch.cat([self.ids, ids.to(self.ids.device)], dim=1)
        self.model.prefill(self.ids, self.cache, on_progress=on_prefill)

    def rewind(self, ids: torch.Tensor) -> int:
        """Make `ids` (``[1, n]``) the context's tokens, keeping what it shares with them.

        Returns the tokens kept: the longest common prefix, at token granularity, but not the last
        token of `ids`, which is always computed anew. Nothing is computed here.
        """
        length = min(ids.shape[1] - 1, self.ids.shape[1], self.tokens)
        same = self.ids[0, :length] == ids[0, :length].to(self.ids.device)
        kept = length if bool(same.all()) else int((~same).nonzero()[0])
        if kept < self.tokens:
            self.cache.crop(kept - self.tokens)
        self.ids = ids.to(self.ids.device)
        return kept

    def edit(self, from_token: int, new_ids: torch.Tensor) -> int:
        """Replace everything from a token on; return the number of tokens computed anew.

        Raises:
            ConfigError: `from_token` lies beyond the end.
        """
        if not 0 <= from_token <= self.ids.shape[1]:
            raise ConfigError(
                f"from_token must be 0 to {self.ids.shape[1]}, the context's tokens: {from_token}"
            )
        kept = self.rewind(torch.cat([self.ids[:, :from_token], new_ids.to(self.ids.device)], 1))
        self.model.prefill(self.ids, self.cache)
        return self.ids.shape[1] - kept

    def generate(self, **kwargs: Any) -> torch.Tensor:
        """Go on from the context; return the new tokens, ``[1, n]``, which then belong to it.

        Keyword arguments are those of transformers' `generate`, for one sequence.
        """
        if not self.ids.shape[1]:
            raise ConfigError(f"context {self.name!r} is empty: append something first")
        if self.tokens == self.ids.shape[1]:
            self.cache.crop(-1)  # the last token gives the first logits
        argument = self.model.cache_argument()
        output = self.model.generate(self.ids, **{argument: self.cache}, **kwargs)
        whole: torch.Tensor = getattr(output, "sequences", output)
        new = whole[:, self.ids.shape[1] :]
        self.ids = whole
        return new

    def close(self) -> None:
        """Release the pages; what was saved stays."""
        self.cache.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def pack(header: dict[str, Any], ids: Any) -> bytes:
    """Return a manifest: length and JSON of the header, then compressed int64 token ids."""
    text = json.dumps(header, sort_keys=True).encode()
    packed = zstandard.ZstdCompressor().compress(ids.astype("<i8").tobytes())
    return struct.pack(">I", len(text)) + text + packed


def unpack(value: bytes) -> tuple[dict[str, Any], Any]:
    """Return header and token ids of a manifest.

    Raises:
        ConfigError: another version wrote it.
    """
    (size,) = struct.unpack_from(">I", value)
    header = json.loads(value[4 : 4 + size])
    if header.get("version") != VERSION:
        raise ConfigError(f"a saved context of version {header.get('version')} cannot be read")
    ids = np.frombuffer(zstandard.ZstdDecompressor().decompress(value[4 + size :]), dtype="<i8")
    return header, ids
