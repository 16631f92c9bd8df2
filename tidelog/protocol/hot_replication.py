"""What of Fetch is done by hand between brokers: a follower's requests and the answers to them, at version 18.

A follower's steady state is one shape: an incremental request with one changed partition and an answer with one
partition, so these two are fixed-offset structs; any other number of partitions is a loop over the same pieces. What
has other shapes (forgotten topics, unexpected tags) goes through the compiled messages: `None` says so. Held equal to
them by `tests/unit/protocol/test_hot_replication.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from tidelog.protocol.codec.decoding import ELEMENT_COST, ELEMENTS_MAX, REQUEST_BUDGET, TAGGED_FIELDS_MAX
from tidelog.protocol.codec.primitives import continue_uvarint, read_uvarint, write_uvarint
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.hot import Buffer

VERSION = 18
# An answer with records up to this size is of one piece: it is copied for every follower, and never read twice.
INLINE_BYTES_MAX = 32 * 1024

UNLIMITED_WAIT_MS = 2**31 - 1

# As many as the compiled decoder takes; a request with more is left to it, which says what is wrong.
PARTITIONS_ASKED_MAX = REQUEST_BUDGET // ELEMENT_COST

# max wait, min bytes, max bytes, isolation level, session id, session epoch
_REQUEST_HEAD = Struct(">iiibii")
# index, leader epoch, fetch offset, last fetched epoch, log start, max bytes, no tags
_PARTITION = Struct(">iiqiqiB")
# no forgotten topics, no rack, one tag: the replica's state of 13 bytes: id, epoch, no tags
_REQUEST_TAIL = Struct(">BBBBBiqB")
_ONE_REQUEST = Struct(">iiibii B16sB iiqiqiB B BBBBBiqB".replace(" ", ""))
ONE_REQUEST_BYTES = _ONE_REQUEST.size
# The same with what a template knows as bytes: all before the session id, and all from the partition's max bytes on.
_HEAD_OF_ALL = Struct(">iiib")
_TAIL_OF_ONE = Struct(">iBBBBBBBiqB")
_ONE_OF_TEMPLATE = Struct(f">{_HEAD_OF_ALL.size}s ii B16sB iiqiq {_TAIL_OF_ONE.size}s".replace(" ", ""))
# The same by what differs in a follower's next request: all before the session epoch, the epoch, all between, the fetch
# offset, all behind.
read_repeated = Struct(">17si26sq36s").unpack_from
_ONE_FIXED = (0, 0, 1, 1, 1, 1, 13)

# throttle time, error, session id
_RESPONSE_HEAD = Struct(">ihi")
# index, error, high watermark, last stable offset, log start, aborted transactions, preferred replica
_FETCHED = Struct(">ihqqqBi")
# error, session id, topics, topic id, partitions, index, error: the same in all answers to a session for a partition
_ANSWER_BEGIN = Struct(">hi B16sB ih".replace(" ", ""))
# the throttle time, these bytes, what follows them for the partition, and the first byte of the records' length
_ONE_RESPONSE = Struct(f">4x{_ANSWER_BEGIN.size}sqqqBiB")
_ONE_RESPONSE_BYTES_MIN = _ONE_RESPONSE.size + 3
_ONE_RESPONSE_FRAME = Struct(">iiB ihi B16sB ihqqqBi".replace(" ", ""))
_EMPTY_RESPONSE_FRAME = Struct(">iiBihiBB")
_INT32 = Struct(">i")
_TWO_BYTES = Struct("BB").pack
_NO_TAGS = b"\0\0\0"  # of the partition, the topic, the response
_DIVERGING = Struct(">iq")


class FollowerPartition(NamedTuple):
    """What a follower says of one partition, which is also what it wants of it."""

    topic_id: bytes
    partition: int
    leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int


class FollowerRequest(NamedTuple):
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    session_id: int
    session_epoch: int
    replica_id: int
    replica_epoch: int
    partitions: list[FollowerPartition]


class RequestTemplate:
    """Makes the requests of one follower: all that stays the same is packed once per broker epoch."""

    __slots__ = ("_head", "_one_head", "_one_tail", "_tail", "broker_epoch", "partition_bytes_max")

    def __init__(
        self,
        replica_id: int,
        broker_epoch: int,
        max_wait_ms: int,
        min_bytes: int,
        max_bytes: int,
        partition_bytes_max: int,
    ) -> None:
        self.broker_epoch = broker_epoch
        self.partition_bytes_max = partition_bytes_max
        self._head = (max_wait_ms, min_bytes, max_bytes, 0)
        self._tail = (1, 1, 1, 1, 13, replica_id, broker_epoch, 0)
        self._one_head = _HEAD_OF_ALL.pack(*self._head)
        self._one_tail = _TAIL_OF_ONE.pack(partition_bytes_max, 0, 0, *self._tail)

    def one(
        self, session_id: int, session_epoch: int, topic_id: bytes, index: int, leader_epoch: int, fetch_offset: int,
        last_fetched_epoch: int, log_start_offset: int,
    ) -> bytes:  # fmt: skip
        """An incremental request that mentions one partition."""
        return _ONE_OF_TEMPLATE.pack(
            self._one_head, session_id, session_epoch, 2, topic_id, 2, index, leader_epoch, fetch_offset,
            last_fetched_epoch, log_start_offset, self._one_tail,
        )  # fmt: skip

    def many(
        self,
        session_id: int,
        session_epoch: int,
        partitions: Iterable[tuple[bytes, int, int, int, int, int]],
        forgotten: Iterable[tuple[bytes, int]] = (),
        *,
        wait_ms_max: int = UNLIMITED_WAIT_MS,
    ) -> bytearray:
        """Any number; each as in `one`, from topic id to log start. `forgotten`: (topic id, index)."""
        max_wait_ms = min(self._head[0], wait_ms_max)
        out = bytearray(_REQUEST_HEAD.pack(max_wait_ms, *self._head[1:], session_id, session_epoch))
        by_topic: dict[bytes, list[tuple[bytes, int, int, int, int, int]]] = {}
        for entry in partitions:
            by_topic.setdefault(entry[0], []).append(entry)
        write_uvarint(out, len(by_topic) + 1)
        for topic_id, of_topic in by_topic.items():
            out += topic_id
            write_uvarint(out, len(of_topic) + 1)
            for entry in of_topic:
                out += _PARTITION.pack(*entry[1:], self.partition_bytes_max, 0)
            out.append(0)
        gone: dict[bytes, list[int]] = {}
        for topic_id, index in forgotten:
            gone.setdefault(topic_id, []).append(index)
        write_uvarint(out, len(gone) + 1)
        for topic_id, indexes in gone.items():
            out += topic_id
            write_uvarint(out, len(indexes) + 1)
            for index in indexes:
                out += index.to_bytes(4, "big")
            out.append(0)
        out += _REQUEST_TAIL.pack(*self._tail[0:5], *self._tail[5:])[1:]
        return out


def decode_one(body: memoryview) -> tuple[int, ...] | None:
    """The fields of a request of ONE_REQUEST_BYTES, if it is what `RequestTemplate.one` makes; else None.

    By position: 0 max wait, 1 min bytes, 2 max bytes, 4 session id, 5 session epoch, 7 topic id, 9 index, 10 leader
    epoch, 11 fetch offset, 12 last fetched epoch, 13 log start, 14 partition bytes, 22 replica id, 23 broker epoch.
    """
    fields = _ONE_REQUEST.unpack_from(body)
    if fields[6] != 2 or fields[8] != 2 or fields[15:22] != _ONE_FIXED or fields[24]:
        return None
    return fields


def decode_follower_request(body: memoryview) -> FollowerRequest | None:
    """A request of version 18 without forgotten topics, rack or tags but the replica's; None for any other."""
    try:
        return _follower_request(body)
    except (IndexError, StructError, MalformedMessage):
        return None


def _follower_request(body: memoryview) -> FollowerRequest | None:
    max_wait_ms, min_bytes, max_bytes, _, session_id, session_epoch = _REQUEST_HEAD.unpack_from(body)
    position = _REQUEST_HEAD.size
    topics, position = read_uvarint(body, position)
    entries: list[FollowerPartition] = []
    left = PARTITIONS_ASKED_MAX - topics
    for _ in range(topics - 1):
        topic_id = bytes(body[position : position + 16])
        count, position = read_uvarint(body, position + 16)
        left -= count
        if left < 0 or count * _PARTITION.size > len(body) - position + 2 * _PARTITION.size:
            return None
        for _ in range(count - 1):
            index, leader_epoch, offset, last_epoch, log_start, partition_max, tags = _PARTITION.unpack_from(
                body, position
            )
            if tags:
                return None
            position += _PARTITION.size
            entries.append(
                FollowerPartition(topic_id, index, leader_epoch, offset, last_epoch, log_start, partition_max)
            )
        if body[position]:
            return None
        position += 1
    tail = _REQUEST_TAIL.unpack_from(body, position)
    if tail[:5] != (1, 1, 1, 1, 13) or tail[7]:
        return None
    return FollowerRequest(max_wait_ms, min_bytes, max_bytes, session_id, session_epoch, tail[5], tail[6], entries)


# ------------------------------------------------------------------------------------------------------------- answers


def encode_one_fetched(
    correlation_id: int, session_id: int, topic_id: bytes, index: int, high_watermark: int, last_stable_offset: int,
    log_start_offset: int, regions: list[Buffer], size_bytes: int,
) -> bytes | list[Buffer]:  # fmt: skip
    """The response frame to a follower with the records of one partition."""
    if 0x7F <= size_bytes < 0x3FFF:
        length: bytes | bytearray = _TWO_BYTES(size_bytes + 1 & 0x7F | 0x80, size_bytes + 1 >> 7)
    else:
        length = bytearray()
        write_uvarint(length, size_bytes + 1)
    head = _ONE_RESPONSE_FRAME.pack(
        _ONE_RESPONSE_FRAME.size - 4 + len(length) + size_bytes + 3, correlation_id, 0, 0, 0, session_id, 2, topic_id,
        2, index, 0, high_watermark, last_stable_offset, log_start_offset, 0, -1,
    )  # fmt: skip
    if size_bytes <= INLINE_BYTES_MAX:
        return b"".join((head, length, *regions, _NO_TAGS))
    return [head + length, *regions, _NO_TAGS]


def readdress(frame: Buffer, correlation_id: int, session_id: int) -> bytearray:
    """The same answer, of one piece, to the same request of another follower."""
    out = bytearray(frame)
    _INT32.pack_into(out, 4, correlation_id)
    _INT32.pack_into(out, 15, session_id)
    return out


def encode_nothing_fetched(correlation_id: int, session_id: int) -> bytes:
    """The response frame to a follower that has waited in vain."""
    return _EMPTY_RESPONSE_FRAME.pack(_EMPTY_RESPONSE_FRAME.size - 4, correlation_id, 0, 0, 0, session_id, 1, 0)


# topic id, index, error, high watermark, log start, records, diverging (epoch, end offset) or None
FetchedRecords = tuple[bytes, int, int, int, int, "memoryview | None", "tuple[int, int] | None"]


def decode_one_fetched(body: memoryview) -> tuple[bytes, int, int, memoryview] | None:
    """(beginning, high watermark, log start, records) of an answer, if `partition_answered` knows its beginning.

    None for an answer with tags, with aborted transactions, or with bytes that are none.
    """
    if len(body) < _ONE_RESPONSE_BYTES_MIN:
        return None
    begin, high_watermark, _, log_start, aborted, _, length = _ONE_RESPONSE.unpack_from(body)
    position = _ONE_RESPONSE.size
    if length >= 0x80:
        if body[position] < 0x80:
            length += (body[position] << 7) - 0x80
            position += 1
        else:
            try:
                length, position = continue_uvarint(body, position, length)
            except (IndexError, MalformedMessage):
                return None
    end = position + length - 1
    if end < position or body[end:] != _NO_TAGS or aborted > 1:
        return None
    return begin, high_watermark, log_start, body[position:end]


def partition_answered(begin: bytes, session_id: int) -> tuple[bytes, int] | None:
    """(topic id, index) of an answer with one partition and without an error to this session; None for any other."""
    error, answered_id, topics, topic_id, partitions, index, partition_error = _ANSWER_BEGIN.unpack(begin)
    if error or answered_id != session_id or topics != 2 or partitions != 2 or partition_error:
        return None
    return topic_id, index


def decode_fetched(body: memoryview) -> tuple[int, int, list[FetchedRecords]] | None:
    """(error, session id, partitions) of a Fetch response of version 18; None when it is not understood."""
    try:
        return _fetched(body)
    except (IndexError, StructError, MalformedMessage):
        return None


def _fetched(body: memoryview) -> tuple[int, int, list[FetchedRecords]] | None:
    _, error, session_id = _RESPONSE_HEAD.unpack_from(body)
    topics, position = read_uvarint(body, _RESPONSE_HEAD.size)
    fetched: list[FetchedRecords] = []
    left = ELEMENTS_MAX - topics
    for _ in range(topics - 1):
        topic_id = bytes(body[position : position + 16])
        partitions, position = read_uvarint(body, position + 16)
        left -= partitions
        if left < 0:
            return None
        for _ in range(partitions - 1):
            index, code, high_watermark, _, log_start, aborted, _ = _FETCHED.unpack_from(body, position)
            if aborted > 1:
                return None  # never asked for by a follower
            length, position = read_uvarint(body, position + _FETCHED.size)
            records = body[position : position + length - 1] if length > 1 else None
            position += max(length - 1, 0)
            tags, position = read_uvarint(body, position)
            if tags > TAGGED_FIELDS_MAX:
                return None
            diverging = None
            for _ in range(tags):
                tag, position = read_uvarint(body, position)
                tag_bytes, position = read_uvarint(body, position)
                if tag == 0:
                    diverging = _DIVERGING.unpack_from(body, position)
                position += tag_bytes
            fetched.append((topic_id, index, code, high_watermark, log_start, records, diverging))
        if body[position]:
            return None
        position += 1
    return (error, session_id, fetched) if position <= len(body) else None
