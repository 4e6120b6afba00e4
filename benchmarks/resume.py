"""Time to the first token of a question about a long document: recomputed, or out of each tier.

Regime: one sequence, random weights and tokens, everything fits the hot budget once it is up.
Every row answers a 16-token question behind the same document with one greedy token.

recompute  the document is prefilled
hot        its pages are in GPU memory: the prefix cache of the same process
warm       they are in pinned host memory, and come up first
cold       they are on disk, in a store opened anew, the page cache dropped: a saved context

Ceiling of the cold row: raw O_DIRECT reads of the same files, of as many bytes, by as many threads,
in calls of the same size right before each cold run and in large calls right after; the faster of
the two counts, and the median of the runs on both sides, because disks are noisy. Break-even is the
length from which reading from disk is faster than computing. Wrapping the model (taking GPU memory)
is not timed. The last line of stdout is one JSON object.

    python benchmarks/resume.py --shape llama-3.2-1b --tokens 128K --store DIR
    python benchmarks/resume.py --shape tiny --tokens 2K --store DIR        # a dry run on a CPU
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import tierkv
from tierkv.bench import memory
from tierkv.cli_bench import contexts
from tierkv.config import DTYPES, Config
from tierkv.hf import shapes
from tierkv.hf.geometry import model_geometry
from tierkv.tiers import disk_speed

QUESTION_TOKENS = 16
SHORT_TOKENS = 512
"""A document so short that bringing it back costs little but what every resume costs."""
SLACK_BYTES = 640 << 20
"""Beyond the pages: staging buffers on the device, pages in transit in host memory."""


def main() -> None:
    """Measure all rows; print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="llama-3.2-1b")
    parser.add_argument("--tokens", default="128K")
    parser.add_argument("--store", required=True, help="directory; what it holds is kept")
    parser.add_argument("--page-tokens", type=int, default=32)
    parser.add_argument("--io-threads", type=int, default=Config().io_threads)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each tier; median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=[d for d in DTYPES if d != "auto"])
    arguments = parser.parse_args()
    (tokens,) = contexts(arguments.tokens)
    run = Run(arguments, tokens)
    with run.wrap() as model:
        run.recompute(model)
        run.save(model)
        run.hot_and_warm(model)
        assert model.manager.cold is not None
        direct = model.manager.cold.direct_io
    run.cold(direct)
    run.print(direct)


class Run:
    """One document of one model, and what was measured."""

    def __init__(self, arguments: argparse.Namespace, tokens: int):
        self.arguments, self.tokens = arguments, tokens
        self.device = torch.device(arguments.device)
        dtype = getattr(torch, arguments.dtype)
        config = shapes.shape_config(arguments.shape)
        self.hf_model = shapes.random_model(config, self.device, dtype)
        geometry = model_geometry(config, dtype, arguments.page_tokens)
        assert geometry is not None
        self.geometry = geometry
        self.kv_bytes = tokens * geometry.token_bytes
        generator = torch.Generator().manual_seed(1)
        shape = (1, tokens + QUESTION_TOKENS)
        ids = torch.randint(3, config.vocab_size, shape, generator=generator).to(self.device)
        self.document, self.question, self.request = ids[:, :tokens], ids[:, tokens:], ids
        self.name = f"resume-{arguments.shape}-{tokens}"
        self.seconds: dict[str, list[float]] = {}
        self.opened: list[float] = []
        self.answers: dict[str, int] = {}
        self.curve: list[tuple[int, float]] = [(0, 0.0)]
        self.raw: list[tuple[float, float]] = []
        self.save_seconds = 0.0
        self.short: list[float] = []

    def wrap(self) -> tierkv.TieredModel:
        """Return the wrapped model with room for everything in every tier."""
        room = int(1.3 * self.kv_bytes) + SLACK_BYTES
        return tierkv.wrap(
            self.hf_model, gpu_budget=room, cpu_budget=room, disk_budget=4 * room,
            store=self.arguments.store, page_tokens=self.arguments.page_tokens,
            io_threads=self.arguments.io_threads, prefix_cache=True,
        )  # fmt: skip

    def ask(self, model: Any, row: str, **kwargs: Any) -> None:
        """Time one request through `generate`; its pages are idle afterwards."""
        cache = model.cache()
        start = time.perf_counter()
        output = model.generate(
            self.request, max_new_tokens=1, do_sample=False,
            **{model.cache_argument(): cache}, **kwargs,
        )  # fmt: skip
        self.answers[row] = int(output[0, -1])
        self.seconds.setdefault(row, []).append(time.perf_counter() - start)
        cache.close()

    def recompute(self, model: Any) -> None:
        """Prefill everything, noting how long each length took."""
        warmup = torch.flip(self.request, [1])[:, : SHORT_TOKENS + 8]
        model.generate(warmup, max_new_tokens=2, do_sample=False)
        start = time.perf_counter()

        def note(done: int, _total: int) -> None:
            memory.synchronize(self.device)
            self.curve.append((done, time.perf_counter() - start))

        self.ask(model, "recompute", on_prefill=note)
        assert model.stats()["prefix"]["reused_tokens"] == 0, "the document was known already"

    def save(self, model: Any) -> None:
        """Save the document, and a short one."""
        for name, ids in (
            (self.name, self.document),
            ("resume-short", self.document[:, :SHORT_TOKENS]),
        ):
            with model.open() as context:
                context.name = name
                context.append(ids)
                start = time.perf_counter()
                context.save()
                self.save_seconds = max(self.save_seconds, time.perf_counter() - start)

    def hot_and_warm(self, model: Any) -> None:
        """Ask again with all pages hot, then with all pages warm."""
        prefix, before = model.manager.prefix, model.stats()["prefix"]["reused_pages"]
        for row in ("hot", "warm"):
            for _ in range(self.arguments.repeats):
                if row == "warm":
                    prefix.leave_hot(prefix.tree.pages)
                self.ask(model, row)
        now = model.stats()["prefix"]["reused_pages"]
        pages = self.tokens // self.geometry.page_tokens * self.geometry.layers
        for row in ("hot", "warm"):
            assert now[row] - before[row] >= self.arguments.repeats * pages, f"not all was {row}"

    def measure_raw(self, frame_bytes: int, call_bytes: int, direct: bool) -> float:
        """Read the files that hold the document, as a resume does but for what is done with it."""
        paths = sorted((Path(self.arguments.store) / "extents").glob(f"{frame_bytes}-*.kv"))
        return disk_speed.read_bandwidth(
            paths, self.kv_bytes, direct=direct, threads=self.arguments.io_threads,
            call_bytes=call_bytes,
        )  # fmt: skip

    def cold(self, direct: bool) -> None:
        """Open the saved document in a store opened anew."""
        for _ in range(self.arguments.repeats):
            with self.wrap() as model:
                start = time.perf_counter()
                model.open("resume-short").close()
                self.short.append(time.perf_counter() - start)
            with self.wrap() as model:
                frame = model.manager.cold.frame_bytes
                pages = max(1, model.manager.placement.staging_pages // self.arguments.io_threads)
                raw = self.measure_raw(frame, pages * frame, direct)
                drop_page_cache(Path(self.arguments.store))
                start = time.perf_counter()
                context = model.open(self.name)
                memory.synchronize(self.device)
                self.opened.append(time.perf_counter() - start)
                context.append(self.question)
                output = context.generate(max_new_tokens=1, do_sample=False)
                self.answers["cold"] = int(output[0, -1])
                self.seconds.setdefault("cold", []).append(time.perf_counter() - start)
                assert model.stats()["prefill"]["tokens"] == QUESTION_TOKENS
                assert context.restored_tokens == self.tokens
            self.raw.append((raw, self.measure_raw(frame, disk_speed.CALL_BYTES, direct)))

    def break_even(self, overhead: float, rate: float) -> float | None:
        """Return from how many tokens on reading is faster than computing, or None if never."""
        gaps = [
            (done, spent - overhead - done * self.geometry.token_bytes / rate)
            for done, spent in self.curve
        ]
        for (low, below), (high, above) in itertools.pairwise(gaps):
            if above > 0:
                return low + (high - low) * below / (below - above)
        return None

    def print(self, direct: bool) -> None:
        """Print the table and the JSON line."""
        times = {row: statistics.median(seconds) for row, seconds in self.seconds.items()}
        rate = self.kv_bytes / statistics.median(self.opened)
        raw = statistics.median(max(pair) for pair in self.raw)
        overhead = statistics.median(self.short)
        length = self.break_even(overhead, rate)
        cuda = self.device.type == "cuda"
        threads = torch.get_num_threads()
        machine = torch.cuda.get_device_name() if cuda else f"CPU, {threads} threads"
        print(f"{machine}, torch {torch.__version__}; {self.arguments.shape}, "
              f"{self.tokens:,} tokens, {self.kv_bytes / 1e9:.2f} GB of KV")  # fmt: skip
        print(f"{'pages':>10} {'first token':>12} {'speed-up':>9}")
        for row, seconds in times.items():
            print(f"{row:>10} {seconds:10.3f} s {times['recompute'] / seconds:8.1f}x")
        how = "O_DIRECT" if direct else "buffered"
        print(f"reading back {rate / 1e9:.2f} GB/s, raw {how} {raw / 1e9:.2f} GB/s: "
              f"{rate / raw:.0%}; saving took {self.save_seconds:.2f} s; opening "
              f"{SHORT_TOKENS} tokens {1e3 * overhead:.1f} ms")  # fmt: skip
        print("break-even: " + ("recomputing is always faster" if length is None
                                else f"{length:,.0f} tokens"))  # fmt: skip
        same = len(set(self.answers.values())) == 1
        print(f"first tokens {'are the same' if same else f'differ: {self.answers}'}")
        report = {
            "machine": machine, "torch": torch.__version__, "settings": vars(self.arguments),
            "tokens": self.tokens, "kv_bytes": self.kv_bytes, "ttft_seconds": times,
            "open_seconds": self.opened, "read_bytes_per_second": rate,
            "raw_bytes_per_second": raw, "raw_runs": self.raw, "direct_io": direct,
            "share_of_raw": rate / raw,
            "save_seconds": self.save_seconds, "overhead_seconds": overhead,
            "break_even_tokens": length, "recompute_curve": self.curve, "same_first_token": same,
        }  # fmt: skip
        print(json.dumps(report))


def drop_page_cache(store: Path) -> None:
    """Make sure that no page of the store is read from memory."""
    for path in (store / "extents").iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            disk_speed.drop_cached(fd)
        finally:
            os.close(fd)


if __name__ == "__main__":
    main()
