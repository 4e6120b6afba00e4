"""kill -9 during prefill and during spilling: the store opens, verifies, holds only whole pages."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.models import VOCAB, tiny_model
from tests.paging_helpers import budgets
from tests.tiers.cold_helpers import open_store, slots
from tierkv.hf.geometry import model_geometry
from tierkv.paging.manager import PageManager
from tierkv.paging.sequences import Sequences
from tierkv.paging.tierset import SESSION_PREFIX

ROOT = Path(__file__).parents[1]
KILLS = 20
PAGE_TOKENS = 16
MAX_SECONDS = 0.6
"""A victim lives at most so long after its first page has reached the disk."""

# One interpreter imports everything once and forks a victim for each round, before there are
# threads or stores.
FORKER = """
import os, sys
from tests.test_crash import VICTIMS, announce_first_page, make_model

model = make_model()
for line in sys.stdin:
    kind, seed, directory = line.rstrip("\\n").split(" ", 2)
    pid = os.fork()
    if pid == 0:
        announce_first_page()
        try:
            VICTIMS[kind](model, directory, int(seed))
        finally:
            os._exit(3)
    os.write(1, f"pid {pid}\\n".encode())
    status = os.waitpid(pid, 0)[1]
    os.write(1, f"dead {os.waitstatus_to_exitcode(status)}\\n".encode())
"""


def make_model() -> Any:
    return tiny_model("llama")


def settings(model: Any, directory: Path | str) -> dict[str, Any]:
    return budgets("minimum", model, Path(directory), page_tokens=PAGE_TOKENS, rows=1)


def announce_first_page() -> None:
    """Say on stdout when the first pages of this process are in the store."""
    from tierkv.tiers.cold import ColdStore

    put = ColdStore.put

    def announcing(self: ColdStore, *args: Any) -> None:
        put(self, *args)
        ColdStore.put = put  # type: ignore[method-assign]
        os.write(1, b"written\n")

    ColdStore.put = announcing  # type: ignore[method-assign]


def prefill(model: Any, directory: str, seed: int) -> None:
    """Prefill long prompts in small chunks for ever."""
    generator = torch.Generator().manual_seed(seed)
    with tierkv.wrap(model, prefill_chunk=40, **settings(model, directory)) as wrapped:
        while True:
            ids = torch.randint(3, VOCAB, (1, 2000), generator=generator)
            cache = wrapped.cache()
            tierkv.prefill(wrapped, ids, cache)
            cache.close()


def spill(model: Any, directory: str, seed: int) -> None:
    """Write and drop pages for ever, with nothing in between."""
    with tierkv.wrap(model, **settings(model, directory)) as wrapped:
        manager = wrapped.manager
        assert isinstance(manager, PageManager)
        g, rng = manager.geometry, random.Random(seed)
        while True:
            sequences = Sequences(g.layers)
            for _ in range(rng.randrange(1, 20)):
                count = rng.randrange(1, 100)
                k = torch.full((1, g.kv_heads, count, g.k_dim), rng.random())
                v = torch.full((1, g.kv_heads, count, g.v_dim), rng.random())
                for layer in range(g.layers):
                    for _segment in manager.append(sequences, layer, k, v).segments():
                        pass
            manager.close_sequences(sequences)


VICTIMS = {"prefill": prefill, "spill": spill}


@pytest.fixture
def forker() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKER],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield process
    process.stdin.close()
    try:
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:  # a victim is still alive
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def kill_one(forker: subprocess.Popen[str], order: str, seconds: float) -> None:
    """Start a victim and kill it `seconds` after its first page was written."""
    assert forker.stdin is not None
    assert forker.stdout is not None
    forker.stdin.write(order)
    lines: list[str] = []
    while not {"written"} < set(lines):  # and its pid, in any order
        lines.append(forker.stdout.readline().strip())
        assert lines[-1], "the forker died"
        assert not lines[-1].startswith("dead"), "the victim ended by itself"
    (pid,) = [int(line.removeprefix("pid ")) for line in lines if line.startswith("pid ")]
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    assert forker.stdout.readline().strip() == f"dead {-signal.SIGKILL}"


@pytest.mark.slow
def test_kill_9_during_prefill_and_spilling(tmp_path: Path, forker: subprocess.Popen[str]) -> None:
    model = make_model()
    geometry = model_geometry(model.config, model.dtype, PAGE_TOKENS)
    ids = torch.randint(3, VOCAB, (1, 150), generator=torch.Generator().manual_seed(7))
    expected = model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
    rng, pages = random.Random(0), []
    for number in range(KILLS):
        kind = list(VICTIMS)[number % 2]
        kill_one(forker, f"{kind} {number} {tmp_path}\n", rng.uniform(0, MAX_SECONDS))

        with open_store(tmp_path, frame_bytes=geometry.frame_bytes, disk_budget=256 << 20) as store:
            report = store.verify()
            assert report.bad == []
            assert report.whole == len(store)
            assert len(list(store.keys(SESSION_PREFIX))) == len(store)
            assert slots(store)[1] == len(store)  # and no slot is lost
            pages.append(len(store))

        with tierkv.wrap(model, prefill_chunk=50, **settings(model, tmp_path)) as wrapped:
            assert len(wrapped.manager.cold) == 0, "pages of a dead session are of no use"
            assert wrapped.generate(ids, max_new_tokens=8, do_sample=False).tolist() == expected
            assert wrapped.stats()["moved_bytes"]["cold_to_warm"] > 0
    print(f"pages on disk after each kill: {pages}")
    assert sum(count > 0 for count in pages) >= KILLS * 3 // 4
    assert len(set(pages)) >= KILLS // 3, "the moments were not random"
