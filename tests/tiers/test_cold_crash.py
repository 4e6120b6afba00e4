"""kill -9 at any moment: what was acknowledged is there, whole, and nothing else is damaged."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiers.cold_helpers import open_store, page, read

ROOT = Path(__file__).parents[2]
KILLS = 20
FRAME = 16384
BATCH = 8

# One interpreter is started once; it forks a fresh writer for each round, before any store is
# open. A writer puts batches, replaces some, drops some, and prints what has been acknowledged.
WRITERS = f"""
import os, sys
from tests.tiers.cold_helpers import open_store, page

def write(directory, round_number):
    store = open_store(directory, frame_bytes={FRAME}, disk_budget=1 << 30, durable=True)
    os.write(1, b"open\\n")
    batch = 0
    while True:
        name = f"{{round_number}}-{{batch}}"
        keys = [f"{{name}}-{{i}}".encode() for i in range({BATCH})]
        store.put(keys, [page(key, frame_bytes={FRAME}) for key in keys])
        os.write(1, f"put {{name}}\\n".encode())
        if batch % 3 == 2:
            os.write(1, f"dropping {{round_number}}-{{batch - 2}}\\n".encode())
            store.drop([f"{{round_number}}-{{batch - 2}}-{{i}}".encode() for i in range({BATCH})])
            replaced = f"{{round_number}}-{{batch - 1}}-0".encode()
            store.put([replaced], [page(replaced, frame_bytes={FRAME})])
        batch += 1

for line in sys.stdin:
    directory, round_number = line.split()
    pid = os.fork()
    if pid == 0:
        write(directory, round_number)
    os.write(1, f"pid {{pid}}\\n".encode())
    os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""


@pytest.fixture
def writers():
    process = subprocess.Popen(
        [sys.executable, "-c", WRITERS],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    yield process
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


def test_kill_9_at_random_moments(tmp_path, writers):
    rng = random.Random(0)
    num_acknowledged = 0
    for round_number in range(KILLS):
        writers.stdin.write(f"{tmp_path} {round_number}\n")
        lines, pid = [], None
        while pid is None or "open" not in lines:
            line = writers.stdout.readline().strip()
            assert line
            lines.append(line)
            if line.startswith("pid "):
                pid = int(line.removeprefix("pid "))
        time.sleep(rng.uniform(0, 0.15))
        os.kill(pid, signal.SIGKILL)
        while lines[-1] != "dead":
            lines.append(writers.stdout.readline().strip())
        acknowledged = {line.split()[1] for line in lines if line.startswith("put ")}
        dropping = {line.split()[1] for line in lines if line.startswith("dropping ")}
        with open_store(tmp_path, frame_bytes=FRAME, disk_budget=1 << 30) as store:
            report = store.verify()
            assert report.bad == []
            assert report.whole == len(store)
            for name in sorted(acknowledged - dropping):
                keys = [f"{name}-{i}".encode() for i in range(BATCH)]
                assert read(store, *keys) == [page(key, frame_bytes=FRAME) for key in keys]
            store.drop(list(store.keys()))  # keep the rounds short
        num_acknowledged += len(acknowledged)
    assert num_acknowledged > KILLS
