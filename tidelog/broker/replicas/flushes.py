"""The group-commit flushes of the partitions on this node: on threads, at most one per log at a time.

The log decides what a flush syncs and acknowledges (`storage/log/flush.py`). This module starts a flush when it is due
and notifies the waiting requests. Invariant: a failed sync is tried again only if it lost nothing, and the records that
it covers are acknowledged only after a sync has succeeded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidelog.broker.network.counters import Histogram
from tidelog.storage.log.partition_log import CorruptLog

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from tidelog.broker.scheduling.purgatory import Settled
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.flush import FlushTask
    from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.partitions")

# Begun flushes of one log directory without a result. More would wait for the threads: the others begin when one of
# these ends. Each begin takes the loop 80 us, and the first records of thousands of new partitions may come at the same
# moment.
UNDER_WAY_MAX = 100
SHORTAGE_PAUSE_S = 1.0  # the pause after a sync that failed for want of file descriptors


def home_of(directory: str) -> str:
    """The log directory in which a log has its own."""
    return directory.rpartition("/")[0]


class Flushes:
    """`threads_of(path)`: the threads for the log directory with this path. `is_hosted(partition)`: whether this node
    still hosts it. `fail(partition, error)`: its log is unusable. `settle(callbacks, error)`: calls those of produces.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads_of: Callable[[str], Executor | None],
        clock_ms: Callable[[], int],
        stopwatch: Callable[[], float],
        is_hosted: Callable[[Partition], bool],
        fail: Callable[[Partition, Exception], None],
        settle: Callable[[list[Settled], Exception | None], None],
    ) -> None:
        self.durations = Histogram()
        self.on_flushed: Callable[[Partition], None] | None = None
        """Called when a follower's records that waited for the sync are on the device."""
        self.on_shortage: Callable[[], None] = lambda: None
        self._loop = loop
        self._threads_of = threads_of
        self._clock_ms = clock_ms
        self._stopwatch = stopwatch
        self._is_hosted = is_hosted
        self._fail = fail
        self._settle = settle
        self._under_way: set[asyncio.Future[None]] = set()
        # By log directory, so that a slow device does not hold up the flushes of others.
        self._count_of: dict[str, int] = {}  # of those under way
        self._waiting: dict[str, dict[Partition, None]] = {}
        self._short: dict[Partition, asyncio.TimerHandle] = {}  # to sync again after a shortage
        self._is_closing = False

    def flush_if_due(self, partition: Partition) -> None:
        if partition.log.flush_due:
            self.flush(partition)

    def flush(self, partition: Partition) -> None:
        """Sync all records appended so far with one fdatasync on a thread. Later records wait for the next sync."""
        if self._is_closing:
            return
        home = home_of(partition.log.directory)
        if home in self._waiting or self._is_full(home):
            # Also after its own sync: those that wait longer come first.
            self._waiting.setdefault(home, {})[partition] = None
            self._begin_waiting(home)
        else:
            self._begin(partition, home)

    def _is_full(self, home: str) -> bool:
        return self._count_of.get(home, 0) >= UNDER_WAY_MAX

    def _begin(self, partition: Partition, home: str) -> None:
        log = partition.log
        try:
            task = log.begin_flush()
        except OSError as error:
            self._cannot_sync(partition, log, error)
            return
        began = self._stopwatch()
        future = self._loop.run_in_executor(self._threads_of(home), task.run)
        self._under_way.add(future)
        self._count_of[home] = self._count_of.get(home, 0) + 1

        def flushed(done: asyncio.Future[None]) -> None:
            self._under_way.discard(done)
            self._count_of[home] -= 1
            if not self._count_of[home]:
                del self._count_of[home]
            self.durations.observe(self._stopwatch() - began)
            try:
                self._flushed(partition, log, task, done)
            finally:
                self._begin_waiting(home)

        future.add_done_callback(flushed)

    def _flushed(self, partition: Partition, log: PartitionLog, task: FlushTask, done: asyncio.Future[None]) -> None:
        try:
            done.result()
            log.finish_flush(task, self._clock_ms())
        except (OSError, CorruptLog) as error:
            if self._cannot_sync(partition, log, error):
                return
        if partition.offline or not self._is_hosted(partition):
            return
        self.acknowledge(partition)
        if self.on_flushed is not None and not partition.leads and partition.log.durability.blocked_from < 0:
            self.on_flushed(partition)
        if partition.log.flush_due:
            self.flush(partition)

    def _begin_waiting(self, home: str) -> None:
        while home in self._waiting and not self._is_full(home) and not self._is_closing:
            waiting = self._waiting[home]
            partition = next(iter(waiting))
            del waiting[partition]
            if not waiting:
                del self._waiting[home]
            if self._is_hosted(partition) and not partition.offline and partition.log.flush_due:
                self._begin(partition, home_of(partition.log.directory))  # which it may have left meanwhile

    def acknowledge(self, partition: Partition) -> None:
        """Acknowledge the records that are synced in the partition's present log.

        The log may have moved to another directory since the records were appended.
        """
        partition.advance_high_watermark()
        self._settle(partition.watch.syncs.take_reached(partition.log.committable_offset), None)

    def _cannot_sync(self, partition: Partition, log: PartitionLog, error: OSError | CorruptLog) -> bool:
        """Whether the sync is only deferred: it stays due, and the waiting requests are not acknowledged yet."""
        if not log.can_retry(error):
            self._fail(partition, error)
            return False
        if partition not in self._short:
            logger.error("cannot sync %s-%d now: %s", partition.topic, partition.index, error)
            self._short[partition] = self._loop.call_later(SHORTAGE_PAUSE_S, self._sync_again, partition)
            self.on_shortage()
        return True

    def sync_short(self) -> None:
        """Files were closed: sync what met a shortage, at once. Later the logs in use may have opened theirs again."""
        for partition in list(self._short):
            self._sync_again(partition)

    def _sync_again(self, partition: Partition) -> None:
        self._short.pop(partition).cancel()  # otherwise each retry that fails leaves one more timer
        if self._is_hosted(partition) and not partition.offline:
            self.flush_if_due(partition)

    async def close(self) -> None:
        """Start no more flushes, and wait for those that run."""
        self._is_closing = True
        while self._under_way:
            await asyncio.wait(self._under_way)
