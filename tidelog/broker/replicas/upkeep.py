"""Periodic work for the logs of a node: checkpoints, retention, flushes by time, file removals, ISR checks.

Each kind of work has a timer, as in Kafka's LogManager, with an interval from the configuration. The logs and the
partitions do the work. Invariant: each directory has at most one checkpoint task and one file removal at a time, and an
error of a device fails its directory, not the upkeep.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from tidelog.broker.replicas import rounds
from tidelog.storage.files.disk import is_exhaustion
from tidelog.storage.files.log_names import DELETE_SUFFIX
from tidelog.storage.log.saved_rows import save_index_rows

if TYPE_CHECKING:
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.storage.files.checkpoints import CheckpointTask
    from tidelog.storage.files.disk import Disk
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.upkeep")

# Kafka's LogManager.InitialTaskDelayMs.
FIRST_RETENTION_MS = 30_000
# Longer than a node runs, and short enough for every event loop's timers.
INTERVAL_MS_MAX = 365 * 24 * 60 * 60 * 1000
# How long one turn of the loop maintains logs.
TURN_S = 0.005
# The least time between two rounds that close the files of all logs.
FILES_PAUSE_S = 1.0

RunInExecutor = Callable[[Callable[[], None]], "asyncio.Future[None]"]


class _Removal:
    """Removes files and directories that were renamed before, so no other code uses them.

    `run` is called once, on any thread, because freeing the pages of a gigabyte takes some hundred milliseconds.
    """

    def __init__(self, disk: Disk, paths: list[str]) -> None:
        self._disk = disk
        self.remaining_paths = paths
        self.error: OSError | None = None
        self.is_stopped = False

    def run(self) -> None:
        while self.remaining_paths and not self.is_stopped:  # the next start removes the rest
            path = self.remaining_paths[-1]
            try:
                if path.endswith(DELETE_SUFFIX):
                    self._disk.remove_tree(path)
                else:
                    self._disk.remove(path)
            except FileNotFoundError:
                pass  # the log was deleted or moved meanwhile
            except OSError as error:
                self.error = error
                return
            self.remaining_paths.pop()


class Upkeep:
    def __init__(
        self,
        config: NodeConfig,
        directories: LogDirectories,
        partitions: Partitions,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
        run_in_executor: RunInExecutor,
        disk: Disk,
    ) -> None:
        self._config = config
        self._directories = directories
        self._partitions = partitions
        self._loop = loop
        self._clock_ms = clock_ms
        self._run_in_executor = run_in_executor
        self._disk = disk
        self.on_doubt: Callable[[PartitionLog], None] = lambda log: None
        """Called with each log to which retention could not be applied, because an index is wrong."""
        self._checkpointing: set[LogDirectory] = set()
        self._is_closed = False
        self._round: Iterator[None] | None = None
        """The maintenance of all logs that is under way."""
        self._looks_again = False
        self._is_expiring = False
        self._is_closing_files = False
        self.after_shortage: tuple[Callable[[], None], ...] = ()
        """They try what met a shortage again. Called when `close_files` is done, before others open their files."""
        self._doomed: dict[LogDirectory, list[str]] = {}
        self._removals: dict[LogDirectory, _Removal] = {}
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}

    def start(self) -> None:
        self._every(self._config.integer("replica.high.watermark.checkpoint.interval.ms"), self.checkpoint)
        retention_ms = self._config.integer("log.retention.check.interval.ms")
        self._every(retention_ms, self.look_after, min(retention_ms, FIRST_RETENTION_MS))
        self._every(self._config.integer("log.flush.scheduler.interval.ms"), self.flush_by_time)
        self._every(self._config.integer("producer.id.expiration.check.interval.ms"), self._expire_producers)
        self._every(self._config.integer("replica.lag.time.max.ms") // 2, self._check_isrs)

    def close(self) -> None:
        self._is_closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for removal in self._removals.values():
            removal.is_stopped = True

    def _every(self, interval_ms: int, work: Callable[[], None], first_ms: int | None = None) -> None:
        interval_s = min(max(interval_ms, 1), INTERVAL_MS_MAX) / 1000

        def run() -> None:
            self._timers[work] = self._loop.call_later(interval_s, run)
            work()

        self._timers[work] = self._loop.call_later(interval_s if first_ms is None else first_ms / 1000, run)

    def checkpoint(self) -> None:
        """Write the checkpoints of all directories, on threads, because the device may be slow."""
        for directory in self._directories:
            self._checkpoint(directory)

    def _checkpoint(self, directory: LogDirectory) -> None:
        if directory not in self._checkpointing:
            self._checkpointing.add(directory)
            self._begin_checkpoint(directory, chain(save_index_rows(directory.logs), directory.checkpoint_steps()))

    def _begin_checkpoint(self, directory: LogDirectory, steps: Iterator[CheckpointTask | None]) -> None:
        """One step of it. It does not end where the logs are being closed, which writes the checkpoints."""
        if self._is_closed:
            return
        try:
            task = next(steps)
        except Exception as error:
            self._checkpoint_failed(directory, error)
            return
        if task is None:
            self._loop.call_soon(self._begin_checkpoint, directory, steps)
            return
        written = self._run_in_executor(task.run)
        written.add_done_callback(partial(self._checkpointed, directory, task))

    def _checkpointed(self, directory: LogDirectory, task: CheckpointTask, written: asyncio.Future[None]) -> None:
        try:
            if directory.finish_checkpoints(task) and not self._is_closed:
                synced = self._run_in_executor(task.sync)
                synced.add_done_callback(partial(self._synced, directory, task))
                return
        except Exception as error:
            self._checkpoint_failed(directory, error)
        self._checkpointing.discard(directory)
        self._time_removals()  # includes files deleted since the last call

    def _checkpoint_failed(self, directory: LogDirectory, error: Exception) -> None:
        self._checkpointing.discard(directory)
        if isinstance(error, OSError):
            self._directories.failed(directory, error)
        else:  # a bug here, or no memory: the next checkpoint begins anew
            logger.error("a checkpoint of %s failed", directory.path, exc_info=error)

    def _synced(self, directory: LogDirectory, task: CheckpointTask, synced: asyncio.Future[None]) -> None:
        if self._is_closed:
            return  # another process may have the directory by now
        steps = directory.synced_checkpoint_steps(task, self._clock_ms())
        self._begin_round(steps, partial(self._checkpoint_ended, directory))

    def _begin_round(self, steps: Iterator[None], on_end: Callable[[Exception | None], None]) -> None:
        rounds.go_on(self._loop, steps, TURN_S, lambda: self._is_closed, on_end)

    def _checkpoint_ended(self, directory: LogDirectory, error: Exception | None) -> None:
        if error is not None:
            self._checkpoint_failed(directory, error)
        self._checkpointing.discard(directory)
        self._time_removals()

    def _check_isrs(self) -> None:
        for partition in self._partitions.hosted():
            partition.check_isr()
            self._partitions.observe_followers_outside_isr(partition)

    def look_after(self) -> None:
        """Apply retention and the other periodic maintenance of the logs, in turns of the loop."""
        if self._round is None:
            self._round = self._look_at_all()
            self._begin_round(self._round, self._round_ended)
        else:
            self._looks_again = True

    def _round_ended(self, error: Exception | None) -> None:
        if error is not None:  # a bug here: the next round begins anew
            logger.error("the maintenance of the logs failed", exc_info=error)
        self._round = None
        self._time_removals()
        if self._looks_again:
            self._looks_again = False
            self.look_after()

    def _look_at_all(self) -> Iterator[None]:
        now_ms = self._clock_ms()
        for directory in self._directories:
            doomed: list[str] = []
            try:
                for log, log_start_offset in directory.maintained(now_ms, doomed):
                    self._maintained(log, log_start_offset)
                    yield
                if directory.has_condemned:
                    self._checkpoint(directory)  # where one is under way, the next one has them
            except OSError as error:
                self._directories.failed(directory, error)
            except Exception:  # a bug here in one directory: the others still need maintenance
                logger.exception("the maintenance of the logs in %s failed", directory.path)
            self._doomed.setdefault(directory, []).extend(doomed)
            self._remove(directory)

    def cleaned(self, log: PartitionLog) -> None:
        partition = self._partitions.find(log.topic, log.partition)
        if partition is not None and partition.log is log:
            self._partitions.flushes.flush_if_due(partition)

    def _maintained(self, log: PartitionLog, log_start_offset: int) -> None:
        partition = self._partitions.find(log.topic, log.partition)
        if partition is None or partition.log is not log:
            return
        if log.log_start_offset != log_start_offset:
            self._partitions.reported_values_changed(partition)
        if log.flush_due:
            self._partitions.flushes.flush(partition)
        if log.is_doubtful:
            log.is_doubtful = False
            self.on_doubt(log)

    def _expire_producers(self) -> None:
        """In turns of the loop, because clients may have had many producers in each of many partitions."""
        if not self._is_expiring:
            self._is_expiring = True
            self._begin_round(self._expire_of_each(), self._expiry_ended)

    def _expire_of_each(self) -> Iterator[None]:
        now_ms = self._clock_ms()
        for partition in list(self._partitions.hosted()):
            partition.log.expire_producers(now_ms)
            yield

    def _expiry_ended(self, error: Exception | None) -> None:
        if error is not None:  # a bug here: the next round begins anew
            logger.error("the look for idle producers failed", exc_info=error)
        self._is_expiring = False

    def close_files(self) -> None:
        """The process is short of file descriptors: close those of all logs, in turns of the loop.

        A log opens its files again when it needs them, so more logs may be in use than there are descriptors.
        """
        if not self._is_closing_files:
            self._is_closing_files = True
            self._begin_round(self._close_files_of_each(), self._files_closed)

    def _close_files_of_each(self) -> Iterator[None]:
        for partition in list(self._partitions.hosted()):
            partition.log.segments.release()
            yield

    def _files_closed(self, error: Exception | None) -> None:
        if error is not None:
            logger.error("the files of the logs could not be closed", exc_info=error)
        for try_again in self.after_shortage:
            try_again()
        self._loop.call_later(FILES_PAUSE_S, self._may_close_files)

    def _may_close_files(self) -> None:
        self._is_closing_files = False

    def flush_by_time(self) -> None:
        """Flush the logs with unsynced records older than flush.ms."""
        now_ms = self._clock_ms()
        for partition in list(self._partitions.hosted()):
            log = partition.log
            log.durability.want_by_time(now_ms, log.config.flush_ms, log.log_end_offset)
            self._partitions.flushes.flush_if_due(partition)

    # -- removals ----------------------------------------------------------------------------------------------------

    def _time_removals(self) -> None:
        """Start the timer for the next due removal of deleted files and directories.

        In a directory whose checkpoints are being written, removals wait for them.
        """
        if self._is_closed:
            return
        directories = [directory for directory in self._directories if directory not in self._checkpointing]
        due_ms = [one for one in (directory.next_removal_ms() for directory in directories) if one is not None]
        timer = self._timers.pop(self.remove_due, None)
        if timer is not None:
            timer.cancel()
        if due_ms:
            delay_ms = min(max(min(due_ms) - self._clock_ms(), 0), INTERVAL_MS_MAX)
            self._timers[self.remove_due] = self._loop.call_later(delay_ms / 1000, self.remove_due)

    def remove_due(self) -> None:
        now_ms = self._clock_ms()
        for directory in self._directories:
            doomed = self._doomed.setdefault(directory, [])
            doomed += directory.take_doomed(now_ms)
            self._remove(directory)
            if directory.has_due(now_ms):
                self._checkpoint(directory)
        self._time_removals()

    def _remove(self, directory: LogDirectory) -> None:
        doomed = self._doomed.pop(directory)
        if directory in self._removals:
            self._doomed[directory] = doomed  # removed when the running removal has ended
        elif doomed:
            removal = self._removals[directory] = _Removal(self._disk, doomed)
            removed = self._run_in_executor(removal.run)
            removed.add_done_callback(partial(self._removed, directory, removal))

    def _removed(self, directory: LogDirectory, removal: _Removal, removed: asyncio.Future[None]) -> None:
        del self._removals[directory]
        if removal.error is not None:
            self._directories.failed(directory, removal.error)
            if not is_exhaustion(removal.error):
                self._doomed.pop(directory, None)
                return
        waiting = [*removal.remaining_paths, *self._doomed.pop(directory, ())]
        if waiting:
            self._doomed[directory] = waiting
        if (
            waiting and not removal.remaining_paths and not removal.is_stopped
        ):  # otherwise the next maintenance tries again
            self._remove(directory)
