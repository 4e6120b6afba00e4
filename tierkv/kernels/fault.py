"""Page faults of a running kernel: pages on disk that it waits for without leaving the GPU.

Between `select` (with ``waits=True``) and the fetch, a kernel puts the missing pages of a choice
into a mailbox in pinned host memory and waits there until a thread of the host has brought them
and written their addresses. It also tells which pages are nearly chosen, so that they can be
brought before they are. ``cuda/fault.cu`` has the protocol; both sides are here, the thread is in
`tierkv.paging.faults`.

    select.prepare(..., waits=True).run()
    for each round:
        fault.prepare(mailbox, layer, round, ...).run()
        gather.prepare_fetch(addresses, plan.fetches, pages).run()
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tierkv.kernels.build import Launch, kernel
from tierkv.kernels.score import check_sealed
from tierkv.kernels.select import Plan

THREADS = 256
PARTS, FORESEEN, EVERY = 8, 15, 4
"""As in ``cuda/fault.cu``: blocks for a KV head's candidates, pages that each reports at most, and
steps from one report of a layer to the next."""
BEAT, ANSWERED, REFUSED, REST = range(4)
ASKED, LAYER, ROUND, COUNT, GAVE_UP = range(32, 37)
MOST_BEATS = 1 << 31
"""Beats are counted modulo this."""
WORDS = 64
"""Words of a mailbox: those that the host writes, then those that the kernel writes."""
FAILED, STATE_WORDS = 1, 3
"""Word of the state that says that a question was not answered, and how many words there are."""

Addresses = npt.NDArray[np.int64]


class Question(NamedTuple):
    """What a kernel asks for.

    Attributes:
        layer: index of a layer, as given to `prepare`.
        round: 0, or for the part of the same pages that did not fit before.
        pages: ``[n]``, numbered as the addresses; one may be named by several KV heads.
    """

    number: int
    layer: int
    round: int
    pages: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Mailbox:
    """Memory that kernels and the host talk through; one serves all layers.

    Attributes:
        words: ``[WORDS]`` int32, pinned.
        pages: ``[entries]`` int32, pinned, those asked for.
        addresses: ``[entries]`` int64, pinned, the answer.
        foreseen: ``[layers, kv_heads * PARTS, 1 + FORESEEN]`` int32, pinned: how many pages are
            nearly chosen, and which.
        state: ``[STATE_WORDS]`` int32 on the device.
        last_chosen: ``[layers, pages]`` int32 on the device, step that last chose each page, as
            far as reported.
    """

    words: torch.Tensor
    pages: torch.Tensor
    addresses: torch.Tensor
    foreseen: torch.Tensor
    state: torch.Tensor
    last_chosen: torch.Tensor
    _order: threading.Lock

    @classmethod
    def allocate(
        cls, layers: int, num_pages: int, kv_heads: int, budget: int, device: torch.device
    ) -> Mailbox:
        """Return an empty mailbox for choices of up to `budget` pages per KV head."""

        def host(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

        return cls(
            words=host(WORDS),
            pages=host(kv_heads * budget),
            addresses=host(kv_heads * budget, dtype=torch.int64),
            foreseen=host(layers, kv_heads * PARTS, 1 + FORESEEN),
            state=torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
            last_chosen=torch.zeros((layers, num_pages), dtype=torch.int32, device=device),
            _order=threading.Lock(),
        )

    def question(self) -> Question | None:
        """Return what is asked and not answered yet."""
        words = self.words.numpy()
        number = int(words[ASKED])
        if number == int(words[ANSWERED]):
            return None
        with self._order:  # a fence: what follows is read after the number
            layer, turn, count = (int(words[at]) for at in (LAYER, ROUND, COUNT))
            pages = self.pages.numpy()[:count].astype(np.int64)
        return Question(number, layer, turn, pages)

    def answer(self, question: Question, addresses: Addresses, rest: int) -> None:
        """Give the address of each page asked for, 0 for none; `rest` pages are still to come."""
        words = self.words.numpy()
        with self._order:
            self.addresses.numpy()[: len(addresses)] = addresses
            words[REST], words[REFUSED] = rest, 0
        words[ANSWERED] = question.number

    def refuse(self, question: Question) -> None:
        """Say that the pages will not come; the step has failed."""
        words = self.words.numpy()
        with self._order:
            words[REFUSED] = 1
        words[ANSWERED] = question.number

    def beat(self) -> None:
        """Show that the thread that answers is alive."""
        words = self.words.numpy()
        words[BEAT] = (int(words[BEAT]) + 1) % MOST_BEATS  # there is one every 20 us

    @property
    def failed(self) -> bool:
        """Whether a question of the steps since `reset` was refused or given up."""
        words = self.words.numpy()
        return bool(words[REFUSED] or words[GAVE_UP])

    def reset(self) -> None:
        """Let steps ask again. No kernel that asks is running."""
        words = self.words.numpy()
        words[REFUSED] = words[GAVE_UP] = 0
        words[ANSWERED] = words[ASKED]
        self.state[FAILED] = 0

    def when_chosen(self, pages: Addresses) -> Addresses:
        """Return the step that last chose each page, ``[n]``, as far as reported; 0 for none.

        pages: ``[n]``, of all layers: ``layer * pages + page``.
        """
        index = torch.from_numpy(pages).to(self.last_chosen.device)
        return self.last_chosen.view(-1)[index].cpu().numpy().astype(np.int64)

    def take_foreseen(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return layers and pages, ``[n]`` each, that were nearly chosen, and forget them.

        A step may be running; what it reports meanwhile may be lost, or come with pages reported
        before instead.
        """
        rows = self.foreseen.numpy().copy()
        layers, parts = np.nonzero(rows[:, :, 0])
        self.foreseen.numpy()[layers, parts, 0] = 0
        told = rows[layers, parts]
        there = np.arange(FORESEEN) < told[:, :1]
        return np.repeat(layers, there.sum(1)), told[:, 1:][there].astype(np.int64)


def prepare(
    mailbox: Mailbox,
    layer: int,
    turn: int,
    plan: Plan,
    addresses: torch.Tensor,
    *,
    mass: torch.Tensor,
    where: torch.Tensor,
    sealed: torch.Tensor,
    first: int,
    recent: int,
    step: torch.Tensor,
    share: float,
    patience: float,
) -> Launch:
    """Check the arguments of a wait for missing pages and compile its kernel.

    Args:
        mailbox: made for as many KV heads, pages a head and layers, or more.
        layer: below the mailbox's layers; the thread that answers reads it.
        turn: the round, counted from 0.
        plan: made by `select` with ``waits=True``.
        addresses: ``[sequences * capacity]`` int64, of the layer; receives the answer.
        mass, sealed, first, recent, step: as given to `select.prepare`.
        where: ``[kv_heads, capacity]`` int32, of the layer's reuse cache.
        share: of the least chosen mass, from which a page counts as nearly chosen; above 0.
        patience: seconds without a beat of the host after which the step fails.

    Raises:
        ValueError: an argument does not fit; says which and how.
        KernelsUnavailableError: the kernel cannot be compiled here.
    """
    kv_heads, budget = plan.missing.shape
    capacity = where.shape[-1]
    sequences = max(len(addresses) // max(capacity, 1), 1)
    if len(mailbox.pages) < kv_heads * budget:
        raise ValueError(f"a mailbox of {len(mailbox.pages)} pages for {kv_heads} x {budget}")
    fits = mailbox.foreseen.shape[1] >= kv_heads * PARTS and layer < len(mailbox.foreseen)
    fits &= mailbox.last_chosen.shape[1] >= len(addresses) == sequences * capacity
    if not fits or where.shape != (kv_heads, capacity) or kv_heads % sequences:
        raise ValueError(
            f"a mailbox of {tuple(mailbox.foreseen.shape)} and {tuple(mailbox.last_chosen.shape)} "
            f"for layer {layer}, {kv_heads} KV heads and {capacity} pages"
        )
    if mass.shape[0] != kv_heads or mass.shape[1] < capacity or mass.dtype != torch.float32:
        raise ValueError(f"mass is {tuple(mass.shape)} {mass.dtype} for {capacity} pages")
    if not share > 0 or not patience > 0:
        raise ValueError(f"share and patience must be above 0, got {share} and {patience}")
    check_sealed(sealed, first, recent)
    device = mass.device
    held = (
        plan.missing, plan.missing_counts, addresses, mailbox.state, mailbox.words, mailbox.pages,
        mailbox.addresses, mass, sealed, plan.selected, plan.chosen, where, step,
        mailbox.last_chosen[layer], mailbox.foreseen[layer],
    )  # fmt: skip
    pointers = [np.int64(tensor.data_ptr()) for tensor in held]
    arguments = (
        np.int32(layer),
        np.int32(turn),
        *pointers[:2],
        np.int32(kv_heads),
        np.int32(budget),
        *pointers[2:7],
        np.int64(patience * 1e9),
        pointers[7],
        np.int32(mass.shape[1]),
        np.int32(capacity),
        pointers[8],
        np.int32(first),
        np.int32(recent),
        *pointers[9:13],
        np.float32(share),
        *pointers[13:],
        np.int32(kv_heads // sequences),
    )
    compiled = kernel("fault", "report_choice", (), device, THREADS)
    blocks = 1 + (kv_heads * PARTS if turn == 0 else 0)
    return Launch(compiled, (blocks, 1, 1), arguments, held)
