from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.replication.quorum.raft.snapshot import (
    CorruptSnapshot,
    SnapshotId,
    decode_snapshot,
    encode_snapshot,
    parse_snapshot_name,
    snapshot_name,
)

IDENTITY = SnapshotId(1234, 5)


def test_names_are_kafkas():
    assert snapshot_name(IDENTITY) == "00000000000000001234-0000000005.checkpoint"
    assert parse_snapshot_name("00000000000000001234-0000000005.checkpoint") == IDENTITY
    for other in ("bootstrap.checkpoint", "00000000000000001234-0000000005.checkpoint.part", "x"):
        assert parse_snapshot_name(other) is None


@given(values=st.lists(st.binary(max_size=200), max_size=40), timestamp=st.integers(0, 2**40))
def test_what_is_written_is_read(values, timestamp):
    snapshot = decode_snapshot(bytes(encode_snapshot(values, IDENTITY, timestamp, timestamp)))
    assert snapshot.values == values
    assert snapshot.last_timestamp_ms == timestamp
    assert snapshot.kraft_version == 0


def test_many_records_make_several_batches_with_one_run_of_offsets():
    content = encode_snapshot([b"x"] * 3000, IDENTITY, 0, 0)
    headers = [header for _, header in iter_headers(content)]
    assert len(headers) == 5
    assert [header.base_offset for header in headers] == [0, 1, 1025, 2049, 3001]
    assert {header.partition_leader_epoch for header in headers} == {IDENTITY.epoch}
    assert [header.is_control for header in headers] == [True, False, False, False, True]


@given(data=st.data())
def test_a_snapshot_cut_short_or_damaged_is_refused(data):
    content = bytes(encode_snapshot([b"one", b"two"], IDENTITY, 7, 7))
    cut = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(CorruptSnapshot):
        decode_snapshot(content[:cut])
    damaged = bytearray(content)
    position = next(position for position, header in iter_headers(content) if not header.is_control)
    damaged[position + data.draw(st.integers(21, 60))] ^= 0x40
    with pytest.raises(CorruptSnapshot):
        decode_snapshot(bytes(damaged))
