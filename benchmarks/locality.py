"""Record which pages a real model's heads choose, step by step: `benchmarks/data/locality.npz`.

Regime: SmolLM2-135M in float32 on the CPU, one exact forward over the bundled text; its last tokens
are taken as decode steps. Selector `cuboid`, 32 pages of 32 tokens per KV head besides 64 sink and
64 recent tokens, layers 2 and up. Beside the true choice stands the one made with the query guessed
from the residual stream a layer earlier, and the pages that were nearly chosen.
`tierkv/bench/locality.py` replays all at other sizes. The last line of stdout is one JSON object:
hit rates of reuse caches, how often the guess is right, and what was nearly chosen before it was.

    python benchmarks/locality.py
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from selection_quality import capture, text

from tierkv.attention.selective_gpu import NEARLY
from tierkv.bench.locality import Recording
from tierkv.hf.loading import load_model
from tierkv.selection import DEFAULT, selector
from tierkv.selection.quality import Regime, Trace, estimate, overlap, reuse_misses, select

FILE = Path(__file__).parent / "data" / "locality.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="prose", help="prose, manual, code or a file")
    parser.add_argument("--tokens", type=int, default=7296, help="at most")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--page-tokens", type=int, default=32)
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--dense-layers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FILE)
    a = parser.parse_args()
    torch.set_grad_enabled(False)
    model, tokenizer = load_model(a.model, device="cpu", dtype="float32")
    ids = tokenizer(text(a.text), return_tensors="pt").input_ids[:, : a.tokens]
    layers, _ = capture(model, ids, a.steps)
    regime = Regime(a.page_tokens, a.token_budget)
    chosen, guessed, nearly = [], [], []
    for layer in layers[a.dense_layers :]:
        chosen.append(chosen_by(layer.trace, regime))
        nearly.append(nearly_chosen(layer.trace, regime, chosen[-1]))
        guess = replace(layer.trace, queries=layer.guesses["1 layer ahead"])
        guessed.append(chosen_by(guess, regime))
    guessed[0] = chosen[0]
    source = (
        f"{a.model}, {a.text}, {ids.shape[1]} tokens, {DEFAULT}, {a.token_budget} tokens in pages "
        f"of {a.page_tokens}, layers {a.dense_layers} to {len(layers) - 1}"
    )
    whole, guesses, near = (torch.stack(x, dim=1) for x in (chosen, guessed, nearly))
    old = int(regime.candidates(layers[-1].trace)[0].nonzero().max()) + 1
    Recording(whole.numpy(), guesses.numpy(), near.numpy(), old, source).save(a.out)
    report: dict[str, Any] = {"source": source, "shape": list(whole.shape),
                              "file_bytes": a.out.stat().st_size}  # fmt: skip
    for times in (1, 2, 4):
        misses = [reuse_misses(x, times * regime.budget_pages)[1:].sum() for x in chosen]
        report[f"hits_{times}x"] = 1 - float(sum(misses)) / float(whole[1:].sum())
    report["nearly_chosen"] = float(near.sum() / whole.sum())
    first = (whole.cumsum(0) == 1) & whole
    first[0] = False
    report["first_chosen_after_nearly"] = float((first & (near.cumsum(0) > 0)).sum() / first.sum())
    heads = whole.shape[1] * whole.shape[2]
    report["first_chosen_per_step_by_64"] = [
        float(part[:, :, :, :old].sum() / heads / len(part)) for part in first.split(64)
    ]
    report["same_as_step_before"] = float(overlap(whole[:-1], whole[1:]).mean())
    report["guess_right"] = float(overlap(guesses[:, 1:], whole[:, 1:]).mean())
    report["pages"] = int(np.count_nonzero(whole.any(0).any(0).any(0)))
    print(json.dumps(report))


def chosen_by(trace: Trace, regime: Regime) -> torch.Tensor:
    """Return ``[steps, kv_heads, pages]`` of bool."""
    return select(estimate(selector(DEFAULT, regime.page_tokens), trace, regime), trace, regime)


def nearly_chosen(trace: Trace, regime: Regime, chosen: torch.Tensor) -> torch.Tensor:
    """Return ``[steps, kv_heads, pages]`` of bool: not chosen, but nearly."""
    mass = estimate(selector(DEFAULT, regime.page_tokens), trace, regime)
    least = mass.masked_fill(~chosen, torch.inf).amin(-1, keepdim=True)
    candidates = regime.candidates(trace).unsqueeze(1)
    return (mass >= NEARLY * least) & candidates & ~chosen


if __name__ == "__main__":
    main()
