"""Scenario 10: an hour at half of the peak rate, while a node is killed every five minutes.

Three nodes, each broker and controller. A producer sends as fast as it can for a moment; then it sends at half of that
rate in an open loop: latency counts from the time a record was due, so that a pause delays all that was due meanwhile.
The nodes are killed in turn and started again. A consumer process reads along and checks every record, so that
retention may delete what was read.

It takes the hour for each broker, so a report has it only where it is asked for.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tidelog.bench.clusters import Cluster, RunningCluster
from tidelog.bench.compare import FAILURES, MAKERS, OPTIONS
from tidelog.bench.figures import one_line
from tidelog.bench.metadata import await_leaders
from tidelog.bench.raw import BenchError
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.histogram import Histogram
from tidelog.bench.studies.reader import HEAD
from tidelog.bench.studies.results import Cell, Chart, Mark, Series, StudyResult, Table, Verdict
from tidelog.bench.topics import NewTopic, create
from tidelog.testing.usage import rss_bytes

NODES, PARTITIONS, MIN_INSYNC, RECORD_BYTES = 3, 12, 2, 1000
PERCENTS = (50.0, 99.0, 99.9)
# A partition keeps what the reader has not read for a minute or so at any rate that one producer reaches.
_TOPIC_CONFIG = {
    "min.insync.replicas": str(MIN_INSYNC), "segment.bytes": str(32 << 20), "retention.bytes": str(256 << 20),
}  # fmt: skip
_NODE_CONFIG = {**OPTIONS, "log.retention.check.interval.ms": "5000"}
_TIMEOUT_S = 120.0
_OUTPUT_BYTES = 1000
_PEAK_QUEUE_RECORDS, _BURST_RECORDS = 20_000, 500
# The last third against the first: growth up to these factors counts as noise.
_MEMORY_GROWTH_MAX, _LATENCY_GROWTH_MAX = 1.1, 2.0


@dataclass(frozen=True, slots=True)
class Parameters:
    """Seconds. A node is down for `down_s` of every `kill_every_s`; figures are taken per window."""

    peak_s: float
    seconds: float
    kill_every_s: float
    down_s: float
    window_s: float


QUICK, FULL = Parameters(1, 8, 3, 1, 2), Parameters(20, 3600, 300, 30, 60)


@dataclass(slots=True)
class Window:
    """`end_s` from the first record at the steady rate; latencies in milliseconds; memory of each node in MiB, 0 of one
    that is down.
    """

    end_s: float
    records: int
    latencies: list[float | None]
    """The percentiles of `PERCENTS`, then the largest; None without a record."""
    memory_mib: list[float]
    kills: int


@dataclass(slots=True)
class Run:
    """What became of one broker's hour."""

    peak_per_s: float = 0.0
    rate_per_s: float = 0.0
    due: int = 0
    """0 until all of it was sent."""
    acknowledged: int = 0
    failed: set[int] = field(default_factory=set)
    kills_s: list[float] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Of the nodes that ended although the study had not killed them: when, how, and the end of their output."""
    windows: list[Window] = field(default_factory=list)
    read: Mapping[str, Any] = field(default_factory=dict)


class Endurance:
    number = 10
    title = "An hour at half of the peak rate, with kills"
    question = "Does memory stay flat, latency stable, and every acknowledged record there, while nodes die?"

    def measure(self, context: Context, result: StudyResult) -> None:
        chosen = QUICK if context.is_quick else FULL
        result.parameters = {
            "cluster": f"{NODES} nodes, each broker and controller",
            "topic": f"{PARTITIONS} partitions, {NODES} replicas, min.insync.replicas={MIN_INSYNC}",
            "client": "librdkafka, idempotent, acks=all, linger 5 ms; a consumer process that reads along",
            "load": f"records of {RECORD_BYTES:,} bytes at half of the peak of {chosen.peak_s:g} s, open loop",
            "timeline": f"{chosen.seconds:g} s; every {chosen.kill_every_s:g} s a node is killed, in turn, for "
            f"{chosen.down_s:g} s",
        }
        for name in context.brokers:
            run = Run()
            try:
                with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as scratch:
                    cluster = MAKERS[name](Path(scratch), NODES, _NODE_CONFIG)
                    with RunningCluster(cluster):
                        _measure(cluster, chosen, run, lambda text, name=name: context.progress(f"{name}: {text}"))  # type: ignore[misc]
            except FAILURES as error:
                result.failures.append(f"{name}: {one_line(error)}")
            finally:
                _show(name, run, chosen, result)


def verdicts(broker: str, run: Run) -> list[Verdict]:
    """The laws of this scenario."""
    lost = lost_numbers(run.read.get("missing", []), run.failed)
    lost = max(lost, run.read.get("missing_count", 0) - len(run.failed))  # the reader keeps a bounded list of them
    beyond = run.acknowledged - run.read.get("records", 0)
    doubled, failed = run.read.get("doubled", 0), len(run.failed)
    was_interrupted = not run.due
    is_read = None if was_interrupted and beyond > 0 and not lost else not lost and beyond <= 0
    laws = [
        Verdict("every acknowledged record is read", broker, is_read,
                f"{lost:,} passed over, {max(beyond, 0):,} not reached, of {run.acknowledged:,}"),
        Verdict("nothing is doubled", broker, not doubled, f"{doubled:,} doubled"),
        Verdict("nothing fails", broker, not failed, f"{failed:,} of {run.due:,} failed"),
        Verdict("no node ends by itself", broker, not run.ends, "; ".join(run.ends) or "none did"),
    ]  # fmt: skip
    third = len(run.windows) // 3
    if third:
        first, last = run.windows[:third], run.windows[-third:]
        whole = [[sum(window.memory_mib) for window in part if all(window.memory_mib)] for part in (first, last)]
        if whole[0] and whole[1]:
            memory = [median(part) for part in whole]
            evidence = f"all nodes: {memory[0]:.0f} MiB in the first third, {memory[1]:.0f} in the last"
            laws.append(Verdict("memory stays flat", broker, memory[1] <= memory[0] * _MEMORY_GROWTH_MAX, evidence))
        worst = [[at for window in part if (at := window.latencies[2]) is not None] for part in (first, last)]
        if worst[0] and worst[1]:
            p999 = [median(part) for part in worst]
            evidence = f"median of the windows: {p999[0]:.1f} ms in the first third, {p999[1]:.1f} in the last"
            laws.append(Verdict("p99.9 is stable", broker, p999[1] <= p999[0] * _LATENCY_GROWTH_MAX, evidence))
    return laws


def lost_numbers(missing: Sequence[Sequence[int]], failed: set[int]) -> int:
    """How many of the numbers that were passed over had not been refused to the producer."""
    return sum(number not in failed for first, last in missing for number in range(first, last + 1, PARTITIONS))


class _Load:
    """A producer of numbered records, and what became of them."""

    def __init__(self, bootstrap: str, topic: str, run: Run) -> None:
        from confluent_kafka import Producer

        self.latencies = Histogram()
        self.count = 0
        self._topic, self._run = topic, run
        self._pad = bytes(RECORD_BYTES - HEAD.size)
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 5,
                "log_level": 0,
                "queue.buffering.max.messages": 1_000_000,
                "reconnect.backoff.max.ms": 1000,
            }
        )

    def send(self, due_ns: int) -> bool:
        """False when the producer's queue is full."""
        number = self.count
        try:
            self._producer.produce(
                self._topic, HEAD.pack(number, due_ns) + self._pad, partition=number % PARTITIONS,
                on_delivery=self._delivered,
            )  # fmt: skip
        except BufferError:
            return False
        self.count += 1
        return True

    def _delivered(self, error: object, message: Any) -> None:
        number, due_ns = HEAD.unpack_from(message.value())
        if error is not None:
            self._run.failed.add(number)
            return
        self._run.acknowledged += 1
        self.latencies.add(time.monotonic_ns() - due_ns)

    @property
    def waiting(self) -> int:
        return self.count - self._run.acknowledged - len(self._run.failed)

    def poll(self, timeout_s: float) -> None:
        self._producer.poll(timeout_s)

    def flush(self) -> None:
        left = self._producer.flush(_TIMEOUT_S)
        if left:
            raise BenchError(f"{left:,} records were neither acknowledged nor refused")


class _Kills:
    """Kills the nodes in turn, and starts each again after a while."""

    def __init__(self, cluster: Cluster, chosen: Parameters, run: Run) -> None:
        self._nodes = list(cluster.nodes.values())
        self._chosen, self._run = chosen, run
        self._down_since_s: float | None = None
        self._ended: set[int] = set()

    def at(self, now_s: float) -> None:
        chosen, kills = self._chosen, self._run.kills_s
        self._note_ends(now_s)
        if self._down_since_s is not None:
            if now_s >= self._down_since_s + chosen.down_s:
                self.restart()
        elif now_s >= (len(kills) + 1) * chosen.kill_every_s and now_s + chosen.kill_every_s / 2 <= chosen.seconds:
            self._nodes[len(kills) % len(self._nodes)].kill()
            kills.append(now_s)
            self._down_since_s = now_s

    def restart(self) -> None:
        """Start the victim of the last kill, if it is down."""
        if self._down_since_s is not None:
            victim = self._victim()
            self._nodes[victim].launch()
            self._ended.discard(victim)
            self._down_since_s = None

    def _victim(self) -> int:
        """The place of the node that was killed last."""
        return (len(self._run.kills_s) - 1) % len(self._nodes)

    def _note_ends(self, now_s: float) -> None:
        killed = self._victim() if self._down_since_s is not None else None
        for place, node in enumerate(self._nodes):
            if place not in self._ended and place != killed and not node.alive:
                self._ended.add(place)
                output = " ".join(node.output_tail(_OUTPUT_BYTES).split())
                self._run.ends.append(f"node {place + 1} at {now_s:,.0f} s with {node.exit_code}: {output}")


def _measure(cluster: Cluster, chosen: Parameters, run: Run, progress: Callable[[str], None]) -> None:
    port = next(iter(cluster.nodes.values())).port
    create(port, [NewTopic("endurance", PARTITIONS, NODES, _TOPIC_CONFIG)])
    await_leaders(port, "endurance", PARTITIONS, NODES, _TIMEOUT_S)
    with _reading(cluster.bootstrap_servers, "endurance", run) as samples:
        load = _Load(cluster.bootstrap_servers, "endurance", run)
        progress("the peak")
        run.peak_per_s = _peak(load, run, chosen.peak_s)
        run.rate_per_s = run.peak_per_s / 2
        _send_steadily(cluster, load, chosen, run, progress)
        run.due = load.count
        _await_read(samples, run)


def _peak(load: _Load, run: Run, seconds: float) -> float:
    """Acknowledged records a second, after a record to each partition and a third of the time that warm."""
    for _ in range(PARTITIONS):
        load.send(time.monotonic_ns())
    load.flush()
    start_s = time.monotonic()
    warm: tuple[float, int] | None = None
    while (now_s := time.monotonic() - start_s) < seconds or warm is None:
        if warm is None and now_s >= seconds / 3:
            warm = now_s, run.acknowledged
        due_ns = time.monotonic_ns()
        for _ in range(_BURST_RECORDS):
            if load.waiting >= _PEAK_QUEUE_RECORDS or not load.send(due_ns):
                break
        load.poll(0.001)
    rate = (run.acknowledged - warm[1]) / (now_s - warm[0]) if now_s > warm[0] else 0.0
    load.flush()
    if not rate:
        raise BenchError("nothing was acknowledged at the peak")
    return rate


def _send_steadily(
    cluster: Cluster, load: _Load, chosen: Parameters, run: Run, progress: Callable[[str], None]
) -> None:
    load.latencies = Histogram()
    kills = _Kills(cluster, chosen, run)
    first, start_ns, interval_ns = load.count, time.monotonic_ns(), 1e9 / run.rate_per_s
    kills_before = 0
    try:
        while (now_s := (time.monotonic_ns() - start_ns) / 1e9) < chosen.seconds:
            kills.at(now_s)
            due = int(now_s * run.rate_per_s)
            while load.count - first < due:
                if not load.send(start_ns + int((load.count - first) * interval_ns)):
                    break
            load.poll(0.005)
            if now_s >= (len(run.windows) + 1) * chosen.window_s:
                progress(f"{now_s:,.0f} of {chosen.seconds:,.0f} s, {len(run.kills_s)} kills")
                run.windows.append(_window(now_s, load, cluster, len(run.kills_s) - kills_before))
                kills_before = len(run.kills_s)
    finally:
        kills.restart()
    load.flush()
    if load.latencies.count:
        now_s = (time.monotonic_ns() - start_ns) / 1e9
        run.windows.append(_window(now_s, load, cluster, len(run.kills_s) - kills_before))


def _window(now_s: float, load: _Load, cluster: Cluster, kills: int) -> Window:
    """What was acknowledged since the last one."""
    latencies, load.latencies = load.latencies, Histogram()
    memory = [rss_bytes(node.pid) / 2**20 if node.alive else 0.0 for node in cluster.nodes.values()]
    percentiles = [latencies.percentile_ms(percent) for percent in PERCENTS]
    largest = latencies.max_us / 1000 if latencies.count else None
    return Window(now_s, latencies.count, [*percentiles, largest], memory, kills)


@contextmanager
def _reading(bootstrap: str, topic: str, run: Run) -> Iterator[list[Mapping[str, Any]]]:
    """The samples of a reader process; the last one is in `run.read`."""
    command = [sys.executable, "-m", "tidelog.bench.studies.reader", bootstrap, topic, str(PARTITIONS)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE)
    samples: list[Mapping[str, Any]] = []

    def read() -> None:
        assert reader.stdout is not None
        for line in reader.stdout:
            samples[:] = [json.loads(line)]

    thread = threading.Thread(target=read, name="reader", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        reader.terminate()
        try:
            reader.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            reader.kill()
            reader.wait()
        thread.join(_TIMEOUT_S)
        if reader.stdout is not None:
            reader.stdout.close()
        if samples:
            run.read = samples[0]


def _await_read(samples: list[Mapping[str, Any]], run: Run) -> None:
    """Until the reader has come as far as the producer, or comes no further."""
    reached, deadline_s = -1, time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        now = samples[0]["records"] + samples[0]["missing_count"] if samples else 0
        if now >= run.due - len(run.failed):
            return
        if now > reached:
            reached, deadline_s = now, time.monotonic() + _TIMEOUT_S
        time.sleep(0.2)


def _show(name: str, run: Run, chosen: Parameters, result: StudyResult) -> None:
    if not run.windows:
        return
    result.tables.append(
        Table(
            f"{name}: all of it",
            ["peak, records/s", "rate, records/s", "due", "acknowledged", "failed", "read", "doubled", "kills"],
            [[run.peak_per_s, run.rate_per_s, run.due, run.acknowledged, len(run.failed),
              run.read.get("records"), run.read.get("doubled"), len(run.kills_s)]],
            note="due and acknowledged with those of the peak",
        )
    )  # fmt: skip
    percents = [f"p{percent:g}, ms" for percent in PERCENTS]
    memory = [f"node {number + 1}, MiB" for number in range(NODES)]
    table = Table(
        f"{name}: windows of {chosen.window_s:g} s", ["until, s", "records/s", *percents, "max, ms", *memory, "kills"]
    )
    begin_s = 0.0
    for window in run.windows:
        row: list[Cell] = [round(window.end_s, 1), window.records / (window.end_s - begin_s)]
        table.rows.append([*row, *window.latencies, *window.memory_mib, window.kills])
        begin_s = window.end_s
    result.tables.append(table)
    latency = Chart(f"{name}: latency from due to acknowledged", "seconds", "milliseconds", y_is_log=True)
    for place, percent in enumerate(PERCENTS):
        points = [(window.end_s, at) for window in run.windows if (at := window.latencies[place]) is not None]
        latency.series.append(Series(f"p{percent:g}", name, points, f"p{percent:g}"))
    size = Chart(f"{name}: memory of the nodes", "seconds", "MiB")
    for number in range(NODES):
        points = [(window.end_s, window.memory_mib[number]) for window in run.windows]
        size.series.append(Series(f"node {number + 1}", name, points, f"node {number + 1}"))
    for chart in (latency, size):
        chart.marks = [Mark(kill_s, "kill") for kill_s in run.kills_s]
    result.charts += [latency, size]
    result.verdicts += verdicts(name, run)
