"""Replicas that move from one log directory of this broker to another, while they are read and written as ever.

Each is copied by and by (`replication/future_replica.py`), on the loop in short steps, with what waits for a device on
a thread. When it has caught up the controller is told, then it takes the place of the present one. Kafka's
ReplicaAlterLogDirsManager. Invariant: whatever happens before that, the present replica stays what it is, and the
controller is told so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from tidelog.broker.replicas.log_directories import CORDONED
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.future_replica import FutureReplica, MoveState
from tidelog.replication.throttle import Throttle
from tidelog.storage.files.disk import is_exhaustion
from tidelog.storage.files.log_names import NAME_LENGTH_MAX, future_name
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.segments.damage import DamagedRecords
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

logger = logging.getLogger("tidelog.moves")

RATE = "replica.alter.log.dirs.io.max.bytes.per.second"
STEP_BYTES = 1 << 20
IDLE_S = 0.02
# Until the rate is looked up again: it may have been raised.
PAUSE_S_MAX = 0.5
# Where replicas that are not here yet are to be made (Kafka keeps any number of them).
PREFERRED_MAX = 10_000
# Syncs of a copy beside which the present log acknowledged more, until one is done on the loop, so that the move ends.
OVERTAKEN_TIMES_MAX = 50


class ReplicaMoves:
    """`on_promoted(partition, directory)`: its log is another one now, and lies there."""

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
        """Directories wanted for replicas that were not here when they were asked for."""
        self._moves: dict[Partition, tuple[FutureReplica, LogDirectory]] = {}
        self._throttle = Throttle()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        directories.on_offline.append(self._directory_failed)

    # ------------------------------------------------------------------------------------------------ what is asked for

    def order(self, topic: str, index: int, path: str) -> None:
        """Have the replica lie there. Raises KafkaError, with the codes of Kafka's ReplicaManager."""
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
            # The same replica might be on its way in the one that is out of reach.
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

    def begin(self, partition: Partition, source: LogDirectory, directory: LogDirectory) -> None:
        """There is a future log in `directory`: bring it up to the present one."""
        future = directory.futures[partition.topic, partition.index]
        replica = FutureReplica(partition, future, source.directory_id, directory.directory_id)
        logger.info("%s-%d moves from %s to %s", partition.topic, partition.index, source.path, directory.path)
        partition.log.keep_uncleaned()
        self._moves[partition] = replica, directory
        partition.future_log = future
        if self._task is None and not self._closed:
            self._task = self._loop.create_task(self._run(), name="replica moves")

    def resume(self, directory_of: Mapping[Partition, LogDirectory]) -> None:
        """Go on with what an earlier process began, at the start; what it began in vain goes."""
        for directory in self._directories.homes:
            for (topic, index), future in list(directory.futures.items()):
                partition = self._partitions.find(topic, index)
                source = None if partition is None else directory_of.get(partition)
                if partition is not None and source not in (None, directory) and future.topic_id == partition.topic_id:
                    assert source is not None
                    self.begin(partition, source, directory)
                elif not self._partitions.is_unavailable(topic, index):
                    self._discard((topic, index), directory)

    def told_directory(self, partition: Partition) -> bytes | None:
        """Where the controller is to believe that a moving replica lies."""
        under_way = self._moves.get(partition)
        return None if under_way is None else under_way[0].told_directory

    # -------------------------------------------------------------------------------------------------------- given up

    def forget(self, partition: Partition) -> None:
        """The replica cannot be read any more. What was copied stays, as it may be all that is left."""
        under_way = self._moves.pop(partition, None)
        self._is_over(partition)
        if under_way is not None and under_way[0].state is not MoveState.COPYING:
            # Else the controller would go on believing in a replica that lies, whole, where it never came to lie.
            self._assignments.lies_in(partition.topic_id, partition.index, under_way[0].source_id)

    def discard(self, topic: str, index: int) -> None:
        """The replica is not to be here any more."""
        for directory in self._directories.homes:
            self._discard((topic, index), directory)

    def _cancel(self, partition: Partition) -> None:
        """The replica stays where it is, for now."""
        replica, directory = self._moves.pop(partition)
        self._is_over(partition)
        partition.log.may_be_cleaned = True
        if replica.state is not MoveState.COPYING:
            self._assignments.lies_in(partition.topic_id, partition.index, replica.source_id)
        self._discard((partition.topic, partition.index), directory)

    def _is_over(self, partition: Partition) -> None:
        """Its deletions wait for no other log any more."""
        partition.future_log = None
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
                logger.warning("%s-%d stays where it is", partition.topic, partition.index)
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
        """One step; whether the next should follow at once."""
        try:
            copied = self._copy(replica, directory)
            if copied:
                await self._hold_back(copied)
            elif self._is_current(replica) and replica.has_caught_up:
                await self._has_caught_up(replica, directory)
        except ColdRead as cold:
            await self._warm(cold)
            return True
        except (CorruptLog, OSError, KafkaError) as error:
            if replica.log.can_retry(error):
                logger.error("%s-%d is not moved for now: %s", replica.partition.topic, replica.partition.index, error)
                return False
            self._cannot_be_written(replica.partition, directory, error)
            return True
        except Exception:  # a bug of ours: this one stays where it is, and the others still move
            logger.exception("%s-%d cannot be moved", replica.partition.topic, replica.partition.index)
            if self._is_current(replica):
                self._cancel(replica.partition)
            return True
        return copied > 0

    def _copy(self, replica: FutureReplica, directory: LogDirectory) -> int:
        """The next batches, in one turn of the loop; their size. Raises what writing them does, and ColdRead."""
        self._align(replica)
        try:
            batches = replica.read_next(STEP_BYTES)
        except DamagedRecords as error:
            self._partitions.refusal(replica.partition, error)  # which has it repaired: the move goes on behind that
            return 0
        except (KafkaError, CorruptLog, OSError) as error:
            if is_exhaustion(error):
                raise
            partition = replica.partition
            logger.error("%s-%d cannot be read to be moved: %s", partition.topic, partition.index, error)
            self._cancel(partition)
            if not isinstance(error, KafkaError):
                self._partitions.failed(partition, error)
            return 0
        if batches is None:
            return 0
        replica.append(batches, self._clock_ms())
        return len(batches)

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
            await asyncio.sleep(min(pause_ms / 1000, PAUSE_S_MAX))
            for replica, _ in list(self._moves.values()):  # deletions wait for it, and it costs nothing of the rate
                with suppress(CorruptLog, OSError, KafkaError):  # which its own turn is to meet
                    self._align(replica)
            if self._settings.integer(RATE) != throttle.bytes_per_s:
                self._throttle = Throttle()
                return

    async def _warm(self, cold: ColdRead) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._partitions.run_cold(cold, lambda: None if done.done() else done.set_result(None))
        await done

    async def _flush(self, log: PartitionLog) -> None:
        """What was copied reaches its device, so that what was acknowledged stays so."""
        if not log.durability.is_running and log.failure is None:
            task = log.begin_flush()
            done = asyncio.ensure_future(self._run_in_executor(task.run))
            try:
                await asyncio.shield(done)
            finally:  # also where the node stops meanwhile: a log is not closed while it is being synced
                await done
                log.finish_flush(task, self._clock_ms())

    # -------------------------------------------------------------------------------------------------------- the end

    async def _has_caught_up(self, replica: FutureReplica, directory: LogDirectory) -> None:
        partition = replica.partition
        if replica.state is MoveState.TELLING:
            return
        await self._flush(replica.log)
        if not self._is_current(replica):
            return
        if replica.state is MoveState.COPYING:
            replica.state = MoveState.TELLING
            self._assignments.lies_in(
                partition.topic_id, partition.index, replica.destination_id, lambda: self._told(replica)
            )
        else:
            self._promote(replica, directory)

    def _is_current(self, replica: FutureReplica) -> bool:
        under_way = self._moves.get(replica.partition)
        return under_way is not None and under_way[0] is replica

    def _told(self, replica: FutureReplica) -> None:
        if self._is_current(replica):
            replica.state = MoveState.TOLD

    def _promote(self, replica: FutureReplica, directory: LogDirectory) -> None:
        """In one turn of the loop, between two appends."""
        partition, future = replica.partition, replica.log
        while self._copy(replica, directory):
            pass  # what came while the rest was synced
        if not self._is_current(replica) or not replica.has_caught_up or future.durability.is_running:
            return
        if not replica.has_what_is_acknowledged:  # else a loss of power could take what is acknowledged
            replica.overtaken_times += 1
            if replica.overtaken_times <= OVERTAKEN_TIMES_MAX:
                return
            future.flush()
        directory.promote_future(partition.topic, partition.index)
        del self._moves[partition]
        replica.take_over()
        self._is_over(partition)
        logger.info("%s-%d lies in %s now", partition.topic, partition.index, directory.path)
        self.on_promoted(partition, directory)
        self._partitions.flushes.flush_if_due(partition)

    def _cannot_be_written(self, partition: Partition, directory: LogDirectory, error: Exception) -> None:
        logger.error("%s-%d cannot be moved to %s: %s", partition.topic, partition.index, directory.path, error)
        if isinstance(error, OSError):
            self._directories.failed(directory, error)
        if partition in self._moves:
            self._cancel(partition)
