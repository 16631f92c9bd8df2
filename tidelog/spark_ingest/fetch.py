"""Reads ranges of partitions as Arrow record batches: the work of a Spark task.

A blocking generator over a private event loop, which stands still while Spark takes the rows.
`client.raw_fetch` follows leaders and keeps one fetch ahead. The bytes go to `protocol.columnar`
unchanged: no Python object is made per record.
Invariant: every existing record of the range comes exactly once, in order, or an exception names
the missing offsets.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

from tidelog.client.model import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.network.offsets import list_offsets
from tidelog.client.network.raw_fetch import RawBatches, ReplacedOffsets, fetch_raw
from tidelog.protocol.batches.columnar import decode_columns
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.spark_ingest.connecting import connect
from tidelog.spark_ingest.offsets import DataLoss
from tidelog.spark_ingest.options import MAX_BATCH_BYTES_OPTION, SourceOptions
from tidelog.spark_ingest.planning import OffsetRange
from tidelog.spark_ingest.topic_watch import TopicGone, TopicWatch, check_gone, unless_gone

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_ROWS = 10_000
MAX_BATCH_BYTES = 8 * 1024 * 1024
"""The size of one Arrow record batch for Spark.

A larger one gains nothing, and the JVM holds it whole.
"""


_TIME_LIMIT_US = (2**63 - 1) // 1000 * 1000
_OUT_OF_RANGE_ERRORS_MAX = 20
UNKNOWN_TOPIC_TIMEOUT_MS = 15_000
"""How long a task waits for a topic that the brokers do not know."""


def read_range(
    options: SourceOptions, offset_range: OffsetRange, columns: Sequence[str], topic_id: bytes = NO_TOPIC_ID
) -> Generator[pa.RecordBatch, None, None]:
    """`read_ranges` of one range."""
    return read_ranges(options, [(offset_range, topic_id)], columns)


def read_ranges(
    options: SourceOptions, ranges: Sequence[tuple[OffsetRange, bytes]], columns: Sequence[str]
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the records of the ranges, one range after the other, in batches of at most MAX_ROWS rows.

    With the id of a topic (not zeros) the offsets are those of this topic, not of one with its name that was created
    since.

    Raises DataLoss when records of a range are gone, or were replaced after they were read (unless failOnDataLoss is
    false), KafkaError for errors that are not retriable, REQUEST_TIMED_OUT when no records arrive for
    `poll_timeout_ms`.
    """
    loop = _PausedLoop()
    try:
        # The driver has reached the brokers, so a task waits for them as in the middle of a range.
        cluster = loop.run_until_complete(connect(options.consumer, options.poll_timeout_ms))
        try:
            for offset_range, topic_id in ranges:
                yield from _read_range(loop, cluster, options, offset_range, topic_id, columns)
        finally:
            loop.run_until_complete(cluster.close())
    finally:
        loop.close()


class _PausedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while the loop does not run.

    Spark may take minutes for the rows of one chunk. No broker is late by that, whose answer waits to be read.
    """

    def __init__(self) -> None:
        self._paused_s = 0.0
        self._pause_begin_s: float | None = None
        super().__init__()

    def time(self) -> float:
        now_s = super().time() if self._pause_begin_s is None else self._pause_begin_s
        return now_s - self._paused_s

    def run_until_complete(self, future: Generator[Any, None, Result] | Awaitable[Result]) -> Result:
        if self._pause_begin_s is not None:
            self._paused_s += super().time() - self._pause_begin_s
            self._pause_begin_s = None
        try:
            return super().run_until_complete(future)
        finally:
            self._pause_begin_s = super().time()


def _read_range(
    loop: asyncio.AbstractEventLoop,
    cluster: Cluster,
    options: SourceOptions,
    offset_range: OffsetRange,
    topic_id: bytes,
    columns: Sequence[str],
) -> Generator[pa.RecordBatch, None, None]:
    chunks = _chunks(cluster, options, offset_range, topic_id)
    try:
        while (chunk := loop.run_until_complete(_next_of(chunks, asks_for_another=True))) is not None:
            for piece in _columns(chunk, options, offset_range, columns):
                _check_times(piece, offset_range)
                yield from slices(piece)
    finally:
        loop.run_until_complete(chunks.aclose())


async def _next_of(chunks: AsyncGenerator[RawBatches, None], *, asks_for_another: bool = False) -> RawBatches | None:
    """The next chunk, and None at the end.

    One step of the loop sends the request for the one after it, which arrives while this one is decoded.
    """
    chunk = await anext(chunks, None)
    if asks_for_another:
        await asyncio.sleep(0)
    return chunk


def _columns(
    chunk: RawBatches, options: SourceOptions, offset_range: OffsetRange, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    try:
        yield from decode_columns(
            chunk.data,
            topic=offset_range.topic,
            partition=offset_range.partition,
            first_offset=chunk.first_offset,
            end_offset=offset_range.end,
            columns=columns,
            aborted=chunk.aborted,
            max_batch_bytes=options.max_batch_bytes,
        )
    except KafkaError as error:
        if error.code is not ErrorCode.MESSAGE_TOO_LARGE:
            raise
        hint = f"{error.message}; the option {MAX_BATCH_BYTES_OPTION} raises this bound, and the memory of a task"
        raise KafkaError(error.code, hint) from None


def _check_times(batch: pa.RecordBatch, offset_range: OffsetRange) -> None:
    """Refuse timestamps that Spark cannot hold, as its own connector does. The decoder cuts them at the limit."""
    if "timestamp" not in batch.schema.names or not batch.num_rows:
        return
    import numpy as np

    # Arrow's functions take longer for each batch, and their import, or that of pandas by `to_numpy`, for each process.
    column = batch.column("timestamp")
    times = np.frombuffer(column.buffers()[1], np.int64)[column.offset :][: len(column)]
    if max(int(times.max()), -int(times.min())) >= _TIME_LIMIT_US:
        partition = TopicPartition(offset_range.topic, offset_range.partition)
        raise KafkaError(
            ErrorCode.INVALID_TIMESTAMP,
            f"a record of {partition} at offsets {offset_range.start} to {offset_range.end - 1} has a timestamp that "
            "is too large for Spark, as of a producer that sends nanoseconds. Kafka's are milliseconds since 1970. A "
            "schema without the column timestamp reads the record",
        )


def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split the rows into pieces of at most MAX_ROWS and about MAX_BATCH_BYTES, without copies."""
    rows = batch.num_rows
    if not rows:
        return
    pieces = max(-(-rows // MAX_ROWS), min(rows, -(-batch.nbytes // MAX_BATCH_BYTES)))
    step = -(-rows // pieces)
    for start in range(0, rows, step):
        yield batch.slice(start, step)


async def _chunks(
    cluster: Cluster, options: SourceOptions, offset_range: OffsetRange, topic_id: bytes
) -> AsyncGenerator[RawBatches, None]:
    """Yield whole batches of the range, until the topic is gone."""
    partition = TopicPartition(offset_range.topic, offset_range.partition)
    try:
        finding = _await_topic_id(cluster, partition.topic, topic_id, options.poll_timeout_ms)
        first_id = await unless_gone(cluster, {partition.topic: topic_id}, finding)
        await _check_partition(cluster, partition, topic_id)
        async with (
            aclosing(_chunks_of_log(cluster, options, offset_range, first_id)) as chunks,
            TopicWatch(cluster, {partition.topic: first_id}) as watch,
        ):
            while (chunk := await watch.unless_gone(_next_of(chunks))) is not None:
                yield chunk
        return
    except TopicGone as gone:
        loss = f"{gone.message}, and the rest of {partition} is gone"
    except KafkaError as error:
        # Brokers that do not answer are no loss: only one that does not know the topic says so.
        topic = cluster.metadata.topics.get(partition.topic)
        is_gone = topic is not None and topic.error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if options.fail_on_data_loss or not is_gone:
            raise
        loss = f"topic {partition.topic!r} is gone: {error}"
    if options.fail_on_data_loss:
        raise DataLoss(loss)
    logger.warning("%s; it is left out", loss)


async def _await_topic_id(cluster: Cluster, topic: str, topic_id: bytes, timeout_ms: float) -> bytes:
    """The id of the topic, this one where it is known.

    Raises UNKNOWN_TOPIC_OR_PARTITION when the brokers do not know the topic, TopicGone when they know another one.
    """
    # The driver has seen the topic, so a broker that does not know it soon will not know it later.
    known_ms = min(timeout_ms, UNKNOWN_TOPIC_TIMEOUT_MS)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + known_ms / 1000
    try:
        first_id = (await cluster.topic(topic, known_ms)).topic_id
    except KafkaError as error:
        if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or timeout_ms <= known_ms:
            raise
        first_id = (await cluster.topic(topic, timeout_ms - known_ms)).topic_id
    while topic_id not in (NO_TOPIC_ID, first_id):  # a broker that lags behind knows the topic before this one
        if loop.time() >= deadline:
            raise TopicGone(topic, is_recreated=True)
        await cluster.wait_for_metadata((deadline - loop.time()) * 1000)
        first_id = cluster.metadata.topic_id(topic)
    return first_id


async def _check_partition(cluster: Cluster, partition: TopicPartition, topic_id: bytes) -> None:
    """Raises TopicGone where no broker has the partition, as of a topic that was created again with fewer."""
    topic = cluster.metadata.topics.get(partition.topic)
    if topic is None or partition.partition < len(topic.partitions):
        return
    try:
        await check_gone(cluster, [partition], {partition.topic: topic_id})
    except KafkaError:  # a broker may have it: the read waits for it
        return
    raise TopicGone(partition.topic, is_recreated=True)


async def _chunks_of_log(
    cluster: Cluster, options: SourceOptions, offset_range: OffsetRange, topic_id: bytes
) -> AsyncGenerator[RawBatches, None]:
    """Yield whole batches of the range, of the topic with this id.

    When its start is gone, the read continues at the log start.
    """
    config = options.consumer
    partition = TopicPartition(offset_range.topic, offset_range.partition)
    position = offset_range.start
    out_of_range_errors = 0
    while position < offset_range.end:
        try:
            raw_batches = fetch_raw(
                cluster,
                partition,
                position,
                offset_range.end,
                chunk_bytes=min(config.max_partition_fetch_bytes, config.fetch_max_bytes),
                isolation_level=config.isolation_level,
                max_wait_ms=config.fetch_max_wait_ms,
                stall_timeout_ms=options.poll_timeout_ms,
                check_crcs=config.check_crcs,
                topic_id=topic_id,
            )
            async with aclosing(raw_batches) as batches:  # type: ignore[type-var]  # an async generator, declared as less
                async for chunk in batches:
                    yield chunk
                    position = chunk.next_offset
                    out_of_range_errors = 0
        except KafkaError as error:
            if error.code is ErrorCode.REQUEST_TIMED_OUT and await _is_log_at_end(
                cluster, options, partition, position
            ):
                # A micro-batch that is replayed may name offsets that a truncated log, or a new topic, lacks.
                position = _leave_out(options, partition, position, offset_range.end, f"ends at {position}")
                continue
            if isinstance(error, ReplacedOffsets):
                # A task that runs again reads all records of the log that there is now.
                if options.fail_on_data_loss:
                    raise DataLoss(str(error)) from None
                logger.warning("%s; the read goes on in the new log", error)
            if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
                raise
            out_of_range_errors += 1
            if out_of_range_errors > _OUT_OF_RANGE_ERRORS_MAX:  # the leader refuses an offset within the reported log
                raise
            await asyncio.sleep(cluster.retry_backoff.wait_ms(out_of_range_errors) / 1000)
            position = await _position_after_loss(cluster, options, offset_range, position)


async def _position_after_loss(
    cluster: Cluster, options: SourceOptions, offset_range: OffsetRange, position: int
) -> int:
    """The next position when the log lacks `position`.

    Raises DataLoss when failOnDataLoss is true.
    """
    partition = TopicPartition(offset_range.topic, offset_range.partition)
    timeout_ms = options.consumer.default_api_timeout_ms
    edges = []
    for timestamp in (EARLIEST_TIMESTAMP, LATEST_TIMESTAMP):
        offset = (await list_offsets(cluster, {partition: timestamp}, timeout_ms=timeout_ms))[partition]
        edges.append(offset.offset if offset is not None else 0)
    earliest, latest = edges
    if earliest <= position <= latest:
        return position  # the log has the offset now, as after a leader change
    next_position = min(earliest, offset_range.end) if position < earliest else offset_range.end
    return _leave_out(options, partition, position, next_position, f"begins at {earliest}, ends at {latest}")


async def _is_log_at_end(cluster: Cluster, options: SourceOptions, partition: TopicPartition, position: int) -> bool:
    """Whether the log ends at this offset. A transaction that holds records back is before the end of the log."""
    try:
        ends = await list_offsets(
            cluster, {partition: LATEST_TIMESTAMP}, timeout_ms=options.consumer.request_timeout_ms
        )
    except KafkaError:  # no word of the log's end
        return False
    end = ends[partition]
    return end is not None and end.offset == position


def _leave_out(options: SourceOptions, partition: TopicPartition, start: int, end: int, log: str) -> int:
    """Pass over offsets that the log lacks. Raises DataLoss when failOnDataLoss is true."""
    loss = f"offsets {start} to {end - 1} of {partition} are gone: its log {log}"
    if options.fail_on_data_loss:
        raise DataLoss(loss)
    logger.warning("%s; they are left out", loss)
    return end
