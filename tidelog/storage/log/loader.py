"""Opening a log: tidying what a crash left, deciding what must be scanned, making anew whatever is derived.

After a clean shutdown nothing is scanned. Otherwise every batch from the segment of the recovery point on is checked,
and indexes, producer state and leader epochs are made from what is there. A bad batch is one of two things. What a loss
of power may have kept from the device, above the recovery point, is a torn tail: the log ends before it, as in Kafka's
LogLoader. Anything else is damage: the log goes on behind it. No state of any file keeps a log from opening. The
scanning itself is `recovery.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

from tidelog.storage.files.checkpoints import (
    EXPLAINED_GAPS_FILE,
    LEADER_EPOCH_FILE,
    PARTITION_METADATA_FILE,
    CorruptCheckpoint,
    decode_explained_gaps,
    decode_leader_epochs,
    decode_partition_metadata,
    read_if_exists,
)
from tidelog.storage.files.disk import Disk
from tidelog.storage.log.recovery import examine_now, find_end, replay, scan_segment, take_over_findings
from tidelog.storage.log.swap import finish_swaps
from tidelog.storage.producers.producer_snapshots import SNAPSHOT_SUFFIX, ProducerSnapshots
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.segments.damage import CorruptIndex, DamagedRange, describe
from tidelog.storage.segments.examination import UNKNOWN_END
from tidelog.storage.segments.leader_epochs import LeaderEpochs, first_offset_of
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.reader import headers
from tidelog.storage.segments.segment import (
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SUFFIXES,
    TIME_INDEX_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
    Segment,
    file_name,
)
from tidelog.storage.segments.segments import Segments
from tidelog.storage.segments.transaction_index import CorruptTransactionIndex

logger = logging.getLogger("tidelog.storage")

_TEMPORARY_SUFFIX: Final = ".tmp"
# A log this small, without producers, is sooner scanned again than given a snapshot.
_SCANNED_AGAIN_BYTES_MAX: Final = 1024 * 1024
_METADATA_SNAPSHOT_DELETED: Final = ".checkpoint.deleted"


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
    """Damage hides batches that the producer state should know."""
    gaps_explained_below: int = 0
    scanned_bytes: int = 0
    """What was read and checked, because the last process did not close the log."""
    cut_bytes: int = 0
    """What of that was taken from the end."""
    filed_epochs: tuple[tuple[int, int], ...] = ()
    """(epoch, start offset) as the epoch file had them, where they were made anew from batches that were scanned."""


class Checkpoints(NamedTuple):
    """What the log directory's checkpoints say of one log."""

    log_start_offset: int = 0
    recovery_point: int = 0
    cleaned_offset: int = -1
    """Below it segments may end before the next one begins, if another broker's cleaner made them."""
    high_watermark: int = 0
    is_synced: bool = False
    """Each append was synced before it was spoken of: what readable batches follow was not torn by a loss of power."""


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
    """Open the log in `directory`, which exists. OSError, and nothing else, passes up.

    `on_loss` is called before something is cut from the end that may have been acknowledged.
    """
    loader = _Loader(disk, directory, config, checkpoints, ending, now_ms, jitter_ms)
    loader.on_loss = on_loss
    return loader.load()


def new_log(
    disk: Disk, directory: str, config: LogConfig, topic_id: bytes, *, now_ms: int, jitter_ms: int
) -> LoadedLog:
    """An empty log in a directory that is new."""
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
        self.on_loss: Callable[[], None] = lambda: None
        self.suspects_end = False
        self.filed_epochs: list[tuple[int, int]] = []
        self.snapshot_offset = 0
        self.scanned_bytes = self.cut_bytes = 0
        self.now_ms, self.jitter_ms = now_ms, jitter_ms
        self.names, orphans = _tidy(disk, directory)
        self.epochs, self.epochs_are_whole = self._read_epochs()
        self.gaps_explained_below = self._read_explained_gaps()
        earliest = self.epochs.earliest
        self.first_offset = first_offset_of(self.epochs, self.epochs_are_whole, checkpoints.log_start_offset, orphans)
        if earliest is not None and not checkpoints.is_synced and earliest[1] < checkpoints.log_start_offset:
            # The epoch file is written before the checkpoint is: one of them is damaged, and nothing is to be deleted
            # for it.
            self.checkpoints = checkpoints._replace(log_start_offset=earliest[1])
        self.producers = ProducerState()
        self.snapshots = ProducerSnapshots(disk, directory, _offsets_of(self.names, SNAPSHOT_SUFFIX))
        self.changed = False

    def load(self) -> LoadedLog:
        segments = self._drop_deleted(self._open_segments())
        if not self.checkpoints.is_synced:  # the metadata log begins with a snapshot, and is read whole
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
                "%s ends at %d, below its log start %d: begun anew", self.directory, log_end_offset, log_start_offset
            )
            self._remove(segments)
            segments = []
            self.epochs.clear()
        if not segments:
            log_end_offset = log_start_offset
            self.snapshots.delete_where(0, log_end_offset + 1)
            self.producers.clear(log_end_offset)
            segments = [
                Segment.create(self.disk, self.directory, log_start_offset, self.config, self.now_ms, self.jitter_ms)
            ]
        log_start_offset = max(self.checkpoints.log_start_offset, segments[0].base_offset)
        return self._finish(segments, log_start_offset, log_end_offset)

    def _finish(self, segments: list[Segment], log_start_offset: int, log_end_offset: int) -> LoadedLog:
        active = segments[-1]
        active.load_indexes()
        try:
            self._note_first_timestamp(active)
        except CorruptIndex as error:
            logger.warning("%s is examined: %s", active.path, error)
            examine_now(active)
            take_over_findings(active)
            self._note_first_timestamp(active)
        if log_end_offset > log_start_offset and not self._epochs_reach(log_start_offset):
            self._rebuild_epochs(segments, log_start_offset)
        self.epochs.truncate_from_end(log_end_offset)
        self.epochs.truncate_from_start(log_start_offset)
        self.snapshots.keep_only(segment.base_offset for segment in segments)
        self.producers.end_offset = log_end_offset
        self.producers.remove_expired(self.now_ms, self.config.producer_id_expiration_ms)
        lacks_producers = self._lacks_producers(segments)
        is_large = bool(self.producers) or len(segments) > 1 or active.size_bytes > _SCANNED_AGAIN_BYTES_MAX
        if is_large and not self.is_clean and not lacks_producers:
            self.snapshots.take(self.producers, sync=False)
        recovery_point = log_end_offset if self.is_clean else min(self.checkpoints.recovery_point, log_end_offset)
        return LoadedLog(
            Segments(self.disk, self.directory, segments),
            self.producers,
            self.snapshots,
            self.epochs,
            self._read_topic_id(),
            log_start_offset,
            log_end_offset,
            recovery_point,
            lacks_producers,
            self.gaps_explained_below,
            self.scanned_bytes,
            self.cut_bytes,
            tuple(self.filed_epochs),
        )

    def _note_first_timestamp(self, active: Segment) -> None:
        for _, header in headers(active):
            active.set_first_batch_timestamp(header.max_timestamp)
            break

    def _lacks_producers(self, segments: list[Segment]) -> bool:
        """Whether damage lies behind the snapshot that the producer state began with."""
        return any(each.end_offset > self.snapshot_offset for segment in segments for each in segment.damage)

    def _find_end(self, segments: list[Segment]) -> int:
        """After a clean stop: where the log ends. If its last segment lacks records, a new one begins behind them."""
        active = segments[-1]
        tail = find_end(active, self._end_of_checkpoints(), is_suspect=self.suspects_end)
        if tail is not None:
            self._end_in_damage(segments, tail)
        return segments[-1].next_offset

    def _end_of_checkpoints(self) -> int:
        """Where the log ended at least, if the checkpoints are right."""
        recovery_point, high_watermark = self.checkpoints.recovery_point, self.checkpoints.high_watermark
        return recovery_point if self.ending is Ending.POWER_LOSS else max(recovery_point, high_watermark)

    def _end_in_damage(self, segments: list[Segment], tail: DamagedRange) -> None:
        """Behind the last whole batch of the log, bytes that are none, or nothing, where records should be.

        Checkpoints carry no checksum, so that two of them must agree on how many those are. Then the log goes on behind
        them, in a new segment. Else it is cut, and does not speak for what it lost.
        """
        active, checkpoints = segments[-1], self.checkpoints
        end_offset = min(checkpoints.recovery_point, checkpoints.high_watermark)
        lost_bytes = active.size_bytes - tail.position
        if self.ending is Ending.KILLED and checkpoints.high_watermark - tail.first_offset <= lost_bytes:
            end_offset = checkpoints.high_watermark  # those bytes can hold so many records
        is_preallocated = self.config.preallocate and _is_zeros(active, tail.position)
        may_be_torn = self.ending is Ending.POWER_LOSS or is_preallocated
        if tail.first_offset < self._end_of_checkpoints() or (lost_bytes and not may_be_torn):
            logger.error(
                "%s lacks what may have been acknowledged, from offset %d on", self.directory, tail.first_offset
            )
            self.on_loss()
        if end_offset <= tail.first_offset:
            if lost_bytes:
                logger.warning(
                    "%s: cut at offset %d, %d bytes behind it are no batches",
                    active.path,
                    tail.first_offset,
                    lost_bytes,
                )
                active.cut(tail.position)
            return
        damage = tail._replace(end_position=active.size_bytes, end_offset=end_offset)
        logger.error("%s: %s", active.path, describe(damage))
        active.damage = (*active.damage, damage)
        for epoch, start_offset in self.filed_epochs:
            if epoch > self.epochs.latest and damage.holds(start_offset):
                self.epochs.assign(epoch, start_offset)
        active.next_offset = end_offset
        active.seal()
        active.sync_indexes()
        segments.append(Segment.create(self.disk, self.directory, end_offset, self.config, self.now_ms, self.jitter_ms))

    # Files

    def _open_segments(self) -> list[Segment]:
        transaction_indexes = set(_offsets_of(self.names, TRANSACTION_INDEX_SUFFIX))
        segments: list[Segment] = []
        for base_offset in sorted(_offsets_of(self.names, LOG_SUFFIX)):
            segment = self._open_segment(
                base_offset,
                self.disk.size_of(f"{self.directory}/{file_name(base_offset, LOG_SUFFIX)}"),
                has_transaction_index=base_offset in transaction_indexes,
            )
            if base_offset < max(self.checkpoints.cleaned_offset, self.gaps_explained_below):
                segment.may_have_gaps = segment.may_end_early = True
            if segments:
                segments[-1].next_offset = base_offset
            segments.append(segment)
        return segments

    def _open_segment(self, base_offset: int, size_bytes: int, *, has_transaction_index: bool) -> Segment:
        return Segment(
            self.disk,
            self.directory,
            base_offset,
            self.config,
            self.now_ms,
            size_bytes=size_bytes,
            has_transaction_index=has_transaction_index,
            jitter_ms=self.jitter_ms,
        )

    def _with_first(self, segments: list[Segment]) -> list[Segment]:
        """With an empty first segment, which is damaged, where the log's first file is missing.

        The log start is on the device before a file below it goes: records above it were not deleted.
        """
        if not segments:
            return self._with_only()
        first = segments[0]
        # A cleaned segment has an index beside it, even an empty one. This one was begun by a start that found no file.
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
        logger.error("%s: %s", missing.path, describe(missing.damage[0]))
        return segments

    def _with_only(self) -> list[Segment]:
        """The same where the log has no segment, if it had records: what is missing is then at its end."""
        start = self.checkpoints.log_start_offset if self.first_offset == INT64_MAX else self.first_offset
        is_end_known = self._end_of_checkpoints() > start
        was_emptied = self.epochs_are_whole and not len(self.epochs)
        if was_emptied or not (is_end_known or len(self.epochs)):
            return []
        logger.error("%s has no segment, though it had records", self.directory)
        if not is_end_known and self.ending is not Ending.POWER_LOSS:
            self.on_loss()
        return [self._begin_missing(start)]

    def _begin_missing(self, base_offset: int) -> Segment:
        self.disk.write_file(f"{self.directory}/{file_name(base_offset, LOG_SUFFIX)}", b"", sync=False)
        return self._open_segment(base_offset, 0, has_transaction_index=False)

    def _drop_deleted(self, segments: list[Segment]) -> list[Segment]:
        """Without the segments that lie wholly below the log start.

        Their deletion may have reached the device for some and not for others: a gap there is none of the log.
        """
        count = 0
        while count + 1 < len(segments) and segments[count + 1].base_offset <= self.checkpoints.log_start_offset:
            count += 1
        for segment in segments[:count]:
            for path in segment.paths():
                self.disk.remove(path)
        return segments[count:]

    def _read_epochs(self) -> tuple[LeaderEpochs, bool]:
        """The cache, and whether it is to be believed below the recovery point."""
        data = read_if_exists(self.disk, f"{self.directory}/{LEADER_EPOCH_FILE}")
        if not data:
            return LeaderEpochs(), False
        try:
            return LeaderEpochs(decode_leader_epochs(data)), True
        except CorruptCheckpoint as error:
            logger.warning("%s/%s is rebuilt from the log: %s", self.directory, LEADER_EPOCH_FILE, error)
            return LeaderEpochs(), False

    def _read_explained_gaps(self) -> int:
        path = f"{self.directory}/{EXPLAINED_GAPS_FILE}"
        data = read_if_exists(self.disk, path)
        if not data:
            return 0
        try:
            return decode_explained_gaps(data)
        except CorruptCheckpoint as error:
            logger.warning("%s is unreadable, so that gaps are to be explained again: %s", path, error)
            return 0

    def _read_topic_id(self) -> bytes | None:
        data = read_if_exists(self.disk, f"{self.directory}/{PARTITION_METADATA_FILE}")
        if not data:
            return None
        try:
            return decode_partition_metadata(data)
        except CorruptCheckpoint as error:
            logger.warning("%s/%s is unreadable: %s", self.directory, PARTITION_METADATA_FILE, error)
            return None

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
        """Mend the indexes of the segments below `first_unflushed`; from which segment on to scan after all."""
        for number in range(first_unflushed):
            segment = segments[number]
            try:
                _ = segment.transaction_index.rows
            except CorruptTransactionIndex as error:
                logger.warning("the log is scanned from there on: %s", error)
                return number  # only a replay of the producers can make it anew
            try:
                segment.load_indexes()
                if number + 1 < len(segments):
                    segment.check_indexes_end_below(segments[number + 1].base_offset)
            except CorruptIndex as error:
                logger.warning("an index is rebuilt: %s", error)
                if number + 1 == len(segments):
                    segment.begin_rebuild()
                    self.suspects_end = True
                    continue
                examine_now(segment)
                take_over_findings(segment)
            if number + 1 < len(segments):
                segment.forget_indexes()
        return first_unflushed

    # What is derived from the log

    def _load_producers(self, segments: list[Segment], log_start_offset: int, end_offset: int) -> None:
        """The producer state at `end_offset`: the newest usable snapshot, and the batches after it."""
        entries, offset = self.snapshots.load_latest(log_start_offset, end_offset)
        self.snapshot_offset = offset
        self.producers.load(entries, offset)
        replay(self.producers, segments, end_offset)

    def _epochs_reach(self, log_start_offset: int) -> bool:
        """Whether the cache tells of the first record. After a crash the log may start earlier than it knows; a file
        that was cut, or that has a wrong offset, may be readable all the same."""
        earliest = self.epochs.earliest
        return self.epochs_are_whole and earliest is not None and earliest[1] <= log_start_offset

    def _rebuild_epochs(self, segments: list[Segment], log_start_offset: int) -> None:
        self.epochs.clear()
        for segment in segments:
            try:
                self._note_epochs(segment)
            except CorruptIndex as error:
                logger.warning("%s is examined: %s", segment.path, error)
                examine_now(segment)
                take_over_findings(segment)
                self._note_epochs(segment)
        entries = list(self.epochs)
        is_hidden = any(each.holds(log_start_offset) for segment in segments for each in segment.damage)
        if entries and entries[0][1] > log_start_offset and not is_hidden:
            # The first records were compacted; else every start would take the file for a cut one.
            self.epochs.clear()
            for number, (epoch, start_offset) in enumerate(entries):
                self.epochs.assign(epoch, start_offset if number else log_start_offset)

    def _note_epochs(self, segment: Segment) -> None:
        for _, header in headers(segment):
            if header.partition_leader_epoch > self.epochs.latest:
                self.epochs.assign(header.partition_leader_epoch, header.base_offset)

    # Scanning

    def _recover(self, segments: list[Segment], first_unflushed: int) -> tuple[list[Segment], int]:
        """Scan the segments from `first_unflushed` on; those that are left, and the log end offset."""
        next_offset = segments[first_unflushed].base_offset
        # Epochs of what is scanned are taken from the batches: the file may speak of a tail that an earlier crash took.
        self.filed_epochs = list(self.epochs)
        self.epochs.truncate_from_end(next_offset)
        if not first_unflushed:
            self.epochs_are_whole = True
        for index in range(first_unflushed, len(segments)):
            segment, later = segments[index], segments[index + 1 :]
            if index > first_unflushed:
                self.producers.end_offset = segment.base_offset
                if not self._lacks_producers(segments[:index]):
                    self.snapshots.take(self.producers, sync=False)
            tail = self._scan(segment, later)
            segment.transaction_index.lacks_rows = any(each.damage for each in segments[: index + 1])
            if tail is not None:
                segments = segments[: index + 1]
                self._end_in_damage(segments, tail)
                later = segments[index + 1 :]
            elif index and not later and self._may_have_held_records(segment):
                logger.error("%s is empty, and may have held what was acknowledged", segment.path)
                self.on_loss()
            next_offset = segments[-1].next_offset if tail is not None else segment.next_offset
            # Once a segment is rolled after it, no start scans it again: then its indexes must be on the device. An
            # empty one is scanned again, or filled and synced as it is rolled.
            is_done = next_offset <= self.checkpoints.recovery_point
            if not later and not is_done and not _has_index_files(self.names, segment) and segment.end_rebuild():
                break  # as if it had never been closed: two files less for each of thousands of small logs
            if segment.seal() and segment.size_bytes and is_done:
                segment.sync_indexes()
            if tail is not None:
                break
            if later:
                segment.forget_indexes()
        return segments, next_offset

    def _scan(self, segment: Segment, later: list[Segment]) -> DamagedRange | None:
        """Scan one segment. Where the log ends in it: what is behind that, if anything is or should be."""
        end_offset = later[0].base_offset if later else UNKNOWN_END
        epoch_max = later[0].epoch_at(0) if later else -1
        rest = scan_segment(
            segment, self.producers, self.epochs, end_offset, self._is_torn, epoch_max, self.filed_epochs,
            self.ending is Ending.POWER_LOSS,
        )  # fmt: skip
        next_offset, size = segment.next_offset, segment.size_bytes
        if rest is None:
            if not later and next_offset < self._end_of_checkpoints():
                return DamagedRange(size, size, next_offset, UNKNOWN_END, "what was there is missing")
            return None
        if later and next_offset == later[0].base_offset:
            segment.cut(rest.position)  # preallocated bytes: the next segment goes on there
            return None
        self._remove(later)  # first, or a crash before the cut would leave them behind the gap
        return rest._replace(first_offset=next_offset)

    def _may_have_held_records(self, active: Segment) -> bool:
        """Whether the empty last segment of a killed process has lost what it held.

        A segment is begun behind others when there is a record for it. One that retention, or a cut, has left empty is
        no longer above the high watermark once that is checkpointed.
        """
        is_killed = self.ending is Ending.KILLED and not self.checkpoints.is_synced
        return is_killed and not active.size_bytes and active.base_offset > self.checkpoints.high_watermark

    def _is_torn(self, damage: DamagedRange) -> bool:
        """Whether a loss of power explains it: then the log ends there. Else it is damage, and the log goes on."""
        if damage.end_offset < 0:
            return True  # nothing readable follows
        checkpoints = self.checkpoints
        is_unsynced = damage.first_offset >= checkpoints.recovery_point and not checkpoints.is_synced
        return self.ending is Ending.POWER_LOSS and is_unsynced


def _is_zeros(segment: Segment, position: int) -> bool:
    while position < segment.size_bytes:
        data = segment.file.read_at(1024 * 1024, position)
        if not data or data.strip(b"\0"):
            return not data
        position += len(data)
    return True


def _has_index_files(names: set[str], segment: Segment) -> bool:
    return any(file_name(segment.base_offset, suffix) in names for suffix in SUFFIXES[1:])


def _offsets_of(names: set[str], suffix: str) -> list[int]:
    length = 20 + len(suffix)
    return [int(name[:20]) for name in names if len(name) == length and name.endswith(suffix) and name[:20].isdecimal()]


def _tidy(disk: Disk, directory: str) -> tuple[set[str], set[int]]:
    """Remove what a crash may have left behind, finish interrupted swaps of segments.

    Returns the names that remain, and the base offsets of indexes that had no segment.
    """
    names = {entry.name for entry in disk.list_directory(directory) if not entry.is_directory}
    for name in sorted(names):
        is_deleted = name.endswith(DELETED_SUFFIX) and not name.endswith(_METADATA_SNAPSHOT_DELETED)
        if is_deleted or name.endswith(_TEMPORARY_SUFFIX):
            disk.remove(f"{directory}/{name}")
            names.discard(name)
    finish_swaps(disk, directory, names)
    bases = set(_offsets_of(names, LOG_SUFFIX))
    orphans = set(_offsets_of(names, INDEX_SUFFIX)) - bases
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX):
        for base_offset in set(_offsets_of(names, suffix)) - bases:
            name = f"{base_offset:020d}{suffix}"
            disk.remove(f"{directory}/{name}")
            names.discard(name)
    return names, orphans
