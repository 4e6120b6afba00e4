"""Decode attention over hot pages, beside the bandwidth of GPU memory.

Regime: one new token, 8 KV heads x 128, bf16, batch 1 by default; bound by reading K and V once.
The ceiling is a device-to-device copy measured in the same run, bytes read plus bytes written.
Rows: our kernel and its merge over one run of frames (`run`), over frames in random order
(`table`), over raw staged frames (`staged`), over encoded ones in random order (by the name of
their codec; their own bytes count), and torch's `scaled_dot_product_attention` with
`enable_gqa=True`. Each row is a CUDA graph of several calls over inputs that together exceed the
L2 cache many times; times are medians over replays, by CUDA events. The result is compared with
torch's before anything is timed. The last line of stdout is one JSON object.

    python benchmarks/decode_kernel.py --tokens 16384 131072 1048576
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tierkv.codecs import CODECS, RAW, encoded_bytes
from tierkv.kernels import codec, decode
from tierkv.kernels.build import available
from tierkv.kernels.encoded import EncodedKV
from tierkv.kernels.merge import Partials, merge
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROTATE_BYTES = 2 << 30
"""Bytes that the inputs of one row should have together, before they are encoded."""
ENCODED = ("int8", "int8-channel", "int4", "fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 131072, 1048576])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--v-dim", type=int, help="if it differs")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--page-tokens", type=int, default=32)
    parser.add_argument("--splits", type=int, nargs="+", help="also try these numbers of splits")
    parser.add_argument("--replays", type=int, default=15)
    arguments = parser.parse_args()
    if not available():
        raise SystemExit(f"the kernels cannot run here: {available().reason}")
    geometry = Geometry(
        1, arguments.kv_heads, arguments.head_dim, arguments.v_dim or arguments.head_dim,
        DTYPES[arguments.dtype], arguments.page_tokens,
    )  # fmt: skip
    device = torch.device("cuda", torch.cuda.current_device())
    ceiling = copy_bandwidth(device, arguments.replays)
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, {geometry}")
    print(f"device-to-device copy {ceiling / 1e9:.0f} GB/s\n")
    print(f"{'tokens':>9} {'kernel':>12} {'splits':>6} {'us':>9} {'GB/s':>7} {'of copy':>8}")
    rows = []
    for tokens in arguments.tokens:
        for row in measure(geometry, tokens, arguments, device):
            row["share"] = row["bytes_per_s"] / ceiling
            rows.append(row)
            print(
                f"{tokens:>9} {row['kernel']:>12} {row['splits'] or '':>6} {row['us']:>9.1f} "
                f"{row['bytes_per_s'] / 1e9:>7.0f} {row['share']:>8.1%}"
            )
    report = {
        "machine": name,
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "kv_heads": geometry.kv_heads,
        "group": arguments.group,
        "k_dim": geometry.k_dim,
        "v_dim": geometry.v_dim,
        "page_tokens": geometry.page_tokens,
        "copy_bytes_per_s": ceiling,
        "rows": rows,
    }
    print(json.dumps(report))


def measure(
    geometry: Geometry, tokens: int, arguments: Any, device: torch.device
) -> list[dict[str, Any]]:
    """Time every kernel at one context length; free the memory of one layout before the next."""
    group, heads = arguments.group, arguments.group * geometry.kv_heads
    pages, scale = tokens // geometry.page_tokens, geometry.k_dim**-0.5
    read = pages * geometry.page_bytes
    sets = max(2, -(-ROTATE_BYTES // read))
    query = torch.randn(1, heads, geometry.k_dim, device=device).to(geometry.dtype)
    out = torch.empty(1, heads, geometry.v_dim, dtype=geometry.dtype, device=device)
    rows: list[dict[str, Any]] = []

    def add(
        kernel: str, splits: int | None, calls: list[Callable[[], Any]], read: int = read
    ) -> None:
        seconds = time_calls(calls, arguments.replays)
        rows.append(
            {
                "tokens": pages * geometry.page_tokens,
                "kernel": kernel,
                "splits": splits,
                "us": seconds * 1e6,
                "bytes_per_s": read / seconds,
            }
        )

    def ours(stores: Sequence[decode.Pages], splits: int | None, **where: Any) -> tuple[int, list]:
        launches = []
        for store in stores:
            arguments = {"slot": 0, "tokens": pages * geometry.page_tokens, "scale": scale}
            launches.append(
                decode.prepare(query, store, partials, splits=splits, **arguments, **where)
            )

        def call(launch: decode.Launch) -> Callable[[], None]:
            def both() -> None:
                launch.run()
                merge(partials, launch.next_slot, out)

            return both

        return launches[0].next_slot, [call(launch) for launch in launches]

    arenas = Arena.allocate(geometry, pages, device, sets)
    for arena in arenas:
        arena.k.normal_()
        arena.v.normal_()
    stores = [decode.PagedKV(arena.k_frames, arena.v_frames) for arena in arenas]
    partials = Partials.allocate(4096, 1, heads, geometry.v_dim, device)
    splits, calls = ours(stores, None)
    calls[0]()
    k, v = arenas[0].span(0, pages * geometry.page_tokens)
    want = scaled_dot_product_attention(query[:, :, None], k, v, enable_gqa=group > 1)[:, :, 0]
    error = float((out.float() - want.float()).norm() / want.float().norm())
    if error > 1e-2:
        raise SystemExit(f"wrong result at {tokens} tokens: relative error {error:.2e}")
    add("run", splits, calls)
    for chosen in arguments.splits or []:
        splits, calls = ours(stores, chosen)
        add("run", splits, calls)
    table = torch.randperm(pages, device=device)[None]
    splits, calls = ours(stores, None, table=table)
    add("table", splits, calls)
    for name in ENCODED:
        frames = [encode(name, geometry, store) for store in stores]
        splits, calls = ours(frames, None, table=table)
        add(name, splits, calls, pages * encoded_bytes(CODECS[name], geometry))
        del frames
    spans = [arena.span(0, pages * geometry.page_tokens) for arena in arenas]
    add(
        "torch sdpa",
        None,
        [
            lambda k=k, v=v: scaled_dot_product_attention(
                query[:, :, None], k, v, enable_gqa=group > 1
            )
            for k, v in spans
        ],
    )
    del arenas, stores, calls, spans, k, v, want
    raws = [
        torch.empty(pages, geometry.frame_bytes, dtype=torch.uint8, device=device)
        for _ in range(sets)
    ]
    for raw in raws:
        raw.view(geometry.dtype).normal_()
    stores = [decode.PagedKV(*RAW.decode(geometry, raw)) for raw in raws]
    splits, calls = ours(stores, None)
    add("staged", splits, calls)
    return rows


def encode(name: str, geometry: Geometry, store: decode.PagedKV) -> EncodedKV:
    """Return raw frames as a codec encodes them."""
    layout, count = CODECS[name].layout(geometry), store.k.shape[1]
    if layout is None:
        raise ValueError(f"{name} pages are raw ones")
    size = -(-encoded_bytes(CODECS[name], geometry) // 512) * 512
    frames = torch.empty((count, size), dtype=torch.uint8, device=store.k.device)
    codec.prepare_encode(layout, store.k, store.v, frames).run()
    return EncodedKV(layout, geometry.kv_heads, frames)


def time_calls(calls: list[Callable[[], Any]], replays: int) -> float:
    """Return the median seconds of one call, over replays of a graph of all calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return statistics.median(times)


def copy_bandwidth(device: torch.device, replays: int) -> float:
    """Return bytes per second, read plus written, of copying 2 GiB within the device.

    Timed outside a graph: as graph nodes these copies gave 2.77 TB/s on an H200, less than our
    kernels read.
    """
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(1 + replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            target.copy_(source)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / 4)
    return 2 * source.numel() / statistics.median(times[1:])  # the first round warms up


if __name__ == "__main__":
    main()
