"""`subscribePattern`: what Java's own regular expressions find, and ours, over random patterns."""

from __future__ import annotations

import random

import pytest

from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.java_pattern import compile_java_pattern

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NAMES = ("flights-1", "a.b", "A_b", "x", "-", "Delay.2", "..", "abcabc", "0", "FLIGHTS", "b-c_d")
ATOMS = (
    *r"abxzAB09._-}]{&\()[|.^$",
    *(r"\d \w \D \W \s \S \. \- \p{Alpha} \p{L} \p{Lower} \P{Lu} \x61 \u0062 \Qa.b\E \b \B \A \z \Z \h \V \1").split(),
)
CLASS_ATOMS = (*"abcxzABZ09._-&^", *r"a-z A-Z 0-9 a-c --9 .-a \d \w \W \. \- \p{Upper} \p{Alnum} \P{L} && \d-x".split())
OPENINGS = "( (?: (?= (?! (?<= (?<! (?> (?<n> (?i: (?-i: (?s-i:".split()
QUANTIFIERS = ("", "", "", *"* + ? {2} {1,2} {0,} {,2} *? +? ++ *+ ?+ {1,2}+".split())


def some_class(rng: random.Random, depth: int = 0) -> str:
    parts = [
        some_class(rng, depth + 1) if depth < 2 and rng.random() < 0.1 else rng.choice(CLASS_ATOMS)
        for _ in range(rng.randint(1, 4))
    ]
    return f"[{rng.choice(('', '', '^'))}{''.join(parts)}]"


def some_pattern(rng: random.Random, depth: int = 0) -> str:
    parts = [] if depth else [rng.choice(("", "", "", "", "(?i)", "(?s)", "(?d)", "(?x)"))]
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.5:
            part = rng.choice(ATOMS)
        elif kind < 0.8 or depth == 2:
            part = some_class(rng)
        else:
            alternative = "|" + some_pattern(rng, depth + 1) if rng.random() < 0.5 else ""
            part = rng.choice(OPENINGS) + some_pattern(rng, depth + 1) + alternative + ")"
        parts.append(part + rng.choice(QUANTIFIERS))
    return "".join(parts)


def test_java_finds_the_same_names_or_the_pattern_is_refused(spark):
    java = spark._jvm.java.util.regex.Pattern
    rng = random.Random(5)
    compared = found = 0
    while compared < 250:
        pattern = some_pattern(rng)
        try:
            ours = compile_java_pattern(pattern)
        except ConfigError:
            continue
        theirs = java.compile(pattern)
        for name in NAMES:
            assert (ours.search(name) is not None) == theirs.matcher(name).find(), (pattern, ours.pattern, name)
            found += ours.search(name) is not None
        compared += 1
    assert 0.1 < found / compared / len(NAMES) < 0.9
