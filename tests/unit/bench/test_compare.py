"""What passes and what falls short, the table, the JSON, and rounds that alternate."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from tidelog.bench import compare, report
from tidelog.bench.clusters import Alone
from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import Contestant, Metric, Scenario
from tidelog.testing.processes import ServerFailed, ServerProcess


def row(ours: list[float], theirs: list[float], **targets: Any) -> compare.Row:
    figures = {name: values for name, values in (("tidelog", ours), ("kafka", theirs)) if values}
    return compare.Row(Scenario("one", "One"), Metric("cpu", "us", **targets), figures)


@pytest.mark.parametrize(
    ("ours", "theirs", "targets", "passes"),
    [
        ([20.0], [100.0], {"ratio_at_most": 0.2}, True),
        ([21.0], [100.0], {"ratio_at_most": 0.2}, False),
        ([20.0], [100.0], {"at_most": 19.0, "ratio_at_most": 0.2}, False),
        ([20.0], [], {"ratio_at_most": 0.2}, None),
        ([20.0], [], {"at_most": 20.0, "ratio_at_most": 0.2}, True),
        ([], [100.0], {"at_most": 20.0, "ratio_at_most": 0.2}, None),
        ([20.0], [100.0], {}, None),
        ([1.0, 30.0, 10.0], [100.0, 1.0, 100.0], {"ratio_at_most": 0.1}, True),
    ],
)
def test_a_row_passes_when_every_target_that_can_be_judged_is_met(
    ours: list[float], theirs: list[float], targets: dict[str, float], passes: bool | None
) -> None:
    assert row(ours, theirs, **targets).passes is passes


def test_the_table_says_ours_theirs_the_ratio_and_the_verdict() -> None:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table([row([20.0], [100.0], at_most=30, ratio_at_most=0.1), row([1234.0], [])]))
    text = console.export_text()
    assert "One" in text
    for cell in ("20", "100", "0.20", "<= 30, ratio <= 0.10", "short", "1,234"):
        assert cell in text
    console.file.close()


def test_the_markdown_has_one_line_per_figure() -> None:
    lines = report.as_markdown([row([20.0], [100.0], at_most=30), row([1234.0], [])]).splitlines()
    assert lines[2:] == [
        "| `one` | cpu, us | 20 | 100 | 0.20 | <= 30 | pass |",
        "| `one` | cpu, us | 1,234 | - | - |  |  |",
    ]


def test_the_json_keeps_every_round() -> None:
    found = json.loads(report.as_json([row([1.0, 2.0, 9.0], [4.0], ratio_at_most=1.0)]))
    assert found["rows"][0]["medians"] == {"tidelog": 2.0, "kafka": 4.0}
    assert found["rows"][0]["rounds"]["tidelog"] == [1.0, 2.0, 9.0]
    assert found["rows"][0]["ratio"] == 0.5
    assert found["rows"][0]["passes"] is True


def test_the_names_of_the_rows_are_distinct_and_chosen_by_a_part() -> None:
    names = [scenario.name for scenario in compare.catalogue()]
    assert len(set(names)) == len(names)
    assert [scenario.name for scenario in compare.select(["200b"])] == [
        *("produce-200b-w1", "produce-200b-w16"),
        *("rf3-produce-200b-w1", "rf3-produce-200b-w16"),
    ]
    assert len(compare.select([])) == len(names)


def test_contestants_take_turns_and_change_order(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Recorder(Scenario):
        metrics = (Metric("cpu", "us"),)

        def warm(self, contestant: Contestant, scale: float) -> None:
            log.append(f"warm {self.name} {contestant.name}")

        def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
            log.append(f"{self.name} {contestant.name}")
            return {"cpu": float(len(log))}

    @contextmanager
    def pretend(names: Any, brokers: int, running: bool, refused: Any) -> Any:
        log.append(f"{brokers} node")
        yield [Contestant(name, Alone(ServerProcess("/nowhere")), Mock(), Path("/nowhere")) for name in names]

    monkeypatch.setattr(compare, "contestants", pretend)
    rows = compare.run([Recorder("x", "X"), Recorder("y", "Y")], ["a", "b"], rounds=2, scale=0.1)
    assert log == [
        "1 node",
        *("warm x a", "warm x b", "warm y a", "warm y b"),
        *("x a", "x b", "y a", "y b"),
        *("x b", "x a", "y b", "y a"),
    ]
    assert rows[0].figures == {"a": [6.0, 11.0], "b": [7.0, 10.0]}


def test_each_scenario_gets_one_round_however_short_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Steady(Scenario):
        metrics = (Metric("cpu", "us"),)

        def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
            return {"cpu": 1.0}

    @contextmanager
    def pretend(names: Any, brokers: int, running: bool, refused: Any) -> Any:
        yield [Contestant(name, Alone(ServerProcess("/nowhere")), Mock(), Path("/nowhere")) for name in names]

    monkeypatch.setattr(compare, "contestants", pretend)
    scenarios = [Steady("x", "X"), Steady("y", "Y", 3)]
    rows = compare.run(scenarios, ["a"], rounds=4, scale=0.1, minutes=0)
    assert [row.figures for row in rows] == [{"a": [1.0]}, {"a": [1.0]}]
    rows = compare.run(scenarios, ["a"], rounds=4, scale=0.1, minutes=1)
    assert [row.figures for row in rows] == [{"a": [1.0] * 4}, {"a": [1.0] * 4}]


def test_what_fails_is_told_in_its_row_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Failing(Scenario):
        metrics = (Metric("cpu", "us", at_most=1.0),)

        def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
            tried.append(f"{self.name} {contestant.name}")
            if contestant.name == "tidelog" and self.name == "x":
                raise BenchError("it is\nnot there")
            return {"cpu": 1.0}

    @contextmanager
    def pretend(names: Any, brokers: int, running: bool, refused: Any) -> Any:
        if brokers == 3:
            refused("kafka", ServerFailed("no"))
        found = [name for name in names if brokers == 1 or name != "kafka"]
        yield [Contestant(name, Alone(ServerProcess("/nowhere")), Mock(), Path("/nowhere")) for name in found]

    monkeypatch.setattr(compare, "contestants", pretend)
    scenarios = [Failing("x", "X"), Failing("y", "Y"), Failing("z", "Z", 3)]
    rows = compare.run(scenarios, ["tidelog", "kafka"], rounds=2, scale=0.1)
    assert tried == [
        "x tidelog",
        "x kafka",
        "y tidelog",
        "y kafka",
        "x kafka",
        "y kafka",
        "y tidelog",
        *["z tidelog"] * 2,
    ]
    assert [row.figures for row in rows] == [
        {"kafka": [1.0, 1.0]},
        {"tidelog": [1.0, 1.0], "kafka": [1.0, 1.0]},
        {"tidelog": [1.0, 1.0]},
    ]
    assert [row.failures for row in rows] == [
        {"tidelog": "BenchError: it is not there"},
        {},
        {"kafka": "ServerFailed: no"},
    ]
    assert [row.passes for row in rows] == [False, True, True]
    assert report.failures(rows) == ["x, tidelog: BenchError: it is not there", "z, kafka: ServerFailed: no"]
