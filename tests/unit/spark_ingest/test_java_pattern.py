"""Java's expressions as Python's. `tests/spark/test_java_patterns.py` asks Java itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.java_pattern import compile_java_pattern

NAMES = ("flights", "flights-1", "Flights.2", "a_b", "b", "c-d", "z9", "x.y")


def matched(pattern: str) -> list[str]:
    compiled = compile_java_pattern(pattern)
    return [name for name in NAMES if compiled.search(name)]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("flights", ["flights", "flights-1"]),
        ("^flights$", ["flights"]),
        ("(?i)^flights", ["flights", "flights-1", "Flights.2"]),
        (r"\.", ["Flights.2", "x.y"]),
        (r"\Q.\E", ["Flights.2", "x.y"]),
        (r"\Qs-", ["flights-1"]),
        (r"^\p{Upper}", ["Flights.2"]),
        (r"^\p{Alnum}+$", ["flights", "b", "z9"]),
        (r"^\P{L}|\d\z", ["flights-1", "Flights.2", "z9"]),
        (r"^(?<first>\w)_(?!\k<first>)", ["a_b"]),
        ("^[a-z&&[^bcz]].*[0-9]", ["flights-1"]),
        ("^[a-c[xz]]", ["a_b", "b", "c-d", "z9", "x.y"]),
        ("^[^a-z]", ["Flights.2"]),
        ("(?i)^[^f]", ["a_b", "b", "c-d", "z9", "x.y"]),
        (r"^\u0062\x2d?$", ["b"]),
        ("^(?>flights|flights-1)$", ["flights"]),
        (r"^\w++\w", []),
        ("(?i:X).y", ["x.y"]),
        (r"^[.\-]|^$", []),
        (r"[\h\v]", []),
    ],
)
def test_java_finds_the_same(pattern, names):
    assert matched(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "regular expression"),
        ("a{,3}", "Java takes a single '{'"),
        ("{", "Java takes a single '{'"),
        ("flüge", "ASCII"),
        ("(?x)a b", "the flag 'x'"),
        ("a(?i)b", "may stand at the beginning only; write (?i:...)"),
        ("(?P<n>a)", "begins no group"),
        ("(?#comment)", "begins no group"),
        ("(a)?(?(1)b)", "begins no group"),
        (r"\p{IsGreek}", "'IsGreek' is not supported"),
        (r"(?i)\p{Lower}", "beside the flag i"),
        (r"\012", "not supported"),
        (r"\R", "not supported"),
        (r"(a)\11", "above 9"),
        (r"\xe9", "ASCII character"),
        (r"\b{g}", "not supported"),
        ("[]a]", "first in a class"),
        ("[a", "not closed"),
        ("flights[", "not closed"),
        ("[a&&", "not closed"),
        ("[a&&[b", "not closed"),
        ("[^", "not closed"),
        ("[a&&]", "characters before and after"),
        ("[^a[b]]", "a class in a class"),
        ("[a&&[b]c]", "a class in a class"),
        ("[z-a]", "upwards"),
        (r"[a-\d]", "upwards"),
        ("[a-z&&b](?i:c)", "beside the flag i"),
        ("a\\", "escapes nothing"),
    ],
)
def test_what_python_would_read_otherwise_is_refused(pattern, says):
    with pytest.raises(ConfigError) as failure:
        compile_java_pattern(pattern)
    message = str(failure.value)
    assert says in message
    assert message.startswith("subscribePattern ")
    assert "\n" not in message


@given(st.text(st.sampled_from("ab.-[]^&(){}?*+\\QEdpPkx|<>i:!=,09 $"), max_size=12))
def test_any_text_is_a_pattern_or_a_clear_refusal(text):
    try:
        compile_java_pattern(text)
        refusal = ""
    except ConfigError as error:
        refusal = str(error)
    assert not refusal or refusal.startswith("subscribePattern ")
