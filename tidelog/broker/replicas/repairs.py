"""Damaged records are fetched again from other replicas and put in their place, while everything else goes on.

What is damaged is the log's own knowledge (`storage/segments/damage.py`), what may be put in its place
`storage/log/repair.py`'s; here is who is asked, when, and what follows where no replica has a whole copy. It makes no
difference who leads: a leader is repaired by its followers. Invariant: one range at a time, and nothing is given up
while a replica that might have it has not answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tidelog.broker.replicas.damaged_leaders import DamagedLeaders
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.log.repair import CopyRefused, NoRoom, RangeRepair, RepairCheck
from tidelog.storage.segments.damage import DamagedRange, describe

if TYPE_CHECKING:
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage, PartitionImage
    from tidelog.replication.partition import Partition
    from tidelog.replication.ports import Endpoint, Exchange
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.segments.append import UnexplainedGap
    from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.repairs")

FETCH_VERSION: Final = 13
REPAIR_REPLICA_ID: Final = -3
"""Kafka's FUTURE_LOCAL_REPLICA_ID: a reader on behalf of a replica, up to the log end, that is no follower."""
REPAIR_COMMITTED_REPLICA_ID: Final = -2
"""Kafka's DEBUGGING_CONSUMER_ID: the same, up to the high watermark."""
FETCH_BYTES_MAX: Final = 1024 * 1024
FETCH_TIMEOUT_MS: Final = 5000
PAUSE_S_MIN: Final = 0.05
PAUSE_S_MAX: Final = 5.0
LOST_PAUSE_S_MAX: Final = 300.0
"""Between questions for what no replica has: only a change of the replicas, or of their files, brings it back."""
_ABSENT: Final = (ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.CORRUPT_MESSAGE)


@dataclass(slots=True)
class _Attempts:
    """When a partition is looked at next, on the loop's clock, and how long to pause after that."""

    due_s: float
    pause_s: float = PAUSE_S_MIN


@dataclass(slots=True)
class RepairCounters:
    """Since the start; `ranges_lost` counts those of which no replica has a whole copy."""

    ranges_found: int = 0
    ranges_repaired: int = 0
    ranges_lost: int = 0


class Repairs:
    """`endpoint_of(broker id)` is None for one that is not to be reached now."""

    def __init__(
        self,
        node_id: int,
        partitions: Partitions,
        image: Callable[[], MetadataImage],
        endpoint_of: Callable[[int], Endpoint | None],
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
        run_in_executor: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self.counters = RepairCounters()
        self.on_repaired: Callable[[PartitionLog], None] = lambda log: None
        """Called when a range of the log is whole again."""
        self._node_id = node_id
        self._partitions = partitions
        self._image = image
        self._damaged_leaders = DamagedLeaders(node_id, self, image, loop.time)
        self._endpoint_of = endpoint_of
        self._exchange = exchange
        self._loop = loop
        self._run_in_executor = run_in_executor
        self._waiting: dict[Partition, _Attempts] = {}
        self._gaps: dict[Partition, tuple[int, int]] = {}
        self._lost: set[tuple[Partition, int]] = set()
        """(partition, first offset) of the ranges of which there is no whole copy."""
        self._known: dict[Partition, set[int]] = {}
        """The first offsets of the damaged ranges that were counted."""
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    # -------------------------------------------------------------------------------------------------------- reports

    def look_at(self, partition: Partition) -> None:
        """Repair what its log knows to be damaged."""
        if partition.log.damaged_ranges():
            self.report(partition)

    def report(self, partition: Partition) -> ErrorCode:
        """Damage was met; what the reader is answered: an error to try again after, unless no replica has a copy."""
        self._wait_for(partition)
        if self._is_lost(partition):
            return ErrorCode.CORRUPT_MESSAGE
        return ErrorCode.KAFKA_STORAGE_ERROR

    def report_gap(self, partition: Partition, gap: UnexplainedGap) -> None:
        """A leader's records go on behind offsets that it does not have: do the other replicas have them?"""
        self._gaps[partition] = gap.first_offset, gap.end_offset
        self._wait_for(partition)
        attempts = self._waiting.get(partition)
        soon_s = self._loop.time() + PAUSE_S_MAX
        if attempts is not None and attempts.due_s > soon_s:
            attempts.due_s = soon_s
            self._is_due.set()

    def on_image(self, delta: MetadataDelta) -> None:
        """A replica may be back, or another one: ask again at once."""
        for partition in self._waiting:
            if delta.changed_brokers or partition.index in delta.changed_partitions.get(partition.topic_id, ()):
                self._hurry(partition)

    def _hurry(self, partition: Partition) -> None:
        self._waiting[partition] = _Attempts(self._loop.time())
        self._is_due.set()

    def _is_lost(self, partition: Partition) -> bool:
        ranges = partition.log.damaged_ranges()
        return bool(ranges) and all((partition, damage.first_offset) in self._lost for _, damage in ranges)

    def _wait_for(self, partition: Partition) -> None:
        if self._is_closed:
            return
        if self._count(partition) or partition not in self._waiting:
            self._hurry(partition)
        if self._task is None:
            self._task = self._loop.create_task(self._run(), name="repairs")

    def _count(self, partition: Partition) -> bool:
        """Every range once, however often it is met before it is repaired. Whether there is a new one."""
        ranges = {damage.first_offset for _, damage in partition.log.damaged_ranges()}
        known = self._known.get(partition, set())
        self.counters.ranges_found += len(ranges - known)
        if ranges:
            self._known[partition] = ranges
        else:
            self._known.pop(partition, None)
        return not ranges <= known

    async def close(self) -> None:
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---------------------------------------------------------------------------------------------------------- repair

    async def _run(self) -> None:
        try:
            while self._waiting:
                self._is_due.clear()
                for partition, attempts in list(self._waiting.items()):
                    if attempts.due_s <= self._loop.time():
                        await self._attempt(partition, attempts)
                if self._waiting:
                    due_s = min(attempts.due_s for attempts in self._waiting.values())
                    await self._sleep_until(due_s)
        finally:
            self._task = None

    async def _sleep_until(self, due_s: float) -> None:
        """Or until a partition is due sooner."""
        timer = self._loop.call_at(due_s, self._is_due.set)
        try:
            await self._is_due.wait()
        finally:
            timer.cancel()

    async def _attempt(self, partition: Partition, attempts: _Attempts) -> None:
        before = partition.log.damaged_ranges()
        is_done = await self._repair(partition)
        if self._waiting.get(partition) is not attempts:
            return  # it was reported again meanwhile
        if is_done:
            del self._waiting[partition]
            return
        if partition.log.damaged_ranges() != before:
            attempts.pause_s = PAUSE_S_MIN
        pause_s_max = LOST_PAUSE_S_MAX if self._is_lost(partition) else PAUSE_S_MAX
        attempts.due_s = self._loop.time() + attempts.pause_s
        attempts.pause_s = min(2 * attempts.pause_s, pause_s_max)

    async def _repair(self, partition: Partition) -> bool:
        """Whether there is nothing left to do."""
        if self._partitions.find(partition.topic, partition.index) is not partition or partition.offline:
            self._gaps.pop(partition, None)
            self._lost = {each for each in self._lost if each[0] is not partition}
            self._known.pop(partition, None)
            self._damaged_leaders.forget(partition)
            return True
        try:
            gap = self._gaps.pop(partition, None)
            if gap is not None:
                await self._explain(partition, *gap)
            for segment, damage in partition.log.damaged_ranges():
                await self._repair_range(partition, segment, damage)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._partitions.refusal(partition, error)
            return False
        self._count(partition)
        if not partition.log.damaged_ranges():
            self._damaged_leaders.forget(partition)
            return True
        return not self.others(partition)

    async def _repair_range(self, partition: Partition, segment: Segment, damage: DamagedRange) -> None:
        log = partition.log
        name = f"{partition.topic}-{partition.index}"
        repair = log.repair_of(segment, damage)
        everyone_lacks_it = True
        gap_is_shared = damage.position == damage.end_position
        for source in self.others(partition):
            try:
                await self._copy(partition, repair, source)
            except NoRoom as refused:
                self._roll(partition, refused)
                return
            except CopyRefused as refused:
                gap_is_shared = gap_is_shared and refused.is_gap
                logger.info("%s: broker %d does not help: %s", name, source, refused)
            except KafkaError as error:
                gap_is_shared = False
                everyone_lacks_it = everyone_lacks_it and error.code in _ABSENT
                logger.info("%s: broker %d does not help: %s", name, source, error)
            except PeerUnreachable as error:
                gap_is_shared = everyone_lacks_it = False
                logger.info("%s: broker %d does not help: %s", name, source, error)
            if repair.is_complete:
                break
        if repair.is_obsolete:
            return
        part = None if repair.is_complete else repair.finish_part()
        if part is not None:
            await self._check(partition, part)
            return  # what is left is another range, to which another replica may have what follows
        if repair.is_complete:
            try:
                await self._finish(partition, repair, name)
            except NoRoom as refused:
                self._roll(partition, refused)
        elif self._damaged_leaders.may_resign(partition, damage):
            await self._damaged_leaders.resign(partition, damage)  # what others have not copied yet is not lost
        elif gap_is_shared and self.others(partition) and everyone_lacks_it:
            logger.info("%s: no replica has offsets %d to %d", name, damage.first_offset, damage.end_offset)
            log.accept_gap(segment, damage)
            self._partitions.touch(partition)
        elif everyone_lacks_it and (partition, damage.first_offset) not in self._lost:
            self._lost.add((partition, damage.first_offset))
            self.counters.ranges_lost += 1
            logger.error("%s: no replica has a whole copy of what is lost here: %s", name, describe(damage))
            if self._is_lost(partition):
                log.accept_loss()

    async def _finish(self, partition: Partition, repair: RangeRepair, name: str) -> None:
        is_done = await self._check(partition, repair.finish())
        if is_done and repair.damage not in repair.segment.damage:
            self.counters.ranges_repaired += 1
            self._lost.discard((partition, repair.damage.first_offset))
            self.on_repaired(partition.log)
            logger.warning("%s: repaired: %s", name, describe(repair.damage))
            self._partitions.touch(partition)

    async def _check(self, partition: Partition, check: RepairCheck) -> bool:
        try:
            await self._run_in_executor(check.run)
        finally:
            is_done = partition.log.finish_repair(check)
        return is_done

    def _roll(self, partition: Partition, refused: NoRoom) -> None:
        """Append to another segment from now on: then there is room, and the next attempt finds it. Raises OSError."""
        logger.info("%s: a new segment is begun, to repair the present one: %s", partition, refused)
        partition.log.roll(partition.log.clock_ms)

    async def _explain(self, partition: Partition, first_offset: int, end_offset: int) -> None:
        """A gap is taken if the replicas in sync have it, too: the topic was compacted once. Else it is refused.

        Another replica counts if it has records there. One that has not come so far, or does not answer, says nothing:
        two new replicas would wait for each other, and one that replaces a dead broker for that one.
        """
        for source in self.others(partition):
            try:
                data = await self.fetch(partition, source, first_offset, up_to_log_end=False)
                if not data:
                    raise PeerUnreachable("it has not come that far yet")
            except (KafkaError, PeerUnreachable) as error:
                logger.info("%s: broker %d says nothing of a gap: %s", partition, source, error)
                if source in self._in_sync(partition):
                    return
                continue
            if int.from_bytes(data[:8], "big") < end_offset:
                logger.error(
                    "%s-%d: the leader lacks offsets %d to %d, which broker %d has", partition.topic, partition.index,
                    first_offset, end_offset, source,
                )  # fmt: skip
                return
        if self._in_sync(partition) <= {self._node_id}:
            return  # the leader is another by now, or unknown
        logger.info("%s: every replica in sync lacks offsets %d to %d", partition, first_offset, end_offset)
        partition.log.explain_gaps(end_offset)

    # ----------------------------------------------------------------------------------------------------- other nodes

    def assignment_of(self, partition: Partition) -> PartitionImage | None:
        """The partition as the metadata has it."""
        topic = self._image().topics_by_id.get(partition.topic_id)
        return None if topic is None else topic.partitions.get(partition.index)

    def _in_sync(self, partition: Partition) -> set[int]:
        placed = self.assignment_of(partition)
        return set() if placed is None else set(placed.isr)

    def others(self, partition: Partition) -> list[int]:
        """The other replicas, those in sync first."""
        placed = self.assignment_of(partition)
        if placed is None:
            return []
        in_sync_first = sorted(placed.replicas, key=lambda replica: replica not in placed.isr)
        return [replica for replica in in_sync_first if replica != self._node_id]

    async def _copy(self, partition: Partition, repair: RangeRepair, source: int) -> None:
        """Raises CopyRefused, KafkaError, PeerUnreachable, OSError."""
        first_offset, log = repair.damage.first_offset, partition.log
        is_own = partition.leads and log.leader_epochs.epoch_for_offset(first_offset) == partition.leader_epoch
        # What this leader appended is the same wherever it is. For the last records of other epochs a replica may have
        # what another leader wrote instead, unless they are committed.
        up_to_log_end = is_own or repair.damage.end_offset < log.log_end_offset
        while not repair.is_complete and not repair.is_obsolete:
            data = await self.fetch(partition, source, repair.next_offset, up_to_log_end=up_to_log_end)
            if not data:
                raise PeerUnreachable("it has not come that far yet")
            before = repair.next_offset
            repair.accept(memoryview(data))
            if repair.next_offset == before:
                raise CopyRefused("it sends no whole batch")

    async def fetch(self, partition: Partition, source: int, offset: int, *, up_to_log_end: bool) -> bytes:
        """What a replica has from `offset` on, to its log end or its high watermark. KafkaError, PeerUnreachable."""
        endpoint = self._endpoint_of(source)
        if endpoint is None:
            raise PeerUnreachable("it is not registered")
        request = FetchRequest(
            replica_id=REPAIR_REPLICA_ID if up_to_log_end else REPAIR_COMMITTED_REPLICA_ID,
            max_wait_ms=0,
            min_bytes=1,
            max_bytes=FETCH_BYTES_MAX,
            topics=[
                FetchTopic(
                    topic_id=partition.topic_id,
                    partitions=[
                        FetchPartition(
                            partition=partition.index, fetch_offset=offset, partition_max_bytes=FETCH_BYTES_MAX
                        )
                    ],
                )
            ],
        )
        response = await self._exchange(endpoint, request, FETCH_VERSION, timeout_ms=FETCH_TIMEOUT_MS, lane="repair")
        if response.error_code or not response.responses:
            raise PeerUnreachable(f"it answers {ErrorCode(response.error_code).name}")
        answer = response.responses[0].partitions[0]
        if answer.error_code:
            raise KafkaError(ErrorCode(answer.error_code))
        return bytes(answer.records or b"")
