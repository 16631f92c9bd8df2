"""Java's `.properties` format of Kafka's configuration files (java.util.Properties.load). Pure.

`=`, `:` or blanks separate key and value. A backslash at the end of a line continues
it. `#` and `!` begin comments. One rule is stricter than in Java: a line with only a
key is an error, not an empty value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_BLANKS: Final = " \t\f"
_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ESCAPE_PATTERN: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|(.))", re.DOTALL)
_PAIR: Final = re.compile(r"((?:\\.|[^\\=: \t\f])+)(?:[ \t\f]*[=:]|[ \t\f])[ \t\f]*(.*)", re.DOTALL)


class PropertiesError(ValueError):
    """A line is not a property; the message names the line."""


def parse_properties(text: str) -> dict[str, str]:
    """Key -> value, both without surrounding blanks. The last of duplicate keys
    counts. Raises PropertiesError.
    """
    properties: dict[str, str] = {}
    for number, line in _logical_lines(text):
        pair = _PAIR.fullmatch(line)
        if pair is None:
            raise PropertiesError(f"{number}: {line[:100]!r} is not key=value")
        properties[_unescape(pair[1])] = _unescape(pair[2]).strip()
    return properties


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, text of the line with its continuation lines)."""
    continued, first_number = "", 0
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        line = line.lstrip(_BLANKS)
        if not first_number and (not line or line[0] in "#!"):
            continue
        first_number = first_number or number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            continued += line[:-1]
            continue
        yield first_number, continued + line
        continued, first_number = "", 0
    if continued:
        yield first_number, continued


def _unescape(text: str) -> str:
    return _ESCAPE_PATTERN.sub(
        lambda match: chr(int(match[1], 16)) if match[1] else _ESCAPES.get(match[2], match[2]), text
    )
