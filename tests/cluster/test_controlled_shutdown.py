"""A broker that gets SIGTERM has its leaderships moved before it closes its connections: clients follow them."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest

from tests.cluster.asking import create_topic
from tests.cluster.conftest import NewCluster
from tests.compatibility.wire import Wire
from tests.patience import PATIENCE_S
from tidelog.protocol.errors import ErrorCode

pytestmark = pytest.mark.slow

TOPIC = "followed"
LATEST = -1
BACKOFF_S = 0.1


def latest_offset(wire: Wire) -> Any:
    """What the node answers as the leader of the partition."""
    partition = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": LATEST}
    topics = [{"name": TOPIC, "partitions": [partition]}]
    return wire.ask("list_offsets", 7, replica_id=-1, isolation_level=0, topics=topics).topics[0].partitions[0]


def test_a_client_asks_the_leader_that_stops_who_leads_now(new_cluster: NewCluster) -> None:
    cluster = new_cluster(3, controllers=1)
    create_topic(cluster, TOPIC, [[1, 2, 3]])
    cluster.pause(3)  # the broker waits until all others know the new leaders
    with Wire(cluster.nodes[1].port) as wire:
        assert latest_offset(wire).offset == 0
        cluster.nodes[1].send_signal(signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE_S
        while (code := int(latest_offset(wire).error_code)) == ErrorCode.NONE:
            assert time.monotonic() < deadline
        assert code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        time.sleep(BACKOFF_S)
        described = wire.ask("metadata", 12, topics=[{"name": TOPIC}])
        assert described.topics[0].partitions[0].leader_id in (2, 3)
    cluster.resume(3)
    cluster.nodes[1].stop(PATIENCE_S)
