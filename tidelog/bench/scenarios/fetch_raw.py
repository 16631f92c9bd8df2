"""Fetch on a raw connection: the broker's cost per gigabyte for a client that reads 2 MB at a time."""

from __future__ import annotations

import time

from tidelog.bench import frames
from tidelog.bench.raw import BenchError, RawConnection
from tidelog.bench.scenarios.base import GIGABYTE, MEGABYTE, Contestant, CpuMeter, Metric, Scenario, topic
from tidelog.testing.usage import warm_pages

_RECORDS = 64
_VALUE = b"v" * 1000


class FetchRaw(Scenario):
    """One partition filled with 64 KB batches, read from its start once, one request in flight."""

    metrics = (Metric("cpu", "s/GB", ratio_at_most=1.0), Metric("rate", "MB/s"))

    def __init__(self) -> None:
        super().__init__("fetch-2mb", "fetch 2 MB at a time")
        self.size_bytes = 600 * MEGABYTE

    def warm(self, contestant: Contestant, scale: float) -> None:
        self.measure(contestant, 0.5)

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        batch = frames.record_batch([_VALUE] * _RECORDS, int(time.time() * 1000))
        count = int(self.size_bytes * scale) // len(batch)
        with topic(contestant, 1) as its, RawConnection(its.port) as connection:
            name = its.name
            warm_pages(count * len(batch))
            connection.pipeline_produce(frames.ProducePlan(name, {0: batch}), count, 4)
            began = time.perf_counter()
            with CpuMeter(contestant.servers) as meter:
                taken_bytes = self._drain(connection, name, len(batch), count * _RECORDS)
            elapsed_s = time.perf_counter() - began
        return {"cpu": meter.used_ns / taken_bytes * GIGABYTE / 1e9, "rate": taken_bytes / MEGABYTE / elapsed_s}

    def _drain(self, connection: RawConnection, name: str, batch_bytes: int, records: int) -> int:
        """Read `records` records from the start; returns the bytes of record batches taken."""
        offset, taken_bytes = 0, 0
        while offset < records:
            connection.send(frames.fetch(name, {0: offset}, 1))
            answer = frames.read_fetch_answer(connection.receive())
            whole = answer.records_size_bytes // batch_bytes
            if answer.error_code or whole == 0:
                raise BenchError(f"fetch at {offset}: {answer}")
            offset += whole * _RECORDS
            taken_bytes += answer.records_size_bytes
        return taken_bytes


def scenarios() -> list[Scenario]:
    return [FetchRaw()]
