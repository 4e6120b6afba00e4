"""4 bits, keys by channel over 32 tokens, values by token over 32 channels (KIVI's grouping)."""

from __future__ import annotations

from tierkv.codecs.affine import Affine

INT4 = Affine("int4", bits=4, key_channels=True, group=32)
