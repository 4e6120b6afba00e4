"""A transformers `Cache` whose full-attention layers live in tiers.

`update` stores the new tokens and returns only them; tierkv's attention function reads the past
by page. The two shake hands through a `Handle`: an update that no attention follows is an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from tierkv.errors import ClosedError, HandshakeError, TierKVError, UnsupportedModelError
from tierkv.hf.geometry import stock_layers
from tierkv.paging.edit import crop, fork, remap
from tierkv.paging.lookup import Lookup
from tierkv.paging.manager import PageManager
from tierkv.paging.sequences import Sequences

NAME = "tierkv"
"""What transformers calls our attention implementation."""

_pending = threading.local()  # .handle: published by update, not yet taken by attention


def forget_pending() -> None:
    """Drop a handle that a forward which stopped midway left behind in this thread."""
    _pending.handle = None


@dataclass(frozen=True, eq=False, slots=True)
class Handle:
    """What `update` hands to the attention function of the same layer."""

    layer_idx: int
    lookup: Lookup
    owner: weakref.ref[TierCache]

    def attended(self) -> None:
        """Complete the handshake: attention has read the lookup."""
        owner = self.owner()
        if owner is not None:
            owner.attended(self.lookup.layer)


def take_handle(key: torch.Tensor, layer_idx: int) -> Handle | None:
    """Return the handle for a call to attention, or None if its layer is not tiered.

    It travels on the key tensor (several layers may share one); models that transform keys
    after `update` lose it, so the last one published in this thread serves as well.
    """
    handle: Handle | None = getattr(key, "_tierkv_handle", None)
    if handle is None:
        last: Handle | None = getattr(_pending, "handle", None)
        handle = last if last is not None and last.layer_idx == layer_idx else None
    if handle is not None and getattr(_pending, "handle", None) is handle:
        _pending.handle = None
    return handle


class TierLayer(CacheLayerMixin):
    """One full-attention layer of a `TierCache`."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, owner: TierCache, layer_idx: int, tier_layer: int):
        super().__init__()
        self._owner_ref = weakref.ref(owner)  # no cycle: a dropped cache is freed at once
        self._layer_idx, self._tier_layer = layer_idx, tier_layer
        self.is_initialized = True

    @property
    def _owner(self) -> TierCache:
        owner = self._owner_ref()
        assert owner is not None, "the cache of this layer is gone"
        return owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: memory belongs to the page manager."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[batch, kv_heads, tokens, dim]`` keys and values; return just them."""
        lookup = self._owner.append(self._tier_layer, key_states, value_states)
        handle = Handle(self._layer_idx, lookup, self._owner_ref)
        _pending.handle = handle
        key_states._tierkv_handle = handle  # type: ignore[attr-defined]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens appended to this layer."""
        return self._owner.sequences.lengths[self._tier_layer]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask must cover."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1

    @property
    def batch_size(self) -> int:
        """Sequences in the batch."""
        return self._owner.sequences.batch

    # The owner changes all tiered layers at once; these have nothing of their own to change.
    def reset(self) -> None: ...  # noqa: D102
    def offload(self) -> None: ...  # noqa: D102
    def prefetch(self) -> None: ...  # noqa: D102
    def reorder_cache(self, beam_idx: torch.Tensor) -> None: ...  # noqa: D102
    def crop(self, tokens_to_remove: int) -> None: ...  # noqa: D102
    def batch_repeat_interleave(self, repeats: int) -> None: ...  # noqa: D102
    def batch_select_indices(self, indices: torch.Tensor) -> None: ...  # noqa: D102


class TierCache(Cache):
    """Drop-in for `DynamicCache`, made by `TieredModel.cache()`.

    Full-attention layers are paged over the tiers of `manager`; other layers are transformers'
    own. Pages are released when the cache is closed, reset or garbage-collected.
    """

    def __init__(self, config: PreTrainedConfig, manager: PageManager | None):
        layers = stock_layers(config)
        self.manager, self._config = manager, config
        self.known: torch.Tensor | None = None  # [batch, n] ids of its first tokens, if sure
        self.graph: Any = None  # the captured decode step, if there is one
        self._unread: tuple[int, int] | None = None  # (tiered layer, tokens) awaiting attention
        self.tiered = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
        self.sequences = Sequences(len(self.tiered))
        super().__init__(layers=self._replace_tiered(layers))

    def _replace_tiered(self, layers: list[Any]) -> list[Any]:
        for tier_layer, index in enumerate(self.tiered):
            layers[index] = TierLayer(self, index, tier_layer)
        return layers

    @property
    def tiered_in_part(self) -> bool:
        """Whether some layers keep bounded state of their own (windows, recurrence)."""
        return len(self.tiered) < len(self.layers)

    def append(self, tier_layer: int, k: torch.Tensor, v: torch.Tensor) -> Lookup:
        """Append to one tiered layer after checking shape, dtype and device."""
        manager = self.live_manager()
        if self._config._attn_implementation != NAME:
            raise HandshakeError(
                f"the model attends through {self._config._attn_implementation!r}, which cannot "
                f"read a tier cache; its attn_implementation must stay {NAME!r} (nothing was added)"
            )
        geometry = manager.geometry
        got = (k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device.type)
        want = (
            geometry.kv_heads, geometry.k_dim, geometry.v_dim, geometry.dtype,
            manager.device.type,
        )  # fmt: skip
        if got != want:
            raise UnsupportedModelError(
                f"layer {self.tiered[tier_layer]} caches (kv_heads, k_dim, v_dim, dtype, device) "
                f"= {got}, but its configuration says {want}"
            )
        if self.sequences.batch not in (0, k.shape[0]):
            raise TierKVError(
                f"the cache holds {self.sequences.batch} sequences, got a batch of {k.shape[0]}"
            )
        if tier_layer == 0:
            self._check_whole(k.shape[2])
        self._check_read()
        lookup = manager.append(self.sequences, tier_layer, k, v)
        self._unread = tier_layer, k.shape[2]
        return lookup

    def attended(self, tier_layer: int) -> None:
        """Note that attention has seen the last append to a tiered layer."""
        if self._unread is not None and self._unread[0] == tier_layer:
            self._unread = None

    def _sliding(self) -> dict[int, Any]:
        """Return the layers with a sliding window that hold something, by index."""
        return {
            index: layer
            for index, layer in enumerate(self.layers)
            if getattr(layer, "is_sliding", False) and layer.is_initialized
        }

    def _check_whole(self, new: int) -> None:
        """Check, at a forward's first tiered layer, that the one before reached every layer."""
        held = set(self.sequences.lengths)
        for index, layer in self._sliding().items():
            held.add(layer.get_seq_length() - (new if index < self.tiered[0] else 0))
        if len(held) > 1:
            raise TierKVError(
                f"the last forward stopped midway (layers hold {min(held)} to {max(held)} "
                f"tokens); call rollback() or reset() on the cache first"
            )

    def _check_read(self) -> None:
        if self._unread is not None:
            raise HandshakeError(
                f"layer {self.tiered[self._unread[0]]} was updated but its attention did not run "
                f"through tierkv; call rollback() or reset() on the cache first"
            )

    def check_whole(self) -> None:
        """Check that the last forward, if there was one, is over.

        Raises:
            TierKVError: it stopped midway.
        """
        self._check_whole(0)
        self._check_read()

    def rollback(self) -> None:
        """Undo a forward that stopped midway: cut every layer to the shortest.

        One that failed after all layers have their tokens counts as done: `crop` it.

        Raises:
            TierKVError: the model has recurrent layers, or sliding windows that are full: they
                overwrite their past. Nothing changed; only `reset` helps.
        """
        forget_pending()
        sliding = self._sliding()
        held = [layer.get_seq_length() for layer in sliding.values()] + self.sequences.lengths
        if self._unread is not None:
            held.append(self.sequences.lengths[self._unread[0]] - self._unread[1])
        length = min(held, default=0)
        longer = [layer for layer in sliding.values() if layer.get_seq_length() > length]
        full = any(layer.get_seq_length() >= layer.sliding_window for layer in longer)
        if full or any(self.is_linear):
            what = "full sliding windows" if full else "recurrent layers"
            raise TierKVError(f"{what} cannot be rolled back; call reset() on the cache instead")
        if self.manager is not None:
            with self._knowing(np.s_[:, :length]):
                crop(self.live_manager(), self.sequences, length)
        self._unread = None
        for layer in longer:
            layer.crop(length - layer.get_seq_length())

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end: ``-n`` removes n. (n > 0 keeps n, as transformers < 5.18.)"""
        count, length = int(tokens_to_remove), self.get_seq_length()
        if count > 0:
            count = min(count - length, 0)
        super().crop(count)  # refuses before anything is cut
        if self.manager is not None and count:
            kept = max(length + count, 0)
            with self._knowing(np.s_[:, :kept]):
                crop(self.live_manager(), self.sequences, kept)

    @contextmanager
    def _knowing(self, part: Any) -> Iterator[None]:
        """Know only a part of the tokens after the block; if that fails, nobody is sure of any."""
        known, self.known = self.known, None
        yield
        self.known = None if known is None else known[part]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Permute the batch for beam search: block tables change, only tails are copied."""
        self._remap(beam_idx.cpu().numpy())
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence; the copies share all sealed pages."""
        self._remap(np.repeat(np.arange(self.sequences.batch), int(repeats)))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences."""
        self._remap(np.arange(self.sequences.batch)[indices.cpu().numpy()])
        super().batch_select_indices(indices)

    def _remap(self, rows: Any) -> None:
        with self._knowing(torch.as_tensor(rows)):
            if self.manager is not None:
                remap(self.live_manager(), self.sequences, rows.astype(np.int64))

    def fork(self) -> TierCache:
        """Return a cache of its own with the same tokens; it shares all sealed pages.

        Raises:
            TierKVError: some layers keep state of their own, or the last forward stopped midway.
            BudgetError: see `tierkv.paging.edit.fork`.
        """
        if self.tiered_in_part:
            raise UnsupportedModelError("layers with bounded state of their own cannot be forked")
        self._check_whole(0)
        twin = TierCache(self._config, self.manager)
        if self.manager is not None:
            twin.sequences = fork(self.live_manager(), self.sequences)
        twin.known = self.known
        return twin

    def live_manager(self) -> PageManager:
        """Return the manager; the model must have tiered layers.

        Raises:
            ClosedError: the model was closed.
        """
        assert self.manager is not None
        if self.manager.closed:
            raise ClosedError("the model of this cache was closed; wrap it again")
        return self.manager

    def reset(self) -> None:
        """Forget all tokens."""
        self.close()

    def close(self) -> None:
        """Release every page. The cache is empty afterwards and may be used again."""
        forget_pending()
        self._unread = self.graph = self.known = None
        if self.manager is not None:
            self.manager.close_sequences(self.sequences)
        self.sequences = Sequences(len(self.tiered))
        # Fresh layers: before 5.18 transformers' own keep their length when they are reset.
        self.layers = self._replace_tiered(stock_layers(self._config))

    def __del__(self) -> None:
        manager = getattr(self, "manager", None)
        if manager is not None:
            manager.discard(self.sequences)
