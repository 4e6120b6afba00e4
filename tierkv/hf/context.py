"""A context with a name: tokens and their pages, kept on disk between processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from tierkv.errors import ColdReadError, ConfigError, UnsupportedModelError
from tierkv.hf.fingerprint import fingerprint
from tierkv.paging import manifest, saved
from tierkv.paging.keys import root_key
from tierkv.paging.manifest import Manifest

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
        codec = self._manager.tiers.stored_codec
        self._root = root_key(fingerprint(model.hf_model), self._manager.geometry, codec=codec)
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
        found = manifest.read(self._store, self.name)
        if found is None:
            return False
        kept, ids = found
        if kept.root != self._root.hex():
            raise ConfigError(
                f"context {self.name!r} was saved by another model, dtype, codec or page size "
                f"({kept.model}, {kept.page_tokens} tokens a page)"
            )
        keys = kept.block_keys(ids)
        gone = saved.missing(self._manager, keys)
        if gone:
            raise ColdReadError(f"{gone} pages of context {self.name!r} are not in the store")
        self.cache.reset()
        saved.restore(self._manager, self.cache.sequences, keys, kept.held)
        self.ids = torch.from_numpy(ids.copy())[None].to(self._manager.device)
        self.restored_tokens = kept.held
        return True

    def save(self) -> int:
        """Write what the store does not hold yet; return the number of new pages.

        Raises:
            DiskBudgetError, ColdWriteError: what was saved under the name before is untouched. If
                all pages were written and only the manifest failed, they stay without a name.
        """
        geometry, ids = self._manager.geometry, self.ids[0].cpu().numpy()
        kept = Manifest(
            root=self._root.hex(), model=type(self.model.hf_model).__name__, held=self.tokens,
            page_tokens=geometry.page_tokens, layers=geometry.layers,
            frame_bytes=self._manager.warm.frame_bytes, created=time.time(),
        )  # fmt: skip
        written = 0
        if kept.held:
            written = saved.save(self._manager, self.cache.sequences, kept.block_keys(ids))
        manifest.write(self._store, self.name, kept, ids)
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
