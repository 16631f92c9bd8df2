"""Moves replicas between the log directories of this broker, while clients read and write them.

Each log is copied to a future log (`replication/future_replica.py`) in short steps on the loop; operations that wait
for a device run on a thread. After the future log has caught up, the directory is reported to the controller, and then
the future log replaces the present one. Kafka's ReplicaAlterLogDirsManager. Invariants: if the move ends before that,
the present replica is unchanged, and so is its directory in the metadata; the present log, which may be the only whole
copy, is deleted only after the future log was read and found whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from tidelog.broker.replicas.log_directories import CORDONED
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.future_replica import FutureReplica, MoveState
from tidelog.replication.threads import until_done
from tidelog.replication.throttle import Throttle
from tidelog.replication.truncation import compacted_below
from tidelog.storage.files.disk import is_exhaustion
from tidelog.storage.files.log_names import NAME_LENGTH_MAX, future_name
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments.damage import DamagedRange, DamagedRecords, describe
from tidelog.storage.segments.reader import ColdRead

if TYPE_CHECKING:
    from tidelog.broker.config.dynamic_config import DynamicConfig
    from tidelog.broker.replicas.directory_assignments import DirectoryAssignments
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.segments.log_config import LogConfig
    from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.moves")

RATE = "replica.alter.log.dirs.io.max.bytes.per.second"
STEP_BYTES = 1 << 20
IDLE_S = 0.02
# Bound of the directories requested for future replicas (Kafka has no bound).
PREFERRED_MAX = 10_000
# How often the present log may acknowledge more during a sync of the copy. Then a sync runs on the loop, so that the
# move ends.
OVERTAKEN_TIMES_MAX = 50
CHECKED_BYTES = 8 << 20
SHORTAGE_LOG_INTERVAL_S = 10.0
"""Each move meets a shortage of descriptors every IDLE_S."""


class ReplicaMoves:
    """Calls `on_promoted(partition, directory)` when the partition has a new log in this directory."""

    def __init__(
        self,
        settings: DynamicConfig,
        directories: LogDirectories,
        partitions: Partitions,
        assignments: DirectoryAssignments,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
        run_in_executor: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._directories = directories
        self._partitions = partitions
        self._assignments = assignments
        self._loop = loop
        self._clock_ms = clock_ms
        self._run_in_executor = run_in_executor
        self.on_promoted: Callable[[Partition, LogDirectory], None] = lambda *_: None
        self.log_config: Callable[[str], LogConfig]
        self.preferred: dict[tuple[str, int], str] = {}
        """The directories requested for replicas that were not on this broker at that time."""
        self._moves: dict[Partition, tuple[FutureReplica, LogDirectory]] = {}
        self._damaged_once: set[Partition] = set()
        """Moves that began anew because the copy was damaged. If it is damaged again, the move ends."""
        self._throttle = Throttle()
        self._shortage_logged_s = -SHORTAGE_LOG_INTERVAL_S
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        directories.on_offline.append(self._directory_failed)

    # -------------------------------------------------------------------------------------------------------- requests

    def order(self, topic: str, index: int, path: str) -> None:
        """Start a move of the replica to `path`. Raises KafkaError, with the codes of Kafka's ReplicaManager."""
        directory = self._directory_at(topic, index, path)
        partition = self._partitions.find(topic, index)
        if partition is not None and not partition.offline:
            under_way = self._moves.get(partition)
            if under_way is not None and under_way[1] is not directory:
                self._cancel(partition)
        elif partition is not None or self._partitions.is_unavailable(topic, index):
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"{topic}-{index} is offline")
        if partition is None:
            self._prefer(topic, index, directory.path)
            known = self._partitions.is_known(topic, index)
            raise KafkaError(ErrorCode.REPLICA_NOT_AVAILABLE if known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        source = self._directory_of(partition)
        if source is directory or partition in self._moves:
            return
        if self._directories.offline:
            # The offline directory may hold a future log of the same replica.
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, "a log directory is offline")
        try:
            directory.create_future(topic, index, partition.topic_id, self.log_config(topic), self._clock_ms())
        except (OSError, CorruptLog) as error:
            if isinstance(error, OSError):
                self._directories.failed(directory, error)
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, str(error)) from None
        self.begin(partition, source, directory)

    def _directory_at(self, topic: str, index: int, path: str) -> LogDirectory:
        if len(future_name(topic, index, bytes(16)).encode()) > NAME_LENGTH_MAX:
            raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, "The topic name is too long.")
        configured = next((own for own, absolute in self._directories.home_paths.items() if absolute == path), None)
        if configured is None:
            raise KafkaError(ErrorCode.LOG_DIR_NOT_FOUND, f"Log dir {path} is not found in the config.")
        directory = self._directories.home_at(configured)
        if directory is None:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"Log directory {path} is offline")
        if self._directories.is_cordoned(configured, self._settings.items(CORDONED)):
            raise KafkaError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"Log directory {path} is cordoned")
        return directory

    def _prefer(self, topic: str, index: int, path: str) -> None:
        self.preferred.pop((topic, index), None)
        if len(self.preferred) >= PREFERRED_MAX:
            del self.preferred[next(iter(self.preferred))]
        self.preferred[topic, index] = path

    def _directory_of(self, partition: Partition) -> LogDirectory:
        key = (partition.topic, partition.index)
        for directory in self._directories.homes:
            if directory.logs.get(key) is partition.log:
                return directory
        raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"{partition.topic}-{partition.index} is offline")

    def begin(
        self, partition: Partition, source: LogDirectory, directory: LogDirectory, *, is_resumed: bool = False
    ) -> None:
        """Copy the present log to the future log in `directory`."""
        future = directory.futures[partition.topic, partition.index]
        replica = FutureReplica(partition, future, source.directory_id, directory.directory_id)
        replica.begins_again = is_resumed and compacted_below(partition.log) > 0
        logger.info("%s-%d moves from %s to %s", partition.topic, partition.index, source.path, directory.path)
        partition.log.keep_uncleaned()
        self._moves[partition] = replica, directory
        partition.future_log = future
        if self._task is None and not self._closed:
            self._task = self._loop.create_task(self._run(), name="replica moves")

    def begin_again(self, partition: Partition) -> None:
        """The present log is now a copy of another replica's: the future log may have what is deleted in it."""
        if partition in self._moves:
            self._begin_anew(partition, self._moves[partition][1])

    def _begin_anew(self, partition: Partition, directory: LogDirectory) -> bool:
        self._cancel(partition)
        try:
            self.order(partition.topic, partition.index, self._directories.home_paths[directory.path])
        except KafkaError as error:
            logger.error("%s-%d stays in its log directory: %s", partition.topic, partition.index, error)
            return False
        return True

    def resume(
        self, directory_of: Mapping[Partition, LogDirectory], deferred: Collection[tuple[str, int]] = ()
    ) -> None:
        """Continue the moves of an earlier process, at the start. Delete the future logs that have no use.

        Those of `deferred` replicas, which are not hosted yet, stay until the call after these are. The copy of a
        compacted log begins again: its directory may have been offline meanwhile, and tombstones that it lacks may be
        gone from the present log.
        """
        for directory in self._directories.homes:
            for (topic, index), future in list(directory.futures.items()):
                partition = self._partitions.find(topic, index)
                source = None if partition is None else directory_of.get(partition)
                if partition in self._moves:
                    continue
                if partition is not None and source not in (None, directory) and future.topic_id == partition.topic_id:
                    assert source is not None
                    self.begin(partition, source, directory, is_resumed=True)
                elif not self._partitions.is_unavailable(topic, index) and (topic, index) not in deferred:
                    self._discard((topic, index), directory)

    def assigned_directory_id(self, partition: Partition) -> bytes | None:
        """The directory that the controller must know for a moving replica; None if it does not move."""
        under_way = self._moves.get(partition)
        return None if under_way is None else under_way[0].assigned_directory_id

    # ------------------------------------------------------------------------------------------------------------ ends

    def forget(self, partition: Partition) -> None:
        """The replica cannot be read any more. Its future log stays, because it may be the only copy left."""
        under_way = self._moves.pop(partition, None)
        self._is_over(partition)
        if under_way is not None and under_way[0].state is not MoveState.COPYING:
            # Otherwise the metadata would name a directory that does not have the whole replica.
            self._assignments.report(partition.topic_id, partition.index, under_way[0].source_id)

    def discard(self, topic: str, index: int) -> None:
        """This broker has no replica of the partition any more."""
        for directory in self._directories.homes:
            self._discard((topic, index), directory)

    def _cancel(self, partition: Partition) -> None:
        """End a move; the replica stays in its present directory."""
        replica, directory = self._moves.pop(partition)
        self._is_over(partition)
        partition.log.may_be_cleaned = True
        if replica.state is not MoveState.COPYING:
            self._assignments.report(partition.topic_id, partition.index, replica.source_id)
        self._discard((partition.topic, partition.index), directory)

    def _is_over(self, partition: Partition) -> None:
        """The move is over: DeleteRecords requests no longer wait for the future log."""
        partition.future_log = None
        self._damaged_once.discard(partition)
        self._partitions.deletions.look(partition)

    def _discard(self, key: tuple[str, int], directory: LogDirectory) -> None:
        if self._directories.is_usable(directory) and key in directory.futures:
            try:
                directory.discard_future(*key, self._clock_ms())
            except OSError as error:
                self._directories.failed(directory, error)

    def _directory_failed(self, directory: LogDirectory) -> None:
        for partition, (_, destination) in list(self._moves.items()):
            if destination is directory:
                logger.warning("%s-%d stays in its log directory", partition.topic, partition.index)
                self._cancel(partition)

    async def close(self) -> None:
        self._closed = True
        self._moves.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # --------------------------------------------------------------------------------------------------------- copying

    async def _run(self) -> None:
        try:
            while self._moves:
                is_idle = True
                for partition in list(self._moves):
                    if partition in self._moves and await self._advance(*self._moves[partition]):
                        is_idle = False
                        await asyncio.sleep(0)
                if is_idle:
                    await asyncio.sleep(IDLE_S)
        finally:
            self._task = None

    async def _advance(self, replica: FutureReplica, directory: LogDirectory) -> bool:
        """Run one step. Whether the next one should follow at once."""
        try:
            if replica.partition.log.is_under_cleaning:  # a repair replaces it, or a cleaning that ends has not ended
                self._align(replica)  # DeleteRecords requests wait for it
                return False
            copied = self._copy(replica, directory)
            if copied:
                await self._hold_back(copied)
            elif self._is_current(replica) and replica.has_caught_up:
                await self._has_caught_up(replica, directory)
        except ColdRead as cold:
            await self._warm(cold)
            return True
        except DamagedRecords as error:
            self._copy_is_damaged(replica, directory, str(error))
            return True
        except (CorruptLog, OSError, KafkaError) as error:
            if isinstance(error, KafkaError) and error.code == ErrorCode.CORRUPT_MESSAGE:
                # The present log has damage in bytes that it took for checked: the next read of them starts the repair.
                replica.partition.log.segments.distrust_from(replica.log.log_end_offset)
                return False
            if replica.log.can_retry(error):
                self._log_shortage(replica.partition, error)
                return False
            self._cannot_be_written(replica.partition, directory, error)
            return True
        except Exception:  # a bug here: this replica stays in its directory, and the others still move
            logger.exception("cannot move %s-%d", replica.partition.topic, replica.partition.index)
            if self._is_current(replica):
                self._cancel(replica.partition)
            return True
        return copied > 0

    def _copy(self, replica: FutureReplica, directory: LogDirectory) -> int:
        """Copy the next batches in one turn of the loop. Their size. Raises the errors of a write, and ColdRead."""
        self._align(replica)
        try:
            batches = replica.read_next(STEP_BYTES)
        except DamagedRecords as error:
            self._partitions.refusal(replica.partition, error)  # starts the repair, after which the move continues
            self._log_damage(replica, error.damage)
            return 0
        except (KafkaError, CorruptLog, OSError) as error:
            if is_exhaustion(error):
                raise
            partition = replica.partition
            logger.error("cannot read %s-%d to move it: %s", partition.topic, partition.index, error)
            self._cancel(partition)
            if not isinstance(error, KafkaError):
                self._partitions.failed(partition, error)
            return 0
        if batches is None:
            return 0
        replica.append(batches, self._clock_ms())
        return len(batches)

    def _log_damage(self, replica: FutureReplica, damage: DamagedRange) -> None:
        """Say once of each damaged range that the move waits for its repair: where no replica has a copy, for good."""
        if replica.damage_logged_at != damage.first_offset:
            replica.damage_logged_at = damage.first_offset
            logger.warning(
                "%s waits with its move until it is repaired, or its damaged records are deleted: %s",
                replica.partition, describe(damage),
            )  # fmt: skip

    def _log_shortage(self, partition: Partition, error: Exception) -> None:
        now_s = self._loop.time()
        if now_s >= self._shortage_logged_s + SHORTAGE_LOG_INTERVAL_S:
            self._shortage_logged_s = now_s
            logger.error("cannot move %s-%d now, and perhaps others: %s", partition.topic, partition.index, error)

    def _align(self, replica: FutureReplica) -> None:
        log_start_offset = replica.log.log_start_offset
        replica.align()
        if replica.log.log_start_offset > log_start_offset:
            self._partitions.deletions.look(replica.partition)

    async def _hold_back(self, size_bytes: int) -> None:
        throttle, now_ms = self._throttle, self._loop.time() * 1000
        throttle.bytes_per_s = self._settings.integer(RATE)
        throttle.record(size_bytes, now_ms)
        while pause_ms := throttle.pause_ms(self._loop.time() * 1000):
            await asyncio.sleep(pause_ms / 1000)
            for replica, _ in list(self._moves.values()):  # DeleteRecords requests wait for it, and it copies nothing
                with suppress(CorruptLog, OSError, KafkaError):  # the replica's next step meets the same error
                    self._align(replica)
            throttle.bytes_per_s = self._settings.integer(RATE)

    async def _warm(self, cold: ColdRead) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._partitions.run_cold(cold, lambda: None if done.done() else done.set_result(None))
        await done

    async def _flush(self, log: PartitionLog) -> None:
        """Sync the copied records, so that acknowledged records stay durable after the move."""
        if not log.durability.is_running and log.failure is None:
            task = log.begin_flush()
            done = asyncio.ensure_future(self._run_in_executor(task.run))
            try:
                await asyncio.shield(done)
            finally:  # also when the node stops meanwhile: a log must not be closed during its sync
                await done
                log.finish_flush(task, self._clock_ms())

    # -------------------------------------------------------------------------------------------------------- the end

    async def _has_caught_up(self, replica: FutureReplica, directory: LogDirectory) -> None:
        partition = replica.partition
        if replica.state is MoveState.ASSIGNING:
            return
        await self._flush(replica.log)
        if self._is_current(replica) and not replica.is_checked:
            await self._check(replica, directory)
            return
        if not self._is_current(replica) or partition.log.is_under_cleaning:
            return
        if replica.state is MoveState.COPYING:
            directory.enter_in_cleaner_checkpoint(replica.log)  # once it is assigned, a start may let it take over
            replica.state = MoveState.ASSIGNING
            self._assignments.report(
                partition.topic_id, partition.index, replica.destination_id, lambda: self._on_assigned(replica)
            )
        else:
            self._promote(replica, directory)

    async def _check(self, replica: FutureReplica, directory: LogDirectory) -> None:
        """Read the whole copy from the device and check it. A damaged one is discarded."""
        for segment in list(replica.log.segments):
            is_empty = not segment.size_bytes and segment is replica.log.segments.active
            if not is_empty and not await self._check_segment(replica, segment):
                return  # truncated meanwhile: check it again after it has caught up again
        damaged = replica.log.damaged_ranges()
        if damaged:
            self._copy_is_damaged(replica, directory, f"{damaged[0][0].path}: {describe(damaged[0][1])}")
        replica.is_checked = True

    async def _check_segment(self, replica: FutureReplica, segment: Segment) -> bool:
        """Read a segment of the copy and note its damage. False if the move or the segment has changed meanwhile."""
        generation, is_done = segment.generation, False
        scrub = Scrub(replica.log, segment)
        try:
            while not scrub.is_done and self._is_current(replica):
                before = scrub.verified_bytes
                await until_done(self._run_in_executor(partial(scrub.run, CHECKED_BYTES)))
                await self._hold_back(scrub.verified_bytes - before)
                if self._is_current(replica):
                    self._align(replica)
            is_same = self._is_current(replica) and replica.log.failure is None
            is_done = scrub.is_done and is_same and segment.generation == generation
        finally:
            if not is_done:
                scrub.abandon()
        if is_done:
            scrub.finish()
        return is_done

    def _copy_is_damaged(self, replica: FutureReplica, directory: LogDirectory, why: str) -> None:
        """Begin anew, once: the present replica is whole, or is being repaired."""
        partition = replica.partition
        if not self._is_current(replica):
            return
        is_again = partition in self._damaged_once
        logger.error("%s-%d: the copy in %s is damaged: %s", partition.topic, partition.index, directory.path, why)
        if is_again or not self._directories.is_usable(directory):
            self._cancel(partition)
        elif self._begin_anew(partition, directory):
            self._damaged_once.add(partition)

    def _is_current(self, replica: FutureReplica) -> bool:
        under_way = self._moves.get(replica.partition)
        return under_way is not None and under_way[0] is replica

    def _on_assigned(self, replica: FutureReplica) -> None:
        if self._is_current(replica):
            replica.state = MoveState.ASSIGNED

    def _promote(self, replica: FutureReplica, directory: LogDirectory) -> None:
        """Replace the present log by the future log, in one turn of the loop, between two appends."""
        partition, future = replica.partition, replica.log
        while self._copy(replica, directory):
            pass  # copies the records that were appended during the sync
        if not self._is_current(replica) or not replica.has_caught_up or future.durability.is_running:
            return
        if not replica.has_what_is_acknowledged:  # a loss of power could then lose acknowledged records
            replica.overtaken_times += 1
            if replica.overtaken_times <= OVERTAKEN_TIMES_MAX:
                return
            future.flush()
        replica.keep_ends()
        directory.promote_future(partition.topic, partition.index)
        del self._moves[partition]
        replica.take_over()
        self._is_over(partition)
        logger.info("%s-%d is now in %s", partition.topic, partition.index, directory.path)
        self.on_promoted(partition, directory)
        self._partitions.flushes.acknowledge(partition)  # what waited for a sync of the present log that was put off
        self._partitions.flushes.flush_if_due(partition)

    def _cannot_be_written(self, partition: Partition, directory: LogDirectory, error: Exception) -> None:
        logger.error("cannot move %s-%d to %s: %s", partition.topic, partition.index, directory.path, error)
        if isinstance(error, OSError):
            self._directories.failed(directory, error)
        if partition in self._moves:
            self._cancel(partition)
