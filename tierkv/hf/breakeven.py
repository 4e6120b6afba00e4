"""Whether to read a saved context back or to compute it again: by what both took before.

Short contexts of a small model on a fast device are computed sooner than a slow disk gives them
back. The figures are measured on the way, and kept in the store for the next process. Without a
figure for either side, saved contexts are read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch

from tierkv.errors import BudgetError, ColdReadError
from tierkv.tiers.cold import ColdStore

META_PREFIX = "rates/1/"
"""With the version of what is stored under it."""
MIN_READ_BYTES = 8 << 20
"""Smaller reads say more about what every resume costs than about the disk."""
MARGIN = 0.8
"""Computing must take less than this share of reading: it also keeps the device busy."""
MIN_GAIN_SECONDS = 0.02


@dataclass(slots=True)
class Rates:
    """What computing and reading took on one device, for one model.

    Attributes:
        tokens, compute_seconds: the longest prompt that was prefilled from its first token on.
        num_bytes, read_seconds: the last context that was read back, `MIN_READ_BYTES` or more.
    """

    tokens: int = 0
    compute_seconds: float = 0.0
    num_bytes: int = 0
    read_seconds: float = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """Note a prefill."""
        if tokens >= self.tokens:
            self.tokens, self.compute_seconds = tokens, seconds

    def was_read(self, num_bytes: int, seconds: float) -> None:
        """Note a restore of which every page was read."""
        if num_bytes >= MIN_READ_BYTES:
            self.num_bytes, self.read_seconds = num_bytes, seconds

    def verdict(self, tokens: int, num_bytes: int) -> str | None:
        """Say why a context of that size should be computed, or return None: read it.

        Longer prompts take more time per token, so the longest one known bounds shorter ones from
        above, and nothing is said about longer ones.
        """
        if not self.num_bytes or not tokens or tokens > self.tokens:
            return None
        compute = self.compute_seconds * tokens / self.tokens
        read = self.read_seconds * num_bytes / self.num_bytes
        if compute > MARGIN * read or read - compute < MIN_GAIN_SECONDS:
            return None
        return f"computing {tokens} tokens takes {compute:.2f} s, reading them {read:.2f} s"


def load(store: ColdStore, root: bytes, device: torch.device, rates: Rates) -> None:
    """Fill in what a store knows from former processes and `rates` does not."""
    try:
        value = store.meta_get(_name(root, device))
    except ColdReadError:  # damaged, counted and dropped: as if there were none
        return
    if value is None:
        return
    former = Rates(**json.loads(value))
    if former.tokens > rates.tokens:
        rates.computed(former.tokens, former.compute_seconds)
    if not rates.num_bytes:
        rates.num_bytes, rates.read_seconds = former.num_bytes, former.read_seconds


def store(cold: ColdStore, root: bytes, device: torch.device, rates: Rates) -> None:
    """Keep `rates` in a store. A full one does without."""
    try:
        cold.meta_put(_name(root, device), json.dumps(asdict(rates)).encode())
    except BudgetError:
        return


def _name(root: bytes, device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{META_PREFIX}{name}/{root.hex()}"
