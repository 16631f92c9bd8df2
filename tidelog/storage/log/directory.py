"""All logs of one log.dir: formatting and locking it, finding its partitions, checkpoints, the clean-shutdown marker.

One instance per directory. The caller chooses the directory of a partition, and handles OSErrors, usually with `fail`.
Invariants: the marker is removed durably before the first write; a segment's files are renamed only after a log start
offset above it is checkpointed; a checkpoint covers only bytes that are on the device; nothing is written after `fail`.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Collection, Iterator, Set
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
    encode_partition_metadata,
    read_if_exists,
    replace_file,
    require_formatted,
)
from tidelog.storage.files.disk import DirectoryInUse, Disk, Lock
from tidelog.storage.files.incarnation import INCARNATION_FILE
from tidelog.storage.files.log_files import write_epochs
from tidelog.storage.files.log_names import (
    DELETE_SUFFIX,
    FUTURE_SUFFIX,
    STRAY_SUFFIX,
    away_name,
    away_names,
    future_name,
    is_away,
    parse_future_name,
    parse_name,
)
from tidelog.storage.files.meta_properties import (
    DamagedProperties,
    ForeignDirectory,
    check_properties,
    format_directory,
    make_durably,
)
from tidelog.storage.files.usurped_names import free_names
from tidelog.storage.log.checkpointed import CheckpointedOffsets, cleaned_offset
from tidelog.storage.log.closing import close_logs
from tidelog.storage.log.explained_gaps import keep_early_ends_of_unknown
from tidelog.storage.log.flush import await_first_flush
from tidelog.storage.log.loader import Checkpoints, Ending, LoadedLog, load_log, new_log
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog
from tidelog.storage.log.recovery import write_if_there_is_space
from tidelog.storage.log.swap import PIECE_SEGMENTS
from tidelog.storage.producers.expiration import note_idle_producers
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.retention import segment_jitter_ms

logger = logging.getLogger("tidelog.storage")

METADATA_TOPIC: Final = "__cluster_metadata"
LOCK_FILE: Final = ".lock"
# The bound of the logs that are gone while the checkpoints on the device may still name them.
REMOVED_LOGS_MAX = 10_000
# The logs of which a checkpoint takes the offsets in one turn of the loop.
LOGS_AT_ONCE: Final = 1_000
_FAILED: Final = "is in a log directory that failed"
_CHECKPOINT_FILES: Final = frozenset({RECOVERY_POINT_FILE, LOG_START_FILE, HIGH_WATERMARK_FILE, CLEANER_OFFSET_FILE})
_FILES: Final = _CHECKPOINT_FILES | {CLEAN_SHUTDOWN_FILE, INCARNATION_FILE}

TopicPartition = tuple[str, int]


@dataclass(slots=True)
class Recovery:
    """The recovery scans while the logs of a directory were opened."""

    logs: int = 0
    scanned_bytes: int = 0
    cut_bytes: int = 0

    def add(self, loaded: LoadedLog) -> None:
        self.logs += loaded.scanned_bytes > 0
        self.scanned_bytes += loaded.scanned_bytes
        self.cut_bytes += loaded.cut_bytes


class LogDirectory:
    sync_at_once_from = 32
    """For this many logs or more, closing syncs the file system once instead of every file."""

    def __init__(self, disk: Disk, path: str, lock: Lock, properties: dict[str, str], is_new: bool) -> None:
        self._disk = disk
        self.path = path
        self._lock = lock
        self.cluster_id = properties["cluster.id"]
        self.node_id = int(properties["node.id"])
        self.directory_id = uuid_from_text(properties["directory.id"])
        self.logs: dict[TopicPartition, PartitionLog] = {}
        self.futures: dict[TopicPartition, PartitionLog] = {}
        """The future logs of replicas that move here from another directory."""
        self.offline: dict[TopicPartition, str] = {}
        """Partitions whose logs cannot be opened -> the reason."""
        self.vanished: set[TopicPartition] = set()
        """Logs that held records, as the checkpoints say, and whose directories are not there any more.

        They were neither deleted nor set aside. The checkpoints keep naming them until `forget_vanished`.
        """
        self.failure: str | None = None
        """Why the directory failed; None while it is in use."""
        self._is_loading = False
        self._stops_loading = False
        self._to_let_go = [path]
        self._checkpoints = OffsetCheckpoints(disk, path)
        self._cleaned: dict[TopicPartition, int] | None = None  # as last checkpointed, or about to be
        self._cleaned_is_written = True
        self._in_cleaner_checkpoint: Set[TopicPartition] = frozenset()  # whatever a loss of power takes
        if is_new:
            self._checkpoints.write({CLEANER_OFFSET_FILE: {}})
        self._is_loaded = is_new  # before `load`, the checkpoints and the marker are about logs that are not open yet
        self.metadata_log: PartitionLog | None = None
        self._doomed: list[tuple[int, str]] = []
        self._still_named: set[str] = set()
        """Directories in `_doomed` of logs that the checkpoints on the device may name. A start would miss them."""
        self._kept_offsets: dict[str, dict[TopicPartition, int]] = {}
        """Checkpoint file -> the entries of logs that are not open: vanished or offline."""
        self._removed_logs: set[TopicPartition] = set()
        """Logs that are not there any more, but which the checkpoints may still name."""
        self._unmoved: dict[TopicPartition, str] = {}  # logs to delete or set aside that could not be renamed yet
        marker = read_if_exists(disk, f"{path}/{CLEAN_SHUTDOWN_FILE}")
        self.was_clean = marker is not None
        """The last process closed it cleanly, so no log needs a scan."""
        self.ending = Ending.POWER_LOSS if marker is None else Ending.CLEAN
        """How the last process ended. The caller sets KILLED if it knows that the machine has not restarted."""
        self.recovery = Recovery()
        self.shortened_logs: set[TopicPartition] = set()
        """Logs that were truncated at a start and may have lost acknowledged records."""
        self._on_metadata_loss: Callable[[], None] = lambda: None
        self.on_loss: Callable[[], None] = lambda: None
        """Called before such a truncation. After it this node must not claim its earlier broker epoch."""
        self.has_present: Callable[[str, int], bool] = lambda *_: False  # (topic, partition): its future log is a copy
        self.clean_broker_epoch = -1 if marker is None else decode_clean_shutdown(marker)
        """The broker epoch of the clean shutdown (KIP-966); -1 if it was not clean, or if the epoch is unknown."""
        if self.was_clean:
            disk.remove(f"{path}/{CLEAN_SHUTDOWN_FILE}")
        # Also the checkpoints that a killed process has renamed: what this start believes must not go back later.
        disk.sync_directory(path)

    @classmethod
    def open(
        cls, disk: Disk, path: str, *, node_id: int, cluster_id: str | None, directory_id: str | None = None
    ) -> LogDirectory:
        """Lock the directory and check its owner. An empty or missing directory is formatted.

        An id of None accepts the present one, or creates one. Raises ForeignDirectory, DirectoryInUse, OSError.
        """
        make_durably(disk, path)
        data = read_if_exists(disk, f"{path}/{META_PROPERTIES_FILE}")
        if data is None:
            strangers = sorted(e.name for e in disk.list_directory(path) if not _is_harmless(e.name))
            if strangers:
                is_own = not _CHECKPOINT_FILES.isdisjoint(strangers)
                raise (DamagedProperties if is_own else ForeignDirectory)(
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
            freed = free_names(disk, path, disk.list_directory(path), _is_file_name)
            opened = cls(disk, path, lock, properties, is_new=data is None)
            opened._checkpoints.unreadable |= freed
            return opened
        except BaseException:
            lock.release()
            raise

    # Logs

    def load(self, config_for: Callable[[str], LogConfig], now_ms: int) -> dict[TopicPartition, PartitionLog]:
        """Open every partition. `offline` gets those that cannot be opened. `config_for` takes a topic name.

        It may run on a thread. If the owner calls `fail` meanwhile, it ends with the present log and an OSError, and
        the directory stays locked until then, because it writes what it recovers. Raises OSError.
        """
        self._is_loading = True
        try:
            return self._load(config_for, now_ms)
        finally:
            self._is_loading = False
            if self.failure is not None:
                self._let_go()

    def _load(self, config_for: Callable[[str], LogConfig], now_ms: int) -> dict[TopicPartition, PartitionLog]:
        recovery_points = self._checkpoints.read(RECOVERY_POINT_FILE)
        log_starts = self._checkpoints.read(LOG_START_FILE)
        high_watermarks = self._checkpoints.read(HIGH_WATERMARK_FILE)
        cleaned = self._checkpoints.read(CLEANER_OFFSET_FILE)
        is_there = self._disk.exists(f"{self.path}/{CLEANER_OFFSET_FILE}")
        if is_there and CLEANER_OFFSET_FILE not in self._checkpoints.unreadable:
            self._cleaned = cleaned
            self._in_cleaner_checkpoint = cleaned.keys()
        entries = self._disk.list_directory(self.path)
        for entry in entries:
            if self.failure is not None:
                raise OSError(errno.EIO, "the log directory failed while its logs were opened", self.path)
            if self._stops_loading:
                raise OSError(errno.ECANCELED, "the node stops while its logs are opened", self.path)
            if not entry.is_directory:
                continue
            if entry.name.endswith(DELETE_SUFFIX):
                self._doom(now_ms, f"{self.path}/{entry.name}")
                continue
            is_future = entry.name.endswith(FUTURE_SUFFIX)
            key = parse_future_name(entry.name) if is_future else parse_name(entry.name)
            if key is None or key[0] == METADATA_TOPIC:
                continue
            config = config_for(key[0])
            # Without a cleaner checkpoint, any part of a compacted log may have been cleaned. Every broker writes one
            # when it formats the directory, so that it is damaged: missing records of other logs are damage, too.
            # With an entry, a log of a topic that has become another since may have gaps everywhere.
            was_compacted = key in cleaned and not config.is_compacted
            is_unknown = self._cleaned is None and config.is_compacted
            cleaned_offset = INT64_MAX if is_unknown else cleaned.get(key, -1)
            checkpoints = Checkpoints(
                log_starts.get(key, 0), recovery_points.get(key, 0), cleaned_offset, high_watermarks.get(key, 0),
                was_compacted=was_compacted,
                knows_recovery_point=RECOVERY_POINT_FILE not in self._checkpoints.unreadable,
            )  # fmt: skip
            try:
                log = self._open_log(*key, config, checkpoints, now_ms, entry.name, is_known=key in recovery_points)
            except (CorruptLog, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                # Only these files are wrong. Any other OSError is an error of the device.
                logger.error("%s/%s stays offline: %s", self.path, entry.name, error)
                if not is_future:
                    self.offline[key] = str(error)
                continue
            log.set_high_watermark(high_watermarks.get(key, 0))
            if was_compacted:
                self._keep_gaps(log)
            else:
                log.cleaned_offset = cleaned_offset if cleaned_offset <= log.log_end_offset else -1
            if is_unknown:  # the next start has a checkpoint, of a log that was never cleaned
                keep_early_ends_of_unknown(log)
            log = self._discard_lesser(log, now_ms) if is_future and key in self.futures else log
            (self.futures if is_future else self.logs)[key] = log
        self._removed_logs.update({*recovery_points, *log_starts, *high_watermarks} - {*self.logs, *self.futures})
        away = away_names(entry.name for entry in entries if entry.is_directory)
        self._note_vanished(
            {RECOVERY_POINT_FILE: recovery_points, LOG_START_FILE: log_starts, HIGH_WATERMARK_FILE: high_watermarks},
            away,
        )
        self._is_loaded = True
        opened = {**self.futures, **self.logs}
        ends = {key: max(high_watermarks.get(key, 0), recovery_points.get(key, 0)) for key in opened}
        if any(log.log_end_offset < ends[key] for key, log in opened.items()):
            # A start after a kill would miss the lost records, and call the end damaged. One after a loss of
            # power would believe that what is appended next was on the device.
            write_if_there_is_space(self.write_checkpoints, "the checkpoints of a log that has lost its end")
        elif self._cleaned is None:
            # The formatting was interrupted, or is Kafka's. The next start would take new logs for cleaned ones.
            write_if_there_is_space(self.write_checkpoints, CLEANER_OFFSET_FILE)
        return dict(self.logs)

    def _keep_gaps(self, log: PartitionLog) -> None:
        """What compaction left out of a log whose topic has become another while the node was down is no damage."""
        # Also where there is a file: the last process may not have synced it.
        log.unsynced_gaps_below = log.log_end_offset
        write_if_there_is_space(lambda: log.explain_gaps(log.log_end_offset), f"the gaps of {log.directory}")

    def _note_vanished(self, files: dict[str, dict[TopicPartition, int]], away: Collection[TopicPartition]) -> None:
        """Find the logs that are gone with records which were on the device. `files`: the checkpoints.

        What they say of logs that are not open stays in them: the log may be put back, or put right.
        """
        evidence = [files[RECOVERY_POINT_FILE]]
        if self.ending is not Ending.POWER_LOSS:  # which may take a new directory, with records that were not flushed
            evidence.append(files[HIGH_WATERMARK_FILE])
        had_records = {key for offsets in evidence for key, offset in offsets.items() if offset > 0}
        missing = had_records - {*self.logs, *self.futures, *self.offline}
        self.vanished = {key for key in missing if not is_away(*key, away)}
        kept = {*self.vanished, *self.offline}
        self._kept_offsets = {
            name: {key: offsets[key] for key in kept if key in offsets} for name, offsets in files.items()
        }

    def forget_vanished(self, keys: Collection[TopicPartition]) -> None:
        """The logs are given up, or another directory has them: the next checkpoints do not name them."""
        for key in self.vanished.intersection(keys):
            self.vanished.remove(key)
            self._drop_kept(key)

    def _drop_kept(self, key: TopicPartition) -> None:
        for offsets in self._kept_offsets.values():
            offsets.pop(key, None)

    def stop_loading(self) -> None:
        """Have a `load` on a thread end with an OSError after the present log. The next start scans the logs again."""
        self._stops_loading = True

    def create_log(self, topic: str, partition: int, topic_id: bytes, config: LogConfig, now_ms: int) -> PartitionLog:
        """Create an empty log. It is durable after its first flush, for which the first record waits."""
        key = (topic, partition)
        self._move_away(key, now_ms)
        self.forget_vanished((key,))
        log = self._create(topic, partition, topic_id, config, now_ms)
        self.logs[key] = log
        if self._cleaned and key in self._cleaned:
            self.write_checkpoints()  # the old entry is about an earlier log of this name
        return log

    def open_metadata_log(
        self,
        config: LogConfig,
        now_ms: int,
        log_start_in: Callable[[list[str]], int] = lambda names: 0,
        on_loss: Callable[[str], None] = lambda directory: None,
    ) -> PartitionLog:
        """Open or create `__cluster_metadata-0`. After an unclean stop it is scanned completely, as in Kafka.

        `log_start_in` derives its log start offset from the names of its files, because the snapshots are not known
        here. `on_loss` is called with its directory before a truncation that may lose acknowledged records.
        """
        assert self.metadata_log is None
        directory = f"{self.path}/{METADATA_TOPIC}-0"
        if self._disk.exists(directory):
            entries = self._disk.list_directory(directory)
            log_start = log_start_in([entry.name for entry in entries if not entry.is_directory])
            self._on_metadata_loss = lambda: on_loss(directory)
            log = self._open_log(METADATA_TOPIC, 0, config, Checkpoints(log_start, is_synced=True), now_ms)
        else:
            log = self._create(METADATA_TOPIC, 0, METADATA_TOPIC_ID, config, now_ms)
        log.topic_id = METADATA_TOPIC_ID  # its file may be lost or damaged
        self.metadata_log = log
        return log

    def set_topic_id(self, topic: str, partition: int, topic_id: bytes) -> None:
        """Write the topic id of a log whose partition.metadata was lost, or has no checksum. Raises OSError."""
        log = self.logs[topic, partition]
        path = f"{log.directory}/{PARTITION_METADATA_FILE}"
        self._disk.write_file(path, encode_partition_metadata(topic_id), sync=False)
        log.durability.note_path(path)
        log.durability.note_directory(log.directory)
        if log.topic_id is None:
            await_first_flush(log)
        log.topic_id, log.topic_id_has_checksum = topic_id, True

    def delete_log(self, topic: str, partition: int, now_ms: int) -> None:
        """Delete the log: rename its directory now, and remove it after file.delete.delay.ms.

        The next `maintain` removes an offline log. Raises OSError if the rename fails; `maintain` tries again.
        """
        log = self.logs.get((topic, partition))
        target = self._rename_away(topic, partition, DELETE_SUFFIX)
        self._doom(now_ms + (log.config.file_delete_delay_ms if log else 0), target)

    def _doom(self, remove_at_ms: int, path: str) -> None:
        self._doomed.append((remove_at_ms, path))
        self._still_named.add(path)

    def _move_away(self, key: TopicPartition, now_ms: int) -> None:
        """Repeat a failed rename, so that a new log does not use the files of the old one. Raises OSError."""
        kind = self._unmoved.get(key)
        if kind == DELETE_SUFFIX:
            self.delete_log(*key, now_ms)
        elif kind is not None:
            self._rename_away(*key, kind)
        assert key not in self.logs, key

    def set_aside(self, topic: str, partition: int) -> str:
        """Take the log out but keep its files, like Kafka's stray logs. Returns their directory."""
        return self._rename_away(topic, partition, STRAY_SUFFIX)

    def _rename_away(self, topic: str, partition: int, kind: str) -> str:
        key = (topic, partition)
        assert key in self.logs or key in self.offline, key
        self._unmoved[key] = kind
        target = self._rename_log(self.logs.get(key), f"{topic}-{partition}", topic, partition, kind)
        del self._unmoved[key]
        self._removed_logs.add(key)
        if self.logs.pop(key, None) is None:
            del self.offline[key]
            self._drop_kept(key)
        return target

    def _rename_log(self, log: PartitionLog | None, name: str, topic: str, partition: int, kind: str) -> str:
        """Rename the log's directory. Returns the new path. After an OSError nothing has changed."""
        target = f"{self.path}/{away_name(topic, partition, self._disk.random_bytes(16), kind)}"
        if log is None:
            self._disk.rename(f"{self.path}/{name}", target)
            return target
        with log.durability.files.lock:  # no thread writes to the next log of this name
            self._disk.rename(f"{self.path}/{name}", target)
            log.abandon()
        return target

    # Future logs: of replicas that move here from another directory of this node

    def create_future(self, topic: str, partition: int, topic_id: bytes, config: LogConfig, now_ms: int) -> None:
        """Create an empty future log. It has a name of its own, so it does not conflict with the present log."""
        if (topic, partition) in self.futures:  # an earlier discard could not rename it
            self.discard_future(topic, partition, now_ms)
        name = future_name(topic, partition, self._disk.random_bytes(16))
        self.futures[topic, partition] = self._create(topic, partition, topic_id, config, now_ms, name)

    def promote_future(self, topic: str, partition: int) -> PartitionLog:
        """Make the future log the present log. Only names change, open files stay open. No flush may be running."""
        key = (topic, partition)
        self._move_away(key, self.futures[key].clock_ms)
        log, target = self.futures[key], f"{self.path}/{topic}-{partition}"
        self.enter_in_cleaner_checkpoint(log)  # it may have been copied from a cleaned one
        with log.durability.files.lock:  # a checkpoint writes its epochs either before this or to the new path
            self._disk.rename(log.directory, target)
            self.logs[key] = self.futures.pop(key)
            log.moved_to(target)
        log.durability.note_directory(self.path)
        return log

    def discard_future(self, topic: str, partition: int, now_ms: int) -> None:
        """Delete a future log."""
        log = self.futures[topic, partition]
        name = log.directory.rpartition("/")[2]
        self._doom(now_ms, self._rename_log(log, name, topic, partition, DELETE_SUFFIX))
        del self.futures[topic, partition]
        self._removed_logs.add((topic, partition))

    def _discard_lesser(self, log: PartitionLog, now_ms: int) -> PartitionLog:
        """A shortage has interrupted the creation of one of two future logs. The other one."""
        key, order = (log.topic, log.partition), lambda each: (each.topic_id is not None, each.log_end_offset)
        self.futures[key], kept = sorted((self.futures[key], log), key=order)
        self.discard_future(*key, now_ms)
        return kept

    def _create(
        self, topic: str, partition: int, topic_id: bytes, config: LogConfig, now_ms: int, name: str = ""
    ) -> PartitionLog:
        directory = f"{self.path}/{name or f'{topic}-{partition}'}"
        require_formatted(self._disk, self.path)
        if (topic, partition) in self._removed_logs:
            self.write_checkpoints()  # else a start after a kill would apply those of the old log to this one
        is_new = not self._disk.exists(directory)
        self._disk.make_directory(directory)
        path = f"{directory}/{PARTITION_METADATA_FILE}"
        self._disk.write_file(path, encode_partition_metadata(topic_id), sync=False)
        if is_new:
            jitter_ms = segment_jitter_ms(config, topic, partition)
            loaded = new_log(self._disk, directory, config, topic_id, now_ms=now_ms, jitter_ms=jitter_ms)
            return self._take_over(directory, topic, partition, config, loaded, now_ms, is_settled=False)
        return self._open_log(topic, partition, config, Checkpoints(), now_ms, is_known=False)

    def _open_log(
        self,
        topic: str,
        partition: int,
        config: LogConfig,
        checkpoints: Checkpoints,
        now_ms: int,
        name: str = "",
        *,
        is_known: bool = True,
    ) -> PartitionLog:
        """Open a log. `is_known`: the last process had it open. If not, a creation that failed may have left it."""
        directory = f"{self.path}/{name or f'{topic}-{partition}'}"
        loaded = load_log(
            self._disk,
            directory,
            config,
            checkpoints,
            ending=self.ending,
            now_ms=now_ms,
            jitter_ms=segment_jitter_ms(config, topic, partition),
            on_loss=lambda: self._lose(topic, partition, is_future=name.endswith(FUTURE_SUFFIX)),
        )
        self.recovery.add(loaded)
        note_idle_producers(loaded.producers, loaded.segments, self._disk, now_ms)
        loaded.producers.remove_expired(now_ms, config.producer_id_expiration_ms)
        is_settled = self.was_clean and is_known
        log = self._take_over(directory, topic, partition, config, loaded, now_ms, is_settled=is_settled)
        if not self.was_clean and config.flush_messages != INT64_MAX:
            # Without this flush, records acknowledged before the crash would stay hidden until the next flush, and new
            # records would follow a tail or a truncation that is not on the device.
            try:
                log.flush()
            except OSError:
                log.abandon("could not be synced")
                raise
        log.segments.release()  # a node may have more logs than the process may have files; most of them are idle
        return log

    def _lose(self, topic: str, partition: int, *, is_future: bool) -> None:
        if is_future and self.has_present(topic, partition):
            return
        self.shortened_logs.add((topic, partition))
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
        log.before_gaps = self.enter_in_cleaner_checkpoint
        if not is_settled:
            # The directory entries of the log, the removals of this start, and the unsynced files of an earlier process
            # must be on the device before the recovery point moves: otherwise a removed snapshot could come back.
            taken = [loaded.snapshots.path(each) for each in loaded.snapshots.offsets if each >= loaded.recovery_point]
            for file in (f"{directory}/{PARTITION_METADATA_FILE}", *loaded.segments.active.paths()[1:], *taken):
                log.durability.note_path(file)
            log.durability.note_directory(directory)
            log.durability.note_directory(self.path)
            if loaded.recovery_point <= loaded.log_start_offset:  # no flush of this log is known
                await_first_flush(log)
        return log

    # Upkeep

    def fail(self, why: str) -> None:
        """Stop using the directory after an error of the device. Its files stay as they are for a later start."""
        if self.failure is not None:
            return
        self.failure = why
        if self.metadata_log is not None:
            self.metadata_log.abandon(_FAILED)
        if not self._is_loading:
            self._let_go()

    def _let_go(self) -> None:
        """Close the files of a failed directory, and unlock it. `fail` and the end of `load` may both come here."""
        try:
            self._to_let_go.pop()  # of two threads one gets it
        except IndexError:
            return
        for log in self._all_logs():
            log.abandon(_FAILED)
        self.logs.clear()
        self.futures.clear()
        self._doomed.clear()
        self._still_named.clear()
        self._unmoved.clear()
        self._lock.release()

    def _all_logs(self) -> list[PartitionLog]:
        metadata = () if self.metadata_log is None else (self.metadata_log,)
        return [*self.logs.values(), *self.futures.values(), *metadata]

    def write_checkpoints(self) -> None:
        """Write the recovery points, log start offsets and high watermarks, each in one atomic, synced file."""
        collected = self._collect()
        write_epochs(collected.epochs)
        self._in_cleaner_checkpoint = frozenset()  # until it is written
        self._checkpoints.write(self._offsets(collected, also_unchanged=True) if self._is_loaded else {})
        self._cleaned_is_written = True
        self._in_cleaner_checkpoint = (self._cleaned or {}).keys()
        self._removed_logs.clear()
        self._still_named.clear()

    def begin_checkpoints(self) -> CheckpointTask:
        """`write_checkpoints` as a task: `run` waits for the device on any thread, then call `finish_checkpoints`.

        If that says so, then `task.sync` on any thread, and `finish_synced_checkpoints`.
        """
        (task,) = filter(None, self.checkpoint_steps())
        return task

    def checkpoint_steps(self) -> Iterator[CheckpointTask | None]:
        """`begin_checkpoints` in steps, which yield None, between which others may run. The task comes last."""
        number, unnamed, is_loaded = self._checkpoints.number, frozenset(self._still_named), self._is_loaded
        # Until its end the task may put a file without a log in place.
        before, self._in_cleaner_checkpoint = self._in_cleaner_checkpoint, frozenset()
        collected = CheckpointedOffsets(self._kept_offsets)
        yield from self._collect_in_steps(collected)
        offsets = self._offsets(collected, also_unchanged=False) if is_loaded else {}
        task = self._checkpoints.begin(offsets, lambda: write_epochs(collected.epochs), number)
        task.retiring = collected.retiring
        task.unnamed = unnamed
        # The cleaner's checkpoint is not synced, so that a loss of power may bring the one before it back.
        task.cleaned = before & task.files[CLEANER_OFFSET_FILE].keys() if CLEANER_OFFSET_FILE in task.files else before
        self._in_cleaner_checkpoint = task.cleaned  # named before its end and after it
        yield task

    def _collect(self) -> CheckpointedOffsets:
        collected = CheckpointedOffsets(self._kept_offsets)
        for _ in self._collect_in_steps(collected):
            pass
        return collected

    def _collect_in_steps(self, collected: CheckpointedOffsets) -> Iterator[None]:
        for count, key in enumerate({**self.futures, **self.logs}, 1):
            collected.add(key, self.logs.get(key), self.futures.get(key))
            if not count % LOGS_AT_ONCE:
                yield

    def finish_checkpoints(self, task: CheckpointTask) -> bool:
        """Put the checkpoints in place, except that of the cleaner, unless newer ones were written.

        Whether there is more to do when they are synced: then call `task.sync` on any thread, and
        `finish_synced_checkpoints`. Raises OSError if the task failed, or if the directory of a log has vanished.
        """
        if self.failure is not None:
            return False
        waits_for_sync = self._checkpoints.finish(task) and (bool(task.retiring) or CLEANER_OFFSET_FILE in task.files)
        if task.is_in_place:
            self._still_named -= task.unnamed
            if not waits_for_sync:
                self._finish_cleaner(task)
        self._require_present(task.present)
        if len(self._removed_logs) > REMOVED_LOGS_MAX and self._is_loaded:
            self.write_checkpoints()  # the task's files are not synced, so the old content could come back
        return waits_for_sync

    def finish_synced_checkpoints(self, task: CheckpointTask, now_ms: int) -> None:
        """Put the cleaner's checkpoint in place, and rename the files of the segments that retention took out before
        the checkpoints. Raises OSError.
        """
        for _ in self.synced_checkpoint_steps(task, now_ms):
            pass

    def synced_checkpoint_steps(self, task: CheckpointTask, now_ms: int) -> Iterator[None]:
        """`finish_synced_checkpoints` in steps, between which others may run."""
        if self.failure is not None:
            return
        if task.error is not None:
            raise task.error
        self._finish_cleaner(task)
        number = self._checkpoints.number
        for log, log_start_offset in task.retiring:
            assert isinstance(log, PartitionLog)
            left = -1
            # Newer checkpoints may have a lower log start. What they leave waits for the next ones.
            while left != len(log.segments.condemned) and self._checkpoints.number == number:
                left = len(log.segments.condemned)
                log.rename_condemned(log_start_offset, now_ms, PIECE_SEGMENTS)
                yield

    def _finish_cleaner(self, task: CheckpointTask) -> None:
        if self._checkpoints.finish_cleaner(task):
            self._cleaned_is_written = True
            self._in_cleaner_checkpoint = task.cleaned

    @property
    def has_condemned(self) -> bool:
        """Whether retention took segments out of a log whose files wait for the checkpoint of its start."""
        return self.failure is None and any(log.segments.condemned for log in self.logs.values())

    def _require_present(self, present: Collection[str]) -> None:
        """Raises OSError if the directory of a log has vanished. Writes to its open files would go on without errors.

        `present`: the directories of a moment ago. Logs may have been created or renamed since.
        """
        for log in (*self.logs.values(), *self.futures.values()):
            if log.directory not in present and not self._disk.exists(log.directory):
                raise FileNotFoundError(errno.ENOENT, "the directory of an open log has vanished", log.directory)

    def _offsets(self, collected: CheckpointedOffsets, *, also_unchanged: bool) -> dict[str, dict[TopicPartition, int]]:
        """The content of the checkpoints; after `load`.

        The metadata log is opened, and may be truncated, before the other logs. Checkpoints without them would replace
        theirs: their high watermarks and log starts would be lost. The metadata log has no entry.
        """
        before, self._cleaned = self._cleaned, collected.cleaned
        is_wanted = also_unchanged or collected.cleaned != before or not self._cleaned_is_written
        self._cleaned_is_written = not is_wanted
        return {
            RECOVERY_POINT_FILE: collected.recovery_points,
            LOG_START_FILE: collected.log_starts,
            HIGH_WATERMARK_FILE: collected.high_watermarks,
            # Last: a start needs the recovery points of the flushes after which it does not name a log any more.
            **({CLEANER_OFFSET_FILE: collected.cleaned} if is_wanted else {}),
        }

    def maintain(self, now_ms: int) -> None:
        """Maintain every log. Files that are due are removed, which waits for the device."""
        for _ in self.maintained(now_ms):
            pass
        if self._is_loaded and self.has_due(now_ms):
            self.write_checkpoints()
        due = self._take_doomed_directories(now_ms)
        if self.has_condemned:
            self._write_log_starts()
            for log in self.logs.values():
                log.rename_condemned(log.log_start_offset, now_ms)
        for path in due:
            self._disk.remove_tree(path)

    def maintained(self, now_ms: int, doomed: list[str] | None = None) -> Iterator[tuple[PartitionLog, int]]:
        """Maintain the logs in pieces, between which others may run. A piece yields its log, and where that began
        before. Raises OSError.

        With `doomed` nothing is synced or removed, which could wait for the device: the paths of files that are due are
        added to it, and the caller has the checkpoints written where `has_condemned`.
        """
        for key in list(self._unmoved):
            self._move_away(key, now_ms)
        for key, log in list(self.logs.items()):
            is_done = False
            while not is_done and self.logs.get(key) is log:
                log_start_offset = log.log_start_offset
                is_done = log.maintain(now_ms, doomed)
                yield log, log_start_offset
        if doomed is not None and self.failure is None:
            doomed += self._take_doomed_directories(now_ms)

    def next_removal_ms(self) -> int | None:
        """The time of the next removal of a deleted file or directory; None if there is none."""
        due = [remove_at_ms for remove_at_ms, _ in self._doomed]
        for log in (*self.logs.values(), *self.futures.values()):
            if log.segments.doomed:
                due += [remove_at_ms for remove_at_ms, _ in log.segments.doomed]
        return min(due, default=None)

    def take_doomed(self, now_ms: int) -> list[str]:
        """The paths that are due for removal. The caller removes them, on any thread."""
        due = self._take_doomed_directories(now_ms)
        for log in (*self.logs.values(), *self.futures.values()):
            if log.segments.doomed:
                due += log.segments.take_doomed(now_ms)
        return due

    def has_due(self, now_ms: int) -> bool:
        """Whether directories of deleted logs are due for removal. `take_doomed` leaves those that the checkpoints may
        still name: they wait until new checkpoints are in place.
        """
        return any(remove_at_ms <= now_ms for remove_at_ms, _ in self._doomed)

    def _take_doomed_directories(self, now_ms: int) -> list[str]:
        due = {path for at_ms, path in self._doomed if at_ms <= now_ms} - self._still_named
        self._doomed = [item for item in self._doomed if item[1] not in due]
        return sorted(due)

    def close(self, broker_epoch: int = -1) -> bool:
        """Flush and close every log, write the checkpoints and, without errors, the clean-shutdown marker.

        Before `load` the logs are unknown: then the checkpoints stay, and a marker that was there is restored.
        Returns whether all writes are on the device. Raises OSError if they may not be.
        """
        if self.failure is not None:
            return False
        try:
            logs = self._all_logs()
            is_whole = close_logs(logs, self.sync_at_once_from, self._sync_all)
            is_clean = is_whole and not self.offline
            if self._is_loaded:
                self.write_checkpoints()
            if is_clean and (self._is_loaded or self.was_clean):
                replace_file(self._disk, self.path, CLEAN_SHUTDOWN_FILE, encode_clean_shutdown(broker_epoch))
            return is_whole
        finally:
            self._lock.release()

    def _sync_all(self, logs: list[PartitionLog]) -> bool:
        return self._disk.sync_all([self.path, *(log.directory for log in logs)], self._lock)

    def _write_log_starts(self) -> None:
        collected = self._collect()
        write_epochs(collected.epochs)
        self._checkpoints.write({LOG_START_FILE: collected.log_starts})

    def enter_in_cleaner_checkpoint(self, log: PartitionLog) -> None:
        """Have the cleaner's checkpoint on the device name a compacted log before it gets gaps or takes the place of
        another, or before its topic ceases to be compacted. Raises OSError.

        A start would take the gaps of a log that is not compacted any more for damage, or for a torn end.
        """
        if cleaned_offset(log) is not None and (log.topic, log.partition) not in self._in_cleaner_checkpoint:
            self.write_checkpoints()  # it may name another log no more, for which a start needs the recovery point


def _is_file_name(name: str) -> bool:
    return name.removesuffix(".tmp").removesuffix(".next") in _FILES


def _is_harmless(name: str) -> bool:
    return name in (LOCK_FILE, "lost+found") or name.endswith(".tmp")
