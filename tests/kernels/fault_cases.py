"""Checks of `tierkv.kernels.fault`, for the emulator and for a GPU."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from tierkv.kernels import fault, select
from tierkv.kernels.fault import FORESEEN, PARTS, THREADS, Mailbox

LAYERS, LAYER, PATIENCE = 3, 1, 1.0
BEATS = 24
"""Beats in `PATIENCE`: a thread that beats in time does so on a machine that is busy, too."""


class Case:
    """A choice of some KV heads, of which some pages are in no host frame."""

    def __init__(self, seed: int, device: torch.device):
        chance = np.random.default_rng(seed)
        self.heads, self.budget = int(chance.integers(1, 4)), int(chance.integers(1, 40))
        sequences = self.heads if seed % 2 else 1
        self.capacity = int(chance.integers(64, 3 * THREADS * PARTS))
        self.first, self.recent = int(chance.integers(0, 5)), int(chance.integers(0, 5))
        self.stop = int(chance.integers(60, self.capacity + 1))
        candidates = np.arange(self.first, self.stop)
        shape = (self.heads, self.capacity + 3)
        mass = chance.random(shape).astype(np.float32) ** 8 + np.float32(1e-6)
        self.chosen = np.full(self.heads, min(self.budget, len(candidates)))
        self.chosen[0] -= seed % 2
        self.selected = np.full((self.heads, self.budget), -1)
        for head, count in enumerate(self.chosen):
            taken = np.sort(chance.permutation(candidates)[:count])
            self.selected[head, :count] = taken
            mass[head, taken] += 0.5
        self.addresses = np.where(chance.random(sequences * self.capacity) < 0.4, 0, 64)
        self.base = np.arange(self.heads) * sequences // self.heads * self.capacity
        self.where = np.where(chance.random((self.heads, self.capacity)) < 0.2, 5, -1)
        rows = zip(self.base, self.selected, strict=True)
        pages = [base + row[row >= 0] for base, row in rows]
        self.missing = [row[self.addresses[row] == 0] for row in pages]
        self.mass = mass
        self.box = Mailbox.allocate(
            LAYERS, len(self.addresses), self.heads, self.budget, device
        )  # fmt: skip
        self.plan = select.Plan.allocate(self.heads, self.budget, device)
        self.plan.selected.copy_(torch.from_numpy(self.selected))
        self.plan.chosen.copy_(torch.from_numpy(self.chosen))
        for head, pages in enumerate(self.missing):
            self.plan.missing[head, : len(pages)] = torch.from_numpy(pages)
            self.plan.missing_counts[head] = len(pages)
        self.table = torch.from_numpy(self.addresses).to(device)
        self.inputs = {
            "mass": torch.from_numpy(mass).to(device),
            "where": torch.from_numpy(self.where.astype(np.int32)).to(device),
            "sealed": torch.tensor([self.stop + self.recent], dtype=torch.int32, device=device),
            "step": torch.tensor([75], dtype=torch.int32, device=device),
        }

    def run(self, turn: int = 0, share: float = 0.3) -> None:
        fault.prepare(
            self.box, LAYER, turn, self.plan, self.table, first=self.first, recent=self.recent,
            share=share, patience=PATIENCE, **self.inputs,
        ).run()  # fmt: skip
        if self.table.is_cuda:
            torch.cuda.synchronize()


def answer(case: Case, rest: int, *, refuses: bool = False, lasts: float = 0.0) -> threading.Thread:
    """Answer one question with addresses that follow from the pages.

    lasts: how long it takes, with beats, in patiences of the kernel.
    """

    def work() -> None:
        while (question := case.box.question()) is None:
            time.sleep(1e-4)
        until = time.monotonic() + lasts * PATIENCE
        while time.monotonic() < until:
            time.sleep(PATIENCE / BEATS)
            case.box.beat()
        wanted = np.concatenate(case.missing)
        assert (question.layer, question.pages.tolist()) == (LAYER, wanted.tolist())
        if refuses:
            case.box.refuse(question)
        else:
            case.box.answer(question, 1000 * question.pages + question.round, rest)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def check_notes(seed: int, device: torch.device) -> None:
    """What is nearly chosen, and when each page was chosen last; nothing is missing."""
    case, share = Case(seed, device), 0.3 if seed % 3 else 1e-3
    case.plan.missing_counts.zero_()
    case.inputs["step"].fill_(74)
    case.run(share=share)
    assert not len(case.box.take_foreseen()[0]), "not the turn of this layer"
    case.inputs["step"].fill_(75)
    case.run(share=share)
    layers, pages = case.box.take_foreseen()
    assert (layers == LAYER).all() and not case.box.foreseen[:, :, 0].any()
    wanted: set[int] = set()
    rows: dict[int, set[int]] = {}
    for head in range(case.heads):
        count = case.chosen[head]
        least = case.mass[head, case.selected[head, :count]].min(initial=np.inf)
        page = np.arange(case.first, case.stop)
        near = (case.addresses[case.base[head] + page] == 0) & (case.where[head, page] < 0)
        near &= case.mass[head, page] >= np.float32(share) * least
        for part in range(PARTS):
            mine = case.base[head] + page[near & ((page - case.first) // THREADS % PARTS == part)]
            rows[head * PARTS + part] = set(mine.tolist())
            wanted |= rows[head * PARTS + part]
    assert len(pages) == sum(min(len(row), FORESEEN) for row in rows.values())
    assert set(pages.tolist()) <= wanted
    last = np.zeros((LAYERS, len(case.addresses)), dtype=np.int32)
    for base, row in zip(case.base, case.selected, strict=True):
        last[LAYER, base + row[row >= 0]] = 75
    np.testing.assert_array_equal(case.box.last_chosen.cpu().numpy(), last)
    np.testing.assert_array_equal(case.table.cpu().numpy(), case.addresses)


def check_questions(seed: int, device: torch.device) -> None:
    """A question and its answer, a second round while some are left, and none when none is.

    Of four seeds one is answered late.
    """
    case = Case(seed, device)
    if not any(map(len, case.missing)):
        return
    for turn, rest in ((0, 5), (1, 0)):
        thread = answer(case, rest, lasts=1.3 if seed % 4 == turn == 1 else 0.0)
        case.run(turn)
        thread.join()
        want = case.addresses.copy()
        for pages in case.missing:
            want[pages] = 1000 * pages + turn
        np.testing.assert_array_equal(case.table.cpu().numpy(), want)
    case.run(2)
    assert case.box.question() is None and not case.box.failed


def check_failures(seed: int, device: torch.device) -> None:
    """Refused, or not answered by anybody, the kernel ends and asks no more until the reset."""
    case = Case(seed, device)
    if not any(map(len, case.missing)):
        return
    for refuses in (True, False):
        if refuses:
            thread = answer(case, 0, refuses=True)
            case.run()
            thread.join()
        else:
            start = time.monotonic()
            case.run()
            assert PATIENCE <= time.monotonic() - start < 20 * PATIENCE
        assert case.box.failed
        asked = int(case.box.words[fault.ASKED])
        case.run()
        assert int(case.box.words[fault.ASKED]) == asked
        np.testing.assert_array_equal(case.table.cpu().numpy(), case.addresses)
        case.box.reset()
        assert not case.box.failed and case.box.question() is None
