"""The kernels of codecs, each beside the ceiling of the slower side.

Regime: pages of one layer of one sequence, 8 KV heads x 128, bf16, 32 tokens a page. `decode` and
`fetch` read encoded pages from pinned host memory in random order, `encode` writes them there:
their ceiling is the copy engine on one large block in that direction, counting encoded bytes.
`on device` rows have frames in GPU memory, as exact decoding has (the copy engine brings encoded
frames, the kernel lays them out for attention): their ceiling is a device-to-device copy, read plus
written, counting encoded and decoded bytes. `raw` is the gather kernel that only copies. Results
are compared with the reference first. Times are medians over replays of a CUDA graph, by events.
The last line of stdout is one JSON object.

    python benchmarks/codec_kernels.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import torch
from decode_kernel import copy_bandwidth, time_calls
from select_kernels import Row, link_bandwidth

from tierkv.codecs import CODECS, encoded_bytes
from tierkv.kernels import codec as kernels
from tierkv.kernels import gather
from tierkv.kernels.build import available
from tierkv.kernels.decode import PagedKV
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena
from tierkv.tiers.frame_format import FrameFormat

GEOMETRY = Geometry(1, 8, 128, 128, torch.bfloat16)
NAMES = [name for name in CODECS if name != "raw"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pages", type=int, default=2048)
    parser.add_argument("--budget", type=int, default=128, help="head-pages fetched per KV head")
    parser.add_argument("--blocks", type=int, nargs="+", default=[24, 48, 96])
    parser.add_argument("--codecs", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--replays", type=int, default=9)
    arguments = parser.parse_args()
    if not available():
        raise SystemExit(f"the kernels cannot run here: {available().reason}")
    device = torch.device("cuda", torch.cuda.current_device())
    large = torch.empty(512 << 20, dtype=torch.uint8, pin_memory=True).random_()
    there = torch.empty(large.shape, dtype=torch.uint8, device=device)
    ceilings = {
        "to device": link_bandwidth(there, large, arguments.replays),
        "to host": link_bandwidth(large, there, arguments.replays),
        "memory": copy_bandwidth(device, arguments.replays),
    }
    del there, large
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(", ".join(f"{name} {value / 1e9:.1f} GB/s" for name, value in ceilings.items()), "\n")
    print(f"{'codec':>13} {'kernel':>8} {'':>24} {'us':>9} {'GB/s':>7} {'ceiling':>8} {'share':>6}")
    rows = []
    for name in ["raw", *arguments.codecs]:
        for kernel, what, moved, bound, calls in every_row(name, arguments, device):
            seconds = time_calls(calls, arguments.replays)
            row = {"codec": name, "kernel": kernel, "what": what, "us": seconds * 1e6}
            row |= {"bytes": moved, "bytes_per_s": moved / seconds, "ceiling": ceilings[bound]}
            row["share"] = row["bytes_per_s"] / row["ceiling"]
            speeds = (row["bytes_per_s"] / 1e9, row["ceiling"] / 1e9)
            line = f"{name:>13} {kernel:>8} {what:>24} {row['us']:>9.1f}"
            print(f"{line} {speeds[0]:>7.1f} {speeds[1]:>8.1f} {row['share']:>6.1%}")
            rows.append(row)
    print(json.dumps({"machine": torch.cuda.get_device_name(), "ceilings": ceilings, "rows": rows}))


def every_row(name: str, arguments: Any, device: torch.device) -> Iterator[Row]:
    codec, count = CODECS[name], arguments.pages
    layout = FrameFormat(GEOMETRY, codec)
    size, budget = encoded_bytes(codec, GEOMETRY), arguments.budget
    torch.manual_seed(0)
    shape = (8, count, 32, 128)
    k, v = (torch.randn(shape, device=device).to(GEOMETRY.dtype) for _ in range(2))
    near = torch.zeros(count, layout.frame_bytes, dtype=torch.uint8, device=device)
    layout.write(k, v, near)
    host = torch.zeros(near.shape, dtype=torch.uint8, pin_memory=True).copy_(near)
    addresses = host.data_ptr() + layout.frame_bytes * torch.randperm(count, device=device)
    arena = Arena.allocate(GEOMETRY, count, device)[0]
    pages = PagedKV(arena.k_frames, arena.v_frames)
    work = gather.Fetches.allocate(8, budget, device)
    for head in range(8):
        work.pages[head] = torch.randperm(count, device=device)[:budget]
        work.frames[head] = torch.randperm(count, device=device)[:budget]
    work.counts.fill_(budget)
    fetched = budget * size
    form = codec.layout(GEOMETRY)
    if form is None:
        for blocks in arguments.blocks:
            what = f"{blocks} blocks"
            up = gather.prepare(addresses, pages, blocks=blocks)
            yield "decode", what, count * size, "to device", [up.run]
            down = gather.prepare(addresses, pages, to_host=True, blocks=blocks)
            yield "encode", what, count * size, "to host", [down.run]
            fetch = gather.prepare_fetch(addresses, work, pages, blocks=blocks)
            yield "fetch", what, fetched, "to device", [fetch.run]
        return
    check(layout, host, arena)
    for blocks in arguments.blocks:
        what = f"{blocks} blocks"
        up = kernels.prepare_decode(form, addresses, pages, blocks=blocks)
        yield "decode", what, count * size, "to device", [up.run]
        down = kernels.prepare_encode(form, k, v, addresses, blocks=blocks)
        yield "encode", what, count * size, "to host", [down.run]
        fetch = kernels.prepare_fetch(form, addresses, work, pages, blocks=blocks)
        yield "fetch", what, fetched, "to device", [fetch.run]
    both = count * (size + GEOMETRY.page_bytes)
    up = kernels.prepare_decode(form, near, pages)
    yield "decode", "on device", both, "memory", [up.run]
    down = kernels.prepare_encode(form, k, v, near)
    yield "encode", "on device", both, "memory", [down.run]


def check(layout: FrameFormat, host: torch.Tensor, arena: Arena) -> None:
    """Compare a few pages with the reference, which runs on the host."""
    few = host[:16]
    layout.read(few.to(arena.k.device), arena, 0)
    for found, want in zip((arena.k_frames, arena.v_frames), layout.pages(few), strict=True):
        if not torch.equal(found[:, :16].cpu(), want):
            raise SystemExit(f"{layout.codec.name}: the kernel's pages are not the reference's")


if __name__ == "__main__":
    main()
