"""Choose the pages that a layer's attention reads, and plan the frames they are read from.

For one layer, all on the device: `tierkv.selection.choose` is the oracle of the choice. A plan is
followed by the copies it asks for and by attention over the frames it names:

    score.prepare(...).run()
    select.prepare(scores.mass, addresses, cache, plan, ...).run()
    gather.prepare_fetch(addresses, plan.fetches, pages).run()
    decode.prepare(..., table=plan.table[None], tokens=plan.tokens[None], ...).run()

Several sequences of equal length are one with all their KV heads, those of the first one first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tierkv.kernels.build import Launch, kernel, shared_memory
from tierkv.kernels.gather import Fetches
from tierkv.kernels.score import check_sealed
from tierkv.units import round_up

THREADS = 1024
LIST_PAGES = 8
"""Room for the candidates that can be chosen, in budgets; most lists are shorter than two."""
STATIC_SHARED_BYTES = 17 << 10
"""At least the shared memory that ``cuda/select.cu`` takes for itself."""


@dataclass(frozen=True, slots=True, eq=False)
class ReuseCache:
    """Which head-pages lie in the frames that a layer keeps for chosen pages.

    Slot s of every KV head is frame ``first_frame + s``, of a later sequence `sequence_frames`
    further on. A page may also have a frame that is no slot: the caller has put it there, and it
    stays until the caller takes it away.

    Attributes:
        where: ``[kv_heads, capacity]`` int32, frame of each page, or -1.
        held: ``[kv_heads, slots]`` int32, page in each slot, or -1.
        stamp: ``[kv_heads, slots]`` int32, step at which that page was last chosen; 0 or more.
        first_frame: frame of slot 0.
        sequence_frames: frames from one sequence to the next.
    """

    where: torch.Tensor
    held: torch.Tensor
    stamp: torch.Tensor
    first_frame: int = 0
    sequence_frames: int = 0

    def __post_init__(self) -> None:
        shape = self.held.shape
        if len(shape) != 2 or self.stamp.shape != shape or self.where.shape[:-1] != shape[:1]:
            raise ValueError(
                f"where {tuple(self.where.shape)}, held {tuple(shape)}, "
                f"stamp {tuple(self.stamp.shape)} are no reuse cache"
            )
        for tensor in (self.where, self.held, self.stamp):
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"a reuse cache is contiguous int32, got {tensor.dtype}")

    @classmethod
    def allocate(
        cls, kv_heads: int, capacity: int, slots: int, device: torch.device, first_frame: int = 0
    ) -> ReuseCache:
        """Return an empty reuse cache."""
        where = torch.full((kv_heads, capacity), -1, dtype=torch.int32, device=device)
        held = torch.full((kv_heads, slots), -1, dtype=torch.int32, device=device)
        return cls(where, held, torch.zeros_like(held), first_frame)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is chosen and where it is read from; one allocation serves all layers.

    Attributes:
        selected: ``[kv_heads, budget]`` int32, chosen pages in ascending order, then -1.
        chosen: ``[kv_heads]`` int32, how many were chosen.
        table: ``[kv_heads, table_offset + budget + 1]`` int32, frames to attend to; the plan fills
            those from `table_offset` on, those before are the caller's. One that lies behind the
            chosen ones may end it.
        table_offset: see `table`.
        counts: ``[kv_heads]`` int32, chosen ones among them; less than `chosen` by the missing.
        tokens: ``[kv_heads]`` int32, ``(table_offset + counts) * page_tokens``, and those of the
            frame that ends the table.
        fetches: chosen pages that have to be copied into their frames first.
        missing: ``[kv_heads, budget]`` int32, chosen pages that are in no host frame. They are not
            in `table`: the caller waits for them and plans again, or goes without them. If the
            plan waits, they are in `table` and among the fetches.
        missing_counts: ``[kv_heads]`` int32.
        stats: ``[kv_heads, 4]`` int64, chosen pages so far that were hits, misses and missing, and
            of the hits those that an earlier plan of the same step had chosen.
    """

    selected: torch.Tensor
    chosen: torch.Tensor
    table: torch.Tensor
    table_offset: int
    counts: torch.Tensor
    tokens: torch.Tensor
    fetches: Fetches
    missing: torch.Tensor
    missing_counts: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def allocate(
        cls, kv_heads: int, budget: int, device: torch.device, table_offset: int = 0
    ) -> Plan:
        """Return room for `budget` chosen pages per KV head, behind `table_offset` others."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            selected=zeros(kv_heads, budget),
            chosen=zeros(kv_heads),
            table=zeros(kv_heads, table_offset + budget + 1),
            table_offset=table_offset,
            counts=zeros(kv_heads),
            tokens=zeros(kv_heads),
            fetches=Fetches.allocate(kv_heads, budget, device),
            missing=zeros(kv_heads, budget),
            missing_counts=zeros(kv_heads),
            stats=zeros(kv_heads, 4, dtype=torch.int64),
        )


def prepare(
    mass: torch.Tensor,
    addresses: torch.Tensor,
    cache: ReuseCache,
    plan: Plan,
    *,
    sealed: torch.Tensor,
    first: int,
    recent: int,
    step: torch.Tensor,
    page_tokens: int,
    mass_target: float | None = None,
    last_frame: int = 0,
    last_tokens: torch.Tensor | None = None,
    waits: bool = False,
) -> Launch:
    """Check the arguments of a choice and compile its kernel. ``cuda/select.cu`` has the rules.

    Candidates are pages `first` up to ``min(sealed - recent, capacity)``. Those of largest mass are
    chosen, at most the plan's budget; of equal ones those of lower index; never one of mass 0.

    Args:
        mass: ``[kv_heads, pages]`` float32, from `score`, rows of whole 16 bytes; sums to 1 at most
            if `mass_target`.
        addresses: ``[sequences * capacity]`` int64, host address of each page, 0 if it is in no
            host frame. Pages to fetch and missing ones are numbered as here.
        cache: at least as many slots as the plan's budget; updated.
        plan: receives the result.
        sealed: ``[1]`` int32 on the device: number of sealed pages.
        first: candidates begin here, after the sinks.
        recent: last sealed pages that are no candidates.
        step: ``[1]`` int32 on the device, 0 or more; the later step has the larger number.
        page_tokens: tokens per page.
        mass_target: stop at the fewest pages that hold this share of the candidates' mass, above 0
            up to 1; mass counts in units of 2^-31. None: fill the budget.
        last_frame: ends the table, behind the chosen frames, if `last_tokens` is given; of a later
            sequence, one of the following.
        last_tokens: ``[1]`` int32 on the device: tokens to see in `last_frame`.
        waits: plan missing pages as fetches too; their addresses will be there by then.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    kv_heads, capacity = cache.where.shape
    slots, budget = cache.held.shape[1], plan.selected.shape[1]
    device = mass.device
    if mass.ndim != 2 or mass.shape[0] != kv_heads or mass.shape[1] < capacity:
        raise ValueError(f"mass must be [{kv_heads}, {capacity} or more], got {tuple(mass.shape)}")
    if mass.dtype != torch.float32 or not mass.is_contiguous():
        raise ValueError(f"mass must be contiguous float32, got {mass.dtype} {mass.stride()}")
    if mass.shape[1] % 4 or mass.data_ptr() % 16:
        raise ValueError(f"rows of mass must be whole 16 bytes, got {mass.shape[1]} pages")
    sequences = max(addresses.numel() // max(capacity, 1), 1)
    if addresses.shape != (sequences * capacity,) or addresses.dtype != torch.int64:
        raise ValueError(f"addresses must be [{capacity}] int64, got {tuple(addresses.shape)}")
    if kv_heads % sequences:
        raise ValueError(f"{kv_heads} KV heads of {sequences} sequences")
    if plan.selected.shape[0] != kv_heads or not 1 <= budget <= slots:
        raise ValueError(
            f"a plan for {plan.selected.shape[0]} KV heads and {budget} pages; "
            f"the reuse cache has {kv_heads} and {slots} slots"
        )
    check_sealed(sealed, first, recent)
    if step.shape != (1,) or step.dtype != torch.int32:
        raise ValueError(f"step must be [1] int32, got {tuple(step.shape)} {step.dtype}")
    if last_tokens is not None and (last_tokens.shape != (1,) or last_tokens.dtype != torch.int32):
        raise ValueError(
            f"last_tokens must be [1] int32, got {tuple(last_tokens.shape)} {last_tokens.dtype}"
        )
    if mass_target is not None and not 0 < mass_target <= 1:
        raise ValueError(f"mass_target must be above 0 and at most 1, got {mass_target}")
    outputs = (
        plan.selected, plan.chosen, plan.table, plan.counts, plan.tokens, plan.fetches.pages,
        plan.fetches.frames, plan.fetches.counts, plan.missing, plan.missing_counts, plan.stats,
    )  # fmt: skip
    inputs = (mass, addresses, cache.where, cache.held, cache.stamp, sealed, step, last_tokens)
    held = (*inputs, *outputs)
    for tensor in held:
        if tensor is None:
            continue
        if tensor.device != device or not tensor.is_contiguous():
            raise ValueError(f"all must be contiguous and on {device}, one is on {tensor.device}")

    fixed = slots + 3 * budget + 2 * -(-capacity // 32)  # words of shared memory
    room = (shared_memory(device)[0] - STATIC_SHARED_BYTES) // 4 - fixed
    listed = min(max(LIST_PAGES * budget, THREADS), capacity)
    if budget > THREADS or 2 * listed > room:
        listed = 0
    cached = min(round_up(capacity, 4), (room - 2 * listed) // 4 * 4)
    if room < 0:
        raise ValueError(f"{slots} slots and a budget of {budget} pages exceed shared memory")
    shared = 4 * (fixed + 2 * listed + cached)
    compiled = kernel("select", "choose_pages", (("THREADS", THREADS),), device, THREADS, shared)
    share = 0 if mass_target is None else -(-int(mass_target * (1 << 52)) // (1 << 20))
    arguments = (
        np.int64(mass.data_ptr()),
        np.int32(mass.shape[1]),
        np.int32(capacity),
        np.int64(sealed.data_ptr()),
        np.int32(first),
        np.int32(recent),
        np.int32(cached),
        np.int32(listed),
        np.int32(budget),
        np.int64(max(share, 0 if mass_target is None else 1)),
        np.int64(addresses.data_ptr()),
        *(np.int64(tensor.data_ptr()) for tensor in (cache.where, cache.held, cache.stamp)),
        np.int32(slots),
        np.int32(cache.first_frame),
        np.int64(step.data_ptr()),
        *(np.int64(tensor.data_ptr()) for tensor in outputs[:3]),
        np.int32(plan.table.shape[1]),
        np.int32(plan.table_offset),
        np.int32(page_tokens),
        np.int64(0 if last_tokens is None else last_tokens.data_ptr()),
        np.int32(last_frame),
        *(np.int64(tensor.data_ptr()) for tensor in outputs[3:]),
        np.int32(waits),
        np.int32(kv_heads // sequences),
        np.int32(cache.sequence_frames),
    )
    return Launch(compiled, (kv_heads, 1, 1), arguments, held)
