"""The balance of a cluster's load over its brokers: shares, deviations, spread, alarms. Pure.

A measure is any quantity that every broker has: partitions, leaders, CPU, bytes in and out, disk,
memory, open files. A broker's share of a measure is its part of the sum. Its load is the weighted
sum of its shares, and its share of the load is its part of all loads. In an even cluster of N
brokers every share is 1/N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

DEVIATION_MAX = 0.10


@dataclass(frozen=True, slots=True)
class Balance:
    """By broker id; shares sum to 1. `measure_shares`: measure -> broker id -> share of that
    measure alone.
    """

    shares: dict[int, float]
    deviations: dict[int, float]
    spread: float
    measure_shares: dict[str, dict[int, float]]
    deviation_max: float

    @property
    def spread_max(self) -> float:
        return self.deviation_max / len(self.shares)

    @property
    def deviating(self) -> list[int]:
        """The brokers whose load deviates too far from an even share."""
        return [broker_id for broker_id, rate in self.deviations.items() if rate > self.deviation_max]

    @property
    def is_spread_too_wide(self) -> bool:
        return self.spread > self.spread_max


def assess(
    measures: Mapping[str, Mapping[int, float]],
    weights: Mapping[str, float] | None = None,
    *,
    deviation_max: float = DEVIATION_MAX,
    negligible: Mapping[str, float] | None = None,
) -> Balance:
    """`measures`: name -> broker id -> value, for the same brokers; `weights`: equal by default.

    A measure with a sum of zero, or with a mean below `negligible`, is ignored.
    """
    brokers = sorted({broker_id for values in measures.values() for broker_id in values})
    assert brokers, "a balance of no brokers"
    measure_shares: dict[str, dict[int, float]] = {}
    for name, values in measures.items():
        total = sum(values.values())
        if total > 0 and total / len(brokers) >= (negligible or {}).get(name, 0.0):
            measure_shares[name] = {broker_id: values.get(broker_id, 0.0) / total for broker_id in brokers}
    load = {
        broker_id: sum(
            (1.0 if weights is None else weights.get(name, 0.0)) * shares[broker_id]
            for name, shares in measure_shares.items()
        )
        for broker_id in brokers
    }
    total_load = sum(load.values())
    even = 1 / len(brokers)
    shares = {broker_id: load[broker_id] / total_load if total_load > 0 else even for broker_id in brokers}
    return Balance(
        shares=shares,
        deviations={broker_id: abs(share - even) / even for broker_id, share in shares.items()},
        spread=sqrt(sum((share - even) ** 2 for share in shares.values()) / len(brokers)),
        measure_shares=measure_shares,
        deviation_max=deviation_max,
    )
