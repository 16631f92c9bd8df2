"""The interface to several nodes for scenarios and tests, and a single node with the same interface.

`peers.KafkaCluster` and `testing.cluster.EmbeddedCluster` are such clusters. Everything here is on loopback.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Protocol

from tidelog.bench.metadata import await_brokers
from tidelog.testing.processes import ServerProcess


class Cluster(Protocol):
    """Processes that start and end together; `nodes` are by node id, the brokers first."""

    @property
    def nodes(self) -> Mapping[int, ServerProcess]: ...

    @property
    def bootstrap_servers(self) -> str: ...

    def start(self, timeout_s: float = ...) -> float:
        """Launch all, wait for all; the seconds that took."""

    def stop(self) -> None: ...


class Alone:
    """One node as a cluster of its own."""

    def __init__(self, server: ServerProcess) -> None:
        self.nodes = {1: server}

    @property
    def bootstrap_servers(self) -> str:
        return self.nodes[1].bootstrap_servers

    def start(self, timeout_s: float = 60.0) -> float:
        return self.nodes[1].start(timeout_s)

    def stop(self) -> None:
        self.nodes[1].stop()


class RunningCluster:
    """A cluster inside a `with` block: ready when every broker lists every broker, stopped at the end.

    An interrupt kills the nodes: the user waits, and nothing reads their data again.
    `ready_s` is from the launch of the first process to that moment. Formatting, where that is a step of its own, comes
    before it.
    """

    def __init__(self, cluster: Cluster, timeout_s: float = 90.0) -> None:
        self.cluster = cluster
        self._timeout_s = timeout_s
        self.ready_s = 0.0

    def __enter__(self) -> RunningCluster:
        nodes = list(self.cluster.nodes.values())
        for node in nodes:
            node.prepare()
        began = time.monotonic()
        try:
            self.cluster.start(self._timeout_s)
            if len(nodes) > 1:
                await_brokers((node.port for node in nodes), len(nodes), self._timeout_s)
        except BaseException:
            kill(nodes)
            raise
        self.ready_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            kill(self.cluster.nodes.values())
        else:
            self.cluster.stop()


def kill(nodes: Iterable[ServerProcess]) -> None:
    """SIGKILL to every node that still runs."""
    for node in nodes:
        node.kill()
