"""The comparison: every scenario on every contestant, interleaved round by round, in one run.

Both brokers run all the time and are measured in turn, so that a machine that grows slower does so for both. Everything
is warmed before anything is measured: a JIT compiler learns from all the work it will see. Nodes live on loopback,
their data in a temporary directory that is removed. A figure is the median of its rounds; what fails leaves its row
empty, with the reason, and the rest goes on.
"""

from __future__ import annotations

import math
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tidelog.bench.clusters import Alone, Cluster, RunningCluster
from tidelog.bench.figures import one_line_with_type
from tidelog.bench.peers import KafkaCluster, KafkaProcess, PeerUnavailable
from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios import (
    compaction,
    end_to_end,
    fetch_raw,
    footprint,
    librdkafka,
    produce_raw,
    replica_fetch,
    transaction_load,
    transactions,
)
from tidelog.bench.scenarios.base import Contestant, Metric, Scenario, client_errors
from tidelog.protocol.errors import KafkaError
from tidelog.testing.cluster import EmbeddedCluster, tidelog_node
from tidelog.testing.processes import ServerFailed, TidelogProcess
from tidelog.testing.usage import free_bytes, warm_pages

OURS, THEIRS = "tidelog", "kafka"
# A deleted topic's pages serve the next round; Kafka's default would keep them for a minute.
OPTIONS = {"log.segment.delete.delay.ms": "1000"}


def tidelog(directory: Path, brokers: int, options: Mapping[str, str] = OPTIONS) -> Cluster:
    """So many nodes of ours, not started."""
    if brokers == 1:
        return Alone(TidelogProcess(directory, options=options))
    return EmbeddedCluster(brokers, directory, config=options, make_node=tidelog_node)


def kafka(directory: Path, brokers: int, options: Mapping[str, str] = OPTIONS) -> Cluster:
    """So many nodes of Kafka's, not started."""
    if brokers == 1:
        return Alone(KafkaProcess(directory, options=options))
    return KafkaCluster(directory, brokers, options=options)


MAKERS: dict[str, Callable[..., Cluster]] = {OURS: tidelog, THEIRS: kafka}
FAILURES: tuple[type[Exception], ...] = (
    *(BenchError, ServerFailed, PeerUnavailable, OSError, KafkaError),
    *(struct.error, LookupError),  # an answer that is not what was asked for
    *client_errors(),
)
OnFigures = Callable[[Scenario, str, Mapping[str, float]], None]
"""Gets the scenario, the contestant and the figures of one measurement; none where it failed."""
# The kernel hands out free pages in no order: only when all are warm does no row meet a cold one.
_TOUCHED_SHARE = 0.85


@dataclass(slots=True)
class Row:
    """One metric of one scenario: every round's figure per contestant."""

    scenario: Scenario
    metric: Metric
    figures: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def value(self, contestant: str) -> float | None:
        """Median over the rounds; None when this contestant was not measured."""
        return median(self.figures[contestant]) if self.figures.get(contestant) else None

    @property
    def ratio(self) -> float | None:
        """Ours divided by Kafka's."""
        ours, theirs = self.value(OURS), self.value(THEIRS)
        return ours / theirs if ours is not None and theirs else None

    @property
    def passes(self) -> bool | None:
        """Whether every target that can be judged is met; None when there is none, or nothing to judge it by."""
        if OURS in self.failures and (self.metric.at_most or self.metric.ratio_at_most):
            return False
        ours, verdicts = self.value(OURS), []
        if ours is not None and self.metric.at_most is not None:
            verdicts.append(ours <= self.metric.at_most)
        if self.ratio is not None and self.metric.ratio_at_most is not None:
            verdicts.append(self.ratio <= self.metric.ratio_at_most)
        return all(verdicts) if verdicts else None


def catalogue() -> list[Scenario]:
    """Every scenario, in the order of the table: one node first."""
    modules = (
        *(produce_raw, librdkafka, fetch_raw, end_to_end, replica_fetch, transactions, transaction_load),
        *(compaction, footprint),
    )
    scenarios = [scenario for module in modules for scenario in module.scenarios()]
    return sorted(scenarios, key=lambda scenario: scenario.brokers)


def rows_of(scenarios: Sequence[Scenario]) -> list[Row]:
    """An empty row for each metric of each scenario."""
    return [Row(scenario, metric) for scenario in scenarios for metric in scenario.metrics]


def select(patterns: Sequence[str]) -> list[Scenario]:
    """The scenarios whose name contains any of the patterns; all of them without a pattern."""
    return [one for one in catalogue() if not patterns or any(pattern in one.name for pattern in patterns)]


@contextmanager
def contestants(
    names: Sequence[str],
    brokers: int,
    *,
    running: bool = True,
    options: Mapping[str, str] = OPTIONS,
    refused: Callable[[str, Exception], None],
) -> Iterator[list[Contestant]]:
    """So many nodes of each named broker in a temporary directory; `running=False` when no scenario needs them.

    One that does not start is reported to `refused` and left out.
    """
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as scratch, ExitStack() as clusters:
        started = []
        for name in names:
            make = partial(MAKERS[name], brokers=brokers, options=options)
            home = Path(scratch, name)
            home.mkdir(parents=True)
            try:
                cluster = make(home / "cluster")
                if running:
                    clusters.enter_context(RunningCluster(cluster))
            except FAILURES as error:
                refused(name, error)
                continue
            started.append(Contestant(name, cluster, make, home, replicas=brokers))
        yield started


def run(
    scenarios: Sequence[Scenario],
    names: Sequence[str],
    *,
    rounds: int,
    scale: float = 1.0,
    minutes: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
    rows: Sequence[Row] | None = None,
    on_figures: OnFigures = lambda *_: None,
) -> Sequence[Row]:
    """Every scenario's rows, each measured at least once; no more rounds begin than end within so many minutes.

    Scenarios for one node and those for three are measured after each other: no node runs that has no part. The figures
    go into `rows` (of `rows_of`) as they come, so that the caller has them after an interrupt.
    """
    began = time.monotonic()
    rows = rows_of(scenarios) if rows is None else rows
    if scale == 1:
        progress("touching free memory once")
        warm_pages(int(free_bytes() * _TOUCHED_SHARE), passes_at_most=1)
    numbers = sorted({scenario.brokers for scenario in scenarios})
    for place, brokers in enumerate(numbers):
        together = [scenario for scenario in scenarios if scenario.brokers == brokers]
        deadline = began + 60 * minutes * (place + 1) / len(numbers)
        _Contest(together, rows, scale, progress, on_figures).run(names, brokers, rounds, deadline)
    return rows


class _Contest:
    """The scenarios for one number of brokers. What fails is told in its row and not tried again by that contestant."""

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        rows: Sequence[Row],
        scale: float,
        progress: Callable[[str], None],
        on_figures: OnFigures,
    ) -> None:
        self._scenarios, self._rows, self._scale, self._progress = scenarios, rows, scale, progress
        self._on_figures = on_figures

    def run(self, names: Sequence[str], brokers: int, rounds: int, deadline: float) -> None:
        """Warm every contestant for every scenario, then go `rounds` times through them all, contestants in turn."""
        longest_s = 0.0
        running = any(not isinstance(scenario, footprint.Footprint) for scenario in self._scenarios)
        self._progress(f"starting {brokers} node{'s' if brokers > 1 else ''} of {' and '.join(names)}")
        with contestants(names, brokers, running=running, refused=self._refused) as field_of:
            for scenario, contestant in product(self._scenarios, field_of):
                self._progress(f"{scenario.title}: warming {contestant.name}")
                self._attempt(scenario, contestant, scenario.warm)
            for number in range(rounds):
                began = time.monotonic()
                if number and began + longest_s > deadline:
                    break
                # The first of this round is the last of the next.
                for scenario, contestant in product(self._scenarios, field_of if number % 2 == 0 else field_of[::-1]):
                    self._progress(f"round {number + 1} of {rounds}, {scenario.title}: {contestant.name}")
                    figures = self._attempt(scenario, contestant, scenario.measure) or {}
                    for row in self._rows_of(scenario):
                        if row.metric.name in figures:
                            row.figures.setdefault(contestant.name, []).append(figures[row.metric.name])
                    self._on_figures(scenario, contestant.name, figures)
                longest_s = max(longest_s, time.monotonic() - began)

    def _rows_of(self, scenario: Scenario) -> list[Row]:
        return [row for row in self._rows if row.scenario is scenario]

    def _refused(self, name: str, error: Exception) -> None:
        for scenario in self._scenarios:
            self._failed(scenario, name, error)

    def _failed(self, scenario: Scenario, name: str, error: Exception) -> None:
        for row in self._rows_of(scenario):
            row.failures[name] = one_line_with_type(error)

    def _attempt(self, scenario: Scenario, contestant: Contestant, work: Callable[[Contestant, float], Any]) -> Any:
        """What the work returns; None when it fails now or has failed before."""
        if any(contestant.name in row.failures for row in self._rows_of(scenario)):
            return None
        try:
            return work(contestant, self._scale)
        except FAILURES as error:
            self._failed(scenario, contestant.name, error)
            ended = [server for server in contestant.servers if server.exit_code is not None]
            if ended:
                self._refused(contestant.name, ServerFailed(f"ended with {ended[0].exit_code}: {error}"))
            return None
