"""Many partitions: the table tells the growth and what is missing; the steps run against a real cluster."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from tidelog.bench import report, scale, scale_node
from tidelog.bench.compare import OURS
from tidelog.bench.scale import ScaleResult, Waits

FEW = ScaleResult({"create, s": 0.5, "failover, s": 1.0, "empty: idle CPU of a node, ms/s": 0.0})
# The figures are not looked at, so that a node need not come to rest first.
SHORT = Waits(settle_s=0, idle_s=0.2, first_upkeep_s=0)
MANY = ScaleResult({"create, s": 4.0, "empty: idle CPU of a node, ms/s": 3.0}, "BenchError: not within 300 s")


def test_the_table_tells_each_figure_and_its_growth():
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.scale_table({("tidelog", 1000): FEW, ("tidelog", 10_000): MANY}, 3))
    console.file.close()
    lines = [line.split("│") for line in console.export_text().splitlines() if line.startswith("│")]
    cells = {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines}
    assert cells == {
        "create, s": ["0.5", "4", "8.0x"],
        "failover, s": ["1", "-", "-"],
        "empty: idle CPU of a node, ms/s": ["0", "3", "-"],
    }


def test_the_json_tells_what_failed():
    found = json.loads(report.scale_json({("kafka", 10): MANY}, 3))
    assert found["runs"] == [
        {"broker": "kafka", "partitions": 10, "figures": MANY.figures, "failure": "BenchError: not within 300 s"}
    ]


@pytest.mark.slow
def test_every_step_is_taken_by_one_broker():
    # The memory of fewer connections may come from what the node has free.
    result = scale_node.run(OURS, 30, 300, waits=SHORT)
    assert result.failure == ""
    assert result.figures["start after a stop, all led, s"] > 0
    assert result.figures["memory per connection, KiB"] > 0


@pytest.mark.slow
def test_what_is_lost_is_noticed(monkeypatch):
    monkeypatch.setattr(scale_node._NodeSteps, "_produce", lambda steps, bootstrap: None)
    assert scale_node.run(OURS, 3, 0, waits=SHORT).failure == "BenchError: 0 records are left of 9"


@pytest.mark.slow
def test_every_step_is_taken_by_three_brokers():
    result = scale.run(OURS, 3, 30, waits=SHORT)
    assert result.failure == ""
    assert result.figures["leaderships of the lost broker"] == 10
    assert result.figures["start, in sync, s"] > 0
