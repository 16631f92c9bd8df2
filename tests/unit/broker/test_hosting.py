"""What a node does with directories and logs that are not as it left them: it loses nothing and serves the rest."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.scraping import commit
from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tests.unit.storage.batches import NOW, batch
from tidelog.broker import broker_side
from tidelog.broker.replicas import hosting
from tidelog.broker.replicas.discovered_logs import DiscoveredLogs
from tidelog.broker.replicas.hosting import Hosting
from tidelog.protocol.errors import ConfigError, ErrorCode
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup, OffsetFetchResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.protocol.uuids import UNASSIGNED_DIRECTORY
from tidelog.replication.controller.metadata.image import TOPIC_RESOURCE, MetadataDelta, MetadataImage
from tidelog.storage.files.checkpoints import CheckpointTask, encode_partition_metadata
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.files.meta_properties import ForeignDirectory
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.append import UnexplainedGap
from tidelog.storage.segments.log_config import LogConfig

MakeBatch = Callable[..., bytes]


def snapshot_of(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir() if each.is_file() and each.name != ".lock"}


@pytest.mark.parametrize("clean", [True, False])
async def test_a_start_that_fails_leaves_the_checkpoints_and_the_marker_as_they_were(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, clean: bool
) -> None:
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    await node.stop()
    data = tmp_path / "data"
    if not clean:
        (data / ".kafka_cleanshutdown").unlink()
    before = snapshot_of(data)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "something").write_text("else")
    with pytest.raises(ForeignDirectory):
        await start_node(**{"log.dirs": f"{data},{tmp_path / 'foreign'}"})
    assert snapshot_of(data) == before


@pytest.mark.parametrize("is_formatted", [True, False])
@pytest.mark.parametrize("key", ["log.dirs", "metadata.log.dir"])
async def test_a_node_whose_metadata_log_lies_in_another_directory_does_not_begin_a_new_one(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, key: str, is_formatted: bool
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    node = await start_node(**{"log.dirs": f"{old},{new}" if is_formatted else str(old)})
    wire = await node.connect()
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    await node.stop()
    assert new.exists() == is_formatted
    changed = {"log.dirs": f"{new},{old}"} if key == "log.dirs" else {"log.dirs": str(old), key: str(new)}
    with pytest.raises(ConfigError, match=rf"{old} has the metadata log .* {new}, .*metadata\.log\.dir={old}"):
        await start_node(**changed)
    assert new.exists() == is_formatted, "a directory of another cluster would be in the way later"

    node = await start_node(**{"log.dirs": f"{new},{old}", "metadata.log.dir": str(old)})
    wire = await node.connect()
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == [b"a"]


@pytest.mark.parametrize("how", ["dropped", "empty", "moved"])
async def test_a_node_without_its_metadata_log_does_not_forget_the_topics_in_other_directories(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, how: str
) -> None:
    """It set their logs aside, and created the topics again; with the old directory back these were empty."""
    metadata, data = tmp_path / "metadata", tmp_path / "data"
    before = {"log.dirs": f"{metadata},{data}", "cordoned.log.dirs": str(metadata)}
    node = await start_node(**before)
    wire = await node.connect()
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    await node.stop()
    assert (data / "t-0").exists()
    unmounted = metadata.rename(tmp_path / "unmounted") if how != "dropped" else metadata
    after = {"empty": before, "dropped": {"log.dirs": str(data)}}
    elsewhere = {"log.dirs": str(data), "metadata.log.dir": str(tmp_path / "new")}
    with pytest.raises(ConfigError, match=rf"{data} has logs of topics, .* volume not mounted"):
        await start_node(**after.get(how, elsewhere))
    assert (data / "t-0").exists()
    assert not (tmp_path / "new").exists()
    if how != "dropped":
        unmounted.rename(metadata)
    node = await start_node(**before)
    wire = await node.connect()
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == [b"a"]


async def test_a_log_that_cannot_be_opened_is_offline_and_the_node_lives_on(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path
) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    both = {"log.dirs": ",".join(map(str, directories))}
    node = await start_node(**both)
    wire = await node.connect()
    await wire.create_topic("bad")
    await wire.create_topic("good")
    for topic in ("bad", "good"):
        await wire.call(produce(topic, make_batch(b"x")), 9, ProduceResponse)
    await node.stop()
    (log,) = [path for each in directories for path in each.glob("bad-0/*.log")]
    log.unlink()
    log.mkdir()

    node = await start_node(**both)
    wire = await node.connect()
    assert fetched(await wire.call(fetch("good"), 11, FetchResponse)) == [b"x"]
    answer = await wire.call(fetch("bad"), 11, FetchResponse)
    assert answer.responses[0].partitions[0].error_code == ErrorCode.KAFKA_STORAGE_ERROR
    answer = await wire.call(produce("bad", make_batch(b"y")), 9, ProduceResponse)
    assert produced(answer) == [(ErrorCode.KAFKA_STORAGE_ERROR, -1)]
    assert sum(len(list(each.glob("bad-0"))) for each in directories) == 1, "an empty log must not take its place"

    request = DeleteTopicsRequest(topics=[DeleteTopicState(name="bad")], timeout_ms=60_000)
    assert (await wire.call(request, 6, DeleteTopicsResponse)).responses[0].error_code == 0
    await wire.create_topic("bad")
    assert produced(await wire.call(produce("bad", make_batch(b"new")), 9, ProduceResponse)) == [(0, 0)]


async def test_what_compaction_left_out_is_no_damage_when_the_topic_is_not_compacted_any_more(start_node: Any) -> None:
    """These offsets are missing in a copy of a log that was cleaned: no checkpoint of this cleaner explains it."""
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", cleanup_policy="compact")
    partition = node.node._broker.partitions.find("t", 0)
    for base_offset in (0, 7):
        partition.log.append_as_follower(batch(key=b"k", base_offset=base_offset, leader_epoch=0), NOW)
    config = AlterableConfig(name="cleanup.policy", config_operation=0, value="delete")
    resource = AlterConfigsResource(resource_type=2, resource_name="t", configs=[config])
    request = IncrementalAlterConfigsRequest(resources=[resource])
    await wire.call(request, 1, IncrementalAlterConfigsResponse)
    await until(lambda: not partition.log.config.is_compacted)
    await node.stop()

    node = await start_node()
    wire = await node.connect()
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == [b"value", b"value"]
    log = node.node._broker.partitions.find("t", 0).log
    assert not log.damaged_ranges()
    with pytest.raises(UnexplainedGap):
        log.append_as_follower(batch(base_offset=9, leader_epoch=1), NOW)


async def test_logs_that_the_metadata_does_not_know_are_kept_aside(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path
) -> None:
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(b"precious")), 9, ProduceResponse)
    await node.stop()
    (tmp_path / "data" / "t-0").rename(tmp_path / "data" / "u-0")
    node = await start_node(**{"log.segment.delete.delay.ms": "0"})
    node.node._broker._upkeep.look_after()
    wire = await node.connect()
    await wire.create_topic("u")
    assert fetched(await wire.call(fetch("u"), 11, FetchResponse)) == []
    (stray,) = (tmp_path / "data").glob("u-0.*-stray")
    assert b"precious" in (stray / "00000000000000000000.log").read_bytes()


async def test_a_start_writes_the_checkpoints_once_for_all_replicas_of_topics_that_were_created_anew(
    start_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three synced files for each of them: a start with 300 took more than a minute, and a voter was deaf meanwhile."""
    names = [f"t{number}" for number in range(20)]
    node = await start_node()
    wire = await node.connect()
    for name in names:
        await wire.create_topic(name)
    await node.stop()
    for name in names:
        former = encode_partition_metadata(name.encode().rjust(16))
        (tmp_path / "data" / f"{name}-0" / "partition.metadata").write_bytes(former)
    written: list[int] = []
    write_checkpoints = LogDirectory.write_checkpoints

    def count(self: LogDirectory) -> None:
        written.append(len(self.logs))
        write_checkpoints(self)

    monkeypatch.setattr(LogDirectory, "write_checkpoints", count)
    node = await start_node()
    assert len(written) == 1
    assert len(list((tmp_path / "data").glob("*-stray"))) == len(names)
    assert len(list(node.node._broker.partitions.hosted())) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["another id", "merged"])
async def test_a_node_with_one_directory_reports_it_when_it_was_another_before(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, how: str
) -> None:
    """The controller took the replicas for those of a directory that is offline, and none of them led again."""
    homes = {tmp_path / "a", tmp_path / "b"} if how == "merged" else {tmp_path / "a"}
    metadata = {"metadata.log.dir": str(tmp_path / "metadata")}
    node = await start_node(**metadata, **{"log.dirs": ",".join(map(str, homes))})
    wire = await node.connect()
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    image = node.node._services.image
    await until(lambda: image().topics_by_name["t"].partitions[0].directory_of(1) != UNASSIGNED_DIRECTORY)
    await node.stop()
    (home,) = (each for each in homes if (each / "t-0").exists())
    if how == "merged":
        (other,) = homes - {home}
        home = (home / "t-0").rename(other / "t-0").parent
    else:
        properties = (home / "meta.properties").read_text().splitlines(keepends=True)
        (home / "meta.properties").write_text("".join(line for line in properties if "directory.id" not in line))
    # With no directory as before, the registration waits until the former session is over.
    session = {"broker.session.timeout.ms": "1500", "broker.heartbeat.interval.ms": "100"}
    node = await start_node(**metadata, **session, **{"log.dirs": str(home)})
    wire = await node.connect()
    await until(lambda: node.node._services.image().topics_by_name["t"].partitions[0].leader == 1)
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == [b"a"]


async def test_a_directory_for_metadata_alone_takes_no_partitions(start_node: Any, tmp_path: Path) -> None:
    node = await start_node(**{"metadata.log.dir": str(tmp_path / "metadata")})
    wire = await node.connect()
    await wire.create_topic("t", 5)
    assert len(list((tmp_path / "data").glob("t-*"))) == 5
    await node.stop()
    node = await start_node(**{"metadata.log.dir": str(tmp_path / "metadata")})
    assert all(directory.was_clean for directory in node.node._directories)


async def test_a_copy_of_another_log_directory_is_refused_and_nothing_is_lost(start_node: Any, tmp_path: Path) -> None:
    """The node ended with the controller's INVALID_REGISTRATION, which names no directory."""
    homes = [tmp_path / "a", tmp_path / "b"]
    node = await start_node(**{"log.dirs": f"{homes[0]},{homes[1]}"})
    await node.stop()
    whole = (homes[1] / "meta.properties").read_bytes()
    (homes[1] / "meta.properties").write_bytes((homes[0] / "meta.properties").read_bytes())
    with pytest.raises(ForeignDirectory, match=r"b has the directory\.id of .*a: one is a copy of the other"):
        await start_node(**{"log.dirs": f"{homes[0]},{homes[1]}"})
    (homes[1] / "meta.properties").write_bytes(whole)
    node = await start_node(**{"log.dirs": f"{homes[0]},{homes[1]}"})
    assert all(directory.was_clean for directory in node.node._directories)


async def test_a_directory_that_cannot_be_closed_does_not_keep_the_others_open(
    start_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node(**{"log.dirs": f"{tmp_path / 'a'},{tmp_path / 'b'}"})
    real = LogDirectory.write_checkpoints

    def write_checkpoints(directory: LogDirectory) -> None:
        if directory.path.endswith("/a"):
            raise OSError(28, "No space left on device")
        real(directory)

    monkeypatch.setattr(LogDirectory, "write_checkpoints", write_checkpoints)
    await node.stop()
    assert not (tmp_path / "a" / ".kafka_cleanshutdown").exists()
    assert (tmp_path / "b" / ".kafka_cleanshutdown").exists()
    for name in ("a", "b"):
        OsDisk().lock(str(tmp_path / name / ".lock")).release()


async def test_a_part_that_fails_to_close_does_not_keep_the_logs_from_being_closed(
    start_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()

    async def close() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(node.node._channels, "close", close)
    await node.stop()
    assert (tmp_path / "data" / ".kafka_cleanshutdown").exists()


async def test_checkpoints_wait_for_the_device_on_another_thread_and_never_replace_newer_ones(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t")
    upkeep, directory = node.node._broker._upkeep, node.node._directories.metadata
    written, threads = asyncio.Event(), set()
    real = CheckpointTask.run

    def run(task: CheckpointTask) -> None:
        threads.add(threading.current_thread())
        real(task)
        loop.call_soon_threadsafe(written.set)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(CheckpointTask, "run", run)
    upkeep.checkpoint()
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    directory.write_checkpoints()
    await asyncio.wait_for(written.wait(), PATIENCE_S)
    await until(lambda: not upkeep._checkpointing)
    high_watermarks = tmp_path / "data" / "replication-offset-checkpoint"
    assert threading.current_thread() not in threads
    assert "t 0 1" in high_watermarks.read_text(), "the older one came later"
    await wire.call(produce("t", make_batch(b"b")), 9, ProduceResponse)
    written.clear()
    upkeep.checkpoint()
    await asyncio.wait_for(written.wait(), PATIENCE_S)
    await until(lambda: not upkeep._checkpointing)
    assert "t 0 2" in high_watermarks.read_text()


async def test_a_node_measures_how_long_its_new_logs_take(start_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a hundred are created in one turn of its loop, on busy processors too."""
    stopwatches = []

    class Watched(Hosting):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            stopwatches.append(self._stopwatch)

    monkeypatch.setattr(broker_side, "Hosting", Watched)
    await start_node()
    (stopwatch,) = stopwatches
    began_s = stopwatch()
    await until(lambda: stopwatch() > began_s)


async def test_new_logs_are_told_of_requests_that_wait(start_node: Any) -> None:
    node = (await start_node()).node
    hosting, scheduler = node._broker._hosting, node._services.scheduler
    before = hosting.pauses()
    await scheduler.pause()
    await scheduler.pause(for_records=True)
    assert hosting.pauses() == before + 2


async def test_a_start_hosts_its_replicas_in_turns_and_serves_only_after_the_last(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one turn ten thousand would stop a node that leads the metadata quorum."""
    monkeypatch.setattr(hosting, "NEW_LOGS_S", PATIENCE_S)
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", 30)
    answer = await wire.call(produce("t", *(make_batch(b"a") for _ in range(30))), 9, ProduceResponse)
    assert produced(answer) == [(0, 0)] * 30
    await node.stop()
    turns: list[int] = []

    class Watched(Hosting):
        def _begin_turn(self) -> None:
            super()._begin_turn()
            turns.append(0)

        def _host(self, *arguments: Any) -> Any:
            turns[-1] += 1
            return super()._host(*arguments)

        def start(self) -> None:
            assert not self._deferred_partitions
            assert sum(turns) == 30
            super().start()

    monkeypatch.setattr(broker_side, "Hosting", Watched)
    monkeypatch.setattr(hosting, "NEW_LOGS_PER_TURN_MAX", 7)
    node = await start_node()
    assert max(turns) == 7
    assert len(list((tmp_path / "data").glob("t-*"))) == 30, "none was set aside"
    wire = await node.connect()
    answer = await wire.call(produce("t", *(make_batch(b"b") for _ in range(30))), 9, ProduceResponse)
    assert produced(answer) == [(0, 1)] * 30


def cleanup_policy(topic: str, value: str) -> IncrementalAlterConfigsRequest:
    config = AlterableConfig(name="cleanup.policy", config_operation=0, value=value)
    return IncrementalAlterConfigsRequest(
        resources=[AlterConfigsResource(resource_type=2, resource_name=topic, configs=[config])]
    )


async def hosting_topic(node: Any, wire: Any, count: int, **configs: str) -> Any:
    """The node's partitions, which are the `count` ones of a new topic `t`."""
    await wire.create_topic("t", count, **configs)
    partitions = node.node._broker.partitions
    await until(lambda: len(list(partitions.hosted())) == count)
    return partitions


async def compacted_logs(node: Any, wire: Any) -> list[PartitionLog]:
    partitions = await hosting_topic(node, wire, 30, cleanup_policy="compact")
    return [partitions.find("t", index).log for index in range(30)]


async def test_a_change_of_settings_leaves_the_loop_turns_for_others(
    start_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 replicas that cease to be compacted took 2.8 s, without heartbeats."""
    node = await start_node()
    wire = await node.connect()
    logs = await compacted_logs(node, wire)
    set_config, changed_in_turn, turn = hosting._set_config, [], 0

    def slow(*arguments: Any) -> None:
        time.sleep(hosting.CONFIGS_S / 4)
        changed_in_turn.append(turn)
        set_config(*arguments)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(hosting, "_set_config", slow)
    others = asyncio.create_task(count_turns())
    try:
        await wire.call(cleanup_policy("t", "delete"), 1, IncrementalAlterConfigsResponse)
        await until(lambda: not any(log.config.is_compacted for log in logs))
    finally:
        others.cancel()
    assert len(changed_in_turn) == 30
    assert max(changed_in_turn.count(each) for each in changed_in_turn) <= 5


async def test_a_change_of_roles_leaves_the_loop_turns_for_others(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death of a broker took 130 ms of the others where it led or followed 5,000 replicas."""
    node = await start_node()
    wire = await node.connect()
    partitions = await hosting_topic(node, wire, 30)
    image = node.node._metadata.tracker.image
    topic = image.topics_by_name["t"]
    elected = {n: replace(each, leader_epoch=5, partition_epoch=9) for n, each in topic.partitions.items()}
    newer = replace(topic, partitions=elected)
    in_turn = list[int]()

    class Watched(Hosting):
        def _begin_turn(self) -> None:
            super()._begin_turn()
            in_turn.append(0)

        def _apply_role(self, *arguments: Any) -> None:
            in_turn[-1] += 1
            super()._apply_role(*arguments)

    monkeypatch.setattr(hosting, "ROLES_PER_TURN_MAX", 7)
    host = node.node._broker._hosting
    host.__class__ = Watched
    topics = {**image.topics_by_id, topic.topic_id: newer}
    host.apply(
        replace(image, topics_by_id=topics, topics_by_name={**image.topics_by_name, "t": newer}),
        MetadataDelta(changed_partitions={topic.topic_id: set(range(30))}),
    )
    assert in_turn == [7]
    await until(lambda: {each.leader_epoch for each in partitions.hosted()} == {5})
    assert in_turn == [7, 7, 7, 7, 2]
    answer = await wire.call(produce("t", *(make_batch(b"a") for _ in range(30))), 9, ProduceResponse)
    assert produced(answer) == [(0, 0)] * 30


@pytest.mark.parametrize("per_turn", [1000, 7])
async def test_a_role_that_fails_leaves_no_other_one_undone(
    start_node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, per_turn: int
) -> None:
    """Those behind it waited for ever, and with them the roles of all later images."""
    node = await start_node()
    partitions = await hosting_topic(node, await node.connect(), 30)
    image, host = node.node._metadata.tracker.image, node.node._broker._hosting
    changed = {topic.topic_id: set(topic.partitions) for topic in image.topics_by_id.values()}
    monkeypatch.setattr(hosting, "ROLES_PER_TURN_MAX", per_turn)

    class Failing(Hosting):
        def _apply_role(self, partition: Any, assignment: Any) -> None:
            if partition.index in (3, 10) and assignment.leader_epoch == 5:
                raise AssertionError("planted")
            super()._apply_role(partition, assignment)

    host.__class__ = Failing
    host.apply(led_by(image, 1, 5), MetadataDelta(changed_partitions=changed))
    await until(lambda: sum(each.leader_epoch == 5 for each in partitions.hosted()) == 28)
    reported = [each.getMessage() for each in caplog.records if each.levelname == "ERROR" and each.exc_info]
    assert reported == [f"cannot apply the metadata of t-{index}" for index in (3, 10)]
    host.apply(led_by(image, 1, 6), MetadataDelta(changed_partitions=changed))
    await until(lambda: {each.leader_epoch for each in partitions.hosted()} == {6})


async def test_a_deletion_that_fails_leaves_no_other_one_undone(
    start_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    partitions, host = await hosting_topic(node, await node.connect(), 3), node.node._broker._hosting
    topic = node.node._metadata.tracker.image.topics_by_name["t"]
    delete = host._delete_replica

    def failing(deleted: Any, index: int) -> None:
        if index == 1:
            raise AssertionError("planted")
        delete(deleted, index)

    monkeypatch.setattr(host, "_delete_replica", failing)
    host.apply(node.node._metadata.tracker.image, MetadataDelta(deleted_topics={topic.topic_id: topic}))
    assert [each.index for each in partitions.hosted()] == [1]


async def test_a_new_coordinator_deletes_the_offsets_of_topics_that_are_deleted_after_its_election(
    start_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its role came in a later turn than the deletion, and the offsets stayed for ever."""
    node = await start_node()
    wire = await node.connect()
    await wire.create_topic("t", 3)
    await wire.create_topic("kept")
    await wire.call(FindCoordinatorRequest(coordinator_keys=["g"]), 4, FindCoordinatorResponse)
    await commit(wire, "g", "t", 1)
    await commit(wire, "g", "kept", 1)
    broker, image = node.node._broker, node.node._metadata.tracker.image
    changed = {topic.topic_id: set(topic.partitions) for topic in image.topics_by_id.values()}
    broker.on_image(led_by(image, -1, 4), MetadataDelta(changed_partitions=changed))
    elected = led_by(image, 1, 5)
    deleted = elected.topics_by_name["t"]
    rest = {topic_id: topic for topic_id, topic in elected.topics_by_id.items() if topic is not deleted}
    newest = replace(elected, topics_by_id=rest, topics_by_name={each.name: each for each in rest.values()})
    monkeypatch.setattr(hosting, "ROLES_PER_TURN_MAX", 1)
    broker.on_image(elected, MetadataDelta(changed_partitions=changed))
    broker.on_image(newest, MetadataDelta(deleted_topics={deleted.topic_id: deleted}))
    request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=None)])
    names = list[str]()
    until_s = time.monotonic() + PATIENCE_S
    while names != ["kept"] and time.monotonic() < until_s:
        await asyncio.sleep(0.01)
        answer = await wire.call(request, 8, OffsetFetchResponse)
        names = [topic.name for topic in answer.groups[0].topics]
    assert names == ["kept"]


def led_by(image: MetadataImage, leader: int, leader_epoch: int) -> MetadataImage:
    by_id = {}
    for topic in image.topics_by_id.values():
        partitions = {
            index: replace(each, leader=leader, leader_epoch=leader_epoch, partition_epoch=leader_epoch)
            for index, each in topic.partitions.items()
        }
        by_id[topic.topic_id] = replace(topic, partitions=partitions)
    return replace(image, topics_by_id=by_id, topics_by_name={each.name: each for each in by_id.values()})


async def test_a_replica_has_its_minimum_before_a_later_isr(start_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader committed alone by the minimum before, and a replica without these records could be elected."""
    node = await start_node()
    partitions = await hosting_topic(node, await node.connect(), 30)
    image, host = node.node._metadata.tracker.image, node.node._broker._hosting
    changed = {image.topics_by_name["t"].topic_id: set(range(30))}
    image = on_two(image, (1, 2), 5)
    host.apply(image, MetadataDelta(changed_partitions=changed))
    for each in partitions.hosted():
        each.append_as_leader(memoryview(bytearray(batch(1))), NOW, required_acks=1)
        each.log.flush()
        each.in_sync.followers[2].last_caught_up_ms = -1e12
        each.check_isr()
    # The answer may come before the metadata, on another connection.
    for each in partitions.hosted():
        assert each.in_sync.pending is not None
        each.on_proposal_agreed(each.in_sync.pending, 6)
        each.advance_high_watermark()
    assert {each.log.high_watermark for each in partitions.hosted()} == {0}
    raised = replace(image, configs={**image.configs, (TOPIC_RESOURCE, "t"): {"min.insync.replicas": "2"}})
    monkeypatch.setattr(hosting, "CONFIGS_S", 0)  # one in a turn
    host.apply(raised, MetadataDelta(changed_configs={(TOPIC_RESOURCE, "t")}))
    host.apply(on_two(raised, (1,), 6), MetadataDelta(changed_partitions=changed))
    assert {each.in_sync.isr for each in partitions.hosted()} == {(1,)}
    for each in partitions.hosted():
        each.advance_high_watermark()
    assert {(each.min_insync_replicas, each.log.high_watermark) for each in partitions.hosted()} == {(2, 0)}


@pytest.mark.parametrize("per_turn", [1, 100])
async def test_a_lower_minimum_comes_not_before_another_leader(
    start_node: Any, monkeypatch: pytest.MonkeyPatch, per_turn: int
) -> None:
    """A node that stood still has missed that another eligible replica leads. By the lower minimum it committed alone
    what that one lacks.
    """
    node = await start_node()
    partitions = await hosting_topic(node, await node.connect(), 30)
    image, host = node.node._metadata.tracker.image, node.node._broker._hosting
    changed = {image.topics_by_name["t"].topic_id: set(range(30))}
    two = replace(on_two(image, (1,), 5), configs={(TOPIC_RESOURCE, "t"): {"min.insync.replicas": "2"}})
    host.apply(two, MetadataDelta(changed_partitions=changed, changed_configs={(TOPIC_RESOURCE, "t")}))
    for each in partitions.hosted():
        each.append_as_leader(memoryview(bytearray(batch(1))), NOW, required_acks=1)
        each.log.flush()
    lowered = replace(led_by(two, 2, 6), configs=image.configs)
    monkeypatch.setattr(hosting, "ROLES_PER_TURN_MAX", per_turn)
    host.apply(lowered, MetadataDelta(changed_partitions=changed, changed_configs={(TOPIC_RESOURCE, "t")}))
    for each in partitions.hosted():
        each.advance_high_watermark()
    assert {(each.leads, each.min_insync_replicas) for each in partitions.hosted()} <= {(False, 1), (True, 2)}
    assert {each.log.high_watermark for each in partitions.hosted()} == {0}
    for _ in range(40):
        await asyncio.sleep(0)
    assert not any(each.leads for each in partitions.hosted())
    assert {(each.min_insync_replicas, each.log.high_watermark) for each in partitions.hosted()} == {(1, 0)}


async def test_a_lower_minimum_commits_also_where_a_role_that_waited_has_come_with_a_later_image(
    start_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The role counted as one that still waits: the minimum came with it, and nothing moved the high watermark."""
    node = await start_node()
    partitions = await hosting_topic(node, await node.connect(), 30)
    image, host = node.node._metadata.tracker.image, node.node._broker._hosting
    topic_id = image.topics_by_name["t"].topic_id
    changed = {topic_id: set(range(30))}
    configs = {(TOPIC_RESOURCE, "t"): {"min.insync.replicas": "2"}}
    two = replace(on_two(image, (1,), 5), configs=configs)
    host.apply(two, MetadataDelta(changed_partitions=changed, changed_configs={(TOPIC_RESOURCE, "t")}))
    for each in partitions.hosted():
        each.append_as_leader(memoryview(bytearray(batch(1))), NOW, required_acks=1)
        each.log.flush()
    monkeypatch.setattr(hosting, "ROLES_PER_TURN_MAX", 1)
    host.apply(replace(on_two(image, (1,), 6), configs=configs), MetadataDelta(changed_partitions=changed))
    later = on_two(image, (1,), 7)
    host.apply(replace(later, configs=configs), MetadataDelta(changed_partitions={topic_id: {29}}))
    host.apply(later, MetadataDelta(changed_configs={(TOPIC_RESOURCE, "t")}))
    for _ in range(40):
        await asyncio.sleep(0)
    assert {(each.min_insync_replicas, each.log.high_watermark) for each in partitions.hosted()} == {(1, 1)}


def on_two(image: MetadataImage, isr: tuple[int, ...], partition_epoch: int) -> MetadataImage:
    """The partitions of the topic t on the brokers 1 and 2."""
    topic = image.topics_by_name["t"]
    partitions = {
        index: replace(
            each, replicas=(1, 2), isr=isr, directories=(each.directories[0], UNASSIGNED_DIRECTORY),
            leader_epoch=5, partition_epoch=partition_epoch,
        )
        for index, each in topic.partitions.items()
    }  # fmt: skip
    placed = replace(topic, partitions=partitions)
    return replace(
        image, topics_by_id={**image.topics_by_id, topic.topic_id: placed},
        topics_by_name={**image.topics_by_name, "t": placed},
    )  # fmt: skip


async def test_a_directory_that_cannot_be_written_to_is_tried_once_for_a_change_of_settings(
    start_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try collected the offsets of all logs: with 5,000 of them 38 ms, 5,000 times."""
    node = await start_node()
    wire = await node.connect()
    logs = await compacted_logs(node, wire)
    for log in logs:
        log.append_as_leader(batch(key=b"k"), 0, NOW)
    tries = []

    def refuse(self: LogDirectory, log: object) -> None:
        tries.append(log)
        raise OSError(errno.EMFILE, "simulated shortage", self.path)

    with monkeypatch.context() as patch:
        patch.setattr(hosting, "CONFIGS_S", 0)  # one in a turn
        patch.setattr(LogDirectory, "enter_in_cleaner_checkpoint", refuse)
        await wire.call(cleanup_policy("t", "delete"), 1, IncrementalAlterConfigsResponse)
        await until(lambda: not any(log.config.is_compacted for log in logs))
        assert len(tries) == 1
        assert [log.unsynced_gaps_below for log in logs] == [1] * 30
        await wire.call(cleanup_policy("t", "compact"), 1, IncrementalAlterConfigsResponse)
        await until(lambda: all(log.config.is_compacted for log in logs))
        await wire.call(cleanup_policy("t", "delete"), 1, IncrementalAlterConfigsResponse)
        await until(lambda: not any(log.config.is_compacted for log in logs))
        assert len(tries) == 2


async def test_a_directory_that_cannot_be_written_to_is_tried_once_for_settings_that_changed_before_a_start(
    start_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node()
    await compacted_logs(node, await node.connect())
    await node.stop()
    load, tries = DiscoveredLogs.load, []

    def with_later_settings(self: DiscoveredLogs, config_for: Callable[[str], LogConfig], now_ms: int) -> None:
        load(self, config_for, now_ms)
        monkeypatch.setattr(hosting.Hosting, "_log_config", lambda self, topic: later)

    def refuse(self: LogDirectory, log: object) -> None:
        tries.append(log)
        raise OSError(errno.EMFILE, "simulated shortage", self.path)

    later = LogConfig()
    monkeypatch.setattr(DiscoveredLogs, "load", with_later_settings)
    monkeypatch.setattr(LogDirectory, "enter_in_cleaner_checkpoint", refuse)
    node = await start_node()
    partitions = node.node._broker.partitions
    await until(lambda: len(list(partitions.hosted())) == 30)
    assert not any(partitions.find("t", index).log.config.is_compacted for index in range(30))
    assert len(tries) == 1
