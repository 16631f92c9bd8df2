"""Scenarios 1 to 4: the cost of acks, replicas, min.insync.replicas and partitions for synchronous producers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tidelog.bench.acks import contest
from tidelog.bench.acks.settings import ALL, NOISE, Law, Setting, Study, laws, studies
from tidelog.bench.compare import OURS, THEIRS
from tidelog.bench.studies.base import Context
from tidelog.bench.studies.results import Chart, Series, StudyResult, Table, Verdict, ratio

PARTITIONS = (1, 2, 4, 8, 12)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Medians of `rounds` rounds, each setting measured for `seconds` in each."""

    rounds: int
    seconds: float


QUICK, FULL = Parameters(1, 0.3), Parameters(3, 1.5)


class AcksAndReplicas:
    """One table of the reference."""

    def __init__(self, study: Study) -> None:
        self.number, self.title = study.number, f"Acks and replicas: {study.title}"
        self.question = "How many records of 1 KB a second do producers send that wait for each answer?"
        self._study = study

    def measure(self, context: Context, result: StudyResult) -> None:
        measured = contest.Measurements()
        try:
            _measure(context, result, self._study.settings, measured)
        finally:
            rates = {name: measured.rates(name) for name in context.brokers}
            result.tables = [_table(self._study.settings, rates, measured, self._study.reference)]
            result.charts = [
                _by_replicas(rates, count) for count in dict.fromkeys(s.partitions for s in self._study.settings)
            ]
            result.verdicts = [_verdict(law, name) for name in rates for law in laws(rates[name])]


class Partitions:
    """Scenario 4: more partitions, a producer on each."""

    number = 4
    title = "Partitions: 2 replicas, min.insync.replicas=2, acks=all"
    question = "How does the rate of producers that wait for each answer grow with the number of partitions?"
    settings = tuple(Setting(count, ALL, 2, 2) for count in PARTITIONS)

    def measure(self, context: Context, result: StudyResult) -> None:
        measured = contest.Measurements()
        try:
            _measure(context, result, self.settings, measured)
        finally:
            rates = {name: measured.rates(name) for name in context.brokers}
            result.tables = [_table(self.settings, rates, measured, {})]
            lines = [
                Series(name, name, [(s.partitions, broker_rates[s]) for s in self.settings if s in broker_rates])
                for name, broker_rates in rates.items()
            ]
            result.charts = [Chart("Rate over partitions", "partitions", "records a second", lines)]
            result.verdicts = [verdict for name in rates for verdict in partition_verdicts(name, rates[name])]


def _measure(
    context: Context, result: StudyResult, settings: Sequence[Setting], measured: contest.Measurements
) -> None:
    chosen = QUICK if context.is_quick else FULL
    result.parameters = {
        "nodes": str(contest.BROKERS),
        "record": "1,000 bytes, one in flight per producer, one producer per partition",
        "rounds": f"{chosen.rounds} of {chosen.seconds:g} s each, brokers in turn, after one that warms",
        "flush": "no fsync before an answer (both brokers' default)",
    }
    try:
        contest.run(
            settings, context.brokers, rounds=chosen.rounds, seconds=chosen.seconds,
            progress=context.progress, measured=measured,
        )  # fmt: skip
    finally:
        result.failures += measured.failures


def _table(
    settings: Sequence[Setting],
    rates: Mapping[str, Mapping[Setting, float]],
    measured: contest.Measurements,
    reference: Mapping[Setting, int],
) -> Table:
    columns = ["partitions", "acks", "replicas", "min.insync"]
    for name in rates:
        columns += [f"{name}, records/s", f"{name}, p50 us", f"{name}, p99 us"]
    columns += ["ratio"] if {OURS, THEIRS} <= set(rates) else []
    columns += ["Kafka 0.10.1 on 4 x 24 cores"] if reference else []
    table = Table("Records a second", columns)
    for setting in settings:
        row: list[str | float | int | None] = [
            setting.partitions, setting.acks_name, setting.replicas, setting.min_insync,
        ]  # fmt: skip
        for name, broker_rates in rates.items():
            row += [broker_rates.get(setting), *(measured.latency_us(name, setting, percent) for percent in (50, 99))]
        if {OURS, THEIRS} <= set(rates):
            row.append(ratio(rates[OURS].get(setting), rates[THEIRS].get(setting)))
        if reference:
            row.append(reference.get(setting))
        table.rows.append(row)
    return table


def _by_replicas(rates: Mapping[str, Mapping[Setting, float]], partitions: int) -> Chart:
    chart = Chart(
        f"{partitions} partition{'s' if partitions > 1 else ''}", "replicas", "records a second", y_is_log=True
    )
    for name, broker_rates in rates.items():
        for acks in (0, 1, ALL):
            points = [(count, broker_rates.get(Setting(partitions, acks, count))) for count in (1, 2, 3, 4)]
            acks_name = Setting(1, acks, 1).acks_name
            line = Series(f"{name}, acks={acks_name}", name, [(x, y) for x, y in points if y], f"acks={acks_name}")
            chart.series.append(line)
    return chart


def _verdict(law: Law, broker: str) -> Verdict:
    return Verdict(law.statement, broker, law.holds, law.evidence)


def partition_verdicts(broker: str, rates: Mapping[Setting, float]) -> list[Verdict]:
    """Whether the rate grows with partitions at first, and grows less later."""
    known = sorted((setting.partitions, rate) for setting, rate in rates.items() if setting.replicas == 2)
    if len(known) < len(PARTITIONS):
        return []
    evidence = ", ".join(f"{count}: {rate:,.0f}" for count, rate in known)
    growth = [later / earlier for (_, earlier), (_, later) in pairwise(known)]
    return [
        Verdict("more partitions, more records a second", broker, known[-1][1] > known[0][1] * (1 + NOISE), evidence),
        Verdict("the growth flattens", broker, growth[-1] < growth[0] * (1 + NOISE), evidence),
    ]


def all_studies() -> list[AcksAndReplicas | Partitions]:
    """Scenarios 1 to 4."""
    return [*map(AcksAndReplicas, studies()), Partitions()]
