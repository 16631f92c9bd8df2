"""The durability of one log: which bytes are on the device, and the task that syncs more.

Group commit: one sync covers all appends that arrived during the last one. The owner's thread decides (`begin`,
`finish`); any thread runs the task, which only syncs. Invariants: the recovery point moves only after every byte below
it, the directory entries of its files and its leader epochs are on the device; under the flush policy
`committable_offset` never passes a record that is not on the device.
"""

from __future__ import annotations

import logging
from typing import Protocol

from tidelog.storage.files.checkpoints import TRANSACTION_SUMS_FILE, encode_transaction_sums
from tidelog.storage.files.disk import Disk, File, is_exhaustion, is_full
from tidelog.storage.files.log_files import EpochContent, LogFiles
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.log_config import INT64_MAX
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.segments import Segments

logger = logging.getLogger("tidelog.storage")


class FlushTask:
    """The files that one flush syncs, collected on the owner's thread."""

    __slots__ = (
        "_directories", "_disk", "_epochs", "_files", "_log_files", "_paths", "_sums", "epochs", "error", "segments",
        "sums", "target_offset",
    )  # fmt: skip

    def __init__(self, disk: Disk, log_files: LogFiles, target_offset: int) -> None:
        self._disk = disk
        self._log_files = log_files
        self.target_offset = target_offset
        self.segments: list[tuple[Segment, int]] = []
        self._files: list[File] = []
        self._paths: list[str] = []
        self._directories: list[str] = []
        self._epochs: EpochContent | None = None
        self._sums: bytes | None = None  # the content of the file of checksums
        self.epochs: LeaderEpochs | None = None
        self.sums: dict[int, tuple[int, int]] | None = None
        self.error: OSError | None = None

    def add_segment(self, segment: Segment) -> None:
        file = segment.file
        file.pin()
        self._files.append(file)
        segment.synced_bytes = max(0, segment.synced_bytes)
        self.segments.append((segment, segment.size_bytes))

    @property
    def paths(self) -> list[str]:
        return self._paths

    @property
    def directories(self) -> list[str]:
        return self._directories

    def add_paths(self, paths: list[str]) -> None:
        self._paths.extend(paths)

    def add_directories(self, paths: list[str]) -> None:
        self._directories.extend(paths)

    def set_epochs(self, content: EpochContent, epochs: LeaderEpochs) -> None:
        self._epochs, self.epochs = content, epochs

    def set_sums(self, sums: dict[int, tuple[int, int]]) -> None:
        self._sums, self.sums = encode_transaction_sums(sums), sums

    def prepare(self) -> bool:
        """With `put_in_place`, in place of `run`, for a caller that syncs the whole file system after both.

        Writes the small files to temporary ones. Whether there are any.
        """
        if self._epochs is not None:
            self._epochs.prepare()
        if self._sums is not None:
            self._log_files.prepare(TRANSACTION_SUMS_FILE, self._sums)
        return self._epochs is not None or self._sums is not None

    def put_in_place(self) -> None:
        if self._epochs is not None:
            self._epochs.put_in_place()
        if self._sums is not None:
            self._log_files.put_in_place(TRANSACTION_SUMS_FILE)

    def run(self) -> None:
        """Sync, once, on any thread. `finish_flush` raises a failure."""
        try:
            if self._epochs is not None:
                self._epochs.write()
            if self._sums is not None:
                self._log_files.replace(TRANSACTION_SUMS_FILE, lambda: self._sums or b"", sync=True)
            for file in self._files:
                file.sync()
            for sync, paths in ((self._disk.sync_file, self._paths), (self._disk.sync_directory, self._directories)):
                for path in paths:
                    try:
                        sync(path)
                    except FileNotFoundError:
                        pass  # deleted since `begin`
        except OSError as error:
            self.error = error

    def unpin(self) -> None:
        for file in self._files:
            file.unpin()


class Durability:
    """The flush state of one log."""

    __slots__ = (
        "_directories", "_disk", "_filed_sums", "_paths", "_seal_in_task", "_sums", "_task", "_truncated_to",
        "_unsynced_seal", "blocked_from", "files", "flush_messages", "is_abandoned", "is_new", "is_wanted",
        "lacks_sums", "last_flush_ms", "recovery_point",
    )  # fmt: skip

    def __init__(
        self,
        disk: Disk,
        directory: str,
        recovery_point: int,
        flush_messages: int,
        now_ms: int,
        filed_sums: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        """`filed_sums`: the checksums of transaction indexes as their file has them; None without a file."""
        self._disk = disk
        self.files = LogFiles(disk, directory)
        self.recovery_point = recovery_point
        self.flush_messages = flush_messages
        self.blocked_from = -1
        """The first offset that may not be acknowledged before the next flush, -1: none."""
        self.is_new = False
        """Whether the log's topic id may not be on the device: no record is acknowledged before the next flush."""
        self.is_wanted = False
        """A flush is needed without a waiting acknowledgement: a segment was rolled, or flush.ms has passed."""
        self.lacks_sums = False
        """A flush is needed without unsynced records: a cleaning has changed the checksums of transaction indexes."""
        self.last_flush_ms = now_ms
        self._paths: dict[str, None] = {}
        self._directories: dict[str, None] = {}
        self._filed_sums = filed_sums
        self._sums: dict[int, tuple[int, int]] | None = None  # to be written by the next flush
        self._task: FlushTask | None = None
        self._truncated_to = INT64_MAX
        self._unsynced_seal = INT64_MAX
        self._seal_in_task = INT64_MAX
        self.is_abandoned = False

    @property
    def checkpointable(self) -> int:
        """The recovery point for the checkpoint: not above a segment whose indexes are not on the device yet."""
        return min(self.recovery_point, self._unsynced_seal, self._seal_in_task)

    @property
    def flush_at(self) -> int:
        """The log end offset from which on a flush is due."""
        return self.recovery_point + (1 if self.is_new else self.flush_messages)

    @property
    def is_running(self) -> bool:
        return self._task is not None

    def note_append(self, first_offset: int, log_end_offset: int) -> None:
        """Block acknowledgements from `first_offset` on. Called for appends that reach `flush_at`."""
        if self.blocked_from < 0 and log_end_offset >= self.flush_at:
            self.blocked_from = first_offset

    def block_from(self, offset: int) -> None:
        """Acknowledge no record from `offset` on before the next flush, which is due now."""
        if not 0 <= self.blocked_from <= offset:
            self.blocked_from = offset

    def is_due(self, log_end_offset: int) -> bool:
        if self._task is not None:
            return False
        return self.blocked_from >= 0 or self.lacks_sums or (self.is_wanted and log_end_offset > self.checkpointable)

    def want_by_time(self, now_ms: int, flush_ms: int, log_end_offset: int) -> None:
        """Request a flush if records have waited for the device for `flush_ms`."""
        if now_ms - self.last_flush_ms >= flush_ms and log_end_offset > self.recovery_point:
            self.is_wanted = True

    def note_seal(self, segment: Segment) -> None:
        """The segment was sealed. Its indexes are in their files, but not on the device."""
        self._unsynced_seal = min(self._unsynced_seal, segment.next_offset - 1)
        self.is_wanted = True

    def is_settled(self, log_end_offset: int) -> bool:
        """Whether nothing waits for a sync."""
        return self.checkpointable >= log_end_offset and not self._paths and not self._directories

    def note_path(self, path: str) -> None:
        """A small file was written. The next flush syncs it."""
        self._paths[path] = None

    def is_noted(self, path: str) -> bool:
        return path in self._paths

    def note_directory(self, path: str) -> None:
        """A file was created, renamed or removed in the directory. The next flush syncs it."""
        self._directories[path] = None

    def note_sums(self, segments: Segments, *, with_active: bool = False) -> bool:
        """Let the next flush write the checksums of the transaction indexes, if they have changed. Whether they have.

        After a kill the start scans the active segment, so that only a clean stop needs the checksum of its index.
        """
        segments.sums_are_stale = False
        sums = segments.transaction_sums(with_active=with_active)
        is_changed = sums != self._filed_sums and bool(sums or self._filed_sums is not None)
        self._sums = sums if is_changed else None
        return is_changed

    def want_sums(self, segments: Segments) -> None:
        """Request a flush, if a cleaning has changed the checksums of the transaction indexes.

        Without the new ones a start after a kill takes these indexes for damaged, and scans the cleaned log.
        """
        under_way = None if self._task is None else self._task.sums
        filed = self._filed_sums if under_way is None else under_way
        if segments.transaction_sums(with_active=False) != (filed or {}):
            self.lacks_sums = self.is_wanted = True

    def write_sums(self, segments: Segments) -> None:
        """Write the checksums of the transaction indexes at once, to the device. Raises OSError."""
        sums = segments.transaction_sums(with_active=False)
        if self._task is not None and self._task.sums is not None:
            self._task.set_sums(sums)  # it would write those from before, perhaps after this
        self.files.replace(TRANSACTION_SUMS_FILE, lambda: encode_transaction_sums(sums), sync=True)
        self._filed_sums, self._sums = sums, None
        segments.sums_are_stale = self.lacks_sums = False

    def moved(self, old: str, new: str) -> None:
        """The log's directory was renamed, under the lock of `files`. No flush may be running."""
        assert self._task is None, "a flush knows the old names"
        self.files.directory = new
        self._paths = {path.replace(old, new, 1): None for path in self._paths}
        self._directories = {path.replace(old, new, 1): None for path in self._directories}

    def begin(self, segments: Segments, epochs: LeaderEpochs, log_end_offset: int) -> FlushTask:
        assert self._task is None, "one flush at a time"
        task = self._task = FlushTask(self._disk, self.files, log_end_offset)
        self._truncated_to = INT64_MAX
        first = self.checkpointable
        self._seal_in_task, self._unsynced_seal = self._unsynced_seal, INT64_MAX
        try:
            for segment in segments.condemned:
                # A start scans them where the log start behind them is not checkpointed: the log would end in one.
                if segment.next_offset > first and segment.synced_bytes < segment.size_bytes:
                    task.add_segment(segment)
            for segment in segments.from_offset(first):
                if segment.synced_bytes < segment.size_bytes:
                    task.add_segment(segment)
                if segment is not segments.active:
                    segment.seal()
                    task.add_paths(segment.paths()[1:])
                    self.note_directory(segments.directory)
        except OSError:  # a file could not be opened or written: undo the start of the flush
            task.unpin()
            for segment, _ in task.segments:
                segment.synced_bytes = -1
            self._task = None
            self._seal_in_task, self._unsynced_seal = INT64_MAX, self._seal_in_task
            raise
        task.add_paths([path for path in self._paths if self._disk.exists(path)])
        self._paths.clear()
        task.add_directories(list(self._directories))
        self._directories.clear()
        if epochs.is_dirty:
            task.set_epochs(self.files.epochs(epochs), epochs)
            epochs.is_dirty = False
        self.lacks_sums = False
        if segments.sums_are_stale:
            self.note_sums(segments)
        if self._sums is not None:
            task.set_sums(self._sums)
            self._sums = None
        return task

    def finish(self, task: FlushTask, log_end_offset: int, now_ms: int | None) -> None:
        """Apply the result of the task.

        Raises OSError if it failed: the log must not be used any more. After a mere shortage of resources it stays
        usable, and the next flush syncs the same files.
        """
        task.unpin()
        if self.is_abandoned:
            return
        assert task is self._task
        self._task = None
        if task.error is not None:
            if is_exhaustion(task.error):
                self._note_again(task)
            raise task.error
        if task.sums is not None:
            self._filed_sums = task.sums
        if self._truncated_to == INT64_MAX:
            for segment, size_bytes in task.segments:
                if segment.synced_bytes >= 0:  # otherwise it was trimmed during the task
                    segment.synced_bytes = max(segment.synced_bytes, size_bytes)
        self.recovery_point = max(self.recovery_point, min(task.target_offset, self._truncated_to))
        self._seal_in_task = INT64_MAX
        self.is_new = self.is_new and bool(self._paths)  # noted since `begin`
        self.is_wanted = self.lacks_sums or self._unsynced_seal != INT64_MAX
        if now_ms is not None:
            self.last_flush_ms = now_ms
        is_due = log_end_offset >= self.flush_at
        self.blocked_from = self.recovery_point if is_due else -1

    def _note_again(self, task: FlushTask) -> None:
        for segment, _ in task.segments:
            segment.synced_bytes = -1
        self._paths.update(dict.fromkeys(task.paths))
        self._directories.update(dict.fromkeys(task.directories))
        if task.epochs is not None:
            task.epochs.is_dirty = True
        if task.sums is not None and self._sums is None:
            self._sums, self.lacks_sums = task.sums, True
        self._unsynced_seal = min(self._unsynced_seal, self._seal_in_task)
        self._seal_in_task = INT64_MAX
        self.is_wanted = True

    def truncated(self, offset: int) -> bool:
        """The log was truncated to `offset`. True if the recovery point moved back."""
        self._truncated_to = min(self._truncated_to, offset)
        self._unsynced_seal = min(self._unsynced_seal, max(0, offset - 1))
        if self.blocked_from >= offset:
            self.blocked_from = -1
        if self.recovery_point > offset:
            self.recovery_point = offset
            return True
        return False

    def truncate_epochs(self, epochs: LeaderEpochs, end_offset: int) -> None:
        """The log was truncated. Raises OSError.

        A running task writes the epochs from before. The next records may be of an older epoch, and be taken for
        damaged after a loss of power.
        """
        epochs.truncate_from_end(end_offset)
        if self._task is not None:
            self.files.epochs(epochs).write()

    def file_epochs(self, epochs: LeaderEpochs) -> None:
        """Write epochs that were corrected by the batches. By the file from before, a start after a kill would take
        these batches for damaged. Without space the next flush writes them. Raises OSError.
        """
        if not epochs.is_dirty:
            return
        try:
            self.files.epochs(epochs).write()
        except OSError as error:
            if not (is_full(error) or is_exhaustion(error)):
                raise
            return
        epochs.is_dirty = False

    def started_at(self, offset: int) -> None:
        """The log was emptied and begins at `offset`. Nothing waits for a sync."""
        self.recovery_point = offset
        self.blocked_from = -1

    def abandon(self) -> None:
        """The log is deleted or unusable. The result of a running flush is ignored."""
        self.is_abandoned = self.files.is_over = True
        self._task = None


class LogInUse(Protocol):
    """The part of `partition_log.PartitionLog` that is used here."""

    disk: Disk
    durability: Durability
    flush_at: int
    segments: Segments

    def roll(self, now_ms: int, base_offset: int = -1) -> Segment: ...


def leave_removed_file(log: LogInUse, now_ms: int) -> None:
    """Start a new segment where another program has removed the file of the active one. Raises OSError.

    Its descriptor accepts writes that no later start would have.
    """
    active = log.segments.active
    if not active.is_open or log.disk.exists(active.path):
        return
    logger.error("%s was removed while it was in use: what is appended now gets another file", active.path)
    if active.size_bytes:
        log.roll(now_ms)
    else:
        active.release()


def await_first_flush(log: LogInUse) -> None:
    """The next append waits for a flush.

    After a loss of power, records without a topic id could be served as those of another topic of that name.
    """
    log.durability.is_new = True
    log.flush_at = log.durability.flush_at
