"""Replaces a damaged compacted log by another replica's, where the damaged range alone may not be taken from it.

Two cleaners may have removed different records of the range, and a mixture may have a deleted key without its
tombstone. `storage/log/prefix_copy.py` says why the whole copy is right, checks it and puts it in place. This module
decides which replica gives it, and how long to wait for one that may do so later: first those in sync; in the end one
that is not; and the range alone only if for a while none can give its log. Each copy takes a slot of the `RepairQueue`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.broker.replicas.repair_queue import PAUSE_S_MIN, RepairQueue
from tidelog.protocol.batches.record_batch import HEADER_SIZE, read_header
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable
from tidelog.replication.threads import until_done
from tidelog.storage.log.compaction import CleaningFailed
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.log.repair import require_space
from tidelog.storage.segments.transaction_index import CorruptTransactionIndex

if TYPE_CHECKING:
    from tidelog.protocol.messages.fetch import PartitionData
    from tidelog.replication.partition import Partition
    from tidelog.storage.log.partition_log import PartitionLog
    from tidelog.storage.log.repair import RangeRepair

logger = logging.getLogger("tidelog.repairs")

WHOLE_COPY_WAIT_S: Final = 60.0
"""The longest wait for the whole copy of a replica that could not give it: one that is damaged elsewhere may wait for
this one. Then one that is not in sync may give its copy."""
WHOLE_COPY_PATIENCE_S: Final = 60.0
"""The longest wait for the next batches of a copy that is under way."""
COPY_PAUSE_S: Final = 0.5
ABSENT: Final = (ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.CORRUPT_MESSAGE)
"""The answers of a replica that lacks a range, or has no whole copy of it."""


class Outcome(Enum):
    REPLACED = auto()
    LATER = auto()
    """The log is as it was. The next attempt looks again."""
    NONE_HELPS = auto()


class Replicas(Protocol):
    """The access to a partition's replicas on other nodes (`repairs.Repairs`)."""

    def others(self, partition: Partition) -> list[int]: ...
    def process_of(self, partition: Partition, source: int) -> bytes | None: ...
    def in_sync(self, partition: Partition) -> set[int]: ...
    async def ask(
        self, partition: Partition, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = ...
    ) -> PartitionData: ...
    async def find_gaps(self, log: PartitionLog, repair: RangeRepair) -> int: ...


class WholeCopies:
    """`now_s`: the time on the loop's clock."""

    def __init__(
        self,
        replicas: Replicas,
        queue: RepairQueue,
        now_s: Callable[[], float],
        run_in_executor: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self.on_replaced: Callable[[Partition], None] = lambda partition: None
        """Called when the partition's log has become that of another replica up to an offset."""
        self.waits_since_s: dict[Partition, float] = {}
        """Since when no replica could replace the whole log."""
        self._replicas = replicas
        self._queue = queue
        self._now_s = now_s
        self._run_in_executor = run_in_executor

    def forget(self, partition: Partition) -> None:
        """The damage is repaired, or the replica is gone."""
        self.waits_since_s.pop(partition, None)

    async def replace(self, partition: Partition, repair: RangeRepair, sources: Sequence[int]) -> Outcome:
        """Replace the log by the copy of one of the sources, whose cleaners may have removed other records of the
        range. Raises OSError.
        """
        since_s = self.waits_since_s.pop(partition, None)
        if partition.log.is_under_cleaning:
            return Outcome.LATER  # it was given up, and has not ended: both would write the same files
        in_sync, may_help = self._replicas.in_sync(partition), False
        for source in sorted(sources, key=lambda each: each not in in_sync):
            is_in_sync = source in in_sync
            if not is_in_sync and (may_help or self._waits(partition, since_s)):
                return Outcome.LATER  # its copy is the last resort before the range alone
            if not self._queue.begin_whole_copy(partition):
                return Outcome.LATER
            try:
                process = self._replicas.process_of(partition, source)
                if not is_in_sync and not await self._continues(partition, source):
                    return Outcome.LATER
                is_replaced = await self._copy(partition, repair, source, process)
                # Where it was given up, as for a truncation, the next attempt looks again.
                return Outcome.REPLACED if is_replaced else Outcome.LATER
            except (KafkaError, PeerUnreachable) as error:
                code = error.code if isinstance(error, KafkaError) else None
                may_help = may_help or (is_in_sync and code not in (ErrorCode.KAFKA_STORAGE_ERROR, *ABSENT))
                logger.info("%s: broker %d does not help: %s", partition, source, error)
            except (CleaningFailed, CorruptTransactionIndex) as error:
                logger.warning("%s: the copy of broker %d cannot take its place: %s", partition, source, error)
            finally:
                self._queue.end_whole_copy()
            if repair.is_obsolete:
                return Outcome.LATER
        if may_help or self._waits(partition, since_s):
            return Outcome.LATER
        return Outcome.NONE_HELPS

    def _waits(self, partition: Partition, since_s: float | None) -> bool:
        """Whether the time is not over for which to wait for a replica that may soon send its whole log.

        It begins now without `since_s`: the attempt may have taken longer, with a copy that was not whole in the end.
        """
        since_s = self._now_s() if since_s is None else since_s
        self.waits_since_s[partition] = since_s
        return self._now_s() - since_s < WHOLE_COPY_WAIT_S

    async def _continues(self, partition: Partition, source: int) -> bool:
        """Whether this log has all that the replica has committed. A follower that has not yet may have it later.

        One that is not in sync may have what an unclean election has taken from this log, and its cleaner may have
        removed records because of that. Raises PeerUnreachable then, KafkaError.
        """
        log = partition.log
        answer = await self._replicas.ask(partition, source, log.log_start_offset, up_to_log_end=False, bytes_max=1)
        end_offset = answer.high_watermark
        if end_offset > log.log_end_offset:
            if partition.leads:
                raise PeerUnreachable("it has committed records behind the end of this log, which leads")
            return False
        last_offset = end_offset - 1
        answer = await self._replicas.ask(partition, source, last_offset, up_to_log_end=False, bytes_max=1)
        epoch, batch = log.leader_epochs.epoch_for_offset(last_offset), memoryview(answer.records or b"")
        if len(batch) < HEADER_SIZE:
            raise PeerUnreachable(f"it has no record at offset {last_offset} any more")
        header = read_header(batch)  # perhaps that of a later batch: leader epochs never fall
        of_same = header.partition_leader_epoch == epoch
        if epoch >= 0 and not of_same and (header.base_offset <= last_offset or header.partition_leader_epoch < epoch):
            raise PeerUnreachable(f"it has committed a record of another leader epoch at offset {last_offset}")
        return True

    async def _copy(self, partition: Partition, repair: RangeRepair, source: int, process: bytes | None) -> bool:
        """Replace the log up to the last segment that lacks records, by the copy of this process of the source. False
        if it has changed meanwhile. Raises KafkaError, PeerUnreachable, CleaningFailed, OSError.
        """
        log, was_in_sync = partition.log, source in self._replicas.in_sync(partition)
        lacks_below = await self._replicas.find_gaps(log, repair)
        if repair.is_obsolete:
            return False
        lacks_below = min(lacks_below, log.log_end_offset)  # the log may have been cut during the scan
        last = log.segments.from_offset(max(lacks_below - 1, repair.segment.base_offset))[0]
        if last is log.segments.active:
            require_space(log.disk, last, 0)  # for its indexes
            log.roll(log.clock_ms)
        copy = PrefixCopy(log, last, log.clock_ms)
        logger.info("%s: copying all up to offset %d from broker %d", partition, copy.chosen.end_offset, source)
        try:
            while True:
                if copy.wants_from >= 0:
                    copy.data = await self._fetch(partition, source, process, copy)
                await until_done(self._run_in_executor(copy.run))
                if copy.is_copied and not was_in_sync and not await self._continues(partition, source):
                    copy.take_back()  # it was cut during the copy, and filled again
                    return False
                if not copy.advance():
                    break
                if copy.is_short:
                    await asyncio.sleep(PAUSE_S_MIN)
        except BaseException:
            copy.take_back()
            raise
        finally:
            if copy.is_in_place:
                self.on_replaced(partition)
        partition.watch.tail.clear()
        if copy.is_in_place and copy.is_given_up and log.failure is None and not log.is_closed:
            log.after_repair()  # what has given the copy up has finished its swap
        return copy.is_in_place

    async def _fetch(self, partition: Partition, source: int, process: bytes | None, copy: PrefixCopy) -> bytes:
        """The next batches of the copy. After the first ones it waits for them: the copy would begin again from its
        start. So it does where the replica has another log, perhaps of another cleaning: in a process that has started
        again, or emptied by a truncation, and not filled so far. Raises KafkaError, PeerUnreachable.
        """
        until_s, has_all = self._now_s() + WHOLE_COPY_PATIENCE_S, True
        while True:
            try:
                answer = await self._replicas.ask(partition, source, copy.wants_from, up_to_log_end=False)
                data, has_all = bytes(answer.records or b""), answer.high_watermark >= copy.chosen.end_offset
                if not data or not has_all:
                    raise PeerUnreachable("it has not come that far yet")
            except (KafkaError, PeerUnreachable) as error:
                is_gone = isinstance(error, KafkaError) and error.code in ABSENT
                if is_gone or not has_all or not copy.data or copy.is_given_up or self._now_s() >= until_s:
                    raise
                data = b""
            if self._replicas.process_of(partition, source) != process:
                raise PeerUnreachable("it has started again, or had no replica meanwhile")
            if data:
                return data
            await asyncio.sleep(COPY_PAUSE_S)
