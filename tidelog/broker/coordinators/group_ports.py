"""The node's implementation of `coordinators.ports.Ports`: the logs of its partitions, clocks and
timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from tidelog.protocol.batches.record_batch import NO_SEQUENCE
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.backoff import SHORTAGE_PAUSE_S
from tidelog.replication.partition import ACKS_ALL
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.reader import ColdRead, is_whole

if TYPE_CHECKING:
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.storage.producers.verification import TransactionAppend, Verification

_EMPTY_CHUNK = memoryview(b"")
READ_BYTES = 1024 * 1024


class GroupPorts:
    """`topic`: the internal topic whose partitions hold the coordinators' records. `executor`: for work on much memory,
    one thread.
    """

    def __init__(
        self,
        topic: str,
        partitions: Partitions,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
        executor: Executor | None = None,
    ) -> None:
        self._topic = topic
        self._partitions = partitions
        self._loop = loop
        self.wall_ms = clock_ms
        self._executor = executor

    def append(self, partition: int, batch: bytearray, transaction: TransactionAppend | None = None) -> int:
        leader = self._partitions.leader(self._topic, partition)
        info = self._partitions.append(
            leader, memoryview(batch), self.wall_ms(), ACKS_ALL, from_client=False, transaction=transaction
        )
        return info.last_offset + 1

    def batch_bytes_max(self, partition: int) -> int:
        return self._partitions.leader(self._topic, partition).log.config.max_message_bytes

    def begin_verification(
        self, partition: int, producer_id: int, producer_epoch: int, adds: bool
    ) -> Verification | None:
        leader = self._partitions.leader(self._topic, partition)
        return leader.begin_verification(producer_id, producer_epoch, NO_SEQUENCE, adds, self.wall_ms())

    def is_committed(self, partition: int, offset: int) -> bool:
        replica = self._partitions.find(self._topic, partition)
        return replica is not None and replica.leads and not replica.offline and replica.log.high_watermark >= offset

    def when_committed(self, partition: int, offset: int, callback: Callable[[Exception | None], None]) -> None:
        try:
            self._partitions.when_committed(self._partitions.leader(self._topic, partition), offset, callback)
        except KafkaError as error:
            callback(error)

    def read_log(self, partition: int) -> Iterator[memoryview]:
        leader = self._partitions.leader(self._topic, partition)
        offset, end = leader.log.log_start_offset, leader.log.log_end_offset
        cold_reads: list[ColdRead] = []
        while offset < end:
            try:
                result = leader.log.read(offset, READ_BYTES, end)
            except ColdRead as cold:
                cold_reads.append(cold)
                self._partitions.run_cold(cold, cold_reads.clear)
                while cold_reads:
                    yield _EMPTY_CHUNK
                continue
            except (OSError, CorruptLog, DamagedRecords) as error:
                refusal = self._partitions.refusal(leader, error)
                is_repairable = isinstance(error, DamagedRecords) and refusal.code == ErrorCode.KAFKA_STORAGE_ERROR
                if not is_repairable and not leader.log.can_retry(error):
                    raise refusal from None
                yield from self._pause()
                continue
            if result.next_offset <= offset:
                raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"nothing to read at {offset}, the log ends at {end}")
            if not is_whole(result):
                leader.log.segments.distrust_from(offset)
                continue
            for region in result.regions:
                yield memoryview(region)
            offset = result.next_offset

    def _pause(self) -> Iterator[memoryview]:
        pause_end_s = self._loop.time() + SHORTAGE_PAUSE_S
        while self._loop.time() < pause_end_s:
            yield _EMPTY_CHUNK

    def on_thread(self, work: Callable[[], bytes]) -> Callable[[], bytes | None]:
        future = self._loop.run_in_executor(self._executor, work)
        # asyncio warns of an error that is never asked for, as that of a load which has ended meanwhile.
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return lambda: future.result() if future.done() else None

    def high_watermark(self, topic: str, partition: int) -> int | None:
        replica = self._partitions.find(topic, partition)
        return None if replica is None else replica.high_watermark

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_ms / 1000, callback)

    def now_ms(self) -> int:
        return int(self._loop.time() * 1000)
