"""Kafka's DeleteRecordsCommand and TransactionsCommand, on a Tidelog node and on Kafka's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.odd_batches import batch
from tests.compatibility.wire import Wire
from tidelog.bench import peers
from tidelog.testing.processes import ServerProcess

pytestmark = pytest.mark.usefixtures("need_java")

NewTopic = Callable[..., str]


def run(server: ServerProcess, tool: str, *arguments: str) -> str:
    done = peers.java(f"org.apache.kafka.tools.{tool}", "--bootstrap-server", server.bootstrap_servers, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def write(wire: Wire, topic: str, index: int, count: int, **values: Any) -> None:
    data = [{"name": topic, "partition_data": [{"index": index, "records": batch(count, **values)}]}]
    answer = wire.ask("produce", 9, acks=-1, timeout=10_000, topic_data=data)
    assert int(answer.responses[0].partition_responses[0].error_code) == 0, answer


def starts(wire: Wire, topic: str) -> list[int]:
    wanted = [{"name": topic, "partitions": [{"partition_index": index, "timestamp": -2} for index in range(3)]}]
    answer = wire.ask("list_offsets", 7, replica_id=-1, topics=wanted)
    return [each.offset for each in sorted(answer.topics[0].partitions, key=lambda each: each.partition_index)]


def test_records_are_deleted(server: ServerProcess, wire: Wire, new_topic: NewTopic, tmp_path: Path) -> None:
    topic = new_topic(3)
    for index in range(2):
        write(wire, topic, index, 5)
    places = [(0, 3), (1, -1), (2, 7)]
    partitions = [{"topic": topic, "partition": index, "offset": offset} for index, offset in places]
    file = tmp_path / "offsets.json"
    file.write_text(json.dumps({"partitions": partitions, "version": 1}))
    told = run(server, "DeleteRecordsCommand", "--offset-json-file", str(file))
    assert f"partition: {topic}-0\tlow_watermark: 3" in told
    assert f"partition: {topic}-1\tlow_watermark: 5" in told
    assert f"partition: {topic}-2\terror: org.apache.kafka.common.errors.OffsetOutOfRangeException" in told
    assert starts(wire, topic) == [3, 5, 0]


def test_producers_are_described(server: ServerProcess, wire: Wire, new_topic: NewTopic) -> None:
    topic = new_topic(3)
    write(wire, topic, 1, 2, producer=(4711, 5, 0))
    told = run(server, "TransactionsCommand", "describe-producers", "--topic", topic, "--partition", "1")
    assert told.splitlines()[0].split() == [
        "ProducerId", "ProducerEpoch", "LatestCoordinatorEpoch", "LastSequence", "LastTimestamp",
        "CurrentTransactionStartOffset",
    ]  # fmt: skip
    fields = told.splitlines()[1].split()
    assert (fields[:2], fields[3]) == (["4711", "5"], "1")
