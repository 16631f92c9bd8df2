"""What the metrics of three nodes say while one of them dies and comes back, and what its replacements say."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.asking import confluent, create_topic
from tests.cluster.conftest import SWIFT
from tests.unit.broker.scraping import Scrape
from tidelog.bench.metadata import await_brokers
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.ports import free_port

pytestmark = pytest.mark.slow

TOPIC, RECORDS = "watched", 2_000
NODES = (1, 2, 3)


@pytest.fixture
def ports() -> dict[int, int]:
    return {node: free_port() for node in NODES}


@pytest.fixture
def cluster(tmp_path: Path, ports: dict[int, int]) -> Iterator[EmbeddedCluster]:
    own = {node: {"metrics.port": str(port)} for node, port in ports.items()}
    cluster = EmbeddedCluster(3, tmp_path, config={**SWIFT, "default.replication.factor": "3"}, node_config=own)
    with cluster:
        await_brokers((server.port for server in cluster.nodes.values()), 3)
        yield cluster
        cluster.kill(*(node for node, server in cluster.nodes.items() if server.alive))


def page(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def scrapes(ports: dict[int, int], *, without: int = 0) -> dict[int, Scrape]:
    return {node: Scrape(page(port, "/metrics")) for node, port in ports.items() if node != without}


def total(found: dict[int, Scrape], metric: str, **labels: str) -> float:
    return sum(each(metric, **labels) for each in found.values())


def await_all(ask: Callable[[], dict[int, Scrape]], holds: Callable[[dict[int, Scrape]], bool]) -> dict[int, Scrape]:
    deadline = time.monotonic() + 120
    while True:
        found = ask()
        if holds(found):
            return found
        assert time.monotonic() < deadline, "the metrics never said so"
        time.sleep(0.1)


def send(cluster: EmbeddedCluster, count: int) -> None:
    producer = confluent.Producer({"bootstrap.servers": cluster.bootstrap_servers, "acks": "all", "log_level": 0})
    for _ in range(count):
        producer.produce(TOPIC, b"x" * 100)
    assert producer.flush(30) == 0


def test_a_death_and_a_return_show(cluster: EmbeddedCluster, ports: dict[int, int]):
    assert cluster.broker_ids == list(NODES)
    create_topic(cluster, TOPIC, [[1, 2, 3], [2, 3, 1], [3, 1, 2]])
    send(cluster, RECORDS)

    def all_well(found: dict[int, Scrape]) -> bool:
        return total(found, "tidelog_under_replicated_partitions") == 0 and all(
            each("tidelog_replica_lag_records_max") == 0 for each in found.values()
        )

    before = await_all(lambda: scrapes(ports), all_well)
    assert all(page(port, "/readyz") == "ok\n" for port in ports.values())
    assert total(before, "tidelog_ready") == 3
    assert total(before, "tidelog_controller_active") == 1
    assert {each("tidelog_controller_active_brokers") for each in before.values()} == {3}
    assert total(before, "tidelog_topic_records_in_total", topic=TOPIC) == RECORDS
    assert total(before, "tidelog_leader_partitions") == 3
    assert total(before, "tidelog_partitions") == 9
    sent = total(before, "tidelog_topic_bytes_in_total", topic=TOPIC)
    # Each byte went to two followers, which took it once.
    assert total(before, "tidelog_replication_bytes_in_total") == 2 * sent
    assert total(before, "tidelog_replication_bytes_out_total") >= 2 * sent
    assert total(before, "tidelog_request_duration_seconds_count", api="FetchFollower") > 0

    gone = 3
    cluster.kill(gone)
    lonely = await_all(
        lambda: scrapes(ports, without=gone),
        lambda found: (
            total(found, "tidelog_under_replicated_partitions") == 3
            and total(found, "tidelog_controller_active") == 1
            and {each("tidelog_controller_fenced_brokers") for each in found.values()} == {1}
        ),
    )
    assert total(lonely, "tidelog_leader_partitions") == 3
    assert all(each("tidelog_controller_preferred_replica_imbalance") >= 1 for each in lonely.values())
    assert all(each("tidelog_controller_offline_partitions") == 0 for each in lonely.values())
    assert total(lonely, "tidelog_ready") == 2

    send(cluster, RECORDS)
    cluster.restart(gone)
    after = await_all(lambda: scrapes(ports), all_well)
    assert total(after, "tidelog_isr_expands_total") >= 3
    assert after[gone]("tidelog_replication_bytes_in_total") > 0
    assert page(ports[gone], "/readyz") == "ok\n"
