"""A topic that is not compacted any more, and whose replicas were cleaned at different times: what one of them has left
out another may still have. New replicas copy it, and a replica that is left alone serves what it has.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.asking import await_in_sync, await_leader, create_topic
from tests.cluster.conftest import NewCluster
from tidelog.client import TopicPartition
from tidelog.client.sync import Admin, Consumer, Producer

pytestmark = pytest.mark.slow

TOPIC = "once"
FIRST = TopicPartition(TOPIC, 0)
NEVER = {"log.cleaner.backoff.ms": "3600000"}
COMPACTED = {"cleanup.policy": "compact", "segment.ms": "500", "min.cleanable.dirty.ratio": "0.01"}


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.log"))


def read(bootstrap: str, last: bytes) -> list[bytes | None]:
    """The keys from the beginning until the last one."""
    with Consumer(bootstrap_servers=bootstrap) as consumer:
        consumer.assign([FIRST])
        consumer.seek_to_beginning(FIRST)
        keys: list[bytes | None] = []
        deadline = time.monotonic() + 90
        while not keys or keys[-1] != last:
            assert time.monotonic() < deadline, f"{len(keys)} records"
            keys += [record.key for records in consumer.poll(200).values() for record in records]
        return keys


def test_new_replicas_copy_it_and_the_last_one_serves_it(new_cluster: NewCluster) -> None:
    options = {"log.cleaner.backoff.ms": "200"}
    cluster = new_cluster(3, controllers=1, options=options, node_options={2: NEVER, 3: NEVER})
    create_topic(cluster, TOPIC, [[1, 2]], COMPACTED)
    folders = {node: cluster.nodes[node].data_directory / f"{TOPIC}-0" for node in cluster.broker_ids}
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        with Producer(bootstrap_servers=cluster.bootstrap_servers, linger_ms=0) as producer:
            deadline = time.monotonic() + 90
            while not (size_of(folders[2]) > 10_000 and size_of(folders[1]) < size_of(folders[2]) / 2):
                assert time.monotonic() < deadline, "the leader's log is not cleaned"
                producer.send(TOPIC, bytes(500), key=b"key", partition=0).result(60)
                time.sleep(0.05)
            admin.incremental_alter_configs(topics={TOPIC: {"cleanup.policy": "delete"}})
            producer.send(TOPIC, b"", key=b"last", partition=0).result(60)
        admin.alter_partition_reassignments({FIRST: [1, 2, 3]})
        await_in_sync(cluster.nodes[1].port, TOPIC, [1, 2, 3])
        for node in (1, 2, 3):
            cluster.restart(node)
        await_in_sync(cluster.nodes[1].port, TOPIC, [1, 2, 3])
    cluster.kill(1, 2)
    await_leader(cluster.nodes[3].port, TOPIC, 3)
    assert set(read(cluster.nodes[3].bootstrap_servers, b"last")) == {b"key", b"last"}
