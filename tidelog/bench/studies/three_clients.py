"""Scenario 12: three clients on each broker: Tidelog's, librdkafka (confluent-kafka) and Java's own tools.

A broker that is measured by one client alone may suit that client alone. Every client sends with acks=all, idempotence
and a linger of 5 ms, and runs in a process of its own; a tenth of the records comes first and counts in no rate.
Java's are ProducerPerformance and ConsumerPerformance of Kafka's distribution.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from tidelog.bench.compare import FAILURES, OURS, THEIRS, contestants
from tidelog.bench.figures import one_line
from tidelog.bench.peers import bring_kafka, java_command
from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import Contestant, CpuMeter, topic
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.librdkafka import produce
from tidelog.bench.studies.results import Cell, StudyResult, Table, Verdict, ratio

BROKERS, PARTITIONS, REPLICAS, MIN_INSYNC = 3, 12, 3, 2
_TIMEOUT_S = 180.0
JAVA = "Java's tool"
CLIENTS = ("tidelog", "confluent-kafka", JAVA)
PRODUCE, CONSUME = "produce", "consume"


@dataclass(frozen=True, slots=True)
class Parameters:
    """`records` for each size in bytes."""

    rounds: int
    records: Mapping[int, int]


QUICK, FULL = Parameters(1, {100: 5_000}), Parameters(3, {100: 300_000, 1000: 150_000})


class Case(NamedTuple):
    """One client, one kind of work, records of one size."""

    kind: str
    size_bytes: int
    client: str


class Measurement(NamedTuple):
    rate: float
    """Records a second, as the client counts them."""
    cpu_us: float
    """CPU of all brokers for a record."""


Rounds = dict[tuple[Case, str], list[Measurement]]


class ThreeClients:
    number = 12
    title = "Three clients"
    question = "Does each broker serve each client alike?"

    def measure(self, context: Context, result: StudyResult) -> None:
        chosen = QUICK if context.is_quick else FULL
        result.parameters = {
            "cluster": f"{BROKERS} nodes",
            "topic": f"{PARTITIONS} partitions, {REPLICAS} replicas, min.insync.replicas={MIN_INSYNC}",
            "clients": "Tidelog's asyncio client, record by record; confluent-kafka; Java's performance tools",
            "load": ", ".join(f"{count:,} records of {size:,} bytes" for size, count in chosen.records.items()),
            "settings": "acks=all, idempotence, linger 5 ms; every other setting is the client's default",
            "flush": "no fsync before an answer (both brokers' default)",
            "rounds": f"{chosen.rounds}, brokers in turn; medians",
        }
        clients = list(CLIENTS)
        if (reason := bring_kafka()) is not None:
            clients.remove(JAVA)
            result.parameters["without Java's tools"] = reason
        cases = [
            Case(kind, size, client) for kind in (PRODUCE, CONSUME) for size in chosen.records for client in clients
        ]
        rounds_of: Rounds = {}

        def refused(name: str, error: Exception) -> None:
            result.failures.append(f"{name}: {one_line(error)}")

        try:
            with contestants(context.brokers, BROKERS, refused=refused) as field:
                for number in range(chosen.rounds):
                    for case in cases:
                        for contestant in field if number % 2 == 0 else field[::-1]:
                            context.progress(
                                f"clients: round {number + 1} of {chosen.rounds}: {case.kind}, {case.size_bytes} B, "
                                f"{case.client}: {contestant.name}"
                            )
                            try:
                                measured = _measure(contestant, case, chosen.records[case.size_bytes])
                            except FAILURES as error:
                                refused(f"{contestant.name}, {case.client}", error)
                                continue
                            rounds_of.setdefault((case, contestant.name), []).append(measured)
        finally:
            show(result, cases, rounds_of, context.brokers)


def show(result: StudyResult, cases: Sequence[Case], rounds_of: Rounds, brokers: Sequence[str]) -> None:
    """The table and the verdicts of what was measured so far."""
    columns = ["work", "bytes", "client"]
    for name in brokers:
        columns += [f"{name}, records/s", f"{name}, CPU us a record"]
    both = {OURS, THEIRS} <= set(brokers)
    table = Table("Rates and cost", columns + (["ratio of rates", "ratio of CPU"] if both else []))
    table.note = "CPU is that of all brokers."
    for case in cases:
        row: list[Cell] = [case.kind, case.size_bytes, case.client]
        medians = {name: _median(rounds_of.get((case, name), [])) for name in brokers}
        for rate, cpu_us in medians.values():
            row += [rate, cpu_us]
        if both:
            (rate, cpu_us), (its_rate, its_cpu_us) = medians[OURS], medians[THEIRS]
            row += [ratio(rate, its_rate), ratio(cpu_us, its_cpu_us)]
            if cpu_us is not None and its_cpu_us is not None:
                law = f"{case.kind}, {case.size_bytes} B, {case.client}: cheaper than Kafka"
                evidence = f"{cpu_us:.1f} and {its_cpu_us:.1f} us"
                result.verdicts.append(Verdict(law, OURS, cpu_us < its_cpu_us, evidence))
        table.rows.append(row)
    result.tables.append(table)


def _median(rounds: Sequence[Measurement]) -> tuple[float | None, float | None]:
    if not rounds:
        return None, None
    return median(each.rate for each in rounds), median(each.cpu_us for each in rounds)


def _measure(contestant: Contestant, case: Case, records: int) -> Measurement:
    """One round in a topic of its own."""
    with topic(contestant, PARTITIONS, REPLICAS, {"min.insync.replicas": str(MIN_INSYNC)}) as its:
        if case.kind == CONSUME:
            produce(contestant, its.name, records, case.size_bytes)
        run = _run_java if case.client == JAVA else _run_python
        with CpuMeter(contestant.servers) as meter:
            rate = run(case, contestant.cluster.bootstrap_servers, its.name, records)
        return Measurement(rate, meter.used_ns / 1000 / records)


def _run_python(case: Case, bootstrap: str, name: str, records: int) -> float:
    arguments = [case.kind, case.client, bootstrap, name, str(records), str(case.size_bytes)]
    output = _output([sys.executable, "-m", "tidelog.bench.clients.worker", *arguments])
    figures = json.loads(output)
    return float(figures["records"] / figures["elapsed_s"])


def _run_java(case: Case, bootstrap: str, name: str, records: int) -> float:
    command: list[str]
    parse: Callable[[str], float]
    if case.kind == PRODUCE:
        command, parse = java_command(
            "org.apache.kafka.tools.ProducerPerformance", "--bootstrap-server", bootstrap, "--topic", name,
            "--num-records", str(records), "--record-size", str(case.size_bytes), "--throughput", "-1",
            "--warmup-records", str(records // 10),
            "--command-property", "acks=all", "enable.idempotence=true", "linger.ms=5",
        ), produced_rate  # fmt: skip
    else:
        command, parse = java_command(
            "org.apache.kafka.tools.ConsumerPerformance", "--bootstrap-server", bootstrap, "--topic", name,
            "--num-records", str(records), "--hide-header",
        ), consumed_rate  # fmt: skip
    return parse(_output(command))


def produced_rate(output: str) -> float:
    """Records a second in the last summary of ProducerPerformance, without the warm-up. Raises BenchError."""
    rates: list[str] = re.findall(r"records sent, ([\d.]+) records/sec", output)
    if not rates:
        raise BenchError(f"no rate in {output[-200:]!r}")
    return float(rates[-1])


def consumed_rate(output: str) -> float:
    """Records a second in the output of ConsumerPerformance, without the time of joining. Raises BenchError."""
    for line in reversed(output.splitlines()):
        cells = line.split(",")
        if len(cells) == 10:
            return float(cells[-1])
    raise BenchError(f"no rate in {output[-200:]!r}")


def _output(command: Sequence[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise BenchError(f"not done after {_TIMEOUT_S:g} s") from None
    if ended.returncode != 0:
        raise BenchError(((ended.stderr or ended.stdout).strip().splitlines() or ["ended without a message"])[-1])
    return ended.stdout
