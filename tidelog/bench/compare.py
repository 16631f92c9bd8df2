"""The comparison: every scenario on every contestant, interleaved round by round, in one run.

Both nodes run all the time and are measured in turn, so that a machine that grows slower does so for both. Everything
is warmed before anything is measured: a JIT compiler learns from all the work it will see. Nodes live
on loopback, their data in a temporary directory that is removed. A figure is the median of its rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

from tidelog.bench.peers import KafkaProcess
from tidelog.bench.processes import ServerProcess, TidelogProcess
from tidelog.bench.scenarios import end_to_end, fetch_raw, footprint, librdkafka, produce_raw
from tidelog.bench.scenarios.base import Contestant, Metric, Scenario
from tidelog.bench.usage import free_bytes, warm_pages

OURS, THEIRS = "tidelog", "kafka"
# A deleted topic's pages serve the next round; Kafka's default would keep them for a minute.
OPTIONS = {"log.segment.delete.delay.ms": "1000"}
MAKERS: dict[str, Callable[[Path], ServerProcess]] = {
    OURS: lambda directory: TidelogProcess(directory, options=OPTIONS),
    THEIRS: lambda directory: KafkaProcess(directory, options=OPTIONS),
}
# The kernel hands out free pages in no order: only when all are warm does no row meet a cold one.
_TOUCHED_SHARE = 0.85


@dataclass(slots=True)
class Row:
    """One metric of one scenario: every round's figure per contestant."""

    scenario: Scenario
    metric: Metric
    figures: dict[str, list[float]] = field(default_factory=dict)

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
        ours, verdicts = self.value(OURS), []
        if ours is not None and self.metric.at_most is not None:
            verdicts.append(ours <= self.metric.at_most)
        if self.ratio is not None and self.metric.ratio_at_most is not None:
            verdicts.append(self.ratio <= self.metric.ratio_at_most)
        return all(verdicts) if verdicts else None


def catalogue() -> list[Scenario]:
    """Every scenario, in the order of the table."""
    modules = (produce_raw, librdkafka, fetch_raw, end_to_end, footprint)
    return [scenario for module in modules for scenario in module.scenarios()]


def select(patterns: Sequence[str]) -> list[Scenario]:
    """The scenarios whose name contains any of the patterns; all of them without a pattern."""
    return [one for one in catalogue() if not patterns or any(pattern in one.name for pattern in patterns)]


@contextmanager
def contestants(names: Sequence[str], *, running: bool = True) -> Iterator[list[Contestant]]:
    """A node of each named broker, started in a temporary directory; `running=False` when no scenario needs one."""
    with tempfile.TemporaryDirectory(prefix="tidelog-bench-") as scratch, ExitStack() as nodes:
        found = []
        for name in names:
            make = MAKERS[name]
            home = Path(scratch, name)
            server = make(home / "node")
            if running:
                nodes.enter_context(server)
            home.mkdir(parents=True, exist_ok=True)
            found.append(Contestant(name, server, make, home))
        yield found


def run(
    scenarios: Sequence[Scenario],
    names: Sequence[str],
    *,
    rounds: int,
    scale: float = 1.0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Warm every contestant for every scenario, then go `rounds` times through them all, contestants in turn."""
    rows = [Row(scenario, metric) for scenario in scenarios for metric in scenario.metrics]
    if scale == 1:
        progress("touching free memory once")
        warm_pages(int(free_bytes() * _TOUCHED_SHARE), passes_at_most=1)
    running = any(not isinstance(scenario, footprint.Footprint) for scenario in scenarios)
    with contestants(names, running=running) as field_of:
        for scenario, contestant in product(scenarios, field_of):
            progress(f"{scenario.title}: warming {contestant.name}")
            scenario.warm(contestant, scale)
        for number in range(rounds):
            # Whoever goes first this round goes last in the next.
            for scenario, contestant in product(scenarios, field_of if number % 2 == 0 else field_of[::-1]):
                progress(f"round {number + 1} of {rounds}, {scenario.title}: {contestant.name}")
                figures = scenario.measure(contestant, scale)
                for row in rows:
                    if row.scenario is scenario:
                        row.figures.setdefault(contestant.name, []).append(figures[row.metric.name])
    return rows
