"""Writes the rows of one task, and ends the transactions of all tasks. Spark itself is not needed here.

Without `exactlyOnce` a task's rows are in the log when the task ends, and a task that Spark runs
again writes them again. With it a task writes one transaction and leaves it open; the driver commits
those of all tasks. Invariants of a stream: a task's transaction carries the number of its
micro-batch, as an offset committed with it for a group of this query and task. A task first takes
over its transactional id, which ends what an earlier run left open, then reads that number: a
micro-batch that is committed is not written again. So a replay neither loses nor doubles rows, when
the rows of a task depend on its micro-batch alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.client.config import ConsumerConfig
from tidelog.client.groups.coordinator import Coordinator
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.producing.detached_transactions import DetachedTransaction, end_transaction
from tidelog.client.producing.producer import Producer
from tidelog.protocol.errors import ConfigError, KafkaError
from tidelog.spark_ingest.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_END_TIMEOUT_MS = 60_000
_MARK_PARTITION = 0
_ROWS_PER_PAUSE = 1000


class TaskId(NamedTuple):
    """One task of a write. `query` names the write; `batch` is the micro-batch, -1 of a batch write."""

    query: str
    partition: int
    batch: int

    def transactional_id(self, prefix: str) -> str:
        return f"{prefix}-{self.query}-{self.partition}"


class Written(NamedTuple):
    """What a task has written. `transaction` is to be ended by the driver."""

    rows: int
    transaction: DetachedTransaction | None


def write_task(options: SinkOptions, task: TaskId, batches: Iterable[pa.RecordBatch]) -> Written:
    """Write the rows of a task. Raises ConfigError for a row without a topic, KafkaError."""
    if options.exactly_once:
        return asyncio.run(_write_transaction(options, task, batches))
    return asyncio.run(_write(options, batches))


def end_transactions(options: SinkOptions, transactions: Sequence[DetachedTransaction], *, committed: bool) -> None:
    """Commit or abort the transactions of a write. A commit raises KafkaError when one is not committed.

    An abort goes on after an error: a transaction that is not ended ends by its timeout.
    """
    if transactions:
        asyncio.run(_end_transactions(options, transactions, committed))


async def _write(options: SinkOptions, batches: Iterable[pa.RecordBatch]) -> Written:
    async with Producer(**options.producer) as producer:
        rows = await _send_all(producer, options, batches)
    return Written(rows, None)


async def _write_transaction(options: SinkOptions, task: TaskId, batches: Iterable[pa.RecordBatch]) -> Written:
    rows = (row for batch in batches for row in _rows(batch, options))
    first = next(rows, None)
    if first is None:
        return Written(0, None)
    transactional_id = task.transactional_id(options.prefix)
    async with Producer(**options.producer, transactional_id=transactional_id) as producer:
        await producer.init_transactions()
        mark = TopicPartition(first[0], _MARK_PARTITION)
        if task.batch >= 0 and await _committed_batch(options, transactional_id) >= task.batch:
            logger.info("micro-batch %d of task %s is committed already", task.batch, transactional_id)
            return Written(0, None)
        await producer.begin_transaction()
        count = await _send_rows(producer, _chain(first, rows))
        if task.batch >= 0:
            await producer.send_offsets_to_transaction({mark: OffsetAndMetadata(task.batch + 1)}, transactional_id)
        transaction = await producer.detach_transaction()
    return Written(count, transaction)


async def _committed_batch(options: SinkOptions, group: str) -> int:
    """The last micro-batch that this task has committed, -1 for none.

    The mark lies with the topic of the micro-batch's first row, so all topics are looked at.
    """
    config = _common_config(options)
    async with _connected(config) as cluster:
        offsets = await Coordinator(cluster, group).committed(None, config.default_api_timeout_ms, require_stable=True)
    return max((offset.offset for offset in offsets.values()), default=0) - 1


_COMMON_OPTIONS = frozenset(
    (
        "bootstrap_servers",
        "client_id",
        "metadata_max_age_ms",
        "reconnect_backoff_max_ms",
        "reconnect_backoff_ms",
        "request_timeout_ms",
        "retry_backoff_max_ms",
        "retry_backoff_ms",
        "security_protocol",
        "socket_connection_setup_timeout_ms",
    )
)


def _common_config(options: SinkOptions) -> ConsumerConfig:
    return ConsumerConfig.from_options(
        {key: value for key, value in options.producer.items() if key in _COMMON_OPTIONS}
    )


@asynccontextmanager
async def _connected(config: ConsumerConfig) -> AsyncIterator[Cluster]:
    cluster = Cluster(config)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


async def _end_transactions(options: SinkOptions, transactions: Sequence[DetachedTransaction], committed: bool) -> None:
    async with _connected(_common_config(options)) as cluster:
        ends = [
            end_transaction(cluster, each, committed=committed, timeout_ms=_END_TIMEOUT_MS) for each in transactions
        ]
        errors = [error for error in await asyncio.gather(*ends, return_exceptions=True) if error is not None]
    for error in errors:
        if committed or not isinstance(error, KafkaError):
            raise error
        logger.warning("a transaction is left to its timeout: %s", error)


Row = tuple[str, Any, Any, Any, Any, Any]
"""Topic, value, key, headers, partition, timestamp in ms."""


async def _send_all(producer: Producer, options: SinkOptions, batches: Iterable[pa.RecordBatch]) -> int:
    return await _send_rows(producer, (row for batch in batches for row in _rows(batch, options)))


async def _send_rows(producer: Producer, rows: Iterable[Row]) -> int:
    """Send all rows and wait until all are acknowledged. Raises the first error."""
    failures: list[BaseException] = []

    def on_done(future: asyncio.Future[Any]) -> None:
        error = future.exception()
        if error is not None and not failures:
            failures.append(error)

    count = 0
    for topic, value, key, headers, partition, timestamp_ms in rows:
        future = await producer.send(topic, value, key, headers=headers, partition=partition, timestamp_ms=timestamp_ms)
        future.add_done_callback(on_done)
        count += 1
        if count % _ROWS_PER_PAUSE == 0:
            await asyncio.sleep(0)  # the rows come from a blocking iterator
            if failures:
                break
    await producer.flush()
    if failures:
        raise failures[0]
    return count


def _rows(batch: pa.RecordBatch, options: SinkOptions) -> Iterator[Row]:
    """The rows of a batch as records. Raises ConfigError for a row without a topic."""
    columns = {name.lower(): place for place, name in enumerate(batch.schema.names)}

    def values(name: str) -> Iterable[Any]:
        place = columns.get(name)
        return [None] * batch.num_rows if place is None else _to_python(batch.column(place), name)

    topics = [options.topic] * batch.num_rows if options.topic else values("topic")
    for topic, value, key, headers, partition, timestamp_ms in zip(
        topics, values("value"), values("key"), values("headers"), values("partition"), values("timestamp"), strict=True
    ):
        if topic is None:
            raise ConfigError("null topic present in the data. Use the 'topic' option for setting a default topic.")
        pairs = () if headers is None else [(header["key"], header["value"]) for header in headers]
        yield topic, value, key, pairs, partition, timestamp_ms


def _to_python(column: pa.Array, name: str) -> list[Any]:
    """Keys and values as bytes, a timestamp as milliseconds since 1970."""
    import pyarrow as pa

    if name == "timestamp":
        column = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    elif name in ("key", "value"):
        column = column.cast(pa.binary())
    return column.to_pylist()  # type: ignore[no-any-return]


def _chain(first: Row, rest: Iterable[Row]) -> Iterator[Row]:
    yield first
    yield from rest
