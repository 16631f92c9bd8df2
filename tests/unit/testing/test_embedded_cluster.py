"""Clusters for tests: ready, faults of each kind, their end, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, line_of
from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin, Producer
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.embedded import EmbeddedBroker
from tidelog.testing.expectations import produced, wait_for_topic
from tidelog.testing.processes import ServerFailed, listed_brokers

pytestmark = pytest.mark.slow  # each starts processes

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[EmbeddedCluster]:
    swift = {"broker.session.timeout.ms": 1500, "broker.heartbeat.interval.ms": 200, "replica.lag.time.max.ms": 1500}
    with EmbeddedCluster(3, config={"default.replication.factor": 3, **swift}, cuttable=True) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    yield running_cluster
    running_cluster.restore()


def create(cluster: EmbeddedCluster, topic: str) -> int:
    """Create a topic with three replicas; returns its leader."""
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(topic, 1, 3, {"min.insync.replicas": "2"})])
        wait_for_topic(cluster, topic)
        leader = admin.describe_topics([topic])[topic].partitions[0].leader
    assert leader is not None
    return leader


@pytest.mark.parametrize("fault", ["kill", "pause", "cut"])
def test_a_producer_goes_on_without_the_leader_and_a_restored_cluster_is_whole(
    cluster: EmbeddedCluster, fault: str
) -> None:
    topic = f"orders-{fault}"
    leader = create(cluster, topic)
    impatient = {"acks": "all", "request_timeout_ms": 2000, "socket_connection_setup_timeout_ms": 1000}
    with Producer(bootstrap_servers=cluster.bootstrap_servers, **impatient) as producer:
        producer.send_and_wait(topic, b"before")
        getattr(cluster, fault)(leader)
        producer.send_and_wait(topic, b"after")
    cluster.restore()
    assert all(server.alive for server in cluster.nodes.values())
    assert [listed_brokers(cluster.nodes[node].port) for node in cluster.broker_ids] == [3, 3, 3]
    assert [record.value for record in produced(cluster, topic, 2)] == [b"before", b"after"]


def test_a_cut_node_is_out_of_the_clients_reach_until_it_heals(cluster: EmbeddedCluster) -> None:
    address = cluster.bootstrap_servers.split(",")[2]
    port = int(address.rpartition(":")[2])
    assert listed_brokers(port) == 3
    cluster.cut(3)
    assert listed_brokers(port) == 0
    cluster.heal()
    assert listed_brokers(port) == 3


def test_a_cut_may_leave_the_clients_their_way(cluster: EmbeddedCluster) -> None:
    port = int(cluster.bootstrap_servers.split(",")[2].rpartition(":")[2])
    cluster.cut(3, clients=False)
    assert listed_brokers(port) >= 1


def test_a_restart_keeps_data_and_port(cluster: EmbeddedCluster) -> None:
    create(cluster, "kept")
    before = cluster.bootstrap_servers
    with Producer(bootstrap_servers=before) as producer:
        producer.send_and_wait("kept", b"x")
    for node in cluster.broker_ids:
        cluster.restart(node)
        cluster.await_ready()
    assert cluster.bootstrap_servers == before
    assert [record.value for record in produced(cluster, "kept")] == [b"x"]


def test_what_cannot_be_cut_says_so(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(1, tmp_path)
    with pytest.raises(RuntimeError, match="cuttable=True"):
        cluster.cut(1)


def test_a_wrong_key_is_in_the_error_and_nothing_is_left(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(1, config={"num.partitons": 3})
    with pytest.raises(ServerFailed, match=r"num\.partitons"), cluster:
        pass
    assert not cluster.directory.exists()


@pytest.mark.parametrize(
    "call",
    [
        lambda cluster: cluster.stop("x"),
        lambda cluster: cluster.start("x"),
        lambda cluster: cluster.await_ready("x"),
        lambda cluster: cluster.restart(1, "x"),
    ],
)
def test_a_wrong_timeout_changes_nothing(cluster: EmbeddedCluster, call: Callable[[EmbeddedCluster], Any]) -> None:
    running = {node: server.pid for node, server in cluster.nodes.items()}
    with pytest.raises(TypeError, match=r"^timeout_s must be a number of seconds, not 'x'$"):
        call(cluster)
    assert {node: server.pid for node, server in cluster.nodes.items() if server.alive} == running
    assert cluster.directory.is_dir()


def test_a_cluster_starts_again_after_its_end() -> None:
    threads = threading.active_count()
    cluster = EmbeddedCluster(1, cuttable=True, config={"num.partitions": 3, "auto.create.topics.enable": True})
    for _ in range(2):
        with cluster:
            assert cluster.directory.is_dir()
            with Producer(bootstrap_servers=cluster.bootstrap_servers) as producer:
                assert producer.send_and_wait("t", b"x").offset == 0
                assert len(producer.partitions_for("t")) == 3
        assert not cluster.directory.exists()
    assert threading.active_count() == threads


def test_a_broker_in_a_process_is_killed_paused_and_restarted() -> None:
    with EmbeddedBroker(process=True) as broker:
        address = broker.bootstrap_servers
        port = int(address.rpartition(":")[2])
        with Producer(bootstrap_servers=address) as producer:
            producer.send_and_wait("t", b"0")
            broker.kill()
            with pytest.raises(OSError):
                socket.create_connection(("127.0.0.1", port), PATIENCE_S)
            broker.restart()
            assert producer.send_and_wait("t", b"1").offset == 1
            broker.pause()
            assert listed_brokers(port) == 0
            broker.resume()
            assert producer.send_and_wait("t", b"2").offset == 2
        directory = broker.directory
    assert not directory.exists()


def test_a_broker_that_has_the_port_already_is_not_taken_for_the_embedded_one() -> None:
    with EmbeddedBroker() as other:
        config = {"listeners": f"PLAINTEXT://{other.bootstrap_servers}"}
        with pytest.raises(ServerFailed, match=f"port {other.bootstrap_servers.partition(':')[2]} is in use"):
            EmbeddedBroker(config=config, process=True).start()
        with pytest.raises(OSError, match="in use"):
            EmbeddedBroker(config=config).start()


def test_a_broker_on_a_thread_restarts_on_its_port_and_has_no_process() -> None:
    with EmbeddedBroker() as broker:
        address = broker.bootstrap_servers
        with Producer(bootstrap_servers=address) as producer:
            producer.send_and_wait("t", b"0")
            broker.restart()
            assert broker.bootstrap_servers == address
            assert producer.send_and_wait("t", b"1").offset == 1
        for method in (broker.kill, broker.pause, broker.resume):
            with pytest.raises(RuntimeError, match="process=True"):
                method()
    with pytest.raises(RuntimeError, match="stopped"):
        broker.restart()


OWNER = """
import sys, time
from tidelog.testing.cluster import EmbeddedCluster
with EmbeddedCluster(1, sys.argv[1]) as cluster:
    print(cluster.bootstrap_servers, cluster.nodes[1].pid, flush=True)
    time.sleep(600)
"""


def test_nodes_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    address, pid = line_of(owner).decode().split()
    owner.send_signal(signal.SIGKILL)
    owner.wait(PATIENCE_S)
    owner.stdout.close()
    deadline_s = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline_s, f"{address} still runs"
        time.sleep(0.01)


def test_a_fault_of_a_node_that_does_not_run_strikes_no_other_process(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.kill(1)
    struck: list[int] = []
    dead = cluster.nodes[1].pid
    send = os.kill

    def record(pid: int, number: int) -> None:
        struck.append(pid)
        if pid != dead:
            send(pid, number)

    monkeypatch.setattr(os, "kill", record)
    cluster.kill(1, 2)  # 2 is not spared because 1 is dead
    assert not cluster.nodes[2].alive
    for fault in (cluster.pause, cluster.resume):
        with pytest.raises(RuntimeError, match="does not run"):
            fault(1)
    with pytest.raises(RuntimeError, match="runs already"):
        cluster.launch(3)
    assert dead not in struck


def test_a_node_that_does_not_exist_is_named(cluster: EmbeddedCluster) -> None:
    for fault in (cluster.kill, cluster.pause, cluster.resume, cluster.restart, cluster.cut, cluster.launch):
        with pytest.raises(ValueError, match="there is no node 9; the nodes are 1, 2, 3"):
            fault(9)
    with pytest.raises(ValueError, match="one broker or more, not 0"):
        EmbeddedCluster(0)


def test_a_wrong_argument_is_named() -> None:
    wrong: Any
    for wrong, text in (
        ({"brokers": "3"}, "brokers must be a whole number, not '3'"),
        ({"controllers": 1.5}, "controllers must be a whole number, not 1.5"),
        ({"config": ["num.partitions=2"]}, "config must be a dict"),
        ({"node_config": 1}, "node_config must be a dict"),
    ):
        with pytest.raises(TypeError, match=text):
            EmbeddedCluster(**wrong)
    keyed: Any = {5: 3}
    for call, name in (
        (lambda: EmbeddedBroker(config=keyed), "config"),
        (lambda: EmbeddedCluster(config=keyed), "config"),
        (lambda: EmbeddedCluster(node_config={1: keyed}), "node_config of node 1"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: a configuration key is text, .*, not 5"):
            call()
    with pytest.raises(ValueError, match="node_config: there is no node 4; the nodes are 1, 2, 3"):
        EmbeddedCluster(3, node_config={4: {"num.partitions": 2}})
    wrong = "num.partitions=2"
    with pytest.raises(TypeError, match="config must be a dict of configuration keys, not 'num"):
        EmbeddedBroker(config=wrong)


def test_nodes_may_have_several_log_directories(tmp_path: Path) -> None:
    """Those that are not formatted for the cluster ended the node."""
    directories = {node: [str(tmp_path / f"{node}{disk}") for disk in "ab"] for node in (1, 2)}
    named = {node: {"log.dirs": ",".join(each)} for node, each in directories.items()}
    with (
        EmbeddedCluster(2, node_config=named) as cluster,
        Admin(bootstrap_servers=cluster.bootstrap_servers) as admin,
    ):
        listed = admin.describe_log_dirs([1, 2])
    assert {node: sorted(each.path for each in listed[node]) for node in listed} == directories


def test_a_stopped_cluster_begins_again_with_a_fault_and_leaves_nothing() -> None:
    threads = threading.active_count()
    with EmbeddedCluster(1, cuttable=True) as cluster:
        cluster.stop()
        cluster.restart(1)
        assert cluster.directory.is_dir()
        cluster.stop()
        assert not cluster.directory.exists()
        cluster.restore()
    assert not cluster.directory.exists()
    for fault in (cluster.heal, lambda: cluster.kill(1)):
        fault()
        assert threading.active_count() == threads


def test_a_start_that_fails_leaves_nothing() -> None:
    cluster = EmbeddedCluster(2, node_config={2: {"num.partitons": 3}}, cuttable=True)
    with pytest.raises(ServerFailed, match=r"num\.partitons"):
        cluster.start()
    assert not any(server.alive for server in cluster.nodes.values())
    assert not cluster.directory.exists()


def test_threads_may_start_restart_and_stop_at_once() -> None:
    """Two processes of one node had one directory, and the one that was forgotten kept the port."""
    cluster = EmbeddedCluster(2, cuttable=True)
    try:
        for call in (cluster.start, lambda: cluster.restart(1), cluster.restore, cluster.stop):
            with ThreadPoolExecutor(4) as pool:
                for each in [pool.submit(call) for _ in range(4)]:
                    each.result(PATIENCE_S)
        assert not any(server.alive for server in cluster.nodes.values())
        cluster.start()
    finally:
        cluster.stop()


@pytest.mark.parametrize(
    "make", [lambda: EmbeddedBroker(process=True), lambda: EmbeddedCluster(1, cuttable=True)], ids=["broker", "cluster"]
)
def test_a_fork_leaves_the_nodes_to_the_process_that_started_them(make: Callable[[], Any]) -> None:
    with make() as server:
        fork = os.fork()
        if fork == 0:
            signal.alarm(int(PATIENCE_S))
            try:
                server.__exit__(None, None, None)
            finally:
                os._exit(0)
        assert os.waitpid(fork, 0)[1] == 0
        assert listed_brokers(int(server.bootstrap_servers.rpartition(":")[2])) == 1


def test_values_have_any_scalar_type_or_are_lists() -> None:
    config: Any = {"log.cleanup.policy": ["compact", "delete"], "compression.type": "gzip", "log.retention.ms": -1}
    with (
        EmbeddedCluster(1, config=config) as cluster,
        Admin(bootstrap_servers=cluster.bootstrap_servers) as admin,
    ):
        admin.create_topics([NewTopic("t", 1, 1)])
        found = admin.describe_configs(topics=["t"])["t"]
    assert found["cleanup.policy"].value == "compact,delete"


def test_brokers_leave_their_controllers_in_good_order(tmp_path: Path) -> None:
    """A controller that ends before them leaves them without an answer, for which they wait for seconds."""
    with EmbeddedCluster(2, tmp_path, controllers=1) as cluster:
        pass
    for node, server in cluster.nodes.items():
        assert f"node {node} has stopped, everything is on disk" in server.output_tail()
        assert "giving up" not in server.output_tail()
