"""PartitionLog: one partition's log, tying segments, producer state, leader epochs and durability together.

It rolls and seals segments, truncates the log at both ends and closes it: with complete indexes and a snapshot of the
producers, the next start needs no scan. `append.py` checks batches, `producer_state.py` sequences; `retention.py`
decides on deletion, `flush.py` on durability; `reader.py` finds bytes. Everything runs on the owner's thread, except
`FlushTask.run` and `ColdRead.warm`. Invariants: log start <= high watermark <= log end; an append is either in the log
as a whole, or has no effect; only a truncation removes appended records. After a crash at any point the log has no
gap, and truncated records do not come back after records appended later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from tidelog.protocol.batches.record_batch import CONTROL_FLAG, TRANSACTIONAL_FLAG
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.uuids import METADATA_TOPIC_ID
from tidelog.storage.files.disk import Buffer, Disk, is_exhaustion, probe_descriptors
from tidelog.storage.log import explained_gaps, recovery
from tidelog.storage.log.failed_append import NOT_TAKEN_BACK, take_back
from tidelog.storage.log.flush import Durability, FlushTask, leave_removed_file
from tidelog.storage.log.hidden_transactions import damage_to_repair, note_end, revealing
from tidelog.storage.log.loader import LoadedLog
from tidelog.storage.log.recovery import examine_now, markers_in, settle
from tidelog.storage.log.repair import RangeRepair, RepairCheck, finish_repair
from tidelog.storage.log.tidying import emptying
from tidelog.storage.log.usual_append import append_usual, append_usual_as_follower
from tidelog.storage.producers.producer_state import EndMarker, SentBatch
from tidelog.storage.producers.verification import TransactionAppend
from tidelog.storage.segments import lookup
from tidelog.storage.segments.append import NO_APPEND_TIME, AppendInfo, Batch, admit, admit_replicated, have_gaps
from tidelog.storage.segments.append_rules import AppendRules
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, DamagedRecords, describe
from tidelog.storage.segments.examination import Findings, doubt_epochs
from tidelog.storage.segments.log_config import INT64_MAX, MAX_RELATIVE_OFFSET, LogConfig
from tidelog.storage.segments.lookup import TimestampOffset, cut_at, refresh_max_timestamp
from tidelog.storage.segments.reader import ColdRead, Examination, ReadResult, read_from, read_tail
from tidelog.storage.segments.retention import segment_jitter_ms
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.transaction_index import AbortedTransaction, CorruptTransactionIndex

logger = logging.getLogger("tidelog.storage")
T = TypeVar("T")

__all__ = ["AppendInfo", "ColdRead", "CorruptLog", "PartitionLog", "ReadResult"]


class CorruptLog(Exception):
    """The log cannot be used any more. Its partition goes offline, the node continues."""


class CompactionUnderWay(Protocol):
    """The part of `compaction.Compaction` that the log uses during a cleaning."""

    retention_waits: bool

    def give_up(self) -> None: ...
    def abandon(self) -> None: ...


class PartitionLog:
    """LogDirectory opens and creates it. Times are ms since 1970, passed by the caller."""

    __slots__ = (
        "_checkpointed_start", "_end_at_maintenance", "_filed_epochs", "accepted_losses", "before_gaps",
        "cleaned_offset", "clock_ms", "compaction", "config", "directory", "disk", "durability", "failure",
        "flush_at", "gaps_explained_below", "hidden_ends", "high_watermark", "is_closed", "is_doubtful",
        "is_under_cleaning", "jitter_ms", "lacks_producers", "leader_epochs", "log_end_offset", "log_start_offset",
        "may_be_cleaned", "partition", "passes_damage", "producers", "repairs_to_reveal", "rules", "segment_bytes",
        "segments", "snapshots", "topic", "topic_id", "topic_id_has_checksum", "unsynced_gaps_below",
        "write_checkpoint",
    )  # fmt: skip

    def __init__(
        self,
        disk: Disk,
        directory: str,
        topic: str,
        partition: int,
        config: LogConfig,
        loaded: LoadedLog,
        now_ms: int,
        *,
        write_checkpoint: Callable[[], None],
    ) -> None:
        self.disk, self.directory, self.topic, self.partition = disk, directory, topic, partition
        self.topic_id, self.topic_id_has_checksum = loaded.topic_id, loaded.topic_id_has_checksum
        self.leader_epochs, self._filed_epochs = loaded.leader_epochs, loaded.filed_epochs
        self.segments = loaded.segments
        self.segments.leader_epochs = loaded.leader_epochs
        self.producers, self.snapshots = loaded.producers, loaded.snapshots
        self.lacks_producers = self.passes_damage = loaded.lacks_producers
        """Damage, until its repair, hides batches from `producers`. `passes_damage`: also damage without a copy."""
        self.hidden_ends, self.log_end_offset = loaded.hidden_ends, loaded.log_end_offset
        self.accepted_losses: frozenset[int] = frozenset()  # first offsets of damaged ranges of which there is no copy
        self.repairs_to_reveal: tuple[DamagedRange | None, ...] = ()  # repaired, with an interrupted `after_repair`
        self.log_start_offset = self.high_watermark = loaded.log_start_offset
        filed = None if loaded.leader_epochs.is_dirty else loaded.leader_epochs.earliest
        self._checkpointed_start = (loaded.log_start_offset, filed)
        self.write_checkpoint = write_checkpoint
        """Called when the recovery point or the log start goes back, to write checkpoints before any byte changes."""
        self.before_gaps: Callable[[PartitionLog], None] = lambda log: None  # called before a copy of compacted records
        self.failure: str | None = None
        self.is_closed = self.is_doubtful = False  # doubtful: retention has met a wrong index, and has the log scrubbed
        self.gaps_explained_below = loaded.gaps_explained_below
        """Below this offset, fetched batches may have gaps without compaction, because all replicas have them."""
        self.unsynced_gaps_below = 0
        """The file on the device may not explain the gaps below: the cleaner's checkpoint names the log until it does.
        """
        self.cleaned_offset = -1
        """The end of the part that the cleaner has cleaned (compaction), -1 unknown."""
        self.may_be_cleaned = True
        """False during a copy: the copy could miss a tombstone and keep the records that it has deleted."""
        self.compaction: CompactionUnderWay | None = None
        self.is_under_cleaning = False  # also by one that was given up and may still write and remove `.cleaned` files
        self._end_at_maintenance = -1
        self.clock_ms = now_ms
        """A recent time, for deadlines that need no precision."""
        self.durability = Durability(
            disk, directory, loaded.recovery_point, config.flush_messages, now_ms, loaded.transaction_sums
        )
        self.durability.note_append(loaded.recovery_point, loaded.log_end_offset)
        self.flush_at = self.durability.flush_at
        self.jitter_ms = segment_jitter_ms(config, topic, partition)
        self.set_config(config)
        self._know_producers()  # damage to records that are deleted is not repaired

    def __repr__(self) -> str:
        return f"PartitionLog({self.topic}-{self.partition}, {self.log_start_offset}..{self.log_end_offset})"

    def set_config(self, config: LogConfig) -> None:
        """Apply changed settings. An existing segment keeps its index sizes until it is rolled."""
        self.config, self.rules, self.segment_bytes = config, AppendRules(config), config.segment_bytes
        self.jitter_ms = segment_jitter_ms(config, self.topic, self.partition)
        self.durability.flush_messages = config.flush_messages
        self.flush_at = self.durability.flush_at
        self.segments.active.set_roll_age(config.segment_ms, self.jitter_ms)
        self.segments.active.trim_unless(config.preallocate)
        if config.is_compacted:
            for segment in self.segments:
                segment.may_have_gaps = True

    # Sizes and offsets

    @property
    def size_bytes(self) -> int:
        return self.segments.size_bytes

    @property
    def segment_count(self) -> int:
        return len(self.segments)

    @property
    def recovery_point(self) -> int:
        """The recovery point for a later start: below it all bytes are on the device, indexes included.

        While the log is open it is below the end of the active segment, whose indexes are only in memory. Otherwise,
        after a roll at this offset, a start would not scan this segment.
        """
        active = self.segments.active
        if self.is_closed or not active.size_bytes:
            return self.durability.checkpointable
        return min(self.durability.checkpointable, active.next_offset - 1)

    def can_retry(self, error: BaseException) -> bool:
        """Whether the failed operation changed nothing and may succeed later: it met only a shortage."""
        return is_exhaustion(error) and self.failure is None

    def set_high_watermark(self, offset: int) -> int:
        """Move the high watermark, limited to the offsets of the log. Returns the new value."""
        offset = offset if offset < self.log_end_offset else self.log_end_offset
        offset = offset if offset > self.log_start_offset else self.log_start_offset
        self.high_watermark = offset
        producers = self.producers
        if producers.ongoing or producers.unreplicated:
            producers.on_high_watermark(offset)
        return offset

    @property
    def last_stable_offset(self) -> int:
        """The bound for read_committed: below it all transactions are complete, and their markers are replicated."""
        if not self.producers.has_transactions:
            return self.high_watermark
        unstable = self.producers.first_unstable_offset
        if unstable < 0 or unstable >= self.high_watermark:
            return self.high_watermark
        return max(unstable, self.log_start_offset)

    # Appending

    def append_as_leader(
        self, batches: memoryview, leader_epoch: int, now_ms: int, *, from_client: bool = True,
        transaction: TransactionAppend | None = None,
    ) -> AppendInfo:  # fmt: skip
        """Check, stamp and append with one write. `batches` must be writable; it is stamped in place.

        Raises KafkaError for a refused batch, OSError if the disk fails (the log is unchanged, but its directory should
        not be used any more), CorruptLog if the log is unusable. `from_client` False is for the node's own batches:
        control batches and several at once are allowed, and sequences are not checked.
        """
        info = append_usual(self, batches, leader_epoch, now_ms, from_client, transaction)
        if info is not None:
            return info
        first_offset = self.log_end_offset
        data, admitted = admit(batches, first_offset, leader_epoch, now_ms, self.rules, from_client)
        markers: dict[int, EndMarker] | None = None
        for _, _, base_offset, last_offset, _, attributes, producer_id, epoch, first_sequence, _ in admitted:
            if producer_id < 0:
                continue
            if attributes & CONTROL_FLAG:
                markers = markers_in(data, admitted)
                for marker in markers.values():
                    self.producers.check_marker(marker, transaction[1] if transaction else 0)
                continue
            if self.lacks_producers and from_client and not self._know_producers():
                raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"{self} is being repaired")
            sequences = (producer_id, epoch, first_sequence, last_offset - base_offset)
            if attributes & TRANSACTIONAL_FLAG:
                given, needed = transaction[0] if transaction else None, self.config.verifies_transactions
                repeated = self.producers.check_transactional(*sequences, from_client, now_ms, given, needed)
            else:
                repeated = self.producers.check(*sequences, False, from_client, now_ms)
            if repeated is not None:
                return self.repeated(repeated)
        if len(data) > self.segment_bytes:
            reason = f"{len(data)} bytes do not fit a segment of {self.segment_bytes}"
            raise KafkaError(ErrorCode.RECORD_LIST_TOO_LARGE, reason)
        self.append_admitted(data, admitted, now_ms, markers)
        if leader_epoch != self.leader_epochs.latest and leader_epoch >= 0:
            self.leader_epochs.assign(leader_epoch, first_offset)
        append_time_ms = now_ms if self.rules.stamps_append_time else NO_APPEND_TIME
        return AppendInfo(first_offset, self.log_end_offset - 1, append_time_ms, self.log_start_offset, False, data)

    def append_as_follower(
        self, batches: memoryview, now_ms: int, *, may_have_gaps: bool = False, epoch_max: int = INT64_MAX
    ) -> AppendInfo | None:
        """Append batches from the leader of epoch `epoch_max`, with their offsets. None if no batch is whole.

        Raises UnexplainedGap if the first batch begins above the log end and compaction cannot be the cause. Batches
        after a later gap of this kind are not appended.
        """
        if (info := append_usual_as_follower(self, batches, now_ms, epoch_max)) is not None:
            return info
        no_gap_from = INT64_MAX if may_have_gaps or self.config.is_compacted else self.gaps_explained_below
        end = self.log_end_offset
        if not (admitted := admit_replicated(batches, end, no_gap_from, epoch_max)):
            return None
        if self.config.is_compacted and self.failure is None and have_gaps(admitted, end):
            self.before_gaps(self)
        if self.log_start_offset == end and not self.failure and lookup.last_epoch(self.segments) > admitted[0][9]:
            producers = list(self.producers.entries.values())
            self._start_over_at(end)  # deleted batches of a later epoch, as in `_truncate_to`
            self.producers.load(producers, self.log_end_offset)  # they stay known, as behind retention
        position, size, _, last_offset, _, _, _, _, _, last_epoch = admitted[-1]
        data = batches[: position + size]
        has_markers = any(each[5] & CONTROL_FLAG for each in admitted)
        if len(data) <= self.segment_bytes and last_offset - admitted[0][2] <= MAX_RELATIVE_OFFSET:
            self.append_admitted(data, admitted, now_ms, markers_in(data, admitted) if has_markers else None)
            if last_epoch > self.leader_epochs.latest:
                self.leader_epochs.assign_appended(admitted, end)
        else:  # too large for one segment here; one batch may be too large, from before segment.bytes was lowered
            for batch, next_offset in zip(admitted, [end, *(each[3] + 1 for each in admitted)]):
                piece, alone = data[batch[0] : batch[0] + batch[1]], [(0, *batch[1:])]
                self.append_admitted(piece, alone, now_ms, markers_in(piece, alone) if has_markers else None)
                self.leader_epochs.assign_appended(alone, next_offset)
        return AppendInfo(admitted[0][2], last_offset, NO_APPEND_TIME, self.log_start_offset, False)

    def append_admitted(
        self, data: Buffer, admitted: list[Batch], now_ms: int, markers: dict[int, EndMarker] | None
    ) -> None:
        if self.failure is not None:  # first: a batch that could not be taken back would overlap a new segment
            raise CorruptLog(self.failure)
        size, last_offset = len(data), admitted[-1][3]
        max_timestamp = admitted[0][4] if len(admitted) == 1 else max(batch[4] for batch in admitted)
        segment = self.segments.active
        if (
            segment.size_bytes + size > self.segment_bytes
            or max_timestamp > segment.roll_above_timestamp
            or now_ms > segment.roll_above_now
            or last_offset > segment.max_offset
            or segment.is_full
        ):
            segment = self._roll_for(admitted[0], last_offset, now_ms)
        end_position, producers = segment.size_bytes, self.producers
        try:
            segment.append(data, admitted)
            for position, _, first, last, timestamp, attributes, producer_id, epoch, sequence, _ in admitted:
                if producer_id >= 0:
                    if attributes & CONTROL_FLAG:
                        self.accept_marker(markers.get(position) if markers else None)
                    else:
                        is_transactional = bool(attributes & TRANSACTIONAL_FLAG)
                        producers.accept(producer_id, epoch, sequence, first, last, timestamp, is_transactional)
            log_end_offset = producers.end_offset = self.log_end_offset = last_offset + 1
        except (OSError, MemoryError) as error:
            self.failure = NOT_TAKEN_BACK
            take_back(self, segment, end_position, error)
        if log_end_offset >= self.flush_at:
            self.durability.note_append(admitted[0][2], log_end_offset)

    def repeated(self, batch: SentBatch) -> AppendInfo:
        _, _, first_offset, last_offset, timestamp = batch
        append_time_ms = timestamp if self.rules.stamps_append_time else NO_APPEND_TIME
        return AppendInfo(first_offset, last_offset, append_time_ms, self.log_start_offset, True)

    def accept_marker(self, marker: EndMarker | None) -> None:
        completed = self.producers.accept_marker(marker) if marker is not None else None
        note_end(completed, self.segments.active.transaction_index, may_be_wrong=self.passes_damage)

    def _roll_for(self, first: Batch, last_offset: int, now_ms: int) -> Segment:
        # The base offset is the log end, even before a gap: then a start can distinguish a lost tail from a gap.
        if last_offset - self.log_end_offset <= MAX_RELATIVE_OFFSET:
            return self.roll(now_ms)
        return explained_gaps.roll_behind_gap(self, first[2], first[9], now_ms)

    def roll(self, now_ms: int, base_offset: int = -1) -> Segment:
        """Start a new segment at `base_offset`, by default the log end. As in Kafka, an empty active one stays before a
        gap: the log may begin there.
        """
        base_offset = max(base_offset, self.log_end_offset)
        active = self.segments.active
        if active.size_bytes == 0:
            if active.base_offset == base_offset:
                return active
            active.begin_rebuild()  # for the index files, without which a start takes an empty segment for a lost one
            active.next_offset = base_offset
        if active.recent_offsets:
            active.may_end_early = False  # batches were appended up to the log end
        active.seal()
        self.durability.note_seal(active)
        if active.is_preallocated:
            active.trim()
        self.producers.end_offset = base_offset
        path = None if self.passes_damage else self.snapshots.take(self.producers, sync=False)
        if path is not None:
            self.durability.note_path(path)
        return self.begin_segment(now_ms, base_offset)

    def begin_segment(self, now_ms: int, base_offset: int) -> Segment:
        """Add an empty segment at the end. Raises OSError."""
        segment = Segment.create(self.disk, self.directory, base_offset, self.config, now_ms, self.jitter_ms)
        segment.may_have_gaps = segment.may_have_gaps or base_offset < self.gaps_explained_below
        self.segments.add(segment)
        self.durability.note_directory(self.directory)
        return segment

    # Reading

    def read(self, offset: int, max_bytes: int, upper_offset: int, *, min_one_batch: bool = True) -> ReadResult:
        """Whole batches from the one that holds `offset` to `upper_offset`; empty at this bound.

        At most `max_bytes`, except that with `min_one_batch` the first batch is always returned. Raises
        OFFSET_OUT_OF_RANGE, ColdRead (warm it on a thread and read again), DamagedRecords, OSError.
        """
        if offset < self.log_start_offset or offset > self.log_end_offset:
            raise KafkaError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"offset {offset} is outside {self.log_start_offset}..{self.log_end_offset}",
            )
        if offset >= upper_offset:
            return ReadResult([], 0, offset)
        return self._examining(
            lambda: read_from(self.segments, offset, max_bytes, upper_offset, min_one_batch), offset, wait=False
        )

    def read_tail(self, offset: int, max_bytes: int, upper_offset: int) -> bytes | None:
        """The result of `read`, if it is recent, small and reaches the log end; otherwise None. Raises OSError."""
        return read_tail(self.segments.active, offset, max_bytes, upper_offset, self.leader_epochs)

    def aborted_transactions(self, from_offset: int, upper_offset: int) -> list[AbortedTransaction]:
        """The aborted transactions with records in [from_offset, upper_offset), for a read_committed fetch."""
        try:
            return lookup.aborted_between(self.segments, from_offset, upper_offset)
        except CorruptTransactionIndex as error:
            logger.warning("rebuilding an index of aborted transactions: %s", error)
            recovery.rebuild_unreadable(self.segments, self.snapshots, from_offset)
            self.segments.sums_are_stale = True
            return lookup.aborted_between(self.segments, from_offset, upper_offset)

    def offset_for_timestamp(
        self, timestamp: int, *, wait: bool = True, progress: lookup.LookupProgress | None = None
    ) -> TimestampOffset | None:
        """The first record not older than `timestamp`, committed or not. Raises ColdRead unless it may `wait`."""
        start, lost = self.log_start_offset, self.accepted_losses
        ask = partial(lookup.first_at_or_after, self.segments, timestamp, start, lost, wait=wait, progress=progress)
        return self._examining(ask, start, wait=wait)

    def max_timestamp_offset(self, *, wait: bool = True) -> TimestampOffset | None:
        """The first record with the largest timestamp of the log. Raises ColdRead unless it may `wait`."""
        start, lost = self.log_start_offset, self.accepted_losses
        return self._examining(lambda: lookup.largest(self.segments, start, lost, wait=wait), start, wait=wait)

    def rebuild_transaction_index(self, segment: Segment) -> None:
        """Rebuild it from the batches and the producer state at the segment's start. Waits for the device."""
        recovery.rebuild_transaction_index(segment, list(self.segments), self.snapshots)
        self.segments.sums_are_stale = True

    # Damage

    def damaged_ranges(self) -> list[tuple[Segment, DamagedRange]]:
        """The known damaged ranges of the log, in the order of offsets."""
        start = self.log_start_offset
        return [
            (segment, each) for segment in self.segments if segment.damage for each in segment.damage
            if each.end_offset > start
        ]  # fmt: skip

    def _examining(self, ask: Callable[[], T], offset: int, *, wait: bool) -> T:
        """The result of `ask`. A segment with a wrong index or wrong batches is examined, and `ask` is repeated.

        Without `wait` an examination needs a thread: raises Examination, a ColdRead. The findings of an earlier one do
        not count if the segment has changed since it began.
        """
        examined: set[Segment] = set()
        while True:
            try:
                return ask()
            except CorruptIndex as error:
                segment = self._segment_of(error.path)
                if segment is None or segment in examined:
                    # The segment has been examined, and still contradicts its index.
                    damage = DamagedRange(0, 0, offset, offset + 1, str(error))
                    raise DamagedRecords(error.path, damage) from None
                examined.add(segment)
                if wait:
                    examine_now(segment)
                elif segment.findings is None or segment.findings.generation != segment.generation:
                    if segment.unread is not None:
                        failure, segment.unread = segment.unread, None
                        raise failure from None
                    logger.warning("examining a segment of %s-%d: %s", self.topic, self.partition, error)
                    raise Examination(segment, self.segments.epoch_behind(segment)) from None
                self.adopt_findings(segment)

    def repair_of(self, segment: Segment, damage: DamagedRange, from_offset: int | None = None) -> RangeRepair:
        """Start the repair of a damaged range, or with `from_offset` of its end."""
        if self.compaction is not None:
            self.compaction.give_up()
        return RangeRepair(self, segment, damage, from_offset=from_offset)

    def finish_repair(self, check: RepairCheck) -> bool:
        """Apply the result of `check.run`. False if the log has changed meanwhile. Raises OSError."""
        is_done = finish_repair(check)
        if is_done:
            explained_gaps.keep_early_end(self, check.segment)
        self.after_repair(check.damage if is_done else None)
        return is_done

    def after_repair(self, repaired: DamagedRange | None = None) -> None:
        """Rebuild what damage has hidden: rows of aborted transactions, and when no more is left the producer state.

        What a shortage interrupts is done by `maintain`, or with the next attempt of a repair.
        """
        self.repairs_to_reveal = (*self.repairs_to_reveal, repaired)
        self.reveal()

    def reveal(self) -> None:
        """Do what `after_repair` has left. Raises OSError for another shortage."""
        while self.repairs_to_reveal:
            with revealing(self) as repaired:
                reveal = partial(recovery.reveal, self, repaired)
                self._know_producers(anew=self._examining(reveal, self.log_start_offset, wait=True))

    def distrust_transactions(self, offset: int) -> None:
        self.segments.distrusted.add(offset)
        self.durability.write_sums(self.segments)

    def _know_producers(self, *, anew: bool = False) -> bool:
        """Whether the producer state is complete. It is rebuilt when no damage is left that may be repaired."""
        if self.lacks_producers and (anew or not damage_to_repair(self)):
            recovery.reload_producers(self)
        return not self.lacks_producers

    def accept_loss(self, damage: DamagedRange) -> None:
        """No replica has these records. Reads of them still fail, but producers do not wait. Raises OSError."""
        accepted = self.accepted_losses | {damage.first_offset}
        self.accepted_losses = accepted.intersection(each.first_offset for _, each in self.damaged_ranges())
        self._know_producers()

    def accept_gap(self, segment: Segment, damage: DamagedRange) -> None:
        """Accept missing offsets as compacted: every other replica lacks them too, and no bytes here are damaged."""
        explained_gaps.accept_gap(self, segment, damage)

    def explain_gaps(self, end_offset: int, *, sync: bool = True) -> None:
        """Record that the gaps below `end_offset` are no damage, also for later starts. Raises OSError."""
        explained_gaps.explain_gaps(self, end_offset, sync=sync)

    def adopt_findings(self, segment: Segment) -> None:
        """Apply the result of a segment's examination. Raises OSError."""
        findings, segment.findings = segment.findings, None
        if findings is None or findings.generation != segment.generation:
            return  # the segment has changed since; it is examined again if it is still wrong
        doubt_epochs(findings, self.leader_epochs.epoch_for_offset, segment.proven)
        segment.adopt(findings)
        if not segment.max_is_confirmed:
            lookup.note_timestamps_from(segment, findings.size_bytes)
        for damage in segment.damage:
            logger.error("%s: %s", segment.path, describe(damage))
        self.correct_epochs(segment, findings)
        for path in settle(segment, is_active=segment is self.segments.active):
            self.durability.note_path(path)

    def correct_epochs(self, segment: Segment, findings: Findings) -> None:
        """Correct the leader epochs from the batches of a segment without damage, except of deleted records."""
        if any(damage.end_offset > self.log_start_offset for damage in segment.damage):
            return
        segment.proven = ()
        start, known = max(segment.base_offset, self.log_start_offset), self.leader_epochs
        if known.correct_by(findings.epochs, start, findings.end_offset, is_cleaned=segment.may_have_gaps):
            logger.warning("%s: reading leader epochs from the batches of %s", self.directory, segment.path)
            self.durability.file_epochs(known)

    def doubt_epochs_above(self, leader_epoch: int) -> bool:
        """Mark batches with a later leader epoch than the partition has had as damaged. True if there are any."""
        first_offset = self.leader_epochs.forget_above(leader_epoch, self._filed_epochs)
        self._filed_epochs = ()
        for segment in self.segments.from_offset(first_offset) if first_offset >= 0 else ():
            segment.findings = segment.examine(epoch_max=leader_epoch)
            self.adopt_findings(segment)
        return first_offset >= 0

    def _segment_of(self, path: str) -> Segment | None:
        return next((segment for segment in self.segments if path.startswith(segment.stem)), None)

    def end_offset_for_epoch(self, epoch: int) -> tuple[int, int]:
        """(the largest epoch not above `epoch`, its end offset); (-1, -1) if unknown."""
        return self.leader_epochs.end_offset_for(epoch, self.log_end_offset)

    def confirmed_end_of_epoch(self, epoch: int, reached: int = INT64_MAX) -> tuple[int, int]:
        """`end_offset_for_epoch`, confirmed by `lookup.end_of_epoch`. Raises ColdRead, DamagedRecords."""
        return self._examining(lambda: lookup.end_of_epoch(self, epoch, reached), self.log_start_offset, wait=False)

    def assign_epoch(self, leader_epoch: int) -> None:
        """Note that this node leads in `leader_epoch` from the log end on."""
        self.leader_epochs.assign(leader_epoch, self.log_end_offset)

    # Durability

    @property
    def flush_due(self) -> bool:
        """Whether a flush should start: acknowledgements wait for it, or it is due by time. False during a flush."""
        return self.durability.is_due(self.log_end_offset)

    @property
    def committable_offset(self) -> int:
        """The log end, or with flush.messages the first record that waits for the device."""
        blocked_from = self.durability.blocked_from
        return self.log_end_offset if blocked_from < 0 else blocked_from

    def begin_flush(self) -> FlushTask:
        """Create a flush task: call `task.run()` on any thread, then `finish_flush(task)` here. Raises OSError."""
        return self.durability.begin(self.segments, self.leader_epochs, self.log_end_offset)

    def finish_flush(self, task: FlushTask, now_ms: int | None = None) -> None:
        """Apply the result of the task. Raises OSError if the sync failed: the device cannot be trusted any more.

        After a shortage of resources the log stays usable, and another flush is due.
        """
        try:
            self.durability.finish(task, self.log_end_offset, now_ms)
        except OSError as error:
            if not is_exhaustion(error):
                self.failure = f"{self.directory}: {error}"
            raise
        explained_gaps.note_flush(self, task)
        self.flush_at = self.durability.flush_at

    def flush(self) -> None:
        """Begin, run and finish a flush. Waits for the device."""
        task = self.begin_flush()
        task.run()
        self.finish_flush(task)

    # Shortening: truncation at the end, retention and DeleteRecords at the start

    def truncate_to(self, offset: int) -> None:
        """Remove the batch that holds `offset` and all after it, durably. The log then ends after the batch before it.

        Raises OSError; see `can_retry`.
        """
        self._examining(lambda: self._truncate_to(offset), offset, wait=True)
        explained_gaps.forget_gaps_behind(self, self.log_end_offset)
        self._know_producers()
        self.flush_at = self.durability.flush_at

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Empty the log; the next record gets `offset`. Raises OSError; see `can_retry`."""
        self._start_over_at(offset)
        explained_gaps.forget_gaps_behind(self, offset)
        self._know_producers()
        self.flush_at = self.durability.flush_at

    def _truncate_to(self, offset: int) -> None:
        assert offset >= 0, offset
        if offset >= self.log_end_offset:
            self.leader_epochs.truncate_from_end(self.log_end_offset)
            return
        if self.compaction is not None:
            self.compaction.give_up()
        if offset < self.segments.first.base_offset:
            self._start_over_at(offset)
            return
        probe_descriptors(self.disk, self.directory)
        segment, position, end_offset, damage = cut_at(self.segments, offset)
        if end_offset <= self.log_start_offset and (position or segment is not self.segments.first):
            self._start_over_at(end_offset)  # to a start, deleted batches of a later epoch would contradict the next
            return
        logger.info("truncating %s-%d from offset %d to %d", self.topic, self.partition, self.log_end_offset, offset)
        is_complete = not self.lacks_producers and not self.damaged_ranges()
        earlier = self.producers.earlier(end_offset) if is_complete else None
        try:
            self._cut(segment, position, end_offset)
            segment.damage = damage
            if earlier is not None:
                self.producers.return_to(earlier)
            else:  # takes seconds for a segment with small batches
                recovery.reload_producers(self)
            if damage and damage[-1].position == damage[-1].end_position == segment.size_bytes:
                segment.seal()
                self.durability.note_seal(segment)
                self.begin_segment(self.clock_ms, end_offset)
        except OSError as error:
            self.failure = f"{self.directory}: was cut at {end_offset} in part: {error}"
            raise

    def _cut(self, segment: Segment, position: int, end_offset: int) -> None:
        goes_back = end_offset < max(self.log_start_offset, self.cleaned_offset, self.high_watermark)
        self.log_start_offset = min(self.log_start_offset, end_offset)
        explained_gaps.lower_cleaned_offset(self, end_offset)
        self.high_watermark = min(self.high_watermark, end_offset)
        if self.durability.truncated(end_offset) or goes_back:
            # First: after a kill stale ones keep the next records from the scan or the cleaner, or have some missed.
            self.write_checkpoint()
        if later := sum(1 for each in self.segments if each.base_offset > segment.base_offset):
            self.segments.drop_last(later, self.clock_ms + self.config.file_delete_delay_ms)
        self.snapshots.delete_where(end_offset + 1, self.log_end_offset + 1)
        segment.truncate(position, end_offset)
        refresh_max_timestamp(segment)
        self.disk.sync_directory(self.directory)
        self.durability.truncate_epochs(self.leader_epochs, end_offset)
        self.log_end_offset = end_offset

    def _start_over_at(self, offset: int) -> None:
        probe_descriptors(self.disk, self.directory)
        logger.info("emptying %s-%d: it starts at offset %d", self.topic, self.partition, offset)
        if self.compaction is not None:
            self.compaction.give_up()
        try:
            self._empty(offset)
        except OSError as error:
            self.failure = f"{self.directory}: was emptied in part: {error}"
            raise

    def _empty(self, offset: int) -> None:
        self.cleaned_offset = -1
        # As in retention: these may go in any order, with one sync. The start of the metadata log is in no checkpoint.
        if self.topic_id != METADATA_TOPIC_ID and self.segments.condemn_below(min(self.high_watermark, offset)):
            self._advance_log_start(self.segments.first.base_offset)
        self.log_start_offset = self.high_watermark = min(self.log_start_offset, offset)
        self.durability.truncated(self.log_start_offset)
        self.write_checkpoint()
        if self.segments.condemned:
            self.rename_condemned(self.log_start_offset, self.clock_ms)
            self.disk.sync_directory(self.directory)
        # Before the other files go: a start misses the first file of a log that begins after its first epoch.
        self.leader_epochs.clear()
        self.durability.files.epochs(self.leader_epochs).write()
        with emptying(self.disk, self.directory):
            self.segments.drop_last(len(self.segments), self.clock_ms + self.config.file_delete_delay_ms)
            self.rename_condemned(INT64_MAX, self.clock_ms)  # the new segment may get the name of one of them
            self.snapshots.delete_where(0, 2**63)
        self.begin_segment(self.clock_ms, offset)
        self.disk.sync_directory(self.directory)
        self.producers.clear(offset)
        self.log_start_offset = self.log_end_offset = self.high_watermark = offset
        self.durability.started_at(offset)

    def delete_records(self, offset: int) -> int:
        """Move the log start to `offset` (-1: the high watermark). The new log start. Raises OFFSET_OUT_OF_RANGE."""
        if offset == -1:
            offset = self.high_watermark
        if offset < 0 or offset > self.high_watermark:
            raise KafkaError(
                ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} is above the high watermark, {self.high_watermark}"
            )
        self._advance_log_start(offset)
        return self.log_start_offset

    def _advance_log_start(self, offset: int) -> None:
        if offset > self.log_start_offset:
            hiding = self.damaged_ranges() if self.passes_damage else []
            self.log_start_offset = offset
            self.leader_epochs.truncate_from_start(offset)
            self.producers.on_high_watermark(offset)
            if len(hiding) > len(self.damaged_ranges()):  # what it hid of transactions is deleted, and not repaired
                recovery.reload_producers(self)

    def maintain(self, now_ms: int, doomed: list[str] | None = None) -> bool:
        """Apply retention, request flushes by time, and remove files that are due. False if retention is not done yet.

        If `doomed` is given, the caller removes the paths that are added to it. The files of segments that retention
        takes out wait for `rename_condemned`.
        """
        self.clock_ms = now_ms
        recovery.write_if_there_is_space(self.reveal, "what damage has hidden", or_descriptors=True)
        self._know_producers()  # a shortage may have kept a deletion from it
        if not self._apply_retention(now_ms):
            return False
        end_before, self._end_at_maintenance = self._end_at_maintenance, self.log_end_offset
        self.durability.want_by_time(now_ms, self.config.flush_ms, self.log_end_offset)
        if doomed is None:
            self.segments.remove_doomed(now_ms)
        else:
            doomed += self.segments.take_doomed(now_ms)
        self.segments.release(keep_active=self.log_end_offset != end_before)  # else it is idle
        leave_removed_file(self, now_ms)
        return True

    def expire_producers(self, now_ms: int) -> None:
        """Forget the producers that have not written for `producer.id.expiration.ms`."""
        self.producers.remove_expired(now_ms, self.config.producer_id_expiration_ms)

    def _apply_retention(self, now_ms: int) -> bool:
        """Take the expired segments out of the log. If all are, roll a new one first. False if it is not done."""
        if self.compaction is not None:
            self.compaction.retention_waits = True  # the cleaning reads segments that retention could remove
        if self.compaction is not None or (self.segments.active.size_bytes == 0 and len(self.segments) == 1):
            return True
        count, self.is_doubtful, has_more = lookup.expired_prefix(
            self.segments, self.disk, self.config, self.log_start_offset, self.high_watermark, now_ms
        )
        if count:
            if count == len(self.segments):
                self.roll(now_ms)
            start = self.segments[count].base_offset
            logger.info("%s: deleting %d segments below %d", self.directory, count, start)
            self._advance_log_start(start)  # first: damage in the segments may hide transactions
            self.segments.condemn_first(count)
            self.durability.note_directory(self.directory)
        return not has_more

    def rename_condemned(self, checkpointed_log_start: int, now_ms: int, count: int = INT64_MAX) -> None:
        """Rename `count` segments that retention took out, below the log start on the device. Raises OSError."""
        if self.durability.is_abandoned:
            return
        remove_at_ms = now_ms + self.config.file_delete_delay_ms
        for segment in self.segments.rename_condemned(checkpointed_log_start, remove_at_ms, count):
            self.segments.doomed += [(remove_at_ms, path) for path in self.snapshots.mark_deleted(segment.base_offset)]

    def start_moved(self) -> bool:
        """Whether the log start, or the epoch that begins there, has changed since the last call or the log's opening.

        Also while a thread has epochs to write that are not in the file yet. A start believes a log start above the
        first segment's base offset only if the epoch file confirms it.
        """
        start, earliest = self.log_start_offset, self.leader_epochs.earliest
        (start_before, epoch_before), self._checkpointed_start = self._checkpointed_start, (start, earliest)
        if self.durability.files.epochs_are_behind:
            return True
        return start != start_before or (start > self.segments.first.base_offset and earliest != epoch_before)

    def keep_uncleaned(self) -> None:
        self.may_be_cleaned = False
        if self.compaction is not None:
            self.compaction.give_up()

    def moved_to(self, directory: str) -> None:
        """The log's directory was renamed."""
        self.durability.moved(self.directory, directory)
        self.directory = directory
        self.segments.moved_to(directory)
        self.snapshots.moved_to(directory)

    def begin_close(self) -> FlushTask | None:
        """Write the files that a clean start needs. The flush task for them; None if they are on the device."""
        if self.failure is not None:
            return None
        if self.compaction is not None:
            self.compaction.give_up()
        durability, active = self.durability, self.segments.active
        assert not durability.is_running, "close during a flush"
        if active.seal():
            for path in active.paths()[1:]:
                durability.note_path(path)
        if active.is_preallocated:
            active.trim()
        snapshot = None if self.passes_damage else self.snapshots.take(self.producers, sync=False)
        if snapshot is not None:
            durability.note_path(snapshot)
            durability.note_directory(self.directory)
        has_new_sums = durability.note_sums(self.segments, with_active=True)
        is_settled = durability.is_settled(self.log_end_offset) and active.synced_bytes >= 0 and not has_new_sums
        return None if is_settled and not self.leader_epochs.is_dirty else self.begin_flush()

    def finish_close(self, task: FlushTask | None) -> None:
        """Close the files. Raises OSError if the flush failed."""
        try:
            if task is not None:
                self.finish_flush(task)
            self.is_closed = self.failure is None
        finally:
            self.segments.release()

    def close(self) -> None:
        """Flush everything to the device and close the log, so that a clean start needs no scan."""
        task = self.begin_close()
        if task is not None:
            task.run()
        self.finish_close(task)

    def abandon(self, why: str = "was deleted") -> None:
        """The log is deleted or unusable: close its files without a sync. A running flush may still be finished."""
        self.failure = f"{self.directory} {why}"
        self.durability.abandon()
        if self.compaction is not None:
            self.compaction.abandon()
        self.segments.abandon()
