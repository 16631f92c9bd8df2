"""The brokers' cost per record as one size grows: record size, partitions, connections, consumers, brokers.

Each point is the CPU of all brokers together divided by the records of that point. A curve that is
flat scales; one that rises says where it does not.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidelog.bench.clusters import RunningCluster
from tidelog.bench.compare import FAILURES, MAKERS, OURS, THEIRS
from tidelog.bench.figures import one_line
from tidelog.bench.scenarios.base import Contestant, CpuMeter, topic
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.librdkafka import consume, produce
from tidelog.bench.studies.results import Chart, Series, StudyResult, Table, ratio

_TIMEOUT_S = 120.0
_RECORD_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Parameters:
    """The points of each curve. `bytes_per_point`: how much is sent for a point of the size curve."""

    sizes_bytes: tuple[int, ...]
    partitions: tuple[int, ...]
    connections: tuple[int, ...]
    consumers: tuple[int, ...]
    brokers: tuple[int, ...]
    records: int
    bytes_per_point: int


QUICK = Parameters((10, 10_000), (1, 100), (1, 50), (1, 4), (1, 3), 2_000, 2_000_000)
FULL = Parameters(
    (10, 100, 1_000, 10_000, 100_000, 900_000),
    (1, 10, 100, 1_000, 10_000),
    (1, 100, 1_000, 5_000),
    (1, 4, 16, 64),
    (1, 2, 3, 4, 6),
    100_000,
    200_000_000,
)


Cost = Callable[[Contestant, int, Parameters], float]


class Curves:
    number = 8
    title = "Curves: the cost of a record"
    question = "How does the brokers' CPU for a record change as one thing grows and all else stays?"

    def measure(self, context: Context, result: StudyResult) -> None:
        chosen = QUICK if context.is_quick else FULL
        result.parameters = {
            "client": "librdkafka, acks=all, no compression, records of 1,000 bytes unless the curve says otherwise",
            "cost": "CPU of all brokers in microseconds, divided by records",
            "replicas": "1; over the number of brokers, as many as there are, at most 3",
        }
        curves: list[tuple[str, str, Sequence[int], Cost]] = [
            ("Record size", "bytes", chosen.sizes_bytes, _of_size),
            ("Partitions of the topic", "partitions", chosen.partitions, _on_partitions),
            ("Open connections beside the producer's", "connections", chosen.connections, _beside),
            ("Consumers that each read everything", "consumers", chosen.consumers, _consumed),
        ]
        for title, unit, points, cost in curves:
            with _alone(context, 1, result) as field:

                def on_one(name: str, point: int, field: Any = field, cost: Cost = cost) -> float | None:
                    return cost(field[name], point, chosen) if name in field else None

                _draw(context, result, title, unit, points, on_one)

        def on_brokers(name: str, count: int) -> float | None:
            with _alone(Context([name], context.is_quick, context.progress), count, result) as field:
                return _produce_cost_us(field[name], 12, chosen.records) if name in field else None

        _draw(context, result, "Brokers", "brokers", chosen.brokers, on_brokers)


def _draw(
    context: Context,
    result: StudyResult,
    title: str,
    unit: str,
    points: Sequence[int],
    cost: Callable[[str, int], float | None],
) -> None:
    """Measure each point on each broker in turn; add the table and the chart."""
    chart = Chart(title, unit, "us of broker CPU per record", x_is_log=True, y_is_log=True)
    table = Table(title, [unit, *(f"{name}, us" for name in context.brokers)])
    if {OURS, THEIRS} <= set(context.brokers):
        table.columns.append("ratio")
    lines = {name: Series(name, name, []) for name in context.brokers}
    chart.series = list(lines.values())
    result.charts.append(chart)
    result.tables.append(table)
    for point in points:
        costs: dict[str, float | None] = {}
        for name in context.brokers:
            context.progress(f"curves: {title.lower()}: {point:,}: {name}")
            try:
                costs[name] = cost(name, point)
            except FAILURES as error:
                costs[name] = None
                result.failures.append(f"{name}, {title.lower()}, {point:,}: {one_line(error)}")
            value = costs[name]
            if value is not None:
                lines[name].points.append((point, value))
        row: list[str | float | int | None] = [point, *costs.values()]
        if {OURS, THEIRS} <= set(context.brokers):
            row.append(ratio(costs[OURS], costs[THEIRS]))
        table.rows.append(row)


@contextmanager
def _alone(context: Context, brokers: int, result: StudyResult) -> Iterator[dict[str, Contestant]]:
    """A fresh cluster of each broker under measure, warmed, by name."""
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as scratch, ExitStack() as clusters:
        started = {}
        for name in context.brokers:
            try:
                cluster = MAKERS[name](Path(scratch, name), brokers)
                clusters.enter_context(RunningCluster(cluster))
                contestant = Contestant(name, cluster, lambda _: cluster, Path(scratch), min(3, brokers))  # noqa: B023
                _produce_cost_us(contestant, 12, 2_000 if context.is_quick else 100_000)
            except FAILURES as error:
                result.failures.append(f"{name}: {one_line(error)}")
                continue
            started[name] = contestant
        yield started


def _of_size(contestant: Contestant, size_bytes: int, chosen: Parameters) -> float:
    records = max(200, min(chosen.bytes_per_point // size_bytes, chosen.records))
    return _produce_cost_us(contestant, 12, records, size_bytes)


def _produce_cost_us(contestant: Contestant, partitions: int, records: int, size_bytes: int = _RECORD_BYTES) -> float:
    """CPU microseconds of all brokers for one record, after one record into each partition."""
    with topic(contestant, partitions) as its:
        produce(contestant, its.name, partitions, 10, partitions=partitions)
        with CpuMeter(contestant.servers) as meter:
            produce(contestant, its.name, records, size_bytes, partitions=partitions)
        return meter.used_ns / 1000 / records


def _on_partitions(contestant: Contestant, partitions: int, chosen: Parameters) -> float:
    return _produce_cost_us(contestant, partitions, max(chosen.records, partitions))


def _beside(contestant: Contestant, connections: int, chosen: Parameters) -> float:
    """With so many idle connections open."""
    with ExitStack() as opened:
        for _ in range(connections):
            opened.enter_context(socket.create_connection(("127.0.0.1", contestant.server.port), _TIMEOUT_S))
        return _produce_cost_us(contestant, 12, chosen.records)


def _consumed(contestant: Contestant, consumers: int, chosen: Parameters) -> float:
    """CPU microseconds for one record delivered to one consumer."""
    records = chosen.records
    with topic(contestant, 12) as its:
        produce(contestant, its.name, records, _RECORD_BYTES, partitions=12)
        with CpuMeter(contestant.servers) as meter:
            consume(contestant, its.name, 12, records, consumers=consumers)
        return meter.used_ns / 1000 / (records * consumers)
