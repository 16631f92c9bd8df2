"""Pipelined idempotent producers under kills and pauses: nothing lost, nothing twice, no producer epoch above 0.

librdkafka raises the epoch of its producer when a broker tells it of a gap in the sequence; what it had sent elsewhere
without an answer it then writes again, and no broker can tell. So no answer of ours may lead there. `make chaos
MINUTES=5 RUNS=20` hunts, with Kafka's Java producers beside where Java is there; TIDELOG_SEED replays the choices.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.asking import await_equal_replicas, await_healthy, create_topic, end_offset, rotated
from tests.cluster.checking import check_partition, check_producer_epochs
from tests.cluster.conftest import SEED, SWIFT, NewCluster
from tests.cluster.java_sending import JavaSending
from tests.cluster.sending import Committing, ConfluentSending, Sending, confluent, scan
from tests.cluster.slow_paths import SlowPaths
from tidelog.bench import peers
from tidelog.bench.metadata import ClusterState, await_brokers, await_state
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.ports import free_port
from tidelog.testing.processes import ServerProcess

pytestmark = pytest.mark.slow

MINUTES = float(os.environ.get("TIDELOG_CHAOS_MINUTES", "0.5"))
RUNS = int(os.environ.get("TIDELOG_CHAOS_RUNS", "1"))
JAVA_PRODUCERS = int(os.environ.get("TIDELOG_CHAOS_JAVA", "2" if "TIDELOG_CHAOS_MINUTES" in os.environ else "0"))
PARTITIONS = 6
CONFIGS = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}
# Small batches and a quick retry: several are under way whenever something changes.
PIPELINED = {"batch.num.messages": 10, "retry.backoff.ms": 5, "retry.backoff.max.ms": 50, "linger.ms": 1}


class Faults:
    """Kills and pauses of the nodes of one cluster, mended after a while."""

    rests_s: tuple[float, ...] = (0.0, 0.2, 1.0, 3.0)

    def __init__(self, cluster: EmbeddedCluster, choice: random.Random) -> None:
        self._cluster, self._choice = cluster, choice
        self._began = time.monotonic()
        self.history: list[str] = []
        self.sendings: list[Sending] = []

    def note(self, what: str) -> None:
        self.history.append(f"{time.monotonic() - self._began:7.2f} s  {what}")

    def strike(self) -> None:
        """One fault from its beginning to its end."""
        choice = self._choice
        nodes = choice.sample(self._cluster.broker_ids, choice.choices([1, 2, 3], [5, 4, 3])[0])
        if choice.random() < 0.6:
            self.note(f"kill {nodes}")
            self._cluster.kill(*nodes)
            for node in choice.sample(nodes, len(nodes)):
                time.sleep(choice.choice([0.0, 0.3, 1.0, 2.5]))
                self.note(f"start {node}")
                self._cluster.launch(node)
        else:
            self.pause(nodes, choice.choice([0.1, 0.8, 2.5, 4.0]))

    def pause(self, nodes: list[int], duration_s: float) -> None:
        self.note(f"pause {nodes} for {duration_s} s")
        for node in nodes:
            self._cluster.nodes[node].pause()
        time.sleep(duration_s)
        for node in self._choice.sample(nodes, len(nodes)):
            self._cluster.nodes[node].resume()
            time.sleep(self._choice.choice([0.0, 0.0, 0.5]))


def read_numbers(cluster: EmbeddedCluster, topic: str) -> dict[int, list[tuple[int, int]]]:
    """Partition -> (offset, number) of what a VerifiableProducer has written."""
    found: dict[int, list[tuple[int, int]]] = {}
    consumer = confluent.Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "scan", "log_level": 0})
    try:
        for partition in range(PARTITIONS):
            rows: list[tuple[int, int]] = []
            end = end_offset(cluster, topic, partition)
            consumer.assign([confluent.TopicPartition(topic, partition, 0)])
            deadline = time.monotonic() + 120
            while len(rows) < end:
                assert time.monotonic() < deadline, f"{len(rows)} of {end} records of {topic}-{partition}"
                for message in consumer.consume(1000, 0.5):
                    assert message.error() is None, message.error()
                    rows.append((message.offset(), int(message.value())))
            found[partition] = rows
    finally:
        consumer.close()
    return found


def check_epochs(cluster: EmbeddedCluster, topics: list[str]) -> int:
    """How many batches there are on all nodes, none of a later epoch than 0."""
    directories = [cluster.nodes[node].data_directory for node in cluster.broker_ids]
    return sum(check_producer_epochs(directory, topics) for directory in directories)


def check_everything(cluster: EmbeddedCluster, sendings: list[Sending], javas: list[JavaSending]) -> tuple[int, int]:
    topics = [one.topic for one in sendings] + [one.topic for one in javas]
    for topic in topics:
        for partition in range(PARTITIONS):
            await_equal_replicas(cluster, topic, partition, cluster.broker_ids)
    batches = check_epochs(cluster, topics)
    records = 0
    for sending in sendings:
        for partition, expected in enumerate(sending.sent):
            found = scan(
                cluster.bootstrap_servers, sending.topic, partition, end_offset(cluster, sending.topic, partition)
            )
            check_partition(expected, found)
            records += len(found)
    for java in javas:
        numbers = read_numbers(cluster, java.topic)
        java.check(numbers)
        records += sum(map(len, numbers.values()))
    return records, batches


def hunt(
    cluster: EmbeddedCluster, faults: Faults, choice: random.Random, directory: Path, duration_s: float,
    *, javas: int = 0, bootstrap: str | None = None, rate: int = 300,
) -> None:  # fmt: skip
    topics = [f"confluent-{number}" for number in range(3)]
    java_topics = [f"java-{number}" for number in range(javas)]
    for topic in topics + java_topics:
        create_topic(cluster, topic, rotated(cluster.broker_ids, PARTITIONS, 3), CONFIGS)
    to = bootstrap or cluster.bootstrap_servers
    sendings: list[Sending] = [
        ConfluentSending(to, topic, PARTITIONS, choice, records_per_second=rate, settings=PIPELINED) for topic in topics
    ]
    faults.sendings = sendings
    java_sendings = [JavaSending(directory, cluster.bootstrap_servers, topic) for topic in java_topics]
    committing = Committing(cluster.bootstrap_servers, "committing", topics)
    with ExitStack() as stack:
        for sending in sendings:
            sending.start()
            stack.callback(sending.end)
        for java in java_sendings:
            java.start()
            stack.callback(java.kill)
        committing.start()
        try:
            end = time.monotonic() + duration_s
            time.sleep(1)
            while time.monotonic() < end:
                faults.strike()
                time.sleep(choice.choice(faults.rests_s))
            await_healthy(cluster, topics + java_topics, timeout_s=180)
            check_epochs(cluster, topics + java_topics)
            for sending in sendings:
                sending.settle(240)
            for java in java_sendings:
                java.end()
            committing.end()
            records, batches = check_everything(cluster, sendings, java_sendings)
        except BaseException:
            print("\n".join(faults.history[-80:]))
            for sending in sendings:
                (directory / f"{sending.topic}.log").write_text("\n".join(sending.client_log))
            raise
    assert committing.commits > duration_s / 10, "the consumer hardly ran"
    assert all(sending.records() > rate / 15 * duration_s for sending in sendings), "the producers hardly ran"
    assert all(len(java.acknowledged) > 10 * duration_s for java in java_sendings), "the Java producers hardly ran"
    print(
        f"{len(faults.history)} faults, {records} records in {batches} batches on all nodes: each once, no epoch raised"
    )


class Toggling(Faults):
    """Two of three are paused until they are fenced: the third refuses, until the first of them is back."""

    rests_s = (0.5, 1.0)

    def strike(self) -> None:
        """What is sent is new to the log: a batch that is in it already would not be refused."""
        for sending in self.sendings:
            sending.settle()
        leader, *followers = self._choice.sample(self._cluster.broker_ids, 3)
        self.note(f"pause {followers}")
        for node in followers:
            self._cluster.nodes[node].pause()
        topics = [sending.topic for sending in self.sendings]
        await_state(
            self._cluster.nodes[leader].port, topics, lambda state: self._is_alone(state, leader), 60.0, "ISR of 1"
        )
        self.note(f"{leader} is alone")
        for sending in self.sendings:
            sending.go_on()
        time.sleep(0.7)
        for node in followers:
            self._cluster.nodes[node].resume()
            time.sleep(0.3)
        self.note("resumed")

    def _is_alone(self, state: ClusterState, leader: int) -> bool:
        led = [one for each in state.topics.values() for one in each.values() if one.leader == leader]
        return bool(led) and all(list(one.in_sync) == [leader] for one in led)


def test_the_isr_grows_and_shrinks_under_pipelines(tmp_path: Path, choice: random.Random) -> None:
    """Every produce arrives a while after the one before it, so that the ISR grows in the middle of a pipeline."""
    # The quorum does not change meanwhile: its controller is a node of its own.
    cluster = EmbeddedCluster(3, tmp_path, controllers=1, config=SWIFT)
    with SlowPaths(0.02) as paths:
        slow = ",".join(f"127.0.0.1:{add_slow_listener(cluster.nodes[node], paths)}" for node in cluster.broker_ids)
        with cluster:
            await_brokers((cluster.nodes[node].port for node in cluster.broker_ids), 3)
            hunt(cluster, Toggling(cluster, choice), choice, tmp_path, 20.0, bootstrap=slow)


def add_slow_listener(broker: ServerProcess, paths: SlowPaths) -> int:
    """A listener of its own for clients on a slow path; the port that it advertises."""
    own_port = free_port()
    port = paths.port(own_port)
    options = broker.options
    options["listeners"] += f",SLOW://127.0.0.1:{own_port}"
    options["advertised.listeners"] += f",SLOW://127.0.0.1:{port}"
    options["listener.security.protocol.map"] += ",SLOW:PLAINTEXT"
    options["inter.broker.listener.name"] = "PLAINTEXT"
    return port


@pytest.mark.hunt
@pytest.mark.parametrize("run", range(RUNS))
def test_no_producer_raises_its_epoch_under_kills_and_pauses(new_cluster: NewCluster, tmp_path: Path, run: int) -> None:
    choice = random.Random(SEED + run)
    print(f"seed {SEED + run}")
    javas = JAVA_PRODUCERS
    if javas and (reason := peers.bring_kafka()) is not None:
        print(reason)
        javas = 0
    cluster = new_cluster(3)
    hunt(cluster, Faults(cluster, choice), choice, tmp_path, MINUTES * 60, javas=javas)
