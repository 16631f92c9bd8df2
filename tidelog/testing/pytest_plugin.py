"""Fixtures for pytest: `tidelog_broker`, `tidelog_cluster`, `tidelog_topic`.

Installed with Tidelog as the plugin `tidelog` (`-p no:tidelog` turns it off). A run that uses none of
the fixtures imports nothing but this module. Under pytest-xdist each worker has brokers of its own, so
that no test sees the topics and groups of another worker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tidelog.client.model import NewTopic
    from tidelog.testing.cluster import EmbeddedCluster
    from tidelog.testing.embedded import EmbeddedBroker, Scalar

_TOPIC_CHARACTERS_MAX = 200


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "tidelog_topic(partitions=1, replication_factor=-1, configs={}): what `tidelog_topic` creates"
    )


@pytest.fixture(scope="session")
def tidelog_config() -> Mapping[str, Scalar]:
    """Kafka's configuration keys for `tidelog_broker` and `tidelog_cluster`; override it to set them."""
    return {}


@pytest.fixture(scope="session")
def tidelog_broker(tidelog_config: Mapping[str, Scalar]) -> Iterator[EmbeddedBroker]:
    """A broker on a thread of this process, for the whole run; clients connect to its `bootstrap_servers`."""
    from tidelog.testing.embedded import EmbeddedBroker

    with EmbeddedBroker(config=tidelog_config) as broker:
        yield broker


@pytest.fixture(scope="session")
def tidelog_cluster(tidelog_config: Mapping[str, Scalar]) -> Iterator[EmbeddedCluster]:
    """Three brokers, each a process, for the whole run. Faults of a test end with the test: nodes are
    restarted and the network is healed.
    """
    from tidelog.testing.cluster import EmbeddedCluster

    config = {"default.replication.factor": 3, **tidelog_config}
    with EmbeddedCluster(brokers=3, config=config, cuttable=True) as cluster:
        yield cluster


@pytest.fixture
def _tidelog_faults_end(tidelog_cluster: EmbeddedCluster) -> Iterator[None]:
    yield
    tidelog_cluster.restore()


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test of the cluster ends its faults, also where only another fixture of the test uses the cluster. The first
    fixture ends last, and for certain.
    """
    names = getattr(item, "fixturenames", [])
    if "tidelog_cluster" in names and "_tidelog_faults_end" not in names:
        names.insert(0, "_tidelog_faults_end")


def _new_topic(
    name: str, partitions: int = 1, replication_factor: int = -1, configs: Mapping[str, str] | None = None
) -> NewTopic:
    """The topic as the arguments of the marker `tidelog_topic` describe it."""
    from tidelog.client.model import NewTopic

    return NewTopic(name, num_partitions=partitions, replication_factor=replication_factor, configs=configs or {})


@pytest.fixture
def tidelog_topic(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a new topic, deleted after the test. On `tidelog_cluster` where the test uses that,
    else on `tidelog_broker`. `@pytest.mark.tidelog_topic(partitions=3)` says how it is created.
    """
    from tidelog.client.sync import Admin
    from tidelog.protocol.errors import ErrorCode, KafkaError
    from tidelog.testing.expectations import wait_for_topic

    in_cluster = "tidelog_cluster" in request.fixturenames
    server = request.getfixturevalue("tidelog_cluster" if in_cluster else "tidelog_broker")
    marker = request.node.get_closest_marker("tidelog_topic")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:_TOPIC_CHARACTERS_MAX] + "-" + os.urandom(4).hex()
    try:
        topic = _new_topic(name, *marker.args, **marker.kwargs) if marker else _new_topic(name)
    except TypeError as error:
        raise pytest.UsageError(f"the marker tidelog_topic: {str(error).removeprefix('_new_topic() ')}") from None
    with Admin(bootstrap_servers=server.bootstrap_servers) as admin:
        admin.create_topics([topic])
    wait_for_topic(server, name)
    yield name
    if in_cluster:
        server.restore()  # the test may have killed a majority, without which no topic can be deleted
    if not server.bootstrap_servers:
        return  # the test has stopped the broker
    with Admin(bootstrap_servers=server.bootstrap_servers) as admin:
        try:
            admin.delete_topics([name])
        except KafkaError as error:
            # The test may have deleted it, or have stopped the cluster with its data.
            if error.code != ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
