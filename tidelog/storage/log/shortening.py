"""How a log gets shorter: cut at the end by truncation, at the start by retention and DeleteRecords.

Functions over a PartitionLog, called by its methods of the same names; what may go is decided in `retention.py`, the
order in which files go is `segments.py`'s. Invariant: after a crash at any point the log has no hole, and what was cut
from its end does not come back behind what is appended later.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.files.checkpoints import LEADER_EPOCH_FILE, encode_leader_epochs, replace_file
from tidelog.storage.files.disk import probe_descriptors
from tidelog.storage.log import sealing
from tidelog.storage.log.recovery import replay
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, damage_at
from tidelog.storage.segments.lookup import max_timestamp_of, refresh_max_timestamp
from tidelog.storage.segments.reader import walk
from tidelog.storage.segments.retention import SegmentFacts, deletable_prefix
from tidelog.storage.segments.segment import Segment

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.storage")


def truncate_to(log: PartitionLog, offset: int) -> None:
    assert offset >= 0, offset
    if offset >= log.log_end_offset:
        log.leader_epochs.truncate_from_end(log.log_end_offset)
        return
    if log.compaction is not None:
        log.compaction.give_up()
    if offset < log.segments.first.base_offset:
        truncate_fully_and_start_at(log, offset)
        return
    probe_descriptors(log.disk, log.directory)
    segment = log.segments[log.segments.floor_index(offset)]
    position, end_offset = _end_before(segment, offset)
    damage = tuple(each for each in segment.damage if each.end_offset <= end_offset)
    torn = damage_at(segment.damage, offset)
    if torn is not None and torn.first_offset < offset:
        # Records that may be acknowledged lie in the damage, below the cut: they are to be repaired, not given up.
        damage = (*damage, DamagedRange(position, position, torn.first_offset, offset, torn.reason))
    logger.info("%s-%d is truncated from %d to %d", log.topic, log.partition, log.log_end_offset, offset)
    try:
        _cut(log, offset, segment, position, end_offset)
        segment.damage = damage
        if damage and damage[-1].position == damage[-1].end_position == segment.size_bytes:
            segment.seal()
            log.durability.note_seal(segment)
            sealing.begin(log, log.clock_ms, end_offset)
    except OSError as error:
        log.failure = f"{log.directory}: was cut at {end_offset} in part: {error}"
        raise


def _cut(log: PartitionLog, offset: int, segment: Segment, position: int, end_offset: int) -> None:
    goes_back = end_offset < max(log.log_start_offset, log.cleaned_offset)
    log.log_start_offset = min(log.log_start_offset, end_offset)
    log.cleaned_offset = min(log.cleaned_offset, end_offset)
    if log.durability.truncated(end_offset) or goes_back:
        # Before any byte goes: a stale checkpoint would keep a later start from scanning what is appended next, or the
        # cleaner from comparing its keys.
        log.write_checkpoint()
    later = sum(1 for segment in log.segments if segment.base_offset > offset)
    if later:
        log.segments.drop_last(later, log.clock_ms + log.config.file_delete_delay_ms)
    log.snapshots.delete_where(end_offset + 1, log.log_end_offset + 1)
    _cut_segment(segment, position, end_offset)
    log.disk.sync_directory(log.directory)
    log.leader_epochs.truncate_from_end(end_offset)
    log.log_end_offset = end_offset
    log.high_watermark = min(log.high_watermark, end_offset)
    entries, snapshot_offset = log.snapshots.load_latest(log.log_start_offset, end_offset)
    log.producers.load(entries, snapshot_offset)
    replay(log.producers, list(log.segments), end_offset)


def _cut_segment(segment: Segment, position: int, end_offset: int) -> None:
    """Cut file and indexes at `position`, where the batches before `end_offset` end."""
    segment.offset_index.truncate(segment.offset_index.count_below(end_offset, 0))
    segment.time_index.truncate(segment.time_index.count_below(end_offset, 1))
    segment.transaction_index.truncate_to(end_offset)
    segment.cut(position)
    segment.next_offset = end_offset
    segment.bytes_since_index_row = 0
    segment.note_fullness()
    if position == 0:
        segment.set_first_batch_timestamp(-1)
    refresh_max_timestamp(segment)


def _end_before(segment: Segment, offset: int) -> tuple[int, int]:
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


def truncate_fully_and_start_at(log: PartitionLog, offset: int) -> None:
    probe_descriptors(log.disk, log.directory)
    logger.info("%s-%d is emptied to start at %d", log.topic, log.partition, offset)
    if log.compaction is not None:
        log.compaction.give_up()
    try:
        _empty(log, offset)
    except OSError as error:
        log.failure = f"{log.directory}: was emptied in part: {error}"
        raise


def _empty(log: PartitionLog, offset: int) -> None:
    log.cleaned_offset = -1
    log.log_start_offset = min(log.log_start_offset, offset)
    log.durability.truncated(log.log_start_offset)
    log.write_checkpoint()
    # Before any file goes: a start would take a log that begins where no epoch does for one that lacks its first file.
    log.leader_epochs.clear()
    replace_file(log.disk, log.directory, LEADER_EPOCH_FILE, encode_leader_epochs(log.leader_epochs))
    log.segments.drop_last(len(log.segments), log.clock_ms + log.config.file_delete_delay_ms)
    log.snapshots.delete_where(0, 2**63)
    segment = Segment.create(log.disk, log.directory, offset, log.config, log.clock_ms, log.jitter_ms)
    segment.may_have_gaps = segment.may_have_gaps or offset < log.gaps_explained_below
    log.segments.add(segment)
    log.disk.sync_directory(log.directory)
    log.producers.clear(offset)
    log.log_start_offset = log.log_end_offset = log.high_watermark = offset
    log.durability.started_at(offset)


def delete_records(log: PartitionLog, offset: int) -> int:
    if offset == -1:
        offset = log.high_watermark
    if offset < 0 or offset > log.high_watermark:
        raise KafkaError(
            ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is above the high watermark, {log.high_watermark}"
        )
    _advance_log_start(log, offset)
    return log.log_start_offset


def _advance_log_start(log: PartitionLog, offset: int) -> None:
    if offset > log.log_start_offset:
        log.log_start_offset = offset
        log.leader_epochs.truncate_from_start(offset)
        log.producers.on_high_watermark(offset)


def apply_retention(log: PartitionLog, now_ms: int) -> None:
    """Take the segments that may go out of the log, rolling first when the last one is among them."""
    if log.segments.active.size_bytes == 0 and len(log.segments) == 1:
        return
    if log.compaction is not None:
        log.compaction.retention_waits = True  # else segments could go that are being read
        return
    try:
        count = deletable_prefix(_facts(log), log.config, log.log_start_offset, log.high_watermark, now_ms)
    except CorruptIndex as error:
        logger.warning("retention of %s waits: %s", log.directory, error)
        return
    if not count:
        return
    if count == len(log.segments):
        log.roll(now_ms)
    gone = log.segments.condemn_first(count)
    logger.info(
        "%s-%d: %d segments up to offset %d may go", log.topic, log.partition, count, log.segments.first.base_offset
    )
    for segment in gone:
        log.snapshots.delete_where(segment.base_offset, segment.base_offset + 1)
    log.durability.note_directory(log.directory)
    _advance_log_start(log, log.segments.first.base_offset)


def _facts(log: PartitionLog) -> list[SegmentFacts]:
    facts = []
    for segment in log.segments:
        timestamp = max_timestamp_of(segment)
        if timestamp < 0 or segment.damage:  # the newest record may be one of those that cannot be read
            timestamp = max(timestamp, log.disk.modified_ms(segment.path))
        facts.append(SegmentFacts(segment.base_offset, segment.next_offset, segment.size_bytes, timestamp))
    return facts
