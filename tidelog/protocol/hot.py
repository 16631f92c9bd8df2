"""What of Produce and Fetch is worth doing by hand; all else goes through the compiled messages (docs/decisions/0004).

Three things are: the request that most clients send (one partition), the produce response, and the fetch response,
whose regions of record batches must not be copied. Responses are framed here (size, correlation id, tags), so that no
second pass over them is needed. `tests/unit/protocol/test_hot.py` holds every version equal to the compiled codecs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from struct import error as StructError
from typing import NamedTuple, Protocol, cast

from tidelog.protocol.batches.record_batch import ATTRIBUTES_LOW_OFFSET, TRANSACTIONAL_FLAG
from tidelog.protocol.codec.primitives import continue_uvarint, write_uvarint
from tidelog.protocol.messages.produce import ProduceRequest as ProduceMessage

Buffer = bytes | bytearray | memoryview

# A region up to this size is copied into the response's head: one iovec less is worth more than the copy.
INLINE_REGION_BYTES_MAX = 4096

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_FRAME_HEAD = Struct(">ii")
# A request of one partition, by the length of its topic's name as a compact string has it, which is one byte:
# transactional id, acks, timeout, topics, length of the name, the name, partitions, index, two bytes of the records.
_ONE_PARTITION = [Struct(f">BhiBB{max(length - 1, 0)}sBiBB") for length in range(0x80)]
# The same with the topic's id, which has no length.
_ONE_PARTITION_BY_ID = Struct(">BhiB16sBiBB")
_RECORDS_AT_BY_NAME, _RECORDS_AT_BY_ID = 13, 29  # and the bytes of the name, with that of its length
# The answer, by the bytes between correlation id and offset: size, correlation id, these bytes, offset, append time,
# log start, and what ends it: record errors, message, three times no tags around the throttle time.
_ONE_PRODUCED = [Struct(f">ii{length}sqqq9s") for length in range(0x90)]
_ONE_PRODUCED_END = bytes((1, 0, 0, 0, 0, 0, 0, 0, 0))
_KNOWN_PARTITIONS_MAX = 1024
_KNOWN_HEAD_BYTES_MAX = 256
_HEAD_AT = 8  # behind API key, version and correlation id
_TOPIC_AT = 8  # in the body without a transaction: behind its absent id, acks, timeout, number of topics
_TOPIC_ID_BYTES = 16
_PARTITION_BYTES = 5  # the number of partitions and the index
_ANSWERED_ACKS = (-1, 1)
# A fetch of one partition outside of a session: wait, least and most bytes, isolation, session id and epoch, topics,
# the name (by its length) or id, partitions, index, leader epoch, offset, last epoch, log start, most bytes, and
# what ends the request: no tags, nothing forgotten, no rack. Before version 15 the replica's id comes first.
_ONE_FETCH = ">{}iiibiiB{}sBiiqiqi5s"
_ONE_FETCH_BY_NAME = [Struct(_ONE_FETCH.format("i", f"x{max(length - 1, 0)}")) for length in range(0x80)]
_ONE_FETCH_BY_ID = Struct(_ONE_FETCH.format("i", 16))
_ONE_FETCH_OF_CLIENT = Struct(_ONE_FETCH.format("", 16))
_ONE_FETCH_END = b"\0\0\1\1\0"
_FETCH_NAME_LENGTH_AT = 26
# Its answer: size, correlation id, tags, throttle time, error, session, topics, name or id, partitions, index, error,
# high watermark, last stable offset, log start, aborted transactions, preferred replica.
_ONE_READ = ">iiBihiB{}sBihqqqBi"
_ONE_READ_BY_NAME = [Struct(_ONE_READ.format(f"B{length}")) for length in range(0x7F)]
_ONE_READ_BY_ID = Struct(_ONE_READ.format(16))
_PRODUCED = Struct(">ihqq")
_PRODUCED_WITH_START = Struct(">ihqqq")
_LEADER_FIELD = Struct(">BBiiB")  # tag, size, leader id, leader epoch, no tags
_FETCHED_HEAD = Struct(">ihqqq")
_FETCHED_HEAD_V4 = Struct(">ihqq")
_ABORTED = Struct(">qq")
_ABORTED_FLEXIBLE = Struct(">qqB")
_NO_TAGS_THRICE = b"\0\0\0"
_DIVERGING_FIELD = Struct(">BBiqB")  # tag, size, epoch, end offset, no tags

PRODUCE_FLEXIBLE_FROM = 9
FETCH_FLEXIBLE_FROM = 12
TOPIC_ID_FROM = 13  # both APIs: KIP-516
PRODUCE_ADDRESSES_FROM = 10  # KIP-951
FETCH_ADDRESSES_FROM = 16
REPLICA_STATE_FROM = 15  # Fetch: the replica's id is a tag


class NodeAddress(NamedTuple):
    """Where a leader is that a response names (KIP-951)."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


# ---------------------------------------------------------------------------------------------------------- Produce


class ProduceRequest(NamedTuple):
    """`topics`: (name, or 16-byte id from version 13; [(partition index, records or None)]).

    Records are views into the request's buffer.
    """

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[tuple[str | bytes, list[tuple[int, memoryview | None]]]]


class ProducedPartition(NamedTuple):
    """One partition's answer; offsets -1 and an error code where it failed."""

    partition_index: int
    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1
    error_message: str | None = None
    current_leader: tuple[int, int] | None = None  # (leader id, leader epoch), sent from version 10 (KIP-951)
    record_errors: tuple[tuple[int, str], ...] = ()  # (index in the batch, message), sent from version 8 (KIP-467)


def decode_produce(buffer: memoryview, version: int) -> ProduceRequest:
    """Decode a Produce request body; bytes behind it are ignored. Raises MalformedMessage."""
    message, _ = ProduceMessage.read(buffer, 0, version)
    by_id = version >= TOPIC_ID_FROM
    return ProduceRequest(
        message.transactional_id,
        message.acks,
        message.timeout_ms,
        [
            (
                topic.topic_id if by_id else topic.name,
                [(partition.index, cast("memoryview | None", partition.records)) for partition in topic.partition_data],
            )
            for topic in message.topic_data
        ],
    )


# A Produce request of one partition and acks of 1 or all, as most clients send it: topic (its name, or its id from
# version 13), index, records, acks, timeout in ms, transactional id. A plain tuple, for it is made for every request.
OneProduce = tuple["str | bytes", int, memoryview, int, int, "str | None"]


def decode_one_produce(frame: memoryview, position: int, version: int) -> OneProduce | None:
    """The request whose body begins at `position`, if it is flexible and of one topic, one partition and no tags; None
    for any other.

    The transactional id is there if the batch is transactional. A request with one of them alone is any other.
    """
    if version < PRODUCE_FLEXIBLE_FROM:
        return None
    try:
        transactional_id = None
        id_length = frame[position]
        if id_length:
            if not 1 < id_length < 0x80:
                return None
            transactional_id = str(frame[position + 1 : position + id_length], "utf-8")
            position += id_length - 1  # its last byte takes the place of the byte that says that there is none
        topic: str | bytes
        if version < TOPIC_ID_FROM:
            _, acks, timeout_ms, topics, name_length, name, partitions, index, length, length_high = _ONE_PARTITION[
                frame[position + 8]
            ].unpack_from(frame, position)
            if name_length < 2:
                return None
            topic = name.decode()
            start = position + _RECORDS_AT_BY_NAME + name_length + 1
        else:
            _, acks, timeout_ms, topics, topic, partitions, index, length, length_high = (
                _ONE_PARTITION_BY_ID.unpack_from(frame, position)
            )
            start = position + _RECORDS_AT_BY_ID + 1
        if topics != 2 or partitions != 2 or acks not in _ANSWERED_ACKS:
            return None
        if length >= 0x80:
            if length_high < 0x80:
                length += (length_high << 7) - 0x80
                start += 1
            else:
                length, start = continue_uvarint(frame, start, length)
        end = start + length - 1
        if length == 0 or end + 3 != len(frame) or frame[end] or frame[end + 1] or frame[end + 2]:
            return None
        flags = frame[start + ATTRIBUTES_LOW_OFFSET] if length > ATTRIBUTES_LOW_OFFSET + 1 else 0
        if (transactional_id is None) is bool(flags & TRANSACTIONAL_FLAG):
            return None
        return topic, index, frame[start:end], acks, timeout_ms, transactional_id
    except (IndexError, StructError, UnicodeDecodeError):
        return None  # `decode_produce` says what is wrong with it


# Reads a frame: API key and version, correlation id, the head, and two bytes at the size of the records. The head is
# all between correlation id and records.
_Layout = Callable[[memoryview], tuple[int, int, bytes, int, int]]
_known_heads: dict[tuple[int, bytes], tuple[str | bytes, int, int, int, int]] = {}
"""(Version, head) of a `OneProduce` without a transaction: topic, index, acks, timeout, where its records begin."""


@lru_cache(maxsize=_KNOWN_HEAD_BYTES_MAX)
def _layout(topic_end: int) -> _Layout:
    """The layout of a frame by the place behind its topic's name or id."""
    return cast(_Layout, Struct(f">ii{topic_end - _HEAD_AT + _PARTITION_BYTES}sBB").unpack_from)


def note_head(frame: memoryview, position: int, version: int, one: OneProduce) -> int:
    """Note the head of a request, of which `decode_one_produce` has found `one` in the body at `position`.

    Returns `topic_at`, with which `decode_alike` knows such requests of this client: where the name of its topic begins
    with its length, or the negated place behind its id; 0: it knows none.
    """
    topic, index, _, acks, timeout_ms, transactional_id = one
    if version < TOPIC_ID_FROM:
        topic_at = position + _TOPIC_AT
        topic_end = topic_at + frame[topic_at]
    else:
        topic_end = position + _TOPIC_AT + _TOPIC_ID_BYTES
        topic_at = -topic_end
    if transactional_id is not None or topic_end > _KNOWN_HEAD_BYTES_MAX:
        return 0
    _, _, head, _, _ = _layout(topic_end)(frame)
    if len(_known_heads) >= _KNOWN_PARTITIONS_MAX:
        _known_heads.clear()
    _known_heads[version, head] = (topic, index, acks, timeout_ms, topic_end + _PARTITION_BYTES + 1)
    return topic_at


def decode_alike(frame: memoryview, topic_at: int) -> tuple[int, int, OneProduce] | None:
    """Version, correlation id and `OneProduce` of a request that differs from a noted one only in correlation id and
    records; None for any other.

    A client repeats all other bytes in each request to a partition, so they are decoded once.
    """
    try:
        layout = _layout(topic_at + frame[topic_at] if topic_at > 0 else -topic_at)
        version, correlation_id, head, size, size_high = layout(frame)
        known = _known_heads.get((version, head))  # a Produce's key is 0
        if known is None:
            return None
        topic, index, acks, timeout_ms, start = known
        if size >= 0x80:
            if size_high >= 0x80:
                return None
            size += (size_high << 7) - 0x80
            start += 1
        end = start + size - 1
        # Without records there is no byte of attributes, nor in a record batch of less than a header.
        if frame[end:] != _NO_TAGS_THRICE or frame[start + ATTRIBUTES_LOW_OFFSET] & TRANSACTIONAL_FLAG:
            return None
        return version, correlation_id, (topic, index, frame[start:end], acks, timeout_ms, None)
    except (IndexError, StructError):
        return None


class PipelinedProduces(NamedTuple):
    """Several requests of one client for one partition, each with the form of a `OneProduce` without a transaction."""

    topic: str | bytes
    partition_index: int
    acks: int
    timeout_ms: int
    correlation_ids: list[int]
    batches: list[memoryview]


def decode_pipelined_produces(frames: Sequence[memoryview], position: int, version: int) -> PipelinedProduces | None:
    """The requests at the start of `frames` that differ only in correlation id and batch; None if there is only one.

    `position`: where the first one's body begins. A request in a different form ends them, and so does a batch whose
    size needs more than two bytes.
    """
    first = frames[0]
    one = decode_one_produce(first, position, version)
    if one is None:
        return None
    topic, index, _, acks, timeout_ms, transactional_id = one
    if transactional_id is not None:
        return None
    by_name = version < TOPIC_ID_FROM
    records_at = position + (_RECORDS_AT_BY_NAME + first[position + 8] if by_name else _RECORDS_AT_BY_ID)
    layout = _layout(records_at - _PARTITION_BYTES)
    first_key_and_version, _, first_head, _, _ = layout(first)
    correlation_ids, batches = [], []
    for frame in frames:
        if len(frame) < records_at + 5:
            break
        key_and_version, correlation_id, head, size, size_high = layout(frame)
        if head != first_head or key_and_version != first_key_and_version:
            break
        start = records_at + 1
        if size >= 0x80:
            if size_high >= 0x80:
                break
            size += (size_high << 7) - 0x80
            start += 1
        end = start + size - 1
        if frame[end:] != _NO_TAGS_THRICE or not size:
            break
        correlation_ids.append(correlation_id)
        batches.append(frame[start:end])
    if len(batches) < 2:
        return None
    return PipelinedProduces(topic, index, acks, timeout_ms, correlation_ids, batches)


def encode_one_produced(
    correlation_id: int,
    topic: str | bytes,
    index: int,
    base_offset: int,
    log_append_time_ms: int,
    log_start_offset: int,
) -> bytes:
    """The whole response frame to a `OneProduce` that succeeded."""
    pack, size, head = _one_produced(topic, index)
    return pack(size, correlation_id, head, base_offset, log_append_time_ms, log_start_offset, _ONE_PRODUCED_END)


@lru_cache(maxsize=_KNOWN_PARTITIONS_MAX)
def _one_produced(topic: str | bytes, index: int) -> tuple[Callable[..., bytes], int, bytes]:
    """How to pack the response for a partition, its size field, and its bytes between correlation id and offset."""
    name = topic if isinstance(topic, bytes) else bytes((len(topic.encode()) + 1,)) + topic.encode()
    head = b"\x00\x02" + name + b"\x02" + index.to_bytes(4, "big", signed=True) + b"\x00\x00"
    layout = _ONE_PRODUCED[len(head)]
    return layout.pack, layout.size - 4, head


def _append_text(out: bytearray, text: str | None, flexible: bool) -> None:
    data = b"" if text is None else text.encode()
    if flexible:
        write_uvarint(out, 0 if text is None else len(data) + 1)
    else:
        out += _INT16.pack(-1 if text is None else len(data))
    out += data


def _append_count(out: bytearray, count: int, flexible: bool) -> None:
    if flexible:
        write_uvarint(out, count + 1)
    else:
        out += _INT32.pack(count)


def _append_topic(out: bytearray, topic: str | bytes, version: int, flexible: bool) -> None:
    if version >= TOPIC_ID_FROM:
        assert isinstance(topic, bytes)
        out += topic
    else:
        assert isinstance(topic, str)
        _append_text(out, topic, flexible)


def _append_addresses(out: bytearray, addresses: Sequence[NodeAddress]) -> None:
    """The tagged fields behind a response: tag 0 with the addresses, or none."""
    if not addresses:
        out.append(0)
        return
    field = bytearray()
    write_uvarint(field, len(addresses) + 1)
    for node_id, host, port, rack in addresses:
        field += _INT32.pack(node_id)
        _append_text(field, host, True)
        field += _INT32.pack(port)
        _append_text(field, rack, True)
        field.append(0)
    out += b"\1\0"
    write_uvarint(out, len(field))
    out += field


def encode_produce_response(
    correlation_id: int,
    version: int,
    topics: Sequence[tuple[str | bytes, Sequence[ProducedPartition]]],
    throttle_time_ms: int = 0,
    addresses: Sequence[NodeAddress] = (),
) -> bytearray:
    """The whole response frame, size prefix and header included. `addresses` are sent from version 10."""
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
        _append_addresses(out, addresses if version >= PRODUCE_ADDRESSES_FROM else ())
    _FRAME_HEAD.pack_into(out, 0, len(out) - 4, correlation_id)
    return out


def _append_produced(out: bytearray, partition: ProducedPartition, version: int) -> None:
    index, error_code, base_offset, append_time_ms, start_offset, message, leader, record_errors = partition
    if version < 5:
        out += _PRODUCED.pack(index, error_code, base_offset, append_time_ms)
        return
    out += _PRODUCED_WITH_START.pack(index, error_code, base_offset, append_time_ms, start_offset)
    if version >= PRODUCE_FLEXIBLE_FROM:
        write_uvarint(out, len(record_errors) + 1) if record_errors else out.append(1)
        for batch_index, reason in record_errors:
            out += _INT32.pack(batch_index)
            _append_text(out, reason, True)
            out.append(0)
        if message is None:
            out.append(0)
        else:
            _append_text(out, message, True)
        if leader is None or version < PRODUCE_ADDRESSES_FROM:
            out.append(0)
        else:
            out.append(1)
            out += _LEADER_FIELD.pack(0, 9, leader[0], leader[1], 0)
    elif version == 8:
        _append_count(out, len(record_errors), False)
        for batch_index, reason in record_errors:
            out += _INT32.pack(batch_index)
            _append_text(out, reason, False)
        _append_text(out, message, False)


# ------------------------------------------------------------------------------------------------------------ Fetch


class Aborted(Protocol):
    """A transaction whose records a read_committed client must skip from `first_offset` on."""

    @property
    def producer_id(self) -> int: ...
    @property
    def first_offset(self) -> int: ...


# A consumer's Fetch request for one partition, outside of a session: topic, index, leader epoch, offset, most bytes of
# the partition, most bytes, least bytes, wait in ms, isolation level.
OneFetch = tuple[str | bytes, int, int, int, int, int, int, int, int]


def decode_one_fetch(body: memoryview, version: int) -> OneFetch | None:
    """The request, if it is flexible, of one partition and without a session or a rack; None for any other."""
    if version < FETCH_FLEXIBLE_FROM:
        return None
    try:
        if version < TOPIC_ID_FROM:
            fields = _ONE_FETCH_BY_NAME[body[_FETCH_NAME_LENGTH_AT]].unpack(body)
        else:
            fields = (_ONE_FETCH_BY_ID if version < REPLICA_STATE_FROM else _ONE_FETCH_OF_CLIENT).unpack(body)
        if version < REPLICA_STATE_FROM:
            if fields[0] != -1:
                return None
            fields = fields[1:]
        (
            wait_ms, min_bytes, max_bytes, isolation, session_id, session_epoch, topics, topic, partitions, index,
            leader_epoch, offset, last_epoch, _, partition_max_bytes, end,
        ) = fields  # fmt: skip
        if (
            session_id
            or session_epoch != -1
            or topics != 2
            or partitions != 2
            or last_epoch >= 0
            or end != _ONE_FETCH_END
        ):
            return None
        if version < TOPIC_ID_FROM:
            topic = topic.decode()
        return topic, index, leader_epoch, offset, partition_max_bytes, max_bytes, min_bytes, wait_ms, isolation
    except (IndexError, StructError, UnicodeDecodeError):
        return None


def encode_one_read(
    correlation_id: int,
    topic: str | bytes,
    index: int,
    high_watermark: int,
    log_start_offset: int,
    has_aborted: bool,
    records: Buffer,
) -> bytes | list[Buffer]:
    """The whole response frame to a `OneFetch` that succeeded: everything up to the high watermark is stable.

    `has_aborted`: a list of aborted transactions is due, and it is empty.
    """
    size = len(records)
    if size < 0x7F:
        length = bytes((size + 1,))
    else:
        prefix = bytearray()
        write_uvarint(prefix, size + 1)
        length = bytes(prefix)
    marks = (2, index, 0, high_watermark, high_watermark, log_start_offset, has_aborted, -1)
    if isinstance(topic, str):
        name = topic.encode()
        layout = _ONE_READ_BY_NAME[len(name)]
        frame_bytes = layout.size + len(length) + size - 1
        head = layout.pack(frame_bytes, correlation_id, 0, 0, 0, 0, 2, len(name) + 1, name, *marks)
    else:
        frame_bytes = _ONE_READ_BY_ID.size + len(length) + size - 1
        head = _ONE_READ_BY_ID.pack(frame_bytes, correlation_id, 0, 0, 0, 0, 2, topic, *marks)
    if size <= INLINE_REGION_BYTES_MAX:
        return b"".join((head, length, records, _NO_TAGS_THRICE))
    return [head + length, records, _NO_TAGS_THRICE]


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
        aborted: Sequence[Aborted] | None = None,
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
        self.aborted = aborted  # None for read_uncommitted
        self.diverging = diverging  # (epoch, end offset): the follower must truncate (KIP-595)
        self.current_leader = current_leader  # (leader id, leader epoch)
        self.preferred_read_replica = preferred_read_replica


def encode_fetch_response(
    correlation_id: int,
    version: int,
    error_code: int,
    session_id: int,
    partitions: Sequence[FetchedPartition],
    throttle_time_ms: int = 0,
    addresses: Sequence[NodeAddress] = (),
) -> list[Buffer]:
    """The whole response frame as chunks to write in order; large regions are chunks of their own, uncopied.

    `addresses` are sent from version 16. Partitions of one topic must be neighbours in `partitions`: each run becomes
    one topic entry.
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
        _append_addresses(out, addresses if version >= FETCH_ADDRESSES_FROM else ())
    _FRAME_HEAD.pack_into(head, 0, frame_bytes + len(out), correlation_id)
    return chunks


def neighbours(fetched: list[FetchedPartition]) -> list[FetchedPartition]:
    """Partitions of one topic side by side, topics in order of their first partition."""
    by_topic: dict[str | bytes, list[FetchedPartition]] = {}
    for partition in fetched:
        by_topic.setdefault(partition.topic, []).append(partition)
    return fetched if len(by_topic) == 1 else [each for partitions in by_topic.values() for each in partitions]


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
        for each in aborted:
            if flexible:
                out += _ABORTED_FLEXIBLE.pack(each.producer_id, each.first_offset, 0)
            else:
                out += _ABORTED.pack(each.producer_id, each.first_offset)
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
