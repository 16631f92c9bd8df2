"""What the demo counts for a carrier, and how two counts of the same flights are compared.

The source, the consumer group and Spark each make their own tallies; all three must be equal to the last minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

LATE_AFTER_MINUTES = 15


@dataclass(slots=True)
class Tally:
    """Sums over flights; a cancelled or diverted flight has no arrival delay and counts only in `flights`."""

    flights: int = 0
    arrived: int = 0
    arrival_delay_minutes: int = 0
    late: int = 0
    distance_miles: int = 0

    def add(self, arrival_delay: int | None, distance: int) -> None:
        self.flights += 1
        self.distance_miles += distance
        if arrival_delay is not None:
            self.arrived += 1
            self.arrival_delay_minutes += arrival_delay
            if arrival_delay > LATE_AFTER_MINUTES:
                self.late += 1

    def merge(self, other: Tally) -> None:
        for field in fields(Tally):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def mean_delay_minutes(self) -> float:
        return self.arrival_delay_minutes / self.arrived if self.arrived else 0.0

    @property
    def late_share(self) -> float:
        return self.late / self.arrived if self.arrived else 0.0


Tallies = dict[str, Tally]


def total(tallies: Mapping[str, Tally]) -> Tally:
    whole = Tally()
    for tally in tallies.values():
        whole.merge(tally)
    return whole


def merged(*parts: Mapping[str, Tally]) -> Tallies:
    whole: Tallies = {}
    for part in parts:
        for carrier, tally in part.items():
            whole.setdefault(carrier, Tally()).merge(tally)
    return whole


def to_json(tallies: Mapping[str, Tally]) -> dict[str, dict[str, int]]:
    return {carrier: asdict(tally) for carrier, tally in tallies.items()}


def from_json(values: Mapping[str, Mapping[str, int]]) -> Tallies:
    return {carrier: Tally(**tally) for carrier, tally in values.items()}


def differences(expected: Mapping[str, Tally], actual: Mapping[str, Tally]) -> list[str]:
    """One line for every carrier and sum in which the two disagree; empty when they are equal."""
    lines = []
    for carrier in sorted(expected.keys() | actual.keys()):
        left, right = expected.get(carrier, Tally()), actual.get(carrier, Tally())
        for field in fields(Tally):
            want, got = getattr(left, field.name), getattr(right, field.name)
            if want != got:
                lines.append(f"{carrier} {field.name.replace('_', ' ')}: source {want:,}, got {got:,}")
    return lines
