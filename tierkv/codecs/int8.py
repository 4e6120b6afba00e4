"""8 bits, one scale per token and head, for keys and for values: the smallest and simplest."""

from __future__ import annotations

from tierkv.codecs.affine import Affine

INT8 = Affine("int8", bits=8, key_tokens=0, channels=0)
