"""The on-disk record: whatever is not exactly what was packed is rejected."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.tiers.record import (
    FORMAT_VERSION,
    MAX_KEY_BYTES,
    RECORD_BYTES,
    BadRecordError,
    Record,
    pack_format,
    pack_meta,
    unpack_format,
    unpack_many,
    unpack_meta,
)

u32 = st.integers(0, 2**32 - 1)
records = st.builds(Record, u32, u32, u32, u32, st.integers(0, 2**64 - 1))
keys = st.binary(min_size=1, max_size=MAX_KEY_BYTES)


def flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


@given(keys, records)
def test_round_trip(key, record):
    packed = record.pack(key)
    assert len(packed) == RECORD_BYTES
    assert Record.unpack(key, packed) == record


@given(keys, records, st.integers(0, RECORD_BYTES * 8 - 1))
def test_any_flipped_bit_is_rejected(key, record, bit):
    with pytest.raises(BadRecordError):
        Record.unpack(key, flip(record.pack(key), bit))


@given(keys, records, st.integers(0, RECORD_BYTES - 1), st.binary(min_size=1, max_size=8))
def test_any_other_length_is_rejected(key, record, length, more):
    packed = record.pack(key)
    for value in (packed[:length], packed + more):
        with pytest.raises(BadRecordError, match="bytes instead of"):
            Record.unpack(key, value)


@given(keys, keys, records)
def test_a_record_under_another_key_is_rejected(key, other, record):
    """A swapped value once meant another conversation's page under a valid key."""
    if key != other:
        with pytest.raises(BadRecordError):
            Record.unpack(other, record.pack(key))


@given(keys, st.binary(max_size=200))
def test_arbitrary_bytes_are_rejected(key, value):
    with pytest.raises(BadRecordError):
        Record.unpack(key, value)


@given(st.binary(min_size=1, max_size=20), st.binary(max_size=50), st.data())
def test_metadata_round_trip_and_damage(name, value, data):
    stored = pack_meta(name, value)
    assert unpack_meta(name, stored) == value
    bit = data.draw(st.integers(0, len(stored) * 8 - 1))
    cut = data.draw(st.integers(0, len(stored) - 1))
    for damaged in (flip(stored, bit), stored[:cut], stored + b"x"):
        with pytest.raises(BadRecordError):
            unpack_meta(name, damaged)
    with pytest.raises(BadRecordError):
        unpack_meta(name + b"x", stored)


def test_a_page_record_is_no_metadata_value():
    with pytest.raises(BadRecordError):
        unpack_meta(b"k", Record(4096, 0, 0, 4096, 0).pack(b"k"))


@given(st.integers(0, 2**32 - 1))
def test_the_format_stamp_names_any_version(version):
    assert unpack_format(pack_format(version)) == version


def test_a_damaged_format_stamp_is_rejected():
    stamp = pack_format(FORMAT_VERSION)
    for damaged in (b"", stamp[:-1], stamp + b"x", flip(stamp, 3), flip(stamp, 70)):
        with pytest.raises(BadRecordError):
            unpack_format(damaged)


def test_many_records_at_once_are_told_apart_like_single_ones() -> None:
    """Whole ones, missing ones, and every kind of damage, in one batch."""
    good = Record(4096, 1, 7, 4000, 2**63 + 5)
    packed = good.pack(b"k")
    flipped = [bytes([*packed[:i], packed[i] ^ 1, *packed[i + 1 :]]) for i in range(RECORD_BYTES)]
    values = [packed, None, b"", packed[:-1], packed + b"x", *flipped, packed]
    keys = [b"k"] * (len(values) - 1) + [b"other"]
    whole, records = unpack_many(keys, values)
    for key, value, is_whole in zip(keys, values, whole.tolist(), strict=True):
        try:
            assert Record.unpack(key, value or b"") == good and is_whole
        except BadRecordError:
            assert not is_whole
    assert [Record(*(int(row[name]) for name in Record._fields)) for row in records] == [good]
    none, records = unpack_many([], [])
    assert len(none) == len(records) == 0
