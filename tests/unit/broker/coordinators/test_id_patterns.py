"""Patterns of transactional ids: which are accepted, and that none of those takes long."""

from __future__ import annotations

import contextlib
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.coordinators.transaction.patterns import ID_LENGTH_MAX, PATTERN_LENGTH_MAX, STEPS_MAX, IdPattern


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("tx-.*", "tx-7", "my-tx-7"),
        (".*tx.*", "my-tx-7", "my-7"),
        ("(orders|payments)-[0-9]+", "payments-12", "invoices-12"),
        ("orders-(0|1)", "orders-1", "orders-2"),
        ("a{3}b{2}c{1}d?", "aaabbc", "aabbc"),
        ("(ab)*", "abab", "aba"),
        ("[^-]+-x", "abc-x", "-x"),
        ("^a$", "a", "aa"),
        ("a*?b+", "aab", "aa"),
        (r"\w+\.x", "a.x", "a-x"),
        ("(?i)[\u0430-\u044f]+", "\u0417\u0430", "Order"),
        ("[^\u0430-\u044f]", "a", "\u0430"),
        (".*(orders|payments|invoices|returns|stock).*", "my-stock-1", "my-stocks".upper()),
        ("(orders|payments)-" * 12 + "x", "orders-" * 12 + "x", "orders-x"),
        ("(a|ab)(c|bcd)(d*)", "abcd", "abbd"),
    ],
)
def test_a_pattern_matches_the_whole_id(pattern: str, matching: str, other: str):
    assert IdPattern(pattern).matches(matching)
    assert not IdPattern(pattern).matches(other)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b", "(a|a)*b", "(a|ab)*c", "((a*)b?)*c", r"(a)\1", "(?=a)a", "(?<!a)b", "(?(1)a|b)", ".*a.*b.*",
        "(a?){20}b", "(a.|.a)" * 30 + "b", "(?:aa|a)" * 11, "(?i:(a|Ab))" * 11, "(a|)" * 11,
        ".*.*(a.|.a)(a.|.a)(a.|.a)", "((a.|.a)(a.|.a)|b)" * 5, "[", "a**", "(", "\\", "a" * (PATTERN_LENGTH_MAX + 1),
        "(" * 900, "a{99999999999}", "*", "(?i)[a-\uffff]", "(?i:([a-\uffff]|b))", "[a\u0101-\uffff]" * 5,
    ],
)  # fmt: skip
def test_a_pattern_that_is_malformed_or_has_no_bound_is_refused(pattern: str):
    with pytest.raises(ValueError, match=r".+"):
        IdPattern(pattern)


def test_an_id_that_is_very_long_does_not_match():
    assert IdPattern("a*").matches("a" * ID_LENGTH_MAX)
    assert not IdPattern("a*").matches("a" * (ID_LENGTH_MAX + 1))


@pytest.mark.parametrize(
    "pattern",
    [
        ".*a.*b", "(a*)(a*)b", "a*?a*?b", "(x|a*a*|y)b", "(aa)*a*b", ".*.*(a.|.a)(a.|.a)b", ".*" + "(a.|.a)" * 6 + "b",
        "(a.|.a)" * 9 + ".{981}b", "(a.|.a)" * 6 + ".*b",
    ],
)  # fmt: skip
def test_the_worst_of_the_accepted_patterns_takes_milliseconds(pattern: str):
    compiled = IdPattern(pattern)
    assert compiled.steps("a" * ID_LENGTH_MAX) <= STEPS_MAX
    began_s = time.process_time()
    assert not compiled.matches("a" * ID_LENGTH_MAX)
    assert time.process_time() - began_s < 1, "far below what a pattern without a bound takes"


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)" + "[\x01-\U0010ffff]" * 199, "([a\u0101-\uffff]|b)" * 90, "(?i)" + "[a-z]" * 199,
        "[a\u0101-\uffff]" * 4, "(?i)" + "[\x01-\u0900]" * 4, "(" * 400 + "a" + ")" * 400,
    ],
)  # fmt: skip
def test_a_pattern_is_accepted_or_refused_in_milliseconds(pattern: str):
    """To compile the first one takes 3 s: every letter of each class is looked at."""
    re.purge()
    began_s = time.process_time()
    with contextlib.suppress(ValueError):
        IdPattern(pattern)
    assert time.process_time() - began_s < 0.3


@given(st.text("ab(|)*+?[]{},12.^$\\", max_size=12), st.text("ab12", max_size=12))
def test_an_accepted_pattern_means_what_it_means_to_python(pattern: str, transactional_id: str):
    try:
        compiled = IdPattern(pattern)
    except ValueError:
        return
    assert compiled.matches(transactional_id) == (re.fullmatch(pattern, transactional_id) is not None)
