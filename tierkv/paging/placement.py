"""How a budget is divided: staging buffers first, then an equal share for every layer."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.errors import HotBudgetError, WarmBudgetError
from tierkv.page import Geometry
from tierkv.units import format_bytes

STAGING_BUFFERS = 2
"""Blocks under way to the compute device: one being read, one being filled."""
MAX_STAGING_BYTES = 64 << 20
"""Bytes per staging buffer beyond which larger copies gain nothing."""
MAX_TRANSIT_BYTES = 256 << 20
"""Warm bytes per direction set aside for pages on their way from or to disk."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Frames per tier that follow from the budgets.

    Attributes:
        hot_frames: frames of each layer on the compute device.
        staging_pages: pages one staging buffer holds.
        staging_copies: page-sized buffers per staging page (staging, raw copies, workspace).
        warm_homes, warm_inbound, warm_outbound: warm frames by use.
    """

    hot_frames: int
    staging_pages: int
    staging_copies: int
    warm_homes: int
    warm_inbound: int
    warm_outbound: int

    @classmethod
    def choose(
        cls, geometry: Geometry, *, gpu_budget: int, cpu_budget: int, has_cold: bool, cuda: bool
    ) -> Placement:
        """Divide the budgets.

        Staging takes at most an eighth of `gpu_budget`. With a cold tier, a quarter of the warm
        frames (at most `MAX_TRANSIT_BYTES` each way) are for pages in transit.

        Raises:
            HotBudgetError: `gpu_budget` holds not even one frame a layer and one staging page.
            WarmBudgetError: `cpu_budget` holds too few frames to pass pages to and from disk.
        """
        page = geometry.page_bytes
        # Staging buffers and the workspace that batches gather into; on CUDA also buffers for
        # outbound copies and the arena that staged frames are laid out in.
        copies = STAGING_BUFFERS + 1 + (STAGING_BUFFERS + 1 if cuda else 0)
        staging = min(gpu_budget // 8, copies * MAX_STAGING_BYTES) // (copies * page)
        staging = max(min(staging, (gpu_budget // page - geometry.layers) // copies), 1)
        hot = (gpu_budget - staging * copies * page) // (page * geometry.layers)
        if hot < 1:
            need = page * (geometry.layers + copies)
            raise HotBudgetError(
                f"gpu_budget is {format_bytes(gpu_budget)}; {geometry.layers} layers need a tail "
                f"page each and {copies} staging pages of {format_bytes(page)}: at least "
                f"{format_bytes(need)} (raise gpu_budget or lower page_tokens)"
            )
        warm = cpu_budget // geometry.frame_bytes
        if not has_cold:
            return cls(hot, staging, copies, warm, 0, 0)
        if warm < 3:
            raise WarmBudgetError(
                f"cpu_budget is {format_bytes(cpu_budget)}; passing pages to and from the store "
                f"needs at least {format_bytes(3 * geometry.frame_bytes)} (raise cpu_budget)"
            )
        transit = max(1, min(warm // 8, MAX_TRANSIT_BYTES // geometry.frame_bytes))
        return cls(hot, min(staging, transit), copies, warm - 2 * transit, transit, transit)

    def hot_bytes(self, geometry: Geometry) -> int:
        """Device bytes this placement takes."""
        pages = self.hot_frames * geometry.layers + self.staging_pages * self.staging_copies
        return pages * geometry.page_bytes
