"""Servers for the compatibility tests: a Tidelog node always, an Apache Kafka node beside it when asked for.

`make compat` sets TIDELOG_COMPAT_KAFKA=1: then every test of `server` runs on Kafka too, which checks the tests
themselves: what we demand of Tidelog must be what Kafka does. Nodes are shared by all tests of a run, topics are not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.clients.known import KINDS
from tests.compatibility.side_by_side import Brokers
from tests.compatibility.wire import Wire
from tidelog.bench import peers
from tidelog.testing.processes import ServerProcess, TidelogProcess

OPTIONS = {
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "auto.create.topics.enable": "true",
    "num.partitions": "4",
}
WITH_KAFKA = os.environ.get("TIDELOG_COMPAT_KAFKA", "") not in ("", "0")
SERVERS = ["tidelog", "kafka"] if WITH_KAFKA else ["tidelog"]
HERE = Path(__file__).parent
# Java programs, Kafka beside us, and the stock clients in other languages: `make compat`, not `make test`.
BESIDE_US = {"need_java", "running_brokers"}
FOREIGN_CLIENTS = {name for name, kind in KINDS.items() if not kind.is_python}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    prefix = f"{HERE}{os.sep}"
    for item in items:
        if str(item.path).startswith(prefix):
            item.add_marker(pytest.mark.hunt if is_hunt(item) else pytest.mark.slow)


def is_hunt(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    return bool(fixtures & BESIDE_US) or any(isinstance(each, str) and each in FOREIGN_CLIENTS for each in parameters)


def start(name: str, directory: Path, **options: str) -> ServerProcess:
    """A node that is not started yet; skips where Kafka is wanted and cannot run."""
    settings = {**OPTIONS, **options}
    if name == "tidelog":
        return TidelogProcess(directory, options=settings)
    if (reason := peers.why_unavailable()) is not None:
        pytest.skip(reason)
    return peers.KafkaProcess(directory, options=settings)


@pytest.fixture(scope="session", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One running node of each broker for the whole run."""
    with start(request.param, tmp_path_factory.mktemp(request.param)) as node:
        yield node


@pytest.fixture(scope="session")
def need_java() -> None:
    """Kafka's jars and a JVM, or skip with the reason."""
    if (reason := peers.why_unavailable()) is not None:
        pytest.skip(reason)
    try:
        peers.jars()
    except peers.PeerUnavailable as unavailable:
        pytest.skip(str(unavailable))


@pytest.fixture(scope="session")
def running_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """Both brokers, to be asked the same; skips unless Kafka is wanted."""
    if not WITH_KAFKA:
        pytest.skip("needs Apache Kafka beside Tidelog: make compat")
    with (
        start("kafka", tmp_path_factory.mktemp("kafka")) as kafka,
        start("tidelog", tmp_path_factory.mktemp("tidelog")) as tidelog,
    ):
        brokers = Brokers(kafka.port, tidelog.port)
        yield brokers
        brokers.close()


@pytest.fixture
def brokers(running_brokers: Brokers) -> Brokers:
    """Both brokers, with connections of this test's own."""
    running_brokers.reconnect()
    return running_brokers


@pytest.fixture
def topic_in_both(brokers: Brokers) -> Callable[..., str]:
    """Creates a topic nobody else uses, in both: `topic_in_both(partitions=1, **{"cleanup.policy": "compact"})`."""
    return lambda partitions=1, **config: brokers.topic(f"both-{next(_numbers)}", partitions, **config)


@pytest.fixture
def wire(server: ServerProcess) -> Iterator[Wire]:
    """A connection of this test's own."""
    with Wire(server.port) as connection:
        yield connection


_numbers = itertools.count(1)


@pytest.fixture
def new_topic(server: ServerProcess) -> Callable[..., str]:
    """Creates a topic nobody else uses: `new_topic(partitions=1, **{"cleanup.policy": "compact"})`."""

    def create(partitions: int = 1, **config: str) -> str:
        return create_topic(server.port, f"topic-{os.getpid()}-{next(_numbers)}", partitions, **config)

    return create


def create_topic(port: int, name: str, partitions: int = 1, **config: str) -> str:
    """Create a topic and wait until its partitions are led."""
    configs = [{"name": key.replace("_", "."), "value": value} for key, value in config.items()]
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 1, "configs": configs}
    with Wire(port) as connection:
        created: Any = connection.ask("create_topics", 7, topics=[topic], timeout=20_000)
        assert created.topics[0].error_code == 0, created
        for index in range(partitions):
            wanted = [{"name": name, "partitions": [{"partition_index": index, "timestamp": -1}]}]
            for _ in range(500):
                listed: Any = connection.ask("list_offsets", 7, replica_id=-1, topics=wanted)
                if listed.topics[0].partitions[0].error_code == 0:
                    break
            assert listed.topics[0].partitions[0].error_code == 0, listed
    return name
