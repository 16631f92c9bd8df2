"""The server that a small produce is measured against: it writes every batch and answers as a broker would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelog.bench.floor import Floor
from tidelog.bench.frames import ProducePlan, record_batch
from tidelog.bench.raw import RawConnection


@pytest.mark.parametrize("window", [1, 16])
def test_it_writes_every_batch_and_answers_every_request(tmp_path: Path, window: int) -> None:
    batch = record_batch([b"v" * 200], 1)
    plan = ProducePlan("bench-0001", {0: batch})
    with Floor(tmp_path, plan) as floor, RawConnection(floor.port) as connection:
        timing = connection.pipeline_produce(plan, 500, window)
        assert len(timing.latencies_ns) == 500
        [log] = tmp_path.glob("floor-*/log")
        assert log.read_bytes() == batch * 500
        assert floor.cpu_ns > 0
    assert not list(tmp_path.iterdir())
