"""Recovery steps: find a log's end, scan for bad batches, rebuild indexes and producer state.

`loader.py` decides which segment needs which step. All steps wait for the device. Follows Kafka's LogSegment.recover
and UnifiedLog.rebuildProducerState.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from struct import error as StructError
from typing import NamedTuple, Protocol

from tidelog.protocol.batches.record_batch import (
    CONTROL_FLAG,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    check_crc,
    read_header,
)
from tidelog.protocol.batches.records import (
    ControlRecordType,
    control_record_type,
    decode_batch,
    decode_end_txn_value,
    read_usual_marker,
)
from tidelog.protocol.errors import KafkaError
from tidelog.storage.files.disk import Buffer, is_exhaustion, is_full
from tidelog.storage.log.hidden_transactions import (
    HidingLog,
    ScannedTransactions,
    aborted,
    damage_to_repair,
    distrust_behind_losses,
)
from tidelog.storage.producers.producer_snapshots import CorruptSnapshot, ProducerSnapshots
from tidelog.storage.producers.producer_state import EndMarker, ProducerEntry, ProducerState
from tidelog.storage.producers.recall import recall
from tidelog.storage.segments.append import Batch
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, damage_at, describe, merged
from tidelog.storage.segments.examination import UNKNOWN_END, EpochEdges, Examiner
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.log_config import INT64_MAX
from tidelog.storage.segments.reader import batch_at, headers, position_of
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.segments import Segments
from tidelog.storage.segments.transaction_index import AbortedTransaction

logger = logging.getLogger("tidelog.storage")


class RepairedLog(HidingLog, Protocol):
    """The part of `partition_log.PartitionLog` that `reveal` and `reload_producers` use."""

    high_watermark: int
    log_end_offset: int
    producers: ProducerState
    segments: Segments
    snapshots: ProducerSnapshots


def reload_producers(log: RepairedLog) -> None:
    """Rebuild the producer state from the newest snapshot and the batches after it. Waits for the device."""
    log.lacks_producers = log.passes_damage = True  # until its end: a shortage may interrupt it
    read, offset = read_producers(log.snapshots, list(log.segments), log.log_start_offset, log.log_end_offset)
    log.producers.take_over(read)
    log.producers.on_high_watermark(log.high_watermark)
    log.lacks_producers = any(each.end_offset > offset for _, each in damage_to_repair(log))
    log.passes_damage = any(each.end_offset > offset for _, each in log.damaged_ranges())


def read_producers(
    snapshots: ProducerSnapshots, segments: list[Segment], log_start_offset: int, log_end_offset: int
) -> tuple[ProducerState, int]:
    """The producer state at the log end, and the offset of the snapshot that it begins with.

    It is a new one: a shortage that interrupts the replay leaves the present one, with its open transactions.
    """
    entries, offset = snapshots.load_latest(log_start_offset, log_end_offset)
    producers = ProducerState()
    producers.load(entries, offset)
    replay(producers, segments, log_end_offset)
    return producers, offset


def replay(producers: ProducerState, segments: list[Segment], end_offset: int) -> None:
    """Advance the producer state from its end offset to `end_offset` with the batches in the log."""
    recall(producers, segments, _examine_and_adopt)
    _replay_on(producers, segments, end_offset)


def _replay_on(producers: ProducerState, segments: list[Segment], end_offset: int) -> None:
    """`replay` of a state that has the last batches of its producers."""
    for index, segment in enumerate(segments):
        if segment.base_offset >= end_offset:
            break
        if index + 1 < len(segments) and segments[index + 1].base_offset <= producers.end_offset:
            continue
        try:
            _replay_segment(producers, segment, end_offset)
        except CorruptIndex as error:
            logger.warning("examining %s: %s", segment.path, error)
            _examine_and_adopt(segment)
            _replay_segment(producers, segment, end_offset, is_examined=True)
    producers.end_offset = end_offset


def _replay_segment(producers: ProducerState, segment: Segment, end_offset: int, *, is_examined: bool = False) -> None:
    """Raises CorruptIndex where batches are missing, unless `is_examined`: what is missing is known as damage then.

    What the missing batches say of their producers would be missing, too: a repeated batch would be appended twice.
    """
    expected = max(producers.end_offset, segment.base_offset)
    is_judged = not (is_examined or segment.damage)
    start = position_of(segment, expected, wait=True)
    for position, header in headers(segment, start):
        if is_judged and header.base_offset > expected and not segment.may_have_gaps:
            raise CorruptIndex(segment.path, f"base offset {header.base_offset} at {position}, not {expected}")
        if header.last_offset >= end_offset:
            return
        marker = read_marker(batch_at(segment, position, header), header) if header.is_control else None
        producers.replay(header, marker)
        expected = header.next_offset
    if is_judged and expected < segment.next_offset and not segment.may_end_early:
        raise CorruptIndex(segment.path, f"ends at offset {expected}, not {segment.next_offset}")


def find_end(segment: Segment, expected_end: int, closed_end: int, *, is_suspect: bool) -> DamagedRange | None:
    """Set `next_offset` of the last segment from its last index row and the batches after it.

    `expected_end`: a known lower bound of the log end. `closed_end`: where the log ended when it was closed, from a
    checkpoint without checksum. Returns the range after the last batch if the log ends below the lower bound, or if the
    file has more bytes. `is_suspect`: the index is unusable.
    """
    try:
        if is_suspect:
            raise CorruptIndex(segment.path, "its index is damaged")
        last = _follow_last_batches(segment)
        if last is not None and segment.next_offset > closed_end:
            _check_last_batch(segment, *last)
        segment.check_indexes_end_below(segment.next_offset)
        if segment.next_offset >= expected_end:
            return None
        reason = f"ends at offset {segment.next_offset}, not {expected_end}"
    except CorruptIndex as error:
        reason = str(error)
    logger.warning("examining %s: %s", segment.path, reason)
    findings = segment.examine(UNKNOWN_END)
    tail, findings.tail = findings.tail, None
    segment.next_offset = findings.end_offset
    segment.findings = findings
    take_over_findings(segment)
    if tail is None and findings.end_offset < expected_end:
        tail = DamagedRange(segment.size_bytes, segment.size_bytes, findings.end_offset, UNKNOWN_END, reason)
    return tail


def _follow_last_batches(segment: Segment) -> tuple[int, BatchHeader] | None:
    """Set `next_offset` from the batches after the last index row. Returns the last one and its position.

    Raises CorruptIndex for offsets that do not follow. No CRC covers a base offset, and no batch follows the last one:
    a wrong base offset would move the log end.
    """
    index = segment.offset_index
    row = index.row(index.count - 1) if index.count else None
    last: tuple[int, BatchHeader] | None = None
    for position, header in headers(segment, row[1] if row else 0):
        if row is not None and position == row[1]:
            is_next = header.last_offset == row[0]
        elif segment.may_have_gaps:
            is_next = segment.next_offset <= header.base_offset <= header.last_offset <= segment.max_offset
        else:
            is_next = header.base_offset == segment.next_offset
        if not is_next:
            raise CorruptIndex(segment.path, f"base offset {header.base_offset} at {position}")
        segment.next_offset = header.next_offset
        last = position, header
    return last


def _check_last_batch(segment: Segment, position: int, header: BatchHeader) -> None:
    """Raises CorruptIndex for a wrong CRC. A wrong last offset would move the log end, where no replica has records."""
    if not check_crc(batch_at(segment, position, header), 0, header):
        raise CorruptIndex(segment.path, f"the CRC of the last batch, at {position}, is wrong")


def examine_now(segment: Segment, epoch_max: int = -1) -> None:
    """Examine a segment whose end is known, for its damage and new indexes. Waits for the device."""
    segment.findings = segment.examine(epoch_max=epoch_max)


def _examine_and_adopt(segment: Segment) -> None:
    examine_now(segment)
    take_over_findings(segment)


def settle(segment: Segment, *, is_active: bool) -> list[str]:
    """Write the indexes that an examination has rebuilt. The paths of their files, to be synced. Raises OSError.

    None where the volume is full, which says nothing against the device: the indexes stay in memory, and a later start
    makes them anew from the batches.
    """

    def write() -> None:
        if is_active:
            segment.offset_index.write_rows()
            segment.time_index.write_rows()
        else:
            segment.seal()
            segment.forget_indexes()

    return segment.paths()[1:] if write_if_there_is_space(write, f"the indexes of {segment.path}") else []


def write_if_there_is_space(write: Callable[[], object], what: str, *, or_descriptors: bool = False) -> bool:
    """Write files without which a later start does more. False where the volume is full. Raises OSError.

    A full volume says nothing against the device, and what there is can be read. `or_descriptors`: nor is a shortage of
    descriptors an error.
    """
    try:
        write()
    except OSError as error:
        if not (is_full(error) or (or_descriptors and is_exhaustion(error))):
            raise
        logger.warning("no space for %s: %s", what, error)
        return False
    return True


def take_over_findings(segment: Segment) -> None:
    """After an examination while the log is being opened: write the indexes to their files and log the damage.

    Where the volume is full the indexes stay in memory.
    """
    findings, segment.findings = segment.findings, None
    assert findings is not None
    segment.adopt(findings)
    for damage in segment.damage:
        logger.error("%s: %s", segment.path, describe(damage))
    seal(segment, is_synced=True)


def seal(segment: Segment, *, is_synced: bool) -> None:
    """Write the indexes of a segment to their files, if there is space. Raises OSError."""

    def write() -> None:
        if segment.seal() and is_synced:
            segment.sync_indexes()

    write_if_there_is_space(write, f"the indexes of {segment.path}")


def scan_segment(
    segment: Segment,
    producers: ProducerState,
    epochs: LeaderEpochs,
    transactions: ScannedTransactions,
    end_offset: int,
    is_torn: Callable[[DamagedRange], bool],
    behind: tuple[int, int] = (-1, -1),
    filed_epochs: Sequence[tuple[int, int]] = (),
    end_before: int = -1,
) -> DamagedRange | None:
    """Check and index every batch of a segment. If the log ends in it, return the rest of the file after that.

    `producers` must be at the segment's base offset and is advanced to its end. `end_offset`: the offset after its last
    record, UNKNOWN_END for the last segment. Damage that is not a torn tail by `is_torn` is recorded, and the scan
    continues after it. `behind`: the leader epoch and the offset of the next batch, in a later segment. For damaged
    batches the epochs come from `filed_epochs` (epoch, start offset). `end_before`: where a gap before it begins.
    """
    hidden_epochs: list[tuple[int, int]] = []
    epoch_max, offset_behind = behind
    edges = EpochEdges()
    examiner = Examiner(
        segment.file.read_at, segment.size_bytes, segment.base_offset, end_offset=end_offset,
        may_have_gaps=segment.may_have_gaps, may_end_early=segment.may_end_early, epoch_max=epoch_max,
        filed_epoch=LeaderEpochs(filed_epochs).epoch_for_offset, named=segment.named_batches(),  # the old rows
    )  # fmt: skip
    segment.begin_rebuild()
    segment.transaction_index.begin_rebuild()
    segment.next_offset = segment.base_offset
    damage: list[DamagedRange] = []
    rest: DamagedRange | None = None
    for each in examiner.run():
        if isinstance(each, DamagedRange):
            if each.first_offset == each.end_offset and each.end_position == segment.size_bytes:
                rest = each  # preallocated bytes after the last batch
                break
            if is_torn(each):
                rest = each
                break
            logger.error("%s: %s", segment.path, describe(each))
            damage.append(each)
            segment.note_scanned_damage(each)
            transactions.note_damage(each, producers, segment.transaction_index)
            hidden_epochs += [entry for entry in filed_epochs if each.holds(entry[1])]
            continue
        position, header, batch = each
        end_position, leader_epoch = position + header.size_bytes, header.partition_leader_epoch
        edges.note((position, end_position, header.base_offset, header.next_offset, leader_epoch))
        marker = read_marker(batch, header) if header.is_control else None
        segment.note_scanned(position, header.size_bytes, header.last_offset, header.max_timestamp)
        for epoch, start_offset in hidden_epochs:
            if epochs.latest < epoch <= leader_epoch:
                epochs.assign(epoch, start_offset)
        hidden_epochs.clear()  # the file is from before a truncation where it has a higher epoch before this batch
        if leader_epoch > epochs.latest:
            earliest = segment.next_offset if position or end_before < 0 else end_before
            _begin_epoch(epochs, header, earliest, filed_epochs, may_have_gaps=segment.may_have_gaps)
        completed = producers.replay(header, marker)
        if completed is not None and completed.is_abort:
            transactions.note(completed, segment.transaction_index)
        segment.next_offset = header.next_offset
    for epoch, start_offset in hidden_epochs:  # no whole batch of this segment follows
        if epochs.latest < epoch and (epoch_max < 0 or epoch <= epoch_max):
            epochs.assign(epoch, start_offset)
    if epoch_max >= 0:
        edges.note((segment.size_bytes, segment.size_bytes, offset_behind, offset_behind, epoch_max))
    edges.note(None)
    segment.damage = merged([*damage, *_doubt_scanned_epochs(edges, epochs, filed_epochs)])
    segment.trust(0, segment.size_bytes if rest is None else rest.position)
    return rest


def _begin_epoch(
    epochs: LeaderEpochs, header: BatchHeader, earliest: int, filed_epochs: Sequence[tuple[int, int]], *,
    may_have_gaps: bool,
) -> None:  # fmt: skip
    """Note the epoch of the batch, which is its first one, and those before of which a cleaner has left no batch."""
    leader_epoch = header.partition_leader_epoch
    for epoch, start_offset in filed_epochs if may_have_gaps else ():
        # A follower of another history must be cut where the epoch began.
        if epochs.latest < epoch < leader_epoch and earliest <= start_offset <= header.base_offset:
            epochs.assign(epoch, start_offset)
    epochs.assign(leader_epoch, _start_of_epoch(leader_epoch, earliest, header, filed_epochs))


def _start_of_epoch(epoch: int, next_offset: int, header: BatchHeader, filed_epochs: Sequence[tuple[int, int]]) -> int:
    """Where the epoch of the batch begins, by the file if that agrees with the batches.

    Otherwise at the end of the batch before, `next_offset`, as in `LeaderEpochs.assign_appended`.
    """
    filed = (start for each, start in filed_epochs if each == epoch and next_offset <= start <= header.base_offset)
    return next(filed, next_offset)


def _doubt_scanned_epochs(
    edges: EpochEdges, epochs: LeaderEpochs, filed_epochs: Sequence[tuple[int, int]]
) -> list[DamagedRange]:
    """Single batches whose epoch contradicts the epoch file. They count as damage until another replica's copy decides.

    The file may lack the latest epochs, or be from before a truncation. So it counts only where it says the epoch of
    the batch behind, too: two logs that have a record of one offset and epoch have the same records before it.
    """
    filed = LeaderEpochs(filed_epochs)
    damage: list[DamagedRange] = []
    for doubt in edges.doubts(filed.epoch_for_offset):
        if doubt.following is None:
            continue
        first_offset, end_offset = doubt.damage.first_offset, doubt.damage.end_offset
        logger.error("offset %d: %s", first_offset, describe(doubt.damage))
        damage.append(doubt.damage)
        seen = [(doubt.known, first_offset)]
        if doubt.following[4] > doubt.known:
            seen.append((doubt.following[4], end_offset))
        epochs.correct(seen, first_offset, end_offset + 1 if len(seen) > 1 else end_offset)
    return damage


def is_zeros(segment: Segment, position: int) -> bool:
    """Whether the file has no other bytes from `position` on."""
    while position < segment.size_bytes:
        data = segment.file.read_at(1024 * 1024, position)
        if not data or data != bytes(len(data)):  # to strip the zeros takes a hundred times as long
            return not data
        position += len(data)
    return True


def reveal(log: RepairedLog, repaired: DamagedRange | None) -> bool:
    """Rebuild the rows of aborted transactions that damage has hidden, after the repair of a range or of all.

    Whether the repaired range has batches of transactions. Raises OSError, and CorruptIndex for a segment that is
    damaged meanwhile: after its examination everything is done again.
    """
    damage, segments = [each for _, each in log.damaged_ranges()], list(log.segments)
    distrust_behind_losses(log, repaired, damage)
    has_rows = rebuild_hidden_rows(log.segments, log.snapshots, repaired, has_damage=bool(damage))
    if damage and repaired is not None:
        log.hidden_ends += hidden_ends(segments, log.snapshots, repaired, damage_to_repair(log))
    return has_rows


def rebuild_hidden_rows(
    segments: Segments, snapshots: ProducerSnapshots, repaired: DamagedRange | None, *, has_damage: bool
) -> bool:
    """Rebuild the indexes of aborted transactions in which damage has hidden rows. `has_damage`: some is left.

    Whether the repaired range has batches of transactions. Raises CorruptIndex, OSError.
    """
    present, has_rows = list(segments), False
    if repaired is not None:
        distrusted = segments.distrusted
        done = {each for each in distrusted if not has_damage or repaired.first_offset <= each < repaired.end_offset}
        repaired = repaired._replace(first_offset=min([repaired.first_offset, *done]))
        has_rows = distrust_behind_copy(present, snapshots, repaired)
    if has_rows or not has_damage:
        rebuild_lacking(present, snapshots, repaired if has_damage else None)
        segments.sums_are_stale = True
    if repaired is not None:
        segments.distrusted -= done
    return has_rows


def rebuild_lacking(segments: list[Segment], snapshots: ProducerSnapshots, repaired: DamagedRange | None) -> None:
    """`rebuild_transaction_index` of each segment whose index lacks rows."""
    before: _Replayed | None = None
    for segment in segments:
        if segment.transaction_index.lacks_rows and (repaired is None or segment.next_offset > repaired.first_offset):
            before = rebuild_transaction_index(segment, segments, snapshots, repaired, before)


def rebuild_unreadable(segments: Segments, snapshots: ProducerSnapshots, from_offset: int) -> None:
    """`rebuild_transaction_index` of each segment from the one of `from_offset` on whose index file is damaged."""
    present, before = list(segments), None
    for segment in segments.from_offset(from_offset):
        if not segment.transaction_index.is_readable:
            before = rebuild_transaction_index(segment, present, snapshots, before=before)


def _headers_in(segments: list[Segment], first_offset: int, end_offset: int) -> Iterator[BatchHeader]:
    for segment in segments:
        if segment.base_offset < end_offset and first_offset < segment.next_offset:
            start = position_of(segment, max(first_offset, segment.base_offset), wait=True)
            for _, header in headers(segment, start):
                if header.base_offset >= end_offset:
                    return
                yield header


def distrust_behind_copy(segments: list[Segment], snapshots: ProducerSnapshots, repaired: DamagedRange) -> bool:
    """Whether the range, which is repaired now, has batches of transactions. Raises CorruptIndex.

    A cleaner may have removed them here, and a start that scanned the log after that did not know the transactions:
    those that were aborted have no row. So the rows are made anew up to their ends, and the snapshots go.
    """
    in_range = _headers_in(segments, repaired.first_offset, repaired.end_offset)
    transactional = [header for header in in_range if header.is_transactional]
    copied = [each for each in segments if each.base_offset < repaired.end_offset]
    if not any(each.may_have_gaps for each in copied if each.next_offset > repaired.first_offset):
        return bool(transactional)  # no cleaner was there
    open_ids: set[int] = set()
    for header in transactional:
        (open_ids.discard if header.is_control else open_ids.add)(header.producer_id)
    for segment in segments if transactional else ():
        if segment.next_offset <= repaired.first_offset:
            continue
        if repaired.end_offset <= segment.base_offset and not open_ids:
            break
        segment.transaction_index.lacks_rows = True
        snapshots.delete_where(segment.base_offset + 1, segment.next_offset + 1)
        with suppress(CorruptIndex):  # damage that nothing has detected yet
            behind = _headers_in([segment], repaired.end_offset, INT64_MAX)
            open_ids -= {header.producer_id for header in behind if header.is_control}
    return bool(transactional)


def hidden_ends(
    segments: list[Segment],
    snapshots: ProducerSnapshots,
    repaired: DamagedRange,
    left: Sequence[tuple[Segment, DamagedRange]],
) -> tuple[tuple[int, int], ...]:
    """As in `ScannedTransactions`, of transactions with records in the repaired range, if damage is left behind it."""
    bound = min((each.first_offset for _, each in left if each.first_offset >= repaired.first_offset), default=-1)
    producer_ids = {
        header.producer_id for header in _headers_in(segments, repaired.first_offset, repaired.end_offset)
        if bound >= 0 and header.is_transactional
    }  # fmt: skip
    if not producer_ids:
        return ()
    open_ids = set(_producers_at(segments, snapshots, bound).producers.ongoing.values())
    return () if producer_ids.isdisjoint(open_ids) else ((repaired.first_offset, bound),)


class _Replayed(NamedTuple):
    """The producers' state at the end of a segment, and the newest snapshot that was there for it, else -1."""

    producers: ProducerState
    snapshot_offset: int


def rebuild_transaction_index(
    segment: Segment,
    segments: list[Segment],
    snapshots: ProducerSnapshots,
    repaired: DamagedRange | None = None,
    before: _Replayed | None = None,
) -> _Replayed:
    """Rebuild the index of aborted transactions of one segment. It keeps the rows that it had for damaged ranges.

    `repaired`: other damage is left, and may hide the end of a producer's transaction before. So a row stays unless the
    repaired range lies in its transaction. `before`: what this returned for an earlier segment. Without it the whole
    log before the segment is read where no snapshot is left.
    """
    index = segment.transaction_index
    filed = index.rows_or_none()
    kept = {} if repaired is None else {(row.producer_id, row.last_offset): row for row in filed}
    try:
        found, replayed = find_aborted(segment, segments, snapshots, before)
    except CorruptIndex as error:  # damage that nothing has detected yet
        logger.warning("examining %s: %s", segment.path, error)
        _examine_and_adopt(segment)
        found, replayed = find_aborted(segment, segments, snapshots, None)
    rows = [row for row in filed if damage_at(segment.damage, row.last_offset) is not None]
    for row in found:
        known = kept.get((row.producer_id, row.last_offset), row)
        first_offset = min(known.first_offset, row.first_offset)
        is_in = repaired is None or (first_offset < repaired.end_offset and repaired.first_offset <= row.last_offset)
        rows.append(row if is_in else known)
    index.begin_rebuild()
    for row in sorted(rows, key=lambda row: row.last_offset):
        index.append(row)
    index.settle()
    index.lacks_rows = any(each.damage for each in segments if each.base_offset <= segment.base_offset)
    return replayed


def find_aborted(
    segment: Segment, segments: list[Segment], snapshots: ProducerSnapshots, before: _Replayed | None = None
) -> tuple[list[AbortedTransaction], _Replayed]:
    """The aborted transactions whose markers are in the segment. Raises CorruptIndex, OSError."""
    found: list[AbortedTransaction] = []
    producers, snapshot_offset = _producers_at(segments, snapshots, segment.base_offset, before)
    for position, header in headers(segment):
        marker = read_marker(batch_at(segment, position, header), header) if header.is_control else None
        completed = producers.replay(header, marker)
        if completed is not None and completed.is_abort:
            found.append(aborted(completed))
    return found, _Replayed(producers, snapshot_offset)


def _producers_at(
    segments: list[Segment], snapshots: ProducerSnapshots, end_offset: int, before: _Replayed | None = None
) -> _Replayed:
    """The producers' state before the batch of `end_offset`, without what damage hides.

    `before` is advanced to it, unless a later snapshot can be read: that one knows what damage before it hides.
    """
    present = [each for each in segments if each.base_offset < end_offset]
    offsets = [each for each in snapshots.offsets if each <= end_offset]
    newest = max(offsets, default=-1)
    entries: list[ProducerEntry] = []
    start = segments[0].base_offset
    for offset in reversed(offsets):
        if before is not None and offset <= before.snapshot_offset:
            break
        try:
            entries, start = snapshots.read(offset), offset
            before = None
            break
        except (CorruptSnapshot, FileNotFoundError):
            continue
    if before is not None:
        if before.producers.end_offset < end_offset:
            _replay_on(before.producers, present, end_offset)
        return before._replace(snapshot_offset=max(newest, before.snapshot_offset))
    producers = ProducerState()
    producers.load(entries, start)
    replay(producers, present, end_offset)
    return _Replayed(producers, newest)


def read_marker(batch: bytes | memoryview, header: BatchHeader) -> EndMarker | None:
    """The transaction marker in a control batch; None for the quorum's control records and unreadable batches."""
    if header.producer_id < 0:
        return None
    usual = read_usual_marker(batch) if header.attributes == TRANSACTIONAL_FLAG | CONTROL_FLAG else None
    if usual is not None and header.record_count == 1:
        return EndMarker(
            header.producer_id, header.producer_epoch, usual[1], usual[0] == ControlRecordType.ABORT,
            header.base_offset, header.base_timestamp,
        )  # fmt: skip
    try:
        records = decode_batch(batch, 0, header)
        kind = control_record_type(records[0].key)
        if kind not in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
            return None
        epoch = decode_end_txn_value(records[0].value)
    except (KafkaError, IndexError, ValueError, StructError):
        return None
    return EndMarker(
        header.producer_id,
        header.producer_epoch,
        epoch,
        kind == ControlRecordType.ABORT,
        header.base_offset,
        records[0].timestamp,
    )


def markers_in(data: Buffer, batches: list[Batch]) -> dict[int, EndMarker]:
    """Position in `data` -> transaction marker, for the control batches among `batches`."""
    markers: dict[int, EndMarker] = {}
    for position, size, _, _, _, attributes, producer_id, _, _, _ in batches:
        if producer_id >= 0 and attributes & CONTROL_FLAG:
            view = memoryview(data)[position : position + size]
            marker = read_marker(view, read_header(view))
            if marker is not None:
                markers[position] = marker
    return markers
