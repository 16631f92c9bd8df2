"""All logs of one log.dir: formatting and locking it, finding its partitions, checkpoints, the clean-shutdown marker.

One instance per directory; which directory a partition goes to is the caller's choice, and so is what follows from an
OSError: `fail`, as a rule. Invariants: the marker is gone, durably, before anything can be written; a segment's files
are renamed only after the log start above it is checkpointed; a checkpoint never promises what is not on the device;
nothing is written after `fail`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tidelog.protocol.uuids import METADATA_TOPIC_ID, uuid_from_text
from tidelog.storage.files.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    HIGH_WATERMARK_FILE,
    LOG_START_FILE,
    META_PROPERTIES_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    CheckpointTask,
    OffsetCheckpoints,
    decode_clean_shutdown,
    encode_clean_shutdown,
    encode_leader_epochs,
    encode_partition_metadata,
    read_if_exists,
    replace_file,
    require_formatted,
    write_epochs,
)
from tidelog.storage.files.disk import DirectoryInUse, Disk, Lock
from tidelog.storage.files.log_names import (
    DELETE_SUFFIX,
    FUTURE_SUFFIX,
    STRAY_SUFFIX,
    away_name,
    future_name,
    parse_future_name,
    parse_name,
)
from tidelog.storage.files.meta_properties import ForeignDirectory, check_properties, format_directory, make_durably
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.log.loader import Checkpoints, Ending, LoadedLog, load_log, new_log
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.retention import segment_jitter_ms

logger = logging.getLogger("tidelog.storage")

METADATA_TOPIC: Final = "__cluster_metadata"
LOCK_FILE: Final = ".lock"

TopicPartition = tuple[str, int]


@dataclass(slots=True)
class Recovery:
    """What opening the logs of a directory had to scan."""

    logs: int = 0
    scanned_bytes: int = 0
    cut_bytes: int = 0

    def add(self, loaded: LoadedLog) -> None:
        self.logs += loaded.scanned_bytes > 0
        self.scanned_bytes += loaded.scanned_bytes
        self.cut_bytes += loaded.cut_bytes


class LogDirectory:
    sync_at_once_from = 32
    """From that many logs on, closing syncs the file system once instead of every file."""

    def __init__(self, disk: Disk, path: str, lock: Lock, properties: dict[str, str], is_new: bool) -> None:
        self._disk = disk
        self.path = path
        self._lock = lock
        self.cluster_id = properties["cluster.id"]
        self.node_id = int(properties["node.id"])
        self.directory_id = uuid_from_text(properties["directory.id"])
        self.logs: dict[TopicPartition, PartitionLog] = {}
        self.futures: dict[TopicPartition, PartitionLog] = {}
        """Replicas on their way here from another directory."""
        self.offline: dict[TopicPartition, str] = {}
        """Partitions whose logs are damaged beyond what a start can mend, and why."""
        self.failure: str | None = None
        """Why the directory is out of use, None while it is in use."""
        self._checkpoints = OffsetCheckpoints(disk, path)
        self._cleaned: dict[TopicPartition, int] | None = None  # as last checkpointed, or about to be
        self._cleaned_is_written = True
        if is_new:
            self._write_cleaned()
        self._is_loaded = is_new  # else the checkpoints and the marker speak of logs that are not known here yet
        self.metadata_log: PartitionLog | None = None
        self._doomed: list[tuple[int, str]] = []
        self._unmoved: dict[TopicPartition, str] = {}  # to be deleted or set aside, and could not be renamed yet
        marker = read_if_exists(disk, f"{path}/{CLEAN_SHUTDOWN_FILE}")
        self.was_clean = marker is not None
        """The last owner closed it properly, so nothing needs to be scanned."""
        self.ending = Ending.POWER_LOSS if marker is None else Ending.CLEAN
        """How the last owner ended; KILLED is the caller's to say, who knows whether the machine ran on."""
        self.recovery = Recovery()
        self.lost: set[TopicPartition] = set()
        """Logs from whose ends something was cut that may have been acknowledged."""
        self._on_metadata_loss: Callable[[], None] = lambda: None
        self.on_loss: Callable[[], None] = lambda: None
        """Called before a log is cut so: from then on this node must not speak for what it had."""
        self.clean_broker_epoch = -1 if marker is None else decode_clean_shutdown(marker)
        """In which broker epoch that was, -1 if it was not, or is not known (KIP-966)."""
        if self.was_clean:
            disk.remove(f"{path}/{CLEAN_SHUTDOWN_FILE}")
            disk.sync_directory(path)

    @classmethod
    def open(
        cls, disk: Disk, path: str, *, node_id: int, cluster_id: str | None, directory_id: str | None = None
    ) -> LogDirectory:
        """Lock the directory and check whose it is; an empty or missing one is formatted.

        An id of None takes what is there, or invents one. Raises ForeignDirectory, DirectoryInUse, OSError.
        """
        make_durably(disk, path)
        data = read_if_exists(disk, f"{path}/{META_PROPERTIES_FILE}")
        if data is None:
            strangers = sorted(e.name for e in disk.list_directory(path) if not _is_harmless(e.name))
            if strangers:
                raise ForeignDirectory(
                    f"{path} is not empty and has no {META_PROPERTIES_FILE}: it holds {strangers[0]}"
                )
        try:
            lock = disk.lock(f"{path}/{LOCK_FILE}")
        except DirectoryInUse:
            raise DirectoryInUse(f"{path} is in use by another node, which holds its {LOCK_FILE} file") from None
        try:
            if data is None:
                properties = format_directory(disk, path, node_id, cluster_id, directory_id)
            else:
                properties = check_properties(disk, path, data, node_id, cluster_id)
                if directory_id not in (None, properties["directory.id"]):
                    raise ForeignDirectory(f"{path} is directory {properties['directory.id']}, not {directory_id}")
            return cls(disk, path, lock, properties, is_new=data is None)
        except BaseException:
            lock.release()
            raise

    # Logs

    def load(self, config_for: Callable[[str], LogConfig], now_ms: int) -> dict[TopicPartition, PartitionLog]:
        """Open every partition; damaged ones are in `offline`. `config_for` takes a topic name. Raises OSError."""
        recovery_points = self._checkpoints.read(RECOVERY_POINT_FILE)
        log_starts = self._checkpoints.read(LOG_START_FILE)
        high_watermarks = self._checkpoints.read(HIGH_WATERMARK_FILE)
        cleaned = self._checkpoints.read(CLEANER_OFFSET_FILE)
        if self._disk.exists(f"{self.path}/{CLEANER_OFFSET_FILE}"):
            self._cleaned = cleaned
        for entry in self._disk.list_directory(self.path):
            if not entry.is_directory:
                continue
            if entry.name.endswith(DELETE_SUFFIX):
                self._doomed.append((now_ms, f"{self.path}/{entry.name}"))
                continue
            is_future = entry.name.endswith(FUTURE_SUFFIX)
            key = parse_future_name(entry.name) if is_future else parse_name(entry.name)
            if key is None or key[0] == METADATA_TOPIC:
                continue
            # Where nobody says what was cleaned, anything may have been.
            cleaned_offset = cleaned.get(key, -1 if self._cleaned is not None else INT64_MAX)
            checkpoints = Checkpoints(
                log_starts.get(key, 0), recovery_points.get(key, 0), cleaned_offset, high_watermarks.get(key, 0)
            )
            try:
                log = self._open_log(*key, config_for(key[0]), checkpoints, now_ms, entry.name)
            except (CorruptLog, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                # Something is wrong with these files; any other OSError speaks of the device.
                logger.error("%s/%s stays offline: %s", self.path, entry.name, error)
                if not is_future:
                    self.offline[key] = str(error)
                continue
            log.set_high_watermark(high_watermarks.get(key, 0))
            log.cleaned_offset = cleaned_offset if cleaned_offset <= log.log_end_offset else -1
            (self.futures if is_future else self.logs)[key] = log
        self._is_loaded = True
        return dict(self.logs)

    def create_log(self, topic: str, partition: int, topic_id: bytes, config: LogConfig, now_ms: int) -> PartitionLog:
        """A new, empty log; durable with its first flush."""
        key = (topic, partition)
        self._move_away(key, now_ms)
        log = self._create(topic, partition, topic_id, config, now_ms)
        self.logs[key] = log
        if self._cleaned and key in self._cleaned:
            self._write_cleaned()  # that was another log of this name, and must not be believed of this one
        return log

    def open_metadata_log(
        self,
        config: LogConfig,
        now_ms: int,
        log_start_in: Callable[[list[str]], int] = lambda names: 0,
        on_loss: Callable[[str], None] = lambda directory: None,
    ) -> PartitionLog:
        """`__cluster_metadata-0`, opened or created. After an unclean end it is scanned whole, as Kafka does.

        `log_start_in` says where it begins, from the names of its files: its snapshots are not known here.
        `on_loss` is called with its directory before something is cut from it that may have been acknowledged.
        """
        assert self.metadata_log is None
        directory = f"{self.path}/{METADATA_TOPIC}-0"
        if self._disk.exists(directory):
            log_start = log_start_in([entry.name for entry in self._disk.list_directory(directory)])
            self._on_metadata_loss = lambda: on_loss(directory)
            log = self._open_log(METADATA_TOPIC, 0, config, Checkpoints(log_start, is_synced=True), now_ms)
        else:
            log = self._create(METADATA_TOPIC, 0, METADATA_TOPIC_ID, config, now_ms)
        self.metadata_log = log
        return log

    def set_topic_id(self, topic: str, partition: int, topic_id: bytes) -> None:
        """Write down the id of a topic whose log did not know it, because a crash took its partition.metadata."""
        log = self.logs[topic, partition]
        path = f"{log.directory}/{PARTITION_METADATA_FILE}"
        self._disk.write_file(path, encode_partition_metadata(topic_id), sync=False)
        log.durability.note_path(path)
        log.durability.note_directory(log.directory)
        log.topic_id = topic_id

    def delete_log(self, topic: str, partition: int, now_ms: int) -> None:
        """Take the log away: its directory is renamed now and removed by `maintain` after file.delete.delay.ms.

        An offline one goes with the next `maintain`. OSError when it cannot be renamed now: `maintain` tries again.
        """
        log = self.logs.get((topic, partition))
        target = self._rename_away(topic, partition, DELETE_SUFFIX)
        self._doomed.append((now_ms + (log.config.file_delete_delay_ms if log else 0), target))

    def _move_away(self, key: TopicPartition, now_ms: int) -> None:
        """What could not be before; else a new log would be made of the files of the old one. Raises OSError."""
        kind = self._unmoved.get(key)
        if kind == DELETE_SUFFIX:
            self.delete_log(*key, now_ms)
        elif kind is not None:
            self._rename_away(*key, kind)
        assert key not in self.logs, key

    def set_aside(self, topic: str, partition: int) -> str:
        """Take the log away but keep its files, in the directory that is returned; as Kafka does with stray ones."""
        return self._rename_away(topic, partition, STRAY_SUFFIX)

    def _rename_away(self, topic: str, partition: int, kind: str) -> str:
        key = (topic, partition)
        assert key in self.logs or key in self.offline, key
        self._unmoved[key] = kind
        target = self._rename_log(self.logs.get(key), f"{topic}-{partition}", topic, partition, kind)
        del self._unmoved[key]
        if self.logs.pop(key, None) is None:
            del self.offline[key]
        return target

    def _rename_log(self, log: PartitionLog | None, name: str, topic: str, partition: int, kind: str) -> str:
        """Where it is now. OSError when it could not be renamed: then it is what it was."""
        target = f"{self.path}/{away_name(topic, partition, self._disk.random_bytes(16), kind)}"
        self._disk.rename(f"{self.path}/{name}", target)
        if log is not None:
            log.abandon()
        return target

    # Future replicas: on their way here from another directory of this node

    def create_future(self, topic: str, partition: int, topic_id: bytes, config: LogConfig, now_ms: int) -> None:
        """A new, empty log under a name of its own, beside which the present one may be made or deleted."""
        if (topic, partition) in self.futures:  # it could not be renamed when it was discarded
            self.discard_future(topic, partition, now_ms)
        name = future_name(topic, partition, self._disk.random_bytes(16))
        self.futures[topic, partition] = self._create(topic, partition, topic_id, config, now_ms, name)

    def promote_future(self, topic: str, partition: int) -> PartitionLog:
        """It is the replica from now on: only names change, whatever is open stays open. No flush may be running."""
        key = (topic, partition)
        self._move_away(key, self.futures[key].clock_ms)
        log, target = self.futures[key], f"{self.path}/{topic}-{partition}"
        self._disk.rename(log.directory, target)
        self.logs[key] = self.futures.pop(key)
        log.moved_to(target)
        log.durability.note_directory(self.path)
        return log

    def discard_future(self, topic: str, partition: int, now_ms: int) -> None:
        """It is not wanted any more."""
        log = self.futures[topic, partition]
        name = log.directory.rpartition("/")[2]
        self._doomed.append((now_ms, self._rename_log(log, name, topic, partition, DELETE_SUFFIX)))
        del self.futures[topic, partition]

    def _create(
        self, topic: str, partition: int, topic_id: bytes, config: LogConfig, now_ms: int, name: str = ""
    ) -> PartitionLog:
        directory = f"{self.path}/{name or f'{topic}-{partition}'}"
        require_formatted(self._disk, self.path)
        is_new = not self._disk.exists(directory)
        self._disk.make_directory(directory)
        path = f"{directory}/{PARTITION_METADATA_FILE}"
        self._disk.write_file(path, encode_partition_metadata(topic_id), sync=False)
        if is_new:
            jitter_ms = segment_jitter_ms(config, topic, partition)
            loaded = new_log(self._disk, directory, config, topic_id, now_ms=now_ms, jitter_ms=jitter_ms)
            return self._take_over(directory, topic, partition, config, loaded, now_ms, is_settled=False)
        return self._open_log(topic, partition, config, Checkpoints(), now_ms)

    def _open_log(
        self, topic: str, partition: int, config: LogConfig, checkpoints: Checkpoints, now_ms: int, name: str = ""
    ) -> PartitionLog:
        directory = f"{self.path}/{name or f'{topic}-{partition}'}"
        loaded = load_log(
            self._disk,
            directory,
            config,
            checkpoints,
            ending=self.ending,
            now_ms=now_ms,
            jitter_ms=segment_jitter_ms(config, topic, partition),
            on_loss=lambda: self._lose(topic, partition),
        )
        self.recovery.add(loaded)
        log = self._take_over(directory, topic, partition, config, loaded, now_ms, is_settled=self.was_clean)
        if not self.was_clean and config.flush_messages != INT64_MAX:
            # Else what was acknowledged before the crash would be hidden until somebody flushes; and what is appended
            # next would stand on a tail, or on a cut, that only the page cache knows.
            log.flush()
        return log

    def _lose(self, topic: str, partition: int) -> None:
        self.lost.add((topic, partition))
        self.on_loss()
        if topic == METADATA_TOPIC:
            self._on_metadata_loss()

    def _take_over(
        self,
        directory: str,
        topic: str,
        partition: int,
        config: LogConfig,
        loaded: LoadedLog,
        now_ms: int,
        *,
        is_settled: bool,
    ) -> PartitionLog:
        log = PartitionLog(
            self._disk, directory, topic, partition, config, loaded, now_ms, write_checkpoint=self.write_checkpoints
        )
        if not is_settled:
            # The entries that lead to the log, and what a start removed or an earlier process never synced, are to be
            # on the device before the recovery point moves: a removed snapshot that came back might look valid then.
            for file in (f"{directory}/{PARTITION_METADATA_FILE}", *loaded.segments.active.paths()[1:]):
                log.durability.note_path(file)
            log.durability.note_directory(directory)
            log.durability.note_directory(self.path)
        return log

    # Upkeep

    def fail(self, why: str) -> None:
        """The device refused. What is there stays as it is; a later start may find it better."""
        if self.failure is not None:
            return
        self.failure = why
        for log in self._all_logs():
            log.abandon("is in a log directory that failed")
        self.logs.clear()
        self.futures.clear()
        self._doomed.clear()
        self._unmoved.clear()
        self._lock.release()

    def _all_logs(self) -> list[PartitionLog]:
        metadata = () if self.metadata_log is None else (self.metadata_log,)
        return [*self.logs.values(), *self.futures.values(), *metadata]

    def write_checkpoints(self) -> None:
        """Recovery points, log starts and high watermarks, each in one atomic, synced file."""
        write_epochs(self._disk, self._epochs_of_new_starts())
        self._checkpoints.write(self._offsets(also_unchanged=True))
        self._cleaned_is_written = True

    def begin_checkpoints(self) -> CheckpointTask:
        """The same as a task whose `run` may wait for the device in any thread; then `finish_checkpoints` here."""
        return self._checkpoints.begin(self._offsets(also_unchanged=False), self._epochs_of_new_starts())

    def finish_checkpoints(self, task: CheckpointTask) -> None:
        """Put them in place, unless newer ones are there by now. Raises OSError when they could not be written."""
        if self.failure is None and self._checkpoints.finish(task):
            self._cleaned_is_written = True

    def _offsets(self, *, also_unchanged: bool) -> dict[str, dict[TopicPartition, int]]:
        logs = {**self.futures, **self.logs}
        cleaned, before = self._cleaned_offsets(), self._cleaned
        self._cleaned = cleaned
        is_wanted = also_unchanged or cleaned != before or not self._cleaned_is_written
        self._cleaned_is_written = not is_wanted
        return {
            **({CLEANER_OFFSET_FILE: cleaned} if is_wanted else {}),
            RECOVERY_POINT_FILE: {key: log.recovery_point for key, log in logs.items()},
            LOG_START_FILE: self._log_starts(),
            HIGH_WATERMARK_FILE: {key: log.high_watermark for key, log in logs.items()},
        }

    def maintain(self, now_ms: int, doomed: list[str] | None = None) -> None:
        """Retention and upkeep of every log. What may be removed now is, or its paths are added to `doomed`."""
        for key in list(self._unmoved):
            self._move_away(key, now_ms)
        condemned = False
        for log in self.logs.values():
            log.maintain(now_ms, doomed)
            condemned = condemned or bool(log.segments.condemned)
        if condemned:
            self._write_log_starts()
            for log in self.logs.values():
                log.segments.rename_condemned(log.log_start_offset, now_ms + log.config.file_delete_delay_ms)
        due = self._take_doomed_directories(now_ms)
        if doomed is not None:
            doomed += due
        for path in due if doomed is None else ():
            self._disk.remove_tree(path)

    def next_removal_ms(self) -> int | None:
        """When the first of the files and directories that were deleted may be removed; None when there are none."""
        due = [remove_at_ms for remove_at_ms, _ in self._doomed]
        for log in (*self.logs.values(), *self.futures.values()):
            if log.segments.doomed:
                due += [remove_at_ms for remove_at_ms, _ in log.segments.doomed]
        return min(due, default=None)

    def take_doomed(self, now_ms: int) -> list[str]:
        """The paths of those whose time has come: the caller's to remove, on whatever thread."""
        due = self._take_doomed_directories(now_ms)
        for log in (*self.logs.values(), *self.futures.values()):
            if log.segments.doomed:
                due += log.segments.take_doomed(now_ms)
        return due

    def _take_doomed_directories(self, now_ms: int) -> list[str]:
        due = [path for remove_at_ms, path in self._doomed if remove_at_ms <= now_ms]
        self._doomed = [item for item in self._doomed if item[0] > now_ms]
        return due

    def close(self, broker_epoch: int = -1) -> bool:
        """Flush and close every log, write the checkpoints and, if all went well, the clean-shutdown marker.

        Without `load` nothing is known of the logs: the checkpoints stay, and the marker comes back if it was there.
        Whether all that was written is on the device now; OSError where it may not be.
        """
        if self.failure is not None:
            return False
        try:
            logs = self._all_logs()
            is_whole = _close_logs(self._disk, self.path, logs, self.sync_at_once_from)
            is_clean = is_whole and not self.offline
            if self._is_loaded:
                self.write_checkpoints()
            if is_clean and (self._is_loaded or self.was_clean):
                data = encode_clean_shutdown(broker_epoch)
                replace_file(self._disk, self.path, CLEAN_SHUTDOWN_FILE, data)
            return is_whole
        finally:
            self._lock.release()

    def _epochs_of_new_starts(self) -> dict[str, bytes]:
        """Epoch files of the logs whose start has moved, to be written before the checkpoint says so.

        The first epoch begins where the log does. A start believes the lower of the two: neither file has a checksum,
        and a damaged one must not delete records.
        """
        moved = [log for log in (*self.logs.values(), *self.futures.values()) if log.start_moved()]
        return {log.directory: encode_leader_epochs(log.leader_epochs) for log in moved}

    def _write_log_starts(self) -> None:
        write_epochs(self._disk, self._epochs_of_new_starts())
        self._checkpoints.write({LOG_START_FILE: self._log_starts()})

    def _cleaned_offsets(self) -> dict[TopicPartition, int]:
        return {key: log.cleaned_offset for key, log in self.logs.items() if log.cleaned_offset >= 0}

    def _write_cleaned(self) -> None:
        self._cleaned = self._cleaned_offsets()
        self._checkpoints.write({CLEANER_OFFSET_FILE: self._cleaned})
        self._cleaned_is_written = True

    def _log_starts(self) -> dict[TopicPartition, int]:
        logs = {**self.futures, **self.logs}
        # Kafka leaves out those that the first segment's name says; here its predecessors' removal may not be durable.
        return {key: log.log_start_offset for key, log in logs.items() if log.log_start_offset > 0}


def _is_harmless(name: str) -> bool:
    return name in (LOCK_FILE, "lost+found") or name.endswith(".tmp")


def _close_logs(disk: Disk, path: str, logs: list[PartitionLog], sync_at_once_from: int) -> bool:
    """Whether all could be closed. Many are synced at once: one by one they would take milliseconds each."""
    tasks: list[tuple[PartitionLog, FlushTask | None]] = []
    is_clean = True
    for log in logs:
        try:
            tasks.append((log, log.begin_close()))
        except OSError as error:
            is_clean = _not_closed(log, error)
    waiting = [task for _, task in tasks if task is not None]
    if not (len(waiting) >= sync_at_once_from and _sync_at_once(disk, path, waiting)):
        for task in waiting:
            task.run()
    for log, done in tasks:
        try:
            log.finish_close(done)
        except (OSError, CorruptLog) as error:
            is_clean = _not_closed(log, error)
        is_clean = is_clean and log.is_closed
    return is_clean


def _sync_at_once(disk: Disk, path: str, tasks: list[FlushTask]) -> bool:
    try:
        for task in tasks:
            task.write_only()
        return disk.sync_all(path)
    except OSError as error:
        logger.warning("%s is synced file by file: %s", path, error)
        return False


def _not_closed(log: PartitionLog, error: Exception) -> bool:
    logger.error("%s-%d could not be closed cleanly: %s", log.topic, log.partition, error)
    return False
