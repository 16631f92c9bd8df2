"""What the tests of this room ask of a cluster and wait for: topics, leaders, ISR, records sent and read, equal logs.

Everything is asked with stock clients or raw frames and of a chosen node; nothing here looks into a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from tidelog.bench.metadata import ClusterState, PartitionState, ask, await_leaders, await_state
from tidelog.bench.raw import BenchError, RawConnection
from tidelog.protocol.api import request_header_version, response_header_version
from tidelog.protocol.messages.headers import RequestHeader, ResponseHeader
from tidelog.protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest, UpdateFeaturesResponse
from tidelog.testing.cluster import EmbeddedCluster

confluent = pytest.importorskip(
    "confluent_kafka", reason="confluent-kafka is not installed (pip install 'tidelog[dev]')"
)
admin = pytest.importorskip("confluent_kafka.admin")

QUIET = {"log_level": 0}
# For a librdkafka consumer that subscribes while brokers die. It asks one broker for the metadata that its join waits
# for. If that broker dies, it asks no other one before its next refresh, by default 300 s later, whichever broker it is
# a client of (docs/compatibility.md, "Found in others on the way").
REFRESHING = {"topic.metadata.refresh.interval.ms": 5_000}
UPGRADE, SAFE_DOWNGRADE = 1, 2


def admin_client(cluster: EmbeddedCluster) -> Any:
    return admin.AdminClient({"bootstrap.servers": cluster.bootstrap_servers, **QUIET})


def create_topic(
    cluster: EmbeddedCluster, name: str, assignment: Sequence[Sequence[int]], configs: Mapping[str, str] | None = None
) -> None:
    """A topic with these replicas for each of its partitions; returns when all are led and in sync."""
    topic = admin.NewTopic(name, len(assignment), replica_assignment=list(map(list, assignment)), config=configs or {})
    client = admin_client(cluster)
    client.create_topics([topic])[name].result(60)
    port = cluster.nodes[assignment[0][0]].port
    await_leaders(port, name, len(assignment), len(assignment[0]))


def set_feature(cluster: EmbeddedCluster, name: str, level: int, kind: int | None = None) -> None:
    """Finalize this level of a feature; without a `kind`, level 0 is a downgrade and any other an upgrade."""
    kind = kind or (UPGRADE if level else SAFE_DOWNGRADE)
    request = UpdateFeaturesRequest(
        feature_updates=[FeatureUpdateKey(feature=name, max_version_level=level, upgrade_type=kind)]
    )
    version, key = max(request.VERSIONS), request.API_KEY
    assert key is not None
    header = RequestHeader(request_api_key=key, request_api_version=version, correlation_id=1, client_id="test")
    body = header.encode(request_header_version(key, version)) + request.encode(version)
    with RawConnection(asked_port(cluster)) as connection:
        connection.send(len(body).to_bytes(4, "big") + body)
        answer = bytes(connection.receive())[4:]
    _, position = ResponseHeader.read(answer, 0, response_header_version(key, version))
    response = UpdateFeaturesResponse.decode(answer[position:], version)
    assert response.error_code == 0, response.error_message


def rotated(brokers: Sequence[int], partitions: int, replicas: int) -> list[list[int]]:
    """Replicas dealt round: partition p begins with broker p."""
    return [[brokers[(p + r) % len(brokers)] for r in range(replicas)] for p in range(partitions)]


def asked_port(cluster: EmbeddedCluster, without: Iterable[int] = ()) -> int:
    """The port of the first broker that runs, is not paused and is not among `without`."""
    for node in cluster.broker_ids:
        if node not in without and cluster.nodes[node].alive:
            return cluster.nodes[node].port
    raise AssertionError("no broker runs")


def partition_state(port: int, topic: str, partition: int = 0) -> PartitionState:
    return ask(port, [topic]).topics[topic][partition]


def await_partition(
    port: int,
    topic: str,
    reached: Callable[[PartitionState], bool],
    what: str,
    *,
    partition: int = 0,
    timeout_s: float = 90.0,
) -> PartitionState:
    """Until the broker on this port says of the partition what `reached` wants."""

    def there(state: ClusterState) -> bool:
        return partition in state.topics.get(topic, {}) and reached(state.topics[topic][partition])

    try:
        return await_state(port, [topic], there, timeout_s, what).topics[topic][partition]
    except BenchError as error:
        raise AssertionError(f"{error}; at last {ask(port, [topic])}") from error


def await_in_sync(
    port: int, topic: str, members: Iterable[int], *, partition: int = 0, timeout_s: float = 90.0
) -> None:
    """Until exactly these are in the ISR."""
    wanted = set(members)
    await_partition(
        port,
        topic,
        lambda state: set(state.in_sync) == wanted,
        f"{topic}-{partition} in sync on {sorted(wanted)}",
        partition=partition,
        timeout_s=timeout_s,
    )


def await_leader(port: int, topic: str, leader: int, *, partition: int = 0, timeout_s: float = 90.0) -> None:
    await_partition(
        port,
        topic,
        lambda state: state.leader == leader,
        f"{topic}-{partition} led by {leader}",
        partition=partition,
        timeout_s=timeout_s,
    )


def await_healthy(cluster: EmbeddedCluster, topics: Iterable[str], timeout_s: float = 120.0) -> None:
    """Until every broker sees every partition of the topics led and in sync with all its replicas."""
    names = list(topics)

    def whole(state: ClusterState) -> bool:
        found = [part for name in names for part in state.topics.get(name, {}).values()]
        return len(state.topics) == len(names) and all(
            one.leader in state.ports and set(one.in_sync) == set(one.replicas) for one in found
        )

    for node in cluster.broker_ids:
        port = cluster.nodes[node].port
        try:
            await_state(port, names, whole, timeout_s, f"all of {names} in sync, as broker {node} sees it")
        except BenchError as error:
            raise AssertionError(f"{error}; at last {ask(port, names)}") from error


class Sender:
    """A confluent-kafka producer, for a few records at a time."""

    def __init__(self, bootstrap: str, **settings: Any) -> None:
        given = {key.replace("_", "."): value for key, value in settings.items()}
        self._producer = confluent.Producer(
            {"bootstrap.servers": bootstrap, "linger.ms": 0, "message.timeout.ms": 60_000, **QUIET, **given}
        )

    def send(self, topic: str, values: Iterable[bytes], partition: int = 0) -> list[int]:
        """The offsets, in order; KafkaException with the error of the first that failed."""
        reports: list[tuple[Any, Any]] = []
        for value in values:
            self._producer.produce(
                topic, value, partition=partition, on_delivery=lambda error, message: reports.append((error, message))
            )
        self._producer.flush(90)
        for error, _ in reports:
            if error is not None:
                raise confluent.KafkaException(error)
        return [message.offset() for _, message in reports]


def send(cluster: EmbeddedCluster, topic: str, values: Iterable[bytes], **settings: Any) -> list[int]:
    """As `Sender.send` to partition 0, with a producer of its own."""
    return Sender(cluster.bootstrap_servers, **settings).send(topic, values)


def refusal(cluster: EmbeddedCluster, topic: str, **settings: Any) -> str:
    """The name of the error that a record to partition 0 is refused with."""
    with pytest.raises(confluent.KafkaException) as caught:
        send(cluster, topic, [b"refused"], retries=0, **settings)
    return str(caught.value.args[0].name())


def end_offset(cluster: EmbeddedCluster, topic: str, partition: int = 0) -> int:
    """The end that consumers see: the high watermark."""
    consumer = confluent.Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "ends", **QUIET})
    try:
        _, high = consumer.get_watermark_offsets(confluent.TopicPartition(topic, partition), timeout=60)
        return int(high)
    finally:
        consumer.close()


def read(cluster: EmbeddedCluster, topic: str, count: int, partition: int = 0, timeout_s: float = 90.0) -> list[bytes]:
    """The first `count` values of a partition."""
    consumer = confluent.Consumer({"bootstrap.servers": cluster.bootstrap_servers, "group.id": "reader", **QUIET})
    found: list[bytes] = []
    deadline = time.monotonic() + timeout_s
    try:
        consumer.assign([confluent.TopicPartition(topic, partition, 0)])
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} records"
            for message in consumer.consume(count - len(found), 0.2):
                assert message.error() is None, message.error()
                found.append(message.value())
        return found
    finally:
        consumer.close()


def replica_bytes(cluster: EmbeddedCluster, node: int, topic: str, partition: int = 0) -> bytes:
    """A replica's whole log as it lies on disk, batches as they came."""
    directory = cluster.nodes[node].data_directory / f"{topic}-{partition}"
    return b"".join(file.read_bytes() for file in sorted(directory.glob("*.log")))


def await_equal_replicas(
    cluster: EmbeddedCluster, topic: str, partition: int, replicas: Iterable[int], timeout_s: float = 90.0
) -> None:
    """Until the logs of all replicas are the same, byte for byte. Nobody may be writing."""
    deadline = time.monotonic() + timeout_s
    while True:
        logs = {node: replica_bytes(cluster, node, topic, partition).rstrip(b"\0") for node in replicas}
        if len(set(logs.values())) == 1:
            return
        sizes = {node: len(log) for node, log in logs.items()}
        assert time.monotonic() < deadline, f"the replicas of {topic}-{partition} differ; sizes {sizes}"
        time.sleep(0.05)
