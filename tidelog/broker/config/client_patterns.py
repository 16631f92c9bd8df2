"""The patterns by which subscriptions to metrics choose clients, kept from holding the loop.

Anybody may write one, and choose the name it is held against; and the matcher tries every way through a pattern.
Here the ways are counted before: those of a sequence multiply, those of alternatives add up, a repeated choice has more
than anybody waits for. Invariant: a text is matched only where the pattern has no more than WAYS_MAX through it. Pure.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

PATTERN_LENGTH_MAX: Final = 256
WAYS_MAX: Final = 250_000
WAYS_IN_TURN_MAX: Final = 1_000_000
STEPS_MAX: Final = 10_000
# Of the longest text a pattern is to be good for when it is set: longer than a UUID or an address.
TEXT_LENGTH_USUAL: Final = 60
_COMPILING: Final = 20  # a letter of a pattern, in ways
_DEPTH_MAX: Final = 20
_IGNORE_CASE: Final = "(?i)"
_COUNTS: Final = re.compile(r"\{([0-9]{1,4})(?:(,)([0-9]{0,4}))?\}")
_ATOM: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|[^\\\[*+?{]", re.DOTALL)


class _Untamed(Exception):
    """Too many ways, or something that cannot be counted."""


class _Cost(NamedTuple):
    ways: int
    steps: int


class _Counter:
    """A walk through the pattern. What it does not take apart as the matcher would, it refuses."""

    def __init__(self, pattern: str, text_length: int) -> None:
        self._pattern = pattern
        self._text_length = text_length
        self._at = 0

    def count(self) -> int:
        cost = self._alternatives(0)
        if self._at < len(self._pattern):
            raise _Untamed
        return cost.ways

    def _alternatives(self, depth: int) -> _Cost:
        if depth > _DEPTH_MAX:
            raise _Untamed
        cost = self._sequence(depth)
        while self._next_is("|"):
            other = self._sequence(depth)
            cost = _checked(cost.ways + other.ways, cost.steps + other.steps)
        return cost

    def _sequence(self, depth: int) -> _Cost:
        cost = _Cost(1, 1)
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            each = self._repeated(self._atom(depth))
            cost = _checked(cost.ways * each.ways, cost.steps + each.steps)
        return cost

    def _atom(self, depth: int) -> _Cost:
        if self._next_is("("):
            if self._next_is("?") and not self._next_is(":"):
                raise _Untamed  # looks around, conditions, flags
            cost = self._alternatives(depth + 1)
            if not self._next_is(")"):
                raise _Untamed
            return cost
        atom = _ATOM.match(self._pattern, self._at)
        if atom is None:
            raise _Untamed
        self._at = atom.end()
        return _Cost(1, 1)

    def _repeated(self, each: _Cost) -> _Cost:
        low, high = self._counts()
        if self._at < len(self._pattern) and self._pattern[self._at] in "?+":
            self._at += 1  # lazy or possessive: no more ways than greedy
        if (low, high) == (1, 1):
            return each
        steps = each.steps * max(low, 1)
        if each.ways == 1:
            return _checked(min(high, self._text_length) - min(low, self._text_length) + 1, steps)
        if high > 1:
            raise _Untamed
        return _checked(each.ways + 1, steps)

    def _counts(self) -> tuple[int, int]:
        any_number = self._text_length
        for sign, counts in (("*", (0, any_number)), ("+", (1, any_number)), ("?", (0, 1))):
            if self._next_is(sign):
                return counts
        found = _COUNTS.match(self._pattern, self._at)
        if found is None:
            return 1, 1
        self._at = found.end()
        low, comma, high = found.groups()
        least = int(low)
        return least, int(high or any_number) if comma else least

    def _next_is(self, sign: str) -> bool:
        found = self._pattern.startswith(sign, self._at)
        self._at += found
        return found


def _checked(ways: int, steps: int) -> _Cost:
    if ways > WAYS_MAX or steps > STEPS_MAX:
        raise _Untamed
    return _Cost(ways, steps)


def ways_through(pattern: str, text_length: int = TEXT_LENGTH_USUAL) -> int | None:
    """How many at most, with texts of that length; None where they are too many, or cannot be counted."""
    if len(pattern) > PATTERN_LENGTH_MAX:
        return None
    if pattern.startswith(_IGNORE_CASE):
        if not pattern.isascii() or re.search(r"\\[uUxN0-9]", pattern):
            return None  # the cases of a wide range of letters are many
        pattern = pattern[len(_IGNORE_CASE) :]
    try:
        return _Counter(pattern, text_length).count()
    except _Untamed:
        return None


def is_pattern(pattern: str) -> bool:
    """Whether it may be set."""
    if ways_through(pattern) is None:
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


class Matcher:
    """For everything that is matched in one turn of the loop: so many ways altogether, and nothing matches after."""

    def __init__(self) -> None:
        self._left = WAYS_IN_TURN_MAX

    def matches(self, pattern: str, text: str) -> bool:
        """Whether all of the text is as the pattern says; False where finding out could take long."""
        ways = ways_through(pattern, len(text))
        if ways is None:
            return False
        self._left -= ways + len(pattern) * _COMPILING
        try:
            return self._left >= 0 and re.fullmatch(pattern, text) is not None
        except (re.error, RecursionError, OverflowError):
            return False
