"""Kafka Connect and Kafka Streams, unchanged: what is built on the Java clients rather than with them.

Their jars are many and large, so they are brought, and these tests run, only where Kafka runs beside us: `make compat`.
MirrorMaker and Connect's distributed workers were tried by hand: docs/compatibility.md.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.conftest import WITH_KAFKA, create_topic
from tidelog.bench import peers
from tidelog.testing.ports import free_port
from tidelog.testing.processes import ServerProcess

pytestmark = [
    pytest.mark.usefixtures("need_java"),
    pytest.mark.skipif(not WITH_KAFKA, reason="brings Kafka Connect and Kafka Streams: make compat"),
]
PATIENCE_S = 180.0

Java = Callable[..., list[str]]


@pytest.fixture(scope="session")
def java() -> Java:
    """The command that runs a class of Kafka's, frameworks included."""
    try:
        more = peers.jars(
            "frameworks",
            [
                ("org.apache.kafka", "connect-file", peers.KAFKA_VERSION),
                ("org.apache.kafka", "kafka-streams-examples", peers.KAFKA_VERSION),
            ],
        )
    except peers.PeerUnavailable as unavailable:
        pytest.skip(str(unavailable))
    jvm = ["java", "-Xmx256m", "-Dlog4j2.level=ERROR", "-cp", f"{more}/*:{peers.jars()}/*"]
    return lambda *arguments: [*jvm, *arguments]


@contextmanager
def running(command: list[str], output: Path) -> Iterator[None]:
    """A program that goes on until it is told to end."""
    with output.open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield
            assert process.poll() is None, output.read_text()
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def until(condition: Callable[[], bool], otherwise: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.2)


def properties(path: Path, **values: object) -> str:
    path.write_text("".join(f"{key.replace('_', '.')}={value}\n" for key, value in values.items()))
    return str(path)


def test_connect_carries_a_file_over_and_goes_on_where_it_ended(
    server: ServerProcess, new_topic: Callable[..., str], java: Java, tmp_path: Path
) -> None:
    """Connect's own worker with a source and a sink; each line once, in order, over a restart of the worker."""
    topic, given, got, log = new_topic(), tmp_path / "given", tmp_path / "got", tmp_path / "log"
    lines = [f"line {number}" for number in range(1500)]
    text = "org.apache.kafka.connect.storage.StringConverter"
    worker = properties(
        tmp_path / "worker.properties",
        bootstrap_servers=server.bootstrap_servers,
        key_converter=text,
        value_converter=text,
        offset_storage_file_filename=tmp_path / "offsets",
        offset_flush_interval_ms=1000,
        listeners=f"http://127.0.0.1:{free_port()}",
    )
    file = "org.apache.kafka.connect.file.FileStream"
    source = properties(
        tmp_path / "source.properties",
        name=f"source-{topic}",
        connector_class=f"{file}SourceConnector",
        file=given,
        topic=topic,
    )
    sink = properties(
        tmp_path / "sink.properties",
        name=f"sink-{topic}",
        connector_class=f"{file}SinkConnector",
        file=got,
        topics=topic,
    )
    for count in (1000, 1500):
        given.write_text("".join(f"{line}\n" for line in lines[:count]))
        with running(java("org.apache.kafka.connect.cli.ConnectStandalone", worker, source, sink), log):
            until(lambda: got.exists() and got.read_bytes().count(b"\n") >= count, log.read_text)  # noqa: B023
        assert got.read_text().splitlines() == lines[:count]


def test_streams_counts_words(server: ServerProcess, java: Java, tmp_path: Path) -> None:
    """Kafka's own example, with its repartition and changelog topics; StreamsResetter cleans up after it."""
    confluent_kafka = pytest.importorskip("confluent_kafka")
    admin = pytest.importorskip("confluent_kafka.admin")
    asked, answered, log = "streams-plaintext-input", "streams-wordcount-output", tmp_path / "log"
    create_topic(server.port, asked, 3)
    create_topic(server.port, answered, 1, cleanup_policy="compact")
    producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap_servers})
    for number in range(600):
        producer.produce(asked, f"All streams lead to Kafka {number % 6}")
    assert producer.flush(60) == 0
    settings = properties(
        tmp_path / "streams.properties",
        bootstrap_servers=server.bootstrap_servers,
        state_dir=tmp_path / "state",
        commit_interval_ms=500,
        replication_factor=1,
    )
    wanted = {word.encode(): 600 for word in ("all", "streams", "lead", "to", "kafka")}
    wanted |= {str(number).encode(): 100 for number in range(6)}
    counts: dict[bytes, int] = {}
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": server.bootstrap_servers,
            "group.id": f"words-{time.time_ns()}",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(answered, 0, 0)])

    def counted() -> bool:
        for message in consumer.consume(100, 1.0):
            assert message.error() is None, message.error()
            counts[message.key()] = int.from_bytes(message.value(), "big")
        return counts == wanted

    with running(java("org.apache.kafka.streams.examples.wordcount.WordCountDemo", settings), log):
        until(counted, lambda: (counts, log.read_text()))
    consumer.close()
    to = ("--bootstrap-server", server.bootstrap_servers, "--application-id", "streams-wordcount", "--force")
    reset = subprocess.run(
        java("org.apache.kafka.tools.StreamsResetter", *to, "--input-topics", asked),
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert reset.returncode == 0, reset.stdout + reset.stderr
    left = admin.AdminClient({"bootstrap.servers": server.bootstrap_servers}).list_topics(timeout=30).topics
    assert not [name for name in left if name.startswith("streams-wordcount-KSTREAM")]
