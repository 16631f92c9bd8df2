"""Patterns of transactional ids whose matching is bounded (KIP-1152). Pure.

Kafka matches with Java's regular expressions, RE2 with automata. Python's matcher goes back and forth
instead, for years on a pattern such as `(a+)+b`, and one match blocks the node. So this module accepts
the part of Python's syntax for which the number of steps has a bound: a repeated item has a fixed
length and no alternatives, and few items are repeated. Invariant: an accepted pattern takes at most
about `STEPS_MAX` steps for an id of `ID_LENGTH_MAX` characters; a longer id does not match.
"""

from __future__ import annotations

import re
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

PATTERN_LENGTH_MAX = 1_000
ID_LENGTH_MAX = 1_000
# Repeated items beyond each other: the steps grow with the length of the id to this power.
REPEATS_MAX = 2

_REPEATS = (constants.MIN_REPEAT, constants.MAX_REPEAT)
_CHARACTERS = (constants.LITERAL, constants.NOT_LITERAL, constants.ANY, constants.IN, constants.AT)


class IdPattern:
    """Raises ValueError for a pattern that is malformed or that has no bound."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > PATTERN_LENGTH_MAX:
            raise ValueError(f"it has more than {PATTERN_LENGTH_MAX} characters")
        try:
            tree = parser.parse(pattern)
            self._matches = re.compile(pattern).fullmatch
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if _repeats(tree) > REPEATS_MAX:
            raise ValueError(f"more than {REPEATS_MAX} parts of it repeat")

    def matches(self, transactional_id: str) -> bool:
        """Whether the whole id matches."""
        return len(transactional_id) <= ID_LENGTH_MAX and self._matches(transactional_id) is not None


def _repeats(items: Any) -> int:
    """How many repeated items may follow one another in a match. Raises ValueError for one without a bound."""
    count = 0
    for kind, value in items:
        if kind in _REPEATS:
            low, high, body = value
            _check_repeated(body)
            count += low != high
        elif kind is constants.SUBPATTERN:
            count += _repeats(value[3])
        elif kind is constants.BRANCH:
            count += max(_repeats(branch) for branch in value[1])
        elif kind not in _CHARACTERS:
            raise ValueError(f"{kind} is not supported")
    return count


def _check_repeated(items: Any) -> None:
    for kind, value in items:
        if kind is constants.SUBPATTERN:
            _check_repeated(value[3])
        elif kind not in _CHARACTERS:
            raise ValueError("a repeated part has a variable length or alternatives")
