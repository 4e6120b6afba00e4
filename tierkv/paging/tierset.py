"""The three tiers of one model, the directory of what they hold, and the lock that guards both."""

from __future__ import annotations

import secrets
import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierkv.codecs import RAW, Codec
from tierkv.codecs.base import identity
from tierkv.page import Geometry
from tierkv.paging.directory import NOWHERE, Blocks, PageDirectory
from tierkv.paging.keys import page_key
from tierkv.paging.placement import STAGING_BUFFERS, Placement
from tierkv.paging.selective import Selective, SelectiveState
from tierkv.stats import Stats
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.device_frames import DeviceFrames
from tierkv.tiers.device_memory import free
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.frames import Frames
from tierkv.tiers.hot import HotTier
from tierkv.tiers.packed import PackedStore, UnpackedStore
from tierkv.tiers.transfer import Transfer
from tierkv.tiers.warm import WarmTier

SESSION_PREFIX = b"session/"
"""Keys of pages that belong to one process and mean nothing to the next."""
EVERY = slice(None)


class TierSet:
    """Tiers, transfer engine and page directory, made from budgets.

    Args:
        raw_pages: None where hot pages are raw; else they are encoded, and this is how many pages
            of a layer one sequence needs raw: its tail and residual window.

    Attributes:
        changed: guards the directory, the warm pools and the outflow's queues; notified when
            warm frames become free.

    Raises:
        HotBudgetError, WarmBudgetError: a budget is below the minimum; the message says which.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        *,
        gpu_budget: int,
        cpu_budget: int,
        cold: ColdStore | None,
        io_threads: int,
        selective: Selective | None = None,
        codec: Codec = RAW,
        salt: str = "",
        raw_pages: int | None = None,
    ):
        self.geometry, self.device, self.cold = geometry, device, cold
        self.gpu_budget, self.cpu_budget = gpu_budget, cpu_budget
        self.salt = salt
        self.format = FrameFormat(geometry, codec, on_disk=cold is not None)
        self.stats = Stats()
        self.directory = PageDirectory(geometry.layers)
        self.changed = threading.Condition()
        cuda = device.type == "cuda"
        self.placement = place = Placement.choose(
            geometry,
            gpu_budget=gpu_budget,
            cpu_budget=cpu_budget,
            frame_bytes=self.format.frame_bytes,
            has_cold=cold is not None,
            cuda=cuda,
            selective=selective,
            raw_pages=raw_pages,
        )
        with torch.inference_mode(False):
            extra, tails = list[int | None](), 1
            if selective is not None:
                tails, own = selective.sequences, selective.sequences * selective.frames
                extra = [own if selective.selects(at) else None for at in range(geometry.layers)]
            self.hot = HotTier(
                geometry, place.hot_frames, device, extra, tails,
                encoded=raw_pages is not None, window=raw_pages is not None and raw_pages > 1,
            )  # fmt: skip
            self.device_frames = DeviceFrames(
                geometry.layers, place.device_frames, self.format.frame_bytes, device
            )
            self.selective = (
                None if selective is None else SelectiveState(selective, geometry, device)
            )
            self.warm = WarmTier(
                self.format.frame_bytes,
                place.warm_homes,
                place.warm_inbound,
                place.warm_outbound,
                place.warm_guests,
                pinned=cuda,
                device_frames=self.device_frames,
            )
            self.transfer = Transfer(
                self.format,
                self.warm,
                cold,
                device,
                staging_pages=place.staging_pages,
                staging_buffers=STAGING_BUFFERS,
                io_threads=io_threads,
            )
        self._session = SESSION_PREFIX + secrets.token_bytes(8)
        if cold is not None:
            cold.drop(list(cold.keys(SESSION_PREFIX)))

    def key(self, block: int, layer: int) -> bytes:
        """Return the name of a page in the cold store."""
        saved = self.directory.saved.get(block)
        if saved is not None:
            return page_key(saved, layer)
        return self._session + struct.pack(">IH", block, layer)

    @property
    def hot_layers(self) -> list[int]:
        """Layers whose sealed pages may stay on the device for good, raw or encoded."""
        return list(range(self.geometry.layers)) if self.device_frames.share else self.hot.homed

    def hot_room(self, layer: int) -> int:
        """Pages of a layer that may still come to stay on the device."""
        encoded = self.device_frames.share > 0
        return self.device_frames.free(layer) if encoded else self.hot.homes_free(layer)

    def is_hot(self, blocks: Blocks, layers: int | slice = EVERY) -> npt.NDArray[np.bool_]:
        """Say which pages are on the device, raw or encoded: ``[*blocks]`` of one layer, or
        ``[*blocks, layers]``."""
        raw = self.directory.hot[blocks, layers] != NOWHERE
        return raw | self.warm.on_device(self.directory.warm[blocks, layers])

    def home_addresses(self, blocks: Blocks, layer: int) -> Frames:
        """Return where encoded pages begin in memory, ``[n]``; 0 for those without a home."""
        frames = self.directory.warm[blocks, layer]
        settled = (frames != NOWHERE) & (frames < self.warm.inbound_start)
        addresses = np.zeros(len(blocks), dtype=np.int64)
        addresses[settled] = self.warm.addresses(frames[settled])
        return addresses

    @property
    def stored_codec(self) -> str:
        """How pages are stored on disk, as far as another store could not read them."""
        packed = "+zstd" if isinstance(self.cold, PackedStore) else ""
        return identity(self.format.codec) + packed

    def report(self) -> dict[str, Any]:
        """Return counters and the state of the tiers as plain JSON types."""
        page, frame, cold = self.geometry.page_bytes, self.format.frame_bytes, self.cold
        raw, encoded = self.hot.pages, self.device_frames.used
        rows = {
            "hot": (raw + encoded, raw * page + encoded * frame, self.gpu_budget),
            "warm": (self.warm.pages, self.warm.pages * frame, self.cpu_budget),
            "cold": (0, 0, 0)
            if cold is None
            else (len(cold), len(cold) * cold.frame_bytes, cold.disk_budget),
        }
        tiers = {
            name: {"pages": pages, "bytes": size, "budget_bytes": budget}
            for name, (pages, size, budget) in rows.items()
        }
        report = {"tiers": tiers, **self.stats.as_dict()}
        if isinstance(self.cold, PackedStore | UnpackedStore):
            report["packing"] = self.cold.report()
        if self.selective is not None and (self.selective.spec.slots or self.selective.spec.skips):
            report["selective"] = self.selective.report()
        return report

    def close(self) -> None:
        """Wait for all copies and give back memory, threads and the store."""
        self.transfer.close()
        self.hot.close()
        free([self.device_frames.memory])
        if self.selective is not None:
            self.selective.close()
        self.warm.close()
        if self.cold is not None:
            self.cold.close()
