"""New tokens into tails and pages: where a page lives is decided here, when it is sealed."""

from __future__ import annotations

import numpy as np
import torch

from tierkv.paging.outflow import Outflow
from tierkv.paging.selective import TAIL_FRAME, SelectiveState
from tierkv.paging.sequences import Sequences
from tierkv.paging.tierset import TierSet
from tierkv.tiers.arena import Arena
from tierkv.tiers.frames import Frames
from tierkv.tiers.hot import TAIL


class Writer:
    """Writes appended tokens on the device and hands pages without a hot home to the outflow."""

    def __init__(self, tiers: TierSet, outflow: Outflow):
        self.tiers, self._outflow = tiers, outflow

    def keep_tail(
        self, layer: int, tails: Frames, offset: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the tokens of tails, ``[batch, kv_heads, offset, dim]``, before they go."""
        index = torch.as_tensor(tails[:, None], device=self.tiers.device)
        k, v = self.tiers.hot.arenas[layer].gather(index)
        return k[:, :, :offset], v[:, :, :offset]

    def write(
        self,
        sequences: Sequences,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        past: int,
        offset: int,
        spare: int = 0,
    ) -> None:
        """Write tokens to tails and homes on the device, and pages without a home downwards.

        spare: hot frames to leave free.
        """
        tokens, batch, new = self.tiers.geometry.page_tokens, k.shape[0], k.shape[2]
        arena = self.tiers.hot.arenas[layer]
        sealed, rest = divmod(offset + new, tokens)
        tails = sequences.tails[layer]
        if not sealed:
            if batch > 1 and new == 1:
                self._write_one(sequences, layer, offset, k, v)
            else:
                for row in range(batch):
                    arena.write_tokens(int(tails[row]) * tokens + offset, k[row], v[row])
            return
        homes = min(sealed, max(self.tiers.hot.homes_free(layer) - spare, 0) // batch)
        if homes < sealed:  # first what can fail: until then nothing of the sequences changes
            self._seal_down(sequences, layer, k, v, past, offset, homes, sealed)
        chain = tails[:, None]
        if homes:
            fresh = self.tiers.hot.take(layer, TAIL, homes * batch).reshape(batch, homes)
            chain = np.concatenate([chain, fresh], axis=1)
            blocks = sequences.blocks[:, past : past + homes]
            self.tiers.hot.owner[layer, chain[:, :homes]] = blocks
            self.tiers.directory.hot[blocks, layer] = chain[:, :homes]
            sequences.tails[layer] = chain[:, homes]
        homed = new if homes == sealed else max(homes * tokens - offset, 0)
        for row in range(batch):
            self._write_chain(arena, chain[row], offset, k[row, :, :homed], v[row, :, :homed])
        if homes < sealed and rest:
            for row, frame in enumerate(sequences.tails[layer].tolist()):
                arena.write_tokens(frame * tokens, k[row, :, -rest:], v[row, :, -rest:])
        self.tiers.stats.pages_sealed += sealed * batch
        sequences.sealed(layer)

    def seal_tails(self, sequences: Sequences) -> None:
        """Count the token by which a captured step has filled the tails, and seal those."""
        together = self._seal_selecting(sequences)
        for layer in range(self.tiers.geometry.layers):
            if layer not in together:
                self._seal_tail(sequences, layer)

    def _seal_selecting(self, sequences: Sequences) -> range:
        """Seal the tails of the layers that select at once, while all find warm frames.

        Returns the layers sealed. One after the other they take the host 20 ms for 26 layers.
        What goes to disk is a guest at first: it is likely to be chosen.
        """
        tiers, state, none = self.tiers, self.tiers.selective, range(0)
        if state is None or not state.spec.slots or tiers.hot.selecting is None:
            return none
        layers = range(state.spec.dense_layers, tiers.geometry.layers)
        position = sequences.lengths[layers.start] // tiers.geometry.page_tokens
        tails, blocks = (
            slice(TAIL_FRAME, TAIL_FRAME + sequences.batch),
            sequences.blocks[:, position],
        )
        k, v = (frames[:, :, tails] for frames in tiers.hot.selecting)
        pages = k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)
        sent = self._outflow.send_across(layers, blocks, *pages)
        if sent is None:
            return none
        try:
            self._show(state, position, k, v, sent)
        except BaseException:
            for layer in layers:
                self._outflow.take_back(layer, blocks)
            raise
        tiers.stats.pages_sealed += len(layers) * sequences.batch
        for layer in layers:
            sequences.sealed(layer)
            sequences.lengths[layer] += 1
        return layers

    def _show(
        self, state: SelectiveState, position: int, k: torch.Tensor, v: torch.Tensor, sent: Frames
    ) -> None:
        """Show selective attention pages that were sent down from all layers that select.

        k, v: ``[layers, kv_heads, batch, page_tokens, dim]``; sent: ``[layers, batch]`` frames.
        """
        tiers = self.tiers
        assert tiers.hot.selecting is not None
        away = bool((sent >= tiers.warm.outbound_start).any())
        addresses = tiers.warm.addresses(sent.reshape(-1))
        if away:
            faults, batch = state.faults, sent.shape[1]
            guests = faults.welcome(batch, position) if faults is not None else None
            addresses[:] = 0
            if guests is not None:
                pages = k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)
                tiers.transfer.write_down(*pages, guests)
                addresses = tiers.warm.addresses(guests)
        state.sealed_across(
            position, k, v, tiers.hot.selecting, addresses.reshape(sent.shape), away=away
        )

    def _seal_tail(self, sequences: Sequences, layer: int) -> None:
        tiers, tails, batch = self.tiers, sequences.tails[layer].copy(), sequences.batch
        position = sequences.lengths[layer] // tiers.geometry.page_tokens
        blocks = sequences.blocks[:, position]
        if tiers.hot.homes_free(layer) >= batch:
            fresh = tiers.hot.take(layer, TAIL, batch)
            tiers.hot.owner[layer, tails] = blocks
            tiers.directory.hot[blocks, layer] = tails
            sequences.tails[layer] = fresh
        else:
            try:
                for row in range(batch):
                    k, v = tiers.hot.arenas[layer].pages(tails[row : row + 1])
                    self._send(layer, sequences, row, position, k, v)
            except BaseException:
                self._outflow.take_back(layer, blocks)
                raise
        tiers.stats.pages_sealed += batch
        sequences.sealed(layer)
        sequences.lengths[layer] += 1

    def _write_one(
        self, sequences: Sequences, layer: int, offset: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        arena = self.tiers.hot.arenas[layer]
        index = sequences.tail_index(layer, self.tiers.device)
        arena.k_frames.select(2, offset).index_copy_(1, index, k[:, :, 0].transpose(0, 1))
        arena.v_frames.select(2, offset).index_copy_(1, index, v[:, :, 0].transpose(0, 1))

    def _write_chain(
        self, arena: Arena, chain: Frames, offset: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write consecutive tokens of one sequence over a chain of frames, run by run."""
        tokens, done = self.tiers.geometry.page_tokens, 0
        starts = np.flatnonzero(np.diff(chain, prepend=chain[0] - 2) != 1)
        stops = np.append(starts[1:], len(chain))
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            count = min((stop - start) * tokens - offset, k.shape[1] - done)
            if count <= 0:
                return
            slot = int(chain[start]) * tokens + offset
            arena.write_tokens(slot, k[:, done : done + count], v[:, done : done + count])
            done, offset = done + count, 0

    def _seal_down(
        self,
        sequences: Sequences,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        past: int,
        offset: int,
        homes: int,
        sealed: int,
    ) -> None:
        """Send the sealed pages that found no hot home to the tiers below, or none of them."""
        tokens, arena = self.tiers.geometry.page_tokens, self.tiers.hot.arenas[layer]
        start = homes * tokens - offset if homes else 0
        first = past + homes
        try:
            for row in range(k.shape[0]):
                at, position = start, first
                if not homes and offset:  # the tail's first tokens lie in its frame
                    frame = sequences.tails[layer, row : row + 1]
                    at = tokens - offset
                    arena.write_tokens(
                        int(frame[0]) * tokens + offset, k[row, :, :at], v[row, :, :at]
                    )
                    page_k, page_v = arena.pages(frame)
                    self._send(layer, sequences, row, past, page_k, page_v)
                    position += 1
                count = past + sealed - position
                if count:
                    pages = slice(at, at + count * tokens)
                    self._send(
                        layer,
                        sequences,
                        row,
                        position,
                        k[row, :, pages].unflatten(1, (count, tokens)),
                        v[row, :, pages].unflatten(1, (count, tokens)),
                    )
        except BaseException:
            self._outflow.take_back(layer, sequences.blocks[:, first : past + sealed].reshape(-1))
            raise

    def _send(
        self,
        layer: int,
        sequences: Sequences,
        row: int,
        position: int,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Send sealed pages of one sequence down, and show them to selective attention."""
        tiers, blocks = self.tiers, sequences.blocks[row, position : position + k.shape[1]]
        self._outflow.send_down(layer, blocks, k, v)
        state = tiers.selective
        if state is None or not state.spec.selects(layer):
            return
        addresses = tiers.home_addresses(blocks, layer) if state.spec.slots else None
        state.sealed(layer, row, position, k, v, tiers.hot.arenas[layer], addresses)
