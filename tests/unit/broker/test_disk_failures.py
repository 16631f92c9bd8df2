"""A device that refuses takes its log directory with it, whole and for good; the node serves the rest of it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode
from tests.unit.broker.faulty_disk import FaultyDisk
from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.node import Node
from tidelog.broker.node_ports import os_ports
from tidelog.broker.replicas import flushes, hosting
from tidelog.broker.replicas.log_directories import NoDirectoryLeft
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestTopic, OffsetFetchResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory

MakeBatch = Callable[..., bytes]
Start = Callable[..., Coroutine[Any, Any, RunningNode]]
STORAGE_ERROR = ErrorCode.KAFKA_STORAGE_ERROR


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


@pytest.fixture
async def start(disk: FaultyDisk, tmp_path: Path, homes: list[Path]) -> AsyncIterator[Start]:
    """A node with its metadata in a directory of its own, and two for topics."""
    running: list[RunningNode] = []

    async def start(**config: str) -> RunningNode:
        settings = {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": ",".join(map(str, homes)),
            "metadata.log.dir": str(tmp_path / "metadata"),
            "offsets.topic.num.partitions": "2",
            # Only what a test asks for: what has not changed since the last checkpoint is not written again.
            "replica.high.watermark.checkpoint.interval.ms": "3600000",
        }
        node = Node(NodeConfig(settings | config), replace(os_ports(), disk=disk))
        try:
            line = await node.start()
        except BaseException:
            await node.stop()
            raise
        running.append(RunningNode(node, int(line.partition("://")[2].partition(" ")[0].rpartition(":")[2])))
        return running[-1]

    yield start
    for each in running:
        await each.stop()


async def error_of_fetch(wire: Any, topic: str, offset: int = 0) -> int:
    answer = await wire.call(fetch(topic, offset), 11, FetchResponse)
    code: int = answer.responses[0].partitions[0].error_code
    return code


async def send(wire: Any, topic: str, batch: bytes) -> tuple[int, int]:
    (answer,) = produced(await wire.call(produce(topic, batch), 9, ProduceResponse))
    return answer


async def delete_topic(wire: Any, topic: str) -> None:
    request = DeleteTopicsRequest(topics=[DeleteTopicState(name=topic)], timeout_ms=60_000)
    assert (await wire.call(request, 6, DeleteTopicsResponse)).responses[0].error_code == 0


class Placed:
    """Three topics with a record each: "one" and "two" in the directory that will fail, "other" in the other one."""

    def __init__(self, running: RunningNode, wire: Any, homes: list[Path], batch: bytes) -> None:
        self.running, self.wire, self.homes, self.batch = running, wire, homes, batch

    @classmethod
    async def make(cls, running: RunningNode, homes: list[Path], batch: bytes) -> Placed:
        wire = await running.connect()
        for topic in ("one", "other", "two"):
            await wire.create_topic(topic)
            assert await send(wire, topic, batch) == (0, 0)
        placed = cls(running, wire, homes, batch)
        assert placed.home("one") == placed.home("two") != placed.home("other")
        return placed

    def home(self, topic: str) -> Path:
        (home,) = [home for home in self.homes if (home / f"{topic}-0").exists()]
        return home

    async def require_one_gone(self) -> None:
        """The directory of "one" is offline, for everybody and as the metadata says; the other one is not."""
        await until(lambda: self.running.node._directories.offline)
        wire = await self.running.connect()
        for topic in ("one", "two"):
            assert await send(wire, topic, self.batch) == (STORAGE_ERROR, -1)
            assert await error_of_fetch(wire, topic) == STORAGE_ERROR
        code, offset = await send(wire, "other", self.batch)
        assert (code, offset > 0) == (0, True)
        assert fetched(await wire.call(fetch("other"), 11, FetchResponse))[0] == b"x"
        await until(lambda: self._leader("one") == -1 == self._leader("two"))
        assert self._leader("other") == self.running.node.config.node_id
        (at,) = self.running.node._directories.offline
        assert at == str(self.home("one"))
        metadata = await wire.call(MetadataRequest(topics=[MetadataRequestTopic(name="one")]), 12, MetadataResponse)
        (partition,) = metadata.topics[0].partitions
        assert (partition.error_code, partition.leader_id) == (ErrorCode.LEADER_NOT_AVAILABLE, -1)
        assert partition.offline_replicas == [self.running.node.config.node_id]

    def _leader(self, topic: str) -> int:
        image = self.running.node._services.image()  # type: ignore[union-attr]
        return int(image.topics_by_name[topic].partitions[0].leader)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
async def test_a_refused_write_takes_its_directory_offline(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch, code: int
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    disk.fail(placed.home("one"), code)
    assert await send(placed.wire, "one", placed.batch) == (STORAGE_ERROR, -1)
    await placed.require_one_gone()
    untouched = disk.met.copy()
    placed.running.node._broker._upkeep.look_after()  # type: ignore[union-attr]
    placed.running.node._broker._upkeep.checkpoint()  # type: ignore[union-attr]
    await asyncio.sleep(0.05)
    assert disk.met == untouched, "nothing is written there any more"


async def test_a_node_with_a_failed_directory_does_not_say_at_its_end_that_everything_is_on_disk(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The acknowledged records of the failed directory were not synced."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    disk.fail(placed.home("one"), errno.ENOSPC)
    assert await send(placed.wire, "one", placed.batch) == (STORAGE_ERROR, -1)
    await until(lambda: placed.running.node._directories.offline)
    assert "`df -i`" in caplog.text, "a volume without inodes has the same error as a full one"
    caplog.set_level("INFO", "tidelog.node")
    await placed.running.stop()
    assert caplog.messages[-1].endswith("has stopped, not cleanly: the next start scans its logs")


async def test_a_log_whose_directory_vanished_takes_its_log_directory_offline_with_the_next_checkpoint(
    start: Start, homes: list[Path], make_batch: MakeBatch
) -> None:
    """Its open files take writes without an error, but a later start would not have them."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    home = placed.home("one")
    shutil.rmtree(home / "one-0")
    upkeep = placed.running.node._broker._upkeep  # type: ignore[union-attr]
    upkeep.checkpoint()
    await until(lambda: not upkeep._checkpointing)
    await asyncio.sleep(0)
    assert list(placed.running.node._directories.offline) == [str(home)]
    wire = await placed.running.connect()
    for topic in ("one", "two"):
        assert await send(wire, topic, placed.batch) == (STORAGE_ERROR, -1)
    assert await send(wire, "other", placed.batch) == (0, 1)


async def test_a_failed_sync_is_not_tried_again_and_acknowledges_nothing(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(**{"log.flush.interval.messages": "1"}), homes, make_batch(b"x"))
    home = placed.home("one")
    disk.fail(home, errno.EIO, "sync")
    assert await send(placed.wire, "one", placed.batch) == (STORAGE_ERROR, -1)
    assert len([each for each in disk.met if each[0] == "sync" and each[1].endswith(".log")]) == 1
    disk.faults.clear()  # the device reports a failed sync once, and says that all is well from then on
    await placed.require_one_gone()


async def test_a_failed_sync_closes_the_connection_of_a_produce_with_acks_0(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(**{"log.flush.interval.messages": "1"}), homes, make_batch(b"x"))
    disk.fail(placed.home("one"), errno.EIO, "sync")
    placed.wire.send(produce("one", placed.batch, acks=0), 9)
    assert await asyncio.wait_for(placed.wire.reader.read(), PATIENCE_S) == b""


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
async def test_a_sync_that_cannot_begin(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch, code: int
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    partitions = placed.running.node._broker.partitions  # type: ignore[union-attr]
    one: Any = partitions.find("one", 0)
    assert await send(placed.wire, "one", placed.batch) == (0, 1)  # the first record was flushed
    one.log.segments.release()
    disk.fail(placed.home("one"), code, "open")
    partitions.flushes.flush(one)
    if code == errno.EIO:
        await placed.require_one_gone()
        return
    disk.faults.clear()
    partitions.flushes.flush(one)
    await until(lambda: one.log.durability.recovery_point == 2)
    assert not placed.running.node._directories.offline


async def test_a_sync_for_which_there_are_no_descriptors_is_done_when_there_are(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flushes, "SHORTAGE_PAUSE_S", 0.02)
    placed = await Placed.make(await start(**{"log.flush.interval.messages": "1"}), homes, make_batch(b"x"))
    one: Any = placed.running.node._broker.partitions.find("one", 0)  # type: ignore[union-attr]
    to_be_opened = f"{one.log.directory}/partition.metadata"
    one.log.durability.note_path(to_be_opened)
    disk.fail(to_be_opened, errno.EMFILE, "sync")
    sending = asyncio.create_task(send(placed.wire, "one", placed.batch))
    await until(lambda: len(disk.met) > 2)
    assert not sending.done(), "nothing is acknowledged that is not on the device"
    disk.faults.clear()
    assert await sending == (0, 1)
    assert not placed.running.node._directories.offline


async def test_whoever_waits_for_a_partition_of_the_directory_is_told(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    waiting = await placed.running.connect()
    waiting.send(fetch("two", 1, wait_ms=600_000), 11)
    await asyncio.sleep(0.05)
    disk.fail(placed.home("one"), errno.EIO)
    assert await send(placed.wire, "one", placed.batch) == (STORAGE_ERROR, -1)
    answer = await asyncio.wait_for(waiting.receive(FetchResponse, 11), PATIENCE_S)
    assert answer.responses[0].partitions[0].error_code == STORAGE_ERROR


@pytest.mark.parametrize("waits", [False, True])
async def test_what_cannot_be_read_takes_its_directory_offline(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch, waits: bool
) -> None:
    """`waits`: pages that are not in memory, which a thread meets; else the read on the loop does."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    partition: Any = placed.running.node._broker.partitions.find("one", 0)  # type: ignore[union-attr]
    if waits:
        cast(Any, partition).log.segments.active.warm_from = 1 << 40
    disk.fail(placed.home("one"), errno.EIO, "read")
    assert await asyncio.wait_for(error_of_fetch(placed.wire, "one"), PATIENCE_S) == STORAGE_ERROR
    await placed.require_one_gone()


async def test_what_cannot_be_read_for_want_of_memory_is_read_again(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    """On a thread, where pages are brought from the device: whoever asks is told to ask again, and finds it there."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    partition: Any = placed.running.node._broker.partitions.find("one", 0)  # type: ignore[union-attr]
    partition.log.segments.active.warm_from = 1 << 40
    disk.fail(placed.home("one"), errno.ENOMEM, "read")
    by_time = ListOffsetsRequest(
        topics=[ListOffsetsTopic(name="one", partitions=[ListOffsetsPartition(partition_index=0, timestamp=0)])]
    )
    for _ in range(2):
        assert await asyncio.wait_for(error_of_fetch(placed.wire, "one"), PATIENCE_S) == STORAGE_ERROR
        found = await asyncio.wait_for(placed.wire.call(by_time, 7, ListOffsetsResponse), PATIENCE_S)
        assert found.topics[0].partitions[0].error_code == STORAGE_ERROR
    disk.faults.clear()
    assert fetched(await placed.wire.call(fetch("one"), 11, FetchResponse))[0] == b"x"
    assert (await placed.wire.call(by_time, 7, ListOffsetsResponse)).topics[0].partitions[0].offset == 0
    assert await send(placed.wire, "one", placed.batch) == (0, 1)
    assert not placed.running.node._directories.offline


async def test_a_failed_read_is_told_to_whoever_asks_next(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    """The client whose fetch met it may be gone by then."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    partition: Any = placed.running.node._broker.partitions.find("one", 0)  # type: ignore[union-attr]
    partition.log.segments.active.warm_from = 1 << 40
    disk.fail(placed.home("one"), errno.EIO, "read")
    gone = await placed.running.connect()
    gone.send(fetch("one"), 11)
    gone.writer.close()
    await until(lambda: partition.log.segments.active.unread or partition.offline)
    disk.faults.clear()
    disk.fail(placed.home("one"), errno.ENOMEM, "read")
    assert await asyncio.wait_for(error_of_fetch(placed.wire, "one"), PATIENCE_S) == STORAGE_ERROR
    await placed.require_one_gone()


async def test_groups_are_loaded_once_there_are_descriptors_again(
    start: Start, disk: FaultyDisk, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(**{"offsets.topic.num.partitions": "1"})
    wire = await running.connect()
    assert (await wire.call(FindCoordinatorRequest(key="g"), 2, FindCoordinatorResponse)).error_code == 0
    commit = OffsetCommitRequest(
        group_id="g",
        topics=[
            OffsetCommitRequestTopic(
                name="t", partitions=[OffsetCommitRequestPartition(partition_index=0, committed_offset=7)]
            )
        ],
    )
    await wire.create_topic("t")
    asked = OffsetFetchRequest(group_id="g", topics=[OffsetFetchRequestTopic(name="t", partition_indexes=[0])])

    async def committed() -> tuple[int, int]:
        answer = await wire.call(asked, 5, OffsetFetchResponse)
        return answer.error_code, answer.topics[0].partitions[0].committed_offset if answer.topics else -1

    async def until_committed() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await committed() != (0, 7):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async with asyncio.timeout(PATIENCE_S):
        while (await wire.call(commit, 2, OffsetCommitResponse)).topics[0].partitions[0].error_code:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await until_committed()
    broker: Any = running.node._broker
    partition = broker.partitions.find("__consumer_offsets", 0)
    partition.log.segments.release()
    disk.fail(partition.log.directory, errno.EMFILE, "open")
    broker.groups.on_partition_resigned(0)
    broker.groups.on_partition_elected(0, partition.leader_epoch)
    await until(lambda: ("open", partition.log.segments.active.path) in disk.met)
    assert (await committed())[0] == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    disk.faults.clear()
    await until_committed()


async def test_upkeep_meets_a_bad_directory_too(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    disk.fail(placed.home("one"), errno.EROFS)
    placed.running.node._broker._upkeep.checkpoint()  # type: ignore[union-attr]
    await placed.require_one_gone()


@pytest.mark.parametrize("is_replaced", [False, True], ids=["nothing is there", "an empty one is in its place"])
@pytest.mark.parametrize("noticed_by", ["a checkpoint that has nothing new", "a new log", "records"])
async def test_a_directory_that_is_taken_away_is_noticed_and_never_made_anew(
    start: Start, homes: list[Path], make_batch: MakeBatch, noticed_by: str, is_replaced: bool
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    broker: Any = placed.running.node._broker
    gone = placed.home("one")
    broker._upkeep.checkpoint()
    await until(lambda: not broker._upkeep._checkpointing)
    gone.rename(gone.with_name("taken-away"))
    if is_replaced:
        gone.mkdir()
    if noticed_by == "a new log":
        for number in range(2):
            await placed.wire.create_topic(f"new-{number}")
    else:
        if noticed_by == "records":
            await send(placed.wire, "one", placed.batch)
        broker._upkeep.checkpoint()
    await until(lambda: placed.running.node._directories.offline)
    assert list(placed.running.node._directories.offline) == [str(gone)]
    assert await send(placed.wire, "two", placed.batch) == (STORAGE_ERROR, -1)
    assert (await send(placed.wire, "other", placed.batch))[0] == 0
    await placed.wire.create_topic("later")
    await placed.running.stop()
    assert list(gone.iterdir()) == [] if is_replaced else not gone.exists()


async def test_a_bug_met_in_one_directory_leaves_the_others_looked_after(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start()
    met: list[LogDirectory] = []

    def maintained(directory: LogDirectory, now_ms: int, doomed: list[str] | None = None) -> None:
        met.append(directory)
        raise ZeroDivisionError

    monkeypatch.setattr(LogDirectory, "maintained", maintained)
    running.node._broker._upkeep.look_after()  # type: ignore[union-attr]
    assert met == running.node._directories.online
    assert all(directory.path in caplog.text for directory in met)
    assert not running.node._directories.offline


async def test_new_replicas_go_where_they_can_be_written(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    bad = placed.home("other")  # the emptier one, which would be chosen
    disk.fail(bad, errno.ENOSPC)
    await placed.wire.create_topic("new")
    assert await send(placed.wire, "new", placed.batch) == (0, 0)
    assert placed.home("new") != bad
    assert str(bad) in placed.running.node._directories.offline


async def test_a_process_without_descriptors_blames_no_directory(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    placed.running.node._broker.partitions.find("one", 0).log.segments.release()  # type: ignore[union-attr]
    disk.fail(placed.home("one"), errno.EMFILE, "open")
    assert await error_of_fetch(placed.wire, "one") == STORAGE_ERROR
    assert await send(placed.wire, "one", placed.batch) == (STORAGE_ERROR, -1)
    disk.faults.clear()
    assert await send(placed.wire, "one", placed.batch) == (0, 1)
    assert not placed.running.node._directories.offline


async def test_a_topic_made_without_descriptors_is_there_when_there_are_some(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "SHORTAGE_PAUSE_S", 0.05)
    running = await start()
    wire = await running.connect()
    for home in homes:
        disk.fail(home, errno.EMFILE, "write", "create")
    await wire.create_topic("t")
    await until(lambda: disk.met)
    disk.faults.clear()
    await until(lambda: running.node._broker.partitions.find("t", 0))  # type: ignore[union-attr]
    assert await send(wire, "t", make_batch(b"a")) == (0, 0)
    assert not running.node._directories.offline


@pytest.mark.slow
async def test_topics_of_a_bad_directory_can_be_deleted_and_made_again(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    bad = placed.home("one")
    disk.fail(bad, errno.EIO)
    await send(placed.wire, "one", placed.batch)
    await delete_topic(placed.wire, "one")
    await placed.wire.create_topic("one")
    assert await send(placed.wire, "one", make_batch(b"new")) == (0, 0)
    await placed.running.stop()
    disk.faults.clear()
    wire = await (await start()).connect()
    assert fetched(await wire.call(fetch("one"), 11, FetchResponse)) == [b"new"]
    assert len(list(bad.glob("one-0.*-stray"))) == 1, "a log of another topic is none of this one"


@pytest.mark.slow
async def test_what_was_there_is_there_again_when_the_directory_is(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    disk.fail(placed.home("one"), errno.EIO)
    await send(placed.wire, "one", placed.batch)
    await placed.require_one_gone()
    await placed.running.stop()
    disk.faults.clear()
    wire = await (await start()).connect()
    for topic in ("one", "two"):
        assert fetched(await wire.call(fetch(topic), 11, FetchResponse)) == [b"x"]
        assert await send(wire, topic, placed.batch) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["cannot be opened", "cannot be listed", "logs cannot be read"])
async def test_a_start_with_a_bad_directory_serves_the_rest_and_makes_nothing_anew(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch, what: str
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    bad = placed.home("one")
    await placed.running.stop()
    if what == "cannot be opened":
        disk.fail(bad, errno.EROFS)
    elif what == "cannot be listed":
        bad.rename(bad.with_name("gone"))
        bad.write_text("no directory")
    else:
        disk.fail(bad / "two-0", errno.EIO, "read")
        (bad / ".kafka_cleanshutdown").unlink()
    placed.running = await start()
    if what == "cannot be listed":
        wire = await placed.running.connect()
        assert await send(wire, "one", placed.batch) == (STORAGE_ERROR, -1)
        assert await send(wire, "other", placed.batch) == (0, 1)
    else:
        await placed.require_one_gone()
    assert not (placed.home("other") / "one-0").exists(), "an empty log must not take its place"
    await placed.running.stop()
    disk.faults.clear()
    if what == "cannot be listed":
        bad.unlink()
        bad.with_name("gone").rename(bad)
    wire = await (await start()).connect()
    assert fetched(await wire.call(fetch("one"), 11, FetchResponse)) == [b"x"]


@pytest.mark.slow
async def test_a_directory_that_fails_while_it_is_opened_is_let_go_of(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    """The error kept the files open of the log that could not be opened, as long as the node ran."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    bad = placed.home("one")
    await placed.running.stop()
    disk.fail(bad / "one-0" / f"{0:020d}.log", errno.EIO, "read")
    (bad / ".kafka_cleanshutdown").unlink()
    placed.running = await start()
    await placed.require_one_gone()
    assert [path for path in open_files() if path.startswith(str(bad))] == []
    disk.faults.clear()
    LogDirectory.open(OsDisk(), str(bad), node_id=placed.running.node.config.node_id, cluster_id=None).fail("is free")


def open_files() -> list[str]:
    paths = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one of this list
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return paths


async def test_a_log_whose_topic_cannot_be_written_down_takes_its_directory_offline(
    start: Start, homes: list[Path], make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    bad = placed.home("one")
    await placed.running.stop()
    (bad / "one-0" / "partition.metadata").unlink()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as of a write: without the name of a file

    monkeypatch.setattr(LogDirectory, "set_topic_id", refuse)
    placed.running = await start()
    await placed.require_one_gone()


@pytest.mark.parametrize("how", ["empty", "dropped"])
async def test_the_only_replica_of_a_directory_that_is_gone_does_not_begin_an_empty_log(
    start: Start, homes: list[Path], make_batch: MakeBatch, how: str
) -> None:
    """A volume is not mounted, or its directory is not in log.dirs any more: the empty log led, and nobody was told."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    gone, kept = placed.home("one"), placed.home("other")
    await placed.running.stop()
    if how == "empty":
        gone.rename(gone.with_name("unmounted"))
        running = await start()
    else:
        running = await start(**{"log.dirs": str(kept)})
    wire = await running.connect()
    assert await send(wire, "one", placed.batch) == (STORAGE_ERROR, -1)
    assert await error_of_fetch(wire, "one") == STORAGE_ERROR
    assert await send(wire, "other", placed.batch) == (0, 1)
    assert not (kept / "one-0").exists()
    assert how == "dropped" or not (gone / "one-0").exists()

    await running.stop()
    if how == "empty":
        shutil.rmtree(gone)
        gone.with_name("unmounted").rename(gone)
    wire = await (await start()).connect()
    assert fetched(await wire.call(fetch("one"), 11, FetchResponse)) == [b"x"]


async def allow_lost_records(wire: Any, topic: str) -> None:
    config = AlterableConfig(name="unclean.leader.election.enable", config_operation=0, value="true")
    resource = AlterConfigsResource(resource_type=2, resource_name=topic, configs=[config])
    await wire.call(IncrementalAlterConfigsRequest(resources=[resource]), 1, IncrementalAlterConfigsResponse)


async def test_a_topic_that_may_lose_records_is_filled_anew_in_an_empty_directory(
    start: Start, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    lost = placed.home("one")
    await placed.running.stop()
    lost.rename(lost.with_name("lost"))
    wire = await (await start()).connect()
    assert await send(wire, "one", placed.batch) == (STORAGE_ERROR, -1)
    await allow_lost_records(wire, "one")
    async with asyncio.timeout(PATIENCE_S):
        while (sent := await send(wire, "one", placed.batch))[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert sent == (0, 0)
    assert await send(wire, "two", placed.batch) == (STORAGE_ERROR, -1)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["clean", "killed"])
async def test_the_only_replica_whose_log_is_gone_does_not_begin_an_empty_one(
    start: Start, homes: list[Path], make_batch: MakeBatch, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the directory `one-0` is gone: the next record got the offset of one that was acknowledged, in silence."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    home = placed.home("one")
    await placed.running.stop()
    if ending == "killed":
        (home / ".kafka_cleanshutdown").unlink()
    (home / "one-0").rename(home.parent / "kept")
    for _ in range(2):  # the next start knows it, too
        running = await start()
        wire = await running.connect()
        assert await send(wire, "one", placed.batch) == (STORAGE_ERROR, -1)
        assert await error_of_fetch(wire, "one") == STORAGE_ERROR
        assert (await send(wire, "two", placed.batch))[0] == 0
        assert not (home / "one-0").exists()
        assert "one-0 is offline: the directory of its log is gone" in caplog.text
        caplog.clear()
        await running.stop()
    (home.parent / "kept").rename(home / "one-0")
    wire = await (await start()).connect()
    assert fetched(await wire.call(fetch("one"), 11, FetchResponse)) == [b"x"]
    assert await send(wire, "one", placed.batch) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("remedy", ["unclean", "deleted"])
async def test_a_log_that_is_gone_can_be_given_up(
    start: Start, homes: list[Path], make_batch: MakeBatch, remedy: str
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    home = placed.home("one")
    await placed.running.stop()
    shutil.rmtree(home / "one-0")
    running = await start()
    wire = await running.connect()
    assert await send(wire, "one", placed.batch) == (STORAGE_ERROR, -1)
    if remedy == "unclean":
        await allow_lost_records(wire, "one")
    else:
        await delete_topic(wire, "one")
        await wire.create_topic("one")
    async with asyncio.timeout(PATIENCE_S):
        while (sent := await send(wire, "one", placed.batch))[0]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert sent == (0, 0)
    await running.stop()
    wire = await (await start()).connect()
    assert await send(wire, "one", placed.batch) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["gone", "empty", "garbage", "half"])
async def test_a_directory_with_damaged_properties_is_offline_until_they_are_written_anew(
    start: Start, homes: list[Path], make_batch: MakeBatch, damage: str
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    path = placed.home("one") / "meta.properties"
    await placed.running.stop()
    whole = path.read_text()
    path.write_bytes({"gone": b"", "empty": b"", "garbage": b"\xff\x00" * 20, "half": whole.encode()[:20]}[damage])
    if damage == "gone":
        path.unlink()
    placed.running = await start()
    await placed.require_one_gone()
    await placed.running.stop()
    path.write_text("".join(line for line in whole.splitlines(keepends=True) if "directory.id" not in line))
    wire = await (await start()).connect()
    await until_led(wire, "one")
    assert fetched(await wire.call(fetch("one"), 11, FetchResponse)) == [b"x"]


async def until_led(wire: Any, topic: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await error_of_fetch(wire, topic):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("which", ["metadata", "metadata log", pytest.param("all", marks=pytest.mark.slow)])
async def test_a_node_without_metadata_or_any_directory_ends(
    start: Start, disk: FaultyDisk, tmp_path: Path, homes: list[Path], make_batch: MakeBatch, which: str
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    node = placed.running.node
    if which == "metadata":
        disk.fail(tmp_path / "metadata", errno.EIO)
        placed.running.node._broker._upkeep.checkpoint()  # type: ignore[union-attr]
    elif which == "metadata log":
        disk.fail(tmp_path / "metadata", errno.EIO, "write", "sync")
        never = CreatableTopic(name="never", num_partitions=1, replication_factor=1)
        placed.wire.send(CreateTopicsRequest(topics=[never]), 7)
    else:
        for home in homes:
            disk.fail(home, errno.EIO)
        for topic in ("one", "other"):
            await send(placed.wire, topic, placed.batch)
    with pytest.raises(NoDirectoryLeft, match="cannot go on"):
        await asyncio.wait_for(node.failed(), PATIENCE_S)
    everywhere = [*homes, tmp_path / "metadata"]
    assert not all((home / "broker.incarnation").exists() for home in everywhere), "something may be lost"
    await placed.running.stop()
    disk.faults.clear()
    wire = await (await start()).connect()
    for topic in ("one", "two", "other"):
        assert fetched(await wire.call(fetch(topic), 11, FetchResponse))[:1] == [b"x"]


async def test_a_node_does_not_start_where_no_directory_can_be_used(
    start: Start, disk: FaultyDisk, homes: list[Path]
) -> None:
    for home in homes:
        home.write_text("no directory")
    with pytest.raises(NoDirectoryLeft, match="none of the log directories"):
        await start()


async def test_a_start_that_finds_no_readable_directory_ends_at_once(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    await placed.running.stop()
    for home in homes:
        disk.fail(home, errno.EIO, "read")
        disk.faults.append((str(home / "meta.properties"), frozenset(), 0))
    with pytest.raises((NoDirectoryLeft, OSError)):
        await asyncio.wait_for(start(), PATIENCE_S)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
async def test_a_start_without_descriptors_ends_with_a_clear_line_and_takes_back_no_claim(
    start: Start, disk: FaultyDisk, homes: list[Path], make_batch: MakeBatch, code: int
) -> None:
    """As in Kafka, what cannot be opened takes its directory offline, and the last one ends the node."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    await placed.running.stop()
    everywhere = [*homes, homes[0].parent / "metadata"]
    for home in everywhere:
        (home / ".kafka_cleanshutdown").unlink()  # as after a kill
    claims = [(home / "broker.incarnation").read_bytes() for home in everywhere]
    for home in homes:
        for log in home.glob("*-0"):
            disk.fail(log, code, "open", "read")
    with pytest.raises(NoDirectoryLeft, match="it was the last one") as refused:
        await asyncio.wait_for(start(), PATIENCE_S)
    assert ("ulimit -n" in str(refused.value)) == (code == errno.EMFILE)
    kept = [(home / "broker.incarnation") for home in everywhere]
    if code == errno.EMFILE:
        assert [each.read_bytes() for each in kept] == claims
    else:
        assert not any(each.exists() for each in kept)
    disk.faults.clear()
    wire = await (await start()).connect()
    for topic in ("one", "two", "other"):
        assert fetched(await wire.call(fetch(topic), 11, FetchResponse))[:1] == [b"x"]


@pytest.mark.slow
async def test_nobody_speaks_for_an_epoch_of_which_something_may_be_lost(
    start: Start, disk: FaultyDisk, homes: list[Path], tmp_path: Path, make_batch: MakeBatch
) -> None:
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    everywhere = [*homes, tmp_path / "metadata"]
    assert all((home / "broker.incarnation").exists() for home in everywhere)
    disk.fail(placed.home("one"), errno.EIO, "sync", "write")
    await send(placed.wire, "one", placed.batch)
    await placed.require_one_gone()
    assert not any((home / "broker.incarnation").exists() for home in everywhere)
    await placed.running.stop()
    disk.faults.clear()
    directories = (await start()).node._directories
    assert directories.clean_epoch("any") == -1


async def test_nobody_speaks_for_an_epoch_whose_last_sync_failed(
    start: Start, disk: FaultyDisk, homes: list[Path], tmp_path: Path, make_batch: MakeBatch
) -> None:
    """Where the logs are closed, nobody is left to take their directory offline."""
    placed = await Placed.make(await start(), homes, make_batch(b"x"))
    everywhere = [*homes, tmp_path / "metadata"]
    disk.fail(placed.home("one"), errno.EIO, "sync")
    await placed.running.stop()
    assert not any((home / "broker.incarnation").exists() for home in everywhere)
