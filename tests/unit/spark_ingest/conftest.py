"""One embedded node for this room, and topics filled over its own wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidelog.client.model import NewTopic
from tidelog.client.network.cluster import Cluster
from tidelog.client.sync import Admin, Producer
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.spark_ingest.options import SourceOptions
from tidelog.testing.embedded import EmbeddedBroker

TIME = 1_700_000_000_000


class Filled:
    """A running node, and how to fill topics in it."""

    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers

    def options(self, **given: str) -> SourceOptions:
        return SourceOptions.parse({"kafka.bootstrap.servers": self.bootstrap_servers, **given})

    def topic(self, name: str, *sizes: int, **producer: Any) -> None:
        """A topic with a partition per size, holding so many records: key and value say the offset."""
        with Admin(bootstrap_servers=self.bootstrap_servers) as admin:
            # The records are years old, and not to be deleted for it.
            admin.create_topics([NewTopic(name, len(sizes), configs={"retention.ms": "-1"})])
        self.fill(name, *sizes, **producer)

    def fill(self, name: str, *sizes: int, start: int = 0, **producer: Any) -> None:
        with Producer(bootstrap_servers=self.bootstrap_servers, **producer) as records:
            for partition, size in enumerate(sizes):
                for offset in range(start, start + size):
                    records.send(
                        name, b"value %d" % offset, b"key %d" % offset, partition=partition, timestamp_ms=TIME + offset
                    )
            records.flush()


@pytest.fixture(scope="module")
def node() -> Iterator[Filled]:
    with EmbeddedBroker() as broker:
        yield Filled(broker.bootstrap_servers)


@pytest.fixture
def new_topic(node: Filled, request: pytest.FixtureRequest) -> Callable[..., str]:
    """`new_topic(5, 0, 3)`: a topic of this test's own with three partitions of so many records."""

    def make(*sizes: int, **producer: Any) -> str:
        name = f"topic-{abs(hash(request.node.nodeid)) % 10**9}"
        node.topic(name, *sizes, **producer)
        return name

    return make


@pytest.fixture
def failing_starts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], list[int]]:
    """`failing_starts(2)`: the first two starts of a client reach no broker, with None all. The starts so far."""

    def fail(failures: int | None) -> list[int]:
        real, attempts = Cluster.start, list[int]()

        async def start(cluster: Cluster) -> None:
            attempts.append(1)
            if failures is None or len(attempts) <= failures:
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "no broker reached")
            await real(cluster)

        monkeypatch.setattr(Cluster, "start", start)
        return attempts

    return fail
