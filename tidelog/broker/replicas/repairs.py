"""Replaces damaged records with copies from other replicas, while the node goes on working.

`storage/segments/damage.py` records the damaged ranges, and `storage/log/repair.py` checks and writes the copies. This
module decides which replica to fetch from, and what to do if no replica has a complete copy. `repair_queue.py` decides
which partition is the next one, `whole_copies.py` when a log is replaced as a whole. A leader is repaired from its
followers in the same way. Invariant: it repairs one range of a partition at a time, and gives up no range before every
replica that may have it has answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from tidelog.broker.replicas.damaged_leaders import DamagedLeaders
from tidelog.broker.replicas.gap_copies import GapCopy, merge
from tidelog.broker.replicas.repair_queue import RepairQueue
from tidelog.broker.replicas.whole_copies import ABSENT, Outcome, WholeCopies
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from tidelog.replication.answer_size import AnswerSize
from tidelog.replication.ports import PeerUnreachable
from tidelog.replication.threads import until_done
from tidelog.replication.truncation import compacted_below
from tidelog.storage.files.disk import is_full
from tidelog.storage.log.damage_behind import begin_segment_at_damage
from tidelog.storage.log.damaged_end import move_damaged_end
from tidelog.storage.log.explained_gaps import forget_gaps_behind
from tidelog.storage.log.gap_scan import GapScan
from tidelog.storage.log.repair import (
    CopyRefused,
    EpochBegins,
    GapsUnknown,
    NoRoom,
    OtherCleaning,
    RangeRepair,
    RepairCheck,
    SegmentFull,
    is_present,
    require_space,
)
from tidelog.storage.segments.damage import DamagedRange, describe

if TYPE_CHECKING:
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.protocol.messages.fetch import PartitionData
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage, PartitionImage
    from tidelog.replication.partition import Partition
    from tidelog.replication.ports import Endpoint, Exchange
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.segments.append import UnexplainedGap
    from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.repairs")

FETCH_VERSION: Final = 13
REPAIR_REPLICA_ID: Final = -3
"""Kafka's FUTURE_LOCAL_REPLICA_ID: reads up to the log end and is not a follower."""
REPAIR_COMMITTED_REPLICA_ID: Final = -2
"""Kafka's DEBUGGING_CONSUMER_ID: reads up to the high watermark and is not a follower."""
FETCH_BYTES_MAX: Final = 1024 * 1024
_GAP_FETCH_BYTES: Final = 64 * 1024
"""Of an answer about a gap, which one turn of the loop merges with the others and appends."""
FETCH_TIMEOUT_MS: Final = 5000
PAUSE_S_MAX: Final = 5.0
SPACE_PAUSE_S_MAX: Final = 30.0
"""The longest pause while the volume has no space for the copy, which each attempt fetches again."""
LOST_PAUSE_S_MAX: Final = 300.0
"""The longest pause for records that no replica has: only a change of the replicas or their files can restore them."""


class RecordsDeleted(KafkaError):
    """The replica's log starts behind the offset that it was asked for."""

    def __init__(self, log_start_offset: int) -> None:
        super().__init__(ErrorCode.OFFSET_OUT_OF_RANGE, f"the log starts at {log_start_offset}")
        self.log_start_offset = log_start_offset


@dataclass(slots=True)
class RepairCounters:
    """Counters since the start. `ranges_lost` counts the ranges of which no replica has a complete copy."""

    ranges_found: int = 0
    ranges_repaired: int = 0
    ranges_lost: int = 0


class Repairs:
    """`endpoint_of(broker id)`: None for a broker that cannot be reached now."""

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
        """Called when a range of the log is repaired."""
        self._node_id = node_id
        self._partitions = partitions
        self._image = image
        self._damaged_leaders = DamagedLeaders(node_id, self, image, loop.time)
        self._endpoint_of = endpoint_of
        self._exchange = exchange
        self._loop = loop
        self._run_in_executor = run_in_executor
        self._answer_size = AnswerSize(FETCH_TIMEOUT_MS)
        self._queue = RepairQueue()
        self.whole_copies = WholeCopies(self, self._queue, loop.time, run_in_executor)
        self._gaps: dict[Partition, tuple[int, int]] = {}
        self._lost_ranges: set[tuple[Partition, int]] = set()
        """(partition, first offset) of the ranges without a complete copy on any replica."""
        self._known: dict[Partition, set[int]] = {}
        """The first offsets of the damaged ranges that were counted."""
        self._without_space: set[Partition] = set()
        """The partitions whose last attempt found no space for the copy."""
        self._under_way: set[asyncio.Task[None]] = set()
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    # -------------------------------------------------------------------------------------------------------- reports

    def look_at(self, partition: Partition) -> None:
        """Repair the known damage of the partition's log, if there is any."""
        if partition.log.damaged_ranges():
            self.report(partition)

    def report(self, partition: Partition, damage: DamagedRange | None = None) -> ErrorCode:
        """A read has met `damage`. The error for the reader: retriable, unless no replica has a copy of it."""
        self._wait_for(partition)
        is_lost = damage is not None and (partition, damage.first_offset) in self._lost_ranges
        return ErrorCode.CORRUPT_MESSAGE if is_lost or self._is_lost(partition) else ErrorCode.KAFKA_STORAGE_ERROR

    def report_gap(self, partition: Partition, gap: UnexplainedGap) -> None:
        """The leader's log has a gap in its offsets. Check whether the other replicas have the missing records."""
        self._gaps[partition] = gap.first_offset, gap.end_offset
        self._wait_for(partition)
        if self._queue.hurry_until(partition, self._loop.time() + PAUSE_S_MAX):
            self._is_due.set()

    def on_image(self, delta: MetadataDelta) -> None:
        """The brokers or the partition's replicas have changed: try again at once."""
        for partition in self._queue.waiting:
            if delta.changed_brokers or partition.index in delta.changed_partitions.get(partition.topic_id, ()):
                self._hurry(partition)

    def _hurry(self, partition: Partition) -> None:
        self._queue.hurry(partition, self._loop.time())
        self._is_due.set()

    def has_unsettled(self, partition: Partition) -> bool:
        """Whether the log has known damage that another replica may still repair."""
        return bool(partition.log.damaged_ranges()) and not self._is_lost(partition)

    def _is_lost(self, partition: Partition) -> bool:
        ranges = partition.log.damaged_ranges()
        return bool(ranges) and all((partition, damage.first_offset) in self._lost_ranges for _, damage in ranges)

    def _wait_for(self, partition: Partition) -> None:
        if self._is_closed:
            return
        if self._count(partition) or partition not in self._queue.waiting:
            self._hurry(partition)
        if self._task is None:
            self._task = self._loop.create_task(self._run(), name="repairs")

    def _count(self, partition: Partition) -> bool:
        """Count every damaged range once, although reads may meet it often. Whether there is a new one."""
        ranges = {damage.first_offset for _, damage in partition.log.damaged_ranges()}
        known = self._known.get(partition, set())
        self.counters.ranges_found += len(ranges - known)
        self._lost_ranges -= {(partition, first_offset) for first_offset in known - ranges}
        if ranges:
            self._known[partition] = ranges
        else:
            self._known.pop(partition, None)
        return not ranges <= known

    async def close(self) -> None:
        self._is_closed = True
        tasks = [*self._under_way, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------------------------------------------------- repair

    async def _run(self) -> None:
        try:
            while self._queue.waiting:
                self._is_due.clear()
                for partition in self._queue.begin_due(self._loop.time()):
                    name = f"repair of {partition.topic}-{partition.index}"
                    task = self._loop.create_task(self._attempt(partition), name=name)
                    self._under_way.add(task)
                    task.add_done_callback(self._under_way.discard)
                await self._sleep_until(self._queue.next_due_s())
        finally:
            self._task = None

    async def _sleep_until(self, due_s: float | None) -> None:
        """Sleep until `due_s`, or until a partition is due sooner, or an attempt has ended."""
        timer = None if due_s is None else self._loop.call_at(due_s, self._is_due.set)
        try:
            await self._is_due.wait()
        finally:
            if timer is not None:
                timer.cancel()

    async def _attempt(self, partition: Partition) -> None:
        try:
            before = partition.log.damaged_ranges()
            self._without_space.discard(partition)
            is_done = await self._repair(partition)
            pause_s_max = SPACE_PAUSE_S_MAX if partition in self._without_space else PAUSE_S_MAX
            if self._is_lost(partition):
                pause_s_max = LOST_PAUSE_S_MAX
            has_changed = partition.log.damaged_ranges() != before
            self._queue.plan_next(
                partition, self._loop.time(), is_done=is_done, has_changed=has_changed, pause_s_max=pause_s_max
            )
        finally:
            self._queue.end(partition)
            self._is_due.set()

    async def _repair(self, partition: Partition) -> bool:
        """Try to repair a partition. Whether nothing is left to do."""
        if self._partitions.find(partition.topic, partition.index) is not partition or partition.offline:
            self._gaps.pop(partition, None)
            self._lost_ranges = {each for each in self._lost_ranges if each[0] is not partition}
            self._known.pop(partition, None)
            self.whole_copies.forget(partition)
            self._damaged_leaders.forget(partition)
            return True
        try:
            gap = self._gaps.pop(partition, None)
            if gap is not None:
                await self._explain(partition, *gap)
            await self._repair_ranges(partition)
            partition.log.reveal()  # a shortage may have interrupted it
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not self._waits_for_space(partition, partition.log, error):
                self._partitions.refusal(partition, error)
            return False
        self._count(partition)
        if not partition.log.damaged_ranges():
            self.whole_copies.forget(partition)
            self._damaged_leaders.forget(partition)
            return True
        return partition not in self._without_space and not self.others(partition)

    async def _repair_ranges(self, partition: Partition) -> None:
        """Try each damaged range. One without space, or that waits for a whole copy, holds up no other. OSError."""
        log, wanting = partition.log, self._queue.want_whole_copies
        waits_for_copy = may_be_repaired = False
        for segment, damage in log.damaged_ranges():
            if partition.log is not log or not is_present(log, segment, damage):
                continue
            wanting.discard(partition)
            try:
                await self._repair_range(partition, segment, damage)
            except OSError as error:
                if not self._waits_for_space(partition, log, error):
                    raise
            if partition in wanting:
                waits_for_copy = True
            elif is_present(log, segment, damage) and (partition, damage.first_offset) not in self._lost_ranges:
                may_be_repaired = True
        wanting.discard(partition)
        if waits_for_copy and not may_be_repaired:
            wanting.add(partition)

    def _waits_for_space(self, partition: Partition, log: PartitionLog, error: Exception) -> bool:
        """Whether the error says that the volume is full, or a quota, which nothing else shows: nothing against the
        device. The log is as it was, and a later attempt may find space.
        """
        if not is_full(error) or log.failure is not None:
            return False
        logger.warning("%s-%d cannot be repaired now: %s", partition.topic, partition.index, error)
        self._without_space.add(partition)
        return True

    async def _repair_range(self, partition: Partition, segment: Segment, damage: DamagedRange) -> None:
        log = partition.log
        name = f"{partition.topic}-{partition.index}"
        repair = log.repair_of(segment, damage)
        everyone_lacks_it = True
        lacking: dict[int, int] = {}
        """Replicas without the whole range -> the lowest offset with which a batch that is worth a copy may begin."""
        gap_is_shared = True  # every other replica lacks the first offsets of the range, too
        repair.lacks_below = log.cleaned_offset if damage.first_offset < compacted_below(log) else None
        cleaned: list[int] = []
        """Replicas whose cleaners may have removed other records of the range."""
        for source in self.others(partition):
            try:
                await self._copy_committed_if_refused(partition, repair, source)
            except NoRoom as refused:
                self._roll(partition, refused)
                return
            except SegmentFull as refused:
                await self._go_on_behind(partition, repair, refused)
                return
            except OtherCleaning as refused:
                cleaned.append(source)
                gap_is_shared = everyone_lacks_it = False
                logger.info("%s: broker %d does not help alone: %s", name, source, refused)
            except CopyRefused as refused:
                gap_is_shared = gap_is_shared and refused.is_gap
                lacking[source] = damage.first_offset + 1
                logger.info("%s: broker %d does not help: %s", name, source, refused)
            except KafkaError as error:
                gap_is_shared = False
                everyone_lacks_it = everyone_lacks_it and error.code in ABSENT
                if error.code in ABSENT:
                    lacking[source] = damage.first_offset
                logger.info("%s: broker %d does not help: %s", name, source, error)
            except PeerUnreachable as error:
                gap_is_shared = False
                everyone_lacks_it = everyone_lacks_it and await self._ends_before(partition, source, damage)
                logger.info("%s: broker %d does not help: %s", name, source, error)
            if repair.is_complete:
                break
        if repair.is_obsolete or (
            cleaned and not repair.is_complete and await self._copy_cleaned(partition, repair, cleaned)
        ):
            return
        try:
            part = None if repair.is_complete else repair.finish_part()
        except NoRoom as refused:
            self._roll(partition, refused)
            return
        if part is not None and (await self._check(partition, part) or repair.is_obsolete):
            return  # the rest is a new range, which another replica may have
        if not repair.is_complete and (await self._repair_end(partition, repair, lacking) or repair.is_obsolete):
            return
        if repair.is_complete:
            try:
                await self._finish(partition, repair, name)
            except NoRoom as refused:
                self._roll(partition, refused)
        elif damage.first_offset in lacking.values() and self._forget_deleted(log, segment, damage):
            pass  # the next attempt asks for what is left of the range
        elif self._damaged_leaders.may_resign(partition, damage):
            await self._damaged_leaders.resign(partition, damage)  # loses no committed record
        elif gap_is_shared and self.others(partition) and everyone_lacks_it:
            self._accept_gap(partition, segment, damage)
        elif everyone_lacks_it and (partition, damage.first_offset) not in self._lost_ranges:
            self._lost_ranges.add((partition, damage.first_offset))
            self.counters.ranges_lost += 1
            logger.error("%s: no replica has a whole copy of the damaged records: %s", name, describe(damage))
            log.accept_loss(damage)

    @staticmethod
    def _forget_deleted(log: PartitionLog, segment: Segment, damage: DamagedRange) -> bool:
        """Whether the range begins with deleted records, which no longer count. The other replicas cannot be asked for
        them, and their cleaners may have removed the batch that holds the log start.
        """
        start = log.log_start_offset
        if not damage.first_offset < start < damage.end_offset:
            return False
        left = damage._replace(first_offset=start)
        segment.set_damage(tuple(left if each == damage else each for each in segment.damage))
        return True

    def _accept_gap(self, partition: Partition, segment: Segment, damage: DamagedRange) -> None:
        """Every other replica lacks the first offsets of the range, too. Whole batches may be among its bytes, with
        further gaps between them: from now on the rules of a log that was compacted once count there. Raises OSError.
        """
        log = partition.log
        if damage.position == damage.end_position:
            logger.info("%s: no replica has offsets %d to %d", partition, damage.first_offset, damage.end_offset)
            log.accept_gap(segment, damage)
            self._partitions.reported_values_changed(partition)
        elif not segment.may_have_gaps:
            require_space(log.disk, segment, 0)  # for the file
            logger.info("%s: no replica has all offsets from %d on", partition, damage.first_offset)
            log.explain_gaps(damage.end_offset)  # the next attempt repairs the range

    async def _copy_cleaned(self, partition: Partition, repair: RangeRepair, sources: list[int]) -> bool:
        """Their cleaners may have removed other records of the range. Whether the attempt is over: the log is replaced
        by a replica's copy, or one may do so later. Otherwise the range alone is repaired. Raises OSError.
        """
        name = f"{partition.topic}-{partition.index}"
        outcome = await self.whole_copies.replace(partition, repair, sources)
        if outcome is Outcome.REPLACED:
            self._note_repaired(partition, repair.damage, name)
        if outcome is not Outcome.NONE_HELPS:
            return True
        logger.warning("%s: records that were deleted or aborted may be back: %s", name, describe(repair.damage))
        repair.lacks_below = None
        with suppress(CopyRefused, KafkaError, PeerUnreachable):
            await self._copy_committed_if_refused(partition, repair, sources[0])
        return False

    async def _repair_end(self, partition: Partition, whole: RangeRepair, sources: dict[int, int]) -> bool:
        """Copy the end of the range from a replica that lacks its start. Whether the log has changed.

        The start may be damaged there too, or deleted (retention, DeleteRecords). Where the deletion ended in the first
        batch of the range, the end is the whole range, and only its first offsets cannot be asked for.
        """
        log, damage = partition.log, whole.damage
        if damage.end_offset - damage.first_offset < 2:
            return False
        for source, lowest in sources.items():
            try:
                for from_offset, fetch_offset in await self._find_ends(partition, source, damage, lowest):
                    if whole.is_obsolete:
                        return True
                    is_whole = from_offset == damage.first_offset
                    repair = log.repair_of(whole.segment, damage, None if is_whole else from_offset)
                    is_copied = await self._copy_end(partition, repair, source, fetch_offset)
                    if is_copied and is_whole:
                        await self._finish(partition, repair, f"{partition.topic}-{partition.index}")
                    elif is_copied:
                        is_copied = await self._check(partition, repair.finish())
                    if is_copied:
                        logger.info("%s: copied offsets from %d on from broker %d", partition, from_offset, source)
                        return True
                    if repair.is_obsolete:
                        return True
            except NoRoom as refused:
                self._roll(partition, refused)
                return True
            except (KafkaError, PeerUnreachable) as error:
                logger.info("%s: broker %d does not help: %s", partition, source, error)
        return False

    async def _ends_before(self, partition: Partition, source: int, damage: DamagedRange) -> bool:
        """Whether a follower's log ends at the damage or before it. It could get the records only from a leader that
        lacks them, too, and would wait for it for ever, as the leader for the follower.
        """
        assignment = self.assignment_of(partition)
        if assignment is not None and assignment.leader == source:
            return False  # this log is to be cut, or knows more than that leader has committed
        try:
            return not await self.fetch(partition, source, damage.first_offset, up_to_log_end=True, bytes_max=1)
        except KafkaError as error:
            return error.code == ErrorCode.OFFSET_OUT_OF_RANGE
        except PeerUnreachable:
            return False

    async def _copy_end(self, partition: Partition, repair: RangeRepair, source: int, fetch_offset: int) -> bool:
        """Whether the end of a range was copied from a replica. Raises NoRoom, OSError."""
        try:
            await self._copy_committed_if_refused(partition, repair, source, fetch_offset)
        except NoRoom:
            raise
        except (CopyRefused, KafkaError, PeerUnreachable):
            return False  # it lacks more in between, or has not committed all
        return repair.is_complete and not repair.is_obsolete

    async def _find_ends(
        self, partition: Partition, source: int, damage: DamagedRange, lowest: int
    ) -> list[tuple[int, int]]:
        """The batches from which on a replica may have the rest of the range: (first offset, an offset in the batch).

        First the lowest batch, which is right if the replica lacks only the start of the range; then the last batch of
        the range, in case it lacks more in between. Empty if it lacks the last one too. A batch may be readable only at
        a later offset than its first one, because the replica's log starts in it.
        """
        up_to_log_end = self._is_up_to_log_end(partition, damage)
        lacked, readable = damage.first_offset, damage.end_offset - 1
        ends: list[tuple[int, int]] = []
        offset = readable
        while True:
            first_offset = -1
            try:
                data = await self.fetch(partition, source, offset, up_to_log_end=up_to_log_end, bytes_max=1)
                first_offset = int.from_bytes(data[:8], "big") if data else -1
            except KafkaError as error:
                if error.code not in ABSENT:
                    raise
            if lowest <= first_offset <= offset:  # even below `lacked`, where the replica's log starts in the batch
                readable = first_offset
                ends.append((first_offset, offset))
            else:
                lacked = offset
            if not ends or lacked + 1 >= readable:
                return ends if len(ends) < 2 else [ends[-1], ends[0]]
            offset = (lacked + readable) // 2

    async def _finish(self, partition: Partition, repair: RangeRepair, name: str) -> None:
        is_done = await self._check(partition, repair.finish())
        if is_done and repair.damage not in repair.segment.damage:
            self._note_repaired(partition, repair.damage, name)

    def _note_repaired(self, partition: Partition, damage: DamagedRange, name: str) -> None:
        self.counters.ranges_repaired += 1
        self._lost_ranges.discard((partition, damage.first_offset))
        self.on_repaired(partition.log)
        logger.warning("%s: repaired: %s", name, describe(damage))
        self._partitions.reported_values_changed(partition)

    async def _check(self, partition: Partition, check: RepairCheck) -> bool:
        log = partition.log  # a move may replace it meanwhile
        try:
            await until_done(self._run_in_executor(check.run))
        finally:
            is_done = log.finish_repair(check)
        partition.watch.tail.clear()  # an answer that is kept for the next follower may have the damaged bytes
        return is_done

    async def _go_on_behind(self, partition: Partition, repair: RangeRepair, refused: SegmentFull) -> None:
        """Keep what was copied. The next attempt copies the rest into a segment of its own. Raises OSError."""
        log, part = partition.log, repair.finish_part(goes_on_behind=True)
        if part is not None:
            await self._check(partition, part)
        if begin_segment_at_damage(log, repair.segment, repair.next_offset, refused.first_offset):
            logger.info("%s: the rest of the damage gets a segment of its own: %s", partition, refused)

    def _roll(self, partition: Partition, refused: NoRoom) -> None:
        """Roll a new segment, so that the next attempt may rewrite the present one. Raises NoSpace, OSError."""
        log = partition.log
        require_space(log.disk, log.segments.active, 0)  # for its indexes
        logger.info("%s: starting a new segment, to repair the present one: %s", partition, refused)
        log.roll(log.clock_ms)

    async def _explain(self, partition: Partition, first_offset: int, end_offset: int) -> None:
        """Fill a gap in what the leader sends, and accept as compacted what all in-sync replicas lack.

        While a topic is compacted, each replica is cleaned at its own time. After it has become another topic, some
        replicas still have what the leader has compacted away. Their records are no less right than the gap, and if the
        leader has lost the records instead, they are needed.
        """
        log, leader_epoch = partition.log, partition.leader_epoch
        copies = await self._copies_behind(partition, first_offset, end_offset)
        if partition.log is not log or partition.leads or partition.leader_epoch != leader_epoch:
            return
        if copies is None or log.log_end_offset != first_offset or log.failure is not None:
            return
        # What lies behind the gap is taken, too, with the gaps in it: a log that was compacted has thousands of them.
        is_empty = log.log_start_offset == log.log_end_offset
        data, gaps_below = merge(copies, first_offset, end_offset, is_empty=is_empty)
        if not data:
            if min(copy.base_offset for copy in copies) < end_offset:
                logger.error("%s: the replicas have other batches at offset %d", partition, first_offset)
                return
            gaps_below = end_offset
        if gaps_below >= 0:
            logger.info(
                "%s: what is missing from %d to %d is in no replica in sync", partition, first_offset, gaps_below
            )
            log.explain_gaps(gaps_below)
        if data:
            try:
                partition.append_as_follower(memoryview(bytearray(data)), log.clock_ms)
            except BaseException:  # as of a full volume: the leader's next batches would be taken without these
                forget_gaps_behind(log, log.log_end_offset)
                raise
            self._partitions.flushes.flush_if_due(partition)
            logger.info(
                "%s: took offsets %d to %d from the replicas in sync", partition, first_offset, log.log_end_offset
            )

    async def _copies_behind(self, partition: Partition, first_offset: int, end_offset: int) -> list[GapCopy] | None:
        """What the replicas have from `first_offset` on. None while an in-sync replica does not answer.

        A replica outside the ISR counts only if it answers with records. Without this exception two new replicas would
        wait for each other, and a replica that replaces a dead broker would wait for that broker. What only such a
        replica has is not taken, nor its lack accepted.
        """
        copies: list[GapCopy] = []
        for source in self.others(partition):
            try:
                start, data = await self._kept_behind(partition, source, first_offset, end_offset)
                is_in_sync = source in self.in_sync(partition)
                if not data and is_in_sync and await self._lacks(partition, source, start, end_offset):
                    copies.append(GapCopy(True, end_offset, data))
                    continue
                if not data:
                    raise PeerUnreachable("it has not come that far yet")
            except (KafkaError, PeerUnreachable) as error:
                logger.info("%s: broker %d does not answer about a gap: %s", partition, source, error)
                if source in self.in_sync(partition):
                    return None
                continue
            base_offset = min(max(int.from_bytes(data[:8], "big"), first_offset), end_offset)
            if not is_in_sync and base_offset < min((each.base_offset for each in copies), default=end_offset):
                logger.error(
                    "%s-%d: the leader lacks offsets %d to %d, which broker %d has", partition.topic, partition.index,
                    first_offset, end_offset, source,
                )  # fmt: skip
                return None
            copies.append(GapCopy(is_in_sync, base_offset, data))
        return copies if any(copy.is_in_sync for copy in copies) else None

    async def _kept_behind(
        self, partition: Partition, source: int, first_offset: int, end_offset: int
    ) -> tuple[int, bytes]:
        """The replica's committed records from `first_offset` on, or from its log start, and this offset. Its retention
        may have run before the leader's. Where it ended behind the gap, `end_offset`. Raises KafkaError,
        PeerUnreachable.
        """
        start = first_offset
        while start < end_offset:
            try:
                return start, await self.fetch(
                    partition, source, start, up_to_log_end=False, bytes_max=_GAP_FETCH_BYTES
                )
            except RecordsDeleted as deleted:
                start = min(deleted.log_start_offset, end_offset)
        return start, b""

    async def _lacks(self, partition: Partition, source: int, first_offset: int, end_offset: int) -> bool:
        """Whether a replica in sync has no records from `first_offset` to `end_offset`, also not uncommitted ones. Its
        log may end behind the gap: nothing there is committed while followers wait before the gap. Raises KafkaError,
        PeerUnreachable: one that has not come that far answers OFFSET_OUT_OF_RANGE.
        """
        if first_offset == end_offset:
            return True
        data = await self.fetch(partition, source, first_offset, up_to_log_end=True)
        if data:
            return int.from_bytes(data[:8], "big") >= end_offset
        await self.fetch(partition, source, end_offset, up_to_log_end=True, bytes_max=1)
        return True

    # ----------------------------------------------------------------------------------------------------- other nodes

    def assignment_of(self, partition: Partition) -> PartitionImage | None:
        """The partition in the metadata; None if it is not there."""
        topic = self._image().topics_by_id.get(partition.topic_id)
        return None if topic is None else topic.partitions.get(partition.index)

    def in_sync(self, partition: Partition) -> set[int]:
        assignment = self.assignment_of(partition)
        return set() if assignment is None else set(assignment.isr)

    def others(self, partition: Partition) -> list[int]:
        """The other replicas, in-sync ones first."""
        assignment = self.assignment_of(partition)
        if assignment is None:
            return []
        in_sync_first = sorted(assignment.replicas, key=lambda replica: replica not in assignment.isr)
        return [replica for replica in in_sync_first if replica != self._node_id]

    def process_of(self, partition: Partition, source: int) -> bytes | None:
        """What is another one after a start of the broker; None where it has no replica."""
        broker = self._image().brokers.get(source)
        return None if broker is None or source not in self.others(partition) else broker.incarnation_id

    async def _copy_committed_if_refused(
        self, partition: Partition, repair: RangeRepair, source: int, first_fetch_offset: int | None = None
    ) -> None:
        """`_copy`. What contradicts the epoch file is asked for again, as a replica in sync has it committed."""
        before = repair.next_offset
        try:
            await self._copy(partition, repair, source, first_fetch_offset)
        except CopyRefused as refused:
            if not refused.is_of_other_epoch or source not in self.in_sync(partition):
                raise
            repair.is_committed = True
            try:
                await self._copy(
                    partition, repair, source, first_fetch_offset if repair.next_offset == before else None
                )
            finally:
                repair.is_committed = False

    async def _copy(
        self, partition: Partition, repair: RangeRepair, source: int, first_fetch_offset: int | None = None
    ) -> None:
        """Copy the range from one replica. Raises CopyRefused, KafkaError, PeerUnreachable, OSError."""
        log = partition.log
        up_to_log_end = self._is_up_to_log_end(partition, repair.damage) and not repair.is_committed
        repair.compares_before = repair.damage.first_offset > log.log_start_offset and source in self.in_sync(partition)
        while not repair.is_complete and not repair.is_obsolete:
            offset = repair.next_offset if first_fetch_offset is None else first_fetch_offset
            first_fetch_offset = None
            # Deleted records cannot be asked for. A batch that holds the log start comes whole; what else is missing
            # before it looks like a gap. In a log without gaps, it is `_repair_end` that leaves the start of the range.
            if repair.segment.may_have_gaps and offset < log.log_start_offset < repair.damage.end_offset:
                offset = log.log_start_offset
            data = await self.fetch(partition, source, offset, up_to_log_end=up_to_log_end)
            if not data and not repair.is_committed:
                data = await self._fetch_committed_here(partition, source, offset)
            if not data:
                raise PeerUnreachable("it has not come that far yet")
            before = repair.next_offset
            # The other replicas truncate to a leader's log, so a leader must not move its log end.
            may_move_end = not up_to_log_end and not partition.leads
            repair.move_end = partial(move_damaged_end, log) if may_move_end else None
            try:
                repair.accept(memoryview(data))
            except EpochBegins:
                await self._compare_before(partition, repair, source)
                continue
            except GapsUnknown:
                await self.find_gaps(log, repair)
                continue
            if repair.next_offset == before:
                raise CopyRefused("it sends no whole batch")

    async def _fetch_committed_here(self, partition: Partition, source: int, offset: int) -> bytes:
        """The records of a replica in sync up to this leader's high watermark. The other one may know a lower one: it
        learns it from the answers to its fetches, and the damage makes them errors. Empty if there are none.
        """
        bound = partition.high_watermark
        if not partition.leads or offset >= bound or source not in self.in_sync(partition):
            return b""
        data = await self.fetch(partition, source, offset, up_to_log_end=True)
        ends = (at + header.size_bytes for at, header in iter_headers(data) if header.next_offset <= bound)
        return data[: max(ends, default=0)]

    async def find_gaps(self, log: PartitionLog, repair: RangeRepair) -> int:
        """The offset from which on the log has all records, also for `repair.accept`. Raises OSError."""
        if not repair.knows_gaps or repair.lacks_below is None:
            scan = GapScan(log, repair.segment, repair.damage, compacted_below(log), lambda: self._is_closed)
            await until_done(self._run_in_executor(scan.run))
            repair.lacks_below, repair.knows_gaps = scan.end_offset, True
        return repair.lacks_below

    async def _compare_before(self, partition: Partition, repair: RangeRepair, source: int) -> None:
        """Raises PeerUnreachable, OSError."""
        try:
            offset = repair.damage.first_offset - 1
            data = await self.fetch(partition, source, offset, up_to_log_end=False, bytes_max=1)
        except KafkaError:
            data = b""
        if not repair.is_obsolete:
            repair.compare_before(memoryview(data))

    @staticmethod
    def _is_up_to_log_end(partition: Partition, damage: DamagedRange) -> bool:
        """Whether uncommitted records of another replica can be the lost ones.

        Records that this leader appended in its epoch are the same on every replica. At the end of the log, a replica
        may have other records of an earlier epoch, unless they are committed.
        """
        log = partition.log
        is_own = partition.leads and log.leader_epochs.epoch_for_offset(damage.first_offset) == partition.leader_epoch
        return is_own or damage.end_offset < log.log_end_offset

    async def fetch(
        self, partition: Partition, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = FETCH_BYTES_MAX
    ) -> bytes:
        """A replica's records from `offset` to its log end or high watermark. Raises KafkaError, PeerUnreachable."""
        answer = await self.ask(partition, source, offset, up_to_log_end=up_to_log_end, bytes_max=bytes_max)
        return bytes(answer.records or b"")

    async def ask(
        self, partition: Partition, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = FETCH_BYTES_MAX
    ) -> PartitionData:
        """`fetch` with the replica's high watermark."""
        endpoint = self._endpoint_of(source)
        if endpoint is None:
            raise PeerUnreachable("it is not registered")
        is_bulk = bytes_max == FETCH_BYTES_MAX  # smaller answers say little of the link
        if is_bulk:
            bytes_max = self._answer_size.limit(bytes_max)
        request = FetchRequest(
            replica_id=REPAIR_REPLICA_ID if up_to_log_end else REPAIR_COMMITTED_REPLICA_ID,
            max_wait_ms=0,
            min_bytes=1,
            max_bytes=bytes_max,
            topics=[
                FetchTopic(
                    topic_id=partition.topic_id,
                    partitions=[
                        FetchPartition(partition=partition.index, fetch_offset=offset, partition_max_bytes=bytes_max)
                    ],
                )
            ],
        )
        lane, began_s = self._queue.lanes.get(partition, "repair"), self._loop.time()
        try:
            response = await self._exchange(endpoint, request, FETCH_VERSION, timeout_ms=FETCH_TIMEOUT_MS, lane=lane)
        except PeerUnreachable as error:
            if is_bulk and not error.refused:
                self._answer_size.on_lost()
            raise
        if response.error_code or not response.responses:
            raise PeerUnreachable(f"it answers {ErrorCode.of(response.error_code).name}")
        answer: PartitionData = response.responses[0].partitions[0]
        if answer.error_code == ErrorCode.OFFSET_OUT_OF_RANGE and answer.log_start_offset > offset:
            raise RecordsDeleted(answer.log_start_offset)
        if answer.error_code:
            raise KafkaError(ErrorCode.of(answer.error_code))
        if is_bulk:
            is_large = len(answer.records or b"") >= bytes_max // 2
            self._answer_size.on_answer(1000 * (self._loop.time() - began_s), is_large)
        return answer
