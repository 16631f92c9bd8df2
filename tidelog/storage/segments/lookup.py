"""Look-ups in a whole log: offsets by timestamp, and the aborted transactions of an offset range.

They only read the segments. If bytes are not in memory, or so many records must be read that the loop would be blocked,
`wait` decides whether to take that time or to raise `reader.ColdRead`. Results may lie above the high watermark, so the
caller checks its bound. Follows Kafka's UnifiedLog.fetchOffsetByTimestamp and LocalLog.collectAbortedTransactions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from tidelog.protocol.batches.compression import DEFAULT_MAX_BYTES
from tidelog.protocol.batches.record_batch import LOG_APPEND_TIME, MAGIC, BatchHeader
from tidelog.protocol.batches.record_walk import scan_records
from tidelog.protocol.batches.records import record_section
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.files.disk import Disk
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, DamagedRecords, damage_at
from tidelog.storage.segments.inspection import INSPECTED_RECORDS_MAX, STEP_RECORDS, is_decompressed_at_once
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.reader import (
    ColdRead,
    batch_at,
    checked_headers,
    ends_damaged,
    header_at,
    headers,
    position_of,
)
from tidelog.storage.segments.retention import SegmentFacts, deletable_prefix
from tidelog.storage.segments.segment import UNKNOWN, Segment
from tidelog.storage.segments.segments import Segments
from tidelog.storage.segments.transaction_index import AbortedTransaction

logger = logging.getLogger("tidelog.storage")

# The records that one search looks at on the loop's thread, and the bytes of a batch of them. What is larger is
# decompressed on another thread and looked at in steps.
RECORDS_AT_ONCE_MAX: Final = 2000
BYTES_AT_ONCE_MAX: Final = 1024 * 1024
# The batches whose headers one search looks at in one turn of the loop, at about 10 us each.
HEADERS_AT_ONCE_MAX: Final = 200
# A search ends with an error after this many batches without the timestamp that their headers announce.
UNTRUE_HEADERS_MAX: Final = 100
# The batches that are compared with time indexes, in one segment or together, after which the loop has its turn.
_COMPARED_AT_ONCE_MAX: Final = 500
# The segments whose largest timestamps are confirmed before the loop has its turn.
_CONFIRMED_AT_ONCE_MAX: Final = 100
_FOUND_MAX: Final = 2 * UNTRUE_HEADERS_MAX


class TimestampOffset(NamedTuple):
    """A record found by its timestamp. `leader_epoch` is -1 if the batch has none."""

    timestamp: int
    offset: int
    leader_epoch: int


def max_timestamp_of(segment: Segment) -> int:
    """The largest record timestamp of the segment, -1 if there is none. One from a file may be wrong."""
    if segment.max_timestamp == UNKNOWN:
        segment.load_indexes()
    return segment.max_timestamp


def confirm_max_timestamp(segment: Segment, *, wait: bool) -> int:
    """Compare a largest timestamp from the time index with the batches, once. The number of batches that it looked at.

    After _COMPARED_AT_ONCE_MAX batches it ends without a result: `max_is_confirmed` is false, and the next call, of any
    search, goes on there. Where times go back, nearly all batches may follow the one with the largest.
    The index has no checksum: a search by time would pass over the segment, and retention would delete it too early.
    Raises ColdRead, and CorruptIndex.
    """
    if segment.max_is_confirmed:
        return 0
    was_open, number = segment.is_open, 0
    try:
        segment.load_indexes()
        # Not `max_timestamp`: that of a later append may be as new as one that the index has lost.
        newest, offset, filed_bytes = segment.filed_max
        path, basis = segment.time_index.path, (newest, offset, segment.generation)
        if segment.confirmation is not None and segment.confirmation[0] == basis:
            _, position, found_end, is_there = segment.confirmation
        else:
            position, found_end, is_there = position_of(segment, offset, wait=wait), segment.base_offset, newest < 0
        for reached, header in headers(segment, position, wait=wait):
            if number == _COMPARED_AT_ONCE_MAX:
                return number
            if reached >= filed_bytes:
                found_end = segment.next_offset
                break
            number += 1
            if header.base_offset <= offset <= header.last_offset:
                is_there = is_there or header.max_timestamp == newest
            # A batch that compaction emptied keeps its timestamp, which no index names.
            if header.max_timestamp > newest and header.record_count:
                raise CorruptIndex(path, f"lacks timestamp {header.max_timestamp}")
            found_end = header.next_offset
            # The bytes behind it may be cold.
            segment.confirmation = basis, reached + header.size_bytes, found_end, is_there
        if not is_there:
            raise CorruptIndex(path, f"has timestamp {newest} for offset {offset}, no batch has it there")
        # What a lost end, or a lost file behind this one, held may be newer.
        if found_end < segment.next_offset and not (segment.may_end_early or ends_damaged(segment)):
            raise CorruptIndex(segment.path, f"ends at offset {found_end}, not at {segment.next_offset}")
        segment.max_is_confirmed, segment.confirmation = True, None
    finally:
        if not was_open:
            segment.release()  # a log may have more segments than the process may have files
    return number


def _confirm_all(segments: Segments, wait: bool) -> Iterator[Segment]:
    """The segments with records. Their largest timestamps are what the batches say. Raises CorruptIndex, ColdRead."""
    left, batches_left = _CONFIRMED_AT_ONCE_MAX, _COMPARED_AT_ONCE_MAX
    for segment in segments:
        while segment.size_bytes and not segment.max_is_confirmed:
            left, batches_left = left - 1, batches_left - confirm_max_timestamp(segment, wait=wait)
            if not wait and (min(left, batches_left) < 0 or not segment.max_is_confirmed):
                raise ColdRead(segment, 0, 0)  # the loop's turn; what is compared stays so
        yield segment


def first_at_or_after(
    segments: Segments,
    timestamp: int,
    log_start_offset: int,
    accepted_losses: frozenset[int] = frozenset(),
    *,
    wait: bool = True,
    progress: LookupProgress | None = None,
) -> TimestampOffset | None:
    """The first record, from the log start on, whose timestamp is not below `timestamp`.

    With `progress` it raises LookupPause after HEADERS_AT_ONCE_MAX batches, and the next call with it goes on there.
    Raises DamagedRecords if damage before it may hold such a record: timestamps need not rise. `accepted_losses` are
    first offsets of damage without a copy: it counts as older where a record behind it is.
    Raises KafkaError for records that cannot be read.
    """
    reached = progress.segment_in(segments) if progress is not None else None
    so_far = _SoFar(progress, goes_on=reached is not None)
    for segment in _confirm_all(segments, wait):
        result = None
        is_passed = reached is not None and segment.base_offset < reached.base_offset
        if segment.size_bytes and not is_passed and max_timestamp_of(segment) >= timestamp:
            from_offset = log_start_offset
            if progress is not None and segment is reached:
                from_offset = max(from_offset, progress.offset)
            result = _first_in_segment(segments, segment, timestamp, from_offset, log_start_offset, wait, so_far)
        for damage in segment.damage:  # the damaged range may hold an earlier record
            is_before = result is None or damage.first_offset < result.offset
            is_older = damage.first_offset in accepted_losses and segment.is_older(damage, timestamp)
            if is_before and damage.end_offset > log_start_offset and not is_older:
                raise DamagedRecords(segment.path, damage)
        if result is not None:
            return result
    return None


def _first_in_segment(
    segments: Segments, segment: Segment, timestamp: int, from_offset: int, log_start_offset: int, wait: bool,
    so_far: _SoFar,
) -> TimestampOffset | None:  # fmt: skip
    row = segment.time_index.floor(timestamp - 1)  # all records up to this row's offset are older
    if row is not None and row[1] >= segment.next_offset:
        raise CorruptIndex(segment.time_index.path, f"has offset {row[1]}, the segment ends at {segment.next_offset}")
    from_offset = max(row[1] if row is not None else segment.base_offset, from_offset)
    for position, header in checked_headers(segment, from_offset, wait=wait, epochs=segments.leader_epochs):
        so_far.count(segment, header, segments.leader_epochs.latest)
        if row is not None and header.base_offset <= row[1] <= header.last_offset and header.max_timestamp != row[0]:
            reason = f"has timestamp {row[0]} for offset {row[1]}, the batch has {header.max_timestamp}"
            raise CorruptIndex(segment.time_index.path, reason)
        if header.max_timestamp < timestamp or header.last_offset < log_start_offset or not header.record_count:
            continue  # a batch that compaction emptied keeps its timestamp
        if header.timestamp_type == LOG_APPEND_TIME and not _is_thinned(header):
            offset = max(header.base_offset, log_start_offset)
            return TimestampOffset(header.max_timestamp, offset, header.partition_leader_epoch)
        search = _Search(timestamp, INT64_MAX, log_start_offset)
        result = _first_in_batch(segments, segment, position, header, search, wait, so_far)
        if result is not None:
            return result
        so_far.untrue.append(header.base_offset)
        if len(so_far.untrue) > UNTRUE_HEADERS_MAX:
            first = so_far.untrue[0]
            raise KafkaError(ErrorCode.INVALID_RECORD, f"headers from {first} on give times that no record has")
    return None


def _is_thinned(header: BatchHeader) -> bool:
    """Whether compaction has removed records of the batch. The first offset of another one is that of a record."""
    return header.record_count <= header.last_offset_delta


class EpochLog(Protocol):
    """The log interface for `end_of_epoch`. `accepted_losses`: first offsets of damage that no replica can repair."""

    segments: Segments
    leader_epochs: LeaderEpochs
    log_start_offset: int
    log_end_offset: int
    accepted_losses: frozenset[int]


def end_of_epoch(log: EpochLog, epoch: int, fetch_offset: int = INT64_MAX) -> tuple[int, int]:
    """`LeaderEpochs.end_offset_for`, if the batches at this offset have the epochs that the log's epochs give them.

    The epoch file has no checksum, and other replicas truncate their logs to its offsets. `fetch_offset`: the end of a
    log of this epoch. If that need not be truncated, the batch before it is compared instead: a wrong file would let it
    keep records of an older leader. Raises ColdRead, CorruptIndex for a segment that disagrees, and DamagedRecords if
    damage hides the batches.
    """
    segments, epochs, start = log.segments, log.leader_epochs, log.log_start_offset
    end_epoch, end_offset = epochs.end_offset_for(epoch, log.log_end_offset)
    agrees = end_epoch == epoch and end_offset >= fetch_offset
    for offset in (fetch_offset - 1,) if agrees else (end_offset - 1, end_offset):
        if end_epoch < 0 or not start <= offset < log.log_end_offset:
            continue
        segment = segments[max(0, segments.floor_index(offset))]
        damage = damage_at(segment.damage, offset)
        is_hidden = damage is not None and damage.first_offset not in log.accepted_losses
        if damage is not None and is_hidden and (not agrees or _has_other_epoch(segment, damage, epochs)):
            raise DamagedRecords(segment.path, damage)
        for _, header in headers(segment, position_of(segment, offset), wait=False):
            known = epochs.epoch_for_offset(max(header.base_offset, offset))  # no batch is of two epochs
            if damage is None and header.partition_leader_epoch != known:
                reason = f"leader epoch {header.partition_leader_epoch} of offset {header.base_offset}, not {known}"
                raise CorruptIndex(segment.path, reason)
            break
    return end_epoch, end_offset


def _has_other_epoch(segment: Segment, damage: DamagedRange, epochs: LeaderEpochs) -> bool:
    """Whether the damaged bytes begin with a batch of another leader epoch than these say."""
    epoch = epochs.epoch_for_offset(damage.first_offset)
    header = header_at(segment.file, damage.position)
    if damage.position == damage.end_position or header is None:
        return False
    return (header.base_offset, header.magic) == (damage.first_offset, MAGIC) and header.partition_leader_epoch != epoch


class _Search(NamedTuple):
    """A search for the first record of a batch with a timestamp in [oldest, newest], at or after `from_offset`."""

    oldest: int
    newest: int
    from_offset: int


_Outcome = TimestampOffset | Exception | None
_NOT_SEARCHED: Final = LookupError("not searched yet")


class LookupProgress:
    """How far one search has come in several turns of the loop: in `segment`, of leader epoch `epoch`, all batches
    below `offset` are older than the timestamp, or have an untrue header, or are damaged as of its `generation`. The
    search has passed the segments before it.
    """

    __slots__ = ("epoch", "generation", "offset", "segment", "untrue")

    def __init__(self) -> None:
        self.segment: Segment | None = None
        self.epoch = self.generation = self.offset = -1
        self.untrue: tuple[int, ...] = ()

    def segment_in(self, segments: Segments) -> Segment | None:
        """That segment; None where the log is another: a cleaned segment is another object, a repaired one is not."""
        segment = self.segment
        if segment is None or self.epoch != segments.leader_epochs.latest or self.generation != segment.generation:
            return None
        return segment if segments[max(0, segments.floor_index(segment.base_offset))] is segment else None


class LookupPause(ColdRead):
    """A search has looked at many batches: other requests are due before it goes on."""


class _SoFar:
    """What one search has looked at: the first offsets of batches whose headers are untrue; and in this turn the
    records that it read at once, and the headers.
    """

    __slots__ = ("_headers", "_progress", "records", "untrue")

    def __init__(self, progress: LookupProgress | None = None, *, goes_on: bool = False) -> None:
        self.untrue = list(progress.untrue) if progress is not None and goes_on else []
        self.records = 0
        self._headers = 0
        self._progress = progress

    def count(self, segment: Segment, header: BatchHeader, epoch: int) -> None:
        """Count the batch that is due. Raises LookupPause."""
        self._headers += 1
        progress = self._progress
        if progress is not None and self._headers > HEADERS_AT_ONCE_MAX:
            progress.segment, progress.offset, progress.epoch = segment, header.base_offset, epoch
            progress.generation, progress.untrue = segment.generation, tuple(self.untrue)
            raise LookupPause(segment, 0, 0)


class SlowLookup(ColdRead):
    """A search in a large batch. It stores the result for the caller's next try. The caller runs `warm` on a thread, or
    `decompress` on a thread and then all steps of `inspect`: they hold up no other thread of Python for long.
    """

    def __init__(
        self, segment: Segment, position: int, header: BatchHeader, search: _Search, tell: Callable[[_Outcome], None]
    ) -> None:
        super().__init__(segment, position, header.size_bytes)
        self._header, self._search, self._tell = header, search, tell
        self._section: bytes | None = None

    def warm(self) -> None:
        self.decompress()
        for _ in self.inspect():
            pass

    def decompress(self) -> None:
        """On any thread."""
        try:
            batch = self._file.read_at(self._size_bytes, self._position)
            self._section = _section(batch, self._header, DEFAULT_MAX_BYTES)
        except Exception as error:
            self._tell(error.with_traceback(None))

    def inspect(self) -> Iterator[None]:
        """Search. Each step takes about a millisecond."""
        if self._section is None:
            return  # the failure is told
        try:
            outcome: _Outcome = yield from _looking(self._section, self._header, self._search)
        except Exception as error:
            outcome = error.with_traceback(None)
        self._section = None
        self._tell(outcome)

    def rebuild(self) -> None:
        """Nothing: the batch stays as it is."""


def _first_in_batch(
    segments: Segments, segment: Segment, position: int, header: BatchHeader, search: _Search, wait: bool,
    so_far: _SoFar,
) -> TimestampOffset | None:  # fmt: skip
    # The CRC does not cover base offset and epoch. After a truncation the same batch may be there in another epoch.
    key = (segment.path, position, header.crc, header.base_offset, header.partition_leader_epoch, *search)
    outcome: _Outcome = segments.found_by_time.get(key, _NOT_SEARCHED)
    if outcome is not _NOT_SEARCHED:
        if isinstance(outcome, Exception):
            segments.found_by_time.pop(key, None)
            raise outcome
        return outcome
    has_few = so_far.records + header.record_count <= RECORDS_AT_ONCE_MAX
    if wait or (has_few and is_decompressed_at_once(header)):
        so_far.records += header.record_count
        batch = batch_at(segment, position, header, wait=wait)
        try:
            return _look(batch, header, search, DEFAULT_MAX_BYTES if wait else BYTES_AT_ONCE_MAX)
        except KafkaError as error:
            if wait or error.code is not ErrorCode.MESSAGE_TOO_LARGE:
                raise

    def tell(outcome: _Outcome) -> None:
        segments.found_by_time[key] = outcome
        for oldest in list(segments.found_by_time)[:-_FOUND_MAX]:  # iterates over a copy: other threads add entries
            segments.found_by_time.pop(oldest, None)

    raise SlowLookup(segment, position, header, search, tell)


def _look(batch: bytes, header: BatchHeader, search: _Search, bytes_max: int) -> TimestampOffset | None:
    """Search a batch at once."""
    steps = _looking(_section(batch, header, bytes_max), header, search)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: TimestampOffset | None = done.value
            return found


def _section(batch: bytes, header: BatchHeader, bytes_max: int) -> bytes:
    """The decompressed records. Raises KafkaError."""
    if header.record_count > INSPECTED_RECORDS_MAX:
        raise KafkaError(
            ErrorCode.MESSAGE_TOO_LARGE, f"{header.record_count} records in a batch, above {INSPECTED_RECORDS_MAX}"
        )
    return record_section(batch, 0, header, bytes_max)


def _looking(section: bytes, header: BatchHeader, search: _Search) -> Generator[None, None, TimestampOffset | None]:
    """Search one record at a time, because the decoded batch may be too large for memory."""
    for index, (offset_delta, time_delta, _) in enumerate(scan_records(section, header.record_count)):
        if index % STEP_RECORDS == STEP_RECORDS - 1:
            yield
        offset, timestamp = header.base_offset + offset_delta, header.base_timestamp + time_delta
        if header.timestamp_type == LOG_APPEND_TIME:
            timestamp = header.max_timestamp
        if search.oldest <= timestamp <= search.newest and offset >= search.from_offset:
            return TimestampOffset(timestamp, offset, header.partition_leader_epoch)
    return None


def largest(
    segments: Segments, log_start_offset: int = 0, accepted_losses: frozenset[int] = frozenset(), *, wait: bool = True
) -> TimestampOffset | None:
    """The first record with the log's largest timestamp (-1 if no record has one); None in an empty log.

    Raises DamagedRecords for damage that may hold it, and that may still be repaired.
    """
    best: Segment | None = None
    for segment in _confirm_all(segments, wait):
        if segment.size_bytes and (best is None or max_timestamp_of(segment) > max_timestamp_of(best)):
            best = segment
        for damage in segment.damage:
            if damage.end_offset > log_start_offset and damage.first_offset not in accepted_losses:
                raise DamagedRecords(segment.path, damage)
    if best is None:
        return None
    for position, header in checked_headers(best, best.offset_of_max_timestamp, wait=wait):
        if header.max_timestamp == best.max_timestamp:
            if header.timestamp_type == LOG_APPEND_TIME and not _is_thinned(header):
                return TimestampOffset(header.max_timestamp, header.base_offset, header.partition_leader_epoch)
            search = _Search(header.max_timestamp, header.max_timestamp, 0)
            return _first_in_batch(segments, best, position, header, search, wait, _SoFar())
    return None


def aborted_between(segments: Segments, from_offset: int, upper_offset: int) -> list[AbortedTransaction]:
    """The aborted transactions that have records in [from_offset, upper_offset)."""
    aborted: list[AbortedTransaction] = []
    for segment in segments.from_offset(from_offset):
        index = segment.transaction_index
        if index.is_empty:  # of a log with thousands of segments, every fetch of read_committed looks at each
            continue
        rows, is_complete = index.collect(from_offset, upper_offset)
        aborted.extend(rows)
        if is_complete:
            break
    return aborted


def refresh_max_timestamp(segment: Segment) -> None:
    """After a truncation: set the largest timestamp from the last time index row and the batches after it.

    It stays if its record does. Where all timestamps are alike, the last row is that of the first batch.
    """
    if segment.max_timestamp != UNKNOWN and segment.offset_of_max_timestamp < segment.next_offset:
        return
    times = segment.time_index
    segment.max_timestamp, segment.offset_of_max_timestamp = -1, segment.base_offset
    segment.max_is_confirmed = False
    start = 0
    if times.count:
        segment.max_timestamp, segment.offset_of_max_timestamp = times.last_key, times.last_value
        row = segment.offset_index.floor(times.last_value)
        start = row[1] if row is not None else 0
    for _, header in headers(segment, start):
        if header.max_timestamp > segment.max_timestamp:
            segment.max_timestamp, segment.offset_of_max_timestamp = header.max_timestamp, header.last_offset
    segment.filed_max = segment.max_timestamp, segment.offset_of_max_timestamp, segment.size_bytes


def note_timestamps_from(segment: Segment, position: int) -> None:
    """Note the largest timestamp of the batches from `position` on, if it is the segment's."""
    with suppress(CorruptIndex):  # a search by time meets what is damaged there
        for _, header in headers(segment, position):
            if header.max_timestamp > segment.max_timestamp and header.record_count:
                segment.max_timestamp, segment.offset_of_max_timestamp = header.max_timestamp, header.last_offset
        segment.max_is_confirmed = True


def cut_at(segments: Segments, offset: int) -> tuple[Segment, int, int, tuple[DamagedRange, ...]]:
    """Where a log that is truncated to `offset` ends: its last segment, the size and the end offset of that segment,
    and the damage that is left in it. Raises CorruptIndex.

    A segment without a record left goes, too: to a start after a kill an empty last one has lost its records. It stays
    where nothing else says where the log ends.
    """
    index = segments.floor_index(offset)
    segment = segments[index]
    position, end_offset = end_before(segment, offset)
    before = segments[max(index - 1, 0)]
    if not position and index and not (segment.damage or before.damage or before.may_end_early):
        segment, position = before, before.size_bytes
    return segment, position, end_offset, damage_before(segment, offset, position, end_offset)


def last_epoch(segments: Segments) -> int:
    """Return the last leader epoch of the log. Waits for the device.

    Without recorded leader epochs it is that of the last batch in the files, also if that batch is deleted. It is -1 if
    there is no batch, and INT64_MAX if the batch is unreadable.
    """
    if segments.leader_epochs:
        return segments.leader_epochs.latest
    for segment in reversed((*segments.condemned, *segments)):
        if segment.size_bytes:
            epoch = INT64_MAX
            try:
                for _, header in headers(segment, position_of(segment, segment.next_offset - 1, wait=True)):
                    epoch = header.partition_leader_epoch
            except CorruptIndex:
                return INT64_MAX
            return epoch
    return -1


def end_before(segment: Segment, offset: int) -> tuple[int, int]:
    """(position of the batch that holds `offset` or comes after it, the offset at which the one before it ends).

    The batches there are checked: a wrong index row, or a wrong base offset, would cut committed records. Raises
    CorruptIndex.
    """
    torn = damage_at(segment.damage, offset)
    if torn is not None:
        return torn.position, offset
    end_offset = max((each.end_offset for each in segment.damage if each.end_offset <= offset), default=0)
    end_offset = max(end_offset, segment.base_offset)
    row = segment.offset_index.floor(offset - 1)
    start = row[0] if row is not None else segment.base_offset
    for position, header in checked_headers(segment, start, wait=True, bytes_max=INT64_MAX):
        if header.last_offset >= offset:
            return position, end_offset
        end_offset = max(end_offset, header.next_offset)
    return segment.size_bytes, end_offset


def damage_before(segment: Segment, offset: int, position: int, end_offset: int) -> tuple[DamagedRange, ...]:
    """The damage that is left when the segment is truncated to `offset`, at the results of `end_before`."""
    damage = tuple(each for each in segment.damage if each.end_offset <= end_offset)
    torn = damage_at(segment.damage, offset)
    if torn is None or torn.first_offset >= offset:
        return damage
    # The records below `offset` may be acknowledged: they stay damaged, to be repaired.
    return (*damage, DamagedRange(position, position, torn.first_offset, offset, torn.reason))


class Expired(NamedTuple):
    """What retention may delete now. `is_doubtful`: an index is wrong, so that other segments wait. `has_more`: the
    next call goes on behind what this one has compared."""

    segment_count: int
    is_doubtful: bool = False
    has_more: bool = False


def expired_prefix(
    segments: Segments, disk: Disk, config: LogConfig, log_start_offset: int, high_watermark: int, now_ms: int
) -> Expired:
    """How many segments at the front retention may delete now.

    Segments that go by their age, and the first that stays, are compared with their batches, a bounded number in one
    call. What is compared stays so.
    """
    try:
        facts = facts_of(segments, disk)
        count = deletable_prefix(facts, config, log_start_offset, high_watermark, now_ms)
        if not config.is_deleted_by_age_or_size or config.retention_ms < 0:
            return Expired(count)
        timeless = [each._replace(largest_timestamp=INT64_MAX) for each in facts]
        first = deletable_prefix(timeless, config, log_start_offset, high_watermark, now_ms)
    except CorruptIndex as error:
        logger.warning("cannot apply retention now: %s", error)
        return Expired(0, is_doubtful=True)
    end = min(count + 1, len(segments))
    left, batches_left = _CONFIRMED_AT_ONCE_MAX, _COMPARED_AT_ONCE_MAX
    for number in range(first, end):
        if segments[number].max_is_confirmed or not segments[number].size_bytes:
            continue
        if min(left, batches_left) <= 0:
            return Expired(min(count, number), has_more=True)
        try:
            left, batches_left = left - 1, batches_left - confirm_max_timestamp(segments[number], wait=True)
        except CorruptIndex as error:
            logger.warning("cannot apply retention now: %s", error)
            return Expired(min(count, number), is_doubtful=True)
        if not segments[number].max_is_confirmed:
            return Expired(min(count, number), has_more=True)
    return Expired(min(count, end))


def facts_of(segments: Segments, disk: Disk) -> list[SegmentFacts]:
    """The input of the retention decision. Raises CorruptIndex."""
    facts = []
    for segment in segments:
        timestamp = max_timestamp_of(segment)
        if timestamp < 0 or segment.damage:  # the newest record may be damaged
            try:
                timestamp = max(timestamp, disk.modified_ms(segment.path))
            except FileNotFoundError:  # removed while it is open; its records count as new until it is repaired
                timestamp = INT64_MAX
        facts.append(SegmentFacts(segment.base_offset, segment.next_offset, segment.size_bytes, timestamp))
    return facts
