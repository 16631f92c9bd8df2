"""Indexes, epochs, snapshots and checkpoints against the plainest thing that could be right."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.storage.batches import QuickDisk
from tidelog.storage.files.checkpoints import (
    CorruptCheckpoint,
    decode_leader_epochs,
    decode_offsets,
    decode_partition_metadata,
    encode_leader_epochs,
    encode_offsets,
)
from tidelog.storage.producers.producer_snapshots import CorruptSnapshot, decode_snapshot, encode_snapshot
from tidelog.storage.producers.producer_state import ProducerEntry
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.retention import SegmentFacts, deletable_prefix
from tidelog.storage.segments.sparse_index import offset_index

RISING = st.lists(st.integers(1, 400), min_size=0, max_size=1200)


@given(steps=RISING, operations=st.lists(st.tuples(st.sampled_from("wtfvr"), st.integers(0, 1300)), max_size=12))
def test_an_index_is_a_sorted_list(steps: list[int], operations: list[tuple[str, int]]):
    with tempfile.TemporaryDirectory() as folder:
        index = offset_index(QuickDisk(), str(Path(folder) / "index"), 1000)
        rows: list[tuple[int, int]] = []
        for step in steps:
            last = rows[-1] if rows else (1000, 0)
            rows.append((last[0] + step, last[1] + 3 * step))
            index.append(*rows[-1])
        for operation, number in operations:
            if operation == "w":
                index.write_rows()
            elif operation == "t":
                index.truncate(number)
                del rows[number:]
            elif operation == "r":
                index.begin_rebuild()
                for row in rows:
                    index.append(*row)
            elif operation == "f":
                key = 1000 + 40 * number
                assert index.floor(key) == max((row for row in rows if row[0] <= key), default=None)
            else:
                value = 120 * number
                assert index.floor_value(value) == max((row for row in rows if row[1] <= value), default=None)
        assert index.rows() == rows
        index.write_rows()
        assert not rows or (Path(folder) / "index").stat().st_size == 8 * len(rows)
        index.release()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), max_size=20), st.integers(0, 60), st.integers(0, 60))
def test_epochs_and_starts_always_rise(assigned: list[tuple[int, int]], end: int, start: int):
    cache = LeaderEpochs()
    for epoch, offset in assigned:
        cache.assign(epoch, offset)
        assert (epoch, offset) in list(cache) or cache.latest == epoch
    cache.truncate_from_end(end)
    assert all(offset < end for _, offset in cache)
    before = [cache.epoch_for_offset(offset) for offset in range(start, 70)]
    cache.truncate_from_start(start)
    assert [cache.epoch_for_offset(offset) for offset in range(start, 70)] == before
    entries = list(cache)
    assert entries == sorted(set(entries))
    assert len({offset for _, offset in entries}) == len({epoch for epoch, _ in entries}) == len(entries)
    assert decode_leader_epochs(encode_leader_epochs(cache)) == entries


INT64 = st.integers(-(2**63), 2**63 - 1)
OFFSET = st.integers(0, 2**62)
ENTRY = st.builds(
    lambda pid, epoch, coordinator, timestamp, first, last, delta, sequence: ProducerEntry(
        pid,
        epoch,
        coordinator,
        timestamp,
        first,
        [((sequence - delta) % 2**31, sequence, last, last + delta, timestamp)] if last >= 0 else [],
    ),
    OFFSET,
    st.integers(0, 2**15 - 1),
    st.integers(-1, 2**31 - 1),
    INT64,
    st.integers(-1, 2**62),
    st.integers(-1, 2**62),
    st.integers(0, 2**20),
    st.integers(0, 2**31 - 1),
)


@given(st.lists(ENTRY, max_size=8))
def test_a_snapshot_says_what_was_put_in(entries: list[ProducerEntry]):
    data = encode_snapshot(entries)
    assert [repr(entry) for entry in decode_snapshot(data)] == [repr(entry) for entry in entries]


@given(st.lists(ENTRY, max_size=3), st.data())
def test_a_snapshot_with_any_bit_changed_is_known_for_one(entries: list[ProducerEntry], data: st.DataObject):
    encoded = bytearray(encode_snapshot(entries))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        decode_snapshot(bytes(encoded))
    except CorruptSnapshot:
        return
    raise AssertionError("a changed snapshot was believed")


@given(st.binary(max_size=200))
def test_garbage_is_never_more_than_corrupt(data: bytes):
    for decode, refusal in (
        (decode_snapshot, CorruptSnapshot),
        (decode_offsets, CorruptCheckpoint),
        (decode_leader_epochs, CorruptCheckpoint),
        (decode_partition_metadata, CorruptCheckpoint),
    ):
        try:
            decode(data)
        except refusal:
            pass


TOPIC = st.text("abcXYZ019._-", min_size=1, max_size=20)


@given(st.dictionaries(st.tuples(TOPIC, st.integers(0, 2**31 - 1)), OFFSET, max_size=10))
def test_an_offset_checkpoint_says_what_was_put_in(offsets: dict[tuple[str, int], int]):
    assert decode_offsets(encode_offsets(offsets)) == offsets


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 100), st.integers(0, 1000)), min_size=1, max_size=12),
    st.integers(-1, 600),
    st.integers(-1, 1200),
    st.integers(0, 700),
    st.integers(0, 700),
)
def test_what_may_be_deleted_is_a_prefix_below_the_high_watermark(
    shapes: list[tuple[int, int, int]], retention_bytes: int, retention_ms: int, log_start: int, high_watermark: int
):
    segments, base = [], 0
    for length, size, timestamp in shapes:
        segments.append(SegmentFacts(base, base + length, size, timestamp))
        base += length
    config = LogConfig(retention_bytes=retention_bytes, retention_ms=retention_ms)
    count = deletable_prefix(segments, config, log_start, high_watermark, 1000)
    assert all(segment.end_offset <= high_watermark for segment in segments[:count])
    for segment in segments[:count]:
        rest = sum(other.size_bytes for other in segments if other.base_offset > segment.base_offset)
        too_old = 0 <= retention_ms < 1000 - segment.largest_timestamp
        assert segment.end_offset <= log_start or too_old or 0 <= retention_bytes <= rest
