"""How a budget is divided: staging buffers first, then an equal share for every layer."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.errors import HotBudgetError, WarmBudgetError
from tierkv.page import Geometry
from tierkv.paging.selective import Selective
from tierkv.units import format_bytes

STAGING_BUFFERS = 2
"""Blocks under way to the compute device: one being read, one being filled."""
MAX_STAGING_BYTES = 64 << 20
"""Bytes per staging buffer beyond which larger copies gain nothing."""
EVEN_STAGING_PAGES = 128
"""Larger staging buffers hold a multiple of this. Attention over a past of few, even sizes is
faster: prefill of 128K tokens took 12.3 s with 384 pages and 12.9 s with 454 (H200)."""
MAX_TRANSIT_BYTES = 256 << 20
"""Warm bytes per direction set aside for pages on their way from or to disk."""
GUEST_SHARE = 8
"""One of so many warm frames is for copies of pages on disk that are chosen."""
RAW_SHARE, RAW_FRAMES = 16, 8
"""Where hot pages are encoded, one of `RAW_SHARE` bytes for pages is for raw frames, so that tails
of batches find room. So many frames a layer are raw at least, if they take no more than half."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Frames per tier that follow from the budgets.

    Attributes:
        hot_frames: raw frames of each layer on the compute device.
        staging_pages: pages one staging buffer holds.
        staging_bytes: device bytes of all staging memory.
        warm_homes, warm_inbound, warm_outbound, warm_guests: warm frames by use.
        device_frames: frames of encoded pages of each layer on the compute device.
    """

    hot_frames: int
    staging_pages: int
    staging_bytes: int
    warm_homes: int
    warm_inbound: int
    warm_outbound: int
    warm_guests: int = 0
    device_frames: int = 0

    @classmethod
    def choose(
        cls,
        geometry: Geometry,
        *,
        gpu_budget: int,
        cpu_budget: int,
        has_cold: bool,
        cuda: bool,
        frame_bytes: int | None = None,
        selective: Selective | None = None,
        raw_pages: int | None = None,
    ) -> Placement:
        """Divide the budgets.

        What selective attention needs comes first; the layers that stay exact share the rest.

        Staging takes at most an eighth of `gpu_budget`. With a cold tier, a quarter of the warm
        frames (at most `MAX_TRANSIT_BYTES` each way) are for pages in transit; and where layers
        select on a GPU and wait for pages on disk, an eighth is for copies of those chosen lately.

        frame_bytes: bytes of a warm frame; by default those of a raw page.
        raw_pages: where hot pages are encoded, those of a layer that one sequence needs raw.

        Raises:
            HotBudgetError: `gpu_budget` holds not even one frame a layer and one staging page.
            WarmBudgetError: `cpu_budget` holds too few frames to pass pages to and from disk.
        """
        page, frame_bytes = geometry.page_bytes, frame_bytes or geometry.frame_bytes
        moved = min(page, frame_bytes)  # of a page, encoded or not
        staging = _staging_pages(geometry, moved, gpu_budget, cuda)
        total = staging_bytes(staging, page, moved, cuda)
        selecting = _selecting(geometry, selective)
        fixed = selecting * selective.state_bytes(geometry) if selective is not None else 0
        dense = geometry.layers - selecting
        rest = gpu_budget - total - fixed
        hot = rest // (page * dense) if dense else min(rest + 1, 1)
        if selective is not None and hot < (selective.sequences if dense else 1):
            each, count = selecting * selective.sequence_bytes(geometry), selective.sequences
            short = page * dense * count - rest
            fit = max(gpu_budget - total, 0) // (each + page * dense)
            raise HotBudgetError(
                f"gpu_budget is {format_bytes(gpu_budget)}; selective attention takes "
                f"{format_bytes(each)} a sequence for {selecting} layers (reuse cache of "
                f"{selective.slots} pages, summaries of {selective.max_pages} pages), and staging "
                f"memory {format_bytes(total)}: of max_batch {count} sequences {fit} fit (raise "
                f"gpu_budget by {format_bytes(max(short, 1))}, or lower token_budget or "
                f"max_context{', or max_batch' if fit else ''})"
            )
        if selective is not None and selecting:  # an exact layer never has more pages than that
            hot = min(hot, selective.sequences * (selective.max_pages + 1))
        if hot < 1:
            need = page * geometry.layers + total
            raise HotBudgetError(
                f"gpu_budget is {format_bytes(gpu_budget)}; {geometry.layers} layers need a tail "
                f"page of {format_bytes(page)} each and {format_bytes(total)} for staging: at "
                f"least {format_bytes(need)} (raise gpu_budget or lower page_tokens)"
            )
        encoded = 0
        if raw_pages is not None:
            raw = min(hot, max(raw_pages, hot // RAW_SHARE, min(RAW_FRAMES, hot // 2)))
            encoded = (rest - raw * page * dense) // (frame_bytes * dense)
            hot = raw if encoded else hot
        warm = cpu_budget // frame_bytes
        if not has_cold:
            return cls(hot, staging, total, warm, 0, 0, device_frames=encoded)
        if warm < 3:
            raise WarmBudgetError(
                f"cpu_budget is {format_bytes(cpu_budget)}; passing pages to and from the store "
                f"needs at least {format_bytes(3 * frame_bytes)} (raise cpu_budget)"
            )
        transit = max(1, min(warm // 8, MAX_TRANSIT_BYTES // frame_bytes))
        staging = min(staging, transit)
        total = staging_bytes(staging, page, moved, cuda)
        waits = selecting and selective is not None and selective.slots and not selective.skips
        guests = warm // GUEST_SHARE if waits else 0
        homes = warm - 2 * transit - guests
        return cls(hot, staging, total, homes, transit, transit, guests, encoded)

    def hot_bytes(self, geometry: Geometry, frame_bytes: int = 0) -> int:
        """Device bytes this placement takes. frame_bytes: of an encoded page."""
        layer = self.hot_frames * geometry.page_bytes + self.device_frames * frame_bytes
        return layer * geometry.layers + self.staging_bytes


def budget_for_tails(geometry: Geometry, frames: int) -> int:
    """Return a `gpu_budget` that leaves so many raw frames a layer where hot pages are encoded."""
    share = 2 if frames <= RAW_FRAMES else RAW_SHARE
    rest = share * frames * geometry.page_bytes * geometry.layers
    return rest + rest // 7 + 8 * geometry.page_bytes  # staging: an eighth of all, or one page


def _selecting(geometry: Geometry, selective: Selective | None) -> int:
    return 0 if selective is None else sum(map(selective.selects, range(geometry.layers)))


def _staging_pages(geometry: Geometry, moved: int, gpu_budget: int, cuda: bool) -> int:
    """Return the pages of a staging buffer. moved: bytes that cross the link for a page."""
    page = geometry.page_bytes
    most = min(gpu_budget // 8, gpu_budget - geometry.layers * page)
    staging = max(most // (staging_bytes(2, page, moved, cuda) // 2), 1)
    staging = max(min(staging, MAX_STAGING_BYTES // moved), 1)
    while staging > 1 and staging_bytes(staging, page, moved, cuda) > most:
        staging -= 1
    if staging > EVEN_STAGING_PAGES:
        staging -= staging % EVEN_STAGING_PAGES
    return staging


def staging_bytes(staging_pages: int, page: int, moved: int, cuda: bool) -> int:
    """Return the bytes of all staging memory for staging buffers of so many pages each.

    Buffers of pages on the way up, as they cross the link (`moved` bytes each), and half of one,
    of whole pages, for what batches gather. On CUDA also the arena that staged frames are laid out
    in, and two buffers of half the size for pages on their way down.
    """
    half = -(-staging_pages // 2)
    if cuda:
        return STAGING_BUFFERS * (staging_pages + half) * moved + (staging_pages + half) * page
    return (STAGING_BUFFERS * staging_pages + half) * page
