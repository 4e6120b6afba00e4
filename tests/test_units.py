"""Sizes, read from and written for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.units import format_bytes, parse_age, parse_bytes, round_up


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1.5 GiB", 3 << 29),
        (" 2GiB ", 2 << 30),
        ("1TB", 10**12),
        (7, 7),
    ],
)
def test_parse(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2 gigs", "-1GiB", "1e9", "0x10", "nan", "2GiB/s"])
def test_bad_text_is_echoed_with_the_knob(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text, knob="gpu_budget")
    assert "gpu_budget" in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", [-1, True, 1.5, None, [1]])
def test_bad_types(value: object) -> None:
    with pytest.raises(ConfigError, match="disk_budget"):
        parse_bytes(value, knob="disk_budget")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2 << 30, "2 GiB")],
)
def test_format(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 900 << 40))
def test_what_is_printed_can_be_read_back(num_bytes: int) -> None:
    again = parse_bytes(format_bytes(num_bytes))
    assert abs(again - num_bytes) <= 0.005 * num_bytes + 0.5


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 20))
def test_round_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple


@pytest.mark.parametrize(("text", "seconds"), [("45s", 45), ("1.5h", 5400), (" 7 d", 604800)])
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1 month"])
def test_bad_ages_are_echoed_with_the_knob(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_age(text, knob="--older-than")
    assert "--older-than" in str(caught.value) and repr(text) in str(caught.value)
