"""One range of one partition as Arrow record batches: what a task of Spark does.

A blocking generator over a private event loop; `client.raw_fetch` follows leaders and keeps one fetch ahead. The bytes
go to `protocol.columnar` as they came: no Python object is made per record. Invariant: every record of the range that
still exists comes exactly once, in order, or an exception says which do not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from tidelog.client.model import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.offsets import list_offsets
from tidelog.client.network.raw_fetch import RawBatches, fetch_raw
from tidelog.protocol.batches.columnar import decode_columns
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.spark_ingest.offsets import DataLoss
from tidelog.spark_ingest.options import MAX_BATCH_BYTES_OPTION, SourceOptions
from tidelog.spark_ingest.planning import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

MAX_ROWS = 10_000
MAX_BATCH_BYTES = 8 * 1024 * 1024
"""Of one Arrow record batch handed to Spark: beyond that nothing is gained, and the JVM holds it whole."""


_REFUSALS_MAX = 20


def read_range(
    options: SourceOptions, planned: OffsetRange, columns: Sequence[str]
) -> Generator[pa.RecordBatch, None, None]:
    """The records with offsets in [planned.start, planned.end), in batches of at most MAX_ROWS rows.

    Raises DataLoss when records of the range are gone (unless failOnDataLoss is false), KafkaError for what cannot be
    helped by trying again, REQUEST_TIMED_OUT when nothing comes for `poll_timeout_ms`.
    """
    loop = asyncio.new_event_loop()
    cluster = Cluster(options.consumer)
    chunks = _chunks(cluster, options, planned)
    try:
        while (chunk := loop.run_until_complete(anext(chunks, None))) is not None:
            # One turn of the loop sends the request for the next chunk, which arrives while this one is decoded.
            loop.run_until_complete(asyncio.sleep(0))
            for piece in _columns(chunk, options, planned, columns):
                yield from slices(piece)
    finally:
        loop.run_until_complete(chunks.aclose())
        loop.run_until_complete(cluster.close())
        loop.close()


def _columns(
    chunk: RawBatches, options: SourceOptions, planned: OffsetRange, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    try:
        yield from decode_columns(
            chunk.data,
            topic=planned.topic,
            partition=planned.partition,
            first_offset=chunk.first_offset,
            end_offset=planned.end,
            columns=columns,
            aborted=chunk.aborted,
            max_batch_bytes=options.max_batch_bytes,
        )
    except KafkaError as error:
        if error.code is not ErrorCode.MESSAGE_TOO_LARGE:
            raise
        hint = f"{error.message}; the option {MAX_BATCH_BYTES_OPTION} raises this bound, and the memory of a task"
        raise KafkaError(error.code, hint) from None


def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows in pieces of at most MAX_ROWS and about MAX_BATCH_BYTES, without copying."""
    rows = batch.num_rows
    if not rows:
        return
    pieces = max(-(-rows // MAX_ROWS), min(rows, -(-batch.nbytes // MAX_BATCH_BYTES)))
    step = -(-rows // pieces)
    for start in range(0, rows, step):
        yield batch.slice(start, step)


async def _chunks(cluster: Cluster, options: SourceOptions, planned: OffsetRange) -> AsyncGenerator[RawBatches, None]:
    """Whole batches from the start of the range to its end, going on where the log begins when its start is gone."""
    await cluster.start()
    config = options.consumer
    partition = TopicPartition(planned.topic, planned.partition)
    position = planned.start
    refusals = 0
    while position < planned.end:
        try:
            fetched = fetch_raw(
                cluster,
                partition,
                position,
                planned.end,
                chunk_bytes=min(config.max_partition_fetch_bytes, config.fetch_max_bytes),
                isolation_level=config.isolation_level,
                max_wait_ms=config.fetch_max_wait_ms,
                stall_timeout_ms=options.poll_timeout_ms,
                check_crcs=config.check_crcs,
            )
            async with aclosing(fetched) as batches:  # type: ignore[type-var]  # an async generator, declared as less
                async for chunk in batches:
                    yield chunk
                    position = chunk.next_offset
                    refusals = 0
        except KafkaError as error:
            if error.code is not ErrorCode.OFFSET_OUT_OF_RANGE:
                raise
            refusals += 1
            if refusals > _REFUSALS_MAX:  # the leader refuses an offset that the log is said to hold
                raise
            await asyncio.sleep(cluster.retry_backoff.wait_ms(refusals) / 1000)
            position = await _after_the_loss(cluster, options, planned, position)


async def _after_the_loss(cluster: Cluster, options: SourceOptions, planned: OffsetRange, position: int) -> int:
    """Where to go on when the log does not hold `position`. Raises DataLoss unless going on is allowed."""
    partition = TopicPartition(planned.topic, planned.partition)
    timeout_ms = options.consumer.default_api_timeout_ms
    edges = []
    for timestamp in (EARLIEST_TIMESTAMP, LATEST_TIMESTAMP):
        found = (await list_offsets(cluster, {partition: timestamp}, timeout_ms=timeout_ms))[partition]
        edges.append(found.offset if found is not None else 0)
    earliest, latest = edges
    if earliest <= position <= latest:
        return position  # it does by now, as after a change of leader
    follows = min(earliest, planned.end) if position < earliest else planned.end
    lost = (
        f"offsets {position} to {follows - 1} of {partition} are gone: its log begins at {earliest}, ends at {latest}"
    )
    if options.fail_on_data_loss:
        raise DataLoss(lost)
    logger.warning("%s; they are left out", lost)
    return follows
