"""The servers that a small produce is measured against: they write every batch and answer as brokers would."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tidelog.bench import floor as floor_module
from tidelog.bench.floor import Floor
from tidelog.bench.frames import ProducePlan, record_batch
from tidelog.bench.raw import BenchError, RawConnection
from tidelog.bench.scenarios.produce_raw import scenarios
from tidelog.testing.usage import cpu_ns

BATCH = record_batch([b"v" * 200], 1)
PLAN = ProducePlan("bench-0001", {0: BATCH})


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("window", [1, 16])
def test_they_write_every_batch_and_answer_every_request(tmp_path: Path, window: int, replicas: int) -> None:
    with Floor(tmp_path, PLAN, replicas) as floor, RawConnection(floor.port) as connection:
        timing = connection.pipeline_produce(PLAN, 500, window)
        assert len(timing.latencies_ns) == 500
        logs = sorted(tmp_path.glob("floor-*/log*"))
        # An answer leaves after each follower's next fetch, and that after its write.
        assert [log.read_bytes() == BATCH * 500 for log in logs] == [True] * replicas
        assert floor.cpu_ns > 0
    assert not list(tmp_path.iterdir())


def test_its_cpu_is_that_of_all_replicas(tmp_path: Path) -> None:
    with Floor(tmp_path, PLAN, 3) as floor:
        together_ns = floor.cpu_ns
        assert together_ns > 2 * max(cpu_ns(process.pid) for process in floor._processes)


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 60"])
def test_servers_that_do_not_start_end_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(floor_module, "_PATIENCE_S", 1.0)
    floor = Floor(tmp_path, PLAN, 3)
    with pytest.raises(BenchError, match="did not start"):
        floor.__enter__()
    assert [process.poll() is None for process in floor._processes] == [False]
    assert list(tmp_path.iterdir()) == [python]


def test_each_row_of_200_bytes_with_one_in_flight_is_told_as_a_multiple() -> None:
    with_floor = [one.name for one in scenarios() if "cpu / floor" in [metric.name for metric in one.metrics]]
    assert with_floor == ["produce-200b-w1", "produce-200b-w16", "rf3-produce-200b-w1"]
