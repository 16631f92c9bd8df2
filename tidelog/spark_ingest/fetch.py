"""One range of one partition as Arrow record batches: what a task of Spark does.

A blocking generator over a private event loop with one connection to the partition's leader. The next fetch is on its
way while the last one is decoded, so at most two answers are held. Fetched bytes go to `protocol.columnar` as they are:
no Python object is made per record. Invariant: every record of the range that still exists comes exactly once, in
order, or an exception says which do not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tidelog.client.cluster import Cluster
from tidelog.client.metadata import NO_TOPIC_ID
from tidelog.client.model import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, TopicPartition
from tidelog.client.offsets import ISOLATION, list_offsets
from tidelog.protocol.columnar import decode_columns
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData
from tidelog.protocol.record_batch import iter_headers
from tidelog.spark_ingest.offsets import DataLoss
from tidelog.spark_ingest.options import SourceOptions
from tidelog.spark_ingest.planning import OffsetRange

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

MAX_ROWS = 10_000
MAX_BATCH_BYTES = 8 * 1024 * 1024
"""Of one Arrow record batch handed to Spark: beyond that nothing is gained, and the JVM holds it whole."""

_NEWEST_BY_NAME = 12


def read_range(options: SourceOptions, planned: OffsetRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The records with offsets in [planned.start, planned.end), in batches of at most MAX_ROWS rows.

    Raises DataLoss when records of the range are gone (unless failOnDataLoss is false), KafkaError for what cannot be
    helped by trying again, REQUEST_TIMED_OUT when nothing comes for `poll_timeout_ms`.
    """
    loop = asyncio.new_event_loop()
    reader = _RangeReader(options, planned)
    try:
        loop.run_until_complete(reader.open())
        while (fetched := loop.run_until_complete(reader.next())) is not None:
            first_offset, data = fetched
            decoded = decode_columns(
                data.records or b"",
                topic=planned.topic,
                partition=planned.partition,
                first_offset=first_offset,
                end_offset=planned.end,
                columns=columns,
                aborted=[(each.producer_id, each.first_offset) for each in data.aborted_transactions or ()],
                check_crcs=options.consumer.check_crcs,
            )
            yield from slices(decoded)
    finally:
        loop.run_until_complete(reader.close())
        loop.close()


def slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows in pieces of at most MAX_ROWS and about MAX_BATCH_BYTES, without copying."""
    rows = batch.num_rows
    if not rows:
        return
    pieces = max(-(-rows // MAX_ROWS), min(rows, -(-batch.nbytes // MAX_BATCH_BYTES)))
    step = -(-rows // pieces)
    for start in range(0, rows, step):
        yield batch.slice(start, step)


class _RangeReader:
    """Fetches one range in order, through changes of leader and failures that pass."""

    def __init__(self, options: SourceOptions, planned: OffsetRange) -> None:
        self._options = options
        self._config = options.consumer
        self._partition = TopicPartition(planned.topic, planned.partition)
        self._position = planned.start
        self._end = planned.end
        self._cluster: Cluster | None = None
        self._asked: asyncio.Future[FetchResponse] | None = None

    async def open(self) -> None:
        self._cluster = Cluster(self._config)
        await self._cluster.start()
        await self._cluster.topic(self._partition.topic, self._config.default_api_timeout_ms)

    async def close(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
        if self._cluster is not None:
            await self._cluster.close()

    async def next(self) -> tuple[int, PartitionData] | None:
        """The next answer that holds batches and the offset it was fetched for; None at the end of the range."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.poll_timeout_ms / 1000
        failures = 0
        problem: KafkaError | None = None
        while self._position < self._end:
            try:
                data = await self._fetch()
                if data.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                    await self._recover(data)
                    continue
                if data.error_code:
                    raise KafkaError(ErrorCode.of(data.error_code), f"fetch of {self._partition}")
                at = self._position
                if self._advance(data):
                    await self._ask_ahead()
                    return at, data
                failures = 0
            except KafkaError as error:
                if not error.retriable:
                    raise
                problem = error
                failures += 1
            if loop.time() >= deadline:
                raise KafkaError(
                    ErrorCode.REQUEST_TIMED_OUT,
                    f"nothing of {self._partition} from offset {self._position} came within "
                    f"{self._options.poll_timeout_ms} ms" + (f": {problem}" if problem else ""),
                )
            if failures:
                await self._retry_later(failures)
        return None

    def _advance(self, data: PartitionData) -> bool:
        """Move behind the last whole batch; False when there is none."""
        before = self._position
        for _, header in iter_headers(data.records or b""):
            self._position = max(self._position, header.next_offset)
        if data.records and self._position == before:
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE, f"{self._partition} holds no whole batch at offset {before}")
        return self._position > before

    async def _ask_ahead(self) -> None:
        """Write the next request now, so that its answer arrives while this one is decoded."""
        if self._position < self._end:
            try:
                self._asked = await self._ask()
            except KafkaError:
                self._asked = None  # the next call meets the same failure and handles it

    async def _fetch(self) -> PartitionData:
        asked, self._asked = self._asked, None
        response = await (asked if asked is not None else await self._ask())
        if response.error_code:
            raise KafkaError(ErrorCode.of(response.error_code), f"fetch of {self._partition}")
        for topic in response.responses:
            for data in topic.partitions:
                return data
        raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the answer to a fetch of {self._partition} is empty")

    async def _ask(self) -> asyncio.Future[FetchResponse]:
        cluster, config = self._cluster, self._config
        assert cluster is not None
        metadata = cluster.metadata
        leader = metadata.leader(self._partition)
        if leader < 0:
            raise KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, f"{self._partition} has no leader")
        connection = await cluster.connection(leader)
        topic_id = metadata.topic_id(self._partition.topic)
        version = (
            connection.version_of(FetchRequest)
            if topic_id != NO_TOPIC_ID
            else connection.version_of(FetchRequest, _NEWEST_BY_NAME)
        )
        wanted = FetchPartition(
            partition=self._partition.partition,
            current_leader_epoch=metadata.leader_epoch(self._partition),
            fetch_offset=self._position,
            partition_max_bytes=config.max_partition_fetch_bytes,
        )
        request = FetchRequest(
            max_wait_ms=config.fetch_max_wait_ms,
            min_bytes=config.fetch_min_bytes,
            max_bytes=config.fetch_max_bytes,
            isolation_level=ISOLATION[config.isolation_level],
            topics=[FetchTopic(topic=self._partition.topic, topic_id=topic_id, partitions=[wanted])],
        )
        return connection.send(request, FetchResponse, version, config.request_timeout_ms + config.fetch_max_wait_ms)

    async def _recover(self, data: PartitionData) -> None:
        """The log no longer holds this offset: go on where it begins, if that is allowed."""
        earliest = await self._edge(EARLIEST_TIMESTAMP)
        latest = await self._edge(LATEST_TIMESTAMP)
        if earliest <= self._position <= latest:
            return  # it does by now, as after a change of leader
        follows = min(earliest, self._end) if self._position < earliest else self._end
        lost = (
            f"offsets {self._position} to {follows - 1} of {self._partition} are gone: "
            f"its log begins at {earliest} and ends at {latest}"
        )
        if self._options.fail_on_data_loss:
            raise DataLoss(lost)
        log.warning("%s; they are left out", lost)
        self._position = follows

    async def _edge(self, timestamp: int) -> int:
        assert self._cluster is not None
        found = await list_offsets(
            self._cluster, {self._partition: timestamp}, timeout_ms=self._config.default_api_timeout_ms
        )
        answer = found[self._partition]
        return answer.offset if answer is not None else 0

    async def _retry_later(self, failures: int) -> None:
        assert self._cluster is not None
        await asyncio.sleep(self._cluster.retry_backoff.wait_ms(failures) / 1000)
        await self._cluster.wait_for_metadata(self._config.request_timeout_ms)
