"""A model of the cost of a load, for planning beyond one machine. Pure.

The CPU of a Produce request grows with its bytes and with the followers that copy it; reading costs
by the byte. The five costs are solved from five measured points (`planning` measures them).
A Tidelog node is one process that serves on one thread, so a node is counted as one core.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

MEGABYTE = 1_000_000
BUSY_SHARE = 0.7
"""Of a node's core, for the load; the rest is for bursts, elections and catching up."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured request: its batch's bytes, its replicas, the CPU of all brokers for it."""

    batch_bytes: int
    replicas: int
    cpu_us: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Microseconds of CPU, of all brokers together."""

    request_us: float
    byte_us: float
    replica_request_us: float
    replica_byte_us: float
    out_byte_us: float

    def request_cpu_us(self, batch_bytes: int, replicas: int) -> float:
        """CPU of all replicas for one Produce request with acks=all, in microseconds."""
        leader_us = self.request_us + self.byte_us * batch_bytes
        return leader_us + (replicas - 1) * (self.replica_request_us + self.replica_byte_us * batch_bytes)


@dataclass(frozen=True, slots=True)
class Load:
    """Megabytes a second of record batches in; each is read `fan_out` times and kept `replicas` times."""

    mb_in: float
    fan_out: float
    replicas: int
    batch_bytes: int
    retention_hours: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`cores` is what the load takes on average; network figures are of one node."""

    cores: float
    nodes: int
    in_mb_per_node: float
    out_mb_per_node: float
    disk_gb_per_node: float


def solve(points: list[Point], out_byte_us: float) -> Costs:
    """Costs from a small and a large request, each with one replica and with two.

    Raises ValueError when the points are not those four.
    """
    costs_us = {(point.replicas, point.batch_bytes): point.cpu_us for point in points}
    sizes = sorted({point.batch_bytes for point in points})
    if len(sizes) != 2 or set(costs_us) != {(replicas, size) for replicas in (1, 2) for size in sizes}:
        raise ValueError("the model needs two sizes, each with one replica and with two")
    request_us, byte_us = _line(sizes, [costs_us[1, size] for size in sizes])
    more_request_us, more_byte_us = _line(sizes, [costs_us[2, size] - costs_us[1, size] for size in sizes])
    return Costs(request_us, byte_us, more_request_us, more_byte_us, out_byte_us)


def _line(sizes: list[int], costs: list[float]) -> tuple[float, float]:
    """Cost at zero bytes and cost of a byte, neither below zero."""
    slope = max(0.0, (costs[1] - costs[0]) / (sizes[1] - sizes[0]))
    return max(0.0, costs[0] - slope * sizes[0]), slope


def plan(costs: Costs, load: Load) -> Plan:
    """Nodes for this load: enough cores, and as many as there are replicas."""
    bytes_per_s = load.mb_in * MEGABYTE
    in_us = bytes_per_s / load.batch_bytes * costs.request_cpu_us(load.batch_bytes, load.replicas)
    cores = (in_us + bytes_per_s * load.fan_out * costs.out_byte_us) / 1e6
    nodes = max(load.replicas, ceil(cores / BUSY_SHARE))
    kept_gb = load.mb_in * load.replicas * 3600 * load.retention_hours / 1000
    return Plan(
        cores,
        nodes,
        load.mb_in * load.replicas / nodes,
        load.mb_in * (load.replicas - 1 + load.fan_out) / nodes,
        kept_gb / nodes,
    )
