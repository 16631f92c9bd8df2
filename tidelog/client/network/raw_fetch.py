"""Reads whole record batches of one partition between two offsets, as bytes.

    async for chunk in fetch_raw(cluster, TopicPartition("flights", 0), 0, 50_000):
        for columns in decode_columns(chunk.data, ..., first_offset=chunk.first_offset, end_offset=50_000, ...): ...

`data` holds one or more whole batches as stored (compressed, control batches included). The first
batch holds `first_offset`; no batch starts at or after the end. The caller skips records before
`first_offset` and from the end on. For read_committed it also skips the batches that
`records.iter_data_batches` leaves out with `aborted`. One request is in flight while the caller
reads the last response. `sync.RawReader` is the blocking version.

Invariant: every batch is checked before its header decides where the read continues. A damaged
batch is fetched again, from the new leader when the leader has moved. It is never skipped: the read
ends with an error when no intact batch arrives. All batches of a read are of one log: an unclean
election that replaced some of them meanwhile ends the read, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import AnswerTooLarge
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.network.offsets import ISOLATION
from tidelog.client.network.outcomes import start_task
from tidelog.protocol.batches.record_batch import (
    BatchHeader,
    CorruptRecord,
    check_crc,
    iter_headers,
    refuse_old_format,
)
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import (
    FIRST_VERSION_WITH_DIVERGENCE,
    LAST_VERSION_WITH_NAMES,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)

_SESSIONLESS_EPOCH = -1
DEFAULT_CHUNK_BYTES = 4 * 1024 * 1024
_CHUNK_FACTOR = 4
"""After an answer that did not come the reader asks for so many times less; for as many times more after one that did.
"""
_CHUNK_BYTES_MIN = 65_536
_ARRIVALS_MAX = 64


class ReplacedOffsets(KafkaError):
    """Records before the position are others now than those that were read, by an unclean election (KIP-320).

    The code is OFFSET_OUT_OF_RANGE, as for a position beyond the log.
    """

    def __init__(self, partition: TopicPartition, position: int) -> None:
        super().__init__(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"records of {partition} before offset {position} were replaced by an unclean election while it was read",
        )


class RawBatches(NamedTuple):
    """One chunk of batches. Reading continues at `next_offset`."""

    data: memoryview
    first_offset: int
    next_offset: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...]
    """(producer id, first offset) of aborted transactions, for read_committed."""
    last_epoch: int = -1
    """The leader's epoch in which the last batch was written; -1 where it is not known."""


async def fetch_raw(
    cluster: Cluster,
    partition: TopicPartition,
    start_offset: int,
    end_offset: int,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    isolation_level: str = "read_uncommitted",
    max_wait_ms: int = 500,
    stall_timeout_ms: float = 60_000,
    check_crcs: bool = True,
    topic_id: bytes = NO_TOPIC_ID,
) -> AsyncIterator[RawBatches]:
    """Yield the batches that hold [start_offset, end_offset), in order.

    A chunk has about `chunk_bytes`, and at least one batch. Chunks are smaller for a while after an answer that did not
    come within the request timeout, as over a slow link, that was too large to receive, or whose connection broke
    twice. The read follows leader changes. With a `topic_id` (not zeros) it waits while the metadata has another topic
    of this name.

    Raises:
        KafkaError: OFFSET_OUT_OF_RANGE if the log no longer (or not yet) has the offset. ReplacedOffsets if the log is
            not the one that was read. REQUEST_TIMED_OUT if no records arrive for `stall_timeout_ms`. MESSAGE_TOO_LARGE
            for a batch that cannot be received. And each error that is not retriable.
    """
    await cluster.topic(partition.topic, stall_timeout_ms)
    isolation = ISOLATION[isolation_level]
    reader = _Reader(cluster, partition, chunk_bytes, isolation, max_wait_ms, stall_timeout_ms, check_crcs, topic_id)
    next_task: asyncio.Task[RawBatches] | None = None
    offset = start_offset
    try:
        while offset < end_offset:
            task = next_task or start_task(reader.next(offset, end_offset))
            next_task = None
            chunk = await task
            offset = chunk.next_offset
            if offset < end_offset:
                next_task = start_task(reader.next(offset, end_offset))
            yield chunk
    finally:
        if next_task is not None:
            next_task.cancel()
            await asyncio.wait([next_task])


class _ChunkSize:
    """How many bytes to ask for: less where answers do not come, and more again with those that do.

    A size that failed after a growth is tried again later each time, after up to _ARRIVALS_MAX chunks.
    """

    def __init__(self, size_bytes: int) -> None:
        self.bytes = size_bytes
        self._bytes_max = size_bytes
        self._arrivals = 0
        """Those since the size was another one."""
        self._arrivals_to_grow = 1
        self._has_grown = False
        """Since an answer failed."""

    def shrink(self, least_bytes: int) -> None:
        self.bytes = min(self.bytes, max(self.bytes // _CHUNK_FACTOR, least_bytes))
        self._arrivals = 0
        if self._has_grown:
            self._arrivals_to_grow = min(2 * self._arrivals_to_grow, _ARRIVALS_MAX)
        self._has_grown = False

    def handle_arrival(self) -> None:
        self._arrivals += 1
        if self.bytes < self._bytes_max and self._arrivals >= self._arrivals_to_grow:
            self.bytes = min(self.bytes * _CHUNK_FACTOR, self._bytes_max)
            self._arrivals = 0
            self._has_grown = True


class _Reader:
    """Fetches the chunks of one partition."""

    def __init__(
        self,
        cluster: Cluster,
        partition: TopicPartition,
        chunk_bytes: int,
        isolation: int,
        max_wait_ms: int,
        stall_timeout_ms: float,
        check_crcs: bool,
        topic_id: bytes,
    ) -> None:
        self._cluster = cluster
        self._partition = partition
        self._chunk_size = _ChunkSize(chunk_bytes)
        self._isolation = isolation
        self._max_wait_ms = max_wait_ms
        self._stall_timeout_ms = stall_timeout_ms
        self._check_crcs = check_crcs
        self._topic_id = topic_id
        self._throttled_until_s = 0.0
        self._last_epoch = -1
        """That of the last chunk."""

    async def next(self, offset: int, end_offset: int) -> RawBatches:
        """Wait for the chunk at `offset`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._stall_timeout_ms / 1000
        failures = breaks = 0
        reason = "no records came"
        while loop.time() < deadline:
            throttled_s = self._throttled_until_s - loop.time()
            if throttled_s > 0:  # the quota of the client: the read does not stall
                await asyncio.sleep(throttled_s)
                deadline += throttled_s
            try:
                self._check_topic()
                data = await self._fetch(offset)
                self._check_topic()  # where the broker knows topics by name alone
                chunk = _chunk(self._partition, data, offset, end_offset, self._check_crcs)
                if chunk is not None:
                    self._last_epoch = chunk.last_epoch
                    self._chunk_size.handle_arrival()
                    return chunk
                failures = breaks = 0
                is_held_back = self._isolation and data.last_stable_offset <= offset < data.high_watermark
                reason = "an open transaction held the records back" if is_held_back else "no records came"
            except KafkaError as error:
                if not error.retriable:
                    raise
                is_too_large = isinstance(error, AnswerTooLarge)
                if is_too_large and self._chunk_size.bytes == 1:  # a single batch is
                    problem = f"the records of {self._partition} at {offset} cannot be fetched: {error.message}"
                    raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, problem) from None
                breaks = breaks + 1 if error.code is ErrorCode.NETWORK_EXCEPTION else 0
                if is_too_large or breaks > 1 or error.code is ErrorCode.REQUEST_TIMED_OUT:
                    # An answer of the same size may never come, over a slow link or one that often breaks.
                    self._chunk_size.shrink(1 if is_too_large else _CHUNK_BYTES_MIN)
                reason = str(error)
                failures += 1
                self._cluster.request_refresh()
                await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        raise KafkaError(
            ErrorCode.REQUEST_TIMED_OUT, f"{self._partition} at {offset}: {reason} for {self._stall_timeout_ms:.0f} ms"
        )

    def _check_topic(self) -> None:
        """Raises UNKNOWN_TOPIC_ID, which is retriable, for another topic of this name: the broker that said so may lag
        behind.
        """
        topic_id = self._cluster.metadata.topic_id(self._partition.topic)
        if NO_TOPIC_ID not in (self._topic_id, topic_id) and topic_id != self._topic_id:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID, f"a broker has another topic {self._partition.topic!r}")

    async def _fetch(self, offset: int) -> PartitionData:
        """The answer for the partition. A broker that holds this client to its quota names none (KIP-219)."""
        cluster, (topic, number) = self._cluster, self._partition
        leader = cluster.metadata.leader(self._partition)
        if leader < 0:
            raise KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, str(self._partition))
        topic_id = cluster.metadata.topic_id(topic)
        connection = await cluster.connection(leader)
        max_version = LAST_VERSION_WITH_NAMES if topic_id == NO_TOPIC_ID else 32767
        has_divergence = connection.version_of(FetchRequest, max_version) >= FIRST_VERSION_WITH_DIVERGENCE
        request = FetchRequest(
            max_wait_ms=self._max_wait_ms,
            min_bytes=1,
            max_bytes=self._chunk_size.bytes,
            isolation_level=self._isolation,
            session_epoch=_SESSIONLESS_EPOCH,
            topics=[
                FetchTopic(
                    topic=topic,
                    topic_id=topic_id,
                    partitions=[
                        FetchPartition(
                            partition=number,
                            current_leader_epoch=cluster.metadata.leader_epoch(self._partition),
                            fetch_offset=offset,
                            last_fetched_epoch=self._last_epoch if has_divergence else -1,
                            partition_max_bytes=self._chunk_size.bytes,
                        )
                    ],
                )
            ],
        )
        timeout_ms = cluster.config.request_timeout_ms + self._max_wait_ms
        response = await connection.call(request, FetchResponse, timeout_ms, max_version)
        codes = [response.error_code, *(partition.error_code for partition in _partitions(response))]
        for code in codes:
            if code:
                raise KafkaError(ErrorCode.of(code), f"fetch of {self._partition} at {offset}")
        if response.throttle_time_ms > 0:
            self._throttled_until_s = asyncio.get_running_loop().time() + response.throttle_time_ms / 1000
        partitions = _partitions(response)
        if not partitions and response.throttle_time_ms <= 0:
            raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the answer does not mention {self._partition}")
        data = partitions[0] if partitions else PartitionData()
        if data.diverging_epoch.epoch >= 0:
            raise ReplacedOffsets(self._partition, offset)
        return data


def _partitions(response: FetchResponse) -> list[PartitionData]:
    return [partition for topic in response.responses for partition in topic.partitions]


def _chunk(
    partition: TopicPartition, data: PartitionData, offset: int, end_offset: int, check_crcs: bool
) -> RawBatches | None:
    """The whole batches of the response that start before the end; None without any batch.

    Raises CORRUPT_MESSAGE for a batch with a wrong CRC or with impossible offsets, which the CRC
    covers only in part.
    """
    buffer = memoryview(data.records or b"")
    start = stop = next_offset = previous_end = last_epoch = -1
    has_earlier_batch = False
    for position, header in iter_headers(buffer):
        if check_crcs:
            _check(partition, buffer, position, header, previous_end, data.high_watermark)
            previous_end = header.next_offset
        if header.next_offset <= offset:
            has_earlier_batch = True
            continue
        if header.base_offset >= end_offset:
            next_offset = max(next_offset, end_offset)
            break
        if start < 0:
            if check_crcs and has_earlier_batch and header.base_offset > offset:
                # No CRC covers base offsets: the previous batch may be the one that holds this
                # offset.
                raise CorruptRecord(f"{partition}: a batch of earlier offsets came where {offset} was asked for")
            start = position
        stop = position + header.size_bytes
        next_offset, last_epoch = header.next_offset, header.partition_leader_epoch
    if next_offset < 0:
        if has_earlier_batch:
            raise CorruptRecord(f"{partition}: only earlier offsets came where {offset} was asked for")
        if len(buffer):
            refuse_old_format(buffer)
            raise KafkaError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"{partition}: no whole batch in the {len(buffer)} bytes that came for offset {offset}: it is larger "
                "than a chunk, or its length is damaged",
            )
        return None
    aborted = tuple((entry.producer_id, entry.first_offset) for entry in data.aborted_transactions or ())
    records = buffer[start:stop] if start >= 0 else buffer[:0]
    return RawBatches(
        records,
        offset,
        next_offset,
        data.high_watermark,
        data.last_stable_offset,
        data.log_start_offset,
        aborted,
        last_epoch,
    )


def _check(
    partition: TopicPartition,
    buffer: memoryview,
    position: int,
    header: BatchHeader,
    previous_end: int,
    high_watermark: int,
) -> None:
    """Raises CORRUPT_MESSAGE for a wrong CRC or impossible offsets."""
    if not check_crc(buffer, position, header):
        raise CorruptRecord(f"{partition}: wrong CRC of the batch at offset {header.base_offset}")
    if not max(previous_end, 0) <= header.base_offset < min(header.next_offset, high_watermark):
        raise CorruptRecord(
            f"{partition}: a batch of offsets {header.base_offset} to {header.last_offset} after {previous_end - 1}, "
            f"with the high watermark at {high_watermark}"
        )
