"""Produce and Fetch by hand: the two APIs whose cost is the broker's cost (DESIGN section 4).

Requests are decoded from the connection's own buffer and their records stay views into it; responses are framed here
(size, correlation id, tags) so that no second pass over them is needed, and fetched regions are never copied when they
are large. `tests/unit/protocol/test_hot.py` holds every version equal to the compiled codecs in `messages/`; nothing
else in the project is encoded by hand. Any malformed request raises `MalformedMessage` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

from tidelog.protocol.errors import MalformedMessage

Buffer = bytes | bytearray | memoryview

# A region up to this size is copied into the response's head: one iovec less is worth more than the copy.
INLINE_REGION_BYTES_MAX = 4096

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_FRAME_HEAD = Struct(">ii")
_PRODUCE_ARGUMENTS = Struct(">hi")
_PRODUCED = Struct(">ihqq")
_PRODUCED_WITH_START = Struct(">ihqqq")
_LEADER_FIELD = Struct(">BBiiB")  # tag, size, leader id, leader epoch, no tags
_FETCH_REPLICA = Struct(">i")
_FETCH_LIMITS = Struct(">iiib")
_FETCH_SESSION = Struct(">ii")
_FETCHED_HEAD = Struct(">ihqqq")
_FETCHED_HEAD_V4 = Struct(">ihqq")
_ABORTED = Struct(">qq")
_ABORTED_FLEXIBLE = Struct(">qqB")
_REPLICA_STATE = Struct(">iq")
_DIVERGING_FIELD = Struct(">BBiqB")  # tag, size, epoch, end offset, no tags

PRODUCE_FLEXIBLE_FROM = 9
FETCH_FLEXIBLE_FROM = 12
TOPIC_ID_FROM = 13  # both APIs: KIP-516


def _uvarint(buffer: Buffer, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 28:
            raise MalformedMessage("unsigned varint longer than five bytes")


def append_uvarint(out: bytearray, value: int) -> None:
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _skip_tags(buffer: Buffer, position: int) -> int:
    count, position = _uvarint(buffer, position)
    for _ in range(count):
        _, position = _uvarint(buffer, position)
        size_bytes, position = _uvarint(buffer, position)
        position += size_bytes
        if position > len(buffer):
            raise MalformedMessage("tagged field runs past the request")
    return position


def _length(buffer: Buffer, position: int, flexible: bool, fixed: Struct) -> tuple[int, int]:
    """The length of a string, byte string or array; -1 for null."""
    if flexible:
        length, position = _uvarint(buffer, position)
        return length - 1, position
    return fixed.unpack_from(buffer, position)[0], position + fixed.size


def _text(buffer: Buffer, position: int, flexible: bool) -> tuple[str | None, int]:
    length, position = _length(buffer, position, flexible, _INT16)
    if length < 0:
        return None, position
    end = position + length
    if end > len(buffer):
        raise MalformedMessage("string runs past the request")
    return str(buffer[position:end], "utf-8"), end


def _topic(buffer: Buffer, position: int, version: int, flexible: bool) -> tuple[str | bytes, int]:
    if version >= TOPIC_ID_FROM:
        end = position + 16
        if end > len(buffer):
            raise MalformedMessage("topic id runs past the request")
        return bytes(buffer[position:end]), end
    name, position = _text(buffer, position, flexible)
    if name is None:
        raise MalformedMessage("topic name is null")
    return name, position


# ---------------------------------------------------------------------------------------------------------- Produce


class ProduceRequest(NamedTuple):
    """`topics`: (name, or 16-byte id from version 13; [(partition index, records or None)]). Records are views."""

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[tuple[str | bytes, list[tuple[int, memoryview | None]]]]


class ProducedPartition(NamedTuple):
    """One partition's answer; offsets -1 and an error code where it failed."""

    index: int
    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    error_message: str | None = None
    current_leader: tuple[int, int] | None = None  # (leader id, leader epoch), sent from version 10 (KIP-951)


def decode_produce(buffer: memoryview, position: int, version: int) -> ProduceRequest:
    """Decode a Produce request body that starts at `position` of the frame. Raises MalformedMessage."""
    try:
        return _decode_produce(buffer, position, version)
    except (IndexError, StructError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"Produce version {version}: {error}") from None


def _decode_produce(buffer: memoryview, position: int, version: int) -> ProduceRequest:
    flexible = version >= PRODUCE_FLEXIBLE_FROM
    size = len(buffer)
    transactional_id, position = _text(buffer, position, flexible)
    acks, timeout_ms = _PRODUCE_ARGUMENTS.unpack_from(buffer, position)
    topic_count, position = _length(buffer, position + 6, flexible, _INT32)
    topics: list[tuple[str | bytes, list[tuple[int, memoryview | None]]]] = []
    for _ in range(topic_count):
        topic, position = _topic(buffer, position, version, flexible)
        partition_count, position = _length(buffer, position, flexible, _INT32)
        partitions: list[tuple[int, memoryview | None]] = []
        for _ in range(partition_count):
            index = _INT32.unpack_from(buffer, position)[0]
            length, position = _length(buffer, position + 4, flexible, _INT32)
            if length < 0:
                partitions.append((index, None))
            else:
                end = position + length
                if end > size:
                    raise MalformedMessage("records run past the request")
                partitions.append((index, buffer[position:end]))
                position = end
            if flexible:
                position = position + 1 if buffer[position] == 0 else _skip_tags(buffer, position)
        if flexible:
            position = position + 1 if buffer[position] == 0 else _skip_tags(buffer, position)
        topics.append((topic, partitions))
    if flexible:
        position = _skip_tags(buffer, position)
    if position != size:
        raise MalformedMessage(f"Produce version {version}: {size - position} bytes left over")
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _append_text(out: bytearray, text: str | None, flexible: bool) -> None:
    data = b"" if text is None else text.encode()
    if flexible:
        append_uvarint(out, 0 if text is None else len(data) + 1)
    else:
        out += _INT16.pack(-1 if text is None else len(data))
    out += data


def _append_count(out: bytearray, count: int, flexible: bool) -> None:
    if flexible:
        append_uvarint(out, count + 1)
    else:
        out += _INT32.pack(count)


def _append_topic(out: bytearray, topic: str | bytes, version: int, flexible: bool) -> None:
    if version >= TOPIC_ID_FROM:
        assert isinstance(topic, bytes)
        out += topic
    else:
        assert isinstance(topic, str)
        _append_text(out, topic, flexible)


def encode_produce_response(
    correlation_id: int,
    version: int,
    topics: Sequence[tuple[str | bytes, Sequence[ProducedPartition]]],
    throttle_time_ms: int = 0,
) -> bytearray:
    """The whole response frame, size prefix and header included."""
    flexible = version >= PRODUCE_FLEXIBLE_FROM
    out = bytearray(9 if flexible else 8)
    _append_count(out, len(topics), flexible)
    for topic, partitions in topics:
        _append_topic(out, topic, version, flexible)
        _append_count(out, len(partitions), flexible)
        for partition in partitions:
            _append_produced(out, partition, version)
        if flexible:
            out.append(0)
    out += _INT32.pack(throttle_time_ms)
    if flexible:
        out.append(0)
    _FRAME_HEAD.pack_into(out, 0, len(out) - 4, correlation_id)
    return out


def _append_produced(out: bytearray, partition: ProducedPartition, version: int) -> None:
    index, error_code, base_offset, append_time_ms, start_offset, message, leader = partition
    if version < 5:
        out += _PRODUCED.pack(index, error_code, base_offset, append_time_ms)
        return
    out += _PRODUCED_WITH_START.pack(index, error_code, base_offset, append_time_ms, start_offset)
    if version >= PRODUCE_FLEXIBLE_FROM:
        out.append(1)  # no record errors
        if message is None:
            out.append(0)
        else:
            _append_text(out, message, True)
        if leader is None or version < 10:
            out.append(0)
        else:
            out.append(1)
            out += _LEADER_FIELD.pack(0, 9, leader[0], leader[1], 0)
    elif version == 8:
        out += b"\0\0\0\0"
        _append_text(out, message, False)


# ------------------------------------------------------------------------------------------------------------ Fetch


class FetchPartition(NamedTuple):
    """What one partition of a Fetch asks for; -1 where the version does not carry a field."""

    topic: str | bytes
    index: int
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    log_start_offset: int
    max_bytes: int


class FetchRequest(NamedTuple):
    """`partitions` and `forgotten` are flat, in request order. `replica_id` is -1 for a consumer."""

    replica_id: int
    replica_epoch: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    partitions: list[FetchPartition]
    forgotten: list[tuple[str | bytes, int]]
    rack_id: str


class FetchedPartition:
    """One partition's answer. `regions` are views of whole record batches, `size_bytes` their sum."""

    __slots__ = (
        "aborted",
        "current_leader",
        "diverging",
        "error_code",
        "high_watermark",
        "index",
        "last_stable_offset",
        "log_start_offset",
        "preferred_read_replica",
        "regions",
        "size_bytes",
        "topic",
    )

    def __init__(
        self,
        topic: str | bytes,
        index: int,
        error_code: int = 0,
        high_watermark: int = -1,
        last_stable_offset: int = -1,
        log_start_offset: int = -1,
        regions: Sequence[Buffer] = (),
        size_bytes: int = 0,
        aborted: Sequence[tuple[int, int]] | None = None,
        diverging: tuple[int, int] | None = None,
        current_leader: tuple[int, int] | None = None,
        preferred_read_replica: int = -1,
    ) -> None:
        self.topic = topic
        self.index = index
        self.error_code = error_code
        self.high_watermark = high_watermark
        self.last_stable_offset = last_stable_offset
        self.log_start_offset = log_start_offset
        self.regions = regions
        self.size_bytes = size_bytes
        self.aborted = aborted  # [(producer id, first offset)], None for read_uncommitted
        self.diverging = diverging  # (epoch, end offset): the follower must truncate (KIP-595)
        self.current_leader = current_leader  # (leader id, leader epoch)
        self.preferred_read_replica = preferred_read_replica


_FETCH_PARTITION = {
    4: Struct(">iqi"),
    5: Struct(">iqqi"),
    9: Struct(">iiqqi"),
    12: Struct(">iiqiqi"),
}


def decode_fetch(buffer: memoryview, position: int, version: int) -> FetchRequest:
    """Decode a Fetch request body that starts at `position` of the frame. Raises MalformedMessage."""
    try:
        return _decode_fetch(buffer, position, version)
    except (IndexError, StructError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"Fetch version {version}: {error}") from None


def _decode_fetch(buffer: memoryview, position: int, version: int) -> FetchRequest:
    flexible = version >= FETCH_FLEXIBLE_FROM
    replica_id = replica_epoch = session_epoch = -1
    session_id = 0
    forgotten: list[tuple[str | bytes, int]] = []
    rack_id: str | None = ""
    if version < 15:
        replica_id = _FETCH_REPLICA.unpack_from(buffer, position)[0]
        position += 4
    max_wait_ms, min_bytes, max_bytes, isolation_level = _FETCH_LIMITS.unpack_from(buffer, position)
    position += 13
    if version >= 7:
        session_id, session_epoch = _FETCH_SESSION.unpack_from(buffer, position)
        position += 8
    partitions, position = _fetch_partitions(buffer, position, version, flexible)
    if version >= 7:
        forgotten, position = _forgotten(buffer, position, version, flexible)
    if version >= 11:
        rack_id, position = _text(buffer, position, flexible)
    if flexible:
        if buffer[position] == 0:
            position += 1
        else:
            tag, position = _replica_state(buffer, position)
            if tag is not None:
                replica_id, replica_epoch = tag
    if position != len(buffer):
        raise MalformedMessage(f"Fetch version {version}: {len(buffer) - position} bytes left over")
    return FetchRequest(
        replica_id, replica_epoch, max_wait_ms, min_bytes, max_bytes, isolation_level, session_id, session_epoch,
        partitions, forgotten, rack_id or "",
    )  # fmt: skip


def _fetch_partitions(
    buffer: memoryview, position: int, version: int, flexible: bool
) -> tuple[list[FetchPartition], int]:
    layout = _FETCH_PARTITION[12 if version >= 12 else 9 if version >= 9 else 5 if version >= 5 else 4]
    partitions: list[FetchPartition] = []
    topic_count, position = _length(buffer, position, flexible, _INT32)
    for _ in range(topic_count):
        topic, position = _topic(buffer, position, version, flexible)
        partition_count, position = _length(buffer, position, flexible, _INT32)
        for _ in range(partition_count):
            values = layout.unpack_from(buffer, position)
            position += layout.size
            if flexible:
                position = position + 1 if buffer[position] == 0 else _skip_tags(buffer, position)
                partitions.append(FetchPartition(topic, *values))
            elif version >= 9:
                index, leader_epoch, offset, start_offset, max_bytes = values
                partitions.append(FetchPartition(topic, index, leader_epoch, offset, -1, start_offset, max_bytes))
            elif version >= 5:
                index, offset, start_offset, max_bytes = values
                partitions.append(FetchPartition(topic, index, -1, offset, -1, start_offset, max_bytes))
            else:
                index, offset, max_bytes = values
                partitions.append(FetchPartition(topic, index, -1, offset, -1, -1, max_bytes))
        if flexible:
            position = position + 1 if buffer[position] == 0 else _skip_tags(buffer, position)
    return partitions, position


def _forgotten(
    buffer: memoryview, position: int, version: int, flexible: bool
) -> tuple[list[tuple[str | bytes, int]], int]:
    forgotten: list[tuple[str | bytes, int]] = []
    topic_count, position = _length(buffer, position, flexible, _INT32)
    for _ in range(topic_count):
        topic, position = _topic(buffer, position, version, flexible)
        partition_count, position = _length(buffer, position, flexible, _INT32)
        for _ in range(partition_count):
            forgotten.append((topic, _INT32.unpack_from(buffer, position)[0]))
            position += 4
        if flexible:
            position = _skip_tags(buffer, position)
    return forgotten, position


def _replica_state(buffer: memoryview, position: int) -> tuple[tuple[int, int] | None, int]:
    """The request's tagged fields: tag 1 is ReplicaState (KIP-903), the others are skipped."""
    found: tuple[int, int] | None = None
    count, position = _uvarint(buffer, position)
    for _ in range(count):
        tag, position = _uvarint(buffer, position)
        size_bytes, position = _uvarint(buffer, position)
        if position + size_bytes > len(buffer):
            raise MalformedMessage("tagged field runs past the request")
        if tag == 1:
            found = _REPLICA_STATE.unpack_from(buffer, position)
        position += size_bytes
    return found, position


def encode_fetch_response(
    correlation_id: int,
    version: int,
    error_code: int,
    session_id: int,
    partitions: Sequence[FetchedPartition],
    throttle_time_ms: int = 0,
) -> list[Buffer]:
    """The whole response frame as chunks to write in order; large regions are chunks of their own, uncopied.

    Partitions of one topic must be neighbours in `partitions`: each run becomes one topic entry.
    """
    flexible = version >= FETCH_FLEXIBLE_FROM
    out = bytearray(9 if flexible else 8)
    chunks: list[Buffer] = [out]
    head, frame_bytes = out, -4
    out += _INT32.pack(throttle_time_ms)
    if version >= 7:
        out += _INT16.pack(error_code)
        out += _INT32.pack(session_id)
    runs = _topic_runs(partitions)
    _append_count(out, len(runs), flexible)
    for start, end in runs:
        _append_topic(out, partitions[start].topic, version, flexible)
        _append_count(out, end - start, flexible)
        for partition in partitions[start:end]:
            _append_fetched_head(out, partition, version, flexible)
            for region in partition.regions:
                if len(region) <= INLINE_REGION_BYTES_MAX:
                    out += region
                else:
                    frame_bytes += len(out) + len(region)
                    out = bytearray()
                    chunks += (region, out)
            if flexible:
                _append_fetched_tags(out, partition)
        if flexible:
            out.append(0)
    if flexible:
        out.append(0)
    _FRAME_HEAD.pack_into(head, 0, frame_bytes + len(out), correlation_id)
    return chunks


def _topic_runs(partitions: Sequence[FetchedPartition]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    start = 0
    for position in range(1, len(partitions) + 1):
        if position == len(partitions) or partitions[position].topic != partitions[start].topic:
            runs.append((start, position))
            start = position
    return runs


def _append_fetched_head(out: bytearray, partition: FetchedPartition, version: int, flexible: bool) -> None:
    if version >= 5:
        out += _FETCHED_HEAD.pack(
            partition.index, partition.error_code, partition.high_watermark, partition.last_stable_offset,
            partition.log_start_offset,
        )  # fmt: skip
    else:
        out += _FETCHED_HEAD_V4.pack(
            partition.index, partition.error_code, partition.high_watermark, partition.last_stable_offset
        )
    aborted = partition.aborted
    if aborted is None:
        out += b"\0" if flexible else b"\xff\xff\xff\xff"
    else:
        _append_count(out, len(aborted), flexible)
        for producer_id, first_offset in aborted:
            if flexible:
                out += _ABORTED_FLEXIBLE.pack(producer_id, first_offset, 0)
            else:
                out += _ABORTED.pack(producer_id, first_offset)
    if version >= 11:
        out += _INT32.pack(partition.preferred_read_replica)
    _append_count(out, partition.size_bytes, flexible)


def _append_fetched_tags(out: bytearray, partition: FetchedPartition) -> None:
    diverging, leader = partition.diverging, partition.current_leader
    out.append((diverging is not None) + (leader is not None))
    if diverging is not None:
        out += _DIVERGING_FIELD.pack(0, 13, diverging[0], diverging[1], 0)
    if leader is not None:
        out += _LEADER_FIELD.pack(1, 9, leader[0], leader[1], 0)
