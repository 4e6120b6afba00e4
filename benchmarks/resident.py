"""What tierkv costs when it is not needed: everything hot, against `DynamicCache` in one run.

Regime: SmolLM2-135M on real text, batch 1, a context that fits the hot budget, so that nothing
moves between tiers. Decode is bound by reading weights and KV; prefill by matrix products. The
ceiling is transformers' own cache: ratios are tierkv over `DynamicCache`, above 1 is faster.
Both run in alternation, so that a noisy machine disturbs both alike. The outputs are compared
before anything is timed. The last line of stdout is one JSON object.

    python benchmarks/resident.py --tokens 4096
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import platform
import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache

import tierkv
from tierkv.hf.attach import cache_argument
from tierkv.hf.loading import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="tokens to decode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu-budget", default="1GiB")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    text = importlib.resources.files("tierkv").joinpath("data/lighthouse.txt").read_text()
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : arguments.tokens].to(model.device)

    runs: dict[str, list[dict[str, float]]] = {"DynamicCache": [], "tierkv": []}
    tokens: dict[str, list[int]] = {}
    for _ in range(arguments.repeats):
        for name in runs:
            result, tokens[name] = measure(model, ids, name, arguments)
            runs[name].append(result)
    same = sum(a == b for a, b in zip(tokens["DynamicCache"], tokens["tierkv"], strict=True))
    median = {
        name: {key: statistics.median(run[key] for run in rows) for key in rows[0]}
        for name, rows in runs.items()
    }
    print(f"{ids.shape[1]} prompt tokens, {arguments.new} new, {model.dtype}, {model.device}")
    for name, row in median.items():
        print(f"{name:>14}  prefill {row['prefill_s']:7.3f} s   decode {row['decode_ms']:7.2f} ms")
    base, ours = median["DynamicCache"], median["tierkv"]
    report = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "prompt_tokens": ids.shape[1],
        "median": median,
        "prefill_ratio": base["prefill_s"] / ours["prefill_s"],
        "decode_ratio": base["decode_ms"] / ours["decode_ms"],
        "same_tokens": f"{same}/{arguments.new}",
    }
    print(json.dumps(report))


@torch.no_grad()
def measure(
    model: Any, ids: torch.Tensor, name: str, arguments: Any
) -> tuple[dict[str, float], list[int]]:
    """Prefill and decode greedily; return seconds, milliseconds a token, and the tokens."""
    if name == "DynamicCache":
        cache, prefill = DynamicCache(config=model.config), None
        return decode(model, ids, cache, prefill, arguments.new)
    with tierkv.wrap(model, gpu_budget=arguments.gpu_budget) as wrapped:
        return decode(model, ids, wrapped.cache(), wrapped.prefill, arguments.new)


def decode(
    model: Any, ids: torch.Tensor, cache: Any, prefill: Any, new: int
) -> tuple[dict[str, float], list[int]]:
    argument = cache_argument(model)
    start = time.perf_counter()
    if prefill is not None:
        output = prefill(ids, cache)
    else:
        output = model(input_ids=ids, logits_to_keep=1, **{argument: cache})
    synchronize()
    prefilled = time.perf_counter()
    tokens = [int(output.logits[0, -1].argmax())]
    for _ in range(new - 1):
        step = torch.tensor([[tokens[-1]]], device=ids.device)
        output = model(input_ids=step, **{argument: cache})
        tokens.append(int(output.logits[0, -1].argmax()))
    synchronize()
    decoded = (time.perf_counter() - prefilled) / (new - 1)
    return {"prefill_s": prefilled - start, "decode_ms": decoded * 1e3}, tokens


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
