"""A context with a name: tokens and their pages, kept on disk between processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from tierkv.errors import (
    ColdReadError,
    ConfigError,
    DiskBudgetError,
    UnsupportedModelError,
    WriteLimitError,
)
from tierkv.hf import breakeven
from tierkv.hf.cache import TierCache
from tierkv.hf.fingerprint import model_root
from tierkv.paging import inventory, manifest, saved
from tierkv.paging.manifest import Manifest
from tierkv.paging.sequences import Sequences
from tierkv.tiers.cold import ColdStore

MAX_NAME = 200


class Context:
    """One growing sequence of a wrapped model; made by `TieredModel.open`.

    Attributes:
        name: what it is saved under; None for one that is not saved.
        ids: ``[1, tokens]`` all tokens of the context, on the model's device. The last one may
            not have been computed yet.
        restored_tokens: tokens that came from the store instead of a forward pass.
        recomputed: why what was saved was computed again, if that was faster; else None.
        messages: the conversation, if the context is a chat; saved with it.

    Raises:
        ConfigError: the name cannot be used, or there is no store to save it in.
        UnsupportedModelError: some layers keep state that is not in pages.
    """

    def __init__(self, model: Any, name: str | None, cache: TierCache | None = None):
        self.model, self.name = model, name
        self.cache: TierCache = model.cache() if cache is None else cache
        self.restored_tokens = 0
        self.recomputed: str | None = None
        self.messages: list[dict[str, str | int]] | None = None
        if self.cache.tiered_in_part:
            raise UnsupportedModelError(
                f"{type(model.hf_model).__name__} has layers with bounded state of their own "
                f"(windows, recurrence), which is not in pages: its contexts cannot be saved"
            )
        self._manager = self.cache.live_manager()
        if name is not None:
            _check_name(name)
            saved.store_of(self._manager)
        self._root_key: bytes | None = None
        self.ids = torch.zeros((1, 0), dtype=torch.long, device=self._manager.device)

    @property
    def _root(self) -> bytes:
        if self._root_key is None:
            self._root_key = model_root(self.model.hf_model, self._manager)
        return self._root_key

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return self.cache.get_seq_length()

    def restore(self) -> bool:
        """Bring back what was saved under the name; return whether there was anything.

        Where computing it is known to be faster than reading it, it is computed (`recomputed`).

        Raises:
            ColdReadError: pages are missing or damaged; the context is what it was before, and
                what else is in the store is untouched. Pages that stay on disk because nothing
                above has room for them are checked when they are read.
            ConfigError: it was saved by another model or with other pages.
        """
        if self.name is None:
            return False
        store = saved.store_of(self._manager)
        found = manifest.read(store, self.name)
        if found is None:
            return False
        kept, ids = found
        self._manager.warm.expect_reads()
        if kept.root != self._root.hex():
            raise ConfigError(
                f"context {self.name!r} was saved by another model, dtype, codec or page size, or "
                f"under another salt ({kept.model}, {kept.page_tokens} tokens a page)"
            )
        keys = kept.block_keys(ids)
        whole = torch.from_numpy(ids.copy())[None].to(self._manager.device)
        rates, num_bytes = self.model.rates, kept.held * self._manager.geometry.token_bytes
        breakeven.load(store, self._root, self._manager.device, rates)
        if self._manager.prefix is None:  # which would begin with the very pages in the store
            self.recomputed = rates.verdict(kept.held, num_bytes)
        if self.recomputed:
            self._compute(whole, kept.held)
            manifest.touch(store, self.name)
            self.messages = kept.messages
            return True
        sequences, start = Sequences(self._manager.geometry.layers), time.perf_counter()
        try:
            saved.restore(self._manager, sequences, keys, kept.held)
        except ColdReadError as error:
            raise ColdReadError(f"context {self.name!r}: {error}") from error
        self._manager.transfer.finish()
        seconds = time.perf_counter() - start
        self.cache.reset()
        self.cache.sequences = sequences
        self.ids, self.restored_tokens, self.messages = whole, kept.held, kept.messages
        self.cache.known = self.ids[:, : kept.held]
        manifest.touch(store, self.name)
        if saved.above(self._manager, sequences):
            first = not rates.num_bytes
            rates.was_read(num_bytes, seconds)
            if first and rates.num_bytes:
                breakeven.store(store, self._root, self._manager.device, rates)
        return True

    def _compute(self, ids: torch.Tensor, held: int) -> None:
        """Make `ids` the context's tokens, the first `held` of them computed anew."""
        cache = self.model.cache()
        try:
            self.model.prefill(ids[:, :held], cache)
        except BaseException:
            cache.close()
            raise
        self.cache.close()
        self.cache, self.ids, self.restored_tokens = cache, ids, 0

    def save(self) -> int:
        """Write what the store does not hold yet; return the number of new pages.

        Raises:
            ConfigError: it has no name, or there is no store.
            DiskBudgetError, ColdWriteError: what was saved under the name before is untouched. If
                all pages were written and only the manifest failed, they stay without a name.
        """
        if self.name is None:
            raise ConfigError("this context has no name to be saved under: set its name first")
        store = saved.store_of(self._manager)
        _check_name(self.name)
        geometry, ids = self._manager.geometry, self.ids[0].cpu().numpy()
        kept = Manifest(
            root=self._root.hex(), model=type(self.model.hf_model).__name__, held=self.tokens,
            page_tokens=geometry.page_tokens, layers=geometry.layers,
            frame_bytes=store.frame_bytes, created=time.time(),
            dtype=str(geometry.dtype).removeprefix("torch."), messages=self.messages,
        )  # fmt: skip
        written = 0
        in_use = self._manager.directory.saved.values()
        if kept.held:
            written = self._write(store, kept.block_keys(ids), in_use)
        manifest.write(store, self.name, kept, ids, in_use)
        breakeven.store(store, self._root, self._manager.device, self.model.rates)
        return written

    def _write(self, store: ColdStore, keys: list[bytes], in_use: Iterable[bytes]) -> int:
        """Save pages; on a full disk those that nobody names or reads make way."""
        try:
            return saved.save(self._manager, self.cache.sequences, keys)
        except WriteLimitError:
            raise
        except DiskBudgetError:
            if not store.drop(inventory.unnamed(store, in_use)):
                raise
            return saved.save(self._manager, self.cache.sequences, keys)

    def fork(self, name: str | None = None) -> Context:
        """Return a context of its own with the same tokens, to be saved under `name`.

        All sealed pages are shared by reference; only the tail is copied. Both go on
        independently, and closing one leaves the other whole. Nothing is written.

        Raises:
            ConfigError: the name cannot be used.
            BudgetError: no room for another tail.
        """
        if name is not None:
            _check_name(name)
        twin = Context(self.model, name, self.cache.fork())
        twin.ids, twin.restored_tokens = self.ids, self.restored_tokens
        twin._root_key = self._root_key
        return twin

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


def _check_name(name: str) -> None:
    if not name or len(name.encode()) > MAX_NAME or not name.isprintable():
        raise ConfigError(f"a context's name must be 1 to {MAX_NAME} printable bytes: {name!r}")
