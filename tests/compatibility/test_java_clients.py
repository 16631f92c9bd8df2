"""Kafka's own Java clients and command-line tools, unchanged, against a Tidelog node."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tidelog.bench import peers
from tidelog.testing.processes import ServerProcess

pytestmark = pytest.mark.usefixtures("need_java")

NewTopic = Callable[..., str]


def run(*arguments: str, feed: str = "") -> str:
    """Standard output of a tool of Kafka's that must succeed."""
    done = subprocess.run(
        peers.java_command(*arguments), input=feed, check=False, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_the_java_producer_and_consumer_round_trip(server: ServerProcess, new_topic: NewTopic, codec: str) -> None:
    """Idempotent with acks=all, as the Java producer is unless told otherwise; the consumer is in a group."""
    topic, count = new_topic(partitions=2), 300
    lines = [f"key-{number % 7}:value {number} {'x' * (number % 90)}" for number in range(count)]
    run(
        "org.apache.kafka.tools.ConsoleProducer",
        *("--bootstrap-server", server.bootstrap_servers, "--topic", topic, "--compression-codec", codec),
        *("--reader-property", "parse.key=true", "--reader-property", "key.separator=:"),
        feed="\n".join(lines) + "\n",
    )
    output = run(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        *("--bootstrap-server", server.bootstrap_servers, "--topic", topic, "--from-beginning"),
        *("--max-messages", str(count), "--timeout-ms", "20000", "--group", f"java-{topic}"),
        *("--formatter-property", "print.key=true", "--formatter-property", "key.separator=:"),
    )
    received = [line for line in output.splitlines() if line.startswith("key-")]
    assert sorted(received) == sorted(lines)
    for key in range(7):
        mine = [line for line in lines if line.startswith(f"key-{key}:")]
        assert [line for line in received if line.startswith(f"key-{key}:")] == mine


def test_topics_are_created_described_listed_and_deleted(server: ServerProcess) -> None:
    command, name = "org.apache.kafka.tools.TopicCommand", f"by-java-{time.time_ns()}"
    to = ("--bootstrap-server", server.bootstrap_servers, "--topic", name)
    run(command, "--create", *to, "--partitions", "3", "--config", "retention.ms=123456")
    described = run(command, "--describe", *to)
    assert re.search(rf"Topic: {name}\s.*PartitionCount: 3\s+ReplicationFactor: 1\s.*retention\.ms=123456", described)
    assert len(re.findall(r"Partition: \d\s+Leader: \d+\s+Replicas: \d+\s+Isr: \d+", described)) == 3
    run(command, "--delete", *to)
    assert name not in run(command, "--list", "--bootstrap-server", server.bootstrap_servers).split()


def test_offsets_and_configs_are_shown(server: ServerProcess, new_topic: NewTopic) -> None:
    topic = new_topic(segment_bytes="2000000")
    run(
        "org.apache.kafka.tools.ProducerPerformance",
        *("--topic", topic, "--num-records", "500", "--record-size", "100", "--throughput", "-1"),
        *("--producer-props", f"bootstrap.servers={server.bootstrap_servers}"),
    )
    to = ("--bootstrap-server", server.bootstrap_servers)
    assert run("org.apache.kafka.tools.GetOffsetShell", *to, "--topic", topic).strip() == f"{topic}:0:500"
    configs = run(
        "kafka.admin.ConfigCommand", *to, "--describe", "--all", "--entity-type", "topics", "--entity-name", topic
    )
    assert "segment.bytes=2000000" in configs
    assert "cleanup.policy=delete" in configs


def test_the_java_client_reads_the_versions(server: ServerProcess) -> None:
    output = run("org.apache.kafka.tools.BrokerApiVersionsCommand", "--bootstrap-server", server.bootstrap_servers)
    assert re.search(r"Produce\(0\): 0 to 13 \[usable: 13\]", output)
    assert re.search(r"Fetch\(1\): 4 to 18 \[usable: 18\]", output)


def test_records_travel_end_to_end(server: ServerProcess, new_topic: NewTopic, tmp_path: Path) -> None:
    output = run("org.apache.kafka.tools.EndToEndLatency", server.bootstrap_servers, new_topic(), "200", "all", "100")
    assert "Percentiles" in output
