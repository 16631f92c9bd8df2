"""Clusters of real processes for the tests of this room.

`new_cluster(...)` starts one and ends it with the test. TIDELOG_CLUSTER_PEER=kafka makes every node Apache Kafka's, so
that the tests themselves can be tried on a cluster that is known to be right.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tidelog.bench import peers
from tidelog.bench.metadata import await_brokers
from tidelog.testing.cluster import EmbeddedCluster, tidelog_node
from tidelog.testing.layout import NodeLayout
from tidelog.testing.processes import ServerProcess

PEER = os.environ.get("TIDELOG_CLUSTER_PEER", "tidelog")
SEED = int(os.environ.get("TIDELOG_SEED") or time.time())
# Everything that waits for silence waits a second or so.
SWIFT = {
    "broker.session.timeout.ms": "1500",
    "broker.heartbeat.interval.ms": "200",
    "replica.lag.time.max.ms": "1500",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "3",
}

NewCluster = Callable[..., EmbeddedCluster]


def kafka_node(layout: NodeLayout, directory: Path, options: Mapping[str, str]) -> ServerProcess:
    return peers.KafkaProcess(directory, layout.port, options, node_id=layout.node_id, voters={}, heap="384m")


@pytest.fixture
def new_cluster(tmp_path: Path) -> Iterator[NewCluster]:
    """`new_cluster(brokers, controllers, options={...}, linked=True)`: a running one; every broker knows all."""
    if PEER == "kafka" and (reason := peers.why_unavailable()) is not None:
        pytest.skip(reason)
    with ExitStack() as stack:

        def make(
            brokers: int = 3,
            controllers: int = 0,
            options: Mapping[str, str] | None = None,
            *,
            node_options: Mapping[int, Mapping[str, str]] | None = None,
            linked: bool = False,
        ) -> EmbeddedCluster:
            cluster = EmbeddedCluster(
                brokers,
                tmp_path,
                controllers=controllers,
                config={**SWIFT, **(options or {})},
                node_config=node_options,
                cuttable=linked,
                make_node=kafka_node if PEER == "kafka" else tidelog_node,
            )
            stack.enter_context(cluster)
            # Ending in good order takes seconds, when the controllers go with the rest; it is tried in other tests.
            stack.callback(lambda: cluster.kill(*(node for node, server in cluster.nodes.items() if server.alive)))
            await_brokers((cluster.nodes[node].port for node in cluster.broker_ids), brokers)
            return cluster

        yield make


@pytest.fixture
def choice() -> random.Random:
    print(f"seed {SEED}")
    return random.Random(SEED)
