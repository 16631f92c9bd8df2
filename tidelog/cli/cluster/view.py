"""The present state of a local cluster: each node's process, and the brokers' leaders and replicas.

`cluster status` uses it once, `cluster start` repeatedly. Values without an answer stay empty, because the view must
work for a cluster with failures.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tidelog.cli.cluster.state import DIED, KILLED, PAUSED, RUNNING, ClusterState, Node
from tidelog.client import Admin
from tidelog.client.model import TopicDescription
from tidelog.protocol.errors import counted

_PATIENCE_MS = 2_000
_COLOURS = {RUNNING: "green", PAUSED: "yellow", KILLED: "red", DIED: "red"}
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class View:
    """`is_known`: whether a broker has answered. Otherwise all values except those of the processes are empty."""

    state: ClusterState
    is_known: bool = False
    registered: set[int] = field(default_factory=set)
    leaders: Counter[int] = field(default_factory=Counter)
    replicas: Counter[int] = field(default_factory=Counter)
    partitions: int = 0
    under_replicated: int = 0
    without_leader: int = 0


async def look(state: ClusterState) -> View:
    """Query the running brokers; takes at most a few seconds."""
    view = View(state)
    if not any(node.is_broker and node.now == RUNNING for node in state.nodes):
        return view
    try:
        async with asyncio.timeout(2 * _PATIENCE_MS / 1000):
            async with Admin(
                bootstrap_servers=state.running_bootstrap,
                client_id="tidelog-cluster",
                default_api_timeout_ms=_PATIENCE_MS,
                request_timeout_ms=_PATIENCE_MS,
                socket_connection_setup_timeout_ms=_PATIENCE_MS,
            ) as admin:
                nodes = (await admin.describe_cluster()).nodes
                topics = await admin.describe_topics()
    except Exception:
        return view
    view.is_known = True
    view.registered = {node.node_id for node in nodes}
    _count(view, topics)
    return view


def _count(view: View, topics: dict[str, TopicDescription]) -> None:
    for topic in topics.values():
        for each in topic.partitions:
            view.partitions += 1
            view.replicas.update(each.replicas)
            if each.leader is None:
                view.without_leader += 1
            else:
                view.leaders[each.leader] += 1
            if set(each.isr) != set(each.replicas):
                view.under_replicated += 1


def cpu_s(pid: int) -> float | None:
    """The CPU seconds of a process, user and system; None if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def memory_bytes(pid: int) -> int | None:
    """The resident memory of a process; None if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return None


def row(view: View, node: Node) -> dict[str, Any]:
    """The values of one node for `--json`."""
    here = node.is_there
    memory, cpu = (memory_bytes(node.pid), cpu_s(node.pid)) if here else (None, None)
    is_measured = view.is_known and node.is_broker
    return {
        "id": node.id,
        "role": node.role,
        "state": node.now,
        "pid": node.pid if here else None,
        "addresses": node.addresses,
        "registered": node.id in view.registered if is_measured else None,
        "leaders": view.leaders[node.id] if is_measured else None,
        "replicas": view.replicas[node.id] if is_measured else None,
        "cpu_s": round(cpu, 2) if cpu is not None else None,
        "memory_mib": round(memory / 2**20, 1) if memory is not None else None,
        "data": node.data,
        "output": node.output,
    }


def as_json(view: View) -> dict[str, Any]:
    return {
        "cluster_id": view.state.cluster_id,
        "bootstrap_servers": view.state.bootstrap,
        "answers": view.is_known,
        "partitions": view.partitions if view.is_known else None,
        "under_replicated": view.under_replicated if view.is_known else None,
        "without_leader": view.without_leader if view.is_known else None,
        "nodes": [row(view, node) for node in view.state.nodes],
    }


HEADER = ("NODE", "ROLE", "STATE", "PID", "ADDRESS", "LEADERS", "REPLICAS", "CPU S", "MIB")


def cells(view: View, node: Node) -> tuple[str, ...]:
    values = row(view, node)
    state = values["state"]
    if state == RUNNING and values["registered"] is False:
        state = "running, fenced"
    shown = (values["leaders"], values["replicas"], values["cpu_s"], values["memory_mib"])
    return (
        str(node.id),
        node.role,
        state,
        str(values["pid"] or "-"),
        " ".join(node.addresses.values()),
        *("-" if each is None else str(each) for each in shown),
    )


def summary(view: View) -> str:
    if not view.is_known:
        return "no broker answers"
    parts = [counted(view.partitions, "partition")]
    parts.append(f"{view.under_replicated} under-replicated" if view.under_replicated else "all in sync")
    if view.without_leader:
        parts.append(f"{view.without_leader} without a leader")
    return ", ".join(parts)


def live_table(view: View) -> Table:
    """The live table of a terminal."""
    table = Table(title=f"Tidelog cluster {view.state.cluster_id}", title_justify="left", caption_justify="left")
    for name in HEADER:
        table.add_column(name, justify="right" if name in HEADER[5:] else "left", no_wrap=True)
    for node in view.state.nodes:
        texts: list[str | Text] = list(cells(view, node))
        texts[2] = Text(str(texts[2]), style=_COLOURS.get(node.now, ""))
        table.add_row(*texts)
    table.caption = f"{summary(view)}. Ctrl-C ends all nodes."
    return table
