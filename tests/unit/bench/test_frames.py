"""The hand-written requests of the benchmark mean what they should, read by codecs that are not theirs."""

from __future__ import annotations

import datetime
import io
import struct
from typing import Any

from kio.schema.errors import ErrorCode
from kio.schema.fetch.v12.request import FetchRequest
from kio.schema.fetch.v12.response import FetchableTopicResponse, FetchResponse, PartitionData
from kio.schema.produce.v9.request import ProduceRequest
from kio.schema.produce.v9.response import PartitionProduceResponse, ProduceResponse, TopicProduceResponse
from kio.schema.request_header.v2.header import RequestHeader
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import Records

from tidelog.bench import frames
from tidelog.protocol.batches.record_batch import check_crc, read_header
from tidelog.protocol.batches.records import decode_batch

BATCH = frames.record_batch([b"one", b"", b"x" * 300], 1_700_000_000_123)


def read_request(frame: bytes, request: Any) -> tuple[RequestHeader, Any]:
    assert struct.unpack_from(">i", frame)[0] == len(frame) - 4
    header, size = entity_reader(RequestHeader)(frame, 4)
    body: Any
    body, read = entity_reader(request)(frame, 4 + size)
    assert 4 + size + read == len(frame)
    return header, body


def written(answer: Any, correlation_id: int) -> bytes:
    out = io.BytesIO()
    entity_writer(type(answer))(out, answer)
    body = struct.pack(">i", correlation_id) + b"\x00" + out.getvalue()
    return struct.pack(">i", len(body)) + body


def test_a_batch_is_valid_and_holds_the_values() -> None:
    header = read_header(BATCH)
    assert check_crc(BATCH, 0, header)
    assert header.size_bytes == len(BATCH)
    assert header.producer_id == -1
    records = decode_batch(BATCH)
    assert [(record.offset, record.timestamp, record.key, record.value) for record in records] == [
        (0, 1_700_000_000_123, None, b"one"),
        (1, 1_700_000_000_123, None, b""),
        (2, 1_700_000_000_123, None, b"x" * 300),
    ]


def test_a_produce_frame_reads_back() -> None:
    frame = frames.produce(frames.ProducePlan("topic", {0: BATCH, 5: BATCH}), 77)
    header, body = read_request(frame, ProduceRequest)
    assert (header.request_api_key, header.request_api_version, header.correlation_id) == (0, 9, 77)
    assert isinstance(body, ProduceRequest)
    assert (body.acks, body.transactional_id) == (-1, None)
    assert [(p.index, bytes(p.records or b"")) for p in body.topic_data[0].partition_data] == [(0, BATCH), (5, BATCH)]
    correlation_id = struct.unpack_from(">i", frame, frames.CORRELATION_ID_OFFSET)[0]
    assert correlation_id == 77


def test_a_fetch_frame_reads_back() -> None:
    header, body = read_request(frames.fetch("topic", {3: 1234567890123}, 8, max_wait_ms=70), FetchRequest)
    assert (header.request_api_key, header.request_api_version, header.correlation_id) == (1, 12, 8)
    assert isinstance(body, FetchRequest)
    assert (body.session_id, body.session_epoch, body.min_bytes) == (0, -1, 1)
    partition = body.topics[0].partitions[0]
    assert (partition.partition, partition.fetch_offset) == (3, 1234567890123)


# kio's field types are phantoms that only its own parsers make: here any integer will do.
partition_answer: Any = PartitionProduceResponse
topic_answer: Any = TopicProduceResponse
fetched_partition: Any = PartitionData
fetched_topic: Any = FetchableTopicResponse


def produce_answer(*errors: int, message: str | None = None) -> bytes:
    partitions = tuple(
        partition_answer(
            index=index, error_code=ErrorCode(error), base_offset=9, record_errors=(), error_message=message
        )
        for index, error in enumerate(errors)
    )
    return written(ProduceResponse(responses=(topic_answer(name="topic", partition_responses=partitions),)), 3)


def test_the_length_and_the_errors_of_a_produce_answer() -> None:
    for count in (1, 12, 200):
        plan = frames.ProducePlan("topic", dict.fromkeys(range(count), BATCH))
        answer = produce_answer(*[0] * count)
        assert len(answer) == plan.answer_size_bytes + 4
        assert plan.errors(bytearray(answer)) == [0] * count
    plan = frames.ProducePlan("topic", dict.fromkeys(range(3), BATCH))
    assert plan.errors(bytearray(produce_answer(0, 7, 0))) == [0, 7, 0]
    assert plan.errors(bytearray(produce_answer(6, 6, 6, message="not the leader"))) == [6]
    assert any(plan.errors(bytearray(produce_answer(0, 6, 0, message="not the leader"))))


def test_a_fetch_answer_is_read() -> None:
    for aborted in (None, ()):
        partition = fetched_partition(
            partition_index=0,
            error_code=ErrorCode(0),
            high_watermark=55,
            aborted_transactions=aborted,
            records=Records(BATCH),
        )
        topics = (fetched_topic(topic="a-topic", partitions=(partition,)),)
        none: Any = datetime.timedelta(0)
        answer = written(FetchResponse(throttle_time=none, error_code=ErrorCode(0), responses=topics), 3)
        found = frames.read_fetch_answer(answer)
        assert (found.error_code, found.high_watermark) == (0, 55)
        assert answer[found.records_at : found.records_at + found.records_size_bytes] == BATCH
