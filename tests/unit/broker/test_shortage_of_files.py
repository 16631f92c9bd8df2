"""A node with more logs in use than file descriptors: it closes the files of all logs, and opens them when needed."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S
from tidelog.broker.replicas import upkeep
from tidelog.broker.replicas.upkeep import Upkeep
from tidelog.client import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Consumer, Producer
from tidelog.storage.files.checkpoints import CLEAN_SHUTDOWN_FILE
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
