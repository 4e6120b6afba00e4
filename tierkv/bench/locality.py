"""The pages that a real model's heads chose, step by step, and the same locality at other sizes.

Random weights choose pages without any locality, so speed on them is the worst case. Here every
recorded page stands for a group of pages scattered over a longer context, and a group is chosen
whenever its page was: steps overlap as they did in the recording, and a reuse cache of so many
budgets hits and misses as it would have there. What does not carry over: a longer context has more
pages that could have been chosen, so its real locality may be lower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tierkv.attention import selective_gpu
from tierkv.paging.manager import PageManager

Chosen = npt.NDArray[np.bool_]
Pages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Consecutive decode steps of one model on one text.

    Attributes:
        chosen: ``[steps, layers, kv_heads, pages]``, what each KV head chose with its true query;
            `budget_pages` of them at each step.
        guessed: the same with the query guessed from the residual stream one layer ahead; in the
            first recorded layer as chosen.
        nearly: the same of pages that were not chosen, but nearly
            (`tierkv.attention.selective_gpu.NEARLY`).
        source: model, text, selector and sizes, for people.
    """

    chosen: Chosen
    guessed: Chosen
    nearly: Chosen
    source: str

    @property
    def budget_pages(self) -> int:
        """Pages that a KV head chooses at a step."""
        return int(self.chosen[0, 0, 0].sum())

    def save(self, file: Path) -> None:
        """Write it: what changes from step to step, packed and deflated."""
        file.parent.mkdir(parents=True, exist_ok=True)
        changes, nearly = self.chosen.copy(), self.nearly.copy()
        for part in (changes, nearly):
            part[1:] ^= part[:-1].copy()
        wrong = self.guessed ^ self.chosen
        np.savez_compressed(
            file, changes=np.packbits(changes, axis=-1), wrong=np.packbits(wrong, axis=-1),
            nearly=np.packbits(nearly, axis=-1), pages=self.chosen.shape[-1], source=self.source,
        )  # fmt: skip

    @classmethod
    def load(cls, file: Path) -> Recording:
        """Read what `save` wrote."""
        with np.load(file, allow_pickle=False) as data:
            pages = int(data["pages"])
            changes, wrong, nearly = (
                np.unpackbits(data[name], axis=-1, count=pages).astype(bool)
                for name in ("changes", "wrong", "nearly")
            )
            source = str(data["source"])
        chosen, nearly = (np.logical_xor.accumulate(part, axis=0) for part in (changes, nearly))
        return cls(chosen, chosen ^ wrong, nearly, source)


class Replay(NamedTuple):
    """Pages to choose, ``[steps, layers, kv_heads, budget_pages]`` each, all different.

    Attributes:
        chosen: by the true query.
        guessed: by the query guessed one layer ahead.
        nearly: ``[steps, layers, kv_heads, n]``, nearly chosen by the true query; in rows with
            fewer than n, then page ``first - 1``, which cannot be chosen (-1 if there is none).
    """

    chosen: Pages
    guessed: Pages
    nearly: Pages


def replay(
    recording: Recording,
    *,
    layers: int,
    kv_heads: int,
    budget_pages: int,
    first: int,
    stop: int,
    steps: int,
    seed: int = 0,
) -> Replay:
    """Return the recorded choices at other sizes.

    Layers are spread over the recorded ones, KV heads take turns with the recorded ones, and each
    has its pages at random places of its own. Steps beyond the recording run it backwards and
    forwards again, which overlaps from step to step as before.

    Args:
        budget_pages: pages per KV head, a multiple of the recorded ones.
        first, stop: pages ``first .. stop - 1`` can be chosen.

    Raises:
        ValueError: the budget is no multiple, or the pages do not suffice.
    """
    recorded, sources, heads, pages = recording.chosen.shape
    times, rest = divmod(budget_pages, recording.budget_pages)
    if rest or not times:
        raise ValueError(
            f"budget_pages must be a multiple of the {recording.budget_pages} recorded, "
            f"got {budget_pages}"
        )
    if stop - first < pages * times:
        raise ValueError(
            f"{pages} recorded pages stand for {pages * times}; only {stop - first} can be chosen"
        )
    chance = np.random.default_rng(seed)
    shape = (steps, layers, kv_heads, budget_pages)
    most = times * int(recording.nearly.sum(-1).max())
    result = Replay(
        np.empty(shape, np.int64), np.empty(shape, np.int64),
        np.full((*shape[:3], most), first - 1, np.int64),
    )  # fmt: skip
    there_and_back = np.r_[0:recorded, recorded - 2 : 0 : -1]
    order = np.resize(there_and_back, steps)
    for layer in range(layers):
        source = round(layer * (sources - 1) / max(layers - 1, 1))
        for head in range(kv_heads):
            places = chance.permutation(stop - first)[: pages * times].reshape(pages, times) + first
            for made, taken in zip(result[:2], (recording.chosen, recording.guessed), strict=True):
                which = np.nonzero(taken[:, source, (layer + head) % heads])[1]
                groups = places[which.reshape(recorded, -1)]
                made[:, layer, head] = groups.reshape(recorded, -1)[order]
            near = [
                places[row].reshape(-1)
                for row in recording.nearly[:, source, (layer + head) % heads]
            ]
            for step, at in enumerate(order.tolist()):
                result.nearly[step, layer, head, : len(near[at])] = near[at]
    return result


class Scoring(Protocol):
    """What scores a layer's pages; `tierkv.kernels.score.ScoreLaunch` is one."""

    def run(self) -> None:
        """Write the mass of every page."""


@dataclass(frozen=True, slots=True, eq=False)
class Overruled:
    """A scoring after which given pages have more mass than any can have by itself.

    The scoring still runs and takes its time; one small kernel comes on top. Can be captured.

    Attributes:
        scoring: writes `mass`.
        mass: ``[kv_heads, row]`` float32.
        pages: ``[kv_heads, n]`` int64, candidates; as many as are chosen, others after them.
        masses: ``[kv_heads, n]`` float32, what they get.
    """

    scoring: Scoring
    mass: torch.Tensor
    pages: torch.Tensor
    masses: torch.Tensor

    def run(self) -> None:
        """Score, then raise the given pages."""
        self.scoring.run()
        self.mass.scatter_(1, self.pages, self.masses)


class ReplayReader(selective_gpu.Reader):
    """Chooses what a player says."""

    def __init__(self, manager: PageManager, state: Any, query: torch.Tensor, player: Player):
        super().__init__(manager, state, query)
        self.player = player

    def _choosing(
        self, layer: int, query: Any, scores: Any, plan: Any, scale: float, faults: bool = False
    ) -> Any:
        choosing = super()._choosing(layer, query, scores, plan, scale, faults)
        overruled: Any = self.player.overrule(
            choosing.score, scores.mass, self.state.index(layer),
            guessed=plan is self.foreseen_plan,
        )  # fmt: skip
        return replace(choosing, score=overruled)


class Player:
    """A replay on the device: the pages of the present step, in memory that stays where it is.

    Args:
        nearly: whether nearly chosen pages follow the chosen ones, with half of their mass. Then
            page ``first - 1`` must exist.
    """

    def __init__(self, made: Replay, device: torch.device, *, nearly: bool = False):
        chosen, guessed = (torch.from_numpy(part) for part in made[:2])
        if nearly:
            chosen = torch.cat([chosen, torch.from_numpy(made.nearly)], dim=-1)
        self._tables = chosen.to(device), guessed.to(device)
        self._step, self._budget = 0, guessed.shape[-1]
        self._now = tuple(table[0].clone() for table in self._tables)

    def overrule(
        self, scoring: Scoring, mass: torch.Tensor, layer: int, *, guessed: bool = False
    ) -> Overruled:
        """Let a layer's scoring choose what the replay says, or what it says is guessed."""
        pages = self._now[int(guessed)][layer]
        masses = torch.ones(pages.shape, device=pages.device)
        masses[:, : self._budget] = 2.0
        return Overruled(scoring, mass, pages, masses)

    def advance(self) -> None:
        """Go to the next step, after the last one to the first; call it before every step."""
        for now, table in zip(self._now, self._tables, strict=True):
            now.copy_(table[self._step % len(table)])
        self._step += 1
