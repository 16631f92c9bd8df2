"""Numbers in text as Java reads and writes them, which is what Kafka takes for one where an operator has a say. Pure.

Python would also take underscores, "nan", "inf" and more kinds of blanks, but no hexadecimal fractions and no suffixes.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

_BLANKS: Final = "".join(map(chr, range(0x21)))
_BASIC_PLANE_MAX: Final = "\uffff"
_DECIMAL: Final = re.compile(r"([+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)[fFdD]?")
_HEXADECIMAL: Final = re.compile(r"([+-]?0[xX]([0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")
_NAMED: Final = re.compile(r"([+-]?)(NaN|Infinity)")
_SEPARATOR: Final = re.compile(r"[ \t\n\x0b\f\r]*,[ \t\n\x0b\f\r]*")


def trim(text: str) -> str:
    """String.trim: without blanks and control characters at either end, but with any other space."""
    return text.strip(_BLANKS)


def parse_integer(text: str, bits: int = 32) -> int:
    """Integer.parseInt, or Long's or Short's, digits of any script included. Raises ValueError."""
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
    if found := _DECIMAL.fullmatch(trimmed):
        return float(found[1])
    if found := _NAMED.fullmatch(trimmed):
        return math.nan if found[2] == "NaN" else float(found[1] + "inf")
    if found := _HEXADECIMAL.fullmatch(trimmed):
        try:
            return float.fromhex(found[1])
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
    """The items between commas, empty ones included, without the blanks beside the commas; none of an empty text."""
    trimmed = trim(text)
    return _SEPARATOR.split(trimmed) if trimmed else []
