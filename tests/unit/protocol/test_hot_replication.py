"""The hand-written side of a follower's Fetch says byte for byte what the compiled messages say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol import hot_replication as hot
from tidelog.protocol.codec.primitives import write_uvarint
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages.fetch import (
    EpochEndOffset,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    LeaderIdAndEpoch,
    PartitionData,
    ReplicaState,
)

int16s = st.integers(-(2**15), 2**15 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
ids = st.binary(min_size=16, max_size=16)
NEVER = 9223372036854775807

asked = st.tuples(int32s, int32s, int64s, int32s, int64s)


def request_of(
    template: tuple[int, ...], session: tuple[int, int], topics: dict[bytes, list[tuple[int, ...]]], gone: Any = ()
) -> FetchRequest:
    replica_id, broker_epoch, wait, least, most, partition_max = template
    return FetchRequest(
        replica_state=ReplicaState(replica_id=replica_id, replica_epoch=broker_epoch),
        max_wait_ms=wait,
        min_bytes=least,
        max_bytes=most,
        session_id=session[0],
        session_epoch=session[1],
        topics=[
            FetchTopic(
                topic_id=topic_id,
                partitions=[
                    FetchPartition(
                        partition=index,
                        current_leader_epoch=epoch,
                        fetch_offset=offset,
                        last_fetched_epoch=last,
                        log_start_offset=start,
                        partition_max_bytes=partition_max,
                    )
                    for index, epoch, offset, last, start in partitions
                ],
            )
            for topic_id, partitions in topics.items()
        ],
        forgotten_topics_data=[ForgottenTopic(topic_id=topic_id, partitions=indexes) for topic_id, indexes in gone],
    )


# A replica state that is all default is left out by the compiled codec; a follower always has an id.
templates = st.tuples(st.integers(0, 2**31 - 1), int64s, int32s, int32s, int32s, int32s)


@given(templates, st.tuples(int32s, int32s), ids, asked)
def test_a_request_for_one_partition(
    template: tuple[int, ...], session: tuple[int, int], topic_id: bytes, partition: tuple[int, ...]
) -> None:
    made = hot.RequestTemplate(*template).one(*session, topic_id, *partition)
    assert made == request_of(template, session, {topic_id: [partition]}).encode(18)
    assert len(made) == hot.ONE_REQUEST_BYTES
    fields = hot.decode_one(memoryview(made))
    assert fields is not None
    assert fields[4:6] == session
    assert (fields[7], *fields[9:14]) == (topic_id, *partition)
    assert fields[14] == template[5]
    assert fields[22:24] == template[:2]
    assert fields[:3] == template[2:5]


@given(
    templates,
    st.tuples(int32s, int32s),
    st.dictionaries(ids, st.lists(asked, min_size=1, max_size=3), max_size=3),
    st.dictionaries(ids, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3), max_size=2),
)
def test_a_request_for_any_number(
    template: tuple[int, ...],
    session: tuple[int, int],
    topics: dict[bytes, list[tuple[int, ...]]],
    gone: dict[bytes, list[int]],
) -> None:
    flat: list[Any] = [(topic_id, *each) for topic_id, partitions in topics.items() for each in partitions]
    forgotten = [(topic_id, index) for topic_id, indexes in gone.items() for index in indexes]
    made = hot.RequestTemplate(*template).many(*session, flat, forgotten)
    assert made == request_of(template, session, topics, gone.items()).encode(18)
    decoded = hot.decode_follower_request(memoryview(made))
    if gone:
        assert decoded is None
        return
    assert decoded is not None
    assert (decoded.session_id, decoded.session_epoch) == session
    assert (decoded.replica_id, decoded.replica_epoch) == template[:2]
    assert [each[:6] for each in decoded.partitions] == flat
    assert all(each.max_bytes == template[5] for each in decoded.partitions)


@given(st.binary(max_size=200))
def test_nonsense_is_left_to_the_compiled_codec(data: bytes) -> None:
    hot.decode_follower_request(memoryview(data))
    hot.decode_fetched(memoryview(data))
    hot.decode_one_fetched(memoryview(data))
    if len(data) == hot.ONE_REQUEST_BYTES:
        hot.decode_one(memoryview(data))


def test_a_request_that_names_too_much_is_left_to_the_compiled_codec_which_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = (b"T" * 16, 0, 0, 0, 0, 0)
    template = hot.RequestTemplate(2, 1, 500, 1, 1000, 1000)
    most = template.many(1, 1, [one] * (hot.PARTITIONS_ASKED_MAX - 10))
    assert hot.decode_follower_request(memoryview(most)) is not None
    made: list[object] = []
    monkeypatch.setattr(hot, "FollowerPartition", lambda *fields: made.append(fields))
    for many in (
        [one] * (hot.PARTITIONS_ASKED_MAX + 1),
        [(bytes([n % 256, n // 256]) * 8, *one[1:]) for n in range(50_000)],
    ):
        request = template.many(1, 1, many)
        made.clear()
        assert hot.decode_follower_request(memoryview(request)) is None
        assert len(made) < hot.PARTITIONS_ASKED_MAX
        with pytest.raises(MalformedMessage, match="elements"):
            FetchRequest.decode(bytes(request), hot.VERSION)


def test_an_answer_that_claims_too_many_tagged_fields_is_not_understood() -> None:
    answer = bytearray(hot._RESPONSE_HEAD.pack(0, 0, 7) + b"\2" + b"T" * 16 + b"\2")
    answer += hot._FETCHED.pack(0, 0, 0, 0, 0, 1, -1) + b"\1"
    for count in (10_000, 10_001):
        section = bytearray()
        write_uvarint(section, count)
        section += b"\5\0" * count
        found = hot.decode_fetched(memoryview(answer + section + b"\0\0"))
        assert (found is None) == (count > 10_000)


records = st.sampled_from([b"", b"r", b"r" * 126, b"r" * 127, b"r" * 4096, b"r" * 20000])
fetched = st.tuples(int32s, int16s, int64s, int64s, int64s, st.none() | records, st.none() | st.tuples(int32s, int64s))


@given(
    int32s,
    int16s,
    st.dictionaries(ids, st.lists(st.tuples(fetched, st.booleans()), min_size=1, max_size=3), max_size=2),
)
def test_an_answer_of_any_shape(session_id: int, error: int, topics: dict[bytes, list[Any]]) -> None:
    response = FetchResponse(
        error_code=error,
        session_id=session_id,
        responses=[
            FetchableTopicResponse(
                topic_id=topic_id,
                partitions=[
                    PartitionData(
                        partition_index=index,
                        error_code=code,
                        high_watermark=mark,
                        last_stable_offset=stable,
                        log_start_offset=start,
                        diverging_epoch=EpochEndOffset(*[]) if diverging is None else _diverging(diverging),
                        current_leader=LeaderIdAndEpoch(leader_id=1, leader_epoch=2) if hint else LeaderIdAndEpoch(),
                        aborted_transactions=None,
                        records=data,
                    )
                    for (index, code, mark, stable, start, data, diverging), hint in partitions
                ],
            )
            for topic_id, partitions in topics.items()
        ],
    )
    decoded = hot.decode_fetched(memoryview(response.encode(18)))
    assert decoded is not None
    assert decoded[:2] == (error, session_id)
    expected = [
        (topic_id, index, code, mark, start, data or None, None if diverging == (-1, -1) else diverging)
        for topic_id, partitions in topics.items()
        for (index, code, mark, _, start, data, diverging), _ in partitions
    ]
    assert [(*each[:5], None if each[5] is None else bytes(each[5]), each[6]) for each in decoded[2]] == expected


def _diverging(diverging: tuple[int, int]) -> EpochEndOffset:
    return EpochEndOffset(epoch=diverging[0], end_offset=diverging[1])


@given(int32s, int32s, ids, int32s, int64s, int64s, int64s, records)
def test_an_answer_with_one_partition(
    correlation_id: int, session_id: int, topic_id: bytes, index: int, mark: int, stable: int, start: int, data: bytes
) -> None:
    frame = hot.encode_one_fetched(correlation_id, session_id, topic_id, index, mark, stable, start, [data], len(data))
    whole = frame if isinstance(frame, bytes) else b"".join(frame)
    partition = PartitionData(
        partition_index=index,
        high_watermark=mark,
        last_stable_offset=stable,
        log_start_offset=start,
        aborted_transactions=None,
        records=data,
    )
    response = FetchResponse(
        session_id=session_id, responses=[FetchableTopicResponse(topic_id=topic_id, partitions=[partition])]
    )
    body = response.encode(18)
    assert whole[:4] == (len(whole) - 4).to_bytes(4, "big")
    assert whole[4:9] == correlation_id.to_bytes(4, "big", signed=True) + b"\0"
    assert whole[9:] == body
    decoded = hot.decode_one_fetched(memoryview(body))
    assert decoded is not None
    begin, *marks, records = decoded
    assert (marks, bytes(records)) == ([mark, start], data)
    assert hot.partition_answered(begin, session_id) == (topic_id, index)
    assert hot.partition_answered(begin, session_id ^ 1) is None


@pytest.mark.parametrize("error", ["of the session", "of the partition"])
def test_an_answer_with_an_error_is_of_no_partition(error: str) -> None:
    answer = FetchResponse(
        error_code=71 if error == "of the session" else 0,
        session_id=9,
        responses=[
            FetchableTopicResponse(
                topic_id=b"T" * 16,
                partitions=[PartitionData(error_code=6 if error == "of the partition" else 0, records=b"records")],
            )
        ],
    )
    decoded = hot.decode_one_fetched(memoryview(answer.encode(hot.VERSION)))
    assert decoded is None or hot.partition_answered(decoded[0], 9) is None


@pytest.mark.parametrize("size", [1, 126, 127, 200, 16_382, 16_383, 20_000])
def test_an_answer_of_one_partition_ends_with_its_records(size: int) -> None:
    """The tags that a Kafka broker may send behind them are left to the compiled codec, and so is a wrong size."""
    made = hot.encode_one_fetched(1, 2, b"T" * 16, 0, 9, 9, 0, [bytes(size)], size)
    assert isinstance(made, bytes)
    body = made[9:]
    decoded = hot.decode_one_fetched(memoryview(body))
    assert decoded is not None
    assert len(decoded[3]) == size
    for place in (-3, -2, -1):
        other = bytearray(body)
        other[place] = 1
        assert hot.decode_one_fetched(memoryview(other)) is None
    assert hot.decode_one_fetched(memoryview(body[:-1])) is None
    assert hot.decode_one_fetched(memoryview(body + b"\0")) is None


def test_an_answer_with_nothing() -> None:
    assert hot.encode_nothing_fetched(7, 9)[9:] == FetchResponse(session_id=9).encode(18)
