"""The radix tree at scale: insert, match, split and evict. CPU only, no model.

Regime: 10,000 sequences of 1M distinct tokens in pages of 16: 100 prompts of 1,024 tokens, each
gone on from by 100 sequences of 100 tokens on average, and one sequence of 1M tokens. Each time is
the mean over all calls of its kind; `LIMITS` are what a call may take before a forward would
notice, and the exit status says whether all were kept.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc

import numpy as np

from tierkv.paging.radix import RadixTree

PAGE_TOKENS = 16
PROMPTS, FOLLOWERS, PROMPT_TOKENS = 100, 100, 1024
LONG_TOKENS = 1 << 20
LIMITS = {
    "insert_us": 300, "match_us": 300, "split_us": 300, "evict_us_per_page": 50,
    "long_insert_ms": 50, "long_match_ms": 20, "long_split_ms": 20, "bytes_per_token": 16,
}  # fmt: skip


def main() -> int:
    """Print each figure beside its limit; the last line is JSON."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 128256, (PROMPTS, PROMPT_TOKENS), dtype=np.int32)
    sequences = [
        np.concatenate([prompt, rng.integers(0, 128256, int(more), dtype=np.int32)])
        for prompt in prompts
        for more in rng.integers(50, 151, FOLLOWERS)
    ]
    tracemalloc.start()
    tree, made, start = RadixTree(PAGE_TOKENS), 0, time.perf_counter()
    for ids in sequences:
        blocks = np.arange(made, made + len(ids) // PAGE_TOKENS)
        made += len(blocks)
        tree.insert(ids, blocks)
    inserted = time.perf_counter() - start
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    got: dict[str, float] = {"insert_us": 1e6 * inserted / len(sequences)}
    tokens, nodes = tree.pages * PAGE_TOKENS, tree.nodes
    got["bytes_per_token"] = used / tokens

    order = rng.permutation(len(sequences))
    start = time.perf_counter()
    for at in order:
        tree.match(sequences[at])
    got["match_us"] = 1e6 * (time.perf_counter() - start) / len(sequences)

    cuts = [prompt[: PROMPT_TOKENS // 2] for prompt in prompts]
    start = time.perf_counter()
    for ids in cuts:  # one more sequence leaves each prompt in its middle
        tree.insert(
            np.concatenate([ids, ids[:PAGE_TOKENS]]), np.arange(len(ids) // PAGE_TOKENS + 1)
        )
    got["split_us"] = 1e6 * (time.perf_counter() - start) / len(cuts)

    start, pages = time.perf_counter(), tree.pages
    while tree.pages:
        tree.evict(32)
    got["evict_us_per_page"] = 1e6 * (time.perf_counter() - start) / pages

    long = rng.integers(0, 128256, LONG_TOKENS, dtype=np.int32)
    blocks = np.arange(LONG_TOKENS // PAGE_TOKENS)
    start = time.perf_counter()
    tree.insert(long, blocks)
    got["long_insert_ms"] = 1e3 * (time.perf_counter() - start)
    start = time.perf_counter()
    assert len(tree.match(long).blocks) == len(blocks)
    got["long_match_ms"] = 1e3 * (time.perf_counter() - start)
    half = np.concatenate([long[: LONG_TOKENS // 2], long[:PAGE_TOKENS]])
    start = time.perf_counter()
    tree.insert(half, blocks[: len(half) // PAGE_TOKENS])
    got["long_split_ms"] = 1e3 * (time.perf_counter() - start)

    print(f"{len(sequences):,} sequences, {tokens:,} tokens, {nodes:,} nodes")
    for name, limit in LIMITS.items():
        print(f"{name:>18} {got[name]:10.2f}   limit {limit}")
    kept = all(got[name] <= limit for name, limit in LIMITS.items())
    print(json.dumps({"sequences": len(sequences), "tokens": tokens, "within_limits": kept, **got}))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
