"""A reassignment to fewer replicas on running nodes: damage that no reader has met is repaired before the whole copies
are removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.cluster.damage.replicas import read_log
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.sync.admin import Admin
from tidelog.client.sync.consumer import Consumer
from tidelog.client.sync.producer import Producer
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = pytest.mark.slow
TOPIC, RECORDS, PATIENCE_S = "kept", 2000, 60.0
# Only the check before the removal reads the log.
QUIET = {
    "log.scrub.bytes.per.second": "0",
    "auto.leader.rebalance.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
}


def until(what: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def damage(cluster: EmbeddedCluster, node: int, record: bytes) -> None:
    """Change one record in the file of a node that is stopped."""
    for path in (cluster.nodes[node].data_directory / f"{TOPIC}-0").glob("*.log"):
        data = path.read_bytes()
        if record in data:
            path.write_bytes(data.replace(record, b"*" * len(record)))
            return
    raise AssertionError(f"node {node} has no {record!r}")


@pytest.mark.parametrize("staying", [[1], [3, 2]])
def test_whole_copies_are_removed_only_when_one_that_stays_was_read(
    staying: list[int], new_cluster: Callable[..., EmbeddedCluster]
) -> None:
    cluster = new_cluster(3, options=QUIET)
    servers = cluster.bootstrap_servers
    values = [b"record %06d" % number for number in range(RECORDS)]
    with Admin(bootstrap_servers=servers) as admin:
        admin.create_topics([NewTopic(TOPIC, replica_assignments={0: [1, 2, 3]})])
        with Producer(bootstrap_servers=servers, acks="all") as producer:
            for start in range(0, RECORDS, 100):
                for value in values[start : start + 100]:
                    producer.send(TOPIC, value, partition=0)
                producer.flush()
    cluster.stop()
    for node in staying:
        damage(cluster, node, values[777])
    cluster.start()

    with Admin(bootstrap_servers=servers) as admin:

        def replicas(*, in_sync: bool = False) -> list[int]:
            partition = admin.describe_topics([TOPIC])[TOPIC].partitions[0]
            return list(partition.isr if in_sync else partition.replicas)

        until("all are in sync", lambda: len(replicas(in_sync=True)) == 3)
        admin.alter_partition_reassignments({TopicPartition(TOPIC, 0): staying})
        until("the others are removed", lambda: replicas() == staying)
        assert not admin.list_partition_reassignments()
    with Consumer(bootstrap_servers=servers, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(TOPIC, 0)])
        read: list[bytes] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(read) < RECORDS and time.monotonic() < deadline:
            for records in consumer.poll(timeout_ms=500).values():
                read += [record.value or b"" for record in records]
    assert read == values
    until(
        "the copies are whole",
        lambda: not any(read_log(cluster.nodes[one].data_directory / f"{TOPIC}-0").faults for one in staying),
    )
