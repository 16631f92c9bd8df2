"""The demo's own arithmetic: what it reads, what it sums, and that its checks fail when they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidelog.bench.demo import chart, preflight, report, source
from tidelog.bench.demo.__main__ import main
from tidelog.bench.demo.tally import Tally, differences, from_json, merged, to_json, total


@pytest.mark.slow
def test_the_source_sums_what_it_yields():
    tallies: dict[str, Tally] = {}
    again: dict[str, Tally] = {}
    flights = list(source.read_flights(2000, tallies))
    for flight in flights:
        row = json.loads(flight.value)
        assert row["carrier"].encode() == flight.key
        again.setdefault(row["carrier"], Tally()).add(row["arr_delay"], row["distance"])
    assert len(flights) == 2000 == total(tallies).flights
    assert again == tallies
    assert len(tallies) >= 12


def test_the_source_keeps_every_column_and_type():
    flight = next(source.read_flights(source.FLIGHTS_IN_SOURCE, {}))
    row = json.loads(flight.value)
    assert len(row) == 19
    assert row["year"] == 2013
    assert row["dep_delay"] == 2
    assert row["tailnum"] == "N14228"
    assert row["time_hour"] == "2013-01-01T10:00:00Z"


@pytest.mark.parametrize(
    ("text", "rows"),
    [(None, 336_776), ("0.1", 33_678), ("10%", 33_678), ("100%", 336_776), ("1.0", 336_776), ("5000", 5000)],
)
def test_rows_wanted(text: str | None, rows: int):
    assert source.rows_wanted(text) == rows


@pytest.mark.parametrize("text", ["many", "0", "99", "400000", "-1", "101%", "nan"])
def test_rows_not_to_be_had(text: str):
    with pytest.raises(ValueError):
        source.rows_wanted(text)


def test_wrong_rows_are_wrong_usage(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        main(["--rows", "many"])
    assert stopped.value.code == 2
    assert "neither a number of rows" in capsys.readouterr().err


def tally(*delays: int | None) -> Tally:
    made = Tally()
    for delay in delays:
        made.add(delay, 100)
    return made


def test_tallies_add_up_and_survive_json():
    left, right = {"DL": tally(10, None)}, {"DL": tally(16), "UA": tally(-3)}
    both = merged(left, right)
    assert both == {"DL": tally(10, None, 16), "UA": tally(-3)}
    assert both["DL"].late == 1
    assert both["DL"].mean_delay_minutes == 13
    assert from_json(json.loads(json.dumps(to_json(both)))) == both


def test_differences_name_the_carrier_and_the_sum():
    assert differences({"DL": tally(10)}, {"DL": tally(10)}) == []
    (line,) = differences({"DL": tally(10)}, {"DL": tally(11)})
    assert line == "DL arrival delay minutes: source 10, got 11"
    assert differences({"DL": tally(10)}, {})


@pytest.mark.parametrize(
    ("spans", "faults"),
    [
        ([{"0": [0, 5, 5]}, {"1": [0, 3, 3]}], 0),
        ([{"0": [0, 2, 2], "1": [0, 3, 3]}, {"0": [2, 5, 3]}], 0),
        ([{"0": [0, 5, 5]}, {}], 1),  # partition 1 read by nobody
        ([{"0": [0, 4, 4]}, {"1": [0, 3, 3]}], 1),  # its last record missing
        ([{"0": [0, 5, 5], "1": [0, 3, 3]}, {"0": [3, 5, 2]}], 1),  # two records read twice
        ([{"0": [0, 5, 4]}, {"1": [0, 3, 3]}], 1),  # a gap inside
    ],
)
def test_offset_faults(spans: list[dict[str, list[int]]], faults: int):
    assert len(report.offset_faults([{"ranges": each} for each in spans], {0: 5, 1: 3})) == faults


def outcome(**changed: object) -> report.Outcome:
    tallies = {"DL": tally(1, 2)}
    values = {
        "rows": 2,
        "source": tallies,
        "members": [{"tallies": to_json(tallies), "ranges": {"0": [0, 2, 2]}}],
        "ends": {0: 2},
        "committed": {0: 2},
        "spark": tallies,
        "seconds": {},
        **changed,
    }
    return report.Outcome(**values)  # type: ignore[arg-type]


def test_the_checks_hold_when_everything_agrees():
    assert [faults for _, faults in report.checks(outcome())] == [[], [], [], [], [], []]


@pytest.mark.parametrize(
    ("changed", "which"),
    [({"rows": 3}, 0), ({"ends": {0: 3}}, 1), ({"ends": {0: 3}}, 2), ({"committed": {}}, 3)]
    + [({"source": {"DL": tally(1, 3)}}, 4), ({"spark": {}}, 5)],
)
def test_a_check_fails_for_its_own_reason(changed: dict[str, object], which: int):
    assert list(report.checks(outcome(**changed)))[which][1]


def test_the_table_has_a_line_for_each_carrier():
    table = report.table({"DL": tally(1, 2), "UA": tally(None)}, source.airlines())
    assert table.row_count == 2


def test_the_headline_says_late_and_early():
    carriers = [("Alaska Airlines", tally(-10)), ("US Airways", tally(22))]
    assert chart.headline(carriers) == "US Airways arrived 22 minutes late on average, Alaska 10 minutes early"


@pytest.mark.slow
def test_the_chart_is_a_png(tmp_path: Path):
    image = tmp_path / "chart.png"
    chart.draw({"DL": tally(1, 2), "AS": tally(-4), "HA": tally(None)}, source.airlines(), image)
    assert image.read_bytes().startswith(b"\x89PNG")


def test_no_java_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(preflight.NotReady, match=r"no java on the PATH.*Java 17"):
        preflight.check_java()


@pytest.mark.parametrize(
    ("version", "good"), [("1.8.0_402", False), ("11.0.2", False), ("17.0.15", True), ("21", True)]
)
def test_the_version_of_java(version: str, good: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-01' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if good:
        preflight.check_java()
    else:
        with pytest.raises(preflight.NotReady, match="is Java"):
            preflight.check_java()
