"""Exactly once with Java's own programs, on three nodes: Kafka Streams, Kafka Connect's source, Kafka's copier.

The program is killed with SIGKILL and started again while one broker after the other is killed. What a reader of
committed records gets at the end is the input, each record once. `make compat` runs the same on Apache Kafka.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.asking import await_healthy
from tests.cluster.conftest import kafka_node
from tests.compatibility.conftest import SERVERS
from tests.compatibility.exactly_once import (
    CLUSTER_OPTIONS,
    FRAMEWORKS,
    PATIENCE_S,
    BrokerKills,
    Program,
    compiled,
    jvm,
    records_of,
    wait_for,
    write_properties,
)
from tidelog.bench import peers
from tidelog.client import NewTopic
from tidelog.client.sync import Admin, Producer
from tidelog.testing.cluster import EmbeddedCluster, forked_node
from tidelog.testing.ports import free_port

pytestmark = pytest.mark.usefixtures("need_java")
SOURCES = Path(__file__).parent / "frameworks"
PARTITIONS = 3


@pytest.fixture(scope="module", params=SERVERS)
def cluster(
    request: pytest.FixtureRequest, need_java: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedCluster]:
    make_node = kafka_node if request.param == "kafka" else forked_node
    directory = tmp_path_factory.mktemp(request.param)
    running = EmbeddedCluster(3, directory, config=CLUSTER_OPTIONS, make_node=make_node)
    with running:
        try:
            yield running
        finally:
            running.kill(*(node for node, server in running.nodes.items() if server.alive))


@pytest.fixture(scope="module")
def frameworks(need_java: None) -> list[str]:
    """The class path of Kafka Streams and Kafka Connect."""
    try:
        return [f"{peers.jars('frameworks', FRAMEWORKS)}/*", f"{peers.jars()}/*"]
    except peers.PeerUnavailable as unavailable:
        pytest.skip(str(unavailable))


def create_topics(cluster: EmbeddedCluster, *names: str, partitions: int = PARTITIONS) -> None:
    with Admin(bootstrap_servers=cluster.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(name, partitions, 3) for name in names])
    await_healthy(cluster, names)


def send_all(cluster: EmbeddedCluster, topic: str, records: list[tuple[str, str]]) -> None:
    with Producer(bootstrap_servers=cluster.bootstrap_servers, acks="all", delivery_timeout_ms=240_000) as producer:
        for future in [producer.send(topic, value.encode(), key=key.encode()) for key, value in records]:
            future.result(PATIENCE_S)


def count_of(cluster: EmbeddedCluster, topic: str) -> int:
    """How many records of the topic are committed."""
    return sum(map(len, records_of(cluster.bootstrap_servers, topic)))


def test_streams_numbers_each_record_once(cluster: EmbeddedCluster, frameworks: list[str], tmp_path: Path) -> None:
    """exactly_once_v2, with a repartition topic and a state store: the n-th record of a key is numbered n."""
    given, got = f"stream-in-{time.time_ns()}", f"stream-out-{time.time_ns()}"
    create_topics(cluster, given, got)
    settings = {
        "bootstrap.servers": cluster.bootstrap_servers,
        "application.id": f"counting-{time.time_ns()}",
        "processing.guarantee": "exactly_once_v2",
        "num.stream.threads": 2,
        "commit.interval.ms": 200,
        "statestore.cache.max.bytes": 0,
        "replication.factor": 3,
        "state.dir": tmp_path / "state",
        "session.timeout.ms": 6000,
        "heartbeat.interval.ms": 500,
        "auto.offset.reset": "earliest",
    }
    classes = compiled(SOURCES / "CountingStream.java", frameworks, tmp_path / "classes")
    command = jvm(
        [classes, *frameworks],
        "CountingStream",
        write_properties(tmp_path / "streams.properties", settings),
        given,
        got,
    )
    records = [(f"{number % 7}", f"v{number}") for number in range(3000)]
    with Program(command, tmp_path / "streams.log") as program, BrokerKills(cluster, [given, got], 8.0):
        for part in range(4):
            before = count_of(cluster, got)
            send_all(cluster, given, records[part * 750 : (part + 1) * 750])
            wait_for(lambda: count_of(cluster, got) > before + 300, program.output)  # noqa: B023
            if part < 3:
                program.kill()
                program.start()
        wait_for(lambda: count_of(cluster, got) >= len(records), program.output)
        assert program.exit_code is None, program.output()
    expected: dict[str, list[str]] = defaultdict(list)
    for key, value in records:
        expected[f"word-{key}"].append(f"{len(expected[f'word-{key}']) + 1}:{value}")
    numbered: dict[str, list[str]] = defaultdict(list)
    for partition in records_of(cluster.bootstrap_servers, got):
        for key, value in partition:
            numbered[key].append(value)
    assert numbered == expected


def ask_connect(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    """What Connect's REST interface answers, None where it does not answer or refuses."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data,
        {"Content-Type": "application/json"},
        method="GET" if body is None else "PUT",
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except (urllib.error.URLError, OSError):
        return None


def test_connects_source_writes_each_line_once(cluster: EmbeddedCluster, frameworks: list[str], tmp_path: Path) -> None:
    """A distributed worker with exactly.once.source.support: the file's position is part of each transaction."""
    name, port, given = f"source-{time.time_ns()}", free_port(), tmp_path / "given"
    create_topics(cluster, name, partitions=1)
    text = "org.apache.kafka.connect.storage.StringConverter"
    settings: dict[str, object] = {
        "bootstrap.servers": cluster.bootstrap_servers,
        "group.id": f"worker-{name}",
        "key.converter": text,
        "value.converter": text,
        "exactly.once.source.support": "enabled",
        "listeners": f"http://127.0.0.1:{port}",
        "session.timeout.ms": 6000,
        "heartbeat.interval.ms": 500,
        "scheduled.rebalance.max.delay.ms": 1000,
    }
    for kind in ("config", "offset", "status"):
        settings |= {f"{kind}.storage.topic": f"{name}-{kind}", f"{kind}.storage.replication.factor": 3}
    settings |= {"offset.storage.partitions": 3, "status.storage.partitions": 2}
    connector = {
        "connector.class": "org.apache.kafka.connect.file.FileStreamSourceConnector",
        "file": str(given),
        "topic": name,
        "batch.size": "20",
        "exactly.once.support": "required",
        "transaction.boundary": "poll",
        # A start reads the offsets to their end, and waits for a transaction that a kill has left open: else a minute.
        "producer.override.transaction.timeout.ms": "8000",
    }
    written: list[str] = []

    def append(count: int) -> None:
        lines = [f"line {number}" for number in range(len(written), len(written) + count)]
        with given.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
        written.extend(lines)

    given.touch()
    command = jvm(
        frameworks,
        "org.apache.kafka.connect.cli.ConnectDistributed",
        write_properties(tmp_path / "worker.properties", settings),
    )
    with Program(command, tmp_path / "worker.log") as worker:
        wait_for(lambda: ask_connect(port, f"/connectors/{name}/config", connector), worker.output)
        with BrokerKills(cluster, [name], 8.0):
            for _ in range(3):
                before = count_of(cluster, name)
                append(1500)
                wait_for(lambda: count_of(cluster, name) > before + 200, worker.output)  # noqa: B023
                worker.kill()
                worker.start()
            goal = len(written)
            while count_of(cluster, name) < goal:
                append(25)  # the source keeps the last lines it has read until it reads more
                time.sleep(1)
                assert len(written) < 2 * goal, worker.output()
        assert worker.exit_code is None, worker.output()
    [found] = records_of(cluster.bootstrap_servers, name)
    assert found == [("", line) for line in written[: len(found)]]


@pytest.mark.parametrize("has_group", [True, False], ids=["in a group", "assigned"])
def test_kafkas_copier_copies_each_record_once(cluster: EmbeddedCluster, tmp_path: Path, has_group: bool) -> None:
    """TransactionalMessageCopier of Kafka's system tests, which aborts every third transaction on purpose."""
    given, got = f"copied-{time.time_ns()}", f"copy-{time.time_ns()}"
    create_topics(cluster, given, got)
    records = [("k", f"v{number}") for number in range(6000)]
    send_all(cluster, given, records)
    copied = records_of(cluster.bootstrap_servers, given)
    partition = max(range(PARTITIONS), key=lambda index: len(copied[index]))
    options = ["--input-topic", given, "--output-topic", got, "--input-partition", partition]
    options += ["--broker-list", cluster.bootstrap_servers, "--consumer-group", f"copiers-{got}"]
    options += ["--transaction-size", 40, "--transaction-timeout", 20_000, "--transactional-id", f"copier-{got}"]
    options += ["--enable-random-aborts", "--use-group-metadata", *(["--group-mode"] if has_group else [])]
    command = jvm([f"{peers.jars()}/*"], "org.apache.kafka.tools.TransactionalMessageCopier", *options)
    rest_s = 15.0 if has_group else 1.0
    count = sum(map(len, copied)) if has_group else len(copied[partition])
    with Program(command, tmp_path / "copier.log") as copier, BrokerKills(cluster, [given, got], rest_s):
        for _ in range(3):
            # 6,000 records take a second: each kill has to find some left.
            wait_for(lambda: progress(copier)[0] >= 100, copier.output, pause_s=0.01)
            copier.kill()
            assert progress(copier)[1] > 0, copier.output()
            copier.start()
        wait_for(lambda: copied_all(cluster, copier, got, count), copier.output)
    if not has_group:
        copied = [records if index == partition else [] for index, records in enumerate(copied)]
    assert records_of(cluster.bootstrap_servers, got) == copied


def progress(copier: Program) -> tuple[int, int]:
    """Records that this run of the copier has copied and committed, and that it has left, told before its last one.

    A negative exit code is that of a kill.
    """
    if (copier.exit_code or 0) > 0:
        copier.start()
    told = re.findall(r'"totalProcessed":(\d+),"consumed":\d+,"remaining":(\d+)}', copier.output_of_run())
    return (int(told[-1][0]), int(told[-1][1])) if told else (0, 0)


def copied_all(cluster: EmbeddedCluster, copier: Program, topic: str, count: int) -> bool:
    """Whether everything is there; a copier that a broker's death ended goes on, as Kafka's own tests have it."""
    if copier.exit_code:
        copier.start()
    return count_of(cluster, topic) >= count
