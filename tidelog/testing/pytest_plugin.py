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
def _tidelog_cluster(tidelog_config: Mapping[str, Scalar]) -> Iterator[EmbeddedCluster]:
    from tidelog.testing.cluster import EmbeddedCluster

    config = {"default.replication.factor": 3, **tidelog_config}
    with EmbeddedCluster(brokers=3, config=config, cuttable=True) as cluster:
        yield cluster


@pytest.fixture
def tidelog_cluster(_tidelog_cluster: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    """Three brokers, each a process, for the whole run. Faults of a test end with the test: nodes are
    restarted and the network is healed.
    """
    yield _tidelog_cluster
    _tidelog_cluster.restore()


@pytest.fixture
def tidelog_topic(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a new topic, deleted after the test. On `tidelog_cluster` where the test uses that,
    else on `tidelog_broker`. `@pytest.mark.tidelog_topic(partitions=3)` says how it is created.
    """
    from tidelog.client.model import NewTopic
    from tidelog.client.sync import Admin
    from tidelog.testing.expectations import wait_for_topic

    in_cluster = "tidelog_cluster" in request.fixturenames
    server = request.getfixturevalue("tidelog_cluster" if in_cluster else "tidelog_broker")
    marker = request.node.get_closest_marker("tidelog_topic")
    options = {"partitions": 1, "replication_factor": -1, "configs": {}} | (marker.kwargs if marker else {})
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:_TOPIC_CHARACTERS_MAX] + "-" + os.urandom(4).hex()
    topic = NewTopic(
        name,
        num_partitions=options.pop("partitions"),
        replication_factor=options.pop("replication_factor"),
        configs=options.pop("configs"),
    )
    if options:
        raise pytest.UsageError(f"the marker tidelog_topic has no argument {', '.join(sorted(options))}")
    with Admin(bootstrap_servers=server.bootstrap_servers) as admin:
        admin.create_topics([topic])
    wait_for_topic(server, name)
    yield name
    if in_cluster:
        server.restore()  # the test may have killed a majority, without which no topic can be deleted
    with Admin(bootstrap_servers=server.bootstrap_servers) as admin:
        admin.delete_topics([name])
