"""Offsets by timestamp, and the aborted transactions of a range: questions about a whole log.

Read-only over the segments. Where the bytes are not in memory, or so many records are to be looked at that others would
wait, `wait` says whether to take that time or to raise `reader.ColdRead`. What is returned may lie above the high
watermark; the caller knows its bound. Follows Kafka's UnifiedLog.fetchOffsetByTimestamp and
LocalLog.collectAbortedTransactions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tidelog.protocol.batches.compression import DEFAULT_MAX_BYTES
from tidelog.protocol.batches.record_batch import LOG_APPEND_TIME, BatchHeader
from tidelog.protocol.batches.record_walk import scan_records
from tidelog.protocol.batches.records import record_section
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.files.disk import Disk
from tidelog.storage.segments.damage import DamagedRecords, damage_at
from tidelog.storage.segments.inspection import INSPECTED_RECORDS_MAX
from tidelog.storage.segments.log_config import INT64_MAX
from tidelog.storage.segments.reader import ColdRead, batch_at, headers, walk
from tidelog.storage.segments.retention import SegmentFacts
from tidelog.storage.segments.segment import UNKNOWN, Segment
from tidelog.storage.segments.segments import Segments
from tidelog.storage.segments.transaction_index import AbortedTransaction

# Of one batch, while others wait; more is looked at beside them.
RECORDS_AT_ONCE_MAX: Final = 2000
BYTES_AT_ONCE_MAX: Final = 1024 * 1024
# Batches that do not hold what their headers say, before a search is given up.
UNTRUE_HEADERS_MAX: Final = 100
_FOUND_MAX: Final = 2 * UNTRUE_HEADERS_MAX


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
    """The first record, from the log start on, whose timestamp is not below `timestamp`.

    Raises KafkaError for records that cannot be looked at.
    """
    untrue: list[int] = []
    for segment in segments:
        found = None
        if segment.size_bytes and max_timestamp_of(segment) >= timestamp:
            found = _first_in_segment(segments, segment, timestamp, log_start_offset, wait, untrue)
        for damage in segment.damage:  # in which there might be an earlier one
            is_before = found is None or damage.first_offset < found.offset
            if is_before and damage.end_offset > log_start_offset and not segment.is_older(damage, timestamp):
                raise DamagedRecords(segment.path, damage)
        if found is not None:
            return found
    return None


def _first_in_segment(
    segments: Segments, segment: Segment, timestamp: int, log_start_offset: int, wait: bool, untrue: list[int]
) -> TimestampOffset | None:
    row = segment.time_index.floor(timestamp - 1)  # everything up to this row's offset is older
    from_offset = max(row[1] if row is not None else segment.base_offset, log_start_offset)
    position_row = segment.offset_index.floor(from_offset)
    for position, header in headers(segment, position_row[1] if position_row is not None else 0, wait=wait):
        if header.max_timestamp < timestamp or header.last_offset < log_start_offset:
            continue
        if header.timestamp_type == LOG_APPEND_TIME:
            offset = max(header.base_offset, log_start_offset)
            return TimestampOffset(header.max_timestamp, offset, header.partition_leader_epoch)
        wanted = _Wanted(timestamp, INT64_MAX, log_start_offset)
        found = _first_in_batch(segments, segment, position, header, wanted, wait)
        if found is not None:
            return found
        untrue.append(header.base_offset)
        if len(untrue) > UNTRUE_HEADERS_MAX:
            raise KafkaError(ErrorCode.INVALID_RECORD, f"headers from {untrue[0]} on give times that no record has")
    return None


class _Wanted(NamedTuple):
    """The first record of a batch with a timestamp from `oldest` to `newest`, at `from_offset` or behind it."""

    oldest: int
    newest: int
    from_offset: int


_Found = TimestampOffset | Exception | None
_UNSEEN: Final = LookupError("nobody has looked yet")


class SlowLookup(ColdRead):
    """There is much to look at in one batch. `warm` does it, in a thread; whoever asks again is told what it found."""

    def __init__(
        self, segment: Segment, position: int, header: BatchHeader, look: Callable[[bytes], TimestampOffset | None],
        tell: Callable[[_Found], None],
    ) -> None:  # fmt: skip
        super().__init__(segment, position, header.size_bytes)
        self._look, self._tell = look, tell

    def warm(self) -> None:
        try:
            found: _Found = self._look(self._file.read_at(self._size_bytes, self._position))
        except Exception as error:
            found = error
        self._tell(found)


def _first_in_batch(
    segments: Segments, segment: Segment, position: int, header: BatchHeader, wanted: _Wanted, wait: bool
) -> TimestampOffset | None:
    # The CRC covers neither of the last two, and where a log was cut the same batch may be written again, by others.
    key = (segment.path, position, header.crc, header.base_offset, header.partition_leader_epoch, *wanted)
    found: _Found = segments.found_by_time.get(key, _UNSEEN)
    if found is not _UNSEEN:
        if isinstance(found, Exception):
            segments.found_by_time.pop(key, None)
            raise found
        return found
    if wait or header.record_count <= RECORDS_AT_ONCE_MAX:
        batch = batch_at(segment, position, header, wait=wait)
        try:
            return _look(batch, header, wanted, DEFAULT_MAX_BYTES if wait else BYTES_AT_ONCE_MAX)
        except KafkaError as error:
            if wait or error.code is not ErrorCode.MESSAGE_TOO_LARGE:
                raise

    def tell(found: _Found) -> None:
        segments.found_by_time[key] = found
        for oldest in list(segments.found_by_time)[:-_FOUND_MAX]:  # of a copy: other threads tell, too
            segments.found_by_time.pop(oldest, None)

    raise SlowLookup(segment, position, header, lambda data: _look(data, header, wanted, DEFAULT_MAX_BYTES), tell)


def _look(batch: bytes, header: BatchHeader, wanted: _Wanted, bytes_max: int) -> TimestampOffset | None:
    """One record at a time, as a batch may stand for more than should be held at once."""
    if header.record_count > INSPECTED_RECORDS_MAX:
        raise KafkaError(
            ErrorCode.MESSAGE_TOO_LARGE, f"{header.record_count} records in a batch, above {INSPECTED_RECORDS_MAX}"
        )
    section = record_section(batch, 0, header, bytes_max)
    for offset_delta, time_delta, _ in scan_records(section, header.record_count):
        offset, timestamp = header.base_offset + offset_delta, header.base_timestamp + time_delta
        if wanted.oldest <= timestamp <= wanted.newest and offset >= wanted.from_offset:
            return TimestampOffset(timestamp, offset, header.partition_leader_epoch)
    return None


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
            if header.timestamp_type == LOG_APPEND_TIME:  # which is the time of every record in it
                return TimestampOffset(header.max_timestamp, header.base_offset, header.partition_leader_epoch)
            wanted = _Wanted(header.max_timestamp, header.max_timestamp, 0)
            return _first_in_batch(segments, best, position, header, wanted, wait)
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


def end_before(segment: Segment, offset: int) -> tuple[int, int]:
    """(position of the batch that holds `offset` or comes after it, the offset at which the one before it ends)."""
    torn = damage_at(segment.damage, offset)
    if torn is not None:
        return torn.position, offset
    row = segment.offset_index.floor(offset - 1)
    end_offset = max((each.end_offset for each in segment.damage if each.end_offset <= offset), default=0)
    end_offset = max(end_offset, segment.base_offset)
    for position, _, last_offset, _ in walk(segment, row[1] if row is not None else 0, wait=True):
        if last_offset >= offset:
            return position, end_offset
        end_offset = max(end_offset, last_offset + 1)
    return segment.size_bytes, end_offset


def facts_of(segments: Segments, disk: Disk) -> list[SegmentFacts]:
    """What retention goes by. Raises CorruptIndex."""
    facts = []
    for segment in segments:
        timestamp = max_timestamp_of(segment)
        if timestamp < 0 or segment.damage:  # the newest record may be one of those that cannot be read
            timestamp = max(timestamp, disk.modified_ms(segment.path))
        facts.append(SegmentFacts(segment.base_offset, segment.next_offset, segment.size_bytes, timestamp))
    return facts
