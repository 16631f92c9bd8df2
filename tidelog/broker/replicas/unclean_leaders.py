"""A leader that was elected uncleanly takes over what other replicas have behind its log's end, before it leads.

Where no replica may speak for what it had, the last known leader is elected (KIP-966), though its disk may be the one
that lost records: the others would cut theirs to its end. So it asks them first. What a replica has is taken if its log
goes on from this one's last batch, in the same leader epoch; of several the latest epoch counts, then the longest log.
Invariant: while it asks the partition has no leader here, so that nobody truncates.
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

if TYPE_CHECKING:
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.broker.replicas.repairs import Repairs
    from tidelog.replication.controller.metadata.image import PartitionImage
    from tidelog.replication.partition import Partition

logger = logging.getLogger("tidelog.repairs")

TAIL_BYTES_MAX: Final = 16 * 1024 * 1024
"""Of one replica at a time; what is behind that is asked for again."""
ASK_S_MAX: Final = 2.0
"""For the answers of one replica, not counting the time until it is its turn."""
FETCHES_MAX: Final = 16
"""At once, for all partitions of the node. An answer holds `repairs.FETCH_BYTES_MAX`, or one batch."""


class Tail(NamedTuple):
    """What a replica has behind a log's end. Tails are compared as candidates in an election are."""

    last_epoch: int
    end_offset: int
    source: int
    size_bytes: int


class UncleanLeaders:
    """`on_done(partition)`: the delayed role may be taken."""

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
        self._asking: dict[Partition, asyncio.Task[None]] = {}
        self._asked: dict[Partition, int] = {}
        """The leader epoch for which the others were asked."""
        self._fetches = asyncio.Semaphore(FETCHES_MAX)
        self._silent_at_s: dict[int, float] = {}
        """When a fetch from a replica last ran out of time."""

    def delays(self, partition: Partition, assignment: PartitionImage) -> bool:
        """Whether this node, which is to lead, asks the others first. One that led before has what they have."""
        if assignment.leader_recovery_state != RECOVERING or len(assignment.replicas) == 1 or partition.leads:
            return False
        if self._asked.get(partition) == assignment.leader_epoch and partition not in self._asking:
            return False
        self._asked[partition] = assignment.leader_epoch
        if partition not in self._asking:
            task = self._loop.create_task(self._ask(partition), name=f"ask before leading {partition}")
            self._asking[partition] = task
        return True

    def forget(self, partition: Partition) -> None:
        """Another replica leads, or this one is gone."""
        self._asked.pop(partition, None)
        task = self._asking.pop(partition, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, partition: Partition) -> None:
        try:
            while await self._extend(partition):
                pass
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._partitions.refusal(partition, error)
        self._asking.pop(partition, None)
        self.on_done(partition)

    async def _extend(self, partition: Partition) -> bool:
        """Append what the best of the others has; whether there may be more."""
        asked = (self._tail_of(partition, source) for source in self._repairs.others(partition))
        tails = [tail for tail in await asyncio.gather(*asked) if tail is not None]
        if not tails or partition.offline:
            return False
        best, log = max(tails), partition.log
        end_offset = log.log_end_offset
        logger.warning(
            "%s-%d: broker %d has offsets %d to %d, which this replica lacks, though it is to lead: they are taken",
            partition.topic, partition.index, best.source, end_offset, best.end_offset,
        )  # fmt: skip
        try:
            await self._take(partition, best)
        except (KafkaError, PeerUnreachable, TimeoutError) as error:
            logger.info("%s: broker %d does not send all it has: %s", partition, best.source, error)
        is_all = log.log_end_offset >= best.end_offset and best.size_bytes < TAIL_BYTES_MAX
        return log.log_end_offset > end_offset and not is_all

    async def _take(self, partition: Partition, tail: Tail) -> None:
        """Append a tail piece by piece: it was read once to be compared, and is read again to be kept."""
        log = partition.log
        budget = _Budget()
        while log.log_end_offset < tail.end_offset and not partition.offline:
            offset = log.log_end_offset
            data = await self._fetch(partition, tail.source, offset, budget)
            if not data:
                raise PeerUnreachable("it has no more")
            partition.append_as_follower(memoryview(bytearray(data)), self._clock_ms())
            self._partitions.flushes.flush_if_due(partition)
            if log.log_end_offset == offset:
                raise PeerUnreachable("it sends no whole batch")

    async def _tail_of(self, partition: Partition, source: int) -> Tail | None:
        try:
            return await self._read_tail(partition, source)
        except (KafkaError, PeerUnreachable, TimeoutError) as error:
            logger.info("%s: broker %d does not tell how far its log goes: %s", partition, source, error)
            return None

    async def _read_tail(self, partition: Partition, source: int) -> Tail | None:
        """Raises KafkaError, PeerUnreachable, TimeoutError."""
        log = partition.log
        end = offset = log.log_end_offset
        if log.log_start_offset < end:
            offset = end - 1  # in the last batch, which both must have
        own_epoch = log.leader_epochs.epoch_for_offset(end - 1)
        size_bytes, last_epoch = 0, -1
        budget = _Budget()
        while size_bytes < TAIL_BYTES_MAX:
            try:
                data = await self._fetch(partition, source, offset, budget)
            except KafkaError:
                if not size_bytes:
                    raise
                break  # what it has whole counts
            before = offset
            for _, header in iter_headers(data):
                if header.base_offset < end:
                    if header.next_offset != end or header.partition_leader_epoch != own_epoch:
                        return None  # it went another way
                elif header.base_offset >= offset:
                    size_bytes += header.size_bytes
                    last_epoch = header.partition_leader_epoch
                offset = header.next_offset
            if offset <= before:
                break
        return Tail(last_epoch, offset, source, size_bytes) if size_bytes else None

    async def _fetch(self, partition: Partition, source: int, offset: int, budget: _Budget) -> bytes:
        """When it is its turn. Raises KafkaError, PeerUnreachable, TimeoutError.

        A fetch that waits for its turn while the replica lets another one run out of time is given up with it: each
        partition would wait for the same.
        """
        queued_s = self._loop.time()
        async with self._fetches:
            if queued_s < self._silent_at_s.get(source, -1.0):
                raise PeerUnreachable("it does not answer")
            now_s = self._loop.time()
            fetch = self._repairs.fetch(partition, source, offset, up_to_log_end=True)
            try:
                data = await asyncio.wait_for(fetch, budget.left_s)
            except TimeoutError:
                if budget.left_s == ASK_S_MAX:  # not one of many answers
                    self._silent_at_s[source] = self._loop.time()
                raise
            budget.left_s = max(0.0, budget.left_s - (self._loop.time() - now_s))
            return data


class _Budget:
    """The time that is left for the answers of one replica."""

    __slots__ = ("left_s",)

    def __init__(self) -> None:
        self.left_s = ASK_S_MAX
