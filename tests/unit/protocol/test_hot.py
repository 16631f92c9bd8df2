"""The hand-written Produce and Fetch codecs say byte for byte what the compiled messages say, at every version."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol import hot
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.hot import (
    FetchedPartition,
    NodeAddress,
    ProducedPartition,
    decode_alike,
    decode_one_produce,
    decode_pipelined_produces,
    decode_produce,
    encode_fetch_response,
    encode_one_produced,
    encode_produce_response,
    note_head,
)
from tidelog.protocol.messages import fetch as fetch_messages
from tidelog.protocol.messages import produce as produce_messages

PRODUCE_VERSIONS = range(3, 14)
FETCH_VERSIONS = range(4, 19)

names = st.text(alphabet="abcåé.-_", min_size=1, max_size=200)
ids = st.binary(min_size=16, max_size=16)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)


def topics_of(version: int) -> st.SearchStrategy[Any]:
    return ids if version >= 13 else names


def topic_field(version: int, topic: str | bytes, name: str) -> dict[str, Any]:
    return {"topic_id": topic} if version >= 13 else {name: topic}


# Half of the requests have the shape that is decoded by hand: one topic, one partition.
@st.composite
def produce_requests(draw: st.DrawFn) -> tuple[int, Any, list[Any]]:
    version = draw(st.sampled_from(PRODUCE_VERSIONS))
    single = draw(st.booleans())
    records = st.none() | st.binary(max_size=300) | st.sampled_from([b"", b"r" * 127, b"r" * 16383, b"r" * 70000])
    least, most = (1, 1) if single else (0, 3)
    batches = st.lists(st.tuples(int32s, records), min_size=least, max_size=most)
    topics = draw(st.lists(st.tuples(topics_of(version), batches), min_size=least, max_size=most))
    message = produce_messages.ProduceRequest(
        transactional_id=draw(st.none() | names | st.sampled_from(["", "x" * 126, "x" * 127, "x" * 200])),
        acks=draw(st.integers(-1, 1)),
        timeout_ms=draw(int32s),
        topic_data=[
            produce_messages.TopicProduceData(
                **topic_field(version, topic, "name"),
                partition_data=[produce_messages.PartitionProduceData(index=i, records=r) for i, r in partitions],
            )
            for topic, partitions in topics
        ],
    )
    return version, message, topics


@given(produce_requests())
def test_a_produce_request_is_decoded_as_the_compiled_message_wrote_it(case: tuple[int, Any, list[Any]]) -> None:
    version, message, topics = case
    decoded = decode_produce(memoryview(message.encode(version)), version)
    assert (decoded.transactional_id, decoded.acks, decoded.timeout_ms) == (
        message.transactional_id, message.acks, message.timeout_ms,
    )  # fmt: skip
    assert [(t, [(i, None if r is None else bytes(r)) for i, r in ps]) for t, ps in decoded.topics] == topics


@given(produce_requests())
def test_the_request_of_one_partition_is_recognised_and_no_other(case: tuple[int, Any, list[Any]]) -> None:
    version, message, topics = case
    one = decode_one_produce(memoryview(message.encode(version)), 0, version)
    transactional_id = message.transactional_id
    is_one = (
        version >= 9
        and (transactional_id is None or 0 < len(transactional_id.encode()) < 127)
        and message.acks != 0
        and len(topics) == 1
        and (version >= 13 or len(topics[0][0].encode()) < 127)
        and len(topics[0][1]) == 1
        and (records := topics[0][1][0][1]) is not None
        and (len(records) > 22 and records[22] & 0x10 != 0) is (transactional_id is not None)
    )
    assert (one is not None) == is_one
    if one is not None:
        [(topic, [(index, records)])] = topics
        assert one == (topic, index, records, message.acks, message.timeout_ms, transactional_id)


HEADER_BYTES = 18  # key, version, correlation id, a client id of seven bytes, no tags


def one_produce(
    topic: str, index: int, records: bytes, acks: int = -1, correlation_id: int = 7, version: int = 12
) -> bytearray:
    """A request without its size."""
    partition = produce_messages.PartitionProduceData(index=index, records=records)
    message = produce_messages.ProduceRequest(
        acks=acks,
        timeout_ms=5000,
        topic_data=[
            produce_messages.TopicProduceData(
                name=topic, topic_id=topic.encode().ljust(16, b"-"), partition_data=[partition]
            )
        ],
    )
    head = bytes((0, 0, 0, version)) + correlation_id.to_bytes(4, "big") + b"\0\x07a-probe\0"
    return bytearray(head + message.encode(version))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("topic", "topic", "topic", "topik", "t")),
            st.sampled_from((0, 0, 0, 1)),
            st.sampled_from((-1, -1, -1, 1)),
            st.sampled_from((1, 30, 120, 126, 127, 128, 300, 16_382, 16_383)),
            st.none() | st.tuples(st.integers(0, 400), st.integers(0, 7)),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from((12, 13)),
)
def test_pipelined_requests_are_decoded_as_each_alone(
    cases: list[tuple[str, int, int, int, tuple[int, int] | None]], version: int
):
    frames = []
    for number, (topic, index, acks, size, flip) in enumerate(cases):
        frame = one_produce(topic, index, bytes((number,)) * size, acks, number, version)
        if flip is not None and flip[0] < len(frame):
            frame[flip[0]] ^= 1 << flip[1]
        frames.append(frame)
    assert_decoded_as_each_alone(frames, version)


@pytest.mark.parametrize("version", [12, 13])
@pytest.mark.parametrize("size", [1, 100, 200])
def test_each_byte_that_makes_a_request_different_ends_the_pipelined_ones(size: int, version: int) -> None:
    first = one_produce("topic", 0, bytes(size), version=version)
    for place in {*range(60), *range(len(first) - 4, len(first))} & set(range(len(first))):
        other = bytearray(first)
        other[place] ^= 1
        assert_decoded_as_each_alone([first, bytearray(first), other], version)
    for cut in range(8, len(first)):
        assert_decoded_as_each_alone([first, bytearray(first), first[:cut]], version)


def is_known_as_decoded(first: bytearray, other: bytearray, version: int) -> bool:
    """Whether `decode_alike` knows the second request after the first. If so, it decodes it as `decode_one_produce`."""
    one = decode_one_produce(memoryview(first), HEADER_BYTES, version)
    assert one is not None
    topic_at = note_head(memoryview(first), HEADER_BYTES, version, one)
    assert topic_at
    known = decode_alike(memoryview(other), topic_at)
    if known is not None:
        # The header has the same lengths, so the body begins at the same place.
        assert other[:4] == bytes((0, 0, 0, known[0])), "it is a Produce of this version"
        assert (other[8:10], other[17]) == (first[8:10], first[17])
        assert known[1] == int.from_bytes(other[4:8], "big", signed=True)
        assert known[2] == decode_one_produce(memoryview(other), HEADER_BYTES, known[0])
    return known is not None


@pytest.mark.parametrize("version", [9, 12, 13])
@pytest.mark.parametrize("acks", [-1, 1])
@pytest.mark.parametrize("size", [23, 100, 126, 127, 128, 16_382])
def test_a_request_alike_is_known_whatever_its_records_are(size: int, acks: int, version: int) -> None:
    first = one_produce("topic", 3, bytes(80), acks, 1, version)
    other = one_produce("topic", 3, b"r" * 22 + bytes(size - 22), acks, 70_000, version)
    assert is_known_as_decoded(first, other, version)


def test_requests_of_a_topic_are_known_in_turn() -> None:
    frames = [one_produce(topic, index, bytes(80)) for topic in ("topic", "another") for index in range(3)]
    for frame in frames:
        is_known_as_decoded(frame, frame, 12)
    for frame in frames:
        assert all(is_known_as_decoded(frame, other, 12) for other in frames)


@pytest.mark.parametrize("version", [12, 13])
@pytest.mark.parametrize("size", [30, 200])
def test_each_byte_that_makes_a_request_different_is_noticed(size: int, version: int) -> None:
    first = one_produce("alike", 0, bytes(size), version=version)
    known = 0
    for place in range(len(first)):
        for bit in range(8):
            other = bytearray(first)
            other[place] ^= 1 << bit
            known += is_known_as_decoded(first, other, version)
    at = len(first) - 3 - size  # where the records begin
    flags = 1  # the bit that says that the batch is of a transaction
    assert known == 8 * (4 + size) - flags, "the bytes of the correlation id and of the records"
    assert first[at : at + size] == bytes(size)
    for cut in range(len(first)):
        assert not is_known_as_decoded(first, first[:cut], version)
    assert not is_known_as_decoded(first, first + b"\0", version)


def test_a_transaction_and_a_long_name_are_never_known() -> None:
    batch = bytes(22) + b"\x10" + bytes(60)
    plain = one_produce("topic", 0, bytes(83))
    assert not is_known_as_decoded(plain, one_produce("topic", 0, batch), 12)
    partition = produce_messages.PartitionProduceData(index=0, records=batch)
    topics = [produce_messages.TopicProduceData(name="topic", partition_data=[partition])]
    message = produce_messages.ProduceRequest(transactional_id="id", acks=-1, timeout_ms=1, topic_data=topics)
    frame = memoryview(b"\0\0\0\x0c" + bytes(4) + b"\0\x07a-probe\0" + message.encode(12))
    one = decode_one_produce(frame, HEADER_BYTES, 12)
    assert one is not None
    assert note_head(frame, HEADER_BYTES, 12, one) == 0
    client_id = b"c" * 300
    frame = memoryview(plain[:8] + (300).to_bytes(2, "big") + client_id + plain[17:])
    one = decode_one_produce(frame, 311, 12)
    assert one is not None
    assert note_head(frame, 311, 12, one) == 0


def test_few_heads_are_kept() -> None:
    for index in range(3000):
        frame = one_produce("many", index, bytes(80))
        assert is_known_as_decoded(frame, frame, 12)
        assert len(hot._known_heads) <= 1024


def test_transactions_are_not_pipelined() -> None:
    """Their batches may have to wait for the coordinator."""
    partition = produce_messages.PartitionProduceData(index=0, records=bytes(22) + b"\x10" + bytes(60))
    topics = [produce_messages.TopicProduceData(name="topic", partition_data=[partition])]
    message = produce_messages.ProduceRequest(transactional_id="id", acks=-1, timeout_ms=1, topic_data=topics)
    frame = memoryview(b"\0\0\0\x0c" + bytes(4) + b"\0\x07a-probe\0" + message.encode(12))
    assert decode_one_produce(frame, HEADER_BYTES, 12) is not None
    assert decode_pipelined_produces([frame, frame], HEADER_BYTES, 12) is None


def assert_decoded_as_each_alone(data: list[bytearray], version: int) -> None:
    frames = [memoryview(each) for each in data]
    decoded = decode_pipelined_produces(frames, HEADER_BYTES, version)
    alone = [decode_one_produce(frame, HEADER_BYTES, version) for frame in frames]
    alike = 0
    for frame, one in zip(frames, alone):
        if one is None or alone[0] is None or frame[:4] != frames[0][:4] or frame[8:18] != frames[0][8:18]:
            break
        if (one[:2], one[3:]) != (alone[0][:2], alone[0][3:]) or len(one[2]) > 0x3FFE:
            break
        alike += 1
    if decoded is None:
        assert alike < 2
        return
    topic, index, acks, timeout_ms, correlation_ids, batches = decoded
    assert len(batches) == alike
    for frame, one, correlation_id, records in zip(frames, alone, correlation_ids, batches):
        assert one == (topic, index, records, acks, timeout_ms, None)
        assert correlation_id == int.from_bytes(frame[4:8], "big", signed=True)


@given(int32s, st.text(alphabet="abcå-", min_size=1, max_size=60) | ids, int32s, int64s, int64s, int64s)
def test_the_answer_to_one_partition_is_the_same_as_among_many(
    correlation_id: int, topic: str | bytes, index: int, base_offset: int, append_time_ms: int, start_offset: int
) -> None:
    partition = ProducedPartition(index, 0, base_offset, append_time_ms, start_offset)
    one = encode_one_produced(correlation_id, topic, index, base_offset, append_time_ms, start_offset)
    for version in (9, 10, 11, 12) if isinstance(topic, str) else (13,):
        assert one == encode_produce_response(correlation_id, version, [(topic, [partition])])


@st.composite
def produce_responses(draw: st.DrawFn) -> tuple[int, list[tuple[str | bytes, list[ProducedPartition]]]]:
    version = draw(st.sampled_from(PRODUCE_VERSIONS))
    produced = st.builds(
        ProducedPartition, int32s, st.integers(-1, 120), int64s, int64s,
        int64s if version >= 5 else st.just(-1),
        st.none() | names if version >= 8 else st.none(),
        st.none() | st.tuples(int32s, int32s) if version >= 10 else st.none(),
        st.lists(st.tuples(int32s, names), max_size=2).map(tuple) if version >= 8 else st.just(()),
    )  # fmt: skip
    return version, draw(st.lists(st.tuples(topics_of(version), st.lists(produced, max_size=3)), max_size=3))


@given(produce_responses(), int32s, int32s)
def test_a_produce_response_is_encoded_as_the_compiled_message_would(
    case: tuple[int, Any], correlation_id: int, throttle_ms: int
) -> None:
    version, topics = case
    message = produce_messages.ProduceResponse(
        responses=[
            produce_messages.TopicProduceResponse(
                **topic_field(version, topic, "name"),
                partition_responses=[
                    produce_messages.PartitionProduceResponse(
                        index=p.partition_index, error_code=p.error_code, base_offset=p.base_offset,
                        log_append_time_ms=p.log_append_time_ms, log_start_offset=p.log_start_offset,
                        error_message=p.error_message,
                        record_errors=[
                            produce_messages.BatchIndexAndErrorMessage(batch_index=i, batch_index_error_message=m)
                            for i, m in p.record_errors
                        ],
                        current_leader=produce_messages.LeaderIdAndEpoch(
                            leader_id=p.current_leader[0], leader_epoch=p.current_leader[1]
                        ) if p.current_leader else produce_messages.LeaderIdAndEpoch(),
                    )
                    for p in partitions
                ],
            )
            for topic, partitions in topics
        ],
        throttle_time_ms=throttle_ms,
    )  # fmt: skip
    # A current leader of (-1, -1) is the default, which a compiled encoder leaves out.
    if any(p.current_leader == (-1, -1) for _, ps in topics for p in ps):
        return
    header = struct.pack(">i", correlation_id) + (b"\0" if version >= 9 else b"")
    body = header + message.encode(version)
    assert encode_produce_response(correlation_id, version, topics, throttle_ms) == struct.pack(">i", len(body)) + body


class Aborted(NamedTuple):
    producer_id: int
    first_offset: int


@st.composite
def fetch_responses(draw: st.DrawFn) -> tuple[int, int, int, list[FetchedPartition]]:
    version = draw(st.sampled_from(FETCH_VERSIONS))
    partitions = []
    for topic in draw(st.lists(topics_of(version), max_size=3, unique=True)):
        for index in draw(st.lists(int32s, min_size=1, max_size=3)):
            sizes = draw(st.lists(st.sampled_from([1, 61, 4096, 4097, 20000]), max_size=3))
            regions = [memoryview(bytes([number + 1]) * size) for number, size in enumerate(sizes)]
            diverging = draw(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))) if version >= 12 else None
            leader = draw(st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))) if version >= 12 else None
            partitions.append(
                FetchedPartition(
                    topic, index, draw(st.integers(-1, 120)), draw(int64s), draw(int64s),
                    draw(int64s) if version >= 5 else -1, regions, sum(sizes),
                    draw(st.none() | st.lists(st.builds(Aborted, int64s, int64s), max_size=3)), diverging, leader,
                    draw(int32s) if version >= 11 else -1,
                )
            )  # fmt: skip
    error_code, session_id = (draw(st.integers(-1, 120)), draw(int32s)) if version >= 7 else (0, 0)
    return version, error_code, session_id, partitions


@given(fetch_responses(), int32s)
def test_a_fetch_response_is_encoded_as_the_compiled_message_would(case: tuple[Any, ...], correlation_id: int) -> None:
    version, error_code, session_id, partitions = case
    by_topic: dict[Any, list[FetchedPartition]] = {}
    for partition in partitions:
        by_topic.setdefault(partition.topic, []).append(partition)
    message = fetch_messages.FetchResponse(
        error_code=error_code,
        session_id=session_id,
        responses=[
            fetch_messages.FetchableTopicResponse(
                **topic_field(version, topic, "topic"),
                partitions=[_compiled_partition(p) for p in fetched],
            )
            for topic, fetched in by_topic.items()
        ],
    )
    header = struct.pack(">i", correlation_id) + (b"\0" if version >= 12 else b"")
    body = header + message.encode(version)
    frames = encode_fetch_response(correlation_id, version, error_code, session_id, partitions)
    assert b"".join(frames) == struct.pack(">i", len(body)) + body


def _compiled_partition(partition: FetchedPartition) -> Any:
    tags: dict[str, Any] = {}
    if partition.diverging:
        epoch, end_offset = partition.diverging
        tags["diverging_epoch"] = fetch_messages.EpochEndOffset(epoch=epoch, end_offset=end_offset)
    if partition.current_leader:
        leader_id, leader_epoch = partition.current_leader
        tags["current_leader"] = fetch_messages.LeaderIdAndEpoch(leader_id=leader_id, leader_epoch=leader_epoch)
    return fetch_messages.PartitionData(
        partition_index=partition.index, error_code=partition.error_code, high_watermark=partition.high_watermark,
        last_stable_offset=partition.last_stable_offset, log_start_offset=partition.log_start_offset,
        aborted_transactions=None if partition.aborted is None else [
            fetch_messages.AbortedTransaction(producer_id=each.producer_id, first_offset=each.first_offset)
            for each in partition.aborted
        ],
        preferred_read_replica=partition.preferred_read_replica, records=b"".join(partition.regions), **tags,
    )  # fmt: skip


@pytest.mark.parametrize("rack", [None, "here"])
def test_addresses_of_leaders_are_encoded_as_the_compiled_message_would(rack: str | None) -> None:
    addresses = [NodeAddress(7, "å.example", 9092, rack), NodeAddress(8, "b", 1, None)]
    each: list[dict[str, Any]] = [address._asdict() for address in addresses]
    for version in PRODUCE_VERSIONS:
        nodes: list[Any] = [produce_messages.NodeEndpoint(**fields) for fields in each] if version >= 10 else []
        expected = produce_messages.ProduceResponse(responses=[], node_endpoints=nodes).encode(version)
        frame = bytes(encode_produce_response(1, version, [], addresses=addresses))
        assert frame[9 if version >= 9 else 8 :] == expected
    for version in FETCH_VERSIONS:
        nodes = [fetch_messages.NodeEndpoint(**fields) for fields in each] if version >= 16 else []
        body = fetch_messages.FetchResponse(responses=[], node_endpoints=nodes).encode(version)
        frame = b"".join(encode_fetch_response(1, version, 0, 0, [], addresses=addresses))
        assert frame[9 if version >= 12 else 8 :] == body


@given(produce_requests(), st.data())
def test_a_cut_or_changed_produce_request_is_malformed_or_decoded_never_worse(
    case: tuple[int, Any, Any], data: st.DataObject
) -> None:
    version, message, _ = case
    _mutate_and_decode(message.encode(version), data, lambda view: decode_produce(view, version))


def _mutate_and_decode(encoded: bytes, data: st.DataObject, decode: Any) -> None:
    changed = bytearray(encoded)
    if changed and data.draw(st.booleans()):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    for candidate in (changed, changed[:cut]):
        try:
            decode(memoryview(candidate))
        except MalformedMessage:
            pass


def test_every_cut_of_a_request_is_malformed() -> None:
    message = produce_messages.ProduceRequest(
        acks=-1, topic_data=[
            produce_messages.TopicProduceData(
                name="t", partition_data=[produce_messages.PartitionProduceData(index=0, records=b"x" * 40)]
            )
        ],
    )  # fmt: skip
    for version in (3, 9):
        encoded = message.encode(version)
        for cut in range(len(encoded)):
            with pytest.raises(MalformedMessage):
                decode_produce(memoryview(encoded)[:cut], version)
