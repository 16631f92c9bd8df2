"""Offsets by timestamp, and the aborted transactions of a range: questions about a whole log.

Read-only over the segments. Where the bytes are not in memory, `wait` says whether to wait for the device or to raise
`reader.ColdRead`. What is returned may lie above the high watermark; the caller knows its bound. Follows
Kafka's UnifiedLog.fetchOffsetByTimestamp and LocalLog.collectAbortedTransactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidelog.protocol.compression import DEFAULT_MAX_BYTES
from tidelog.protocol.record_batch import LOG_APPEND_TIME, BatchHeader
from tidelog.protocol.record_walk import scan_records
from tidelog.protocol.records import record_section
from tidelog.storage.reader import batch_at, headers
from tidelog.storage.segment import UNKNOWN, Segment
from tidelog.storage.segments import Segments
from tidelog.storage.transaction_index import AbortedTransaction


class TimestampOffset(NamedTuple):
    """A record found by its time; `leader_epoch` is -1 where the batch does not say."""

    timestamp: int
    offset: int
    leader_epoch: int


def max_timestamp_of(segment: Segment) -> int:
    """The largest record timestamp of the segment, -1 without one."""
    if segment.max_timestamp == UNKNOWN:
        segment.load_indexes()
    return segment.max_timestamp


def first_at_or_after(
    segments: Segments, timestamp: int, log_start_offset: int, *, wait: bool = True
) -> TimestampOffset | None:
    """The first record, from the log start on, whose timestamp is not below `timestamp`."""
    for segment in segments:
        if segment.size_bytes and max_timestamp_of(segment) >= timestamp:
            found = _first_in_segment(segment, timestamp, log_start_offset, wait)
            if found is not None:
                return found
    return None


def _first_in_segment(segment: Segment, timestamp: int, log_start_offset: int, wait: bool) -> TimestampOffset | None:
    row = segment.time_index.floor(timestamp - 1)  # everything up to this row's offset is older
    from_offset = max(row[1] if row is not None else segment.base_offset, log_start_offset)
    position_row = segment.offset_index.floor(from_offset)
    for position, header in headers(segment, position_row[1] if position_row is not None else 0, wait=wait):
        if header.max_timestamp < timestamp or header.last_offset < log_start_offset:
            continue
        if header.timestamp_type == LOG_APPEND_TIME:
            offset = max(header.base_offset, log_start_offset)
            return TimestampOffset(header.max_timestamp, offset, header.partition_leader_epoch)
        for offset, record_timestamp in _times(segment, position, header, wait):
            if record_timestamp >= timestamp and offset >= log_start_offset:
                return TimestampOffset(record_timestamp, offset, header.partition_leader_epoch)
    return None


def _times(segment: Segment, position: int, header: BatchHeader, wait: bool) -> Iterator[tuple[int, int]]:
    """Offset and timestamp of each record; one at a time, as a batch may stand for more than should be held at once."""
    section = record_section(batch_at(segment, position, header, wait=wait), 0, header, DEFAULT_MAX_BYTES)
    for offset_delta, time_delta, _ in scan_records(section, header.record_count):
        yield header.base_offset + offset_delta, header.base_timestamp + time_delta


def largest(segments: Segments, *, wait: bool = True) -> TimestampOffset | None:
    """The first record that has the log's largest timestamp, which is -1 where no record has one; None without any."""
    best: Segment | None = None
    for segment in segments:
        if segment.size_bytes and (best is None or max_timestamp_of(segment) > max_timestamp_of(best)):
            best = segment
    if best is None:
        return None
    row = best.offset_index.floor(best.offset_of_max_timestamp)
    for position, header in headers(best, row[1] if row is not None else 0, wait=wait):
        if header.max_timestamp == best.max_timestamp:
            return _largest_in_batch(best, position, header, wait)
    return None


def _largest_in_batch(segment: Segment, position: int, header: BatchHeader, wait: bool) -> TimestampOffset | None:
    if header.timestamp_type == LOG_APPEND_TIME:  # which is the time of every record in it
        return TimestampOffset(header.max_timestamp, header.base_offset, header.partition_leader_epoch)
    for offset, timestamp in _times(segment, position, header, wait):
        if timestamp == header.max_timestamp:
            return TimestampOffset(timestamp, offset, header.partition_leader_epoch)
    return None


def aborted_between(segments: Segments, from_offset: int, upper_offset: int) -> list[AbortedTransaction]:
    """The aborted transactions that have records in [from_offset, upper_offset)."""
    found: list[AbortedTransaction] = []
    for segment in segments.from_offset(from_offset):
        rows, is_complete = segment.transaction_index.collect(from_offset, upper_offset)
        found.extend(rows)
        if is_complete:
            break
    return found


def refresh_max_timestamp(segment: Segment) -> None:
    """After a cut: the largest timestamp of what is left, by the last time index row and the batches after it."""
    times = segment.time_index
    segment.max_timestamp, segment.offset_of_max_timestamp = -1, segment.base_offset
    start = 0
    if times.count:
        segment.max_timestamp, segment.offset_of_max_timestamp = times.last_key, times.last_value
        row = segment.offset_index.floor(times.last_value)
        start = row[1] if row is not None else 0
    for _, header in headers(segment, start):
        if header.max_timestamp > segment.max_timestamp:
            segment.max_timestamp, segment.offset_of_max_timestamp = header.max_timestamp, header.last_offset
