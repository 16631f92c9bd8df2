"""The request of one batch and its usual answer, compared with what the messages' own codecs write and read."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tidelog.client.model import TopicPartition
from tidelog.client.producing.one_batch import FIRST_VERSION, OneBatchForm, OneBatchRequest, one_batch_form
from tidelog.protocol.codec.encoding import CUT_BYTES
from tidelog.protocol.messages.produce import (
    BatchIndexAndErrorMessage,
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)

VERSIONS = range(FIRST_VERSION, ProduceRequest.VERSIONS.stop)
TOPIC_ID = bytes(range(16))
NAMES = ["t", "flügel", "n" * 126, "n" * 249]
CORRELATION_ID = b"\0\1\2\3"


def form(version: int, name: str = "t", index: int = 3, transactional_id: str | None = None) -> OneBatchForm:
    return one_batch_form(TopicPartition(name, index), TOPIC_ID, version, transactional_id, -1, 30_000)


def answer(version: int, *, name: str = "t", throttle_ms: int = 0, nodes: Any = (), **fields: Any) -> bytes:
    """A frame from the correlation id on."""
    partition = PartitionProduceResponse(**({"index": 3, "base_offset": 7} | fields))
    topic = TopicProduceResponse(name=name, topic_id=TOPIC_ID, partition_responses=[partition])
    message = ProduceResponse(responses=[topic], throttle_time_ms=throttle_ms, node_endpoints=list(nodes))
    return CORRELATION_ID + b"\0" + message.encode(version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("transactional_id", [None, "x", "x" * 200], ids=["none", "short", "long"])
@pytest.mark.parametrize("size_bytes", [0, 61, 126, 127, 128, CUT_BYTES - 1, CUT_BYTES, 70_000])
def test_a_request_has_the_bytes_of_the_message(version: int, transactional_id: str | None, size_bytes: int) -> None:
    records = bytearray(random.Random(size_bytes).randbytes(size_bytes))
    for name in NAMES:
        data = [PartitionProduceData(index=3, records=records)]
        message = ProduceRequest(
            transactional_id=transactional_id,
            acks=-1,
            timeout_ms=30_000,
            topic_data=[TopicProduceData(name=name, topic_id=TOPIC_ID, partition_data=data)],
        )
        expected = message.write_pieces(bytearray(b"head"), version)
        pieces = OneBatchRequest(form(version, name, 3, transactional_id), records).write_pieces(
            bytearray(b"head"), version
        )
        assert [bytes(piece) for piece in pieces] == [bytes(piece) for piece in expected]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_usual_answer_is_read_as_the_message_reads_it(version: int) -> None:
    for name in NAMES:
        for base_offset, append_time_ms, start in ((0, -1, 0), (2**40, -1, -1), (7, 1_700_000_000_000, 2**62)):
            frame = answer(
                version,
                name=name,
                base_offset=base_offset,
                log_append_time_ms=append_time_ms,
                log_start_offset=start,
            )
            assert form(version, name).read(frame) == (base_offset, append_time_ms)
            message, _ = ProduceResponse.read(frame, len(CORRELATION_ID) + 1, version)
            produced = message.responses[0].partition_responses[0]
            assert (produced.base_offset, produced.log_append_time_ms) == (base_offset, append_time_ms)


UNUSUAL: list[tuple[int, int, dict[str, Any]]] = [
    (9, 13, {"error_code": 6}),
    (9, 13, {"index": 4}),
    (9, 12, {"name": "u"}),
    (9, 13, {"throttle_ms": 1}),
    (9, 13, {"error_message": "no"}),
    (9, 13, {"error_message": ""}),
    (9, 13, {"record_errors": [BatchIndexAndErrorMessage(batch_index=0)]}),
    (10, 13, {"current_leader": LeaderIdAndEpoch(leader_id=1, leader_epoch=2)}),
    (10, 13, {"nodes": [NodeEndpoint(node_id=1, host="h", port=1)]}),
]
"""The first and the last version that can say it, and what an answer says."""


@pytest.mark.parametrize(("first", "last", "fields"), UNUSUAL, ids=lambda value: str(value))
def test_any_other_answer_is_left_to_the_message(first: int, last: int, fields: dict[str, Any]) -> None:
    for version in range(first, last + 1):
        assert form(version).read(answer(version, **fields)) is None


@pytest.mark.parametrize("version", VERSIONS)
def test_no_changed_byte_outside_of_offsets_and_time_is_taken_for_the_usual_answer(version: int) -> None:
    frame = answer(version)
    read = form(version).read
    assert read(frame) == (7, -1)
    offsets = range(len(frame) - 33, len(frame) - 9)
    for place in range(len(CORRELATION_ID), len(frame)):
        changed = bytearray(frame)
        changed[place] ^= 1
        assert (read(bytes(changed)) is None) == (place not in offsets), place
    for cut in range(len(frame)):
        assert read(frame[:cut]) is None
    assert read(frame + b"\0") is None
    assert read(memoryview(frame)) is None
