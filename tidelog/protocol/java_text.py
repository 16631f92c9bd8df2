"""Numbers in text as Java parses and prints them, the format of Kafka's configuration values. Pure.

Python also accepts underscores, "nan", "inf" and more kinds of blanks, but no hexadecimal fractions
and no suffixes.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

_BLANKS: Final = "".join(map(chr, range(0x21)))
_BASIC_PLANE_MAX: Final = "\uffff"
# Digits can match in one way only: clients choose the texts, and two ways for each digit take time to the square.
_DECIMAL: Final = re.compile(r"([+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?)[fFdD]?")
_HEXADECIMAL: Final = re.compile(r"([+-]?0[xX]([0-9a-fA-F]+(\.[0-9a-fA-F]*)?|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")
_NAMED: Final = re.compile(r"([+-]?)(NaN|Infinity)")
_BLANKS_AT_COMMAS: Final = " \t\n\x0b\f\r"


def trim(text: str) -> str:
    """String.trim: removes blanks and control characters at both ends, but no other space."""
    return text.strip(_BLANKS)


def parse_integer(text: str, bits: int = 32) -> int:
    """Integer.parseInt, Long.parseLong or Short.parseShort, with digits of any script.

    Raises ValueError.
    """
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits.isdecimal() or max(digits) > _BASIC_PLANE_MAX:
        raise ValueError(f"no integer: {text}")
    number = int(text)
    bound = 1 << (bits - 1)
    if not -bound <= number < bound:
        raise ValueError(f"no integer of {bits} bits: {text}")
    return number


def parse_double(text: str) -> float:
    """Double.parseDouble. Raises ValueError."""
    trimmed = trim(text)
    if match := _DECIMAL.fullmatch(trimmed):
        return float(match[1])
    if match := _NAMED.fullmatch(trimmed):
        return math.nan if match[2] == "NaN" else float(match[1] + "inf")
    if match := _HEXADECIMAL.fullmatch(trimmed):
        try:
            return float.fromhex(match[1])
        except OverflowError:
            return -math.inf if trimmed.startswith("-") else math.inf
    raise ValueError(f"no number: {text}")


def print_double(value: float) -> str:
    """Double.toString."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(value)
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    text = "".join(map(str, digits)).rstrip("0")
    assert isinstance(exponent, int)
    return f"{'-' * sign}{text[0]}.{text[1:] or '0'}E{exponent + len(digits) - 1}"


def split_list(text: str) -> list[str]:
    """Split at commas, without the blanks beside them.

    Keeps empty items; an empty text has no items.
    """
    trimmed = trim(text)
    return [item.strip(_BLANKS_AT_COMMAS) for item in trimmed.split(",")] if trimmed else []
