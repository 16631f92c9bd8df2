"""Translates Java's regular expressions to Python's, for `subscribePattern`.

Pure. Jobs are written for Spark's connector, which hands the pattern to Java. Invariant: the result
matches the topic names that Java's `find` matches, or the pattern is refused; never another set.
Topic names hold ASCII letters, digits, `.`, `_` and `-` only. So a character class is evaluated here
to the ASCII characters in it, unions and intersections included, and whatever Java and Python
think of other characters does not matter. Constructs that Python lacks, or that are not worth their
code in a topic's name, are refused.
"""

from __future__ import annotations

import re
import string
import warnings
from collections.abc import Mapping
from typing import Final

from tidelog.client.arguments import shown
from tidelog.protocol.errors import ConfigError

_ASCII: Final = frozenset(map(chr, range(128)))
_LETTERS: Final = frozenset(string.ascii_letters)
_DIGITS: Final = frozenset(string.digits)
_WORD: Final = _LETTERS | _DIGITS | {"_"}
_SPACE: Final = frozenset(" \t\n\x0b\f\r")
_PUNCTUATION: Final = frozenset(string.punctuation)
_LOWER: Final = frozenset(string.ascii_lowercase)
_UPPER: Final = frozenset(string.ascii_uppercase)

_CLASS_ESCAPES: Final[Mapping[str, frozenset[str]]] = {
    "d": _DIGITS,
    "w": _WORD,
    "s": _SPACE,
    "h": frozenset(" \t"),
    "v": frozenset("\n\x0b\f\r"),
}
_CHARACTER_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "a": "\a", "e": "\x1b"}
_PROPERTIES: Final[Mapping[str, frozenset[str]]] = {
    "Lower": _LOWER,
    "javaLowerCase": _LOWER,
    "Ll": _LOWER,
    "IsLl": _LOWER,
    "IsLowercase": _LOWER,
    "Upper": _UPPER,
    "javaUpperCase": _UPPER,
    "Lu": _UPPER,
    "IsLu": _UPPER,
    "IsUppercase": _UPPER,
    "ASCII": _ASCII,
    "Alpha": _LETTERS,
    "L": _LETTERS,
    "IsL": _LETTERS,
    "IsAlphabetic": _LETTERS,
    "IsLatin": _LETTERS,
    "Digit": _DIGITS,
    "Nd": _DIGITS,
    "IsNd": _DIGITS,
    "N": _DIGITS,
    "IsDigit": _DIGITS,
    "Alnum": _LETTERS | _DIGITS,
    "Punct": _PUNCTUATION,
    "Graph": _LETTERS | _DIGITS | _PUNCTUATION,
    "Print": _LETTERS | _DIGITS | _PUNCTUATION | {" "},
    "Blank": frozenset(" \t"),
    "XDigit": frozenset(string.hexdigits),
    "Space": _SPACE,
}
_NEGATED_SIGNS: Final = "DWSHV"
_ANCHORS: Final = {"b": r"\b", "B": r"\B", "A": r"\A", "Z": r"\Z", "z": r"\Z"}
_QUANTIFIER: Final = re.compile(r"\{[0-9]{1,9}(?:,[0-9]{0,9})?\}")
_GROUPS: Final = ("(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>")
_NAMED_GROUP: Final = re.compile(r"\(\?<([a-zA-Z][a-zA-Z0-9]*)>")
_FLAGS: Final = re.compile(r"\(\?([a-zA-Z]+)\)")
_SCOPED_FLAGS: Final = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]+))?:")
_FLAGS_OF_BOTH: Final = frozenset("ims")
_REASON_CHARACTERS_MAX: Final = 200
"""A reason may repeat a part of the pattern, of any length."""
_FLAGS_WITHOUT_EFFECT: Final = frozenset("d")
"""Line terminators do not come in topic names."""


def compile_java_pattern(text: str) -> re.Pattern[str]:
    """The Python pattern that finds what Java's finds in a topic name.

    Raises ConfigError when there is none, or the pattern is none of Java's.
    """
    try:
        translated = _Translation(text).translate()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(translated, re.ASCII)
    except _Refusal as refusal:
        raise ConfigError(
            f"subscribePattern {shown(text)} is refused: {str(refusal)[:_REASON_CHARACTERS_MAX]}"
        ) from None
    except (re.error, OverflowError, RecursionError, Warning) as error:
        reason = str(error)[:_REASON_CHARACTERS_MAX]
        raise ConfigError(f"subscribePattern {shown(text)} cannot be read as a regular expression: {reason}") from None


class _Refusal(Exception):
    """Why a pattern cannot be translated."""


class _Translation:
    """One walk through a pattern."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        has_flag = any("i" in flags[1] for flags in _FLAGS.finditer(text))
        self._is_insensitive = has_flag
        self._is_partly_insensitive = any("i" in flags[0] for flags in _SCOPED_FLAGS.finditer(text))

    def translate(self) -> str:
        if not self._text.isascii():
            raise _Refusal("topic names are ASCII, and so must the pattern be")
        parts = []
        while self._position < len(self._text):
            parts.append(self._next_part())
        return "".join(parts)

    def _next_part(self) -> str:
        character = self._text[self._position]
        if character == "\\":
            return self._escape()
        if character == "[":
            return _as_class(self._class())
        if character == "(":
            return self._group()
        if character == "{":
            quantifier = _QUANTIFIER.match(self._text, self._position)
            if quantifier is None:
                raise _Refusal("Java takes a single '{' for a damaged repetition; write \\{ for the character")
            self._position = quantifier.end()
            return quantifier[0]
        self._position += 1
        return character

    # -- groups

    def _group(self) -> str:
        text, start = self._text, self._position
        if not text.startswith("(?", start):
            self._position += 1
            return "("
        if named := _NAMED_GROUP.match(text, start):
            self._position = named.end()
            return f"(?P<{named[1]}>"
        for opening in _GROUPS:
            if text.startswith(opening, start):
                self._position += len(opening)
                return opening
        if flags := _FLAGS.match(text, start):
            if start:
                raise _Refusal(f"{flags[0]} may stand at the beginning only; write {flags[0][:-1]}:...)")
            self._position = flags.end()
            kept = self._flags_of_both(flags[1])
            return f"(?{kept})" if kept else ""
        if scoped := _SCOPED_FLAGS.match(text, start):
            self._position = scoped.end()
            on, off = self._flags_of_both(scoped[1]), self._flags_of_both(scoped[2] or "")
            return f"(?{on}-{off}:" if off else f"(?{on}:"
        raise _Refusal(f"{text[start : start + 4]}... begins no group that Java and Python share")

    @staticmethod
    def _flags_of_both(flags: str) -> str:
        if other := set(flags) - _FLAGS_OF_BOTH - _FLAGS_WITHOUT_EFFECT:
            raise _Refusal(f"the flag {min(other)!r} is not supported")
        return "".join(sorted(_FLAGS_OF_BOTH.intersection(flags)))

    # -- escapes

    def _escape(self) -> str:
        sign = self._peek(1)
        if sign in _ANCHORS:
            if self._text.startswith(r"\b{", self._position):
                raise _Refusal(r"\b{...} is not supported")
            self._position += 2
            return _ANCHORS[sign]
        if sign == "k":
            name = re.compile(r"\\k<([a-zA-Z][a-zA-Z0-9]*)>").match(self._text, self._position)
            if name is None:
                raise _Refusal(r"\k must be followed by <name>")
            self._position = name.end()
            return f"(?P={name[1]})"
        if sign in "123456789":
            if self._peek(2).isdigit():
                raise _Refusal("references to groups above 9 are not supported")
            self._position += 2
            return f"(?:\\{sign})"
        if sign == "Q":
            return re.escape(self._quoted())
        return _as_class(self._escaped_set())

    def _peek(self, ahead: int) -> str:
        return self._text[self._position + ahead : self._position + ahead + 1] or " "

    def _quoted(self) -> str:
        """The characters of `\\Q...\\E`, or to the end of the pattern."""
        start = self._position + 2
        end = self._text.find(r"\E", start)
        self._position = len(self._text) if end < 0 else end + 2
        return self._text[start : len(self._text) if end < 0 else end]

    def _escaped_set(self) -> frozenset[str]:
        """The characters of an escape that stands for one character, or for one of several."""
        if self._position + 1 >= len(self._text):
            raise _Refusal("a backslash at the end escapes nothing")
        sign = self._text[self._position + 1]
        self._position += 2
        if sign in _CLASS_ESCAPES:
            return _CLASS_ESCAPES[sign]
        if sign in _NEGATED_SIGNS:
            return _ASCII - _CLASS_ESCAPES[sign.lower()]
        if sign in _CHARACTER_ESCAPES:
            return frozenset(_CHARACTER_ESCAPES[sign])
        if sign in "pP":
            return self._property(is_negated=sign == "P")
        if sign in "xu":
            return frozenset(self._hexadecimal(2 if sign == "x" else 4))
        if sign.isalnum():
            raise _Refusal(f"\\{sign} is not supported")
        return frozenset(sign)

    def _property(self, is_negated: bool) -> frozenset[str]:
        match = re.compile(r"\{(\w+)\}|([A-Z])").match(self._text, self._position)
        name = str(match[1] or match[2]) if match else ""
        if match is None or name not in _PROPERTIES:
            raise _Refusal(f"the character property {name!r} is not supported")
        self._position = match.end()
        characters = _PROPERTIES[name]
        if (self._is_insensitive or self._is_partly_insensitive) and characters != _both_cases(characters):
            raise _Refusal(f"the character property {name!r} beside the flag i is not supported")
        return _ASCII - characters if is_negated else characters

    def _hexadecimal(self, digits: int) -> str:
        number = self._text[self._position : self._position + digits]
        if len(number) < digits or not set(number) <= set(string.hexdigits) or int(number, 16) > 127:
            raise _Refusal(f"an escape by number must be {digits} hexadecimal digits of an ASCII character")
        self._position += digits
        return chr(int(number, 16))

    # -- character classes

    def _class(self) -> frozenset[str]:
        """The characters of a class `[...]`, with Java's unions and intersections."""
        self._position += 1
        is_negated = self._peek(0) == "^"
        self._position += is_negated
        if self._peek(0) in "]&":
            raise _Refusal(f"{self._peek(0)!r} first in a class is not supported; escape it")
        operands = [self._operand()]
        while self._text.startswith("&&", self._position):
            self._position += 2
            operands.append(self._operand(is_right_side=True))
        self._position += 1
        characters = frozenset.intersection(*operands)
        if len(operands) > 1 and (is_negated or self._is_partly_insensitive):
            raise _Refusal("&& in a negated class, or beside the flag i, is not supported")
        if is_negated and self._is_partly_insensitive and characters != _both_cases(characters):
            raise _Refusal("a negated class beside (?i:...) is not supported")
        return _ASCII - characters if is_negated else characters

    def _operand(self, is_right_side: bool = False) -> frozenset[str]:
        """The union up to `&&` or the end of the class."""
        start = self._position
        characters: frozenset[str] = frozenset()
        parts = nested = 0
        while self._position < len(self._text) and self._text[self._position] != "]":
            if self._text.startswith("&&", self._position):
                break
            nested += self._text[self._position] == "["
            characters |= self._class_part()
            parts += 1
        if self._position >= len(self._text):
            raise _Refusal("a character class is not closed")
        if not parts:
            raise _Refusal("&& needs characters before and after it")
        if nested and (self._text[start - 1] == "^" or (is_right_side and parts > 1)):
            # Java's versions differ on the first, and Java drops characters on the second.
            raise _Refusal("a class in a class is not supported here; write the characters out")
        return characters

    def _class_part(self) -> frozenset[str]:
        """A nested class, an escape, a range or a character."""
        character = self._text[self._position]
        if character == "[":
            return self._class()
        if character == "&" and self._peek(1) != "&":
            raise _Refusal("'&' in a class is not supported; escape it")
        if self._text.startswith(r"\Q", self._position):
            raise _Refusal(r"\Q in a class is not supported")
        first = self._class_characters()
        if self._peek(0) != "-" or self._peek(1) in "]":
            return _both_cases(first) if self._is_insensitive else first
        if len(first) != 1 or self._peek(1) == "[":
            raise _Refusal("'-' beside a class is not supported; escape it")
        self._position += 1
        last = self._class_characters()
        if len(last) != 1 or min(last) < min(first):
            raise _Refusal("a range of characters must go upwards, from one character to another")
        characters = frozenset(map(chr, range(ord(min(first)), ord(min(last)) + 1)))
        return _both_cases(characters) if self._is_insensitive else characters

    def _class_characters(self) -> frozenset[str]:
        if self._position >= len(self._text):
            raise _Refusal("a character class is not closed")
        character = self._text[self._position]
        if character == "\\":
            return self._escaped_set()
        self._position += 1
        return frozenset(character)


def _both_cases(characters: frozenset[str]) -> frozenset[str]:
    return frozenset(other for each in characters for other in (each.lower(), each.upper()))


def _as_class(characters: frozenset[str]) -> str:
    """Python's spelling of a set of characters."""
    if not characters:
        return "(?!)"
    if len(characters) == 1:
        return re.escape(min(characters))
    codes = sorted(map(ord, characters))
    spelled = []
    start = previous = codes[0]
    for code in (*codes[1:], 1000):
        if code != previous + 1:
            spelled.append(f"\\x{start:02x}" + (f"-\\x{previous:02x}" if previous > start else ""))
            start = code
        previous = code
    return f"[{''.join(spelled)}]"
