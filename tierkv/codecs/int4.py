"""4 bits, keys by channel over 32 tokens, values by token over 64 channels.

KIVI groups 32 channels. Twice that saves 5% of the bytes; the KL divergence on SmolLM2 goes from
0.0030 to 0.0034.
"""

from __future__ import annotations

from tierkv.codecs.affine import Affine

INT4 = Affine("int4", bits=4, key_tokens=32, channels=64)
