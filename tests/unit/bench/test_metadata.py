"""The benchmark's own requests about the cluster mean what they should, read by codecs that are not theirs."""

from __future__ import annotations

import datetime
import io
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kio.schema.create_partitions.v1.request import CreatePartitionsRequest
from kio.schema.create_partitions.v1.response import CreatePartitionsResponse, CreatePartitionsTopicResult
from kio.schema.create_topics.v2.request import CreateTopicsRequest
from kio.schema.create_topics.v2.response import CreatableTopicResult, CreateTopicsResponse
from kio.schema.delete_topics.v1.request import DeleteTopicsRequest
from kio.schema.delete_topics.v1.response import DeletableTopicResult, DeleteTopicsResponse
from kio.schema.errors import ErrorCode
from kio.schema.metadata.v4.request import MetadataRequest
from kio.schema.metadata.v4.response import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from kio.schema.request_header.v1.header import RequestHeader
from kio.serial import entity_reader, entity_writer

from tests.patience import join
from tidelog.bench import metadata, topics
from tidelog.bench.raw import BenchError

# kio's field types are phantoms that only its own parsers make: here any integer will do.
broker: Any = MetadataResponseBroker
partition: Any = MetadataResponsePartition
topic: Any = MetadataResponseTopic
metadata_answer: Any = MetadataResponse
NONE: Any = datetime.timedelta(0)


def read(frame: bytes, request: Any) -> tuple[RequestHeader, Any]:
    assert struct.unpack_from(">i", frame)[0] == len(frame) - 4
    header, size = entity_reader(RequestHeader)(frame, 4)
    body: Any
    body, taken = entity_reader(request)(frame, 4 + size)
    assert 4 + size + taken == len(frame)
    return header, body


def written(answer: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(answer))(out, answer)
    body = struct.pack(">i", 0) + out.getvalue()
    return struct.pack(">i", len(body)) + body


def state(leader: int, in_sync: tuple[int, ...] = (1, 2)) -> bytes:
    return written(
        metadata_answer(
            throttle_time=NONE,
            brokers=(broker(node_id=1, host="a", port=9001), broker(node_id=2, host="b", port=9002, rack="r")),
            cluster_id="c",
            controller_id=2,
            topics=(
                topic(
                    error_code=ErrorCode(0),
                    name="one",
                    partitions=(
                        partition(
                            error_code=ErrorCode(0),
                            partition_index=3,
                            leader_id=leader,
                            replica_nodes=(2, 1),
                            isr_nodes=in_sync,
                        ),
                    ),
                ),
                topic(error_code=ErrorCode(0), name="two", is_internal=True, partitions=()),
            ),
        )
    )


@contextmanager
def answering(*answers: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A port that gives these answers in turn, one connection each, the last for ever; and what it was asked."""
    asked: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        left = list(answers)
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            with connection:
                asked.append(connection.recv(65536))
                connection.sendall(left.pop(0) if len(left) > 1 else left[0])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1], asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        join(thread)


@pytest.mark.parametrize(("names", "told"), [(None, None), ((), ()), (("a", "bc"), ("a", "bc"))])
def test_a_metadata_frame_reads_back(names: Any, told: Any):
    header, body = read(metadata.request(names, 5), MetadataRequest)
    assert (header.request_api_key, header.request_api_version, header.correlation_id) == (3, 4, 5)
    assert body.allow_auto_topic_creation is False
    assert (None if body.topics is None else tuple(one.name for one in body.topics)) == told


def test_a_metadata_answer_is_read():
    found = metadata.read_answer(state(leader=2))
    assert (found.ports, found.controller) == ({1: 9001, 2: 9002}, 2)
    assert found.topics == {"one": {3: metadata.PartitionState(0, 2, (2, 1), (1, 2))}, "two": {}}
    assert found.leader_ports("one") == {3: 9002}
    assert len(list(found.partitions())) == 1


def test_waiting_ends_when_the_state_is_reached_and_only_then():
    def led(found: metadata.ClusterState) -> bool:
        return all(one.leader > 0 for one in found.partitions())

    with answering(state(-1), state(-1), state(1)) as (port, asked):
        assert metadata.await_state(port, None, led, 5, "led").leader_ports("one") == {3: 9001}
        assert len(asked) == 3
    with answering(state(-1)) as (port, _), pytest.raises(BenchError, match="led: not within"):
        metadata.await_state(port, None, led, 0.1, "led")


def created(*errors: int) -> bytes:
    result: Any = CreatableTopicResult
    answer: Any = CreateTopicsResponse
    found = tuple(
        result(name=f"t{number}", error_code=ErrorCode(error), error_message="no" if error else None)
        for number, error in enumerate(errors)
    )
    return written(answer(throttle_time=NONE, topics=found))


def test_topics_are_created_as_described():
    new = [
        topics.NewTopic("t0", 12, 3, {"retention.ms": "-1", "min.insync.replicas": "2"}),
        topics.NewTopic("t1", 1, 1),
    ]
    with answering(created(0, 0)) as (port, asked):
        topics.create(port, new)
    header, body = read(asked[0], CreateTopicsRequest)
    assert (header.request_api_key, header.request_api_version) == (19, 2)
    assert [(one.name, one.num_partitions, one.replication_factor) for one in body.topics] == [
        ("t0", 12, 3),
        ("t1", 1, 1),
    ]
    assert {one.name: one.value for one in body.topics[0].configs} == new[0].settings
    assert body.validate_only is False


def test_a_large_topic_is_created_in_steps():
    result: Any = CreatePartitionsTopicResult
    answer: Any = CreatePartitionsResponse
    extended = result(name="t0", error_code=ErrorCode(0), error_message=None)
    done = written(answer(throttle_time=NONE, results=(extended,)))
    with answering(created(0), done, done) as (port, asked):
        topics.create(port, [topics.NewTopic("t0", 12_000, 1)])
    _, body = read(asked[0], CreateTopicsRequest)
    assert body.topics[0].num_partitions == 5_000
    totals = []
    for frame in asked[1:]:
        header, body = read(frame, CreatePartitionsRequest)
        assert (header.request_api_key, header.request_api_version) == (37, 1)
        assert body.topics[0].assignments is None
        totals.append((body.topics[0].name, body.topics[0].count))
    assert totals == [("t0", 10_000), ("t0", 12_000)]


def test_a_refused_topic_is_an_error_and_a_missing_controller_is_waited_for():
    with answering(created(0, 36)) as (port, _), pytest.raises(BenchError, match="'t1': 36"):
        topics.create(port, [topics.NewTopic("t0", 1, 1), topics.NewTopic("t1", 1, 1)])
    with answering(created(41), created(0)) as (port, asked):
        topics.create(port, [topics.NewTopic("t0", 1, 1)])
        assert len(asked) == 2


def test_topics_are_deleted_by_name():
    result: Any = DeletableTopicResult
    answer: Any = DeleteTopicsResponse
    gone = written(answer(throttle_time=NONE, responses=(result(name="a", error_code=ErrorCode(0)),)))
    with answering(gone) as (port, asked):
        topics.delete(port, ["a", "b"])
    header, body = read(asked[0], DeleteTopicsRequest)
    assert (header.request_api_key, header.request_api_version) == (20, 1)
    assert body.topic_names == ("a", "b")
