"""Scenario 5: brokers are killed under a producer. What goes on, what fails, and what is doubled.

Four brokers, and one controller that is not killed. The producer is librdkafka; it sends at a fixed
rate whether answers come or not. Afterwards every record is read back: an acknowledged one that is
missing is a loss, one that stands twice is a double.
"""

from __future__ import annotations

import struct
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tidelog.bench.clusters import Cluster
from tidelog.bench.compare import FAILURES, OPTIONS, OURS
from tidelog.bench.figures import one_line
from tidelog.bench.metadata import await_brokers, await_leaders
from tidelog.bench.peers import KafkaCluster
from tidelog.bench.raw import BenchError
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.results import Chart, Mark, Series, StudyResult, Table, Verdict, rate_over_time
from tidelog.bench.topics import NewTopic, create
from tidelog.testing.cluster import EmbeddedCluster, tidelog_node

BROKERS, PARTITIONS, REPLICAS, MIN_INSYNC = 4, 12, 4, 2
RECORD_BYTES = 1000
_NUMBER = struct.Struct(">q")
_READY_TIMEOUT_S = 120.0
_READ_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """`killed` of the four brokers are killed at once and started again later."""

    killed: int
    retries: bool
    idempotence: bool

    def __str__(self) -> str:
        kind = "idempotent" if self.idempotence else f"retries {'on' if self.retries else '0'}"
        return f"{self.killed} of {BROKERS} killed, {kind}"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Seconds from the first record to the kill, to the restart, and to the last record."""

    kill_s: float
    restart_s: float
    end_s: float
    records_per_s: int
    cases: tuple[Case, ...]


CASES = (Case(2, False, False), Case(2, True, False), Case(2, True, True), Case(3, True, True))
FULL = Parameters(5, 25, 40, 2000, CASES)
QUICK = Parameters(1, 4, 12, 500, (Case(2, True, True), Case(3, True, True)))


@dataclass(slots=True)
class Sent:
    """What became of the records of one case, times in seconds since the first."""

    acknowledged_s: dict[int, float] = field(default_factory=dict)
    failed_s: dict[int, float] = field(default_factory=dict)
    count: int = 0
    restarted_s: float = 0.0
    killed_s: float = 0.0


class Kills:
    number = 5
    title = "Brokers killed while records are sent"
    question = "What goes on, what fails, what is lost or doubled, and does sending resume by itself?"

    def measure(self, context: Context, result: StudyResult) -> None:
        chosen = QUICK if context.is_quick else FULL
        result.parameters = {
            "cluster": f"{BROKERS} brokers; one controller that is not killed",
            "topic": f"{PARTITIONS} partitions, {REPLICAS} replicas, min.insync.replicas={MIN_INSYNC}",
            "producer": "librdkafka, acks=all, open loop",
            "load": f"{chosen.records_per_s:,} records of {RECORD_BYTES} bytes a second",
            "timeline": f"kill at {chosen.kill_s:g} s, restart at {chosen.restart_s:g} s, end at {chosen.end_s:g} s",
        }
        table = Table(
            "Records",
            ["case", "broker", "sent", "acknowledged", "failed", "acknowledged and lost", "doubled",
             "longest pause, s", "a second before the kill", "between kill and restart", "in the last third"],
        )  # fmt: skip
        result.tables = [table]
        charts = {case: Chart(str(case), "seconds", "acknowledged a second") for case in chosen.cases}
        result.charts = list(charts.values())
        for name in context.brokers:
            with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as scratch:
                try:
                    with _cluster(name, Path(scratch)) as cluster:
                        for number, case in enumerate(chosen.cases):
                            context.progress(f"kills: {case}: {name}")
                            self._measure_case(cluster, name, number, case, chosen, table, charts[case], result)
                except FAILURES as error:
                    result.failures.append(f"{name}: {one_line(error)}")

    def _measure_case(
        self,
        cluster: Cluster,
        name: str,
        number: int,
        case: Case,
        chosen: Parameters,
        table: Table,
        chart: Chart,
        result: StudyResult,
    ) -> None:
        topic = f"kills-{number}"
        port = cluster.nodes[1].port
        await_brokers([cluster.nodes[broker].port for broker in range(1, BROKERS + 1)], BROKERS, _READY_TIMEOUT_S)
        create(port, [NewTopic(topic, PARTITIONS, REPLICAS, {"min.insync.replicas": str(MIN_INSYNC)})])
        await_leaders(port, topic, PARTITIONS, REPLICAS, _READY_TIMEOUT_S)
        sent = _send_under_kills(cluster, topic, case, chosen)
        await_leaders(port, topic, PARTITIONS, REPLICAS, _READY_TIMEOUT_S)
        copies = _read_back(cluster.bootstrap_servers, topic)
        lost = sum(number not in copies for number in sent.acknowledged_s)
        doubled = sum(count - 1 for count in copies.values())
        times = sorted(sent.acknowledged_s.values())
        rates = rate_over_time(times, 0.25, chosen.end_s)
        pause_s = _longest_pause_s(times, chosen.end_s)
        table.rows.append(
            [str(case), name, sent.count, len(sent.acknowledged_s), len(sent.failed_s), lost, doubled, pause_s,
             _rate(times, 0, sent.killed_s), _rate(times, sent.killed_s, sent.restarted_s),
             _rate(times, chosen.end_s * 2 / 3, chosen.end_s)]
        )  # fmt: skip
        chart.series.append(Series(f"{name}, acknowledged", name, rates, "acknowledged"))
        if sent.failed_s:
            failed = rate_over_time(sent.failed_s.values(), 0.25, chosen.end_s)
            chart.series.append(Series(f"{name}, failed", name, failed, "failed"))
        if not chart.marks:
            chart.marks = [Mark(sent.killed_s, "kill"), Mark(sent.restarted_s, "restart")]
        result.verdicts += verdicts(
            case, name, sent, lost, doubled, _rate(times, chosen.end_s * 0.8, chosen.end_s), chosen
        )


def verdicts(
    case: Case, broker: str, sent: Sent, lost: int, doubled: int, last_rate: float, chosen: Parameters
) -> list[Verdict]:
    """The laws of this scenario for one case."""
    laws = [Verdict(f"{case}: every acknowledged record is there", broker, lost == 0, f"{lost} lost")]
    if case.idempotence:
        laws.append(Verdict(f"{case}: nothing is doubled", broker, doubled == 0, f"{doubled} doubled"))
    if case.retries:
        failed = len(sent.failed_s)
        laws.append(Verdict(f"{case}: nothing fails", broker, failed == 0, f"{failed} of {sent.count:,} failed"))
    evidence = f"{last_rate:,.0f} of {chosen.records_per_s:,} records a second at the end"
    laws.append(Verdict(f"{case}: sending resumes by itself", broker, last_rate > chosen.records_per_s / 2, evidence))
    return laws


def _cluster(name: str, directory: Path) -> EmbeddedCluster | KafkaCluster:
    """Not started. It has one voter that is no victim: the last brokers are killed."""
    if name == OURS:
        return EmbeddedCluster(BROKERS, directory, controllers=1, config=OPTIONS, make_node=tidelog_node)
    return KafkaCluster(directory, BROKERS, 1, OPTIONS)


def _send_under_kills(cluster: Cluster, topic: str, case: Case, chosen: Parameters) -> Sent:
    """Send at the chosen rate from start to end; kill and start again on the way."""
    from confluent_kafka import Producer

    victims = [cluster.nodes[BROKERS - place] for place in range(case.killed)]
    sent = Sent()
    producer = Producer(_settings(cluster.bootstrap_servers, case))
    value = bytes(RECORD_BYTES - _NUMBER.size)
    clock = time.monotonic
    start_s = clock()

    def send(number: int) -> None:
        def on_delivery(error: Any, _: Any) -> None:
            (sent.acknowledged_s if error is None else sent.failed_s)[number] = clock() - start_s

        sent.count += 1
        try:
            producer.produce(topic, _NUMBER.pack(number) + value, on_delivery=on_delivery)
        except BufferError:
            sent.failed_s[number] = clock() - start_s

    while (now_s := clock() - start_s) < chosen.end_s:
        if not sent.killed_s and now_s >= chosen.kill_s:
            for victim in victims:
                victim.kill()
            sent.killed_s = now_s
        if not sent.restarted_s and now_s >= chosen.restart_s:
            for victim in victims:
                victim.launch()
            sent.restarted_s = now_s
        while sent.count < now_s * chosen.records_per_s:
            send(sent.count)
        producer.poll(0.005)
    left = producer.flush(_READ_TIMEOUT_S)
    for victim in victims:
        victim.await_ready(_READY_TIMEOUT_S)
    if left:
        raise BenchError(f"{left} records were neither acknowledged nor refused")
    return sent


def _settings(bootstrap: str, case: Case) -> dict[str, Any]:
    return {
        "bootstrap.servers": bootstrap,
        "acks": "all",
        "enable.idempotence": case.idempotence,
        "linger.ms": 5,
        "log_level": 0,
        "queue.buffering.max.messages": 1_000_000,
        "reconnect.backoff.max.ms": 1000,
        **({} if case.retries else {"message.send.max.retries": 0}),
    }


def _read_back(bootstrap: str, topic: str) -> Counter[int]:
    """How often each number stands in the topic."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "log_level": 0}
    )
    copies: Counter[int] = Counter()
    try:
        ends: Mapping[int, int] = {
            index: consumer.get_watermark_offsets(TopicPartition(topic, index), _READ_TIMEOUT_S)[1]
            for index in range(PARTITIONS)
        }
        consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for index, end in ends.items() if end])
        remaining, deadline_s = sum(ends.values()), time.monotonic() + _READ_TIMEOUT_S
        while remaining > 0:
            for message in consumer.consume(min(remaining, 5000), 1.0):
                if message.error() is None:
                    remaining -= 1
                    copies[_NUMBER.unpack_from(message.value() or b"")[0]] += 1
            if time.monotonic() > deadline_s:
                raise BenchError(f"{remaining} records of {topic} do not come")
    finally:
        consumer.close()
    return copies


def _rate(times: list[float], from_s: float, to_s: float) -> float:
    return sum(from_s <= time_s < to_s for time_s in times) / (to_s - from_s)


def _longest_pause_s(times: list[float], end_s: float) -> float:
    """Between two acknowledgements, the start and the end included."""
    bounds = [0.0, *(time_s for time_s in times if time_s < end_s), end_s]
    return max(later - earlier for earlier, later in pairwise(bounds))
