"""Scenario 6: latency from the time a record is due to its acknowledgement, and to its arrival.

An open loop: records are due at a fixed rate whether earlier ones are answered or not, and latency
counts from the due time. So a pause of the broker delays all records that were due meanwhile, and
is seen in the percentiles (no coordinated omission). The consumer is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tidelog.bench.acks.contest import BROKERS
from tidelog.bench.compare import FAILURES, OURS, THEIRS, contestants
from tidelog.bench.figures import one_line, percentile
from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import Contestant, Topic, topic
from tidelog.bench.studies.arrivals import DUE
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.results import Cell, Chart, Series, StudyResult, Table, Verdict

PARTITIONS, REPLICAS, MIN_INSYNC, RECORD_BYTES = 12, 4, 2, 1000
PERCENTS = (50.0, 90.0, 99.0, 99.9, 99.99)
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Parameters:
    """`warm_s` seconds are sent and not counted."""

    rounds: int
    records_per_s: int
    seconds: float
    warm_s: float


QUICK, FULL = Parameters(1, 200, 2, 1), Parameters(3, 500, 20, 5)
# Milliseconds of Kafka 0.10.1 on four brokers of 24 cores: average, minimum, maximum, p99, p99.99.
REFERENCE = {"send": (1.715, 1, 157, 3, 29), "end to end": (1.646, 1, 288, 4, 72)}


class Latency:
    number = 6
    title = "Latency at a steady rate"
    question = "How long does a record take to its acknowledgement, and to a consumer that waits?"

    def measure(self, context: Context, result: StudyResult) -> None:
        chosen = QUICK if context.is_quick else FULL
        result.parameters = {
            "cluster": f"{BROKERS} nodes",
            "topic": f"{PARTITIONS} partitions, {REPLICAS} replicas, min.insync.replicas={MIN_INSYNC}",
            "flush": "no fsync before an answer (both brokers' default)",
            "load": f"{chosen.records_per_s:,} records of {RECORD_BYTES:,} bytes a second, open loop",
            "client": "librdkafka, acks=all, linger 0; the consumer is a process of its own",
            "rounds": f"{chosen.rounds} of {chosen.seconds:g} s after {chosen.warm_s:g} s that warm; brokers in turn",
        }
        latencies: dict[tuple[str, str], list[array[int]]] = {}

        def refused(name: str, error: Exception) -> None:
            result.failures.append(f"{name}: {one_line(error)}")

        try:
            with contestants(context.brokers, BROKERS, refused=refused) as field:
                for number in range(chosen.rounds):
                    for contestant in field if number % 2 == 0 else field[::-1]:
                        context.progress(f"latency: round {number + 1} of {chosen.rounds}: {contestant.name}")
                        try:
                            sent, arrived = _measure(contestant, chosen)
                        except FAILURES as error:
                            refused(contestant.name, error)
                            continue
                        latencies.setdefault(("send", contestant.name), []).append(sent)
                        latencies.setdefault(("end to end", contestant.name), []).append(arrived)
        finally:
            _show(result, latencies)


def _show(result: StudyResult, latencies: dict[tuple[str, str], list[array[int]]]) -> None:
    columns = ["from due to", "broker", "records", "average", "min", *(f"p{percent:g}" for percent in PERCENTS), "max"]
    table = Table("Milliseconds", columns, note="All rounds together.")
    ordered = {key: sorted(value / 1e6 for each in rounds for value in each) for key, rounds in latencies.items()}
    for (what, name), values in sorted(ordered.items(), reverse=True):
        if values:
            row: list[Cell] = [what, name, len(values), sum(values) / len(values), values[0]]
            table.rows.append([*row, *(percentile(values, percent) for percent in PERCENTS), values[-1]])
    for what, (average, least, most, p99, p9999) in REFERENCE.items():
        table.rows.append(
            [what, "Kafka 0.10.1, 4 x 24 cores", None, average, least, None, None, p99, None, p9999, most]
        )
    result.tables = [table]
    chart = Chart(
        "Latency by percentile", "percent of records that take longer", "milliseconds", y_is_log=True, x_is_log=True
    )
    for (what, name), values in sorted(ordered.items(), reverse=True):
        points = [
            (100 - percent, value_ms) for percent in PERCENTS if (value_ms := percentile(values, percent)) is not None
        ]
        chart.series.append(Series(f"{name}, {what}", name, points, what))
    result.charts = [chart]
    for what in REFERENCE:
        result.verdicts += ahead_verdicts(what, ordered.get((what, OURS), []), ordered.get((what, THEIRS), []))


def ahead_verdicts(what: str, ours: Sequence[float], theirs: Sequence[float]) -> list[Verdict]:
    """Whether our percentiles are below Kafka's; none where one was not measured."""
    verdicts = []
    for percent in PERCENTS[:-1]:
        mine, its = percentile(ours, percent), percentile(theirs, percent)
        if mine is not None and its is not None:
            evidence = f"{mine:.2f} and {its:.2f} ms"
            verdicts.append(Verdict(f"{what}: p{percent:g} below Kafka's", OURS, mine < its, evidence))
    return verdicts


def _measure(contestant: Contestant, chosen: Parameters) -> tuple[array[int], array[int]]:
    """Nanoseconds to the acknowledgement and to the arrival, of each record after the warming ones."""
    with topic(contestant, PARTITIONS, REPLICAS, {"min.insync.replicas": str(MIN_INSYNC)}) as its:
        warming = int(chosen.records_per_s * chosen.warm_s)
        records = warming + int(chosen.records_per_s * chosen.seconds)
        command = [
            sys.executable,
            "-m",
            "tidelog.bench.studies.arrivals",
            contestant.cluster.bootstrap_servers,
            its.name,
        ]
        consumer = subprocess.Popen([*command, str(PARTITIONS), str(records)], stdout=subprocess.PIPE)
        try:
            assert consumer.stdout is not None
            if consumer.stdout.readline() != b"ready\n":
                raise BenchError("the consumer did not start")
            sent = _send(contestant, its, records, chosen.records_per_s)
            arrived = array("q")
            arrived.frombytes(consumer.communicate(timeout=2 * _TIMEOUT_S)[0])
        except subprocess.TimeoutExpired:
            raise BenchError("the consumer does not end") from None
        finally:
            consumer.kill()
            consumer.wait()
        if len(arrived) != records:
            raise BenchError(f"{len(arrived):,} of {records:,} records arrived")
        return sent[warming:], arrived[warming:]


def _send(contestant: Contestant, its: Topic, records: int, records_per_s: int) -> array[int]:
    from confluent_kafka import Producer

    latencies = array("q", bytes(8 * records))
    failures: list[str] = []
    clock, pad = time.monotonic_ns, bytes(RECORD_BYTES - DUE.size)
    producer = Producer(
        {"bootstrap.servers": contestant.cluster.bootstrap_servers, "acks": "all", "linger.ms": 0, "log_level": 0}
    )
    interval_ns, start_ns = int(1e9 / records_per_s), clock()
    for number in range(records):
        due_ns = start_ns + number * interval_ns

        def on_delivery(error: object, _: object, number: int = number, due_ns: int = due_ns) -> None:
            latencies[number] = clock() - due_ns
            if error is not None:
                failures.append(str(error))

        while (left_ns := due_ns - clock()) > 0:
            producer.poll(left_ns / 1e9)
        producer.produce(its.name, DUE.pack(due_ns) + pad, partition=number % PARTITIONS, on_delivery=on_delivery)
    if producer.flush(_TIMEOUT_S) or failures:
        raise BenchError(f"not all records were sent: {failures[:1]}")
    return latencies
