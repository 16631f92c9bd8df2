from __future__ import annotations

import pytest

from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages import metadata_records as kafka
from tidelog.replication.controller.metadata.record_codec import (
    LATEST_METADATA_VERSION,
    UnknownRecord,
    decode_record,
    encode_record,
    record_version,
)


def test_a_record_is_framed_as_kafka_frames_it():
    # From the bootstrap.checkpoint that Kafka 4.3.1 writes.
    value = bytes.fromhex("010c00116d657461646174612e76657273696f6e001e00")
    record = kafka.FeatureLevelRecord(name="metadata.version", feature_level=30)
    assert decode_record(value) == record
    assert encode_record(record, LATEST_METADATA_VERSION) == value


@pytest.mark.parametrize(
    ("record", "versions"),
    [
        (kafka.PartitionRecord(), {7: 0, 16: 0, 17: 1, 22: 1, 23: 2, 30: 2}),
        (kafka.PartitionChangeRecord(), {7: 0, 17: 1, 23: 2, 30: 2}),
        (kafka.RegisterBrokerRecord(), {7: 1, 8: 2, 16: 2, 17: 3, 29: 3, 30: 4}),
        (kafka.TopicRecord(), {7: 0, 30: 0}),
    ],
)
def test_the_metadata_version_decides_the_record_version(record, versions):
    assert {level: record_version(record, level) for level in versions} == versions


@pytest.mark.parametrize("value", [b"\x01\x64\x00abc", b"\x01\xff\x07\x00", b"\x01\x02\x05abc", b"\x01\x09\xff\x01"])
def test_an_unknown_kind_or_version_comes_back_as_it_was(value):
    record = decode_record(value)
    assert record == UnknownRecord(value)
    assert encode_record(record, LATEST_METADATA_VERSION) == value


@pytest.mark.parametrize("value", [b"", b"\x01", b"\x02\x02\x00", b"\x01\x02\x00\x05ab", b"\x01\x0c\x00"])
def test_a_broken_record_is_refused(value):
    with pytest.raises(MalformedMessage):
        decode_record(value)
