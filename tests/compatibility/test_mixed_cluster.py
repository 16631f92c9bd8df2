"""Apache Kafka 4.3 nodes as members of a Tidelog cluster: a broker that replicates, a controller that votes and leads.

One cluster whose voters change (kraft.version 1): a Tidelog controller (1) and two Tidelog brokers (4, 5), joined by a
Kafka controller (6) and a Kafka broker (7). The tests run in the order of the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidelog.bench import peers
from tidelog.bench.metadata import await_brokers
from tidelog.client import NewTopic, TopicPartition
from tidelog.client.model import PartitionDescription
from tidelog.client.sync import Admin, Consumer, Producer
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.uuids import uuid_from_text
from tidelog.testing.ports import free_port
from tidelog.testing.processes import ServerProcess, TidelogProcess, format_directory

pytestmark = pytest.mark.usefixtures("need_java")

CLUSTER = "AQEBAQEBQEGBAQEBAQEBAQ"
PATIENCE_S = 120.0
COUNT = 500


class MixedCluster:
    def __init__(self, directory: Path) -> None:
        self.controller_ports = {1: free_port(), 6: free_port()}
        self.bootstrap_controllers = ",".join(f"127.0.0.1:{port}" for port in self.controller_ports.values())
        self.nodes: dict[int, ServerProcess] = {
            1: TidelogProcess(directory / "1", self.controller_ports[1], self._options(1, "controller")),
            4: TidelogProcess(directory / "4", options=self._options(4, "broker")),
            5: TidelogProcess(directory / "5", options=self._options(5, "broker")),
            6: peers.KafkaProcess(
                directory / "6",
                self.controller_ports[6],
                self._options(6, "controller"),
                node_id=6,
                voters={},
                heap="384m",
            ),
            7: peers.KafkaProcess(
                directory / "7", options=self._options(7, "broker"), node_id=7, voters={}, heap="384m"
            ),
        }

    def _options(self, node_id: int, roles: str) -> dict[str, str]:
        options = {
            "node.id": str(node_id),
            "process.roles": roles,
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": "",
            "controller.quorum.bootstrap.servers": self.bootstrap_controllers,
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
        }
        if roles == "controller":
            listener = f"CONTROLLER://127.0.0.1:{self.controller_ports[node_id]}"
            options |= {"listeners": listener, "advertised.listeners": listener}
        return options

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(self.nodes[node].bootstrap_servers for node in (4, 5, 7))

    def start(self) -> None:
        for node_id, node in self.nodes.items():
            if node_id != 1:
                format_directory(node.data_directory, node_id, CLUSTER)
        self._format_first_voter()
        for node in self.nodes.values():
            node.launch()
        for node_id in (4, 5, 7):
            self.nodes[node_id].await_ready(90)
        await_brokers((self.nodes[node_id].port for node_id in (4, 5, 7)), 3)

    def _format_first_voter(self) -> None:
        node = self.nodes[1]
        settings = {**node.options, "log.dirs": str(node.data_directory)}
        words = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        root = Path(__file__).resolve().parents[2]
        subprocess.run(
            [sys.executable, "-m", "tidelog", "format", "--standalone", "-t", CLUSTER, *words],
            check=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            timeout=PATIENCE_S,
        )

    def stop(self) -> None:
        for node in self.nodes.values():
            node.kill()

    def directory_id(self, node_id: int) -> bytes:
        text = (self.nodes[node_id].data_directory / "meta.properties").read_text()
        return uuid_from_text(dict(line.split("=", 1) for line in text.splitlines() if "=" in line)["directory.id"])

    def endpoint(self, node_id: int) -> tuple[str, str, int]:
        return "CONTROLLER", "127.0.0.1", self.controller_ports[node_id]


@pytest.fixture(scope="module")
def cluster(need_java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedCluster]:
    mixed = MixedCluster(tmp_path_factory.mktemp("mixed"))
    try:
        mixed.start()
        yield mixed
    finally:
        mixed.stop()


@pytest.fixture
def admin(cluster: MixedCluster) -> Iterator[Admin]:
    client = Admin(bootstrap_servers=cluster.bootstrap_servers)
    yield client
    client.close()


def until(attempt: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not attempt():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.2)


def partitions(admin: Admin, topic: str) -> list[PartitionDescription]:
    try:
        return list(admin.describe_topics([topic])[topic].partitions)
    except KafkaError:  # not known to the broker that was asked yet
        return []


def in_sync(admin: Admin, topic: str) -> bool:
    found = partitions(admin, topic)
    return bool(found) and all(set(each.isr) == set(each.replicas) and each.leader is not None for each in found)


def send(cluster: MixedCluster, topic: str, partition: int, label: str) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap_servers, acks="all") as producer:
        futures = [producer.send(topic, f"{label}-{number}".encode(), partition=partition) for number in range(COUNT)]
        for future in futures:
            future.result(120)


def read(cluster: MixedCluster, topic: str, partition: int, count: int) -> list[str]:
    with Consumer(bootstrap_servers=cluster.bootstrap_servers) as consumer:
        where = TopicPartition(topic, partition)
        consumer.assign([where])
        consumer.seek_to_beginning(where)
        values: list[str] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(values) < count and time.monotonic() < deadline:
            for records in consumer.poll(500).values():
                values += [(record.value or b"").decode() for record in records]
        return values


def expected(*labels: str) -> list[str]:
    return [f"{label}-{number}" for label in labels for number in range(COUNT)]


@pytest.mark.parametrize(("replicas", "first"), [((4, 7), "tidelog"), ((7, 5), "kafka")])
def test_a_kafka_broker_replicates_with_ours_both_ways(
    cluster: MixedCluster, admin: Admin, replicas: tuple[int, int], first: str
) -> None:
    """The first replica leads, dies, and follows the other one when it is back: nothing is lost, the logs are equal."""
    topic, (leader, follower) = f"led-by-{first}", replicas
    admin.create_topics([NewTopic(topic, replica_assignments={0: list(replicas)})])
    until(lambda: in_sync(admin, topic))
    send(cluster, topic, 0, "before")
    cluster.nodes[leader].kill()
    until(lambda: [each.leader for each in partitions(admin, topic)] == [follower])
    send(cluster, topic, 0, "without")
    cluster.nodes[leader].start(90)
    until(lambda: in_sync(admin, topic))
    admin.elect_leaders([TopicPartition(topic, 0)])
    until(lambda: [each.leader for each in partitions(admin, topic)] == [leader])
    send(cluster, topic, 0, "after")
    assert read(cluster, topic, 0, 3 * COUNT) == expected("before", "without", "after")
    until(lambda: in_sync(admin, topic))
    logs = [(cluster.nodes[node].data_directory / f"{topic}-0" / f"{0:020d}.log").read_bytes() for node in replicas]
    assert logs[0] == logs[1]


def remove_replicas(admin: Admin, topic: str) -> None:
    """From four partitions on nodes 4, 5 and 7: to one of ours, to Kafka's, to both kinds with either first."""
    admin.create_topics([NewTopic(topic, replica_assignments={index: [4, 5, 7] for index in range(4)})])
    until(lambda: len(partitions(admin, topic)) == 4 and in_sync(admin, topic))
    staying = {0: [5], 1: [7], 2: [4, 7], 3: [7, 5]}
    admin.alter_partition_reassignments({TopicPartition(topic, each): nodes for each, nodes in staying.items()})
    until(lambda: [list(each.replicas) for each in partitions(admin, topic)] == list(staying.values()))
    until(lambda: in_sync(admin, topic) and not admin.list_partition_reassignments())


def test_replicas_are_removed_where_kafkas_broker_reads_nothing_before_it(cluster: MixedCluster, admin: Admin) -> None:
    remove_replicas(admin, "fewer-by-ours")


def test_a_kafka_controller_votes_and_leads_our_brokers_and_ours_its(cluster: MixedCluster, admin: Admin) -> None:
    admin.add_raft_voter(6, cluster.directory_id(6), [cluster.endpoint(6)])
    assert [each.node_id for each in admin.describe_quorum().voters] == [1, 6]
    admin.remove_raft_voter(1, cluster.directory_id(1))
    until(lambda: admin.describe_quorum().leader_id == 6)
    assert [each.node_id for each in admin.describe_quorum().voters] == [6]
    admin.create_topics([NewTopic("by-kafka", replica_assignments={0: [4, 5, 7], 1: [7, 4, 5]})])
    until(lambda: in_sync(admin, "by-kafka"))
    for partition in (0, 1):
        send(cluster, "by-kafka", partition, "under kafka")
    cluster.nodes[4].kill()
    until(lambda: [each.leader for each in partitions(admin, "by-kafka")] == [5, 7])
    cluster.nodes[4].start(90)
    until(lambda: in_sync(admin, "by-kafka"))
    remove_replicas(admin, "fewer-by-kafka")

    admin.add_raft_voter(1, cluster.directory_id(1), [cluster.endpoint(1)])
    admin.remove_raft_voter(6, cluster.directory_id(6))
    until(lambda: admin.describe_quorum().leader_id == 1)
    cluster.nodes[6].kill()
    admin.create_partitions({"by-kafka": 3})
    until(lambda: len(partitions(admin, "by-kafka")) == 3 and in_sync(admin, "by-kafka"))
    for partition in (0, 1):
        send(cluster, "by-kafka", partition, "under ours")
        assert read(cluster, "by-kafka", partition, 2 * COUNT) == expected("under kafka", "under ours")
