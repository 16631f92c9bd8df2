"""The common part of all scenarios: the measured server, metrics with their targets, temporary topics.

A scenario has a name, warms a server once, and measures it once per round, returning one figure per metric. It creates
its own topic with the same settings on either broker and deletes it, so that no round reads what another wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tidelog.bench.clusters import Cluster
from tidelog.bench.metadata import await_leaders
from tidelog.bench.topics import NewTopic, create, delete
from tidelog.testing.processes import ServerProcess
from tidelog.testing.usage import cpu_ns

TOPIC_SETTINGS = {"retention.ms": "-1"}
MEGABYTE, GIGABYTE = 1_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a scenario. `at_most` is our own target; `ratio_at_most` is for ours divided by Kafka's.

    A metric with neither is shown and not judged.
    """

    name: str
    unit: str
    at_most: float | None = None
    ratio_at_most: float | None = None


@dataclass(slots=True)
class Contestant:
    """A broker under measure: one running cluster of one or more nodes, and how to make a fresh one.

    `replicas` is how often each partition is kept unless a scenario says otherwise.
    """

    name: str
    cluster: Cluster
    fresh: Callable[[Path], Cluster]
    scratch: Path
    replicas: int = 1
    topics_made: int = field(default=0)

    @property
    def servers(self) -> list[ServerProcess]:
        return list(self.cluster.nodes.values())

    @property
    def server(self) -> ServerProcess:
        """The only node, or the first."""
        return self.servers[0]


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic while it exists, and the port of each partition's leader."""

    name: str
    leader_ports: Mapping[int, int]

    @property
    def port(self) -> int:
        """The port of the leader of the first partition."""
        return self.leader_ports[0]

    def led_beside_the_first(self) -> list[int]:
        """The partitions that the leader of the first one leads, that one included."""
        return [index for index, port in self.leader_ports.items() if port == self.port]


class Scenario:
    """One file's measurement with its parameters; subclasses fill in `metrics`, `warm` and `measure`.

    `brokers` says how many nodes it is measured on; a scenario for three is for RF 3.
    """

    metrics: tuple[Metric, ...] = ()

    def __init__(self, name: str, title: str, brokers: int = 1) -> None:
        self.name, self.title, self.brokers = name, title, brokers

    def warm(self, contestant: Contestant, scale: float) -> None:
        """Run enough of the same work that a JIT compiler has done its part."""

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        """One round; `scale` below 1 makes it shorter. Keys are the names of `metrics`."""
        raise NotImplementedError


class CpuMeter:
    """CPU that all these servers together used inside the `with` block, in nanoseconds."""

    def __init__(self, servers: Sequence[ServerProcess]) -> None:
        self._pids = [server.pid for server in servers]
        self.used_ns = 0

    def __enter__(self) -> CpuMeter:
        self._before_ns = sum(map(cpu_ns, self._pids))
        return self

    def __exit__(self, *_: object) -> None:
        self.used_ns = sum(map(cpu_ns, self._pids)) - self._before_ns


def client_errors() -> tuple[type[Exception], ...]:
    """What confluent-kafka raises, where it is installed."""
    try:
        from confluent_kafka import KafkaException
    except ImportError:
        return ()
    return (KafkaException,)


@contextmanager
def topic(
    contestant: Contestant,
    partitions: int,
    replicas: int | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Topic]:
    """A topic of this many partitions, led, in sync and empty, deleted at the end."""
    contestant.topics_made += 1
    name, replicas = f"bench-{contestant.topics_made:04d}", replicas or contestant.replicas
    port = contestant.server.port
    create(port, [NewTopic(name, partitions, replicas, {**TOPIC_SETTINGS, **settings})])
    try:
        yield Topic(name, await_leaders(port, name, partitions, replicas).leader_ports(name))
    finally:
        delete(port, [name])
