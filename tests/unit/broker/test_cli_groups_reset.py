"""What the options of `tidelog groups reset-offsets` mean: scopes, files, times, offsets outside of the log."""

from __future__ import annotations

import pytest

from tidelog.cli.groups.reset import (
    ResetError,
    as_csv,
    chosen,
    datetime_in,
    duration_in,
    plans_in,
    scope_in,
    shifted,
    within,
)
from tidelog.client import TopicPartition

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)


def test_scopes_name_topics_and_perhaps_partitions():
    assert scope_in("a") == ("a", None)
    assert scope_in("a:2,0,2") == ("a", [2, 0])
    assert chosen(["a:1", "b", "a"], {"a": 2, "b": 1}) == [A1, B0, A0]


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:x", "a:-1", "a:1;2", "a:1,"])
def test_scopes_that_cannot_be_understood(text: str):
    with pytest.raises(ResetError):
        scope_in(text)


@pytest.mark.parametrize("scope", ["nowhere", "a:2", "a:0,9"])
def test_scopes_of_what_there_is_not(scope: str):
    with pytest.raises(ResetError, match=r"no topic|not one numbered"):
        chosen([scope], {"a": 2})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-03-01T12:00:00.500", 1772366400500),
        ("2026-03-01T12:00:00.500Z", 1772366400500),
        ("2026-03-01T12:00:00.500+01:00", 1772362800500),
        ("2026-03-01T12:00:00", 1772366400000),
    ],
)
def test_times_are_utc_unless_they_say_otherwise(text: str, expected: int):
    assert datetime_in(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PT1H", 3_600_000), ("P1D", 86_400_000), ("P1DT2H3M4.5S", 93_784_500), ("pt90m", 5_400_000), ("PT0S", 0),
        ("-PT1S", -1000), ("PT-1M", -60_000), ("P2DT-1H", 169_200_000), ("+PT0,25S", 250),
    ],
)  # fmt: skip
def test_durations_are_those_of_iso_8601(text: str, expected: int):
    assert duration_in(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "P", "PT", "P1DT", "1H", "P1Y", "P1W", "PT1.5H", "PT1S1M", "PT1", "P1H", "PT1Sx", "PT" + "9" * 400 + "S"],
)
def test_durations_that_are_none(text: str):
    with pytest.raises(ResetError, match="no duration"):
        duration_in(text)


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01T00:00:00", "12:00"])
def test_times_that_are_none(text: str):
    with pytest.raises(ResetError, match="no time"):
        datetime_in(text)


def test_what_is_exported_is_read_again():
    one = {"g": {A1: 7, A0: 3}}
    assert as_csv(one, with_group=False) == "a,0,3\na,1,7\n"
    assert plans_in(as_csv(one, with_group=False), ["g"]) == one
    odd = {"g": {A0: 1}, 'h,"x"': {B0: 2}}
    assert plans_in(as_csv(odd, with_group=True), ["g", 'h,"x"']) == odd
    assert plans_in(as_csv(odd, with_group=True), ["g"])["g"] == {A0: 1}
    assert plans_in("\na, 0 , 5\n\n", ["g"]) == {"g": {A0: 5}}


@pytest.mark.parametrize(
    ("text", "groups", "problem"),
    [
        ("a,0", ["g"], "line 1: expected topic,partition,offset"),
        ("a,0,1", ["g", "h"], "line 1: expected group,topic,partition,offset"),
        ("a,0,1\na,x,1", ["g"], "line 2: partition and offset must be numbers"),
        ("a,0,one", ["g"], "line 1: partition and offset"),
    ],
)
def test_files_that_cannot_be_understood(text: str, groups: list[str], problem: str):
    with pytest.raises(ResetError, match=problem):
        plans_in(text, groups)


def test_offsets_are_shifted_from_what_is_committed():
    assert shifted({A0: 5, A1: 9}, [A0], -7) == {A0: -2}
    with pytest.raises(ResetError, match="nothing is committed there"):
        shifted({A0: 5}, [A0, B0], 1)


def test_offsets_outside_of_the_log_become_its_ends():
    starts, ends = {A0: 2, A1: 2, B0: 2}, {A0: 9, A1: 9, B0: 9}
    offsets, warnings = within({A0: 0, A1: 10, B0: 9}, starts, ends)
    assert offsets == {A0: 2, A1: 9, B0: 9}
    assert [text.partition(",")[0] for text in warnings] == ["a-0: the log starts at 2", "a-1: the log ends at 9"]
