"""A leader that was elected uncleanly copies the records that other replicas have past its log end, before it leads.

When no replica is eligible, the controller elects the last known leader (KIP-966). Its disk may have lost records, and
the other replicas would truncate their logs to its end. So it first fetches from them. It takes a replica's records if
that log continues this one's last batch in the same leader epoch. Among several it takes the latest epoch, then the
longest log. Invariant: until that is done the partition has no leader here, so no replica truncates.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.errors import KafkaError
from tidelog.replication.controller.metadata.image import RECOVERING
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.log.damaged_end import damaged_end, move_damaged_end

if TYPE_CHECKING:
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.broker.replicas.repairs import Repairs
    from tidelog.replication.controller.metadata.image import PartitionImage
    from tidelog.replication.partition import Partition
    from tidelog.storage.segments.damage import DamagedRange

logger = logging.getLogger("tidelog.repairs")

TAIL_BYTES_MAX: Final = 16 * 1024 * 1024
"""Read from one replica in one round; the next round reads what follows."""
ASK_S_MAX: Final = 2.0
"""Time for the answers of one replica, without the time in the queue."""
FETCHES_MAX: Final = 16
"""Concurrent fetches for all partitions of the node. An answer holds `repairs.FETCH_BYTES_MAX`, or one batch."""


class Tail(NamedTuple):
    """The records that a replica has past a log's end. Tails compare by epoch, then end offset, as in an election."""

    last_epoch: int
    end_offset: int
    source: int
    size_bytes: int
    boundary: int
    """The end of the replica's batch with the log's last offset: above the log end if that lies inside this batch."""


class UncleanLeaders:
    """Calls `on_done(partition)` when the replica may take its delayed role."""

    def __init__(
        self,
        partitions: Partitions,
        repairs: Repairs,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
    ) -> None:
        self.on_done: Callable[[Partition], None] = lambda partition: None
        self._partitions = partitions
        self._repairs = repairs
        self._loop = loop
        self._clock_ms = clock_ms
        self._comparisons: dict[Partition, asyncio.Task[None]] = {}
        self._compared_epochs: dict[Partition, int] = {}
        """The leader epoch for which the other replicas' logs were last compared."""
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._silent_at_s: dict[int, float] = {}
        """The time of the last fetch that timed out, by replica."""

    def delays(self, partition: Partition, assignment: PartitionImage) -> bool:
        """Whether this node, which is elected, first fetches from the other replicas.

        Not if it leads already: it then has their records.
        """
        if assignment.leader_recovery_state != RECOVERING or len(assignment.replicas) == 1 or partition.leads:
            return False
        if self._compared_epochs.get(partition) == assignment.leader_epoch and partition not in self._comparisons:
            return False
        self._compared_epochs[partition] = assignment.leader_epoch
        if partition not in self._comparisons:
            task = self._loop.create_task(self._compare(partition), name=f"compare logs before leading {partition}")
            self._comparisons[partition] = task
        return True

    def forget(self, partition: Partition) -> None:
        """Another replica leads, or this one is gone."""
        self._compared_epochs.pop(partition, None)
        task = self._comparisons.pop(partition, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._comparisons.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compare(self, partition: Partition) -> None:
        try:
            while await self._extend(partition):
                pass
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._partitions.refusal(partition, error)
        self._comparisons.pop(partition, None)
        self.on_done(partition)

    async def _extend(self, partition: Partition) -> bool:
        """Append the best tail of the other replicas. Whether there may be more."""
        requests = (self._tail_of(partition, source) for source in self._repairs.others(partition))
        tails = [tail for tail in await asyncio.gather(*requests) if tail is not None]
        if not tails or partition.offline:
            return False
        best, log = max(tails), partition.log
        end_offset = log.log_end_offset
        logger.warning(
            "%s-%d: broker %d has offsets %d to %d, which this replica lacks, though it is to lead: they are taken",
            partition.topic, partition.index, best.source, end_offset, best.end_offset,
        )  # fmt: skip
        try:
            damage = damaged_end(log)
            if damage is not None and best.boundary > end_offset:
                move_damaged_end(log, damage, best.boundary)
            await self._take(partition, best)
        except (KafkaError, PeerUnreachable, TimeoutError) as error:
            logger.info("%s: broker %d does not send all its records: %s", partition, best.source, error)
        taken_end = partition.log.log_end_offset
        is_all = taken_end >= best.end_offset and best.size_bytes < TAIL_BYTES_MAX
        return taken_end > end_offset and not is_all

    async def _take(self, partition: Partition, tail: Tail) -> None:
        """Append a tail in pieces. It is read again, because the comparison did not keep it in memory.

        The partition's log may be another one after each piece: a move to another directory may end meanwhile.
        """
        budget = _Budget()
        # An epoch that this replica led without a record would make the records taken here look damaged.
        partition.log.leader_epochs.truncate_from_end(partition.log.log_end_offset)
        while (offset := partition.log.log_end_offset) < tail.end_offset and not partition.offline:
            data = await self._fetch(partition, tail.source, offset, budget)
            if not data:
                raise PeerUnreachable("it has no more")
            partition.append_as_follower(memoryview(bytearray(data)), self._clock_ms())
            self._partitions.flushes.flush_if_due(partition)
            if partition.log.log_end_offset == offset:
                raise PeerUnreachable("it sends no whole batch")

    async def _tail_of(self, partition: Partition, source: int) -> Tail | None:
        try:
            return await self._read_tail(partition, source)
        except (KafkaError, PeerUnreachable, TimeoutError) as error:
            logger.info("%s: broker %d does not tell its log end offset: %s", partition, source, error)
            return None

    async def _read_tail(self, partition: Partition, source: int) -> Tail | None:
        """Raises KafkaError, PeerUnreachable, TimeoutError."""
        log, budget = partition.log, _Budget()
        damage = damaged_end(log)
        end = offset = boundary = log.log_end_offset
        own_epoch = log.leader_epochs.epoch_for_offset(end - 1)
        if damage is not None and not await self._has_before(partition, source, damage, budget):
            return None
        if log.log_start_offset < end:
            offset = end - 1  # in the last batch, which both logs must have
        size_bytes, last_epoch = 0, -1
        while size_bytes < TAIL_BYTES_MAX:
            try:
                data = await self._fetch(partition, source, offset, budget)
            except KafkaError:
                if offset <= end:
                    raise
                break  # the part that was read counts
            before = offset
            for _, header in iter_headers(data):
                epoch = header.partition_leader_epoch
                if header.base_offset < end:
                    if epoch < own_epoch or (damage is None and (header.next_offset != end or epoch != own_epoch)):
                        return None  # the logs diverge
                    boundary, last_epoch = header.next_offset, epoch
                elif header.base_offset >= offset:
                    size_bytes += header.size_bytes
                    last_epoch = epoch
                offset = header.next_offset
            if offset <= before:
                break
        return Tail(last_epoch, offset, source, size_bytes, boundary) if offset > end else None

    async def _has_before(self, partition: Partition, source: int, damage: DamagedRange, budget: _Budget) -> bool:
        """Whether a replica has this log's last undamaged batch. Raises KafkaError, PeerUnreachable, TimeoutError."""
        log, whole_end = partition.log, damage.first_offset
        if whole_end <= log.log_start_offset:
            return True
        for _, header in iter_headers(await self._fetch(partition, source, whole_end - 1, budget)):
            own_epoch = log.leader_epochs.epoch_for_offset(whole_end - 1)
            return header.next_offset == whole_end and header.partition_leader_epoch == own_epoch
        return False

    async def _fetch(self, partition: Partition, source: int, offset: int, budget: _Budget) -> bytes:
        """Fetch as soon as the queue allows. Raises KafkaError, PeerUnreachable, TimeoutError.

        When a fetch from a replica times out, the queued fetches from this replica fail too: otherwise each partition
        would wait for the same timeout.
        """
        queued_s = self._loop.time()
        async with self._fetches:
            if queued_s < self._silent_at_s.get(source, -1.0):
                raise PeerUnreachable("it does not answer")
            now_s = self._loop.time()
            fetch = self._repairs.fetch(partition, source, offset, up_to_log_end=True)
            try:
                async with asyncio.timeout(budget.left_s):
                    data = await fetch
            except TimeoutError:
                if budget.left_s == ASK_S_MAX:  # the first answer of this replica did not come
                    self._silent_at_s[source] = self._loop.time()
                raise
            budget.left_s = max(0.0, budget.left_s - (self._loop.time() - now_s))
            return data


class _Budget:
    """The time left for the answers of one replica."""

    __slots__ = ("left_s",)

    def __init__(self) -> None:
        self.left_s = ASK_S_MAX
