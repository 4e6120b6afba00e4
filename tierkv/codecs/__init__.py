"""How pages are stored in a tier. One codec per file; adding one = one line."""

from __future__ import annotations

from tierkv.codecs.base import CHUNK, Codec, encoded_bytes
from tierkv.codecs.fp8 import FP8_CODEC
from tierkv.codecs.int4 import INT4
from tierkv.codecs.int4_importance import INT4_IMPORTANCE
from tierkv.codecs.int8 import INT8
from tierkv.codecs.int8_channel import INT8_CHANNEL
from tierkv.codecs.raw import RAW

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (RAW, INT8, INT8_CHANNEL, INT4, INT4_IMPORTANCE, FP8_CODEC)
}
"""By the name that the setting `codec` uses."""

__all__ = ["CHUNK", "CODECS", "RAW", "Codec", "encoded_bytes"]
