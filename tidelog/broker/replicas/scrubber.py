"""The scrubber reads every segment of every log periodically, to detect damage before a reader meets it.

It reads one segment at a time on a thread, at a bounded rate. `storage/log/scrub.py` checks the contents, `repairs.py`
repairs the damage. `log.scrub.bytes.per.second=0` turns the scrubber off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tidelog.replication.threads import until_done
from tidelog.storage.log.scrub import Scrub, check_small_files

if TYPE_CHECKING:
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.broker.replicas.repairs import Repairs
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.scrubber")

FIRST_PASS_S: Final = 60.0
"""The delay of the first pass, because a node is busy just after its start."""
TRUST_S: Final = 30.0
PIECE_S: Final = 0.25
URGENT_BYTES_PER_S: Final = 8 * 1024 * 1024
"""The rate for one log that must be checked at once while the scrubber is off."""
WHOLE_BYTES_PER_S: Final = 32 * 1024 * 1024
"""The lowest rate for a log for which a reassignment waits."""
PIECE_BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(slots=True)
class ScrubCounters:
    """Counters since the start."""

    verified_bytes: int = 0
    passes: int = 0


class Scrubber:
    def __init__(
        self,
        config: NodeConfig,
        partitions: Partitions,
        repairs: Repairs,
        loop: asyncio.AbstractEventLoop,
        run_in_executor: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self.counters = ScrubCounters()
        self._rate_bytes = config.integer("log.scrub.bytes.per.second")
        self._interval_s = config.integer("log.scrub.interval.ms") / 1000
        self._partitions = partitions
        self._repairs = repairs
        self._loop = loop
        self._run_in_executor = run_in_executor
        self._task: asyncio.Task[None] | None = None
        self._urgent: asyncio.Task[bool] | None = None
        self._aging: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._aging = self._loop.call_later(TRUST_S, self._age)
        if self._rate_bytes > 0:
            self._task = self._loop.create_task(self._run(), name="scrubber")

    async def close(self) -> None:
        if self._aging is not None:
            self._aging.cancel()
        tasks = [task for task in (self._task, self._urgent) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _age(self) -> None:
        self._aging = self._loop.call_later(TRUST_S, self._age)
        for partition in self._partitions.hosted():
            partition.log.segments.age_trust()

    async def _run(self) -> None:
        await asyncio.sleep(min(FIRST_PASS_S, self._interval_s))
        while True:
            began = self._loop.time()
            for partition in list(self._partitions.hosted()):
                await self._pass_over(partition)
            self.counters.passes += 1
            await asyncio.sleep(max(0.1, self._interval_s - (self._loop.time() - began)))

    async def _pass_over(self, partition: Partition) -> None:
        """Scrub one partition if this node still hosts it. An error fails only this partition."""
        await asyncio.sleep(0)  # thousands of empty logs must not block the loop
        log = partition.log
        if not self._is_hosted(partition, log):
            return
        try:
            for _ in check_small_files(log):
                await asyncio.sleep(0)  # a log may have thousands of them
                if not self._is_hosted(partition, log):
                    return
            # Reports damage that was met by a caller other than a client's read.
            self._repairs.look_at(partition)
        except Exception as error:
            self._partitions.refusal(partition, error)
        for segment in list(partition.log.segments):
            if self._is_to_be_read(partition, segment):
                try:
                    await self._scrub(partition, segment)
                except Exception as error:
                    self._partitions.refusal(partition, error)

    def look_soon(self, log: PartitionLog) -> None:
        """The cleaner could not read this log: scrub it now, unless another such scrub is running."""
        partition = next((each for each in self._partitions.hosted() if each.log is log), None)
        if partition is not None and (self._urgent is None or self._urgent.done()):
            log.segments.release(keep_active=True)  # a file that was removed while it is open seems whole
            self._urgent = self._loop.create_task(self.read_whole(partition, 0), name="scrub at once")

    async def read_whole(self, partition: Partition, rate_min: int = WHOLE_BYTES_PER_S) -> bool:
        """Read all that the log has now, at once, and report its damage. False if it was not read to its end.

        A segment that is replaced meanwhile was read by the cleaner or the repair that replaced it.
        """
        log = partition.log
        try:
            for segment in list(log.segments):
                if self._is_to_be_read(partition, segment):
                    await self._scrub(partition, segment, rate_min)
        except Exception as error:
            self._partitions.refusal(partition, error)
            return False
        return self._is_hosted(partition, log)

    def _is_to_be_read(self, partition: Partition, segment: Segment) -> bool:
        """Whether the segment was not deleted or cleaned meanwhile, and is not an empty active segment."""
        log = partition.log
        is_there = any(each is segment for each in log.segments) and self._is_hosted(partition, log)
        return is_there and (segment.size_bytes > 0 or segment is not log.segments.active)

    def _is_hosted(self, partition: Partition, log: PartitionLog) -> bool:
        """Whether this node hosts the partition, with this log: a move to another directory may have replaced it."""
        is_there = self._partitions.find(partition.topic, partition.index) is partition and partition.log is log
        return is_there and not partition.offline and log.failure is None

    async def _scrub(self, partition: Partition, segment: Segment, rate_min: int = 0) -> None:
        rate, log = max(self._rate_bytes or URGENT_BYTES_PER_S, rate_min), partition.log
        scrub = Scrub(log, segment)
        finished = False
        try:
            while not scrub.is_done and self._is_hosted(partition, log):
                piece = min(PIECE_BYTES_MAX, max(64 * 1024, int(rate * PIECE_S)))
                before = scrub.verified_bytes
                await until_done(self._run_in_executor(partial(scrub.run, piece)))
                verified = scrub.verified_bytes - before
                self.counters.verified_bytes += verified
                # A small segment uses only its own size of the rate.
                await asyncio.sleep(min(piece, max(verified, 4096)) / rate)
            finished = True
        finally:
            if not finished or not self._is_hosted(partition, log):
                scrub.abandon()
            elif scrub.finish():
                logger.warning("%s-%d: found damage in %s", partition.topic, partition.index, segment.path)
                self._repairs.look_at(partition)
