"""Patterns that anybody may write: the ordinary ones match as ever, the others hold nobody up."""

from __future__ import annotations

import re
import time

import pytest

from tidelog.broker.config.client_patterns import Matcher, is_pattern, ways_through

ORDINARY = (
    ("client-7", "client-7"),
    ("client-.*", "client-77"),
    ("(foo|bar)-.*-(prod|test)", "bar-of-me-test"),
    ("[a-z]+-[0-9]+", "abc-12"),
    (r"1\.2\.[0-9]{1,3}\.[0-9]{1,3}", "1.2.3.44"),
    ("(?:ab)*c?", "ababab"),
    (r"[]^\]x-]+?", "]^x"),
    (r"\w+\d{2}", "abc12"),
    ("(?i)client-.*", "CLIENT-x"),
    (".*a.*b.*", "--a--b--"),
    ("|".join(f"client-{number}" for number in range(20)), "client-19"),
    ("b69cc35a-7a54-4790-aa69-cc2bd4ee4538", "b69cc35a-7a54-4790-aa69-cc2bd4ee4538"),
    ("", ""),
)
HOLDING = (
    ("(a+)+", "a" * 40 + "b"),
    ("(a|a)*", "a" * 40 + "b"),
    ("(a*)*", "a" * 40 + "b"),
    ("(?:a?){30}a{30}", "a" * 30),
    ("a?" * 30 + "a" * 30, "a" * 30),
    ("(a|a)" * 30, "a" * 29 + "b"),
    ("a*" * 10 + "b", "a" * 60),
    ("((((a+)+)+)+)", "a" * 40 + "b"),
    ("(a{1,}){1,}", "a" * 40 + "b"),
    ("(a{0,9}){,1234567}", "a" * 40 + "b"),
    ("(a*){1234567}", "a" * 40 + "b"),
    ("((a{5000}){5000}){5000}", "a"),
    ("(((){9999}){9999}){9999}", ""),
    ("x{}*(a+)+", "x{" + "a" * 40 + "b"),
    ("[](a+)+]*(a+)+", "a" * 40 + "b"),
    (r"\((a+)+", "(" + "a" * 40 + "b"),
    (r"[\]](a+)+", "]" + "a" * 40 + "b"),
    ("(?=(a+)+b)a*", "a" * 40),
    ("(?x)(a+ )#\n+", "a" * 40 + "b"),
    ("(" * 100 + ")" * 100, ""),
    ("a" * 257, "a" * 257),
)


@pytest.mark.parametrize(("pattern", "text"), ORDINARY)
def test_ordinary_patterns_match_as_ever(pattern: str, text: str) -> None:
    assert is_pattern(pattern)
    assert Matcher().matches(pattern, text)
    assert not Matcher().matches(pattern, text + "!") or re.fullmatch(pattern, text + "!")


@pytest.mark.parametrize(("pattern", "text"), HOLDING)
def test_what_could_hold_the_loop_may_not_be_set_and_matches_nobody(pattern: str, text: str) -> None:
    assert not is_pattern(pattern)
    began = time.process_time()
    assert not Matcher().matches(pattern, text)
    assert time.process_time() - began < 0.5


def test_a_long_name_counts_as_long() -> None:
    assert is_pattern(".*a.*b.*")
    assert Matcher().matches(".*a.*b.*", "a" + "x" * 50 + "b")
    assert not Matcher().matches(".*a.*b.*", "a" * 30_000)
    assert Matcher().matches("a.*", "a" * 30_000), "one choice is cheap however long the name is"


def test_many_patterns_are_held_to_a_sum() -> None:
    matcher, text = Matcher(), "x" * 60
    assert [matcher.matches(".*.*.*", text) for _ in range(6)] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("pattern", ["(", "[", "a)", "*", "a**", "a{2}{3}", "\\"])
def test_what_is_no_pattern_is_none(pattern: str) -> None:
    assert not is_pattern(pattern)
    assert not Matcher().matches(pattern, "a")


def test_ways_are_counted() -> None:
    assert ways_through("abc") == 1
    assert ways_through("a|b|cd?") == 4
    assert ways_through("(a|b)(c|d)?", 10) == 6
    assert ways_through("a.*", 10) == 11
    assert ways_through("a{2,5}", 10) == 4
