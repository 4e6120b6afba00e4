"""Random problems of page selection and their solution in plain Python, for CPU and GPU tests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch

from tests.kernels.gather_cases import Problem
from tierkv.attention import reference
from tierkv.codecs import RAW
from tierkv.kernels import decode, gather, score, select
from tierkv.kernels.merge import Partials, merge
from tierkv.page import Geometry
from tierkv.selection.base import LEAST
from tierkv.selection.cuboid import Cuboid
from tierkv.selection.cuboid8 import Cuboid8
from tierkv.selection.keys2 import Keys2
from tierkv.units import round_up

ABSENT = 1 << 20
"""What entries past a count hold in these tests."""


def int32(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


# Scores


def check_scores(
    seed: int, device: torch.device, dtype: torch.dtype, k_dim: int, group: int, parts: int
) -> None:
    """Score corners or means, and compare with float64."""
    rng = random.Random(seed)
    kv_heads, capacity, query = scoring(seed, rng, device, dtype, k_dim, group)
    summaries = torch.randn(kv_heads, capacity, parts, k_dim, device=device)
    summaries = summaries.sort(dim=2, descending=True).values.to(dtype)  # upper, lower
    q, kept = query.double().view(kv_heads, group, 1, k_dim), summaries[:, None].double()
    if parts == 2:
        want = (q.clamp_min(0) * kept[..., 0, :] + q.clamp_max(0) * kept[..., 1, :]).sum(-1)
    else:
        want = (q * kept[..., 0, :]).sum(-1)
    check_scoring(rng, query, summaries, k_dim**-0.5 * want, "score", 1e-4)


def check_byte_scores(
    seed: int, device: torch.device, dtype: torch.dtype, k_dim: int, group: int
) -> None:
    """Score pages by what `cuboid8` keeps, and compare with the selector's own scores."""
    rng = random.Random(seed)
    kv_heads, capacity, query = scoring(seed, rng, device, dtype, k_dim, group)
    keys = torch.randn(kv_heads, capacity, 16, k_dim, device=device)
    sizes = torch.randn(k_dim, device=device).mul(4).exp2()
    keys = sizes * (keys + torch.randn(k_dim, device=device))
    selector = Cuboid8()
    summaries = selector.summarize(keys.to(dtype))
    want = selector.scores(query[None], summaries[None], k_dim**-0.5)[0].double()
    size = float(want.abs().max())
    check_scoring(rng, query, summaries.contiguous(), want, "score_bytes", 1e-4 + 1e-6 * size)


def check_key_scores(
    seed: int, device: torch.device, dtype: torch.dtype, k_dim: int, group: int, page_tokens: int
) -> None:
    """Score pages by all their keys, and compare with the selector's own scores.

    Channels differ in scale and place, as those of real keys do; some keys are all the same. Sums
    of up to 16 times the products round to float32, so logits do not have all of its digits.
    """
    rng = random.Random(seed)
    kv_heads, capacity, query = scoring(seed, rng, device, dtype, k_dim, group)
    keys = torch.randn(kv_heads, capacity, page_tokens, k_dim, device=device)
    keys = (keys + 2 * torch.randn(k_dim, device=device)) * torch.rand(k_dim, device=device)
    keys[:, rng.randrange(capacity)] = keys[:, :1, 0]
    selector = Keys2(page_tokens)
    summaries = selector.summarize(keys.to(dtype))
    want = selector.scores(query[None], summaries[None], k_dim**-0.5)[0].double()
    check_scoring(rng, query, summaries.contiguous(), want, "score_keys", 3e-4)


def scoring(
    seed: int,
    rng: random.Random,
    device: torch.device,
    dtype: torch.dtype,
    k_dim: int,
    group: int,
) -> tuple[int, int, torch.Tensor]:
    """Return KV heads, pages and a query."""
    torch.manual_seed(seed)
    kv_heads = rng.randint(1, 3)
    query = (3 * torch.randn(kv_heads * group, k_dim, device=device)).to(dtype)
    return kv_heads, rng.choice([5, 70, 131]), query


def check_scoring(
    rng: random.Random,
    query: torch.Tensor,
    summaries: torch.Tensor,
    want: torch.Tensor,
    stem: str,
    atol: float,
) -> None:
    """Score random candidates, everything else NaN, twice with the same launch.

    want: ``[kv_heads, group, pages]`` float64, logits.
    """
    kv_heads, capacity, _, k_dim = summaries.shape
    device, group = query.device, len(query) // kv_heads
    scores = score.Scores.allocate(kv_heads, group, capacity, device)
    first, recent = rng.randint(0, 3), rng.randint(0, 3)
    poisoned, sealed = torch.full_like(summaries, float("nan")), int32(0, device)
    launch = score.prepare(
        query, poisoned, scores, sealed=sealed, first=first, recent=recent, scale=k_dim**-0.5,
        stem=stem,
    )  # fmt: skip
    for _ in range(2):
        last = rng.randint(0, capacity)
        sealed.fill_(last + recent)
        poisoned.fill_(float("nan"))
        poisoned[:, first:last] = summaries[:, first:last]
        for tensor in (scores.logits, scores.mass, scores.states):
            tensor.fill_(float("nan"))
        launch.run()
        seen = slice(first, max(first, last))
        got = scores.logits.view(kv_heads, group, -1)[..., seen].double()
        torch.testing.assert_close(got, want[..., seen], rtol=1e-5, atol=atol)
        mass = want[..., seen].softmax(-1).mean(1).clamp_min(LEAST)
        torch.testing.assert_close(scores.mass[:, seen].double(), mass, rtol=1e-3, atol=1e-9)


def check_hopeless_scores(device: torch.device) -> None:
    """A share that underflows counts a little; a page at -inf in every head has mass 0."""
    query, sealed = torch.ones(2, 16, device=device), int32(6, device)
    summaries = torch.zeros(1, 6, 1, 16, device=device)
    summaries[0, 1], summaries[0, 2, 0, 3], summaries[0, 5] = 1e3, -torch.inf, -1e3
    scores = score.Scores.allocate(1, 2, 6, device)
    score.prepare(query, summaries, scores, sealed=sealed, first=1, recent=0, scale=1.0).run()
    want = torch.tensor([1.0, 0.0, LEAST, LEAST, LEAST], device=device)
    torch.testing.assert_close(scores.mass[0, 1:6], want, rtol=1e-6, atol=0)
    summaries.fill_(-torch.inf)
    score.prepare(query, summaries, scores, sealed=sealed, first=1, recent=0, scale=1.0).run()
    assert bool((scores.mass[0, 1:6] == 0).all())


# Choice and plan


def choose(mass: list[float], budget: int, share: float | None) -> list[int]:
    """Choose by the rules of ``cuda/select.cu``."""
    positive = [i for i, value in enumerate(mass) if value > 0]  # which NaN is not
    order = sorted(positive, key=lambda i: -mass[i])
    if share is None:
        return sorted(order[:budget])
    units = [int(min(mass[i], 1.0) * 2**31) for i in order]
    target, reached, taken = max(1, -int(-int(share * 2**32) * sum(units) // 2**32)), 0, 0
    while taken < min(budget, len(order)) and reached < target:
        reached += units[taken]
        taken += 1
    return sorted(order[:taken])


@dataclass
class Head:
    """The reuse cache of one KV head, and what one step of it leads to."""

    where: dict[int, int]
    held: list[int]
    stamp: list[int]
    first_frame: int
    stats: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def plan(
        self, chosen: list[int], present: list[bool], step: int, waits: bool
    ) -> tuple[list[int], list[tuple[int, int]], list[int]]:
        """Return the frames to attend to, the fetches (page, frame), and the missing pages."""
        hits = [page for page in chosen if page in self.where]
        for page in hits:
            slot = self.where[page] - self.first_frame
            if 0 <= slot < len(self.held):
                self.stats[3] += self.stamp[slot] == step
                self.stamp[slot] = step
        missing = [page for page in chosen if page not in self.where and not present[page]]
        misses = [page for page in chosen if page not in self.where and (present[page] or waits)]
        free = [slot for slot, page in enumerate(self.held) if page not in hits]
        free.sort(key=lambda slot: (self.held[slot] >= 0, self.stamp[slot], slot))
        fetches = []
        for page, slot in zip(misses, sorted(free[: len(misses)]), strict=True):
            self.where.pop(self.held[slot], None)
            self.held[slot], self.stamp[slot] = page, step
            self.where[page] = self.first_frame + slot
            fetches.append((page, self.first_frame + slot))
        for i, pages in enumerate((hits, [page for page in misses if present[page]], missing)):
            self.stats[i] += len(pages)
        return [self.where[page] for page in chosen if page in self.where], fetches, missing


def random_mass(rng: random.Random, pages: int) -> list[float]:
    """Return masses with a sum of about 1: many scales, many ties, zeros, or all of these.

    Also few large ones among many ties, of which then only some are chosen.
    """
    kind = rng.randrange(6)
    scale = rng.choice([1, 30])
    values = [rng.random() ** scale for _ in range(pages)]
    if kind == 1:
        values = [1.0] * pages
    if kind == 2:
        values = [rng.choice([0.0, 1.0, 2.0, 3.0]) for _ in range(pages)]
    if kind == 3:
        values = [value if rng.random() < 0.5 else 0.0 for value in values]
    if kind == 4:
        values = [LEAST if rng.random() < 0.7 else value for value in values]
    if kind == 5:
        values = [rng.choice([2.0, 3.0]) if rng.random() < 0.03 else 1.0 for _ in values]
    total = sum(values) or 1.0
    mass = torch.tensor([value / total for value in values], dtype=torch.float32)
    if rng.random() < 0.2 and pages:
        mass[rng.randrange(pages)] = float("nan")
    return mass.tolist()


def check_plans(
    seed: int,
    device: torch.device,
    *,
    capacity: int = 150,
    budget: int | None = None,
    slots: int | None = None,
    steps: int = 5,
    replay: bool = False,
) -> None:
    """Plan several steps with one launch on a growing sequence; compare everything, each time."""
    rng = random.Random(seed)
    sequences, own_heads = rng.choice([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)])
    kv_heads = sequences * own_heads
    budget = budget or rng.choice([1, 7, 40])
    slots = slots or budget + rng.choice([0, 3, budget])
    first, recent, offset = rng.randint(0, 3), rng.randint(0, 3), rng.choice([0, 2])
    share = rng.choice([None, None, 0.3, 0.9, 1.0])
    cache = select.ReuseCache.allocate(kv_heads, capacity, slots, device, rng.choice([0, 11]))
    cache = replace(cache, sequence_frames=slots + capacity)
    plan = select.Plan.allocate(kv_heads, budget, device, offset)
    firsts = [
        cache.first_frame + index // own_heads * cache.sequence_frames for index in range(kv_heads)
    ]
    heads = [Head({}, [-1] * slots, [0] * slots, frame) for frame in firsts]
    placed = rng.sample(range(capacity), rng.choice([0, min(4, capacity)]))
    for page in placed:  # frames that the caller has filled and that are no slots
        for index, head in enumerate(heads):
            head.where[page] = firsts[index] + slots + page
            cache.where[index, page] = head.where[page]
    everywhere = [rng.random() < 0.9 for _ in range(sequences * capacity)]
    addresses = torch.tensor([64 * (page + 1) * here for page, here in enumerate(everywhere)])
    row = round_up(capacity, 4) + rng.choice([0, 4])
    mass = torch.full((kv_heads, row), float("nan"), device=device)
    sealed, step = int32(0, device), int32(0, device)
    last, waits = rng.choice([None, rng.randint(1, 16)]), rng.choice([False, True])
    launch = select.prepare(
        mass, addresses.to(device), cache, plan, sealed=sealed, first=first, recent=recent,
        step=step, page_tokens=16, mass_target=share, last_frame=5, waits=waits,
        last_tokens=None if last is None else int32(last, device),
    )  # fmt: skip
    run = launch.run
    if replay:
        launch.run()  # of no candidates: changes nothing
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch.run()
        run = graph.replay
    values: list[list[float]] = []
    for now in range(1, steps + 1):
        stop = rng.choice([0, first, capacity, *[rng.randint(first, capacity)] * 3])
        if now == 1 or rng.random() < 0.7:
            values = [random_mass(rng, capacity) for _ in heads]
        mass.fill_(1e9)
        mass[:, first:stop] = torch.tensor(values)[:, first:stop].to(device)
        sealed.fill_(stop + recent)
        number = now - (now > 1 and rng.random() < 0.4)  # perhaps that of the plan before
        step.fill_(number)
        for tensor in (plan.table, plan.missing, plan.fetches.pages, plan.fetches.frames):
            tensor.fill_(ABSENT)
        run()
        for index, head in enumerate(heads):
            chosen = [first + i for i in choose(values[index][first:stop], budget, share)]
            sequence = index // own_heads
            base = sequence * capacity
            present = everywhere[base : base + capacity]
            ending = [] if last is None else [5 + sequence]
            frames, fetches, missing = head.plan(chosen, present, number, waits)

            def rest(entries: list[int], filler: int = ABSENT, room: int = budget) -> list[int]:
                return [*entries, *[filler] * (room - len(entries))]

            got = {
                "selected": plan.selected, "chosen": plan.chosen, "table": plan.table,
                "counts": plan.counts, "tokens": plan.tokens, "pages": plan.fetches.pages,
                "frames": plan.fetches.frames, "fetches": plan.fetches.counts,
                "missing": plan.missing, "missing_counts": plan.missing_counts,
                "stats": plan.stats, "held": cache.held, "stamp": cache.stamp,
            }  # fmt: skip
            want = {
                "selected": rest(chosen, -1), "chosen": len(chosen),
                "table": [ABSENT] * offset + rest([*frames, *ending], room=budget + 1),
                "counts": len(frames), "tokens": 16 * (offset + len(frames)) + (last or 0),
                "pages": rest([base + f[0] for f in fetches]),
                "frames": rest([f[1] for f in fetches]), "fetches": len(fetches),
                "missing": rest([base + page for page in missing]), "missing_counts": len(missing),
                "stats": head.stats, "held": head.held, "stamp": head.stamp,
            }  # fmt: skip
            for name, tensor in got.items():
                assert tensor[index].tolist() == want[name], (name, seed, now, index)
            where = [head.where.get(page, -1) for page in range(capacity)]
            assert cache.where[index].tolist() == where, ("where", seed, now, index)


# All of it


def check_pipeline(
    device: torch.device, geometry: Geometry, *, pages: int, budget: int, steps: int, group: int = 4
) -> None:
    """Score, choose, fetch and attend; compare with attention over the chosen pages, masked."""
    problem = Problem(0, geometry, device, host_frames=pages)
    heads, size = geometry.kv_heads, geometry.page_tokens
    torch.manual_seed(0)
    k, v = RAW.decode(geometry, problem.host)
    for tensor in (k, v):
        tensor.copy_(torch.randn(tensor.shape))
    k, v = (tensor.to(device) for tensor in (k, v))  # [kv_heads, pages, page_tokens, dim]
    slots, first, recent = 2 * budget, 1, 1
    summaries = Cuboid().summarize(k).contiguous()
    scores = score.Scores.allocate(heads, group, pages, device)
    cache = select.ReuseCache.allocate(heads, pages, slots, device)
    plan = select.Plan.allocate(heads, budget, device)
    query = torch.empty(1, heads * group, geometry.k_dim, dtype=geometry.dtype, device=device)
    sealed, step = int32(pages, device), int32(0, device)
    candidates = {"sealed": sealed, "first": first, "recent": recent}
    frames = decode.PagedKV(
        *(
            torch.full((heads, slots, size, dim), float("nan"), device=device).to(geometry.dtype)
            for dim in (geometry.k_dim, geometry.v_dim)
        )
    )
    addresses = problem.address_of(list(range(pages)))
    partials = Partials.allocate(64, 1, heads * group, geometry.v_dim, device)
    scale, out = geometry.k_dim**-0.5, torch.empty_like(query[..., : geometry.v_dim])
    attention = decode.prepare(
        query, frames, partials, slot=0, tokens=plan.tokens[None], table=plan.table[None],
        scale=scale,
    )  # fmt: skip
    launches = [
        score.prepare(query[0], summaries, scores, scale=scale, **candidates),
        select.prepare(
            scores.mass, addresses, cache, plan, step=step, page_tokens=size, **candidates
        ),
        gather.prepare_fetch(addresses, plan.fetches, frames, blocks=4),
        attention,
    ]
    base = torch.randn(query.shape, device=device)
    for _ in range(steps):
        step += 1
        query.copy_(2 * base + torch.randn(query.shape, device=device))
        sealed.fill_(random.Random(int(step)).randint(pages // 2, pages))
        for launch in launches:
            launch.run()
        merge(partials, attention.next_slot, out)
        seen = torch.zeros(heads, pages, dtype=torch.bool, device=device)
        for head in range(heads):
            seen[head, plan.selected[head, : int(plan.chosen[head])].long()] = True
        exact = reference.attend(
            query.double().view(1, heads, group, -1), k.flatten(1, 2)[None].double(),
            v.flatten(1, 2)[None].double(), scale=scale,
            mask=seen.repeat_interleave(size, dim=1)[None, :, None],
        )  # fmt: skip
        want = exact.out.flatten(1, 2)
        error = float((out.double() - want).norm() / want.norm())
        assert error <= 6e-3, (error, int(step))
        assert plan.counts.tolist() == [budget] * heads
    assert int(plan.stats[:, 0].sum()) > 0
