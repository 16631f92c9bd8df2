"""What Java makes of text and of numbers; tests/compatibility/test_differential_configs.py asks Java itself."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.java_text import parse_double, parse_integer, print_double, split_list, trim


def refused(parse: Callable[[str], object], text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return True
    return False


def test_integers_in_decimal_digits_of_any_script() -> None:
    taken = {"0": 0, "+5": 5, "-5": -5, "007": 7, "-2147483648": -(2**31), "\u0661\uff12": 12}
    for text, number in taken.items():
        assert parse_integer(text) == number
    for text in (
        "",
        "+",
        "-",
        "+-5",
        "1_0",
        " 5",
        "5 ",
        "5.0",
        "0x5",
        "5L",
        "2147483648",
        "\U0001d7d3",
        "\u00b2",
        "9" * 5000,
    ):
        assert refused(parse_integer, text), text
    assert parse_integer("2147483648", 64) == 2**31
    assert refused(lambda text: parse_integer(text, 16), "32768")


def test_fractions() -> None:
    taken = {
        "5": 5.0, ".5": 0.5, "5.": 5.0,
        "-1e-1": -0.1, "0.5d": 0.5, "0.5F": 0.5, "0x1p-2": 0.25, "0X.8P1f": 1.0, " 1 ": 1.0,
        "Infinity": math.inf, "-Infinity": -math.inf, "1e400": math.inf, "-0x1p9999": -math.inf, "\x011\x1f": 1.0,
    }  # fmt: skip
    for text, number in taken.items():
        assert parse_double(text) == number, text
    assert math.isnan(parse_double("-NaN"))
    for text in (
        "",
        ".",
        "nan",
        "inf",
        "infinity",
        "1_0",
        "\u0661",
        "0x1",
        "1e",
        "0.5 d",
        "NaNd",
        "\u00a01",
        "1,5",
        "0xp1",
    ):
        assert refused(parse_double, text), text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.0"), (-0.0, "-0.0"), (2.0, "2.0"), (0.001, "0.001"), (0.0009, "9.0E-4"), (9999999.0, "9999999.0"),
        (1e7, "1.0E7"), (12345678.5, "1.23456785E7"), (-1e-9, "-1.0E-9"), (math.inf, "Infinity"), (math.nan, "NaN"),
        (-math.inf, "-Infinity"), (1.5e300, "1.5E300"),
    ],
)  # fmt: skip
def test_numbers_are_printed(number: float, text: str) -> None:
    assert print_double(number) == text


def test_blanks_and_lists() -> None:
    assert trim("\x00 a\u00a0\t") == "a\u00a0"
    assert split_list(" a ,\tb,,c\u00a0,") == ["a", "b", "", "c\u00a0", ""]
    assert split_list(" \t") == []


@pytest.mark.parametrize("text", ["1" * 50_000 + "x", "0x" + "1" * 50_000 + "x", "a" + " " * 50_000 + "b"])
def test_long_texts_take_time_in_proportion_to_their_length(text: str) -> None:
    """Clients choose them. With time to the square of the length, the first takes a minute or more."""
    began_s = time.process_time()
    with contextlib.suppress(ValueError):
        parse_double(text)
    split_list(text)
    assert time.process_time() - began_s < 0.5


@given(st.text(" \t,ab", max_size=12))
def test_blanks_beside_commas_belong_to_no_item(text: str) -> None:
    trimmed = trim(text)
    assert split_list(text) == (re.split(r"[ \t]*,[ \t]*", trimmed) if trimmed else [])
