"""Replicas that move between two log directories of a real node, while they are written and read."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode
from tests.unit.broker.faulty_disk import FaultyDisk
from tests.unit.broker.test_disk_failures import error_of_fetch, send
from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.node import Node
from tidelog.broker.node_ports import os_ports
from tidelog.broker.replicas import flushes, replica_moves
from tidelog.client import Admin
from tidelog.client.model import Replica, ReplicaLogDirs
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopic,
)
from tidelog.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopic,
)
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.describe_log_dirs import DescribeLogDirsRequest, DescribeLogDirsResponse
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.replication.future_replica import FutureReplica, MoveState
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog

MakeBatch = Callable[..., bytes]


class Moving:
    """A node with two directories; "t" lies in one of them."""

    def __init__(self, tmp_path: Path) -> None:
        self.disk = FaultyDisk()
        self.homes = [tmp_path / "a", tmp_path / "b"]
        self.config = {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": ",".join(map(str, self.homes)),
            "metadata.log.dir": str(tmp_path / "metadata"),
        }
        self.running: RunningNode
        self.wire: Any

    async def start(self, **config: str) -> None:
        node = Node(NodeConfig(self.config | config), replace(os_ports(), disk=self.disk))
        try:
            line = await node.start()
        except BaseException:
            await node.stop()
            raise
        self.running = RunningNode(node, int(line.partition("://")[2].partition(" ")[0].rpartition(":")[2]))
        self.wire = await self.running.connect()

    @property
    def partition(self) -> Any:
        return self.running.node._broker.partitions.find("t", 0)  # type: ignore[union-attr]

    @property
    def home(self) -> Path:
        return Path(self.partition.log.directory).parent

    @property
    def other(self) -> Path:
        return next(home for home in self.homes if home != self.home)

    @property
    def moves(self) -> Any:
        return self.running.node._broker.moves  # type: ignore[union-attr]

    async def order(self, path: Path | str, topic: str = "t", index: int = 0, version: int = 2) -> int:
        topics = [AlterReplicaLogDirTopic(name=topic, partitions=[index])]
        request = AlterReplicaLogDirsRequest(dirs=[AlterReplicaLogDir(path=str(path), topics=topics)])
        answer = await self.wire.call(request, version, AlterReplicaLogDirsResponse)
        ((result,),) = [each.partitions for each in answer.results]
        code: int = result.error_code
        return code

    async def hold_back(self, bytes_per_s: int | None) -> None:
        name, value = (
            "replica.alter.log.dirs.io.max.bytes.per.second",
            None if bytes_per_s is None else str(bytes_per_s),
        )
        await self.configure("", name, value)

    async def configure(self, topic: str, name: str, value: str | None) -> None:
        """Without a topic, the settings of all brokers."""
        config = AlterableConfig(name=name, config_operation=0 if value else 1, value=value)
        resource = AlterConfigsResource(resource_type=2 if topic else 4, resource_name=topic, configs=[config])
        request = IncrementalAlterConfigsRequest(resources=[resource])
        answer = await self.wire.call(request, 1, IncrementalAlterConfigsResponse)
        assert answer.responses[0].error_code == 0, answer

    async def arrived(self, home: Path) -> None:
        await until(lambda: not self.moves._moves and self.home == home)

    def told(self) -> bytes:
        image = self.running.node._services.image()  # type: ignore[union-attr]
        directory: bytes = image.topics_by_name["t"].partitions[0].directory_of(self.running.node.config.node_id)
        return directory

    def id_of(self, home: Path) -> bytes:
        return next(each.directory_id for each in self.running.node._directories if each.path == str(home))

    async def described(self) -> dict[tuple[str, bool], tuple[int, int]]:
        answer = await self.wire.call(DescribeLogDirsRequest(topics=None), 5, DescribeLogDirsResponse)
        return {
            (Path(result.log_dir).name, each.is_future_key): (each.partition_size, each.offset_lag)
            for result in answer.results for topic in result.topics for each in topic.partitions if topic.name == "t"
        }  # fmt: skip

    async def values(self) -> list[bytes | None]:
        values: list[bytes | None] = []
        while True:
            more = fetched(await self.wire.call(fetch("t", len(values)), 11, FetchResponse))
            if not more:
                return values
            values += more


@pytest.fixture
async def moving(tmp_path: Path) -> AsyncIterator[Moving]:
    found = Moving(tmp_path)
    await found.start()
    await found.wire.create_topic("t")
    yield found
    await found.running.stop()


@pytest.mark.parametrize("version", AlterReplicaLogDirsRequest.VERSIONS)
async def test_a_replica_moves_and_the_controller_knows(moving: Moving, make_batch: MakeBatch, version: int) -> None:
    for number in range(20):
        await send(moving.wire, "t", make_batch(b"%d" % number))
    source, target = moving.home, moving.other
    assert await moving.order(target, version=version) == 0
    await moving.arrived(target)
    assert moving.told() == moving.id_of(target)
    assert await moving.values() == [b"%d" % number for number in range(20)]
    assert await send(moving.wire, "t", make_batch(b"20")) == (0, 20)
    assert not (source / "t-0").exists()
    assert [path.name for path in target.glob("t-0*")] == ["t-0"]
    assert list(await moving.described()) == [(target.name, False)]
    await moving.running.stop()
    await moving.start()
    assert moving.home == target
    assert await moving.values() == [b"%d" % number for number in range(21)]


async def test_a_replica_that_was_taken_away_and_given_back_meanwhile_moves_all_the_same(moving: Moving) -> None:
    """The controller answers NOT_LEADER_OR_FOLLOWER in between. Then the move waited for its word until a restart."""
    call, answers = moving.moves._assignments._call, list[Any]()

    async def taken_away_first(request: Any, version: int) -> Any:
        answer = await call(request, version)
        if not answers:
            answer.directories[0].topics[0].partitions[0].error_code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        answers.append(answer)
        return answer

    moving.moves._assignments._call = taken_away_first
    target = moving.other
    assert await moving.order(target) == 0
    await moving.arrived(target)
    assert moving.told() == moving.id_of(target)
    assert len(answers) == 2


@pytest.mark.slow
async def test_what_is_written_meanwhile_moves_too(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_moves, "STEP_BYTES", 300)
    sent = 0

    async def write() -> None:
        nonlocal sent
        wire = await moving.running.connect()
        while True:
            assert await send(wire, "t", make_batch(b"%d" % sent)) == (0, sent)
            sent += 1

    async def more(count: int) -> None:
        end = sent + count
        await until(lambda: sent >= end)

    writer = asyncio.create_task(write())
    waiting = await moving.running.connect()
    for _ in range(4):
        await more(20)
        target = moving.other
        assert await moving.order(target) == 0
        await moving.arrived(target)
        assert not writer.done()
    waiting.send(fetch("t", sent + 50, wait_ms=600_000), 11)
    await more(60)
    writer.cancel()
    assert await moving.values() == [b"%d" % number for number in range(moving.partition.log.log_end_offset)]
    await asyncio.wait_for(waiting.receive(FetchResponse, 11), PATIENCE_S)


async def test_how_far_it_is_can_be_told_and_it_may_be_held_back(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_moves, "STEP_BYTES", 200)
    for number in range(10):
        await send(moving.wire, "t", make_batch(b"%d" % number))
    await moving.hold_back(1)
    source, target = moving.home, moving.other
    assert await moving.order(target) == 0
    ((replica, _),) = moving.moves._moves.values()
    await until(lambda: replica.log.log_end_offset > 0)
    described = await moving.described()
    size_bytes, lag = described[target.name, True]
    assert 0 < lag < 10
    assert 0 < size_bytes < described[source.name, False][0]
    assert len(list(target.glob("t-0.*-future"))) == 1
    assert await moving.order(target) == 0, "the same again changes nothing"
    assert len(list(target.glob("t-0.*"))) == 1
    assert await moving.order(source) == 0, "it is to stay"
    assert list(await moving.described()) == [(source.name, False)]
    assert not list(target.glob("t-0.*-future"))
    assert moving.told() == moving.id_of(source)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [1, 9])
async def test_records_are_deleted_once_they_are_from_the_copy_too(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """Of the copied ones and of those that were not copied yet; however slowly it is copied."""
    monkeypatch.setattr(replica_moves, "STEP_BYTES", 200)
    for number in range(10):
        await send(moving.wire, "t", make_batch(b"%d" % number))
    await moving.hold_back(1)
    assert await moving.order(moving.other) == 0
    ((replica, _),) = moving.moves._moves.values()
    await until(lambda: 1 < replica.log.log_end_offset < 9)
    asked = [DeleteRecordsPartition(partition_index=0, offset=offset)]
    request = DeleteRecordsRequest(topics=[DeleteRecordsTopic(name="t", partitions=asked)], timeout_ms=60_000)
    moving.wire.send(request, 2)
    answer = await asyncio.wait_for(moving.wire.receive(DeleteRecordsResponse, 2), PATIENCE_S)
    assert replica.log.log_start_offset == offset
    (found,) = answer.topics[0].partitions
    assert (found.error_code, found.low_watermark) == (0, offset)
    await moving.hold_back(None)
    await moving.arrived(moving.other)
    assert (moving.partition.log.log_start_offset, moving.partition.future_log) == (offset, None)


async def test_deletions_do_not_wait_for_a_copy_that_is_given_up(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(moving.wire, "t", make_batch(b"a", b"b"))
    monkeypatch.setattr(replica_moves.ReplicaMoves, "_align", lambda moves, replica: None)
    monkeypatch.setattr(FutureReplica, "read_next", lambda *_: None)
    assert await moving.order(moving.other) == 0
    asked = [DeleteRecordsPartition(partition_index=0, offset=1)]
    request = DeleteRecordsRequest(topics=[DeleteRecordsTopic(name="t", partitions=asked)], timeout_ms=60_000)
    moving.wire.send(request, 2)
    deletions = moving.running.node._broker.partitions.deletions  # type: ignore[union-attr]
    await until(lambda: len(deletions) == 1)
    other = await moving.running.connect()
    order = AlterReplicaLogDir(path=str(moving.home), topics=[AlterReplicaLogDirTopic(name="t", partitions=[0])])
    await other.call(AlterReplicaLogDirsRequest(dirs=[order]), 2, AlterReplicaLogDirsResponse)
    answer = await asyncio.wait_for(moving.wire.receive(DeleteRecordsResponse, 2), PATIENCE_S)
    assert answer.topics[0].partitions[0].low_watermark == 1


async def test_a_move_goes_on_after_a_restart(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_moves, "STEP_BYTES", 200)
    for number in range(10):
        await send(moving.wire, "t", make_batch(b"%d" % number))
    await moving.hold_back(1)
    target = moving.other
    await moving.order(target)
    await until(lambda: moving.moves._moves)
    await moving.running.stop()
    assert len(list(target.glob("t-0.*-future"))) == 1
    await moving.start()
    await moving.hold_back(None)
    await moving.arrived(target)
    assert await moving.values() == [b"%d" % number for number in range(10)]


async def test_a_process_that_ends_after_it_told_the_controller_takes_over_where_nothing_else_is_left(
    moving: Moving, make_batch: MakeBatch
) -> None:
    await send(moving.wire, "t", make_batch(b"a"))
    source, target = moving.home, moving.other
    await moving.order(target)
    await moving.arrived(target)
    await moving.running.stop()
    (target / "t-0").rename(target / f"t-0.{'0' * 32}-future")
    await moving.start()
    assert moving.home == target
    assert await moving.values() == [b"a"]
    assert not (source / "t-0").exists()


@pytest.mark.parametrize("kind_and_end", [("write", ".tmp"), ("sync", "/b"), ("rename", ".tmp"), ("rename", "-future")])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
async def test_a_take_over_that_fails_loses_no_record(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, code: int, kind_and_end: tuple[str, str]
) -> None:
    """An error of the device takes the directory offline, a full volume has the take-over wait. Either keeps the copy,
    though the error does not name a file, as that of a descriptor may.
    """
    await send(moving.wire, "t", make_batch(b"a"))
    await moving.configure("t", "cleanup.policy", "compact")
    if moving.home.name == "b":
        await moving.order(moving.other)
        await moving.arrived(moving.homes[0])
    target = moving.other
    await moving.order(target)
    await moving.arrived(target)
    await moving.running.stop()
    (target / "t-0").rename(target / f"t-0.{'0' * 32}-future")
    (target / "cleaner-offset-checkpoint").write_text("0\n0\n")
    promote, refused = LogDirectory.promote_future, []

    def meet(disk: FaultyDisk, kind: str, path: str) -> None:
        if kind == kind_and_end[0] and path.endswith(kind_and_end[1]):
            refused.append(path)
            raise OSError(code, "refused")

    def promote_once(directory: LogDirectory, topic: str, index: int) -> PartitionLog:
        monkeypatch.setattr(LogDirectory, "promote_future", promote)
        with monkeypatch.context() as patches:
            patches.setattr(FaultyDisk, "meet", meet)
            return directory.promote_future(topic, index)

    monkeypatch.setattr(LogDirectory, "promote_future", promote_once)
    await moving.start()
    assert len(refused) == 1
    if code == errno.EIO:
        await until(lambda: str(target) in moving.running.node._directories.offline)
        assert await error_of_fetch(moving.wire, "t") == ErrorCode.KAFKA_STORAGE_ERROR
        await moving.running.stop()
        await moving.start()
    await until(lambda: moving.partition is not None and moving.partition.leads)
    assert not moving.running.node._directories.offline
    assert moving.home == target
    assert await moving.values() == [b"a"]


async def test_of_two_replicas_the_one_that_the_controller_knows_counts(moving: Moving, make_batch: MakeBatch) -> None:
    await send(moving.wire, "t", make_batch(b"a"))
    source, target = moving.home, moving.other
    await moving.order(target)
    await moving.arrived(target)
    await moving.running.stop()
    copy = source / "t-0"
    copy.mkdir()
    for file in (target / "t-0").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    await moving.start()
    assert moving.home == target
    assert not copy.exists()
    assert len(list(source.glob("t-0.*-stray"))) == 1


async def test_a_destination_that_fails_leaves_the_replica_where_it_is(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_moves, "STEP_BYTES", 200)
    for number in range(10):
        await send(moving.wire, "t", make_batch(b"%d" % number))
    source, target = moving.home, moving.other
    (await moving.order(target))
    moving.disk.fail(target, errno.ENOSPC)
    await until(lambda: moving.running.node._directories.offline)
    await until(lambda: not moving.moves._moves)
    assert moving.home == source
    assert await send(moving.wire, "t", make_batch(b"10")) == (0, 10)
    await until(lambda: moving.told() == moving.id_of(source))
    assert await moving.order(target) == ErrorCode.KAFKA_STORAGE_ERROR


async def test_a_source_that_cannot_be_read_goes_offline_with_its_replica(
    moving: Moving, make_batch: MakeBatch
) -> None:
    await send(moving.wire, "t", make_batch(b"a"))
    source, target = moving.home, moving.other
    moving.disk.fail(source, errno.EIO, "read")
    assert await moving.order(target) == 0
    await until(lambda: str(source) in moving.running.node._directories.offline)
    await until(lambda: not moving.moves._moves)
    assert await error_of_fetch(moving.wire, "t") == ErrorCode.KAFKA_STORAGE_ERROR
    assert await moving.order(target) == ErrorCode.KAFKA_STORAGE_ERROR


async def test_a_source_that_fails_when_the_controller_knows_already_takes_its_replica_with_it(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(moving.wire, "t", make_batch(b"a"))
    monkeypatch.setattr(replica_moves.ReplicaMoves, "_promote", lambda *_: None)
    source, target = moving.home, moving.other
    assert await moving.order(target) == 0
    await until(lambda: moving.told() == moving.id_of(target))
    moving.disk.fail(source, errno.EIO)
    await send(moving.wire, "t", make_batch(b"b"))
    image = moving.running.node._services.image  # type: ignore[union-attr]
    await until(lambda: image().topics_by_name["t"].partitions[0].leader == -1)


async def test_a_bug_in_one_move_does_not_end_the_others(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    await moving.wire.create_topic("u")
    for topic in ("t", "u"):
        await send(moving.wire, topic, make_batch(b"a"))
    copy = replica_moves.ReplicaMoves._copy

    def careless(moves: Any, replica: Any, directory: Any) -> int:
        if replica.partition.topic == "u":
            raise ZeroDivisionError
        return copy(moves, replica, directory)

    monkeypatch.setattr(replica_moves.ReplicaMoves, "_copy", careless)
    other: Any = moving.running.node._broker.partitions.find("u", 0)  # type: ignore[union-attr]
    where, target = Path(other.log.directory), moving.other
    assert await moving.order(next(home for home in moving.homes if home != where.parent), "u") == 0
    assert await moving.order(target) == 0
    await moving.arrived(target)
    assert Path(other.log.directory) == where


async def test_a_process_without_descriptors_moves_when_it_has_some(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It logged the shortage fifty times a second for each replica."""
    await send(moving.wire, "t", make_batch(b"a"))
    target, refusals = moving.other, iter(range(3))
    read = FutureReplica.read_next

    def refuse(replica: Any, bytes_max: int) -> Any:
        if next(refusals, None) is not None:
            raise OSError(errno.EMFILE, "too many open files")
        return read(replica, bytes_max)

    monkeypatch.setattr(FutureReplica, "read_next", refuse)
    await moving.order(target)
    await moving.arrived(target)
    assert next(refusals, None) is None
    assert await moving.values() == [b"a"]
    assert len([each for each in caplog.messages if each.startswith("cannot move t-0 now")]) == 1


async def test_a_topic_that_is_deleted_moves_no_further(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_moves, "STEP_BYTES", 200)
    monkeypatch.setattr(replica_moves, "IDLE_S", 5)
    for number in range(10):
        await send(moving.wire, "t", make_batch(b"%d" % number))
    await moving.order(moving.other)
    request = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=60_000)
    assert (await moving.wire.call(request, 6, DeleteTopicsResponse)).responses[0].error_code == 0
    assert not moving.moves._moves
    assert not [path for home in moving.homes for path in home.glob("t-0*") if not path.name.endswith("-delete")]


async def test_what_cannot_be_moved_is_refused_as_by_kafka(moving: Moving, tmp_path: Path) -> None:
    assert await moving.order(moving.other, "nowhere") == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert await moving.order(moving.other, "t", 7) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert await moving.order(tmp_path / "elsewhere") == ErrorCode.LOG_DIR_NOT_FOUND
    assert await moving.order(moving.other, "l" * 240) == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert await moving.order(moving.home) == 0
    assert not moving.moves._moves


async def test_a_node_may_stop_while_a_copy_is_synced(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    await send(moving.wire, "t", make_batch(b"a"))
    begun, go_on = threading.Event(), threading.Event()
    target, run, finish = moving.other, FlushTask.run, PartitionLog.finish_flush
    held: set[FlushTask] = set()

    def slowly(task: FlushTask) -> None:
        if any(str(target) in path for path in task.directories):
            held.add(task)
            begun.set()
            go_on.wait(PATIENCE_S)
        run(task)
        held.discard(task)

    def only_then(log: PartitionLog, task: FlushTask, now_ms: int | None = None) -> None:
        assert task not in held
        finish(log, task, now_ms)

    monkeypatch.setattr(FlushTask, "run", slowly)
    monkeypatch.setattr(PartitionLog, "finish_flush", only_then)
    assert await moving.order(target) == 0
    await until(begun.is_set)
    stopping = asyncio.create_task(moving.running.stop())
    await asyncio.sleep(0.05)
    go_on.set()
    await stopping
    await moving.start()
    await moving.arrived(target)
    assert await moving.values() == [b"a"]


async def test_our_own_admin_client_moves_replicas_too(moving: Moving, make_batch: MakeBatch) -> None:
    await send(moving.wire, "t", make_batch(b"a"))
    source, target = moving.home, moving.other
    ours, nobodys = Replica("t", 0, moving.running.node.config.node_id), Replica("no-such", 0, 1)
    async with Admin(bootstrap_servers=f"127.0.0.1:{moving.running.port}") as admin:
        assert await admin.describe_replica_log_dirs([ours, nobodys]) == {ours: ReplicaLogDirs(str(source))}
        await moving.hold_back(1)
        outcomes = await admin.alter_replica_log_dirs({ours: str(target), nobodys: str(target)})
        assert outcomes[ours] is None
        refused = outcomes[nobodys]
        assert refused is not None
        assert refused.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        found = (await admin.describe_replica_log_dirs([ours]))[ours]
        assert found in (ReplicaLogDirs(str(source), str(target)), ReplicaLogDirs(str(target)))
        await moving.hold_back(None)
        await moving.arrived(target)
        assert await admin.describe_replica_log_dirs([ours]) == {ours: ReplicaLogDirs(str(target))}
        outcomes = await admin.alter_replica_log_dirs({ours: "/nowhere"})
        refused = outcomes[ours]
        assert refused is not None
        assert refused.code is ErrorCode.LOG_DIR_NOT_FOUND


async def test_a_replica_that_comes_later_is_made_where_it_is_wanted(moving: Moving) -> None:
    for topic in ("u", "v", "w"):
        assert await moving.order(moving.homes[1], topic) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        await moving.wire.create_topic(topic)
        assert (moving.homes[1] / f"{topic}-0").exists()


async def test_with_a_sync_for_every_record_none_is_shown_before_it_is_on_the_new_device(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    await moving.running.stop()
    await moving.start(**{"log.flush.interval.messages": "1"})
    for number in range(5):
        await send(moving.wire, "t", make_batch(b"%d" % number))
    target = moving.other
    on_loop: list[Any] = []
    monkeypatch.setattr(PartitionLog, "flush", on_loop.append)
    flush, overtaken = replica_moves.ReplicaMoves._flush, asyncio.Event()

    async def slow(moves: Any, found: Any) -> None:
        if overtaken.is_set():
            await flush(moves, found)

    monkeypatch.setattr(replica_moves.ReplicaMoves, "_flush", slow)
    await moving.order(target)
    ((replica, _),) = moving.moves._moves.values()
    await until(lambda: replica.overtaken_times > 1)
    assert moving.home != target, "records that are acknowledged are not on the device there"
    overtaken.set()
    await moving.arrived(target)
    assert not on_loop, "what waits for a device is done on a thread"
    durability = moving.partition.log.durability
    assert (durability.recovery_point, durability.blocked_from) == (5, -1)
    assert await send(moving.wire, "t", make_batch(b"5")) == (0, 5)


async def test_who_waits_for_a_sync_of_the_old_log_is_answered_when_the_new_one_has_it(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    await moving.running.stop()
    await moving.start(**{"log.flush.interval.messages": "1"})
    source, target, gate = str(moving.home), moving.other, threading.Event()
    run, promote = FlushTask.run, replica_moves.ReplicaMoves._promote

    def slow(task: FlushTask) -> None:
        if any(segment.path.startswith(source) for segment, _ in task.segments):
            gate.wait(PATIENCE_S)
        run(task)

    with monkeypatch.context() as patch:
        patch.setattr(replica_moves.ReplicaMoves, "_promote", lambda *_: None)
        await moving.order(target)
        ((replica, _),) = moving.moves._moves.values()
        await until(lambda: replica.state is MoveState.ASSIGNED)
        monkeypatch.setattr(FlushTask, "run", slow)
        sending = asyncio.create_task(send(moving.wire, "t", make_batch(b"a")))
        await until(lambda: replica.log.durability.recovery_point == 1)
    assert replica_moves.ReplicaMoves._promote is promote
    await moving.arrived(target)
    gate.set()
    assert await asyncio.wait_for(sending, PATIENCE_S) == (0, 0)


async def test_a_log_that_is_scrubbed_while_its_move_ends_fails_no_directory(
    moving: Moving, make_batch: MakeBatch
) -> None:
    """After each start the scrubber makes the indexes of active segments anew. Those of this one are gone by then."""
    assert await send(moving.wire, "t", make_batch(b"a")) == (0, 0)
    broker = moving.running.node._broker
    assert broker is not None
    scrubber, may_read, target = broker.scrubber, asyncio.Event(), moving.other
    run = scrubber._run_in_executor

    async def run_later(work: Callable[[], None]) -> None:
        await may_read.wait()
        await run(work)

    scrubber._run_in_executor = run_later
    moving.partition.log.segments.active.max_is_confirmed = False
    scrubbed = asyncio.create_task(scrubber.read_whole(moving.partition))
    await asyncio.sleep(0)
    assert await moving.order(target) == 0
    await moving.arrived(target)
    may_read.set()
    assert not await asyncio.wait_for(scrubbed, PATIENCE_S), "what is there now is another log"
    assert await send(moving.wire, "t", make_batch(b"b")) == (0, 1)
    assert not moving.running.node._directories.offline


@pytest.mark.parametrize("end", ["moved", "deleted"])
async def test_the_errors_of_a_former_log_fail_no_directory(moving: Moving, make_batch: MakeBatch, end: str) -> None:
    """A task in many steps may still use it."""
    assert await send(moving.wire, "t", make_batch(b"a")) == (0, 0)
    partition, former, target = moving.partition, moving.partition.log, moving.other
    broker = moving.running.node._broker
    assert broker is not None
    if end == "moved":
        assert await moving.order(target) == 0
        await moving.arrived(target)
    else:
        request = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=10_000)
        await moving.wire.call(request, 6, DeleteTopicsResponse)
        await until(lambda: moving.partition is None)

    def append() -> None:
        former.append_as_leader(memoryview(bytearray(make_batch(b"b"))), 0, former.clock_ms)

    uses: list[Callable[[], object]] = [lambda: former.segments.first.file, lambda: former.explain_gaps(1)]
    for use in [*uses, append] if end == "deleted" else uses:
        with pytest.raises((CorruptLog, FileNotFoundError)) as caught:
            use()
        assert broker.partitions.refusal(partition, caught.value).code == ErrorCode.KAFKA_STORAGE_ERROR
    await moving.wire.create_topic("u")  # some turns of the loop later
    assert not moving.running.node._directories.offline
    assert await send(moving.wire, "u", make_batch(b"a")) == (0, 0)
    if end == "moved":
        assert await send(moving.wire, "t", make_batch(b"b")) == (0, 1)


@pytest.mark.parametrize("acks", [1, -1])
async def test_a_produce_that_waits_for_a_sync_that_was_put_off_is_answered_after_the_move(
    moving: Moving, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, acks: int
) -> None:
    """The new log has nothing to sync: the request waited until its timeout, and the client sent it again."""
    monkeypatch.setattr(flushes, "SHORTAGE_PAUSE_S", 0.5)
    moving.disk.fail(moving.home, errno.EMFILE, "sync")
    request = produce("t", make_batch(b"a"), acks=acks)
    wire = await moving.running.connect()
    pending = asyncio.ensure_future(wire.call(request, 9, ProduceResponse))
    await until(lambda: bool(moving.partition.log.durability.is_wanted))
    target = moving.other
    assert await moving.order(target) == 0
    await moving.arrived(target)
    assert produced(await asyncio.wait_for(pending, PATIENCE_S)) == [(0, 0)]
