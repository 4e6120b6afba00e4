"""Decode and prefill with most of the KV off the GPU, against transformers and the link.

Regime: batch 1, random weights of a known shape, contexts of 128K to 1M tokens, an eighth of the
KV hot (and, with `--hot 1/8,1`, all of it). Decode is bound by the bytes that cross the link, so
the ceiling is streamed bytes over the measured host-to-device bandwidth; with everything hot it
is bound by reading weights and KV from device memory. Baselines run on the same model object in
the same run: transformers' `DynamicCache` on the GPU, and its offloaded one. Logits are compared
before anything is timed. This is `tierkv bench`; the last line of stdout is one JSON object.

    python benchmarks/offload.py --shape llama-3.1-8b:128K,256K --hot 1/8,1 --plots plots
    python benchmarks/offload.py --quick
"""

from __future__ import annotations

import sys

from tierkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
