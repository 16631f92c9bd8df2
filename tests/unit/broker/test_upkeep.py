"""Files of deleted segments and topics are removed beside the loop, a directory's one after the other."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S
from tidelog.broker.replicas import upkeep
from tidelog.broker.replicas.upkeep import Upkeep
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.produce import PartitionProduceData, ProduceRequest, ProduceResponse, TopicProduceData
from tidelog.storage.files.checkpoints import HIGH_WATERMARK_FILE
from tidelog.storage.files.disk import OsDisk, is_exhaustion


class Directory:
    """What `maintained` says may be removed is what was put into `due`."""

    path = "d"
    failure: str | None = None
    has_condemned = False

    def __init__(self) -> None:
        self.logs: dict[tuple[str, int], Any] = {}
        self.due: list[str] = []
        self.pieces: list[object] = []
        self.looks = 0

    def maintained(self, now_ms: int, doomed: list[str]) -> Iterator[Any]:
        self.looks += 1
        for each in self.pieces:
            yield each, 0
        doomed += self.due
        self.due = []

    def next_removal_ms(self) -> int | None:
        return None


class Disk:
    """Notes what is removed; `answers` are errors to raise instead, once each."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.answers: dict[str, list[OSError]] = {}

    def remove(self, path: str) -> None:
        if self.answers.get(path):
            raise self.answers[path].pop(0)
        self.removed.append(path)

    def remove_tree(self, path: str) -> None:
        self.remove(f"{path}/")


class Executor:
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        self.given: list[tuple[Callable[[], None], asyncio.Future[None]]] = []

    def __call__(self, work: Callable[[], None]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.given.append((work, future))
        return future

    async def run(self) -> None:
        """The first of them."""
        work, future = self.given.pop(0)
        work()
        future.set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


class Node:
    def __init__(self) -> None:
        self.directory, self.disk, self.executor = Directory(), Disk(), Executor()
        self.failures: list[OSError] = []
        self.upkeep = Upkeep(
            cast(Any, None), cast(Any, self), cast(Any, self), asyncio.get_running_loop(), lambda: 0, self.executor,
            cast(Any, self.disk),
        )  # fmt: skip

    def __iter__(self) -> Any:
        return iter([self.directory])

    def hosted(self) -> list[Any]:
        return []

    def find(self, topic: str, index: int) -> Any:
        return None

    def failed(self, directory: Any, error: OSError) -> None:
        if not is_exhaustion(error):
            self.failures.append(error)

    def look(self, *due: str) -> None:
        self.directory.due += due
        self.upkeep.look_after()


async def test_nothing_is_removed_on_the_loop() -> None:
    node = Node()
    node.look("d/t-0/1.log.deleted", "d/u-0.1-delete")
    assert node.disk.removed == []
    await node.executor.run()
    assert sorted(node.disk.removed) == ["d/t-0/1.log.deleted", "d/u-0.1-delete/"]
    node.look()
    assert node.executor.given == []


async def test_the_logs_are_looked_after_in_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one turn held the clients up, for the longer the more logs there are."""
    monkeypatch.setattr(upkeep, "TURN_S", -1.0)
    node = Node()
    node.directory.pieces = [SimpleNamespace(topic="t", partition=number) for number in range(3)]
    node.look("d/t-0/1.log.deleted")
    node.look("d/t-0/2.log.deleted")  # comes when the first look is over
    turns = 0
    while node.executor.given == [] or node.directory.looks < 2:
        turns += 1
        assert turns < 10
        await asyncio.sleep(0)
    assert turns == 3
    await node.executor.run()
    assert sorted(node.disk.removed) == ["d/t-0/1.log.deleted", "d/t-0/2.log.deleted"]


async def test_idle_producers_are_looked_for_in_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all partitions in one turn, it held the clients up for seconds where clients had made many producers."""
    monkeypatch.setattr(upkeep, "TURN_S", -1.0)
    node, looks = Node(), list[int]()

    def partition(number: int) -> SimpleNamespace:
        return SimpleNamespace(log=SimpleNamespace(expire_producers=lambda now_ms: looks.append(number)))

    def fail(now_ms: int) -> None:
        raise AssertionError(now_ms)

    hosted = [partition(number) for number in range(3)]
    monkeypatch.setattr(node, "hosted", lambda: hosted)
    node.upkeep._expire_producers()
    assert looks == [0]
    node.upkeep._expire_producers()  # while the first look is under way
    hosted.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    assert looks == [0, 1, 2]
    hosted[:] = [SimpleNamespace(log=SimpleNamespace(expire_producers=fail))]
    node.upkeep._expire_producers()
    hosted[:] = [partition(3)]
    node.upkeep._expire_producers()
    assert looks == [0, 1, 2, 3]


async def test_a_look_that_fails_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()

    def fail(directory: Any) -> None:
        raise AssertionError(directory)

    with monkeypatch.context() as patch:
        patch.setattr(node.upkeep, "_remove", fail)
        node.look("d/t-0/1.log.deleted")
    node.look("d/t-0/2.log.deleted")
    await node.executor.run()
    assert sorted(node.disk.removed) == ["d/t-0/1.log.deleted", "d/t-0/2.log.deleted"]


async def test_index_rows_are_saved_with_each_checkpoint() -> None:
    node, saved = Node(), list[int]()
    segment = SimpleNamespace(save_offset_rows=lambda: saved.append(1))
    node.directory.logs = {("t", 0): SimpleNamespace(segments=SimpleNamespace(active=segment))}
    directory: Any = node.directory
    directory.checkpoint_steps = lambda: iter([SimpleNamespace(run=lambda: None)])
    directory.finish_checkpoints = lambda ended: False
    for count in (1, 2):
        node.upkeep.checkpoint()
        assert len(saved) == count
        await node.executor.run()


async def test_a_checkpoint_takes_its_steps_in_turns_of_the_loop() -> None:
    """All logs in one turn held the clients up, for the longer the more logs there are."""
    node = Node()
    task = SimpleNamespace(run=lambda: None)
    directory: Any = node.directory
    directory.checkpoint_steps = lambda: iter([None, None, task])
    directory.finish_checkpoints = lambda ended: False
    node.upkeep.checkpoint()
    node.upkeep.checkpoint()  # one is under way
    turns = 0
    while not node.executor.given:
        turns += 1
        assert turns < 10
        await asyncio.sleep(0)
    assert turns == 2
    await node.executor.run()
    assert not node.executor.given
    node.upkeep.checkpoint()
    node.upkeep.close()
    for _ in range(4):
        await asyncio.sleep(0)
    assert not node.executor.given, "its logs are being closed"


def step_that_fails(task: Any) -> Iterator[Any]:
    yield None
    raise AssertionError(task)


@pytest.mark.parametrize("part", ["step", "end", "retirement"])
async def test_a_checkpoint_that_fails_is_followed_by_others(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed under way for ever: no offsets were written any more, and no segment was deleted."""
    node = Node()
    task = SimpleNamespace(run=lambda: None, sync=lambda: None)
    directory: Any = node.directory

    def fail(*_: object) -> bool:
        raise AssertionError(part)

    directory.checkpoint_steps = lambda: step_that_fails(task) if part == "step" else iter([task])
    directory.finish_checkpoints = fail if part == "end" else lambda ended: True
    directory.synced_checkpoint_steps = lambda *_: step_that_fails(task)
    node.upkeep.checkpoint()
    for _ in range(3):
        await asyncio.sleep(0)
        if node.executor.given:
            await node.executor.run()
    directory.checkpoint_steps = lambda: iter([task])
    node.upkeep.checkpoint()
    assert node.executor.given


async def test_files_of_expired_segments_are_renamed_in_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 5,000 logs took 0.3 s in one turn, and more on a busy disk."""
    monkeypatch.setattr(upkeep, "TURN_S", -1.0)
    node = Node()
    task = SimpleNamespace(run=lambda: None, sync=lambda: None)
    directory: Any = node.directory
    pieces = list(range(6))
    directory.checkpoint_steps = lambda: iter([task])
    directory.finish_checkpoints = lambda ended: True
    directory.synced_checkpoint_steps = lambda *_: iter(lambda: pieces.pop() if pieces else None, None)
    node.upkeep.checkpoint()
    await node.executor.run()
    await node.executor.run()
    assert 3 <= len(pieces) < 6
    for left in reversed(range(len(pieces))):
        node.upkeep.checkpoint()
        assert not node.executor.given, "it is not over"
        await asyncio.sleep(0)
        assert len(pieces) == left
    await asyncio.sleep(0)
    node.upkeep.checkpoint()
    assert node.executor.given


async def test_no_log_is_looked_after_when_the_node_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "TURN_S", -1.0)
    node = Node()
    node.directory.pieces = [SimpleNamespace(topic="t", partition=number) for number in range(3)]
    node.look("d/t-0/1.log.deleted")
    node.upkeep.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (node.executor.given, node.directory.due) == ([], ["d/t-0/1.log.deleted"])


async def test_one_removal_of_a_directory_at_a_time() -> None:
    node = Node()
    node.look("d/t-0/1.log.deleted")
    node.look("d/t-0/2.log.deleted")
    node.look("d/t-0/3.log.deleted")
    assert len(node.executor.given) == 1
    await node.executor.run()
    assert node.disk.removed == ["d/t-0/1.log.deleted"]
    await node.executor.run()
    assert sorted(node.disk.removed) == [f"d/t-0/{number}.log.deleted" for number in (1, 2, 3)]
    assert node.executor.given == []


async def test_what_is_gone_already_is_no_failure() -> None:
    node = Node()
    node.disk.answers = {"d/t-0/1.log.deleted": [FileNotFoundError(errno.ENOENT, "gone")]}
    node.look("d/t-0/1.log.deleted", "d/t-0/2.log.deleted")
    await node.executor.run()
    assert (node.disk.removed, node.failures, node.executor.given) == (["d/t-0/2.log.deleted"], [], [])


async def test_want_of_descriptors_puts_it_off() -> None:
    node = Node()
    node.disk.answers = {"d/u-0.1-delete/": [OSError(errno.EMFILE, "Too many open files")]}
    node.look("d/u-0.1-delete")
    await node.executor.run()
    assert (node.disk.removed, node.failures, node.executor.given) == ([], [], [])
    node.look()
    await node.executor.run()
    assert node.disk.removed == ["d/u-0.1-delete/"]


async def test_a_device_that_refuses_takes_its_directory() -> None:
    node = Node()
    node.disk.answers = {"d/t-0/1.log.deleted": [OSError(errno.EIO, "no")]}
    node.look("d/t-0/1.log.deleted")
    await node.executor.run()
    assert [error.errno for error in node.failures] == [errno.EIO]
    node.look()
    assert node.executor.given == []


async def test_a_stop_does_not_wait_for_all_of_it() -> None:
    node = Node()
    node.look("d/t-0/1.log.deleted", "d/t-0/2.log.deleted")
    node.upkeep.close()
    await node.executor.run()
    assert (node.disk.removed, node.executor.given) == ([], [])


async def test_a_deleted_topic_goes_from_the_disk(start_node: Any, make_batch: Any, monkeypatch: Any) -> None:
    threads: set[int] = set()
    remove = OsDisk.remove_tree

    def noted(disk: OsDisk, path: str) -> None:
        threads.add(threading.get_ident())
        remove(disk, path)

    monkeypatch.setattr(OsDisk, "remove_tree", noted)
    running = await start_node(**{"log.retention.check.interval.ms": "20", "log.segment.delete.delay.ms": "0"})
    wire = await running.connect()
    await wire.create_topic("t")
    data = [PartitionProduceData(index=0, records=make_batch(b"x"))]
    request = ProduceRequest(acks=1, timeout_ms=5000, topic_data=[TopicProduceData(name="t", partition_data=data)])
    assert (await wire.call(request, 9, ProduceResponse)).responses[0].partition_responses[0].error_code == 0
    deletion = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=5000)
    assert (await wire.call(deletion, 6, DeleteTopicsResponse)).responses[0].error_code == 0
    async with asyncio.timeout(PATIENCE_S):
        while _left(running):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert threads
    assert threading.get_ident() not in threads


async def produce(wire: Any, batch: Any, topic: str = "t") -> None:
    data = [PartitionProduceData(index=0, records=batch)]
    request = ProduceRequest(acks=1, timeout_ms=5000, topic_data=[TopicProduceData(name=topic, partition_data=data)])
    assert (await wire.call(request, 9, ProduceResponse)).responses[0].partition_responses[0].error_code == 0


@pytest.fixture
def no_retention_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not within the test: log.retention.check.interval.ms is five minutes."""
    monkeypatch.setattr(upkeep, "FIRST_RETENTION_MS", 300_000)


@pytest.mark.usefixtures("no_retention_check")
async def test_what_is_deleted_goes_when_its_delay_is_over_and_waits_for_no_look(
    start_node: Any, make_batch: Any
) -> None:
    options = {"log.segment.delete.delay.ms": "200", "replica.high.watermark.checkpoint.interval.ms": "20"}
    running = await start_node(**options)
    wire = await running.connect()
    await wire.create_topic("t")
    await wire.create_topic("u")
    await produce(wire, make_batch(b"x"))
    log = running.node._directories.metadata.logs["u", 0]
    log.append_as_leader(memoryview(bytearray(make_batch(b"x"))), 0, 1, from_client=False)
    log.roll(1)
    log.segments.drop_last(1, running.node._ports.clock_ms() + 200)
    assert _left(running, "u-0")
    deletion = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=5000)
    assert (await wire.call(deletion, 6, DeleteTopicsResponse)).responses[0].error_code == 0
    async with asyncio.timeout(PATIENCE_S):
        while _left(running) or any(name.endswith(".deleted") for name in _left(running, "u-0/")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("no_retention_check")
async def test_a_deleted_topic_goes_after_its_entries_in_the_checkpoints(
    start_node: Any, make_batch: Any, monkeypatch: Any
) -> None:
    """A log that the checkpoints name, and whose directory is gone, is missed by the next start."""
    named: list[bool] = []
    remove = OsDisk.remove_tree

    def noted(disk: OsDisk, path: str) -> None:
        offsets = disk.read_file(f"{directory.path}/{HIGH_WATERMARK_FILE}")
        named.append(b"t 0 1" in offsets)
        remove(disk, path)

    options = {"log.segment.delete.delay.ms": "0", "log.retention.check.interval.ms": "20"}
    running = await start_node(**options, **{"replica.high.watermark.checkpoint.interval.ms": "3600000"})
    directory = running.node._directories.metadata
    wire = await running.connect()
    await wire.create_topic("t")
    await produce(wire, make_batch(b"x"))
    directory.write_checkpoints()
    assert b"t 0 1" in OsDisk().read_file(f"{directory.path}/{HIGH_WATERMARK_FILE}")
    monkeypatch.setattr(OsDisk, "remove_tree", noted)
    deletion = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=5000)
    assert (await wire.call(deletion, 6, DeleteTopicsResponse)).responses[0].error_code == 0
    async with asyncio.timeout(PATIENCE_S):
        while _left(running):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert named == [False]


async def test_retention_waits_for_the_device_beside_the_loop(
    start_node: Any, make_batch: Any, monkeypatch: Any
) -> None:
    """On the loop, a sync or a removal behind the syncs of full segments held up all clients for a second."""
    waits: list[tuple[str, str]] = []
    loop_thread = threading.get_ident()

    def note(name: str) -> None:
        call = getattr(OsDisk, name)

        def noted(disk: OsDisk, path: str, *rest: Any, **options: Any) -> Any:
            if threading.get_ident() == loop_thread and options.get("sync", True):
                waits.append((name, path))
            return call(disk, path, *rest, **options)

        monkeypatch.setattr(OsDisk, name, noted)

    options = {"log.retention.check.interval.ms": "20", "log.segment.delete.delay.ms": "0"}
    running = await start_node(**options, **{"replica.high.watermark.checkpoint.interval.ms": "300000"})
    wire = await running.connect()
    await wire.create_topic("t", retention_bytes="1")
    log = running.node._directories.metadata.logs["t", 0]
    for _ in range(3):
        await produce(wire, make_batch(b"x"))
        log.roll(1)
    snapshots = len([name for name in _left(running, "t-0/") if name.endswith(".snapshot")])
    for name in ("remove", "sync_directory", "write_file"):
        note(name)
    async with asyncio.timeout(PATIENCE_S):
        while len([name for name in _left(running, "t-0/") if ".log" in name]) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while any(name.endswith(".deleted") for name in _left(running, "t-0/")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert waits == []
    assert len([name for name in _left(running, "t-0/") if name.endswith(".snapshot")]) < snapshots


@pytest.mark.usefixtures("no_retention_check")
async def test_records_are_flushed_by_the_flush_scheduler(start_node: Any, make_batch: Any) -> None:
    """log.flush.interval.ms was looked at only with retention, every five minutes."""
    running = await start_node(**{"log.flush.interval.ms": "50", "log.flush.scheduler.interval.ms": "20"})
    wire = await running.connect()
    await wire.create_topic("t")
    await produce(wire, make_batch(b"x"))
    log = running.node._directories.metadata.logs["t", 0]
    async with asyncio.timeout(PATIENCE_S):
        while log.durability.recovery_point < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("no_retention_check")
async def test_producers_are_forgotten_when_they_are_looked_for(start_node: Any, make_batch: Any) -> None:
    options = {"producer.id.expiration.ms": "20", "producer.id.expiration.check.interval.ms": "20"}
    running = await start_node(**options)
    wire = await running.connect()
    await wire.create_topic("t")
    await produce(wire, make_batch(b"x", producer_id=7, producer_epoch=0, base_sequence=0))
    producers = running.node._directories.metadata.logs["t", 0].producers
    async with asyncio.timeout(PATIENCE_S):
        while len(producers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_log_whose_index_keeps_retention_off_is_scrubbed_at_once(start_node: Any, make_batch: Any) -> None:
    """Also where the scrubber is off: retention would never be applied to it."""
    running = await start_node(**{"log.retention.check.interval.ms": "20", "log.scrub.bytes.per.second": "0"})
    wire = await running.connect()
    await wire.create_topic("t")
    await produce(wire, make_batch(b"x", timestamp=time.time_ns() // 1_000_000))  # retention must not take it before
    segment = running.node._directories.metadata.logs["t", 0].segments.active
    newest, segment.max_timestamp, segment.max_is_confirmed = segment.max_timestamp, 2**62, False
    segment.filed_max = 2**62, 0, segment.size_bytes
    async with asyncio.timeout(PATIENCE_S):
        while segment.max_timestamp != newest:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert segment.max_is_confirmed


async def test_timers_are_kafkas(monkeypatch: Any) -> None:
    waits: list[float] = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later

    def noted(delay: float, *rest: Any) -> asyncio.TimerHandle:
        waits.append(delay)
        return call_later(delay, *rest)

    monkeypatch.setattr(loop, "call_later", noted)
    node = Node()
    values = {
        "replica.high.watermark.checkpoint.interval.ms": 5_000,
        "log.retention.check.interval.ms": 300_000,
        "log.flush.scheduler.interval.ms": 2**63 - 1,
        "producer.id.expiration.check.interval.ms": 600_000,
        "replica.lag.time.max.ms": 30_000,
    }
    node.upkeep._config = cast(Any, SimpleNamespace(integer=values.__getitem__))
    node.upkeep.start()
    node.upkeep.close()
    assert waits[:2] == [5, 30]
    assert waits[3:] == [600, 15]


def _left(running: Any, prefix: str = "t-0") -> list[str]:
    directory = running.node._directories.metadata
    path, _, start = f"{directory.path}/{prefix}".rpartition("/")
    return [entry.name for entry in directory._disk.list_directory(path) if entry.name.startswith(start)]


async def test_nothing_more_is_removed_once_the_node_stops() -> None:
    node = Node()
    node.look("d/t-0/1.log.deleted")
    node.look("d/t-0/2.log.deleted")
    (work, future), *_ = node.executor.given
    work()
    node.upkeep.close()
    future.set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(node.executor.given) == 1, "its threads are about to end, and its directories to be closed"
