"""Opens a log: removes the remains of a crash, decides on the scan, rebuilds derived files.

After a clean shutdown nothing is scanned. Otherwise every batch from the segment of the recovery point on is checked,
and indexes, producer state and leader epochs are rebuilt from the batches. After a loss of power, a bad batch above the
recovery point is a torn tail: the log ends before it, as in Kafka's LogLoader. Any other bad batch is damage: the log
continues after it. No state of any file keeps a log from opening. `recovery.py` does the scan.
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, NamedTuple

from tidelog.storage.files.checkpoints import (
    CLEANED_ENDS_FILE,
    EXPLAINED_GAPS_FILE,
    LEADER_EPOCH_FILE,
    PARTITION_METADATA_FILE,
    TRANSACTION_SUMS_FILE,
    CorruptCheckpoint,
    decode_leader_epochs,
    decode_partition_metadata,
    decode_transaction_sums,
    has_checksum,
    read_if_exists,
)
from tidelog.storage.files.disk import Disk
from tidelog.storage.files.usurped_names import free_names
from tidelog.storage.log.deleted_start import forget_deleted_start
from tidelog.storage.log.epochs_of_batches import end_before_of, rebuild_epochs
from tidelog.storage.log.explained_gaps import ends_kept_below, may_end_early, read_explained_gaps
from tidelog.storage.log.hidden_transactions import ScannedTransactions
from tidelog.storage.log.recovery import (
    examine_now,
    find_end,
    is_zeros,
    read_producers,
    scan_segment,
    seal,
    take_over_findings,
    write_if_there_is_space,
)
from tidelog.storage.log.tidying import EMPTYING_FILE, TEMPORARY_SUFFIX, offsets_of, tidy
from tidelog.storage.producers.producer_snapshots import SNAPSHOT_SUFFIX, ProducerSnapshots
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, describe
from tidelog.storage.segments.examination import UNKNOWN_END
from tidelog.storage.segments.leader_epochs import LeaderEpochs, confirmed_log_start, first_offset_of
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.reader import headers, position_of
from tidelog.storage.segments.segment import (
    LOG_SUFFIX,
    SUFFIXES,
    TRANSACTION_INDEX_SUFFIX,
    Segment,
    file_name,
)
from tidelog.storage.segments.segments import Segments
from tidelog.storage.segments.transaction_index import (
    AbortedTransaction,
    CorruptTransactionIndex,
    TransactionIndex,
)

logger = logging.getLogger("tidelog.storage")

_NO_SUM: Final = (-1, 0)
"""The checksum of an index of transactions that is not to be believed: no index has it."""
# For a small log without producers, another scan costs less than a snapshot.
_SCANNED_AGAIN_BYTES_MAX: Final = 1024 * 1024
_SEGMENT_FILE: Final = re.compile(r"[0-9]{20}(-[0-9]+)?(\.[a-z]+)+$")
_SMALL_FILES: Final = frozenset(
    {
        CLEANED_ENDS_FILE,
        EMPTYING_FILE,
        EXPLAINED_GAPS_FILE,
        LEADER_EPOCH_FILE,
        PARTITION_METADATA_FILE,
        TRANSACTION_SUMS_FILE,
    }
)


class LoadedLog(NamedTuple):
    segments: Segments
    producers: ProducerState
    snapshots: ProducerSnapshots
    leader_epochs: LeaderEpochs
    topic_id: bytes | None
    log_start_offset: int
    log_end_offset: int
    recovery_point: int
    lacks_producers: bool = False
    """Damage hides batches that belong to the producer state."""
    gaps_explained_below: int = 0
    scanned_bytes: int = 0
    """The scanned bytes, if the last process did not close the log."""
    cut_bytes: int = 0
    """The scanned bytes that were truncated at the end."""
    filed_epochs: tuple[tuple[int, int], ...] = ()
    """(epoch, start offset) from the epoch file, if a scan has rebuilt the epochs from the batches."""
    transaction_sums: dict[int, tuple[int, int]] | None = None
    """The checksums of the transaction indexes, by base offset; None without a file of them."""
    topic_id_has_checksum: bool = True
    """False where partition.metadata is Kafka's, or of an earlier version."""
    hidden_ends: tuple[tuple[int, int], ...] = ()
    """[first offset, end) of records of transactions of which damage may hide the ends."""


class Checkpoints(NamedTuple):
    """The entries of one log in the log directory's checkpoints."""

    log_start_offset: int = 0
    recovery_point: int = 0
    cleaned_offset: int = -1
    """Below it batches may be missing, because a cleaner removed them."""
    high_watermark: int = 0
    was_compacted: bool = False
    """The topic is not compacted any more. Here, and in a log that this one was copied from, batches may be missing."""
    is_synced: bool = False
    """Each append was synced before its acknowledgement: bad bytes before a readable batch are no torn tail."""
    knows_recovery_point: bool = True
    """False where the file is unreadable: what may be on the device is unknown, so these bytes are no torn tail."""


class Ending(Enum):
    """How the process that wrote the log last ended."""

    CLEAN = "everything is on the device"
    KILLED = "everything that it wrote is in the files"
    POWER_LOSS = "what is above the recovery point may lack anything"


def load_log(
    disk: Disk,
    directory: str,
    config: LogConfig,
    checkpoints: Checkpoints,
    *,
    ending: Ending,
    now_ms: int,
    jitter_ms: int,
    on_loss: Callable[[], None] = lambda: None,
) -> LoadedLog:
    """Open the log in `directory`, which exists. Raises only OSError.

    `on_loss` is called before a truncation that may lose acknowledged records.
    """
    loader = _Loader(disk, directory, config, checkpoints, ending, now_ms, jitter_ms)
    loader.on_loss = on_loss
    try:
        return loader.load()
    except BaseException:
        loader.release()  # a segment is part of a cycle: its files would stay open, of a device that is perhaps gone
        raise


def new_log(
    disk: Disk, directory: str, config: LogConfig, topic_id: bytes, *, now_ms: int, jitter_ms: int
) -> LoadedLog:
    """An empty log in a new directory."""
    segment = Segment.create(disk, directory, 0, config, now_ms, jitter_ms)
    segments = Segments(disk, directory, [segment])
    return LoadedLog(segments, ProducerState(), ProducerSnapshots(disk, directory), LeaderEpochs(), topic_id, 0, 0, 0)


class _Loader:
    def __init__(
        self,
        disk: Disk,
        directory: str,
        config: LogConfig,
        checkpoints: Checkpoints,
        ending: Ending,
        now_ms: int,
        jitter_ms: int,
    ) -> None:
        self.disk, self.directory, self.config = disk, directory, config
        self.checkpoints, self.ending = checkpoints, ending
        self.is_clean = ending is Ending.CLEAN
        self._opened: list[Segment] = []
        self.on_loss: Callable[[], None] = lambda: None
        self.suspects_end = False
        self.filed_epochs: list[tuple[int, int]] = []
        self.transactions = ScannedTransactions()
        self.snapshot_offset = 0
        self.scanned_bytes = self.cut_bytes = 0
        self.batches_end = INT64_MAX
        """Where the batches end that were scanned so far."""
        self.now_ms, self.jitter_ms = now_ms, jitter_ms
        entries = disk.list_directory(directory)
        freed = free_names(disk, directory, entries, _is_file_name)
        for entry in entries:
            if entry.is_special and _is_log_name(entry.name):
                raise FileNotFoundError(errno.ENOENT, "is not a file", f"{directory}/{entry.name}")
        names = {entry.name for entry in entries if not entry.is_directory} - freed
        self.gaps_explained_below, self.early_ends = read_explained_gaps(disk, directory)
        self.ends_kept_below = ends_kept_below(disk, directory, checkpoints.cleaned_offset)
        if checkpoints.cleaned_offset > 0 and not self.ends_kept_below and CLEANED_ENDS_FILE in names:
            disk.remove(f"{directory}/{CLEANED_ENDS_FILE}")  # the checkpoint that shows a later cleaning may be lost
        cleaned_below = max(checkpoints.cleaned_offset, self.gaps_explained_below)
        # The metadata log is read whole at each start.
        if config.is_compacted or checkpoints.was_compacted or checkpoints.is_synced:
            cleaned_below = INT64_MAX
        if not checkpoints.is_synced:
            forget_deleted_start(disk, directory, names, may_be_cleaned=cleaned_below > 0)
        self.names, orphans, self.lost_transaction_indexes, renamed = tidy(disk, directory, names, cleaned_below)
        self.epochs, self.epochs_are_whole = self._read_epochs()
        self.has_unreadable_sums = TRANSACTION_SUMS_FILE in freed
        self.transaction_sums = self._read_transaction_sums()
        if self.transaction_sums is not None:
            self.transaction_sums |= dict.fromkeys(renamed, _NO_SUM)
        if not checkpoints.is_synced:  # the log start of the metadata log comes from the names of its snapshots
            self._confirm_log_start()
        known_end = max(checkpoints.high_watermark, *offsets_of(self.names, LOG_SUFFIX), 0)
        is_possible = checkpoints.log_start_offset <= known_end  # no log starts above its high watermark
        log_start_offset = (checkpoints if is_possible else self.checkpoints).log_start_offset
        self.first_offset = first_offset_of(self.epochs, self.epochs_are_whole, log_start_offset, orphans)
        self.producers = ProducerState()
        self.snapshots = ProducerSnapshots(disk, directory, offsets_of(self.names, SNAPSHOT_SUFFIX))

    def _confirm_log_start(self) -> None:
        before = self.checkpoints.log_start_offset
        first_base_offset = min(offsets_of(self.names, LOG_SUFFIX), default=INT64_MAX)
        log_start_offset = confirmed_log_start(
            self.epochs, self.epochs_are_whole, before, first_base_offset, self.checkpoints.high_watermark
        )
        if log_start_offset < before:
            logger.warning(
                "%s: its leader epochs do not confirm the checkpointed log start %d, so it starts at %d",
                self.directory,
                before,
                log_start_offset,
            )
            self.checkpoints = self.checkpoints._replace(log_start_offset=log_start_offset)

    def load(self) -> LoadedLog:
        segments = self._drop_deleted(self._open_segments())
        if not self.checkpoints.is_synced:  # the metadata log begins with a snapshot instead of a first segment
            segments = self._with_first(segments)
        first_unflushed = len(segments)
        if not self.is_clean and segments:
            first_unflushed = self._first_unflushed(segments)
        first_unflushed = self._check_indexes(segments, first_unflushed)
        if segments and first_unflushed == len(segments):
            log_end_offset = self._find_end(segments)
        else:
            log_end_offset = segments[first_unflushed].base_offset if segments else 0
        log_start_offset = max(self.checkpoints.log_start_offset, segments[0].base_offset if segments else 0)
        self._load_producers(segments, min(log_start_offset, log_end_offset), log_end_offset)
        if first_unflushed < len(segments):
            self.scanned_bytes = sum(segment.size_bytes for segment in segments[first_unflushed:])
            segments, log_end_offset = self._recover(segments, first_unflushed)
            self.cut_bytes = self.scanned_bytes - sum(segment.size_bytes for segment in segments[first_unflushed:])
        if segments and log_end_offset < self.checkpoints.log_start_offset:
            self.on_loss()
            logger.warning(
                "%s ends at %d, below its log start %d: starting an empty log",
                self.directory,
                log_end_offset,
                log_start_offset,
            )
            self._remove(segments)
            segments = []
            self.epochs.clear()
        if not segments:
            log_end_offset = log_start_offset
            self.snapshots.delete_where(0, log_end_offset + 1)
            self.producers.clear(log_end_offset)
            segments = [self._create_segment(log_start_offset)]
        log_start_offset = max(self.checkpoints.log_start_offset, segments[0].base_offset)
        return self._finish(segments, log_start_offset, log_end_offset)

    def _finish(self, segments: list[Segment], log_start_offset: int, log_end_offset: int) -> LoadedLog:
        active = segments[-1]
        active.load_indexes()
        try:
            self._note_first_timestamp(active)
        except CorruptIndex as error:
            logger.warning("examining %s: %s", active.path, error)
            examine_now(active)
            take_over_findings(active)
            self._note_first_timestamp(active)
        if log_end_offset > log_start_offset and not self._epochs_reach(log_start_offset):
            rebuild_epochs(self.epochs, segments, log_start_offset)
        # No checksum guards the file of the epochs: a wrong one would make the metadata log the newest in an election.
        filed = () if self.checkpoints.is_synced else self.filed_epochs or list(self.epochs)
        self.epochs.limit_to(log_start_offset, log_end_offset, filed)
        self.snapshots.keep_only(segment.base_offset for segment in segments)
        for base_offset in self.lost_transaction_indexes - {segment.base_offset for segment in segments}:
            self.disk.remove(self._path_of(base_offset))
        if self.has_unreadable_sums:  # after the scan: a start that is interrupted must scan again
            self.disk.remove(f"{self.directory}/{TRANSACTION_SUMS_FILE}")
        self.producers.end_offset = log_end_offset
        lacks_producers = self._lacks_producers(segments)
        is_large = bool(self.producers) or len(segments) > 1 or active.size_bytes > _SCANNED_AGAIN_BYTES_MAX
        if is_large and not self.is_clean and not lacks_producers:
            self._take_snapshot()
        recovery_point = log_end_offset if self.is_clean else min(self.checkpoints.recovery_point, log_end_offset)
        topic_id, topic_id_has_checksum = self._read_topic_id()
        return LoadedLog(
            Segments(self.disk, self.directory, segments),
            self.producers,
            self.snapshots,
            self.epochs,
            topic_id,
            log_start_offset,
            log_end_offset,
            recovery_point,
            lacks_producers,
            min(self.gaps_explained_below, log_end_offset),  # the records behind may have been lost since
            self.scanned_bytes,
            self.cut_bytes,
            tuple(self.filed_epochs),
            self.transaction_sums,
            topic_id_has_checksum,
            tuple(self.transactions.hidden_ends),
        )

    def _take_snapshot(self) -> None:
        """Without it a later start reads more batches."""
        write_if_there_is_space(lambda: self.snapshots.take(self.producers, sync=False), "a snapshot of the producers")

    def _note_first_timestamp(self, active: Segment) -> None:
        for _, header in headers(active):
            active.set_first_batch_timestamp(header.max_timestamp)
            break

    def _lacks_producers(self, segments: list[Segment]) -> bool:
        """Whether there is damage after the snapshot on which the producer state is based."""
        return any(each.end_offset > self.snapshot_offset for segment in segments for each in segment.damage)

    def _find_end(self, segments: list[Segment]) -> int:
        """The log end after a clean stop. If the last segment lacks records, a new segment begins after them."""
        active = segments[-1]
        closed_end = self.checkpoints.recovery_point
        tail = find_end(active, self._end_of_checkpoints(), closed_end, is_suspect=self.suspects_end)
        if tail is not None:
            self._end_in_damage(segments, tail, is_scanned=False)
        return segments[-1].next_offset

    def _end_of_checkpoints(self) -> int:
        """A lower bound of the log end, from the checkpoints."""
        recovery_point, high_watermark = self.checkpoints.recovery_point, self.checkpoints.high_watermark
        return recovery_point if self._explains_loss else max(recovery_point, high_watermark)

    @property
    def _explains_loss(self) -> bool:
        """Whether a loss of power explains that the log lacks its end: it was above the recovery point."""
        return self.ending is Ending.POWER_LOSS and self.checkpoints.knows_recovery_point

    def _end_in_damage(self, segments: list[Segment], tail: DamagedRange, *, is_scanned: bool) -> None:
        """After the last whole batch of the log there are invalid bytes, or records are missing.

        Checkpoints have no checksum, so two of them must agree on the number of these records. Then a new segment
        begins after them. Otherwise the log is truncated, and a possible loss is reported.
        """
        active, checkpoints = segments[-1], self.checkpoints
        end_offset = min(checkpoints.recovery_point, checkpoints.high_watermark)
        lost_bytes = active.size_bytes - tail.position
        if self.ending is Ending.KILLED and checkpoints.high_watermark - tail.first_offset <= lost_bytes:
            end_offset = checkpoints.high_watermark  # the lost bytes can hold this many records
        # Also where `preallocate` was on until after the segment began: its file has the size of a full segment.
        has_full_size = self.config.preallocate or active.size_bytes == self.config.segment_bytes
        is_preallocated = has_full_size and is_zeros(active, tail.position)
        may_be_torn = self._explains_loss or is_preallocated
        if tail.first_offset < self._end_of_checkpoints() or (lost_bytes and not may_be_torn):
            logger.error(
                "%s lacks records that may have been acknowledged, from offset %d on", self.directory, tail.first_offset
            )
            self.on_loss()
        if end_offset <= tail.first_offset:
            if lost_bytes:
                if is_preallocated:
                    self.scanned_bytes -= lost_bytes  # space for records to come
                else:
                    logger.warning(
                        "%s: cut at offset %d, %d bytes behind it are no batches",
                        active.path,
                        tail.first_offset,
                        lost_bytes,
                    )
                active.cut(tail.position)
                active.transaction_index.truncate_to(tail.first_offset)
            return
        damage = tail._replace(end_position=active.size_bytes, end_offset=end_offset)
        logger.error("%s: %s", active.path, describe(damage))
        active.damage = (*active.damage, damage)
        for epoch, start_offset in self.filed_epochs:
            if epoch > self.epochs.latest and damage.holds(start_offset):
                self.epochs.assign(epoch, start_offset)
        if is_scanned:
            self.transactions.note_damage(damage, self.producers, active.transaction_index)
        active.next_offset = end_offset
        active.seal()
        active.sync_indexes()
        segments.append(self._create_segment(end_offset))

    # Files

    def _open_segments(self) -> list[Segment]:
        transaction_indexes = set(offsets_of(self.names, TRANSACTION_INDEX_SUFFIX))
        bases = sorted(offsets_of(self.names, LOG_SUFFIX))
        segments: list[Segment] = []
        synced_below = self.checkpoints.recovery_point if self._explains_loss else INT64_MAX
        for base_offset, end_offset in zip(bases, [*bases[1:], INT64_MAX]):
            size_bytes = self.disk.size_of(f"{self.directory}/{file_name(base_offset, LOG_SUFFIX)}")
            has_index = base_offset in transaction_indexes
            segment = self._open_segment(base_offset, size_bytes, has_transaction_index=has_index)
            segment.may_end_early = may_end_early(
                segment, end_offset, cleaned_offset=self.checkpoints.cleaned_offset, kept_below=self.ends_kept_below,
                early_ends=self.early_ends, synced_below=synced_below,
            )  # fmt: skip
            segment.may_have_gaps = segment.may_have_gaps or segment.may_end_early
            if segments:
                segments[-1].next_offset = base_offset
            segments.append(segment)
        return segments

    def _open_segment(self, base_offset: int, size_bytes: int, *, has_transaction_index: bool) -> Segment:
        segment = Segment(
            self.disk,
            self.directory,
            base_offset,
            self.config,
            self.now_ms,
            size_bytes=size_bytes,
            has_transaction_index=has_transaction_index,
            jitter_ms=self.jitter_ms,
        )
        gaps_below = max(self.checkpoints.cleaned_offset, self.gaps_explained_below)
        if base_offset < gaps_below or self.checkpoints.was_compacted:
            segment.may_have_gaps = True
        self._opened.append(segment)
        return segment

    def _create_segment(self, base_offset: int) -> Segment:
        segment = Segment.create(self.disk, self.directory, base_offset, self.config, self.now_ms, self.jitter_ms)
        self._opened.append(segment)
        return segment

    def release(self) -> None:
        """The log cannot be opened: close its files."""
        for segment in self._opened:
            segment.release()

    def _with_first(self, segments: list[Segment]) -> list[Segment]:
        """The segments, with an empty and damaged first segment if the log's first file is missing.

        The log start offset is synced before a file below it is removed, so records above it were not deleted.
        """
        if not segments:
            return self._with_only()
        first = segments[0]
        # Even an empty cleaned segment has index files. One without them was created here by an earlier start.
        is_left_empty = len(segments) > 1 and not first.size_bytes and not _has_index_files(self.names, first)
        if first.base_offset > self.first_offset:
            segments = [self._begin_missing(self.first_offset), *segments]
        elif not is_left_empty:
            return segments
        missing, end_offset = segments[0], segments[1].base_offset
        missing.next_offset = end_offset
        missing.may_end_early = False
        missing.transaction_index.lacks_rows = True
        missing.damage = (DamagedRange(0, 0, missing.base_offset, end_offset, "the file of these records is missing"),)
        if not self._is_torn(missing.damage[0]):  # otherwise a scan ends the log there
            logger.error("%s: %s", missing.path, describe(missing.damage[0]))
        return segments

    def _with_only(self) -> list[Segment]:
        """`_with_first` for a log without segments: a damaged segment if the log had records, otherwise none."""
        start = self.checkpoints.log_start_offset if self.first_offset == INT64_MAX else self.first_offset
        is_end_known = self._end_of_checkpoints() > start
        was_emptied = self.epochs_are_whole and not len(self.epochs)
        if was_emptied or not (is_end_known or len(self.epochs)):
            return []
        if is_end_known or not self._explains_loss:
            logger.error("%s has no segment, but it had records", self.directory)
        if not is_end_known and self.ending is not Ending.POWER_LOSS:
            self.on_loss()
        return [self._begin_missing(start)]

    def _begin_missing(self, base_offset: int) -> Segment:
        self.disk.write_file(f"{self.directory}/{file_name(base_offset, LOG_SUFFIX)}", b"", sync=False)
        self.disk.sync_directory(self.directory)  # a repair in place syncs only the file
        return self._open_segment(base_offset, 0, has_transaction_index=False)

    def _drop_deleted(self, segments: list[Segment]) -> list[Segment]:
        """Remove the segments that lie wholly below the log start offset.

        A crash may have deleted some of them and not others, so a gap there is not damage.
        """
        count = 0
        while count + 1 < len(segments) and segments[count + 1].base_offset <= self.checkpoints.log_start_offset:
            count += 1
        for segment in segments[:count]:
            for path in segment.paths():
                self.disk.remove(path)
        return segments[count:]

    def _read_epochs(self) -> tuple[LeaderEpochs, bool]:
        """The leader epochs, and whether they are reliable below the recovery point."""
        data = read_if_exists(self.disk, f"{self.directory}/{LEADER_EPOCH_FILE}")
        if not data:
            return LeaderEpochs(), False
        try:
            return LeaderEpochs(decode_leader_epochs(data)), True
        except CorruptCheckpoint as error:
            logger.warning("rebuilding %s/%s from the log: %s", self.directory, LEADER_EPOCH_FILE, error)
            return LeaderEpochs(), False

    def _read_transaction_sums(self) -> dict[int, tuple[int, int]] | None:
        """The checksums of the transaction indexes; None without a file, or where it is unreadable."""
        path = f"{self.directory}/{TRANSACTION_SUMS_FILE}"
        data = read_if_exists(self.disk, path)
        if data is None:
            return None
        try:
            if not data:
                raise CorruptCheckpoint("it is empty")
            return decode_transaction_sums(data)
        except CorruptCheckpoint as error:
            logger.warning("cannot read %s, rebuilding the indexes of transactions: %s", path, error)
            self.has_unreadable_sums = True
            return None

    def _read_topic_id(self) -> tuple[bytes | None, bool]:
        """The topic id, None where it is unknown, and whether the file has a checksum."""
        data = read_if_exists(self.disk, f"{self.directory}/{PARTITION_METADATA_FILE}")
        if not data:
            return None, False
        try:
            return decode_partition_metadata(data), has_checksum(data)
        except CorruptCheckpoint as error:
            logger.warning("cannot read %s/%s: %s", self.directory, PARTITION_METADATA_FILE, error)
            return None, False

    def _remove(self, segments: list[Segment]) -> None:
        for segment in reversed(segments):
            segment.release()
            for path in reversed(segment.paths()):
                self.disk.remove(path)
            self.disk.sync_directory(self.directory)

    # Indexes

    def _first_unflushed(self, segments: list[Segment]) -> int:
        point = self.checkpoints.recovery_point
        return max(0, sum(1 for segment in segments if segment.base_offset <= point) - 1)

    def _check_indexes(self, segments: list[Segment], first_unflushed: int) -> int:
        """Repair the indexes of the segments before `first_unflushed`. The index of the first segment to scan."""
        for number in range(first_unflushed):
            segment = segments[number]
            try:
                self._check_transaction_index(segment)
                self._take_over_lost_indexes(segments, number)
            except CorruptTransactionIndex as error:
                logger.warning("scanning the log from there on: %s", error)
                return number  # only a replay of the producer state can rebuild it
            try:
                segment.load_indexes()
                if number + 1 < len(segments):
                    segment.check_indexes_end_below(segments[number + 1].base_offset)
            except CorruptIndex as error:
                logger.warning("rebuilding an index: %s", error)
                if number + 1 == len(segments):
                    segment.begin_rebuild()
                    self.suspects_end = True
                    continue
                examine_now(segment)
                take_over_findings(segment)
            if number + 1 < len(segments):
                segment.forget_indexes()
        return first_unflushed

    def _check_transaction_index(self, segment: Segment) -> None:
        """Raises CorruptTransactionIndex if the index of aborted transactions is not what was written.

        Without the right rows, a reader of committed records would get aborted ones.
        """
        index = segment.transaction_index
        known = index.checksum
        if self.has_unreadable_sums and not index.lacks_rows:
            raise CorruptTransactionIndex(f"nothing says whether {index.path} is what was written")
        if self.transaction_sums is None or index.lacks_rows:
            return
        expected = self.transaction_sums.get(segment.base_offset, (0, 0))
        if known != expected:
            raise CorruptTransactionIndex(f"{index.path} is not what was written: {known}, not {expected}")

    def _take_over_lost_indexes(self, segments: list[Segment], number: int) -> None:
        """Give a segment the aborted transactions of the segments behind it whose .log is gone.

        Their records belong to it from now on, as damage. Without these rows a reader of committed records would get
        the aborted ones before that damage, also after the repair. Raises CorruptTransactionIndex where the rows are
        not known: a scan finds the damage, and after its repair the index is made anew.
        """
        segment = segments[number]
        index = segment.transaction_index
        for base_offset in _lost_behind(segments, number, self.transaction_sums or ()):
            expected = (self.transaction_sums or {})[base_offset]
            lost = TransactionIndex(self.disk, self._path_of(base_offset), exists=True)
            if lost.checksum != expected:
                raise CorruptTransactionIndex(f"{lost.path} is not what was written: {lost.checksum}, not {expected}")
            if index.rows and lost.rows and lost.rows[0].last_offset <= index.rows[-1].last_offset:
                raise CorruptTransactionIndex(f"{lost.path} does not follow {index.path}")
            logger.error("%s has no segment: its aborted transactions go to %s", lost.path, index.path)
            for row in lost.rows:
                index.append(row)
            if index.exists:
                self.disk.sync_file(index.path)

    def _filed_rows(self, segments: list[Segment], number: int) -> list[AbortedTransaction]:
        """The aborted transactions of a segment and of those behind it without a .log, as far as files have them."""
        rows = segments[number].transaction_index.rows_or_none()
        for base_offset in _lost_behind(segments, number, self.lost_transaction_indexes):
            rows = rows + TransactionIndex(self.disk, self._path_of(base_offset), exists=True).rows_or_none()
        return rows

    def _path_of(self, base_offset: int) -> str:
        return f"{self.directory}/{file_name(base_offset, TRANSACTION_INDEX_SUFFIX)}"

    # Producer state and leader epochs

    def _load_producers(self, segments: list[Segment], log_start_offset: int, end_offset: int) -> None:
        """Load the producer state at `end_offset` from the newest usable snapshot and the batches after it."""
        read, self.snapshot_offset = read_producers(self.snapshots, segments, log_start_offset, end_offset)
        self.producers.take_over(read)

    def _epochs_reach(self, log_start_offset: int) -> bool:
        """Whether the leader epochs cover the first record.

        After a crash the log may start before them. A truncated or wrong epoch file may still be readable.
        """
        earliest = self.epochs.earliest
        return self.epochs_are_whole and earliest is not None and earliest[1] <= log_start_offset

    # Scanning

    def _recover(self, segments: list[Segment], first_unflushed: int) -> tuple[list[Segment], int]:
        """Scan the segments from `first_unflushed` on. The remaining segments, and the log end offset."""
        next_offset = segments[first_unflushed].base_offset
        # The epochs of scanned segments come from the batches: the file may have epochs of a tail lost in a crash.
        self.filed_epochs = list(self.epochs)
        self.epochs.truncate_from_end(next_offset)
        if not first_unflushed:
            self.epochs_are_whole = True
        for index in range(first_unflushed, len(segments)):
            segment, later = segments[index], segments[index + 1 :]
            if index > first_unflushed:
                self.producers.end_offset = segment.base_offset
                if not self._lacks_producers(segments[:index]):
                    self._take_snapshot()
            is_behind_damage = any(each.damage for each in segments[:index])
            self.transactions.begin_segment(self._filed_rows(segments, index), is_behind_damage=is_behind_damage)
            end_before = end_before_of(segments, index)
            if index and segments[index - 1].may_end_early:
                end_before = min(end_before, self.batches_end)
            tail = self._scan(segment, later, end_before)
            if tail is not None:
                segments = segments[: index + 1]
                self._end_in_damage(segments, tail, is_scanned=True)
                later = segments[index + 1 :]
            segment.transaction_index.lacks_rows = any(each.damage for each in segments[: index + 1])
            if index and not later and not segment.size_bytes:
                if tail is None and self._may_have_held_records(segment):
                    logger.error("%s is empty, but may have held acknowledged records", segment.path)
                    self.on_loss()
                if not is_behind_damage and not segments[index - 1].may_end_early and _is_reached(segments[index - 1]):
                    self._remove([segment])  # to the next start it would be one that has lost its records
                    return segments[:index], segment.base_offset
            next_offset = segments[-1].next_offset if tail is not None else segment.next_offset
            # A start does not scan a segment again after the next one is rolled, so its indexes must be on the device
            # then. An empty segment is scanned again, or it is synced after an append and a roll.
            is_done = next_offset <= self.checkpoints.recovery_point
            if not later and not is_done and not _has_index_files(self.names, segment) and segment.end_rebuild():
                break  # keeps the empty indexes in memory, which saves two files for each of thousands of small logs
            seal(segment, is_synced=is_done and segment.size_bytes > 0)
            if tail is not None:
                break
            if later:
                segment.forget_indexes()
        return segments, next_offset

    def _scan(self, segment: Segment, later: list[Segment], end_before: int) -> DamagedRange | None:
        """Scan one segment. If the log ends in it and bytes or records are missing or left after that, their range.

        `end_before`: as in `end_before_of`.
        """
        end_offset = later[0].base_offset if later else UNKNOWN_END
        following = next((each for each in later if each.size_bytes), None)  # an empty one may hold a gap
        behind = (-1, -1) if following is None else (following.epoch_at(0), following.base_offset)
        rest = scan_segment(
            segment, self.producers, self.epochs, self.transactions, end_offset, self._is_torn, behind,
            self.filed_epochs, end_before,
        )  # fmt: skip
        next_offset, size = segment.next_offset, segment.size_bytes
        self.batches_end = next_offset if size else min(next_offset, self.batches_end)
        if rest is None:
            if not later and next_offset < self._end_of_checkpoints():
                return DamagedRange(size, size, next_offset, UNKNOWN_END, "what was there is missing")
            if later:
                segment.next_offset = later[0].base_offset  # also where it ends early
            return None
        if later and next_offset == later[0].base_offset:
            segment.cut(rest.position)  # removes preallocated bytes: the next segment continues at this offset
            return None
        self._remove(later)  # before the truncation: a crash between the two must not leave them after a gap
        return rest._replace(first_offset=next_offset)

    def _may_have_held_records(self, active: Segment) -> bool:
        """Whether the empty last segment of a killed process may have lost its records.

        A new segment is created only for a record, and neither a truncation nor a start leaves one that is empty. One
        that is empty after retention is not above the checkpointed high watermark.
        """
        is_killed = self.ending is Ending.KILLED and not self.checkpoints.is_synced
        return is_killed and active.base_offset > self.checkpoints.high_watermark

    def _is_torn(self, damage: DamagedRange) -> bool:
        """Whether a loss of power can have caused the bad bytes: then the log ends there. Otherwise it is damage."""
        if damage.end_offset < 0:
            return True  # nothing readable follows
        checkpoints = self.checkpoints
        is_above = damage.first_offset >= checkpoints.recovery_point
        return self._explains_loss and not checkpoints.is_synced and is_above


def _is_reached(segment: Segment) -> bool:
    """Whether the batches of a segment reach the next one. The damage of one that is not scanned may not be known."""
    try:
        return position_of(segment, segment.next_offset - 1, wait=True) < segment.size_bytes
    except CorruptIndex:
        return False
    finally:
        segment.forget_indexes()


def _has_index_files(names: set[str], segment: Segment) -> bool:
    return any(file_name(segment.base_offset, suffix) in names for suffix in SUFFIXES[1:])


def _lost_behind(segments: list[Segment], number: int, bases: Iterable[int]) -> list[int]:
    """Those of `bases` that lie between this segment's base offset and the next one's."""
    end = segments[number + 1].base_offset if number + 1 < len(segments) else INT64_MAX
    return sorted(each for each in bases if segments[number].base_offset < each < end)


def _is_log_name(name: str) -> bool:
    return _SEGMENT_FILE.match(name) is not None and len(name) == 24 and name.endswith(LOG_SUFFIX)


def _is_file_name(name: str) -> bool:
    """Whether the log can do without the file. Without a .log records are missing, and it may be put right."""
    is_segment_file = _SEGMENT_FILE.match(name) is not None and not _is_log_name(name)
    return is_segment_file or name.removesuffix(TEMPORARY_SUFFIX) in _SMALL_FILES
