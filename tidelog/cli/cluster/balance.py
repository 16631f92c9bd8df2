"""`tidelog cluster balance`: measures the balance of the load over the brokers of a local cluster.

Partitions and leaders come from the cluster. CPU, memory, disk and open files come from the kernel's data of each
process, network bytes from its sockets. Growing counters are measured over an interval. The formulas are in
`replication/controller/decisions/balance.py`. Measures that this machine does not provide are omitted and listed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tidelog.cli.cluster.state import RUNNING, ClusterState, Node
from tidelog.cli.cluster.view import View, cpu_s, look, memory_bytes
from tidelog.cli.common import echo, print_json, print_table
from tidelog.cli.socket_bytes import ConnectionBytes, carried_between, inodes, per_socket
from tidelog.replication.controller.decisions.balance import Balance, assess

MEASURES = (
    "partitions", "leaders", "cpu", "bytes in", "bytes out", "disk read", "disk write", "iowait", "memory", "open files"
)  # fmt: skip
NEGLIGIBLE: Mapping[str, float] = {
    "cpu": 0.02,
    "bytes in": 20_000,
    "bytes out": 20_000,
    "disk read": 20_000,
    "disk write": 20_000,
    "iowait": 0.01,
    "memory": 100 * 1024 * 1024,
    "open files": 200,
}
"""The mean per broker (per second for growing counters) below which a measure is ignored, as that of idle processes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources that a process has used so far; None for data that the kernel does not provide."""

    cpu_s: float | None
    read_bytes: int | None
    written_bytes: int | None
    waited_s: float | None


def sample(pid: int) -> Sample:
    disk: dict[str, int] = {}
    try:
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            name, _, value = line.partition(":")
            disk[name] = int(value)
    except OSError:
        pass
    waited = None
    try:
        # Field 42, delayacct_blkio_ticks, is always 0 if the kernel does not account delays.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        waited = int(fields[39]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        pass
    return Sample(cpu_s(pid), disk.get("read_bytes"), disk.get("write_bytes"), waited)


def measure(state: ClusterState, view: View, seconds: float) -> dict[str, dict[int, float]]:
    """Measure -> broker -> value, for running brokers. Growing counters are measured over `seconds`."""
    nodes = [node for node in state.nodes if node.is_broker and node.now == RUNNING]
    sockets_before = _sockets()
    before = {node.id: sample(node.pid) for node in nodes}
    began = time.monotonic()
    time.sleep(seconds)
    after = {node.id: sample(node.pid) for node in nodes}
    elapsed_s = time.monotonic() - began
    sockets_after = _sockets()

    shares: dict[str, dict[int, float]] = {name: {} for name in MEASURES}
    for node in nodes:
        if view.is_known:
            shares["partitions"][node.id] = view.replicas[node.id]
            shares["leaders"][node.id] = view.leaders[node.id]
        then, now = before[node.id], after[node.id]
        grown = {
            "cpu": (then.cpu_s, now.cpu_s),
            "disk read": (then.read_bytes, now.read_bytes),
            "disk write": (then.written_bytes, now.written_bytes),
            "iowait": (then.waited_s, now.waited_s),
        }
        for name, (first, last) in grown.items():
            if first is not None and last is not None:
                shares[name][node.id] = (last - first) / elapsed_s
        if sockets_before is not None and sockets_after is not None:
            carried = carried_between(sockets_before, sockets_after, inodes(node.pid))
            shares["bytes in"][node.id] = carried.received / elapsed_s
            shares["bytes out"][node.id] = carried.sent / elapsed_s
        if (memory := memory_bytes(node.pid)) is not None:
            shares["memory"][node.id] = memory
        if (files := _open_files(node)) is not None:
            shares["open files"][node.id] = files
    return {name: values for name, values in shares.items() if len(values) == len(nodes)}


def _sockets() -> dict[int, ConnectionBytes] | None:
    try:
        return per_socket()
    except OSError:
        return None


def _open_files(node: Node) -> int | None:
    try:
        return len(os.listdir(f"/proc/{node.pid}/fd"))
    except OSError:
        return None


def show(state: ClusterState, names: Sequence[str], weights: Mapping[str, float], seconds: float, json: bool) -> int:
    """Measure and print. Returns the exit code, which is 0 even with alarms, because an alarm is no failure."""
    view = asyncio.run(look(state))
    measures = measure(state, view, seconds)
    if not any(measures.values()):
        raise click.ClickException("no broker is running")
    chosen = {name: values for name, values in measures.items() if not names or name in names}
    missing = [name for name in names or MEASURES if name not in chosen]
    if not chosen:
        raise click.ClickException(f"not available on this machine: {', '.join(missing)}")
    result = assess(chosen, {name: weights.get(name, 1.0) for name in chosen}, negligible=NEGLIGIBLE)
    if json:
        print_json(as_values(chosen, result))
        return 0
    idle = [name for name in chosen if name not in result.measure_shares]
    rows = []
    for broker, share in result.shares.items():
        parts = [f"{shares[broker]:.1%}" for shares in result.measure_shares.values()]
        alarm = "ALARM" if broker in result.deviating else ""
        rows.append([broker, *parts, f"{share:.1%}", f"{result.deviations[broker]:.1%}", alarm])
    print_table(["BROKER", *(name.upper() for name in result.measure_shares), "SHARE", "DEVIATION", ""], rows)
    verdict = "ALARM" if result.is_spread_too_wide else "even"
    limit = f"alarm above {result.spread_max:.4f}"
    echo(f"\nmean share {1 / len(result.shares):.1%}, spread {result.spread:.4f} ({limit}): {verdict}")
    if idle:
        echo(f"nothing to speak of during {seconds:g} s: {', '.join(idle)}")
    if missing:
        echo(f"not told by this machine: {', '.join(missing)}")
    return 0


def as_values(measures: Mapping[str, Mapping[int, float]], result: Balance) -> dict[str, Any]:
    """The values for `--json`."""
    return {
        "mean_share": 1 / len(result.shares),
        "spread": result.spread,
        "spread_max": result.spread_max,
        "spread_alarm": result.is_spread_too_wide,
        "brokers": [
            {
                "id": broker,
                "measures": {name: values[broker] for name, values in measures.items()},
                "shares": {name: shares[broker] for name, shares in result.measure_shares.items()},
                "share": share,
                "deviation_rate": result.deviations[broker],
                "alarm": broker in result.deviating,
            }
            for broker, share in result.shares.items()
        ],
    }
