"""Patterns of transactional ids whose matching is bounded (KIP-1152). Pure.

Kafka matches with Java's regular expressions, RE2 with automata. Python's matcher goes back and forth
instead, for years on a pattern such as `(a+)+b`, and one match blocks the node. So this module accepts
the part of Python's syntax for which the number of steps has a bound: a repeated item has a fixed
length and no alternatives, few items are repeated, and alternatives of which several may match lead to
few ways in all. Compiling has a bound, too: Python looks at every letter of some character classes.
Invariant: an accepted pattern takes at most about `STEPS_MAX` steps for an id of
`ID_LENGTH_MAX` characters; a longer id does not match.
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
# Ways through the alternatives of a pattern, by its repeats: each is tried wherever a match may begin.
WAYS_MAX = (1000, 100, 4)
# Character classes with letters beyond Latin-1: each takes up to 5 ms to compile.
WIDE_CLASSES_MAX = 4
LAST_LATIN_1 = 255
# Letters in the ranges of a pattern that ignores the case: each is looked at.
FOLDED_LETTERS_MAX = 10_000
STEPS_MAX = max(ID_LENGTH_MAX**repeats * ways for repeats, ways in enumerate(WAYS_MAX))
LAST_ASCII = 127

_REPEATS = (constants.MIN_REPEAT, constants.MAX_REPEAT)
_CHARACTERS = (constants.LITERAL, constants.NOT_LITERAL, constants.ANY, constants.IN, constants.AT)


class IdPattern:
    """Raises ValueError for a pattern that is malformed or that has no bound."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > PATTERN_LENGTH_MAX:
            raise ValueError(f"it has more than {PATTERN_LENGTH_MAX} characters")
        try:
            tree = parser.parse(pattern)
            _check_classes(tree)
            self._matches = re.compile(pattern).fullmatch
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(str(error)) from None
        self._repeats, self._ways = _weight(tree)
        if self._repeats > REPEATS_MAX:
            raise ValueError(f"more than {REPEATS_MAX} parts of it repeat")
        if self._ways > WAYS_MAX[self._repeats]:
            raise ValueError(f"its alternatives match in more than {WAYS_MAX[self._repeats]} ways")

    def steps(self, transactional_id: str) -> int:
        """About how many steps a match of this id takes at most."""
        length = len(transactional_id)
        return 1 if length > ID_LENGTH_MAX else length**self._repeats * self._ways

    def matches(self, transactional_id: str) -> bool:
        """Whether the whole id matches."""
        return len(transactional_id) <= ID_LENGTH_MAX and self._matches(transactional_id) is not None


def _weight(items: Any) -> tuple[int, int]:
    """How many repeated items may follow one another in a match, and in how many ways its alternatives may match.

    Raises ValueError for a repeated item without a bound.
    """
    repeats, ways = 0, 1
    for kind, value in items:
        if kind in _REPEATS:
            low, high, body = value
            _check_repeated(body)
            repeats += low != high
        elif kind is constants.SUBPATTERN:
            of_group = _weight(value[3])
            repeats += of_group[0]
            ways *= of_group[1]
        elif kind is constants.BRANCH:
            of_branches = [_weight(branch) for branch in value[1]]
            repeats += max(each[0] for each in of_branches)
            ways *= (max if _exclude_each_other(value[1]) else sum)(each[1] for each in of_branches)
        elif kind not in _CHARACTERS:
            raise ValueError(f"{kind} is not supported")
    return repeats, ways


def _check_classes(tree: Any) -> None:
    """Raises ValueError for character classes that take long to compile."""
    wide = letters = 0
    ignores_case = bool(tree.state.flags & re.IGNORECASE)
    unseen = [tree]
    while unseen:
        for kind, value in unseen.pop():
            if kind is constants.IN:
                ranges = [each[1] for each in value if each[0] is constants.RANGE]
                singles = [each[1] for each in value if each[0] is constants.LITERAL]
                wide += max([*singles, *(last for _, last in ranges)], default=0) > LAST_LATIN_1
                letters += sum(last - first + 1 for first, last in ranges)
            elif kind is constants.SUBPATTERN:
                ignores_case = ignores_case or bool(value[1] & re.IGNORECASE)
                unseen.append(value[3])
            elif kind is constants.BRANCH:
                unseen += value[1]
            elif kind in _REPEATS:
                unseen.append(value[2])
            elif kind not in _CHARACTERS:
                raise ValueError(f"{kind} is not supported")
    if wide > WIDE_CLASSES_MAX:
        raise ValueError(f"more than {WIDE_CLASSES_MAX} of its character classes have letters beyond Latin-1")
    if ignores_case and letters > FOLDED_LETTERS_MAX:
        raise ValueError(f"it ignores the case of more than {FOLDED_LETTERS_MAX} letters")


def _exclude_each_other(branches: Any) -> bool:
    """Whether at most one of the alternatives can match, as their first letters differ."""
    first_letters: set[str] = set()
    for branch in branches:
        kind, value = branch[0] if len(branch) else (constants.ANY, 0)
        if kind is not constants.LITERAL or value > LAST_ASCII:
            return False
        first_letters.add(chr(value).lower())  # the pattern may ignore the case
    return len(first_letters) == len(branches)


def _check_repeated(items: Any) -> None:
    for kind, value in items:
        if kind is constants.SUBPATTERN:
            _check_repeated(value[3])
        elif kind not in _CHARACTERS:
            raise ValueError("a repeated part has a variable length or alternatives")
