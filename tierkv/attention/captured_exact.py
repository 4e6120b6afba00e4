"""Exact layers of captured steps: pages attended in place, and pages streamed from warm memory.

What was streamed when a step was captured is copied by the copy engine, block by block, at fixed
addresses. Pages sealed since are fetched by a kernel that reads their number and addresses from
device memory; when they have become too many, the step is captured anew. Encoded pages on the
device are attended where they lie, too, if there is a kernel for their codec; else they are decoded
among the streamed ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from tierkv.attention.step_numbers import StepNumbers
from tierkv.errors import ConfigError
from tierkv.kernels import decode
from tierkv.kernels.decode import PagedKV
from tierkv.kernels.decode_blocks import MIN_SPLIT_TOKENS
from tierkv.kernels.gather import Fetches
from tierkv.kernels.merge import Partials, merge
from tierkv.paging.directory import Blocks
from tierkv.paging.manager import PageManager
from tierkv.paging.plan import Plan
from tierkv.paging.sequences import Sequences
from tierkv.tiers.frames import Frames
from tierkv.tiers.staged_copies import StagedCopies

MAX_SPLITS = 96
"""Splits over the resident pages of a layer at most."""
STREAMED_SPLITS = 32
"""Splits over one streamed block at most."""
MAX_LATER_PAGES = 128
"""Pages of a layer that may be streamed beyond those of the captured copies."""


class Divided(NamedTuple):
    """What a plan calls streamed: encoded pages on the device, and positions that are streamed.

    positions, frames: ``[n]`` and ``[batch, n]``, those of the former.
    """

    positions: Blocks
    frames: Frames
    streamed: Blocks


class CapturedExact:
    """Fixed memory of the exact layers of sequences that run together.

    Of several sequences, or of one with padding, no page may be streamed.

    Attributes:
        outgrown: more is streamed than the captured step reads; `renew` before capturing it anew.

    Args:
        numbers: what changes with every step; one row of `tokens` for each exact layer.
        padding: ``[batch]`` int32, tokens hidden before each sequence; None for none.
        max_pages: pages that the context may grow to, the tail included.
    """

    def __init__(
        self,
        manager: PageManager,
        sequences: Sequences,
        numbers: StepNumbers,
        max_pages: int,
        padding: torch.Tensor | None = None,
    ):
        self.manager, self.sequences, self.numbers = manager, sequences, numbers
        self.tokens = numbers.device.tokens
        self.layers = layers = len(self.tokens)
        device, heads = manager.device, manager.geometry.kv_heads
        later = min(MAX_LATER_PAGES, manager.placement.staging_pages)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.padding, batch = padding, max(sequences.batch, 1)
        self.tables = zeros(layers, batch, max_pages)
        self.later_tokens, self.encoded_tokens = zeros(2, layers, batch)
        self.hidden, self.encoded_hidden = zeros(2, layers, batch)
        encoded = manager.tiers.device_frames
        self._frames = manager.tiers.format.attended(encoded.memory) if encoded.share else None
        self.encoded_tables = zeros(layers, batch, max_pages if self._frames else 0)
        only_tails = manager.encode_hot and not manager.window_pages
        raw = manager.geometry.page_tokens * (1 if only_tails else manager.placement.hot_frames)
        self._raw_splits = min(MAX_SPLITS, -(-raw // MIN_SPLIT_TOKENS))
        self.addresses = zeros(layers, later, dtype=torch.int64)
        order = torch.arange(later, dtype=torch.int32, device=device).repeat(heads, 1)
        counts = zeros(layers, heads)
        self.fetches = [Fetches(order, order, counts[layer]) for layer in range(layers)]
        self.outgrown = False
        self._plans: dict[int, Plan] = {}
        self._divided: dict[int, tuple[Plan, Divided]] = {}
        self._told: Plan | None = None  # layer 0's, once the device knows the plans of all layers
        self._captured: list[Frames] = [np.zeros(0, dtype=np.int64)] * layers
        self._block_pages: list[list[int]] = [[]] * layers
        self._resident = np.zeros((layers, 1), dtype=np.int32)
        self._streams, self._streamed, self._encoded = False, 0, 0
        self._copies: StagedCopies | None = None
        self._partials: Partials | None = None
        self._query: torch.Tensor | None = None

    @property
    def max_pages(self) -> int:
        """Pages that the context may grow to."""
        return self.tables.shape[2]

    def obstacle(self, past: int) -> str:
        """Say why the next step cannot be captured or replayed; empty if it can."""
        for layer in range(0 if self._known(past) else self.layers):
            plan = self.manager.plan(self.sequences, layer, past)
            if plan is self._plans.get(layer) or not len(plan.streamed):
                continue
            streamed = self._divide(layer, plan).streamed
            if not len(streamed):
                continue
            if len(self.tables[layer]) > 1 or self.padding is not None:
                return self._too_much(layer, streamed)
            if (self._homes(layer, streamed) < 0).any():
                return f"layer {layer} is exact and has pages on disk, which take the host to read"
            try:
                self.manager.tiers.format.check_fetch()
            except ConfigError as error:
                return str(error)
        return ""

    def _too_much(self, layer: int, streamed: Blocks) -> str:
        """Say that a batch, or padding, has no page streamed to it, and what helps."""
        manager = self.manager
        homes = manager.directory.warm[self.sequences.blocks[:, streamed], layer]
        reason = f"{len(streamed)} pages of layer {layer} are streamed, to a batch or past padding"
        if self._frames is None and manager.warm.on_device(homes).all(axis=0).any():
            name = manager.tiers.format.codec.name
            return f"{reason}: no kernel attends to {name} pages where they lie; use another codec"
        return f"{reason}; raise gpu_budget"

    def begin(self, past: int, tail_tokens: int) -> None:
        """Set what a step reads, on the device but for `numbers`; the new token is the tail's last.

        The caller uploads those.
        """
        page_tokens = self.manager.geometry.page_tokens
        self.manager.lookahead.cancel()  # its staging buffers are the replay's now
        self.manager.transfer.settle()
        if not self._known(past):
            self._told = None
            for layer in range(self.layers):
                plan = self.manager.plan(self.sequences, layer, past)
                if plan is not self._plans.get(layer):
                    self._set_pages(layer, plan)
                    self._plans[layer] = plan
            parts = {layer: self._divide(layer, plan) for layer, plan in self._plans.items()}
            homes = [self._homes(layer, part.streamed) for layer, part in parts.items()]
            here = sum(int(self.manager.warm.on_device(frames).sum()) for frames in homes)
            self._streamed = sum(map(len, homes)) - here
            self._encoded = here + sum(part.frames.size for part in parts.values())
            room = self.addresses.shape[1] if self._streams else 0
            later = [self._later(layer, plan) for layer, plan in self._plans.items()]
            self.outgrown = any(pages is None or len(pages) > room for pages in later)
            self._told = self._plans.get(0)
        self.numbers.host.tokens[:] = self._resident * page_tokens + tail_tokens  # of every row

    def renew(self) -> None:
        """Prepare for capturing a step: it has copies of all that is streamed now."""
        manager = self.manager
        blocks, step = [], manager.placement.staging_pages
        for layer in range(self.layers):
            frames = self._homes(layer, self._divide(layer, self._plans[layer]).streamed)
            self._captured[layer] = frames
            parts = [frames[at : at + step] for at in range(0, len(frames), step)]
            self._block_pages[layer] = list(map(len, parts))
            blocks += [manager.transfer.spans(np.arange(len(part)), part) for part in parts]
            self._set_pages(layer, self._plans[layer])
        most = max(map(len, self._block_pages), default=0)
        self._streams, self.outgrown = bool(blocks), False
        self._copies = manager.transfer.staged_copies(blocks)
        self._slots = self._raw_splits + (MAX_SPLITS if self._frames else 0)
        self._slots += STREAMED_SPLITS * (most + 1) if blocks else 0
        self._partials = None

    def start(self) -> None:
        """Begin the copies of a step, before its first layer."""
        assert self._copies is not None
        self._copies.begin()

    def finish(self) -> None:
        """End them, after its last layer."""
        assert self._copies is not None
        self._copies.end()

    def count(self) -> None:
        """Count the lookups of a step that was replayed."""
        stats = self.manager.stats
        stats.hits_hot += int(self._resident.sum()) * self.tables.shape[1] + self._encoded
        stats.hits_warm += self._streamed
        stats.warm_to_hot_bytes += self._streamed * self.manager.tiers.format.page_bytes

    def queries(self, like: torch.Tensor) -> torch.Tensor:
        """Return where the layers look for queries, ``[batch, heads, k_dim]``.

        like: queries, ``[batch, heads, 1, k_dim]``.
        """
        if self._query is None:
            self._query = torch.empty_like(like[:, :, 0], memory_format=torch.contiguous_format)
        return self._query

    def attend(
        self, layer: int, *, scale: float, softcap: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend in one layer for what lies in `queries`; returns ``[batch, 1, heads, v_dim]``."""
        assert self._query is not None
        query, geometry = self._query, self.manager.geometry
        batch, heads, _ = query.shape
        if self._partials is None:
            self._partials = Partials.allocate(
                self._slots, batch, heads, geometry.v_dim, query.device
            )
        settings: dict[str, Any] = {"scale": scale, "softcap": softcap}
        padded = self.padding is not None
        slot = self._read(
            self.manager.hot.arenas[layer], 0, tokens=self.tokens[layer],
            table=self.tables[layer], max_splits=self._raw_splits,
            first_visible=self.hidden[layer] if padded else None, **settings,
        )  # fmt: skip
        if self._frames is not None:
            slot = decode.attend(
                query, self._frames, self._partials, slot=slot, tokens=self.encoded_tokens[layer],
                table=self.encoded_tables[layer], max_splits=MAX_SPLITS,
                first_visible=self.encoded_hidden[layer] if padded else None, **settings,
            )  # fmt: skip
        settings["max_splits"] = STREAMED_SPLITS
        if self._streams:
            slot = self._read_later(layer, slot, settings)
        assert self._copies is not None
        for pages in self._block_pages[layer]:
            tokens = pages * geometry.page_tokens
            slot = self._read(self._copies.next(), slot, tokens=tokens, **settings)
        out = query.new_empty((batch, heads, geometry.v_dim))
        merge(self._partials, slot, out, sinks=None if sinks is None else sinks.float())
        return out.unsqueeze(1)

    def _read_later(self, layer: int, slot: int, settings: dict[str, Any]) -> int:
        """Fetch the pages sealed since the step was captured, and attend to them."""
        arena, room = self.manager.transfer.staging[0], self.addresses.shape[1]
        pages = PagedKV(arena.k_frames[:, :room], arena.v_frames[:, :room])
        fetch = self.manager.tiers.format.prepare_fetch
        fetch(self.addresses[layer], self.fetches[layer], pages).run()
        order = self.fetches[layer].pages[:1]
        return self._read(arena, slot, tokens=self.later_tokens[layer], table=order, **settings)

    def _read(self, arena: Any, slot: int, **arguments: Any) -> int:
        assert self._query is not None and self._partials is not None
        pages = PagedKV(arena.k_frames, arena.v_frames)
        return decode.attend(self._query, pages, self._partials, slot=slot, **arguments)

    def _set_pages(self, layer: int, plan: Plan) -> None:
        """Say which pages a layer reads in place, and which are fetched beyond the copies."""
        tails = self.sequences.tails[layer][:, None]
        frames = np.concatenate([plan.frames, tails], axis=1, dtype=np.int32)
        table = torch.from_numpy(frames).to(self.tables.device)
        self.tables[layer, :, : frames.shape[1]] = table
        self._resident[layer] = frames.shape[1] - 1
        at, encoded, _ = self._divide(layer, plan)
        page_tokens = self.manager.geometry.page_tokens
        if self._frames is not None:
            table = torch.from_numpy(encoded.astype(np.int32)).to(self.tables.device)
            self.encoded_tables[layer, :, : encoded.shape[1]] = table
            self.encoded_tokens[layer].fill_(encoded.shape[1] * page_tokens)
        if self.padding is not None:
            self.hidden[layer] = self._hidden(np.append(plan.positions, plan.past))
            self.encoded_hidden[layer] = self._hidden(at)
        later = self._later(layer, plan)
        if later is None or len(later) > self.addresses.shape[1]:
            return  # the step will be captured anew
        if len(later):
            places = self.manager.warm.addresses(self._homes(layer, later))
            self.addresses[layer, : len(later)] = torch.from_numpy(places).to(self.tables.device)
        self.fetches[layer].counts.fill_(len(later))
        self.later_tokens[layer].fill_(len(later) * page_tokens)

    def _hidden(self, positions: Blocks) -> torch.Tensor:
        """Return how many tokens are padding, ``[batch]``, of pages at these positions, ascending:
        the first ones of them."""
        assert self.padding is not None
        page_tokens = self.manager.geometry.page_tokens
        starts = torch.from_numpy(positions * page_tokens).to(self.padding.device)
        hidden = (self.padding[:, None] - starts).clamp(0, page_tokens)
        return hidden.sum(dim=1, dtype=torch.int32)

    def _later(self, layer: int, plan: Plan) -> Blocks | None:
        """Return the positions streamed beyond the captured copies; None if those do not fit."""
        streamed, captured = self._divide(layer, plan).streamed, self._captured[layer]
        homes = self._homes(layer, streamed[: len(captured)])
        return streamed[len(captured) :] if np.array_equal(homes, captured) else None

    def _divide(self, layer: int, plan: Plan) -> Divided:
        """Divide what a plan calls streamed."""
        known = self._divided.get(layer)
        if known is not None and known[0] is plan:
            return known[1]
        warm, streamed = self.manager.warm, plan.streamed
        frames = self.manager.directory.warm[self.sequences.blocks[:, streamed], layer]
        here = warm.on_device(frames).all(axis=0) & (self._frames is not None)
        parts = Divided(streamed[here], frames[:, here], streamed[~here])
        self._divided[layer] = plan, parts
        return parts

    def _known(self, past: int) -> bool:
        """Whether all layers look up what they did before; their plans are remade together."""
        plan = self._told
        return (
            plan is not None
            and plan is self.sequences.plans.get(0)
            and plan.past == past
            and plan.placement_epoch == self.manager.placement_epoch
        )

    def _homes(self, layer: int, positions: Blocks) -> Frames:
        """Return the home of each encoded page, -1 for what has none."""
        frames = self.manager.directory.warm[self.sequences.blocks[0, positions], layer]
        return np.where(frames < self.manager.warm.inbound_start, frames, -1)
