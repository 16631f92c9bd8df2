"""Every setting on every broker under measure, round by round in turn, on clusters of four nodes. Rates are medians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median

from tidelog.bench.acks.sending import RECORD_BYTES, Sent, send
from tidelog.bench.acks.settings import Setting
from tidelog.bench.compare import FAILURES, contestants
from tidelog.bench.figures import one_line
from tidelog.bench.scenarios.base import Contestant, topic
from tidelog.testing.usage import warm_pages

BROKERS = 4
# A batch of one record, its index entries and what a JVM allocates on the way.
_BYTES_PER_RECORD = RECORD_BYTES + 200


@dataclass(slots=True)
class Measurements:
    """What was sent in each round, by broker and setting, and what failed with its reason."""

    rounds: dict[str, dict[Setting, list[Sent]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def rates(self, broker: str) -> dict[Setting, float]:
        """Records a second of one broker."""
        broker_rounds = self.rounds.get(broker, {})
        return {setting: median(sent.rate for sent in rounds) for setting, rounds in broker_rounds.items() if rounds}

    def latency_us(self, broker: str, setting: Setting, percent: float) -> float | None:
        """The median over the rounds of a percentile; None with acks=0 or when nothing was measured."""
        rounds = self.rounds.get(broker, {}).get(setting, [])
        latencies_us = [value for sent in rounds if (value := sent.percentile_us(percent)) is not None]
        return median(latencies_us) if latencies_us else None


def run(
    settings: Sequence[Setting],
    brokers: Sequence[str],
    *,
    rounds: int,
    seconds: float,
    progress: Callable[[str], None] = lambda _: None,
    measured: Measurements | None = None,
) -> Measurements:
    """Warm every broker with every setting once, then go `rounds` times through them all, brokers in turn.

    The figures go into `measured` as they come, so that its owner has them after an interrupt.
    """
    measured = Measurements() if measured is None else measured
    measured.rounds.update({name: {setting: [] for setting in settings} for name in brokers})
    broken: set[str] = set()

    def refused(name: str, error: Exception) -> None:
        broken.add(name)
        measured.failures.append(f"{name}: {one_line(error)}")

    progress(f"starting {BROKERS} nodes of {' and '.join(brokers)}")
    with contestants(brokers, BROKERS, refused=refused) as field_of:
        for number in range(rounds + 1):
            # The first of this round is the last of the next.
            order = field_of if number % 2 == 0 else field_of[::-1]
            for setting, contestant in product(settings, order):
                if contestant.name in broken:
                    continue
                what = f"round {number} of {rounds}" if number else "warming"
                progress(f"{what}: {setting}: {contestant.name}")
                try:
                    sent = _measure(contestant, setting, seconds, measured.rounds[contestant.name][setting])
                except FAILURES as error:
                    refused(contestant.name, error)
                    continue
                if number:
                    measured.rounds[contestant.name][setting].append(sent)
    return measured


def _measure(contestant: Contestant, setting: Setting, seconds: float, before: Sequence[Sent]) -> Sent:
    with topic(
        contestant, setting.partitions, setting.replicas, {"min.insync.replicas": str(setting.min_insync)}
    ) as its:
        if before:
            warm_pages(before[-1].records * _BYTES_PER_RECORD * setting.replicas)
        return send(its, setting.acks, seconds)
