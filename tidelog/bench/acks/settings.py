"""What is measured, what the reference measured, and the laws that should hold. Pure: no figure is taken here.

The reference is a study of Kafka 0.10.1 on four brokers of 24 cores with synchronous producers and records of 1 KB. Its
absolute figures belong to its machines; what carries over are three laws, and those are judged for every broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

ALL = -1
# Rates of one setting differ that much between runs, the reference's too (8,217 to 9,092 for the same work).
NOISE = 0.15


@dataclass(frozen=True, slots=True)
class Setting:
    """How a topic is kept and how its producers ask: `acks` is 0, 1 or ALL."""

    partitions: int
    acks: int
    replicas: int
    min_insync: int = 1

    @property
    def acks_name(self) -> str:
        return "all" if self.acks == ALL else str(self.acks)

    def __str__(self) -> str:
        return (
            f"{self.partitions} partition{'s' if self.partitions > 1 else ''}, acks={self.acks_name}, "
            f"{self.replicas} replica{'s' if self.replicas > 1 else ''}, min.insync {self.min_insync}"
        )


@dataclass(frozen=True, slots=True)
class Study:
    """A table of the reference: its settings in order, and its records a second where it has the setting."""

    number: int
    title: str
    settings: tuple[Setting, ...]
    reference: Mapping[Setting, int]


@dataclass(frozen=True, slots=True)
class Law:
    """A statement about the measured rates, whether it held, and the figures that say so."""

    statement: str
    holds: bool
    evidence: str


def studies() -> list[Study]:
    """The three tables."""
    replicas = (1, 2, 3, 4)
    twelve = [Setting(12, ALL, *kept) for kept in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (4, 4))]
    twelve += [Setting(12, acks, count) for acks in (1, 0) for count in replicas]
    one = [Setting(1, ALL, *kept) for kept in ((2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (4, 4))]
    every = [Setting(1, acks, count) for acks in (ALL, 1, 0) for count in replicas]
    return [
        Study(1, "12 partitions, one producer on each", tuple(twelve), _REFERENCE),
        Study(2, "1 partition, one producer, acks=all", tuple(one), _REFERENCE),
        Study(3, "1 partition, one producer, min.insync.replicas=1", tuple(every), _REFERENCE),
    ]


def all_settings(chosen: Iterable[Study]) -> list[Setting]:
    """Each setting of these studies once, in their order."""
    return list(dict.fromkeys(setting for study in chosen for setting in study.settings))


def laws(rates: Mapping[Setting, float]) -> list[Law]:
    """What the rates of one broker say to each law, as far as they were measured."""
    return [law for partitions in (12, 1) for law in _laws_of(partitions, rates)]


def _laws_of(partitions: int, rates: Mapping[Setting, float]) -> Iterable[Law]:
    where = f"{partitions} partition{'s' if partitions > 1 else ''}"
    # With one replica, 1 and all ask for the same.
    for replicas in (2, 3, 4):
        none, leader, everyone = (rates.get(Setting(partitions, acks, replicas)) for acks in (0, 1, ALL))
        if none is not None and leader is not None and everyone is not None:
            yield Law(
                f"{where}, {replicas} replicas: acks 0 > 1 > all",
                none > leader > everyone,
                f"{none:,.0f} > {leader:,.0f} > {everyone:,.0f}",
            )
    by_replicas = [rates[one] for count in (1, 2, 3, 4) if (one := Setting(partitions, ALL, count)) in rates]
    if len(by_replicas) == 4:
        falling = all(more <= fewer * (1 + NOISE) for fewer, more in pairwise(by_replicas))
        yield Law(
            f"{where}: more replicas, slower at acks=all",
            falling and by_replicas[-1] < by_replicas[0],
            " > ".join(f"{rate:,.0f}" for rate in by_replicas),
        )
    for replicas in (2, 3, 4):
        same = {setting.min_insync: rate for setting, rate in rates.items() if _is(setting, partitions, replicas)}
        if len(same) > 1:
            low, high = min(same.values()), max(same.values())
            yield Law(
                f"{where}, {replicas} replicas: min.insync.replicas does not matter",
                high <= low * (1 + NOISE),
                ", ".join(f"{least}: {rate:,.0f}" for least, rate in sorted(same.items())),
            )


def _is(setting: Setting, partitions: int, replicas: int) -> bool:
    return (setting.partitions, setting.acks, setting.replicas) == (partitions, ALL, replicas)


_REFERENCE: Mapping[Setting, int] = {
    **{
        Setting(12, ALL, *kept): rate
        for kept, rate in (
            *(((1, 1), 28_511), ((2, 1), 22_360), ((2, 2), 22_928)),
            *(((4, 1), 16_194), ((4, 2), 16_600), ((4, 4), 16_680)),
        )
    },
    **{Setting(12, 1, count): rate for count, rate in ((1, 33_950), (2, 32_192), (4, 32_276))},
    **{Setting(12, 0, count): rate for count, rate in ((1, 45_354), (2, 46_427), (4, 46_764))},
    **{
        Setting(1, ALL, *kept): rate
        for kept, rate in (
            *(((1, 1), 18_641), ((2, 1), 9_739), ((2, 2), 9_702), ((3, 1), 9_000), ((3, 2), 9_243)),
            *(((4, 1), 9_006), ((4, 2), 8_217), ((4, 4), 9_092)),
        )
    },
    **{Setting(1, 1, count): rate for count, rate in ((1, 19_489), (2, 20_404), (4, 18_365))},
    **{Setting(1, 0, count): rate for count, rate in ((1, 76_696), (2, 57_503), (4, 59_367))},
}
