"""Transactions in a cluster of Tidelog's and Apache Kafka's brokers: coordinators, partitions and markers of both.

The cluster is that of `test_mixed_cluster.py`: Tidelog's brokers 4 and 5, Kafka's broker 7, a controller of each kind.
A transaction writes to partitions that each of them leads and moves the offsets of a group.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.compatibility.exactly_once import records_of
from tests.compatibility.test_mixed_cluster import PATIENCE_S, MixedCluster, in_sync, partitions, until
from tests.compatibility.wire import Wire
from tidelog.client import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Producer
from tidelog.protocol.errors import KafkaError

pytestmark = pytest.mark.usefixtures("need_java")

TIDELOG, OTHER_TIDELOG, KAFKA = 4, 5, 7
BROKERS = (TIDELOG, OTHER_TIDELOG, KAFKA)
GROUP, TRANSACTION = 0, 1
UPGRADE, SAFE_DOWNGRADE = 1, 2
OPTIONS = {
    "transaction.state.log.num.partitions": "12",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "offsets.topic.num.partitions": "12",
    "offsets.topic.replication.factor": "3",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
}
QUICK = {"request_timeout_ms": 5_000, "delivery_timeout_ms": 120_000, "retry_backoff_ms": 50}
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(need_java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedCluster]:
    mixed = MixedCluster(tmp_path_factory.mktemp("mixed-transactions"))
    for node in mixed.nodes.values():
        node.options.update(OPTIONS)
    try:
        mixed.start()
        yield mixed
    finally:
        mixed.stop()


@pytest.fixture
def admin(cluster: MixedCluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as client:
        yield client


def coordinated_by(cluster: MixedCluster, broker: int, kind: int) -> str:
    """The name of a group or a transactional id whose coordinator this broker is."""
    deadline = time.monotonic() + PATIENCE_S
    with Wire(cluster.nodes[TIDELOG].port) as wire:
        while time.monotonic() < deadline:
            name = f"name-{next(_numbers)}"
            found: Any = wire.ask("find_coordinator", 4, key_type=kind, coordinator_keys=[name])
            if found.coordinators[0].error_code == 0 and found.coordinators[0].node_id == broker:
                return name
            time.sleep(0.02)
    raise AssertionError(f"broker {broker} coordinates nothing")


def new_topic(admin: Admin) -> str:
    """A partition led by each broker, with replicas on all."""
    name = f"mixed-{next(_numbers)}"
    rotated = {index: [*BROKERS[index:], *BROKERS[:index]] for index in range(len(BROKERS))}
    admin.create_topics([NewTopic(name, replica_assignments=rotated)])
    until(lambda: in_sync(admin, name))
    return name


def run(producer: Any, topic: str, group: str, first: int, count: int) -> list[str]:
    """Transactions with a record in every partition and an offset; the odd ones are aborted. What is committed."""
    committed = []
    for number in range(first, first + count):
        producer.begin_transaction()
        for index in range(len(BROKERS)):
            producer.send(topic, f"{number}".encode(), partition=index)
        producer.send_offsets_to_transaction({TopicPartition(topic, 0): number + 1}, group)
        if number % 2:
            producer.flush()
            producer.abort_transaction()
        else:
            producer.commit_transaction()
            committed.append(f"{number}")
    return committed


def check(cluster: MixedCluster, admin: Admin, topic: str, group: str, committed: list[str]) -> None:
    """Every partition holds what was committed, as every broker's clients see it; the group is at the last of it."""
    for node in BROKERS:
        found = records_of(cluster.nodes[node].bootstrap_servers, topic)
        assert [[value for _, value in each] for each in found] == [committed] * len(BROKERS), node

    def offset() -> int:
        try:
            found = admin.list_group_offsets(group, require_stable=True)
        except KafkaError:
            return -1
        return found[TopicPartition(topic, 0)].offset if found else -1

    until(lambda: offset() == int(committed[-1]) + 1)


def transact(cluster: MixedCluster, admin: Admin, coordinator: int, group_coordinator: int) -> None:
    topic = new_topic(admin)
    group = coordinated_by(cluster, group_coordinator, GROUP)
    name = coordinated_by(cluster, coordinator, TRANSACTION)
    with Producer(bootstrap_servers=cluster.bootstrap_servers, transactional_id=name, **QUICK) as producer:
        committed = run(producer, topic, group, 0, 9)
    check(cluster, admin, topic, group, committed)


@pytest.mark.parametrize(
    ("coordinator", "group_coordinator"), [(TIDELOG, KAFKA), (KAFKA, TIDELOG), (TIDELOG, TIDELOG), (KAFKA, KAFKA)]
)
def test_markers_go_both_ways(cluster: MixedCluster, admin: Admin, coordinator: int, group_coordinator: int) -> None:
    transact(cluster, admin, coordinator, group_coordinator)


@pytest.mark.parametrize("coordinator", [TIDELOG, KAFKA])
def test_the_other_kind_takes_an_open_transaction_over(cluster: MixedCluster, admin: Admin, coordinator: int) -> None:
    """The coordinator dies with transactions open and ended; others read what it has written, and it reads theirs."""
    topic = new_topic(admin)
    group = coordinated_by(cluster, OTHER_TIDELOG, GROUP)
    name = coordinated_by(cluster, coordinator, TRANSACTION)
    with Producer(bootstrap_servers=cluster.bootstrap_servers, transactional_id=name, **QUICK) as producer:
        committed = run(producer, topic, group, 0, 4)
        producer.begin_transaction()
        for index in range(len(BROKERS)):
            producer.send(topic, b"4", partition=index)
        producer.flush()
        cluster.nodes[coordinator].kill()
        producer.commit_transaction()
        committed.append("4")
        committed += run(producer, topic, group, 5, 4)
        cluster.nodes[coordinator].start(90)
        elect_first_replicas(admin)
        committed += run(producer, topic, group, 9, 4)
    check(cluster, admin, topic, group, committed)


def elect_first_replicas(admin: Admin) -> None:
    """Each broker coordinates what it did before one of them died."""
    for name in ("__transaction_state", "__consumer_offsets"):
        until(lambda: in_sync(admin, name))  # noqa: B023
        moved = [each.partition for each in partitions(admin, name) if each.leader != each.replicas[0]]
        admin.elect_leaders([TopicPartition(name, index) for index in moved])


def finalized(admin: Admin) -> int:
    return admin.describe_versions().finalized_features.get("transaction.version", 0)


def test_either_controller_finalizes_the_version(cluster: MixedCluster, admin: Admin) -> None:
    def set_version(level: int) -> None:
        admin.update_features(
            {"transaction.version": level}, upgrade_type=UPGRADE if level > finalized(admin) else SAFE_DOWNGRADE
        )
        until(lambda: finalized(admin) == level)

    def works_at(level: int) -> None:
        set_version(level)
        for coordinator, group_coordinator in ((TIDELOG, KAFKA), (KAFKA, TIDELOG)):
            transact(cluster, admin, coordinator, group_coordinator)

    assert finalized(admin) == 2
    works_at(1)
    admin.add_raft_voter(6, cluster.directory_id(6), [cluster.endpoint(6)])
    admin.remove_raft_voter(1, cluster.directory_id(1))
    until(lambda: admin.describe_quorum().leader_id == 6)
    works_at(2)
    works_at(1)
