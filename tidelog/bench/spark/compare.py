"""Runs the rows of Spark: one session, both formats in turn, each with its own broker.

Our format reads and writes Tidelog, Spark's connector Apache Kafka; where Kafka cannot be run both
use Tidelog. The first round of a row is not counted: code is compiled in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from tidelog.bench import compare as brokers
from tidelog.bench import peers
from tidelog.bench.clusters import RunningCluster
from tidelog.bench.figures import number, one_line_with_type, percentile
from tidelog.bench.spark.rows import BATCH, CPU, FORMATS, LATENCY, OURS, P50, P99, RATE, STREAM, THEIRS, SparkRow
from tidelog.bench.spark.session import Session
from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin

_PARTITIONS = 4
_OPTIONS = {"log.segment.delete.delay.ms": "1000"}


@dataclass(slots=True)
class RowMeasurements:
    """One row: the figures of each round by format and metric."""

    row: SparkRow
    figures: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def value(self, format_name: str, metric: str) -> float | None:
        """The median of the rounds."""
        values = self.figures.get((format_name, metric))
        return median(values) if values else None

    def ratio(self, metric: str) -> float | None:
        """Ours divided by theirs."""
        ours, theirs = (self.value(each, metric) for each in FORMATS)
        return ours / theirs if ours is not None and theirs else None

    def last_round(self, format_name: str) -> str:
        """What the last measurement has shown, in one line."""
        name = f"{self.row.name}, {format_name}"
        if format_name in self.failures:
            return f"{name} failed: {self.failures[format_name]}"
        last = [(metric, self.figures.get((format_name, metric))) for metric in self.row.metrics]
        shown = [f"{metric} {number(values[-1])}" for metric, values in last if values]
        return f"{name}: {', '.join(shown) or 'the first round, which does not count'}"

    def passes(self, metric: str) -> bool | None:
        """Whether the target is reached; None without a target or a ratio."""
        ratio = self.ratio(metric)
        if ratio is None:
            return None
        if metric == RATE and self.row.rate_ratio_min is not None:
            return ratio >= self.row.rate_ratio_min
        if metric == CPU and self.row.cpu_ratio_max is not None:
            return ratio <= self.row.cpu_ratio_max
        return None


OnMeasured = Callable[[RowMeasurements, str], None]
"""Gets the row and the format that were just measured; `failures` says whether it failed."""


def run(
    measured: Sequence[RowMeasurements],
    *,
    rounds: int,
    scale: float,
    progress: Callable[[str], None],
    on_measured: OnMeasured = lambda *_: None,
) -> None:
    """Measure the rows. A failure leaves the figures of its format empty, and the others go on."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="tidelog-bench-")))
        jars, reason = _connector()
        formats = FORMATS if reason is None else (OURS,)
        ours = stack.enter_context(RunningCluster(brokers.tidelog(directory / "tidelog", 1, _OPTIONS))).cluster
        bootstraps = dict.fromkeys(formats, ours.bootstrap_servers)
        if reason is None and peers.bring_kafka() is None:
            try:
                theirs = stack.enter_context(RunningCluster(brokers.kafka(directory / "kafka", 1, _OPTIONS))).cluster
                bootstraps[THEIRS] = theirs.bootstrap_servers
            except brokers.FAILURES as error:
                del bootstraps[THEIRS]
                reason = one_line_with_type(error)
        command = [sys.executable, "-m", "tidelog.bench.spark.worker", ",".join(map(str, jars)), str(directory)]
        session = stack.enter_context(Session(command, directory / "spark.log"))
        if reason is not None:
            for each in measured:
                each.failures[THEIRS] = reason
        measure_rows(session, measured, bootstraps, rounds, scale, progress, on_measured)


def measure_rows(
    session: Session,
    measured: Sequence[RowMeasurements],
    bootstraps: Mapping[str, str],
    rounds: int,
    scale: float,
    progress: Callable[[str], None],
    on_measured: OnMeasured,
) -> None:
    """One round that does not count and `rounds` that do, of each row. `bootstraps` has the formats, with brokers."""
    formats = list(bootstraps)
    filled: set[tuple[str, str]] = set()
    for each in measured:
        for at in range(rounds + 1):
            for format_name in formats if at % 2 else reversed(formats):
                if format_name not in each.failures:
                    progress(f"{each.row.name}, round {at}: {format_name}")
                    _measure(session, each, format_name, bootstraps[format_name], scale, at > 0, filled)
                    on_measured(each, format_name)


def _connector() -> tuple[list[Path], str | None]:
    """The connector's jars, or why they cannot be had."""
    try:
        return sorted(peers.jars("spark", peers.SPARK_CONNECTOR).glob("*.jar")), None
    except peers.PeerUnavailable as unavailable:
        return [], str(unavailable)


def _measure(
    session: Session,
    measured: RowMeasurements,
    format_name: str,
    bootstrap: str,
    scale: float,
    counts: bool,
    filled: set[tuple[str, str]],
) -> None:
    row = measured.row
    if row.kind == LATENCY and not counts:
        return  # its first seconds do not count anyway
    is_read = row.kind in (BATCH, STREAM)
    records = max(int(row.records * scale), 100)
    topic = f"bench-{row.size_bytes}-{row.codec}" if is_read else row.name
    job = {"records": records, "size_bytes": row.size_bytes, "codec": row.codec, "topic": topic, "bootstrap": bootstrap}
    try:
        if (bootstrap, topic) not in filled:
            with Admin(bootstrap_servers=bootstrap) as admin:
                admin.create_topics([NewTopic(topic, _PARTITIONS, 1)])
            if is_read:
                _fill(session, bootstrap, topic, row.timeout_s, job)
            filled.add((bootstrap, topic))
        answer = session.do(row.timeout_s, kind=row.kind, format=format_name, **job)
        if not is_read:
            with Admin(bootstrap_servers=bootstrap) as admin:
                admin.delete_topics([topic])
            filled.remove((bootstrap, topic))
        if answer.get("rows", records) != records:
            raise RuntimeError(f"{answer['rows']} rows instead of {records}")
    except Exception as error:
        measured.failures[format_name] = one_line_with_type(error)
        return
    if counts:
        for metric, value in _figures(answer).items():
            measured.figures.setdefault((format_name, metric), []).append(value)


def _fill(session: Session, bootstrap: str, topic: str, timeout_s: float, job: Mapping[str, Any]) -> None:
    """Write the records to read. A topic with a part of them is deleted, because the next row reads it too."""
    try:
        session.do(timeout_s, kind="fill", **job)
    except Exception:
        with Admin(bootstrap_servers=bootstrap) as admin:
            admin.delete_topics([topic])
        raise


def _figures(answer: Mapping[str, Any]) -> dict[str, float]:
    if "latencies_ms" in answer:
        ordered = answer["latencies_ms"]
        return {P50: percentile(ordered, 50) or 0.0, P99: percentile(ordered, 99) or 0.0}
    return {RATE: answer["rows"] / answer["elapsed_s"], CPU: answer["cpu_s"] / answer["rows"] * 1e6}


COLUMNS = ("row", "metric", "tidelog", "Spark's connector", "ratio", "target", "reached")


def cells(measured: Sequence[RowMeasurements]) -> list[tuple[str, ...]]:
    """The table's rows."""
    lines: list[tuple[str, ...]] = []
    for each in measured:
        for metric in each.row.metrics:
            row, ratio = each.row, each.ratio(metric)
            targets = {RATE: ("at least", row.rate_ratio_min), CPU: ("at most", row.cpu_ratio_max)}
            word, target = targets.get(metric, ("", None))
            passes = each.passes(metric)
            lines.append(
                (
                    *(row.name, metric, number(each.value(OURS, metric)), number(each.value(THEIRS, metric))),
                    "" if ratio is None else f"{ratio:.2f}",
                    "" if target is None else f"{word} {target:g}",
                    "" if passes is None else "yes" if passes else "no",
                )
            )
    return lines


def as_markdown(measured: Sequence[RowMeasurements]) -> str:
    """One table, as the documentation has it."""
    lines = [COLUMNS, ("---", "---", *["---:"] * 3, "---", "---"), *cells(measured)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_json(measured: Sequence[RowMeasurements]) -> str:
    """Every round's figures."""
    return json.dumps(
        [
            {
                "row": each.row.name,
                "figures": {f"{name}, {metric}": values for (name, metric), values in each.figures.items()},
                "failures": each.failures,
            }
            for each in measured
        ],
        indent=2,
    )
