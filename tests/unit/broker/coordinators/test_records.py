from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.coordinators.group import group as group_module
from tidelog.broker.coordinators.group import records
from tidelog.broker.coordinators.group.group import Group, Member, topics_of_subscription
from tidelog.broker.coordinators.group.records import GroupMetadata, OffsetCommit
from tidelog.broker.coordinators.group.states import GroupState
from tidelog.protocol.errors import KafkaError, MalformedMessage
from tidelog.protocol.messages.consumer_protocol import ConsumerProtocolSubscription
from tidelog.protocol.messages.group_records import (
    GroupMetadataValue,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)


def documented() -> list[tuple[bytes, bytes]]:
    """Key and value of each worked example in the page about the format."""
    page = (Path(__file__).parents[4] / "docs/formats/consumer_offsets.md").read_text()
    blocks = re.findall(r"```(key|value)\n(.*?)```", page, re.DOTALL)
    found = [bytes.fromhex("".join(line.split("   ")[0] for line in text.splitlines())) for _, text in blocks]
    assert [kind for kind, _ in blocks] == ["key", "value"] * (len(blocks) // 2)
    return list(zip(found[::2], found[1::2]))


def test_the_page_about_the_format_is_true():
    offset, group = documented()
    assert records.decode(*offset) == OffsetCommit(
        "g", "t", 3,
        OffsetCommitValue(offset=5, leader_epoch=1, metadata="m", commit_timestamp=7, topic_id=b"0123456789abcdef"),
    )  # fmt: skip
    for key, value in (offset, group):
        decoded = records.decode(key, value)
        assert decoded is not None
        assert records.encode(decoded) == (key, value)


def test_an_offset_record_to_the_byte():
    value = OffsetCommitValue(offset=5, leader_epoch=1, metadata="m", commit_timestamp=7)
    key_bytes, value_bytes = records.encode(OffsetCommit("g", "t", 3, value))
    assert key_bytes.hex(" ") == "00 01 00 01 67 00 01 74 00 00 00 03"
    assert value_bytes is not None
    assert value_bytes.hex(" ") == ("00 04 00 00 00 00 00 00 00 05 00 00 00 01 02 6d 00 00 00 00 00 00 00 07 00"), (
        "version 4: offset, leader epoch, compact metadata, commit time, no tagged field"
    )


def test_a_topic_id_travels_as_a_tagged_field():
    value = OffsetCommitValue(offset=5, metadata="", commit_timestamp=7, topic_id=b"0123456789abcdef")
    _, value_bytes = records.encode(OffsetCommit("g", "t", 3, value))
    assert value_bytes is not None
    assert value_bytes.endswith(b"\x01\x00\x100123456789abcdef")


def test_a_time_to_expire_needs_version_1():
    value = OffsetCommitValue(offset=5, metadata="m", commit_timestamp=7, expire_timestamp=9)
    _, value_bytes = records.encode(OffsetCommit("g", "t", 3, value))
    assert value_bytes is not None
    assert value_bytes.hex(" ") == (
        "00 01 00 00 00 00 00 00 00 05 00 01 6d 00 00 00 00 00 00 00 07 00 00 00 00 00 00 00 09"
    )


def test_a_group_record_to_the_byte():
    member = MemberMetadata(
        member_id="m", client_id="c", client_host="/h", rebalance_timeout=2, session_timeout=3, subscription=b"s",
        assignment=b"a",
    )  # fmt: skip
    value = GroupMetadataValue(
        protocol_type="consumer", generation=1, protocol="range", leader="m", current_state_timestamp=4,
        members=[member],
    )  # fmt: skip
    key_bytes, value_bytes = records.encode(GroupMetadata("g", value))
    assert key_bytes.hex(" ") == "00 02 00 01 67"
    assert value_bytes is not None
    assert value_bytes == (
        b"\0\3" b"\0\x08consumer" b"\0\0\0\1" b"\0\5range" b"\0\1m" b"\0\0\0\0\0\0\0\4"
        b"\0\0\0\1" b"\0\1m" b"\xff\xff" b"\0\1c" b"\0\2/h" b"\0\0\0\2" b"\0\0\0\3" b"\0\0\0\1s" b"\0\0\0\1a"
    )  # fmt: skip


@given(texts, texts, int32s, st.none() | st.tuples(int64s, int32s, texts, int64s, st.binary(min_size=16, max_size=16)))
def test_offset_records_survive_the_log(group, topic, partition, given_value):
    value = None
    if given_value is not None:
        offset, epoch, metadata, timestamp, topic_id = given_value
        value = OffsetCommitValue(
            offset=offset, leader_epoch=epoch, metadata=metadata, commit_timestamp=timestamp, topic_id=topic_id
        )
    record = OffsetCommit(group, topic, partition, value)
    assert records.decode(*records.encode(record)) == record


@given(
    texts,
    st.builds(
        OffsetCommitValue,
        offset=int64s,
        leader_epoch=int32s,
        metadata=texts | st.integers(120, 130).map(lambda size: "m" * size),
        commit_timestamp=int64s,
        topic_id=st.just(bytes(16)) | st.binary(min_size=16, max_size=16),
    ),
)
def test_offset_records_are_what_the_message_would_be(topic, value):
    key_bytes, value_bytes = records.encode(OffsetCommit("g", topic, 3, value))
    assert key_bytes == b"\0\1" + OffsetCommitKey(group="g", topic=topic, partition=3).encode(0)
    assert value_bytes == b"\0\4" + value.encode(4)


@pytest.mark.parametrize("name", ["n" * 32_768, "é" * 16_384])
def test_a_name_that_no_record_can_hold_is_refused(name):
    for group, topic in ((name, "t"), ("g", name)):
        with pytest.raises(ValueError, match="32767"):
            records.encode(OffsetCommit(group, topic, 0, None))


@given(
    texts,
    st.none()
    | st.builds(
        GroupMetadataValue,
        protocol_type=texts,
        generation=int32s,
        protocol=st.none() | texts,
        leader=st.none() | texts,
        current_state_timestamp=int64s,
        members=st.lists(
            st.builds(
                MemberMetadata,
                member_id=texts,
                group_instance_id=st.none() | texts,
                client_id=texts,
                client_host=texts,
                rebalance_timeout=int32s,
                session_timeout=int32s,
                subscription=st.binary(max_size=20),
                assignment=st.binary(max_size=20),
            ),
            max_size=3,
        ),
    ),
)
def test_group_records_survive_the_log_and_any_of_them_can_be_restored(group_id, value):
    record = GroupMetadata(group_id, value)
    assert records.decode(*records.encode(record)) == record
    if value is not None:
        group = Group(group_id, 0)
        list(group.restore(value))
        assert (group.state is GroupState.STABLE) == bool(value.members)


def test_records_of_every_older_version_are_read():
    for version in range(5):
        value = OffsetCommitValue(offset=5, metadata="m", commit_timestamp=7)
        key = b"\0\0" + records.encode(OffsetCommit("g", "t", 3, None))[0][2:]
        decoded = records.decode(key, version.to_bytes(2, "big") + value.encode(version))
        assert decoded == OffsetCommit("g", "t", 3, value)
        group = GroupMetadataValue(protocol_type="consumer", protocol=None, leader=None)
        bytes_of_group = version.to_bytes(2, "big") + group.encode(version)
        assert records.decode(b"\0\2\0\1g", bytes_of_group) == GroupMetadata("g", group)


def test_an_unknown_kind_is_passed_over_and_nonsense_is_not():
    assert records.decode(b"\0\3\0\1g", b"\0\0\0\0\0\1") is None
    with pytest.raises(MalformedMessage):
        records.decode(b"\0", None)
    with pytest.raises(MalformedMessage):
        records.decode(b"\0\1\0", None)
    with pytest.raises(KafkaError):
        records.decode(b"\0\2\0\1g", b"\0\x09rest")


def test_a_member_without_a_rebalance_timeout_has_its_session_timeout():
    stored = MemberMetadata(member_id="m", session_timeout=30_000)
    group = Group("g", 0)
    value = GroupMetadataValue(protocol_type="consumer", protocol="range", leader="m", members=[stored, stored])
    list(group.restore(value))
    assert [each.rebalance_timeout_ms for each in group.members.values()] == [30_000]


@given(st.lists(texts, max_size=5), st.sampled_from(range(4)))
def test_the_topics_of_a_subscription(topics, version):
    subscription = ConsumerProtocolSubscription(topics=topics, user_data=b"x")
    metadata = version.to_bytes(2, "big") + subscription.encode(version)
    assert topics_of_subscription(metadata) == topics
    assert topics_of_subscription((9).to_bytes(2, "big") + metadata[2:]) == topics, "later versions start the same"


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader_of_subscriptions(metadata):
    topics = topics_of_subscription(metadata)
    assert topics is None or len(topics) <= len(metadata)


def test_a_group_knows_its_topics_only_where_all_members_can_be_read():
    group = Group("g", 0)
    good = b"\0\0\0\0\0\1\0\1t\xff\xff\xff\xff"
    for name, metadata in (("a", good), ("b", b"custom")):
        member = Member(
            name, instance_id=None, client_id="", client_host="", rebalance_timeout_ms=1, session_timeout_ms=1,
            protocols={"range": metadata},
        )  # fmt: skip
        group.add(member, "consumer")
    group.state = GroupState.PREPARING_REBALANCE
    group.start_generation(0)
    assert group.subscribed_topics is None
    assert group.is_subscribed_to("anything")
    group.remove("b")
    group.state = GroupState.PREPARING_REBALANCE
    group.start_generation(0)
    assert group.subscribed_topics == {"t"}
    assert not group.is_subscribed_to("anything")


def test_a_group_reads_a_bounded_number_of_topics_and_equal_subscriptions_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group_module, "SUBSCRIBED_TOPICS_MAX", 3)
    assert subscribed_topics(["a", "b"], ["a", "b"]) == frozenset(("a", "b"))
    assert subscribed_topics(["a", "b"], ["c"]) == frozenset(("a", "b", "c"))
    assert subscribed_topics(["a", "b"], ["b", "a"]) is None
    assert subscribed_topics(["a", "b", "c", "d"]) is None


def subscribed_topics(*subscriptions: list[str]) -> frozenset[str] | None:
    group = Group("g", 0)
    for number, topics in enumerate(subscriptions):
        member = Member(
            f"m{number}", instance_id=None, client_id="", client_host="", rebalance_timeout_ms=1, session_timeout_ms=1,
            protocols={"range": b"\0\0" + ConsumerProtocolSubscription(topics=topics).encode(0)},
        )  # fmt: skip
        group.add(member, "consumer")
    group.state = GroupState.PREPARING_REBALANCE
    group.start_generation(0)
    return group.subscribed_topics
