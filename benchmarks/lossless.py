"""How far pages of a real model shrink without loss, layer by layer, and how fast.

Regime: the keys and values of a text in bfloat16, one page at a time, one thread, as `raw+zstd`
packs them for the disk; speeds are per second of processor time. The ceiling of the ratio is what
the entropy of the exponents allows, with signs and mantissas kept whole. Then the same pages as the
other codecs encode them, whole pages under zstd: what packing them too would gain. The last line of
stdout is one JSON object.

    python benchmarks/lossless.py --model smollm2 --tokens 1024
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from tierkv.codecs import CODECS, encoded_bytes
from tierkv.codecs.lossless import Lossless
from tierkv.hf import loading
from tierkv.page import Geometry

PAGE_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, help="default: the bundled one")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--level", type=int, default=1, help="of zstd")
    arguments = parser.parse_args()
    model, tokenizer = loading.load_model(arguments.model, device="cpu", dtype="float32")
    bundled = importlib.resources.files("tierkv").joinpath("data/lighthouse.txt")
    text = (arguments.text or bundled).read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer(text).input_ids[: arguments.tokens]])
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    lossless, rows = Lossless(2, arguments.level), []
    print("layer  ratio  ceiling worst page pack GB/s  unpack")
    for index, layer in enumerate(layers):
        pages = pages_of(layer.keys[0], layer.values[0])
        outs = [np.empty_like(page) for page in pages]
        start = time.thread_time()
        used = [lossless.pack(page, out) for page, out in zip(pages, outs, strict=True)]
        packed = time.thread_time()
        back = [np.empty_like(page) for page in pages]
        for out, size, page in zip(outs, used, back, strict=True):
            lossless.unpack(out[:size], page)
        done = time.thread_time()
        if not all(map(np.array_equal, back, pages)):
            raise SystemExit(f"layer {index}: pages did not come back")
        total = sum(page.nbytes for page in pages)
        row = {
            "layer": index,
            "ratio": total / sum(used),
            "ceiling": 16 / (8 + exponent_bits(pages)),
            "worst_page_ratio": pages[0].nbytes / max(used),
            "pack_gb_s": total / (packed - start) / 1e9,
            "unpack_gb_s": total / (done - packed) / 1e9,
        }
        rows.append(row)
        print(
            f"{index:>5} {row['ratio']:>6.3f} {row['ceiling']:>8.3f} "
            f"{row['worst_page_ratio']:>10.3f} {row['pack_gb_s']:>9.2f} {row['unpack_gb_s']:>7.2f}"
        )
    mean = {key: float(np.mean([row[key] for row in rows])) for key in rows[0] if key != "layer"}
    print(" mean", *(f"{key} {value:.3f}" for key, value in mean.items()))
    encoded = {name: zstd_ratio(layers, name, arguments.level) for name in CODECS if name != "raw"}
    print("encoded pages under zstd:", *(f"{name} {row:.3f}" for name, row in encoded.items()))
    report = {"model": arguments.model, "tokens": ids.shape[1], "mean": mean, "encoded": encoded}
    print(json.dumps(report | {"rows": rows}))


def pages_of(k: torch.Tensor, v: torch.Tensor) -> list[np.ndarray]:
    """Return whole pages of one layer as bytes. k, v: ``[kv_heads, tokens, dim]``."""
    count = k.shape[1] // PAGE_TOKENS
    parts = [
        x[:, : count * PAGE_TOKENS].to(torch.bfloat16).unflatten(1, (count, PAGE_TOKENS)).flatten(2)
        for x in (k, v)
    ]
    frames = torch.cat(parts, dim=2).transpose(0, 1).contiguous().view(torch.uint8)
    return [frame.reshape(-1).numpy() for frame in frames]


def zstd_ratio(layers: list[Any], name: str, level: int) -> float:
    """Return how many times smaller zstd makes whole pages that a codec has encoded."""
    compressor, before, after = zstandard.ZstdCompressor(level=level), 0, 0
    for layer in layers:
        k, v = (x[0].to(torch.bfloat16) for x in (layer.keys, layer.values))
        geometry = Geometry(1, len(k), k.shape[2], v.shape[2], torch.bfloat16, PAGE_TOKENS)
        count = k.shape[1] // PAGE_TOKENS
        pages = [x[:, : count * PAGE_TOKENS].unflatten(1, (count, PAGE_TOKENS)) for x in (k, v)]
        frames = torch.zeros(count, encoded_bytes(CODECS[name], geometry), dtype=torch.uint8)
        CODECS[name].encode(geometry, *pages, frames)
        before += frames.numel()
        after += sum(len(compressor.compress(frame.tobytes())) for frame in frames.numpy())
    return before / after


def exponent_bits(pages: list[np.ndarray]) -> float:
    """Return the entropy of the exponents, in bits an element."""
    exponents = np.concatenate([page.view(np.uint16) >> 7 & 0xFF for page in pages])
    share = np.bincount(exponents, minlength=256) / len(exponents)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


if __name__ == "__main__":
    main()
