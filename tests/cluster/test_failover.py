"""How long a producer waits when its leader dies or is frozen, or the controller dies. Figures are printed, bounded.

Measured as a confluent-kafka producer with its own defaults sees it: from the signal to the first acknowledgement of a
record that was handed over after it. Each time it is a new producer, which has had its first acknowledgements:
librdkafka waits up to 10 s (`reconnect.backoff.max.ms`) before it connects again to a broker that it has seen die, and
the brokers die in turn here. TIDELOG_FAILOVERS says how often (`make cluster-test`: 50).
"""

from __future__ import annotations

import statistics
import threading
import time
from datetime import datetime
from typing import Any

import pytest

from tests.cluster.asking import (
    Sender,
    admin_client,
    asked_port,
    await_healthy,
    await_leader,
    await_partition,
    confluent,
    create_topic,
    end_offset,
    partition_state,
    read,
)
from tests.cluster.conftest import PEER, NewCluster
from tests.compatibility.wire import Closed, Wire
from tests.doses import DOSES, dose
from tests.patience import PATIENCE_S, join
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = pytest.mark.hunt

FAILOVERS = dose("TIDELOG_FAILOVERS")
TOPIC = "failover"
EVERY_S = 0.004
# Of a longer pause the nodes' logs are printed.
LONG_S = 0.3
SERVED = b"a record of another producer"
_TOPIC_ALREADY_EXISTS = 36
# The large dose is for a machine that does nothing else. The small one shows on any machine that nobody waits until
# the session is over.
ROOM = 1 if DOSES["TIDELOG_FAILOVERS"].large <= FAILOVERS else 2
# Kafka itself is tried with these tests too, and takes its session timeout.
MEDIAN_MS_MAX, WORST_MS_MAX = (300.0 * ROOM, 1500.0 * ROOM) if PEER == "tidelog" else (15_000.0, 20_000.0)
OPTIONS = {
    "broker.session.timeout.ms": "9000",
    "broker.heartbeat.interval.ms": "2000",
    "replica.lag.time.max.ms": "30000",
}


class Pulse:
    """A producer that hands over a numbered record every few milliseconds and notes when each was acknowledged.

    It begins when the first ones are. `name` is in its records, to tell several producers apart.
    """

    def __init__(self, bootstrap: str, topic: str, name: int = 0) -> None:
        self._topic = topic
        self.name = name
        self._lock = threading.Lock()
        self.handed_over: list[float] = []
        self.acknowledged: dict[int, tuple[float, int]] = {}
        """Number -> when, and the offset."""
        self.failures: list[Any] = []
        self._stop = threading.Event()
        self._producer = confluent.Producer(
            {"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True, "linger.ms": 0, "log_level": 0}
        )
        self._thread = threading.Thread(target=self._run, name="pulse")
        self._thread.start()
        self.pause_after(0.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            number = len(self.handed_over)
            self.handed_over.append(time.monotonic())
            self._producer.produce(self._topic, self.value(number), partition=0, on_delivery=self._reporter(number))
            self._producer.poll(EVERY_S)
        self._producer.flush(30)

    def _reporter(self, number: int) -> Any:
        def reporter(error: Any, message: Any) -> None:
            if error is not None:
                self.failures.append(error)
                return
            with self._lock:
                self.acknowledged[number] = (time.monotonic(), message.offset())

        return reporter

    def pause_after(self, moment: float, timeout_s: float = 60.0) -> float:
        """Seconds from a moment to the first acknowledgement of a record handed over after it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                after = [at for number, (at, _) in self.acknowledged.items() if self.handed_over[number] > moment]
            if after:
                return min(after) - moment
            time.sleep(0.002)
        raise AssertionError(f"nothing was acknowledged within {timeout_s} s")

    def end(self) -> None:
        self._stop.set()
        join(self._thread, 2 * PATIENCE_S)

    def value(self, number: int) -> bytes:
        return b"%d of %d" % (number, self.name)

    def __enter__(self) -> Pulse:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def check(cluster: EmbeddedCluster, pulses: list[Pulse], served: int = 0) -> None:
    """Everything was acknowledged, everything is there once and in order; and as many records of others."""
    expected = []
    for pulse in pulses:
        assert pulse.failures == []
        assert len(pulse.acknowledged) == len(pulse.handed_over)
        expected += [pulse.value(number) for number in range(len(pulse.handed_over))]
    count = end_offset(cluster, TOPIC)
    found = read(cluster, TOPIC, count)
    assert found.count(SERVED) == served
    assert [value for value in found if value != SERVED] == expected


def report(what: str, pauses_s: list[float]) -> tuple[float, float]:
    """Median and worst in milliseconds, printed, with the 90th and 99th percentile."""
    median_ms, worst_ms = statistics.median(pauses_s) * 1000, max(pauses_s) * 1000
    p90_ms, p99_ms = (sorted(pauses_s)[int(len(pauses_s) * part)] * 1000 for part in (0.9, 0.99))
    print(
        f"{what}: {len(pauses_s)} times, median {median_ms:.0f} ms, p90 {p90_ms:.0f} ms, p99 {p99_ms:.0f} ms, "
        f"worst {worst_ms:.0f} ms"
    )
    return median_ms, worst_ms


class NodeLogs:
    """What the nodes have logged since this was made."""

    def __init__(self, cluster: EmbeddedCluster) -> None:
        self._files = {node: server.output_file for node, server in cluster.nodes.items()}
        self._sizes = {node: file.stat().st_size for node, file in self._files.items()}

    def show(self, title: str) -> None:
        print(title)
        for node, file in self._files.items():
            with file.open("rb") as log:
                log.seek(self._sizes[node])
                lines = log.read(20_000).decode(errors="replace").splitlines()
            print("\n".join(f"  node {node}: {line}" for line in lines))


@pytest.mark.parametrize("layout", ["combined", "apart"])
def test_a_leader_is_killed(new_cluster: NewCluster, layout: str) -> None:
    cluster = new_cluster(3, controllers=3 if layout == "apart" else 0, options=OPTIONS)
    create_topic(cluster, TOPIC, [[1, 2, 3]], {"min.insync.replicas": "2"})
    pauses_s, pulses = [], []
    for number in range(FAILOVERS):
        with Pulse(cluster.bootstrap_servers, TOPIC, number) as pulse:
            time.sleep(0.3)
            leader, active = current_leader(cluster), active_controller(cluster)
            logs = NodeLogs(cluster)
            moment, clock = time.monotonic(), datetime.now().isoformat(timespec="milliseconds")
            cluster.kill(leader)
            pauses_s.append(pulse.pause_after(moment))
        if pauses_s[-1] > LONG_S:
            logs.show(f"{pauses_s[-1] * 1000:.0f} ms after {clock}: leader {leader}, active controller {active}")
        pulses.append(pulse)
        cluster.restart(leader)
        await_healthy(cluster, [TOPIC])
    check(cluster, pulses)
    median_ms, worst_ms = report(f"kill -9 of a leader ({layout})", pauses_s)
    assert median_ms < MEDIAN_MS_MAX
    assert worst_ms < WORST_MS_MAX


def test_a_leader_is_frozen_and_does_no_harm_when_it_wakes(new_cluster: NewCluster) -> None:
    """Fenced when its session is over; awake again it still believes that it leads, and must find out first."""
    session_s = 1.5
    options = {**OPTIONS, "broker.session.timeout.ms": "1500", "broker.heartbeat.interval.ms": "200"}
    cluster = new_cluster(3, controllers=3, options=options)
    create_topic(cluster, TOPIC, [[1, 2, 3]], {"min.insync.replicas": "2"})
    elected_s, served_s, pauses_s, pulses = [], [], [], []
    for number in range(max(1, FAILOVERS // 5)):
        with Pulse(cluster.bootstrap_servers, TOPIC, number) as pulse:
            time.sleep(0.3)
            leader = current_leader(cluster)
            others = set(cluster.broker_ids) - {leader}
            moment = time.monotonic()
            cluster.nodes[leader].pause()
            for other in others:
                await_led_by(cluster.nodes[other].port, others)
            elected_s.append(time.monotonic() - moment)
            # The client still waits for an answer of the frozen one, for as long as its own socket.timeout.ms.
            bootstrap = ",".join(cluster.nodes[other].bootstrap_servers for other in others)
            Sender(bootstrap).send(TOPIC, [SERVED])
            served_s.append(time.monotonic() - moment)
            cluster.nodes[leader].resume()
            pauses_s.append(pulse.pause_after(moment))
        pulses.append(pulse)
        await_healthy(cluster, [TOPIC])
    check(cluster, pulses, served=len(served_s))
    report("a frozen leader: until another leads", elected_s)
    report("a frozen leader: until another producer is served", served_s)
    report("a frozen leader, woken then: until the producer goes on", pauses_s)
    assert max(served_s) < session_s + ROOM


@pytest.mark.parametrize("layout", ["combined", "apart"])
def test_the_active_controller_is_killed(new_cluster: NewCluster, layout: str) -> None:
    """Until a topic can be created again. Producers must notice nothing while their leader is another node."""
    cluster = new_cluster(3, controllers=3 if layout == "apart" else 0, options=OPTIONS)
    pauses_s = []
    for number in range(max(2, FAILOVERS // 5)):
        create(cluster, f"before-{number}")
        active = active_controller(cluster)
        moment = time.monotonic()
        cluster.kill(active)
        create(cluster, f"after-{number}")
        pauses_s.append(time.monotonic() - moment)
        cluster.restart(active)
        time.sleep(1)
    report(f"kill -9 of the active controller ({layout}), until a topic can be created", pauses_s)
    if PEER == "tidelog":
        assert max(pauses_s) < 3.0 * ROOM


def test_the_controller_and_the_leader_die_at_one_moment(new_cluster: NewCluster) -> None:
    """The worst case: nobody is there to notice."""
    cluster = new_cluster(3, controllers=0, options=OPTIONS)
    pauses_s = []
    create_topic(cluster, TOPIC, [[1, 2, 3]], {"min.insync.replicas": "2"})
    pulses = []
    for number in range(max(2, FAILOVERS // 10)):
        active = active_controller(cluster)
        move_leader(cluster, active)
        with Pulse(cluster.bootstrap_servers, TOPIC, number) as pulse:
            time.sleep(0.3)
            moment = time.monotonic()
            cluster.kill(active)
            pauses_s.append(pulse.pause_after(moment))
        pulses.append(pulse)
        cluster.restart(active)
        await_healthy(cluster, [TOPIC])
    check(cluster, pulses)
    report("kill -9 of a node that is leader and active controller", pauses_s)
    if PEER == "tidelog":
        assert max(pauses_s) < 4.0 * ROOM


def current_leader(cluster: EmbeddedCluster) -> int:
    state = partition_state(cluster.nodes[cluster.broker_ids[0]].port, TOPIC)
    assert state.leader in cluster.broker_ids
    return state.leader


def await_led_by(port: int, brokers: set[int]) -> None:
    await_partition(port, TOPIC, lambda state: state.leader in brokers, f"led by one of {brokers}")


def move_leader(cluster: EmbeddedCluster, wanted: int) -> None:
    """Make a broker the leader: its replica is put first by a reassignment, and preferred by an election."""
    if current_leader(cluster) == wanted:
        return
    replicas = [wanted, *(node for node in cluster.broker_ids if node != wanted)]
    with Wire(cluster.nodes[wanted].port) as wire:
        partitions = [{"partition_index": 0, "replicas": replicas}]
        wire.ask("alter_partition_reassignments", 0, topics=[{"name": TOPIC, "partitions": partitions}])
    await_partition(cluster.nodes[wanted].port, TOPIC, lambda state: state.replicas[0] == wanted, "another order")
    client = admin_client(cluster)
    client.elect_leaders(confluent.ElectionType.PREFERRED, [confluent.TopicPartition(TOPIC, 0)]).result(60)
    await_leader(cluster.nodes[wanted].port, TOPIC, wanted)


def create(cluster: EmbeddedCluster, name: str) -> None:
    """Create a topic, asking the first broker that runs again and again until it is there.

    With raw requests: told of a controller that is dead, librdkafka waits longer than any controller does.
    """
    topic = {"name": name, "num_partitions": 1, "replication_factor": 2, "assignments": [], "configs": []}
    deadline = time.monotonic() + 90
    while True:
        try:
            with Wire(asked_port(cluster), 10) as wire:
                answer = wire.ask("create_topics", 7, topics=[topic], timeout=5000, validate_only=False)
            code = answer.topics[0].error_code
        except (OSError, Closed) as error:
            code = error
        if code in (0, _TOPIC_ALREADY_EXISTS):
            return
        assert time.monotonic() < deadline, code
        time.sleep(0.01)


def active_controller(cluster: EmbeddedCluster) -> int:
    """Node id of the leader of the metadata quorum, as DescribeQuorum says."""
    port = next(cluster.nodes[node].port for node in cluster.broker_ids if cluster.nodes[node].alive)
    deadline = time.monotonic() + 90
    while True:
        with Wire(port) as wire:
            partitions = [{"partition_index": 0}]
            answer = wire.ask(
                "describe_quorum", 0, topics=[{"topic_name": "__cluster_metadata", "partitions": partitions}]
            )
        if answer.error_code == 0 and answer.topics[0].partitions[0].leader_id >= 0:
            return int(answer.topics[0].partitions[0].leader_id)
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
