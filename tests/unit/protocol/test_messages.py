"""The helpers beside the declarations: frames of metadata records, prefixes of group, control and consumer records."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing

import pytest

from tidelog.protocol import messages
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages import (
    api_versions,
    consumer_protocol,
    control_records,
    coordinator_records,
    group_records,
    metadata_records,
    offset_fetch,
)
from tidelog.protocol.messages.metadata_records import PartitionChangeRecord, TopicRecord, frame, unframe

TOPIC_ID = bytes(range(16))


def test_a_metadata_record_is_framed_by_version_type_and_message_version():
    record = TopicRecord(name="ab", topic_id=TOPIC_ID)
    framed = frame(record, 0)
    assert framed.hex(" ") == "01 02 00 03 61 62 " + TOPIC_ID.hex(" ") + " 00"
    for value in (framed, memoryview(framed), bytearray(framed)):
        assert unframe(value) == record


def test_an_unchanged_partition_takes_no_room():
    record = PartitionChangeRecord(partition_id=1, topic_id=TOPIC_ID, leader=3, isr=[3])
    assert frame(record, 2).hex() == "010502" + "00000001" + TOPIC_ID.hex() + "02" + "00050200000003" + "010400000003"
    assert unframe(frame(record, 2)) == record


@pytest.mark.parametrize(
    "value",
    [
        "",
        "01",
        "0102",
        "0202000161" + TOPIC_ID.hex() + "00",  # a frame of another version
        "0163000161" + TOPIC_ID.hex() + "00",  # an unknown type
        "0102630161" + TOPIC_ID.hex() + "00",  # an unknown version
        "0102000261" + TOPIC_ID.hex() + "0000",  # a byte too many
    ],
)
def test_a_bad_metadata_record_is_malformed(value: str):
    with pytest.raises(MalformedMessage):
        unframe(bytes.fromhex(value))


def test_every_record_type_of_kafka_is_known_once():
    kinds = metadata_records.RECORD_TYPES
    assert len(kinds) == 26
    assert all(key == kind.API_KEY for key, kind in kinds.items())


def test_group_records_carry_type_and_version_in_front():
    key = group_records.OffsetCommitKey(group="g", topic="t", partition=3)
    assert coordinator_records.encode_key(key).hex(" ") == "00 01 00 01 67 00 01 74 00 00 00 03"
    assert group_records.decode_key(coordinator_records.encode_key(key)) == key
    assert (
        group_records.decode_key(b"\0\0" + coordinator_records.encode_key(key)[2:]) == key
    )  # as Kafka wrote before 0.9
    group_key = group_records.GroupMetadataKey(group="g")
    assert group_records.decode_key(coordinator_records.encode_key(group_key)) == group_key
    assert group_records.decode_key(b"\0\3\0\1g") is None
    value = group_records.OffsetCommitValue(offset=7, metadata="m", commit_timestamp=9)
    for version in value.VERSIONS:
        written = coordinator_records.encode_value(value, version)
        assert written[:2] == bytes([0, version])
        assert coordinator_records.decode_value(type(value), written) == value


def test_a_later_version_of_a_group_record_is_read_as_our_last():
    value = group_records.OffsetCommitValue(offset=7, metadata="m", commit_timestamp=9)
    later = b"\0\5" + coordinator_records.encode_value(value, 4)[2:-1] + b"\1\x63\1\0"  # with a tagged field 99
    assert coordinator_records.decode_value(type(value), later) == value


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\1", b"\xff\xff\0\1g", b"\0\2\0\5g"])
def test_a_bad_group_record_is_malformed(data: bytes):
    with pytest.raises(MalformedMessage):
        coordinator_records.decode_value(group_records.GroupMetadataValue, data)
    if data != b"\xff\xff\0\1g":
        with pytest.raises(MalformedMessage):
            group_records.decode_key(data)


def test_control_records_start_with_their_version():
    marker = control_records.EndTxnMarker(coordinator_epoch=5)
    assert control_records.encode_control_value(marker).hex() == "000000000005"
    assert control_records.decode_control_value(type(marker), b"\0\0\0\0\0\5") == marker
    voter = control_records.LeaderChangeMessageVoter(voter_id=1, voter_directory_id=TOPIC_ID)
    change = control_records.LeaderChangeMessage(version=1, leader_id=1, voters=[voter])
    written = control_records.encode_control_value(change, 1)
    assert control_records.decode_control_value(type(change), written) == change
    assert control_records.decode_control_value(type(change), b"\0\2" + written[2:] + b"later") is not None
    for bad in (b"", b"\0", b"\xff\xff\0\0", written[:-1]):
        with pytest.raises(MalformedMessage):
            control_records.decode_control_value(type(change), bad)


def test_consumers_read_each_other_across_versions():
    owned = [consumer_protocol.ConsumerProtocolTopicPartition(topic="t", partitions=[0, 2])]
    subscription = consumer_protocol.ConsumerProtocolSubscription(
        topics=["t"], user_data=b"u", owned_partitions=owned, generation_id=4, rack_id="r"
    )
    written = consumer_protocol.encode_subscription(subscription)
    assert written[:2] == b"\0\3"
    assert consumer_protocol.decode_subscription(written) == (subscription, 3)
    assert consumer_protocol.decode_subscription(b"\0\7" + written[2:] + b"later") == (subscription, 7)
    old, version = consumer_protocol.decode_subscription(consumer_protocol.encode_subscription(subscription, 0))
    assert (version, old.owned_partitions, old.generation_id) == (0, [], -1)
    assignment = consumer_protocol.ConsumerProtocolAssignment(assigned_partitions=owned)
    assert consumer_protocol.decode_assignment(consumer_protocol.encode_assignment(assignment)) == assignment
    for bad in (b"", b"\0", b"\xff\xff\0\0", written[:9]):
        with pytest.raises(MalformedMessage):
            consumer_protocol.decode_subscription(bad)
        with pytest.raises(MalformedMessage):
            consumer_protocol.decode_assignment(bad[:3])


def test_an_unknown_version_of_api_versions_can_be_answered_in_version_0():
    response = api_versions.ApiVersionsResponse(
        error_code=35, api_keys=[api_versions.ApiVersion(api_key=18, max_version=4)], throttle_time_ms=5
    )
    assert response.encode(0).hex() == "0023" + "00000001" + "001200000004"


def test_offset_fetch_asks_for_all_topics_with_null():
    request = offset_fetch.OffsetFetchRequest(
        groups=[offset_fetch.OffsetFetchRequestGroup(group_id="g", topics=None)], require_stable=True
    )
    assert offset_fetch.OffsetFetchRequest.decode(request.encode(8), 8) == request


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(messages.__path__)])
def test_an_annotation_allows_none_exactly_where_the_declaration_does(name: str):
    module = importlib.import_module(f"tidelog.protocol.messages.{name}")
    for _, message in inspect.getmembers(module, lambda each: isinstance(each, type) and issubclass(each, Message)):
        if message is Message:
            continue
        hints = typing.get_type_hints(message)
        for each, field in message.FIELDS:
            allowed = type(None) in typing.get_args(hints[each])
            assert allowed == (bool(field.nullable) or field.default is None), f"{message.__name__}.{each}"
