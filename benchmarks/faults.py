"""Pages awaited by captured steps: the host's path and the disk, without a GPU.

Regime: the sizes of qwen2.5-7b-1m at 1M tokens (26 selecting layers, 4 KV heads, 4,096 tokens each,
pages of 64 KiB), the choices of the recording (`tierkv/bench/locality.py`), the second half of the
context on disk, as far as it is ever chosen. A thread plays the GPU: every layer takes its share of
`--step-ms`; then it asks for what it misses and waits; every fourth step it tells what was nearly
chosen. The service, the store and its disk are the real ones. Ceiling: a step that never waits.
For every part of the recording: what a step took, how long of it was waited and for what. The last
line of stdout is one JSON object.

    python benchmarks/faults.py --store DIR
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from selective import RECORDED

from tierkv.bench.locality import Recording, Replay, replay
from tierkv.kernels import fault
from tierkv.paging.directory import NOWHERE
from tierkv.paging.faults import FaultService
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.direct_io import aligned_buffer
from tierkv.tiers.transfer import Transfer
from tierkv.tiers.warm import WarmTier

LAYERS, HEADS, BUDGET, PAGES, DENSE, FIRST = 26, 4, 128, 32768, 2, 2
BATCH = 512
"""Pages that are written at once."""
PARTS = (0, 16, 64, 128, 192, 256)
COUNTS = ("questions", "pages_awaited", "pages_ahead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--store", metavar="DIR", help="where to make one; removed at the end")
    parser.add_argument("--frame-bytes", type=int, default=64 << 10)
    parser.add_argument("--step-ms", type=float, default=9.4, help="a step that never waits")
    parser.add_argument("--steps", type=int, default=256, help="at most")
    parser.add_argument("--io-threads", type=int, default=8)
    a = parser.parse_args()
    made = replay(
        Recording.load(RECORDED), layers=LAYERS, kv_heads=HEADS, budget_pages=BUDGET, first=FIRST,
        stop=PAGES - FIRST, steps=a.steps,
    )  # fmt: skip
    directory = Path(tempfile.mkdtemp(prefix="tierkv-faults-", dir=a.store))
    try:
        with ColdStore(
            directory, frame_bytes=a.frame_bytes, disk_budget=1 << 40, free_floor=1 << 30
        ) as cold:
            rows, report = run(made, cold, a.step_ms / 1e3, a.io_threads)
    finally:
        shutil.rmtree(directory)
    print(f"{'steps':>9} {'ms/step':>8} {'p50':>7} {'p99':>7} {'waited':>7}", *COUNTS)
    parts = []
    for first, stop in itertools.pairwise(PARTS):
        part = rows[first:stop]
        if not len(part):
            break
        ms, waited = 1e3 * part[:, 0], 1e3 * float(part[:, 1].mean())
        counts = dict(zip(COUNTS, part[:, 2:].mean(0).tolist(), strict=True))
        parts.append({
            "first": first, "ms_mean": float(ms.mean()), "ms_p50": float(np.median(ms)),
            "ms_p99": float(np.quantile(ms, 0.99)), "ms_waited": waited,
        } | counts)  # fmt: skip
        print(f"{first:>4}-{first + len(part):<4} {ms.mean():>8.2f} {np.median(ms):>7.2f} "
              f"{np.quantile(ms, 0.99):>7.1f} {waited:>7.2f}",
              *(f"{count:>{len(name)}.1f}" for name, count in counts.items()))  # fmt: skip
    print(json.dumps({"benchmark": "faults", "settings": vars(a), "parts": parts} | report))


def run(made: Replay, cold: ColdStore, seconds: float, io_threads: int) -> tuple[Any, Any]:
    """Play all steps; return ``[steps, 2 + counts]``: seconds, those waited, and what was counted,
    and what the service reports."""
    on_disk = fill(made, cold)
    frames = int(on_disk.sum()) * 5 // 4 + BATCH  # so that none has to leave
    warm = WarmTier(cold.frame_bytes, 1, BATCH, 1, frames, pinned=False)
    for frame in range(warm.num_frames):
        warm.payload(frame)[::4096] = bytes(cold.frame_bytes // 4096)  # pinned memory is there
    pool = ThreadPoolExecutor(io_threads)
    transfer = SimpleNamespace(
        io_threads=io_threads, min_read_bytes=1, warm=warm, cold=cold, _io_pool=pool,
        wait_frames=lambda frames: None,
    )  # fmt: skip
    transfer._read = functools.partial(Transfer._read, transfer)
    transfer.read_cold = functools.partial(Transfer.read_cold, transfer)
    state = SimpleNamespace(
        spec=SimpleNamespace(max_pages=PAGES, dense_layers=DENSE), steps=0, device="cpu",
        addresses=torch.from_numpy((~on_disk).astype(np.int64)), forget_frames=lambda: None,
        owner=None,  # no home is lent
    )  # fmt: skip
    nowhere = np.full((PAGES, LAYERS + DENSE), NOWHERE)
    manager: Any = SimpleNamespace(
        warm=warm, cold=cold, transfer=transfer, selective=state,
        directory=SimpleNamespace(warm=nowhere, cold=np.pad(on_disk.T, ((0, 0), (DENSE, 0)))),
        sequences=SimpleNamespace(blocks=np.arange(PAGES)[None]),
        tiers=SimpleNamespace(changed=threading.Condition(), key=name),
        lookahead=SimpleNamespace(cancel=lambda: None),
        stats=SimpleNamespace(cold_to_warm_bytes=0, hot_to_warm_bytes=0, warm_to_hot_bytes=0),
    )  # fmt: skip
    mailbox = fault.Mailbox.allocate(LAYERS, PAGES, HEADS, BUDGET, torch.device("cpu"))
    service, device = FaultService(manager, mailbox), Device(made, mailbox, state.addresses.numpy())
    rows = []
    try:
        for step in range(len(made.chosen)):
            state.steps, before, start = step, service.report(), time.perf_counter()
            played = threading.Thread(target=device.play, args=(step, seconds))
            transfer.finish = played.join
            with service.serving(manager.sequences):
                played.start()
            took, after = time.perf_counter() - start, service.report()
            rows.append([took, device.waited, *(after[key] - before[key] for key in COUNTS)])
    finally:
        service.close()
        pool.shutdown()
    return np.array(rows), service.report()


def name(block: int, layer: int) -> bytes:
    """Return the name of a page in the store."""
    return b"benchmark%02d-%06d" % (layer, block)


def fill(made: Replay, cold: ColdStore) -> Any:
    """Write the pages that will be asked for; return which they are, ``[layers, pages]``."""
    on_disk = np.zeros((LAYERS, PAGES), dtype=bool)
    for layer in range(LAYERS):
        for part in (made.chosen, made.nearly):
            on_disk[layer, part[:, layer].ravel()] = True
    on_disk[:, : PAGES // 2] = False
    memory = aligned_buffer(BATCH * cold.frame_bytes)
    memory[:] = np.random.default_rng(0).bytes(len(memory))
    payloads = [
        memory[at : at + cold.frame_bytes] for at in range(0, len(memory), cold.frame_bytes)
    ]
    pages, layers = (index.tolist() for index in np.nonzero(on_disk.T))
    names = [name(page, layer + DENSE) for page, layer in zip(pages, layers, strict=True)]
    for at in range(0, len(names), BATCH):
        part = names[at : at + BATCH]
        cold.put(part, payloads[: len(part)])
    return on_disk


class Device:
    """What the kernels of a step do, by the clock.

    Attributes:
        waited: seconds of the last step for which it waited.
    """

    def __init__(self, made: Replay, mailbox: fault.Mailbox, addresses: Any):
        self._made, self._mailbox, self._addresses = made, mailbox, addresses
        self.waited, self._number = 0.0, 0

    def play(self, step: int, seconds: float) -> None:
        """Do a step that takes so long if it never waits."""
        table, self.waited, start = self._addresses.copy(), 0.0, time.perf_counter()
        for layer in range(LAYERS):
            chosen = self._made.chosen[step, layer]
            missing = np.unique(chosen[table[layer, chosen] == 0])
            if (step + layer) % fault.EVERY == 0:
                self._note(layer, self._made.nearly[step, layer], table[layer])
            if len(missing):
                asked = time.perf_counter()
                self._ask(layer, missing)
                self.waited += time.perf_counter() - asked
            until = start + self.waited + seconds * (layer + 1) / LAYERS
            time.sleep(max(until - time.perf_counter(), 0))

    def _note(self, layer: int, nearly: Any, addresses: Any) -> None:
        for head, pages in enumerate(nearly):
            away = pages[(pages >= FIRST) & (addresses[pages] == 0)]
            for part in range(fault.PARTS):
                told = away[away // fault.THREADS % fault.PARTS == part][: fault.FORESEEN]
                row = self._mailbox.foreseen.numpy()[layer, head * fault.PARTS + part]
                row[1 : 1 + len(told)] = told
                row[0] = len(told)

    def _ask(self, layer: int, pages: Any) -> None:
        words = self._mailbox.words.numpy()
        self._mailbox.pages.numpy()[: len(pages)] = pages
        words[[fault.LAYER, fault.ROUND, fault.COUNT]] = layer, 0, len(pages)
        self._number += 1
        words[fault.ASKED] = self._number
        while words[fault.ANSWERED] != self._number:
            time.sleep(2e-5)
        if words[fault.REFUSED]:
            raise SystemExit("the service could not bring a page")
        self._addresses[layer, pages] = self._mailbox.addresses.numpy()[: len(pages)]


if __name__ == "__main__":
    main()
