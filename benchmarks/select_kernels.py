"""The kernels of selective attention and of prefill's merge, each beside its ceiling.

Regime: one layer of one sequence, head dim 128, bf16, 32 tokens a page; `--heads` has KV heads and
query heads of each, 8x4 for rows that do not say. `gather`, `scatter` and `fetch` move pages in
random order over the link; their ceiling is the copy engine on one large block, measured in the
same run, in the same direction. `score`, `weigh` and `fold` are bound by GPU memory; theirs is a
device-to-device copy, read plus written. `choose` (choice and plan in one launch) is bound by
latency: it has none. `layer` is what a selecting layer of a captured step launches beside the
model's own kernels, with every chosen page in its reuse cache: scores, choice, a fetch of nothing,
attention and merge. Each row is a CUDA graph of several calls over inputs that together exceed the
L2 cache; times are medians over replays, by CUDA events. The last line of stdout is one JSON
object.

    python benchmarks/select_kernels.py
    python benchmarks/select_kernels.py --only score weigh choose layer --heads 4x7 --pages 32768
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from decode_kernel import copy_bandwidth, time_calls

from tierkv.kernels import decode, fold, gather, score, select
from tierkv.kernels.build import available
from tierkv.kernels.decode import PagedKV
from tierkv.kernels.merge import Partials, merge
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena

BF16 = torch.bfloat16
ROTATE_BYTES = 256 << 20
"""Bytes that the inputs of one row should have together, several times the L2 cache."""
Row = tuple[str, str, int, str, list[Callable[[], Any]]]
"""Kernel, what it works on, bytes moved by a call, which ceiling, calls to time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--host-mib", type=int, default=512, help="pinned memory to move")
    parser.add_argument("--pages", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--budget", type=int, default=128, help="chosen pages per KV head")
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 24, 32])
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--heads", nargs="+", default=["8x4"], metavar="KVxGROUP")
    parser.add_argument("--only", nargs="+", metavar="KERNEL", help="rows of these kernels")
    arguments = parser.parse_args()
    if not available():
        raise SystemExit(f"the kernels cannot run here: {available().reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    host = torch.empty(arguments.host_mib << 20, dtype=torch.uint8, pin_memory=True).random_()
    there = torch.empty(host.shape, dtype=torch.uint8, device=device)
    ceilings = {
        "to device": link_bandwidth(there, host, arguments.replays),
        "to host": link_bandwidth(host, there, arguments.replays),
        "memory": copy_bandwidth(device, arguments.replays),
    }
    del there
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in ceilings.items()), "\n")
    print(f"{'kernel':>8} {'':>44} {'us':>9} {'GB/s':>7} {'ceiling':>8} {'share':>6}")
    rows = []
    for kernel, what, moved, bound, calls in every_row(arguments, host, device):
        if arguments.only and kernel not in arguments.only:
            continue
        seconds = time_calls(calls, arguments.replays)
        row = {"kernel": kernel, "what": what, "us": seconds * 1e6, "bytes": moved}
        line = f"{kernel:>8} {what:>44} {row['us']:>9.1f}"
        if bound:
            row["bytes_per_s"], row["ceiling"] = moved / seconds, ceilings[bound]
            row["share"] = row["bytes_per_s"] / row["ceiling"]
            line += f" {row['bytes_per_s'] / 1e9:>7.1f} {row['ceiling'] / 1e9:>8.1f}"
            line += f" {row['share']:>6.1%}"
        print(line)
        rows.append(row)
    print(json.dumps({"machine": torch.cuda.get_device_name(), "ceilings": ceilings, "rows": rows}))


def every_row(arguments: Any, host: torch.Tensor, device: torch.device) -> Iterator[Row]:
    yield from whole_pages(arguments, host, device)
    for heads in arguments.heads:
        kv_heads, group = map(int, heads.split("x"))
        for pages in arguments.pages:
            yield from selection(arguments, pages, kv_heads, group, device)
            yield layers(arguments, pages, kv_heads, group, device)
    yield from fetches(arguments, host, device)
    queries, heads = 8192, 32
    total = torch.randn(1, heads, queries, 128, device=device)
    part = torch.randn(1, queries, heads, 128, device=device).to(BF16).transpose(1, 2)
    lse = [torch.randn(1, heads, queries, device=device) for _ in range(2)]
    moved = 2 * nbytes(total) + nbytes(part) + 3 * nbytes(lse[0])
    launch = fold.prepare(total, lse[0], part, lse[1], total, lse[0])
    yield "fold", "8192 x 32 x 128, fp32 += bf16", moved, "memory", [launch.run] * 3


def whole_pages(arguments: Any, host: torch.Tensor, device: torch.device) -> Iterator[Row]:
    for kv_heads in (1, 4, 16):
        geometry = Geometry(1, kv_heads, 128, 128, BF16)
        count = host.numel() // geometry.frame_bytes
        addresses = host.data_ptr() + geometry.frame_bytes * torch.randperm(count, device=device)
        arena = Arena.allocate(geometry, count, device)[0]
        frames = PagedKV(arena.k_frames, arena.v_frames)
        slots = torch.randperm(count, device=device)
        moved = count * geometry.page_bytes
        for to_host in (False, True):
            for blocks in arguments.blocks:
                launch = gather.prepare(
                    addresses, frames, slots=slots, to_host=to_host, blocks=blocks
                )
                what = f"{count} x {geometry.page_bytes >> 10} KiB, {blocks} blocks"
                kernel, bound = ("scatter", "to host") if to_host else ("gather", "to device")
                yield kernel, what, moved, bound, [launch.run]


def selection(
    arguments: Any, pages: int, kv_heads: int, group: int, device: torch.device
) -> Iterator[Row]:
    query = torch.randn(kv_heads * group, 128, device=device).to(BF16)
    shape = f"{kv_heads}x{group}, {pages} pages"
    candidates = {
        "sealed": torch.tensor([pages], dtype=torch.int32, device=device), "first": 2, "recent": 2,
    }  # fmt: skip
    for stem, parts, what in (
        ("score", 2, "corners"), ("score_bytes", 1, "8 bits"), ("score_keys", 6, "keys at 2 bits")
    ):  # fmt: skip
        size = (kv_heads, pages, parts, 128)
        sets = -(-ROTATE_BYTES // (2 * math.prod(size))) + 1
        summaries = [torch.randn(size, device=device).to(BF16) for _ in range(sets)]
        scores = [score.Scores.allocate(kv_heads, group, pages, device) for _ in range(sets)]
        pairs = [
            score.prepare(query, one, room, scale=128**-0.5, stem=stem, **candidates)
            for one, room in zip(summaries, scores, strict=True)
        ]
        moved, what = nbytes(summaries[0]) + nbytes(scores[0].logits), f"{shape}, {what}"
        yield "score", what, moved, "memory", [pair.score.run for pair in pairs]
        yield "weigh", what, 0, "", [pair.weigh.run for pair in pairs]
        yield "both", what, moved, "memory", [pair.run for pair in pairs]

    budget = min(arguments.budget, pages // 4)
    addresses = torch.full((pages,), 16, dtype=torch.int64, device=device)
    step = torch.ones(1, dtype=torch.int32, device=device)
    mass = [torch.rand(kv_heads, pages, device=device) ** 8 for _ in range(8)]
    for target in (None, 0.5):
        cache = select.ReuseCache.allocate(kv_heads, pages, 2 * budget, device)
        plan = select.Plan.allocate(kv_heads, budget, device)
        launches = [
            select.prepare(
                one / one.sum(1, keepdim=True), addresses, cache, plan, step=step, page_tokens=32,
                mass_target=target, **candidates,
            )
            for one in mass
        ]  # fmt: skip
        what = f"{shape}, {budget} chosen" + (f", target {target}" if target else "")
        yield "choose", f"{what}, all hits", 0, "", [launches[0].run] * 8
        yield "choose", f"{what}, misses", 0, "", [launch.run for launch in launches]


def layers(arguments: Any, pages: int, kv_heads: int, group: int, device: torch.device) -> Row:
    budget, kept = min(arguments.budget, pages // 4), 4
    geometry, size = Geometry(1, kv_heads, 128, 128, BF16), (kv_heads, pages, 2, 128)
    query = torch.randn(1, kv_heads * group, 128, device=device).to(BF16)
    scores = score.Scores.allocate(kv_heads, group, pages, device)
    partials = Partials.allocate(64, 1, kv_heads * group, 128, device)
    plan, out = select.Plan.allocate(kv_heads, budget, device, kept), torch.empty_like(query)
    host = torch.zeros(geometry.frame_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    addresses = torch.full((pages,), host.data_ptr(), dtype=torch.int64, device=device)
    sealed = torch.tensor([pages], dtype=torch.int32, device=device)
    step, tail = torch.ones(2, 1, dtype=torch.int32, device=device)
    candidates = {"sealed": sealed, "first": 2, "recent": 2}
    where = {"table": plan.table[None], "tokens": plan.tokens[None], "max_splits": 64}
    scale, calls = 128**-0.5, []
    for _ in range(-(-ROTATE_BYTES // (2 * math.prod(size))) + 1):
        arena = Arena.allocate(geometry, kept + 2 * budget, device)[0]
        for tokens in (arena.k, arena.v):
            tokens.normal_()
        frames = PagedKV(arena.k_frames, arena.v_frames)
        cache = select.ReuseCache.allocate(kv_heads, pages, 2 * budget, device, kept)
        summaries = torch.randn(size, device=device).to(BF16)
        choice = select.prepare(
            scores.mass, addresses, cache, plan, step=step, page_tokens=32, last_tokens=tail,
            **candidates,
        )  # fmt: skip
        attend = decode.prepare(query, frames, partials, slot=0, scale=scale, **where)
        scoring = score.prepare(query[0], summaries, scores, scale=scale, **candidates)
        scoring.run()
        choice.run()  # from now on every chosen page has a frame
        fetch = gather.prepare_fetch(addresses, plan.fetches, frames)
        end = functools.partial(merge, partials, attend.next_slot, out)
        work = [scoring.run, choice.run, fetch.run, attend.run, end]
        calls.append(functools.partial(run_all, work, host))
    return "layer", f"{kv_heads}x{group}, {pages} pages, {budget} chosen, all hits", 0, "", calls


def run_all(calls: list[Callable[[], Any]], held: torch.Tensor) -> None:
    for call in calls:
        call()


def fetches(arguments: Any, host: torch.Tensor, device: torch.device) -> Iterator[Row]:
    geometry = Geometry(1, 8, 128, 128, BF16)
    count, budget = host.numel() // geometry.frame_bytes, arguments.budget
    addresses = host.data_ptr() + geometry.frame_bytes * torch.randperm(count, device=device)
    arena = Arena.allocate(geometry, 2 * budget, device)[0]
    frames = PagedKV(arena.k_frames, arena.v_frames)
    for each in (0, 1, max(1, budget // 20), budget):
        for blocks in arguments.blocks:
            work = gather.Fetches.allocate(8, budget, device)
            for head in range(8):
                work.pages[head] = torch.randperm(count, device=device)[:budget]
                work.frames[head] = torch.randperm(2 * budget, device=device)[:budget]
            work.counts.fill_(each)
            launch = gather.prepare_fetch(addresses, work, frames, blocks=blocks)
            moved = each * geometry.page_bytes
            what = f"8 x {each} x 16 KiB, {blocks} blocks"
            yield "fetch", what, moved, "to device" if each else "", [launch.run] * 8


def link_bandwidth(target: torch.Tensor, source: torch.Tensor, replays: int) -> float:
    """Return the copy engine's bytes per second, one large block, the median of `replays`."""
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return source.numel() / statistics.median(times)


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


if __name__ == "__main__":
    main()
