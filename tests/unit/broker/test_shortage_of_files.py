"""A node with more logs in use than file descriptors: it closes the files of all logs, and opens them when needed."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.test_node import produce, produced
from tidelog.broker.replicas import flushes, hosting, upkeep
from tidelog.broker.replicas.upkeep import Upkeep
from tidelog.client import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Consumer, Producer
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.storage.files.checkpoints import CLEAN_SHUTDOWN_FILE
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.testing import EmbeddedBroker

LOGS = 180
FILES_OF_LOGS = 115


class Segments:
    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


async def test_the_files_of_all_logs_are_closed_and_not_again_before_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "FILES_PAUSE_S", 0.05)
    loop = asyncio.get_running_loop()
    logs = [Segments() for _ in range(3)]
    partitions = [SimpleNamespace(log=SimpleNamespace(segments=each)) for each in logs]
    made: Any = SimpleNamespace(hosted=lambda: iter(partitions))
    looking = Upkeep(cast(Any, None), cast(Any, None), made, loop, lambda: 0, cast(Any, None), cast(Any, None))
    looking.close_files()
    looking.close_files()
    await asyncio.sleep(0.01)
    looking.close_files()
    assert [each.releases for each in logs] == [1, 1, 1]
    async with asyncio.timeout(PATIENCE_S):
        while logs[-1].releases < 2:
            await asyncio.sleep(0.01)
            looking.close_files()


async def test_what_met_a_shortage_is_tried_again_as_soon_as_files_are_closed(
    start_node: Any, make_batch: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second later the logs in use had opened theirs again, each time: new topics took no records for minutes."""
    monkeypatch.setattr(upkeep, "FILES_PAUSE_S", 0.0)
    for module in (hosting, flushes):
        monkeypatch.setattr(module, "SHORTAGE_PAUSE_S", 600.0)
    node = await start_node()
    wire = await node.connect()
    refused: list[str] = []

    def short_until_files_are_closed(kind: type, operation: str) -> None:
        operate = getattr(kind, operation)

        def refuse(*arguments: Any) -> Any:
            if operation in refused or getattr(arguments[0], "topic", "t") != "t":
                return operate(*arguments)
            raise OSError(errno.EMFILE, "simulated shortage", operation)

        monkeypatch.setattr(kind, operation, refuse)

    def close(self: Upkeep) -> Iterator[None]:
        yield
        refused[:] = ["create_log", "begin_flush"] if refused else ["create_log"]

    monkeypatch.setattr(Upkeep, "_close_files_of_each", close)
    short_until_files_are_closed(LogDirectory, "create_log")
    short_until_files_are_closed(PartitionLog, "begin_flush")
    await wire.create_topic("t")
    await until(lambda: node.node._broker.partitions.find("t", 0) is not None)
    async with asyncio.timeout(PATIENCE_S):
        answer = await wire.call(produce("t", make_batch(b"first")), 9, ProduceResponse)
    assert produced(answer) == [(0, 0)]
    assert refused == ["create_log", "begin_flush"]


@pytest.fixture
def short_broker(tmp_path: Any) -> Iterator[EmbeddedBroker]:
    """Its process may open fewer files than it has logs."""
    with EmbeddedBroker(tmp_path / "data", process=True) as broker:
        with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
            admin.create_topics([NewTopic("t", LOGS, 1)])
        pid = broker._process().pid
        others = [each for each in Path(f"/proc/{pid}/fd").iterdir() if "/t-" not in os.readlink(each)]
        most = len(others) + FILES_OF_LOGS
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
        yield broker


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="Linux sets limits of another process")
def test_all_logs_are_written_and_read_and_the_node_stops_cleanly(short_broker: EmbeddedBroker) -> None:
    partitions = [TopicPartition("t", index) for index in range(LOGS)]
    options: Any = {"bootstrap_servers": short_broker.bootstrap_servers}
    with Producer(**options, delivery_timeout_ms=40_000) as producer:
        for _ in range(2):
            sent = [producer.send("t", b"v", partition=index) for index in range(LOGS)]
            assert [each.result(PATIENCE_S).offset for each in sent]
    with Consumer(**options, auto_offset_reset="earliest") as consumer:
        consumer.assign(partitions)
        read: list[TopicPartition] = []
        for record in consumer:
            read.append(TopicPartition(record.topic, record.partition))
            if len(read) == 2 * LOGS:
                break
        assert sorted(read) == sorted(2 * partitions)
    assert b"Too many open files" in short_broker.output(), "there was no shortage"
    short_broker.stop()
    assert (short_broker.directory / CLEAN_SHUTDOWN_FILE).exists()
