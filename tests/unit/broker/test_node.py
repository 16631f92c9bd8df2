"""A whole node through its socket: what is advertised is served, answers keep order, data outlives a restart."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tidelog.broker import node as broker_node
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.network.accepting import ListenError
from tidelog.protocol.api import SERVED
from tidelog.protocol.batches.records import decode_batch
from tidelog.protocol.errors import ConfigError, ErrorCode
from tidelog.protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from tidelog.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from tidelog.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from tidelog.protocol.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from tidelog.storage.files.disk import DirectoryInUse
from tidelog.storage.log.flush import FlushTask

MakeBatch = Callable[..., bytes]


def produce(topic: str, *batches: bytes | None, acks: int = -1, timeout_ms: int = 5000) -> ProduceRequest:
    """Batch i goes to partition i."""
    return ProduceRequest(
        acks=acks,
        timeout_ms=timeout_ms,
        topic_data=[
            TopicProduceData(
                name=topic,
                partition_data=[PartitionProduceData(index=i, records=data) for i, data in enumerate(batches)],
            )
        ],
    )


def fetch(topic: str, offset: int = 0, wait_ms: int = 0, **options: Any) -> FetchRequest:
    partition = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=options.pop("most", 1 << 20))
    return FetchRequest(
        max_wait_ms=wait_ms, min_bytes=1, topics=[FetchTopic(topic=topic, partitions=[partition])], **options
    )


def produced(response: ProduceResponse) -> list[tuple[int, int]]:
    return [(p.error_code, p.base_offset) for topic in response.responses for p in topic.partition_responses]


def fetched(response: FetchResponse) -> list[bytes | None]:
    data = response.responses[0].partitions[0].records
    values: list[bytes | None] = []
    position = 0
    while data is not None and position < len(data):
        values += [record.value for record in decode_batch(data, position)]
        position += 12 + struct.unpack_from(">i", data, position + 8)[0]
    return values


async def test_what_is_advertised_is_what_has_a_handler(running: Any, wire: Any) -> None:
    answer = await wire.call(
        ApiVersionsRequest(client_software_name="test", client_software_version="1"), 4, ApiVersionsResponse
    )
    advertised = {each.api_key: range(each.min_version, each.max_version + 1) for each in answer.api_keys}
    served = running.node._dispatchers[-1].supported_versions
    # Produce 0-2 are advertised and refused, as Kafka 4 does.
    assert advertised == served | {0: range(served[0].stop)}
    assert advertised == SERVED


async def test_an_unknown_apiversions_version_is_answered_in_version_0_with_error_35(wire: Any) -> None:
    wire.writer.write(struct.pack(">ihhih", 10, 18, 99, 7, -1))
    frame = await wire.frame()
    assert struct.unpack(">i", frame[:4])[0] == 7
    answer = ApiVersionsResponse.decode(frame[4:], 0)
    assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert [key.api_key for key in answer.api_keys] == [18]


@pytest.mark.parametrize("frame", [struct.pack(">hhih", 999, 0, 1, -1), struct.pack(">hhih", 3, 99, 1, -1)])
async def test_an_api_or_version_that_is_not_served_closes_the_connection(wire: Any, frame: bytes) -> None:
    wire.writer.write(struct.pack(">i", len(frame)) + frame)
    assert await wire.reader.read() == b""


@pytest.mark.parametrize("acks", [-1, 1])
async def test_records_come_back_as_they_were_sent(wire: Any, make_batch: MakeBatch, acks: int) -> None:
    await wire.create_topic("t", 2)
    answer = await wire.call(produce("t", make_batch(b"a", b"b"), make_batch(b"c"), acks=acks), 9, ProduceResponse)
    assert produced(answer) == [(0, 0), (0, 0)]
    answer = await wire.call(produce("t", make_batch(b"d"), acks=acks), 9, ProduceResponse)
    assert produced(answer) == [(0, 2)]
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == [b"a", b"b", b"d"]
    # An offset inside a batch brings the whole batch.
    assert fetched(await wire.call(fetch("t", offset=1), 11, FetchResponse)) == [b"a", b"b", b"d"]
    assert fetched(await wire.call(fetch("t", offset=2), 11, FetchResponse)) == [b"d"]


async def test_acks_0_is_never_answered_and_a_failure_closes_the_connection(
    running: Any, wire: Any, make_batch: MakeBatch
) -> None:
    await wire.create_topic("t")
    assert produced(await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)) == [(0, 0)]
    wire.send(produce("t", make_batch(b"b"), acks=0), 9)
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == [b"a", b"b"]
    wire.send(produce("nowhere", make_batch(b"a"), acks=0), 9)
    assert await wire.reader.read() == b""


async def test_errors_name_the_partition_that_failed(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t", max_message_bytes="200")
    answer = await wire.call(produce("t", make_batch(b"x" * 300), make_batch(b"y")), 9, ProduceResponse)
    assert produced(answer) == [(ErrorCode.MESSAGE_TOO_LARGE, -1), (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1)]
    broken = bytearray(make_batch(b"z"))
    broken[-1] ^= 1
    answer = await wire.call(produce("t", bytes(broken)), 9, ProduceResponse)
    assert produced(answer) == [(ErrorCode.CORRUPT_MESSAGE, -1)]
    answer = await wire.call(produce("t", make_batch(b"y"), acks=7), 9, ProduceResponse)
    assert produced(answer) == [(ErrorCode.INVALID_REQUIRED_ACKS, -1)]
    answer = await wire.call(produce("t", None), 9, ProduceResponse)
    assert produced(answer)[0][0] != 0
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == []


async def test_zstd_is_kept_from_clients_too_old_for_it(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t", compression_type="zstd")
    zstd = make_batch(b"a" * 100, compression=4)
    assert produced(await wire.call(produce("t", zstd), 6, ProduceResponse)) == [
        (ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, -1)
    ]
    assert produced(await wire.call(produce("t", zstd), 7, ProduceResponse)) == [(0, 0)]
    assert fetched(await wire.call(fetch("t"), 9, FetchResponse)) == [b"a" * 100]


async def test_clients_may_not_write_to_internal_topics(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("__consumer_offsets")
    answer = await wire.call(produce("__consumer_offsets", make_batch(b"a")), 9, ProduceResponse)
    assert produced(answer) == [(ErrorCode.INVALID_TOPIC_EXCEPTION, -1)]


async def test_a_topic_can_be_named_by_its_id(wire: Any, make_batch: MakeBatch) -> None:
    topic_id = await wire.create_topic("t")
    request = produce("", make_batch(b"a"))
    request.topic_data[0].topic_id = topic_id
    assert produced(await wire.call(request, 13, ProduceResponse)) == [(0, 0)]
    asked = fetch("")
    asked.topics[0].topic_id = topic_id
    assert fetched(await wire.call(asked, 17, FetchResponse)) == [b"a"]
    asked.topics[0].topic_id = bytes(range(16))
    answer = await wire.call(asked, 17, FetchResponse)
    assert answer.responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID


async def test_a_duplicate_is_answered_with_its_first_offset_and_a_gap_is_refused(
    wire: Any, make_batch: MakeBatch
) -> None:
    await wire.create_topic("t")

    def sent(sequence: int) -> bytes:
        return make_batch(b"v%d" % sequence, producer_id=5, producer_epoch=0, base_sequence=sequence)

    for sequence, expected in [(0, (0, 0)), (1, (0, 1)), (0, (0, 0)), (1, (0, 1))]:
        assert produced(await wire.call(produce("t", sent(sequence)), 9, ProduceResponse)) == [expected]
    answer = await wire.call(produce("t", sent(3)), 9, ProduceResponse)
    assert produced(answer) == [(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1)]
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == [b"v0", b"v1"]


async def test_a_waiting_fetch_is_answered_by_the_next_produce(running: Any, wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t")
    other = await running.connect()
    other.send(fetch("t", wait_ms=60_000), 11)
    await asyncio.sleep(0.05)
    assert not other.reader._buffer, "answered before there was anything"
    await wire.call(produce("t", make_batch(b"news")), 9, ProduceResponse)
    assert fetched(await asyncio.wait_for(other.receive(FetchResponse, 11), PATIENCE_S)) == [b"news"]


async def test_a_fetch_that_finds_nothing_is_answered_empty_after_its_wait(wire: Any) -> None:
    await wire.create_topic("t")
    began = asyncio.get_running_loop().time()
    assert fetched(await wire.call(fetch("t", wait_ms=80), 11, FetchResponse)) == []
    assert asyncio.get_running_loop().time() - began >= 0.08


async def test_answers_keep_the_order_of_a_pipelining_connection(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t")
    first = wire.send(fetch("t", offset=1, wait_ms=100), 11)
    second = wire.send(produce("t", make_batch(b"a")), 9)
    third = wire.send(MetadataRequest(topics=[]), 9)
    await wire.receive(FetchResponse, 11)
    assert wire.last_correlation_id == first
    assert produced(await wire.receive(ProduceResponse, 9)) == [(0, 0)]
    assert wire.last_correlation_id == second
    await wire.receive(MetadataResponse, 9)
    assert wire.last_correlation_id == third


async def test_a_session_reports_only_what_changed(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t", 3)
    partitions = [FetchPartition(partition=i, fetch_offset=0, partition_max_bytes=1 << 20) for i in range(3)]
    full = FetchRequest(
        min_bytes=1, session_epoch=0, topics=[FetchTopic(topic="t", partitions=partitions)], max_wait_ms=0
    )
    answer = await wire.call(full, 11, FetchResponse)
    assert answer.session_id
    assert [p.partition_index for p in answer.responses[0].partitions] == [0, 1, 2]
    request = FetchRequest(min_bytes=1, session_id=answer.session_id, session_epoch=1, max_wait_ms=0)
    assert (await wire.call(request, 11, FetchResponse)).responses == []
    await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    request.session_epoch = 2
    answer = await wire.call(request, 11, FetchResponse)
    assert [p.partition_index for p in answer.responses[0].partitions] == [0]
    # Not asked again at a new offset, the same data is still news.
    request.session_epoch = 3
    assert fetched(await wire.call(request, 11, FetchResponse)) == [b"a"]


async def test_deleting_a_topic_ends_the_fetches_that_wait_for_it(running: Any, wire: Any) -> None:
    await wire.create_topic("t")
    other = await running.connect()
    other.send(fetch("t", wait_ms=60_000), 11)
    await asyncio.sleep(0.05)
    request = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=60_000)
    assert (await wire.call(request, 6, DeleteTopicsResponse)).responses[0].error_code == 0
    answer = await asyncio.wait_for(other.receive(FetchResponse, 11), PATIENCE_S)
    assert answer.responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    await wire.create_topic("t")
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == []


@pytest.mark.parametrize("flush", ["9223372036854775807", "1"])
async def test_records_and_topics_outlive_a_restart(start_node: Any, make_batch: MakeBatch, flush: str) -> None:
    first = await start_node(**{"log.flush.interval.messages": flush})
    wire = await first.connect()
    await wire.create_topic("t")
    for number in range(10):
        answer = await wire.call(produce("t", make_batch(b"%d" % number)), 9, ProduceResponse)
        assert produced(answer) == [(0, number)]
    await first.stop()
    second = await start_node()
    wire = await second.connect()
    assert fetched(await wire.call(fetch("t"), 11, FetchResponse)) == [b"%d" % number for number in range(10)]
    assert produced(await wire.call(produce("t", make_batch(b"more")), 9, ProduceResponse)) == [(0, 10)]


async def test_with_flush_interval_1_nothing_is_acknowledged_or_read_before_it_is_synced(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node(**{"log.flush.interval.messages": "1"})
    wire = await node.connect()
    await wire.create_topic("t")
    gate = hold_flushes(monkeypatch)
    wire.send(produce("t", make_batch(b"a")), 9)
    other = await node.connect()
    assert fetched(await other.call(fetch("t", wait_ms=100), 11, FetchResponse)) == []
    gate.set()
    assert produced(await asyncio.wait_for(wire.receive(ProduceResponse, 9), PATIENCE_S)) == [(0, 0)]
    assert fetched(await other.call(fetch("t"), 11, FetchResponse)) == [b"a"]


def hold_flushes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Flushes wait on their thread until the event is set."""
    gate = threading.Event()
    real_run = FlushTask.run

    def run(task: FlushTask) -> None:
        assert gate.wait(PATIENCE_S)
        real_run(task)

    monkeypatch.setattr(FlushTask, "run", run)
    return gate


async def test_a_produce_that_is_not_committed_in_time_is_told_so(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await start_node(**{"log.flush.interval.messages": "1"})
    wire = await node.connect()
    await wire.create_topic("t")
    gate = hold_flushes(monkeypatch)
    answer = await wire.call(produce("t", make_batch(b"a"), timeout_ms=50), 9, ProduceResponse)
    assert produced(answer)[0][0] == ErrorCode.REQUEST_TIMED_OUT
    gate.set()


async def test_no_more_in_sync_replicas_are_asked_for_than_there_are_replicas(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t", min_insync_replicas="2")
    answer = await wire.call(produce("t", make_batch(b"a")), 9, ProduceResponse)
    assert produced(answer) == [(0, 0)], "Kafka's effectiveMinIsr"


async def test_offsets_are_found_by_name_and_by_timestamp(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t")
    for timestamp in (1000, 3000, 2000):
        await wire.call(produce("t", make_batch(b"v", timestamp=timestamp)), 9, ProduceResponse)

    async def ask(timestamp: int, version: int = 10) -> tuple[int, int, int]:
        partition = ListOffsetsPartition(partition_index=0, timestamp=timestamp)
        request = ListOffsetsRequest(replica_id=-1, topics=[ListOffsetsTopic(name="t", partitions=[partition])])
        answer = (await wire.call(request, version, ListOffsetsResponse)).topics[0].partitions[0]
        return answer.error_code, answer.timestamp, answer.offset

    assert await ask(-1) == (0, -1, 3)
    assert await ask(-2) == (0, -1, 0)
    assert await ask(-3) == (0, 3000, 1)
    assert await ask(-4) == (0, -1, 0)
    assert await ask(-5) == (0, -1, -1)
    assert await ask(1500) == (0, 3000, 1)
    assert await ask(3001) == (0, -1, -1)
    assert (await ask(-3, version=6))[0] == ErrorCode.UNSUPPORTED_VERSION
    assert (await ask(-7))[0] == ErrorCode.UNSUPPORTED_VERSION


async def test_the_end_of_a_leader_epoch_is_known_and_wrong_epochs_are_fenced(wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t")
    await wire.call(produce("t", make_batch(b"a", b"b")), 9, ProduceResponse)

    async def ask(epoch: int, current: int = -1) -> tuple[int, int, int]:
        partition = OffsetForLeaderPartition(partition=0, leader_epoch=epoch, current_leader_epoch=current)
        request = OffsetForLeaderEpochRequest(topics=[OffsetForLeaderTopic(topic="t", partitions=[partition])])
        answer = (await wire.call(request, 4, OffsetForLeaderEpochResponse)).topics[0].partitions[0]
        return answer.error_code, answer.leader_epoch, answer.end_offset

    assert await ask(0) == (0, 0, 2)
    assert await ask(5) == (0, -1, -1)
    assert (await ask(0, current=1))[0] == ErrorCode.UNKNOWN_LEADER_EPOCH
    asked = fetch("t")
    asked.topics[0].partitions[0].current_leader_epoch = 1
    answer = await wire.call(asked, 11, FetchResponse)
    assert answer.responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_LEADER_EPOCH


async def test_a_cold_request_holds_back_what_follows_it_on_its_connection(wire: Any) -> None:
    create = CreateTopicsRequest(
        topics=[CreatableTopic(name="t", num_partitions=1, replication_factor=1)], timeout_ms=60_000
    )
    wire.send(create, 7)
    wire.send(MetadataRequest(topics=[MetadataRequestTopic(name="t")], allow_auto_topic_creation=False), 9)
    assert (await wire.receive(CreateTopicsResponse, 7)).topics[0].error_code == 0
    assert (await wire.receive(MetadataResponse, 9)).topics[0].error_code == 0


async def test_a_second_node_on_the_same_port_or_directory_is_refused(
    start_node: Any, running: Any, tmp_path: Path
) -> None:
    busy = f"PLAINTEXT://127.0.0.1:{running.port}"
    with pytest.raises(ListenError, match=r"^cannot listen on 127"):
        await start_node(**{"listeners": busy, "log.dirs": str(tmp_path / "other")})
    with pytest.raises(DirectoryInUse, match="is in use"):
        await start_node()
    assert not (tmp_path / "other").exists(), "a busy port is known before a directory is touched"


async def test_what_is_not_served_yet_is_refused_at_the_start(start_node: Any) -> None:
    with pytest.raises(ConfigError, match="not served yet"):
        await start_node(listeners="SSL://127.0.0.1:0")


async def test_a_slow_reader_does_not_make_the_node_hold_its_answers_in_memory(
    running: Any, wire: Any, make_batch: MakeBatch
) -> None:
    await wire.create_topic("t")
    for _ in range(4):
        await wire.call(produce("t", make_batch(b"x" * 900_000)), 9, ProduceResponse)
    slow = await running.connect()
    slow.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for _ in range(200):
        slow.send(fetch("t"), 11)
    connections = running.node._broker_server.connections
    await until(lambda: any(not each._writable and each._paused_reading for each in connections))
    connection = next(each for each in connections if not each._writable)
    assert connection._transport.get_write_buffer_size() < 16 << 20
    assert produced(await wire.call(produce("t", make_batch(b"others go on")), 9, ProduceResponse))[0][0] == 0


async def test_a_signal_does_not_interrupt_the_stop_of_a_node_that_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It closes its logs, and says why it has ended."""
    stop, is_stopping = broker_node.Node.stop, asyncio.Event()
    unfinished: list[broker_node.Node] = []

    async def fail(node: broker_node.Node) -> None:
        raise RuntimeError("as asked")

    async def stop_slowly(node: broker_node.Node) -> None:
        unfinished.append(node)
        is_stopping.set()
        await asyncio.sleep(0.01)
        await stop(unfinished.pop())

    monkeypatch.setattr(broker_node.Node, "failed", fail)
    monkeypatch.setattr(broker_node.Node, "stop", stop_slowly)
    thresholds: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: None)  # it would freeze what other tests have made
    monkeypatch.setattr(gc, "set_threshold", thresholds.append)
    config = NodeConfig({"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": str(tmp_path / "data")})
    running = asyncio.ensure_future(broker_node.run_node(config, lambda line: None))
    await is_stopping.wait()
    running.cancel()
    (end,) = await asyncio.gather(running, return_exceptions=True)
    for node in unfinished:
        await stop(node)
    assert not unfinished
    assert isinstance(end, RuntimeError)
    assert thresholds == [broker_node.YOUNG_OBJECTS_MAX]
    assert (tmp_path / "data" / ".kafka_cleanshutdown").exists()


async def test_a_node_that_is_ready_does_not_look_for_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients waited 0.4 s for that, after a start with 10,000 partitions; and there is none."""
    collect = gc.collect
    collections: list[int] = []
    left: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(collect()))
    monkeypatch.setattr(gc, "freeze", lambda: left.append(collect()))
    monkeypatch.setattr(gc, "set_threshold", lambda threshold: None)
    config = NodeConfig({"listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": str(tmp_path / "data")})
    collect()
    running = asyncio.ensure_future(broker_node.run_node(config, lambda line: None))
    await until(lambda: left)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not collections
    assert left[0] < 100
