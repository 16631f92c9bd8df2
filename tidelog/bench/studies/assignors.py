"""Scenario 7: a member leaves a group and returns, under each assignor.

Topics t0, t1, t2 of 4, 4 and 5 partitions; member C0 reads t0, C1 reads t0 and t1, C2 reads all.
Records of 1,000 bytes come at the same rate into each partition. C0 leaves and returns. What is
looked at is the rate at which C1 and C2 together read, and their CPU: a rebalance that takes
partitions away from members that keep reading shows as a fall and a leap of that rate.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tidelog.bench.compare import FAILURES, contestants
from tidelog.bench.figures import one_line
from tidelog.bench.metadata import await_leaders
from tidelog.bench.scenarios.base import Contestant
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.results import Chart, Mark, Series, StudyResult, Table, Verdict
from tidelog.bench.topics import NewTopic, create, delete

ASSIGNORS = ("range", "roundrobin", "sticky", "cooperative-sticky")
PARTITIONS = {"t0": 4, "t1": 4, "t2": 5}
SUBSCRIPTIONS = (("t0",), ("t0", "t1"), ("t0", "t1", "t2"))
RECORD_BYTES = 1000
NOTE = (
    "The sticky assignors give C0 four partitions, range and round robin one or two. So C1 and C2 take over more when "
    "it leaves: that is the better balance before, not a rougher change. What a change itself costs those that stay is "
    "the partitions that move between them."
)
_STOP_TIMEOUT_S = 20.0
_JOIN_TIMEOUT_S = 30.0
_READ_STEP_S = 0.5


@dataclass(frozen=True, slots=True)
class Parameters:
    """C0 leaves at `leave_s` and returns at `return_s`; gains are taken over `window_s`."""

    records_per_s: int
    leave_s: float
    return_s: float
    end_s: float
    window_s: float


QUICK, FULL = Parameters(650, 3, 6, 9, 1), Parameters(2600, 20, 40, 60, 5)


@dataclass(slots=True)
class Member:
    """A consumer process and the samples that it has printed."""

    process: subprocess.Popen[bytes]
    samples: list[dict[str, Any]] = field(default_factory=list)


class Assignors:
    number = 7
    title = "Assignors while a member leaves and returns"
    question = "How much does the rate of those that stay change, and what CPU do they take?"

    def measure(self, context: Context, result: StudyResult) -> None:
        chosen = QUICK if context.is_quick else FULL
        result.parameters = {
            "group": "C0 reads t0, C1 reads t0 t1, C2 reads t0 t1 t2 (4, 4 and 5 partitions)",
            "client": "Tidelog's consumer, a process for each member",
            "load": f"{chosen.records_per_s:,} records of {RECORD_BYTES:,} bytes a second over all partitions",
            "timeline": f"C0 leaves at {chosen.leave_s:g} s, returns at {chosen.return_s:g} s; {chosen.end_s:g} s",
        }
        columns = ["assignor", "broker", "C1 + C2 before, records/s", "without C0", "after", "largest gain",
                   "largest fall", "partitions moved between C1 and C2", "CPU of C1 + C2, s"]  # fmt: skip
        table = Table(f"Rate of C1 and C2 in windows of {chosen.window_s:g} s", columns, note=NOTE)
        rate_chart = Chart("What C1 and C2 read", "seconds", "records a second")
        cpu_chart = Chart("CPU of C1 and C2", "seconds", "percent of one processor")
        for chart in (rate_chart, cpu_chart):
            chart.marks = [Mark(chosen.leave_s, "C0 leaves"), Mark(chosen.return_s, "C0 returns")]
        result.tables, result.charts = [table], [rate_chart, cpu_chart]
        timelines: dict[tuple[str, str], Timeline] = {}

        def refused(name: str, error: Exception) -> None:
            result.failures.append(f"{name}: {one_line(error)}")

        with contestants(context.brokers, 1, refused=refused) as brokers:
            for assignor in ASSIGNORS:
                for contestant in brokers:
                    context.progress(f"assignors: {assignor}: {contestant.name}")
                    try:
                        timeline = _measure(contestant, assignor, chosen)
                    except FAILURES as error:
                        refused(contestant.name, error)
                        continue
                    _show(timeline, assignor, contestant.name, chosen, table, rate_chart, cpu_chart)
                    timelines[assignor, contestant.name] = timeline
        for name in context.brokers:
            own = {assignor: timeline for (assignor, broker), timeline in timelines.items() if broker == name}
            result.verdicts += smoothness(name, {one: timeline.largest_change for one, timeline in own.items()})
            result.verdicts += stickiness(name, {one: timeline.moved for one, timeline in own.items()})


@dataclass(frozen=True, slots=True)
class Timeline:
    """What C1 and C2 did together: rates and CPU shares over seconds, and partitions that moved between them."""

    rates: list[tuple[float, float]]
    cpu_shares: list[tuple[float, float]]
    moved: int
    cpu_s: float

    @property
    def gains(self) -> list[float]:
        return [later - earlier for (_, earlier), (_, later) in pairwise(self.rates)]

    @property
    def largest_change(self) -> float:
        return max((abs(gain) for gain in self.gains), default=0.0)


def smoothness(broker: str, changes: Mapping[str, float]) -> list[Verdict]:
    """Whether the sticky assignors disturb those that stay no more than the others do."""
    evidence = ", ".join(f"{name}: {change:,.0f}" for name, change in changes.items())
    verdicts = []
    for sticky in ("sticky", "cooperative-sticky"):
        others = [changes[other] for other in ("range", "roundrobin") if other in changes]
        if sticky in changes and others:
            statement = f"{sticky} changes the rate of those that stay no more than range and round robin"
            verdicts.append(Verdict(statement, broker, changes[sticky] <= min(others) * 1.15, evidence))
    return verdicts


def stickiness(broker: str, moved: Mapping[str, int]) -> list[Verdict]:
    """Whether the sticky assignors leave those that stay the partitions that they have."""
    evidence = ", ".join(f"{name}: {count}" for name, count in moved.items())
    return [
        Verdict(f"{sticky} moves no partition between those that stay", broker, moved[sticky] == 0, evidence)
        for sticky in ("sticky", "cooperative-sticky")
        if sticky in moved
    ]


def _show(
    timeline: Timeline, assignor: str, name: str, chosen: Parameters, table: Table, rate_chart: Chart, cpu_chart: Chart
) -> None:
    def mean(from_s: float, to_s: float) -> float | None:
        values = [
            rate
            for time_s, rate in timeline.rates
            if from_s <= time_s - chosen.window_s / 2 and time_s + chosen.window_s / 2 <= to_s
        ]
        return sum(values) / len(values) if values else None

    gains = timeline.gains
    table.rows.append(
        [assignor, name, mean(0, chosen.leave_s), mean(chosen.leave_s, chosen.return_s),
         mean(chosen.return_s, chosen.end_s), max(gains, default=None), min(gains, default=None),
         timeline.moved, timeline.cpu_s]
    )  # fmt: skip
    rate_chart.series.append(Series(f"{name}, {assignor}", name, timeline.rates, assignor))
    cpu_chart.series.append(Series(f"{name}, {assignor}", name, timeline.cpu_shares, assignor))


def _measure(contestant: Contestant, assignor: str, chosen: Parameters) -> Timeline:
    contestant.topics_made += 1
    names = {topic: f"{topic}-{contestant.topics_made}" for topic in PARTITIONS}
    port = contestant.server.port
    create(port, [NewTopic(names[topic], count, 1) for topic, count in PARTITIONS.items()])
    stop = threading.Event()
    members: list[Member] = []
    producing = threading.Thread(
        target=_produce, args=(contestant, names, chosen.records_per_s, stop), name="producing"
    )
    try:
        for topic, count in PARTITIONS.items():
            await_leaders(port, names[topic], count, 1)

        def join(member: int) -> Member:
            topics = [names[topic] for topic in SUBSCRIPTIONS[member]]
            members.append(_member(contestant, f"churn-{contestant.topics_made}", assignor, topics))
            return members[-1]

        leaver, *stayers = [join(member) for member in range(len(SUBSCRIPTIONS))]
        producing.start()
        _await_assigned([leaver, *stayers])
        start_s = time.monotonic()
        time.sleep(chosen.leave_s)
        leaver.process.terminate()
        _sleep_until(start_s + chosen.return_s)
        join(0)
        _sleep_until(start_s + chosen.end_s)
        return timeline_of([member.samples for member in stayers], start_s, chosen)
    finally:
        stop.set()
        for member in members:
            member.process.terminate()
        for member in members:
            try:
                member.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        if producing.ident is not None:
            producing.join()
        delete(port, list(names.values()))


def _member(contestant: Contestant, group: str, assignor: str, topics: Sequence[str]) -> Member:
    command = [
        sys.executable,
        "-m",
        "tidelog.bench.studies.member",
        contestant.cluster.bootstrap_servers,
        group,
        assignor,
    ]
    member = Member(subprocess.Popen([*command, ",".join(topics)], stdout=subprocess.PIPE))

    def read() -> None:
        assert member.process.stdout is not None
        for line in member.process.stdout:
            member.samples.append(json.loads(line))

    threading.Thread(target=read, name="samples", daemon=True).start()
    return member


def _await_assigned(members: Sequence[Member]) -> None:
    """Until all partitions are assigned, each to one member."""
    deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
    partition_count = sum(PARTITIONS.values())
    while sum(len(member.samples[-1]["assigned"]) if member.samples else 0 for member in members) != partition_count:
        if time.monotonic() > deadline_s:
            raise OSError(f"the group has not come together in {_JOIN_TIMEOUT_S:g} s")
        time.sleep(0.1)


def _sleep_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.monotonic()))


def _produce(contestant: Contestant, names: Mapping[str, str], records_per_s: int, stop: threading.Event) -> None:
    """The same number of records into each partition, in steps of 10 ms."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": contestant.cluster.bootstrap_servers, "log_level": 0, "linger.ms": 5})
    targets = [(names[topic], index) for topic, count in PARTITIONS.items() for index in range(count)]
    value, sent, start_s = bytes(RECORD_BYTES), 0, time.monotonic()
    while not stop.is_set():
        while sent < (time.monotonic() - start_s) * records_per_s:
            topic, index = targets[sent % len(targets)]
            producer.produce(topic, value, partition=index)
            sent += 1
        producer.poll(0.01)
    producer.flush(_STOP_TIMEOUT_S)


def timeline_of(samples: Sequence[Sequence[Mapping[str, Any]]], start_s: float, chosen: Parameters) -> Timeline:
    """Rates and CPU of these members together in windows, from their cumulative samples."""
    windows = int(chosen.end_s / chosen.window_s)
    bounds = [start_s + chosen.window_s * number for number in range(windows + 1)]
    rates, shares = [], []
    totals = {key: [sum(_at(one, key, bound) for one in samples) for bound in bounds] for key in ("records", "cpu_s")}
    for number in range(windows):
        middle_s = chosen.window_s * (number + 0.5)
        rates.append((middle_s, (totals["records"][number + 1] - totals["records"][number]) / chosen.window_s))
        used_s = totals["cpu_s"][number + 1] - totals["cpu_s"][number]
        shares.append((middle_s, 100 * used_s / chosen.window_s))
    return Timeline(rates, shares, _moved(samples, start_s), totals["cpu_s"][-1] - totals["cpu_s"][0])


def _at(samples: Sequence[Mapping[str, Any]], key: str, time_s: float) -> float:
    """A cumulative figure at a time, interpolated between its samples."""
    earlier: Mapping[str, Any] | None = None
    for sample in samples:
        if sample["time_s"] >= time_s:
            if earlier is None:
                return float(sample[key])
            share = (time_s - earlier["time_s"]) / (sample["time_s"] - earlier["time_s"])
            return float(earlier[key] + share * (sample[key] - earlier[key]))
        earlier = sample
    return float(earlier[key]) if earlier is not None else 0.0


def _moved(samples: Sequence[Sequence[Mapping[str, Any]]], start_s: float) -> int:
    """How often a partition had another of these members as its owner than before."""
    seen = sorted(
        (sample["time_s"], number, partition)
        for number, one in enumerate(samples)
        for sample in one
        if sample["time_s"] >= start_s
        for partition in sample["assigned"]
    )
    owners: dict[str, int] = {}
    moved = 0
    for _, number, partition in seen:
        moved += owners.get(partition, number) != number
        owners[partition] = number
    return moved
