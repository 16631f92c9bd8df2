"""Java's `.properties` format, as Kafka's own configuration files have it (java.util.Properties.load). Pure.

`=`, `:` or blanks stand between key and value, a backslash ends a line that goes on, `#` and `!` begin comments. One
thing is stricter than Java: a line that is a key alone is refused rather than taken for an empty value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_BLANKS: Final = " \t\f"
_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ESCAPED: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
_PAIR: Final = re.compile(r"((?:\\.|[^\\=: \t\f])+)(?:[ \t\f]*[=:]|[ \t\f])[ \t\f]*(.*)", re.DOTALL)


class PropertiesError(ValueError):
    """A line that is no property; the message names it."""


def parse_properties(text: str) -> dict[str, str]:
    """Key -> value, without blanks around either. A key that comes twice has its last value. Raises PropertiesError."""
    found: dict[str, str] = {}
    for number, line in _logical_lines(text):
        pair = _PAIR.fullmatch(line)
        if pair is None:
            raise PropertiesError(f"{number}: {line[:100]!r} is not key=value")
        found[_unescaped(pair[1])] = _unescaped(pair[2]).strip()
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, what it says with the lines that continue it)."""
    begun, first = "", 0
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        line = line.lstrip(_BLANKS)
        if not first and (not line or line[0] in "#!"):
            continue
        first = first or number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            begun += line[:-1]
            continue
        yield first, begun + line
        begun, first = "", 0
    if begun:
        yield first, begun


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else _ESCAPES.get(found[2], found[2]), text)
