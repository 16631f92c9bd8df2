"""Whole record batches of one partition between two offsets, as bytes: for readers that decode by themselves.

    async for chunk in fetch_raw(cluster, TopicPartition("flights", 0), 0, 50_000):
        for columns in decode_columns(chunk.data, ..., first_offset=chunk.first_offset, end_offset=50_000, ...): ...

`data` holds one or more whole batches back to back as they came (compressed, control batches included), the first of
them the one that holds `first_offset`, none that starts at or after the end. The reader skips records before
`first_offset` and from the end on, and for read_committed the batches that `records.iter_data_batches` leaves out with
`aborted`. One request is on its way while the last answer is being read. `sync.RawReader` is the blocking twin.

Headers say where to go on, so every batch of an answer is checked before its header is believed: a damaged one is asked
for again, elsewhere where the leader has moved, and ends the read when nothing else comes. It is never passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.network.offsets import ISOLATION
from tidelog.protocol.batches.record_batch import BatchHeader, CorruptRecord, check_crc, iter_headers
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData

_NEWEST_BY_NAME = 12
_WITHOUT_SESSION = -1
DEFAULT_CHUNK_BYTES = 4 * 1024 * 1024


class RawBatches(NamedTuple):
    """One chunk. Reading goes on at `next_offset`."""

    data: memoryview
    first_offset: int
    next_offset: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: tuple[tuple[int, int], ...]
    """(producer id, first offset) of transactions that were aborted, for read_committed."""


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
) -> AsyncIterator[RawBatches]:
    """The batches that hold [start_offset, end_offset), in order, in chunks of about `chunk_bytes` (at least a batch).

    Leaders that move are followed. Raises KafkaError: OFFSET_OUT_OF_RANGE when the log no longer (or not yet) has the
    offset, REQUEST_TIMED_OUT when nothing comes for `stall_timeout_ms`, errors that trying again does not cure.
    """
    await cluster.topic(partition.topic, stall_timeout_ms)
    isolation = ISOLATION[isolation_level]
    reader = _Reader(cluster, partition, chunk_bytes, isolation, max_wait_ms, stall_timeout_ms, check_crcs)
    upcoming: asyncio.Task[RawBatches] | None = None
    offset = start_offset
    try:
        while offset < end_offset:
            task = upcoming or asyncio.create_task(reader.next(offset, end_offset))
            upcoming = None
            chunk = await task
            offset = chunk.next_offset
            if offset < end_offset:
                upcoming = asyncio.create_task(reader.next(offset, end_offset))
            yield chunk
    finally:
        if upcoming is not None:
            upcoming.cancel()
            await asyncio.wait([upcoming])


class _Reader:
    def __init__(
        self,
        cluster: Cluster,
        partition: TopicPartition,
        chunk_bytes: int,
        isolation: int,
        max_wait_ms: int,
        stall_timeout_ms: float,
        check_crcs: bool,
    ) -> None:
        self._cluster = cluster
        self._partition = partition
        self._chunk_bytes = chunk_bytes
        self._isolation = isolation
        self._max_wait_ms = max_wait_ms
        self._stall_timeout_ms = stall_timeout_ms
        self._check_crcs = check_crcs

    async def next(self, offset: int, end_offset: int) -> RawBatches:
        """The chunk at `offset`, waited for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._stall_timeout_ms / 1000
        failures = 0
        problem = "no records came"
        while loop.time() < deadline:
            try:
                data = await self._ask(offset)
                chunk = _chunk(self._partition, data, offset, end_offset, self._check_crcs)
                if chunk is not None:
                    return chunk
                failures = 0
                held_back = self._isolation and data.last_stable_offset <= offset < data.high_watermark
                problem = "an open transaction held the records back" if held_back else "no records came"
            except KafkaError as error:
                if not error.retriable:
                    raise
                problem = str(error)
                failures += 1
                self._cluster.request_refresh()
                await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        raise KafkaError(
            ErrorCode.REQUEST_TIMED_OUT, f"{self._partition} at {offset}: {problem} for {self._stall_timeout_ms:.0f} ms"
        )

    async def _ask(self, offset: int) -> PartitionData:
        cluster, (topic, number) = self._cluster, self._partition
        leader = cluster.metadata.leader(self._partition)
        if leader < 0:
            raise KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, str(self._partition))
        topic_id = cluster.metadata.topic_id(topic)
        request = FetchRequest(
            max_wait_ms=self._max_wait_ms,
            min_bytes=1,
            max_bytes=self._chunk_bytes,
            isolation_level=self._isolation,
            session_epoch=_WITHOUT_SESSION,
            topics=[
                FetchTopic(
                    topic=topic,
                    topic_id=topic_id,
                    partitions=[
                        FetchPartition(
                            partition=number,
                            current_leader_epoch=cluster.metadata.leader_epoch(self._partition),
                            fetch_offset=offset,
                            partition_max_bytes=self._chunk_bytes,
                        )
                    ],
                )
            ],
        )
        connection = await cluster.connection(leader)
        newest = _NEWEST_BY_NAME if topic_id == NO_TOPIC_ID else 32767
        timeout_ms = cluster.config.request_timeout_ms + self._max_wait_ms
        response = await connection.call(request, FetchResponse, timeout_ms, newest)
        codes = [response.error_code, *(each.error_code for each in _partitions(response))]
        for code in codes:
            if code:
                raise KafkaError(ErrorCode.of(code), f"fetch of {self._partition} at {offset}")
        return _partitions(response)[0]


def _partitions(response: FetchResponse) -> list[PartitionData]:
    return [each for topic in response.responses for each in topic.partitions]


def _chunk(
    partition: TopicPartition, data: PartitionData, offset: int, end_offset: int, check_crcs: bool
) -> RawBatches | None:
    """The whole batches of the answer that start before the end; None when there is none (yet).

    Raises CORRUPT_MESSAGE for a batch whose CRC is wrong, or whose offsets, which it covers in part only, cannot be.
    """
    buffer = memoryview(data.records or b"")
    first = last = next_offset = previous_end = -1
    earlier = False
    for position, header in iter_headers(buffer):
        if check_crcs:
            _check(partition, buffer, position, header, previous_end, data.high_watermark)
            previous_end = header.next_offset
        if header.next_offset <= offset:
            earlier = True
            continue
        if header.base_offset >= end_offset:
            next_offset = max(next_offset, end_offset)
            break
        if first < 0:
            if check_crcs and earlier and header.base_offset > offset:
                # No CRC covers base offsets: the batch before may be the one that holds this offset.
                raise CorruptRecord(f"{partition}: a batch of earlier offsets came where {offset} was asked for")
            first = position
        last = position + header.size_bytes
        next_offset = header.next_offset
    if next_offset < 0:
        if earlier:
            raise CorruptRecord(f"{partition}: only earlier offsets came where {offset} was asked for")
        if len(buffer):
            raise KafkaError(
                ErrorCode.MESSAGE_TOO_LARGE,
                f"{partition}: no whole batch in the {len(buffer)} bytes that came for offset {offset}: it is larger "
                "than a chunk, or its length is damaged",
            )
        return None
    aborted = tuple((each.producer_id, each.first_offset) for each in data.aborted_transactions or ())
    records = buffer[first:last] if first >= 0 else buffer[:0]
    return RawBatches(
        records, offset, next_offset, data.high_watermark, data.last_stable_offset, data.log_start_offset, aborted
    )


def _check(
    partition: TopicPartition,
    buffer: memoryview,
    position: int,
    header: BatchHeader,
    previous_end: int,
    high_watermark: int,
) -> None:
    """Raises CORRUPT_MESSAGE."""
    if not check_crc(buffer, position, header):
        raise CorruptRecord(f"{partition}: wrong CRC of the batch at offset {header.base_offset}")
    if not max(previous_end, 0) <= header.base_offset < min(header.next_offset, high_watermark):
        raise CorruptRecord(
            f"{partition}: a batch of offsets {header.base_offset} to {header.last_offset} after {previous_end - 1}, "
            f"with the high watermark at {high_watermark}"
        )
