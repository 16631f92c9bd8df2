"""Where the matrix runs: a Tidelog node, a Kafka node, or three Tidelog nodes that are one cluster.

Each broker advertises the port of a `Recorder` in front of it, so that what its clients ask for is known afterwards.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.compatibility.clients.client import Client
from tests.compatibility.clients.known import KINDS, Missing, environment
from tests.compatibility.clients.recorder import Recorder, Seen
from tests.compatibility.wire import Wire
from tidelog.bench.metadata import await_brokers
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.processes import ServerProcess

PATIENCE_S = 120.0
_numbers = itertools.count(1)
Start = Callable[..., ServerProcess]


class Place:
    """One broker or several, and the clients that were started against them."""

    def __init__(self, name: str, directory: Path, nodes: Mapping[int, ServerProcess], recorders: list[Recorder]):
        self.name = name
        self.nodes = nodes
        self.recorders = recorders
        self.bootstrap_servers = ",".join(f"127.0.0.1:{recorder.port}" for recorder in recorders)
        self._directory = directory
        self._clients: dict[str, Client] = {}

    @property
    def replicas(self) -> int:
        return len(self.nodes)

    def client(self, name: str) -> Client:
        """The client, started when it is first wanted; skips where it is not installed."""
        if name not in self._clients:
            kind = KINDS[name]
            try:
                command = kind.command()
            except Missing as reason:
                pytest.skip(f"{name}: {reason}")
            log = self._directory / f"{name}.log"
            self._clients[name] = Client(name, command, self.bootstrap_servers, log, environment(kind))
        return self._clients[name]

    def versions(self) -> dict[str, str]:
        """The clients that were started, in the order of `KINDS`, and the versions they say they are."""
        return {name: self._clients[name].ask("version") for name in KINDS if name in self._clients}

    def topic(self, partitions: int = 1, **configs: str) -> str:
        """Create a topic nobody else uses, on every broker, and wait until each knows its leaders."""
        name = f"matrix-{self.name}-{next(_numbers)}"
        wanted = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
        topic = {"name": name, "num_partitions": partitions, "replication_factor": self.replicas, "configs": wanted}
        ports = [node.port for node in self.nodes.values()]
        with Wire(ports[0]) as wire:
            created = wire.ask("create_topics", 7, topics=[topic], timeout=20_000).topics[0]
            assert created.error_code == 0, created
        for port in ports:
            with Wire(port) as wire:
                await_that(lambda: _leaders(wire, name) == partitions, f"{name} has no leaders")
        return name

    def restart(self) -> None:
        """Every broker, one after the other, each with a clean stop."""
        for node in self.nodes.values():
            node.restart()
            await_brokers((node.port for node in self.nodes.values()), len(self.nodes))

    def seen(self) -> Seen:
        """What all clients asked for: client id -> API key -> versions."""
        together: Seen = {}
        for recorder in self.recorders:
            for client, apis in recorder.seen.items():
                for key, versions in apis.items():
                    together.setdefault(client, {}).setdefault(key, set()).update(versions)
        return together

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def _leaders(wire: Wire, topic: str) -> int:
    found = wire.ask("metadata", 9, topics=[{"name": topic}], allow_auto_topic_creation=False).topics[0]
    return sum(partition.leader_id >= 0 for partition in found.partitions)


def await_that(attempt: Callable[[], bool], what: str | Callable[[], str]) -> None:
    """Until it is so; fails with `what` when it does not become so."""
    deadline = time.monotonic() + PATIENCE_S
    while not attempt():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(0.05)


@contextmanager
def open_place(name: str, directory: Path, options: Mapping[str, str], start: Start) -> Iterator[Place]:
    """Start what `name` says, "tidelog", "kafka" or "cluster", and end it afterwards."""
    with ExitStack() as stack:
        recorders = [stack.enter_context(Recorder()) for _ in range(3 if name == "cluster" else 1)]
        advertised = [{"advertised.listeners": f"PLAINTEXT://127.0.0.1:{one.port}"} for one in recorders]
        nodes: Mapping[int, ServerProcess]
        if name == "cluster":
            together = {**options, "offsets.topic.replication.factor": "3", "default.replication.factor": "3"}
            own = dict(enumerate(advertised, 1))
            cluster = EmbeddedCluster(3, directory, config=together, node_config=own)
            nodes = cluster.nodes
            for recorder, node in zip(recorders, nodes.values()):
                recorder.target_port = node.port
            stack.enter_context(cluster)
            await_brokers((node.port for node in nodes.values()), 3)
        else:
            node = start(name, directory, **advertised[0])
            recorders[0].target_port = node.port
            nodes = {1: stack.enter_context(node)}
        place = Place(name, directory, nodes, recorders)
        stack.callback(place.close)
        yield place
