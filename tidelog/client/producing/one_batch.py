"""The Produce request of one batch, and its usual answer: their bytes without a message object for each part.

A record that is sent alone is such a request, and nearly all of its bytes are those of the request before. Pure.
Invariants: the bytes are the ones that the message's own encoder writes, because they are cut out of them. An answer
that differs from the usual one in anything but offsets and time is left to the message's decoder.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from typing import ClassVar

from tidelog.client.model import TopicPartition
from tidelog.protocol.codec.encoding import CUT_BYTES, Buffer
from tidelog.protocol.codec.primitives import write_uvarint
from tidelog.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)

FIRST_VERSION = ProduceRequest.FLEXIBLE_FROM
_REQUEST_END = b"\0\0\0"
"""No tagged fields of partition, topic and request."""
_NO_RECORDS = b"\1"
"""The length of records that are empty."""
_OFFSETS = Struct(">qqq")
"""Base offset, append time and log start of the answer."""
_ANSWER_END_BYTES = 9
"""No record errors, no message, no tagged fields, and the throttle time, 0."""
_CORRELATION_ID_BYTES = 4


class OneBatchForm:
    """The bytes that all requests for one partition have in common, and those of their usual answers."""

    __slots__ = ("_answer_bytes", "_answer_end", "_answer_start", "_offsets_at", "request_start")

    def __init__(self, request: bytes, answer: bytes) -> None:
        """`request` has empty records, `answer` the header's tagged fields in front, no error and no throttle time."""
        self.request_start = request.removesuffix(_NO_RECORDS + _REQUEST_END)
        end = len(answer) - _ANSWER_END_BYTES
        self._answer_start = answer[: end - _OFFSETS.size]
        self._answer_end = answer[end:]
        self._answer_bytes = _CORRELATION_ID_BYTES + len(answer)
        self._offsets_at = _CORRELATION_ID_BYTES + len(self._answer_start)

    def read(self, frame: bytes | memoryview) -> tuple[int, int] | None:
        """Base offset and append time of the usual answer: appended, and nothing else to say. None for any other."""
        if (
            len(frame) == self._answer_bytes
            and frame.__class__ is bytes
            and frame.startswith(self._answer_start, _CORRELATION_ID_BYTES)
            and frame.endswith(self._answer_end)
        ):
            base_offset, append_time_ms, _ = _OFFSETS.unpack_from(frame, self._offsets_at)
            return base_offset, append_time_ms
        return None


@lru_cache(4096)
def one_batch_form(
    partition: TopicPartition,
    topic_id: bytes,
    version: int,
    transactional_id: str | None,
    acks: int,
    timeout_ms: int,
) -> OneBatchForm:
    """The form of the requests for one partition, in a version from FIRST_VERSION on."""
    name, index = partition
    data = PartitionProduceData(index=index, records=b"")
    request = ProduceRequest(
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=timeout_ms,
        topic_data=[TopicProduceData(name=name, topic_id=topic_id, partition_data=[data])],
    )
    produced = PartitionProduceResponse(index=index)
    answer = ProduceResponse(
        responses=[TopicProduceResponse(name=name, topic_id=topic_id, partition_responses=[produced])]
    )
    return OneBatchForm(request.encode(version), b"\0" + answer.encode(version))


class OneBatchRequest:
    """A request that a `Connection` writes as it writes a `ProduceRequest`."""

    __slots__ = ("_records", "_start")

    API_KEY: ClassVar[int | None] = ProduceRequest.API_KEY
    FLEXIBLE_FROM: ClassVar[int] = ProduceRequest.FLEXIBLE_FROM

    def __init__(self, form: OneBatchForm, records: bytearray) -> None:
        self._start = form.request_start
        self._records = records

    def write_pieces(self, out: bytearray, version: int) -> list[Buffer]:
        """As `Message.write_pieces`."""
        records = self._records
        size_bytes = len(records)
        out += self._start
        write_uvarint(out, size_bytes + 1)
        if size_bytes < CUT_BYTES:
            out += records
            out += _REQUEST_END
            return [out]
        return [out, records, _REQUEST_END]
