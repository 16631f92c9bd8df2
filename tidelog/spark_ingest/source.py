"""`format("tidelog")`: batch reads, writes and streams for Spark's Python data source API.

Thin: the other modules of this package compute options, offsets and ranges on the driver; tasks
only fetch. The driver sends frozen options and offset ranges to the tasks. Imports here are light,
because Spark imports the module to find the source by name; the first read imports the client and
Arrow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from tidelog.spark_ingest.libraries import check_libraries

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        ReadMinRows,
        SupportsTriggerAvailableNow,
    )
except ImportError:  # before 4.2, where the source reads batches only
    SupportsTriggerAvailableNow = object  # type: ignore[misc,assignment,unused-ignore]

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter
    from pyspark.sql.types import StructType

    from tidelog.spark_ingest.options import SourceOptions
    from tidelog.spark_ingest.planning import OffsetRange
    from tidelog.spark_ingest.sink_options import SinkOptions
    from tidelog.spark_ingest.stream import StreamDriver


class TidelogDataSource(DataSource):  # type: ignore[misc,unused-ignore]
    """Reads topics of a Kafka-compatible cluster with the options and columns of Spark's own Kafka
    source.

    >>> spark.read.format("tidelog").option("kafka.bootstrap.servers",
    "127.0.0.1:9092").option("subscribe", "t").load()
    """

    def __init__(self, options: dict[str, str]) -> None:
        check_libraries()
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        return "tidelog"

    def schema(self) -> str:
        from tidelog.spark_ingest.options import wants_headers
        from tidelog.spark_ingest.schema import source_schema

        return source_schema(wants_headers(self.options))

    def reader(self, schema: StructType) -> TidelogReader:
        from tidelog.spark_ingest.option_table import BATCH
        from tidelog.spark_ingest.schema import projection

        return TidelogReader(_parse(self.options, BATCH), projection(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tidelog.protocol.errors import ConfigError
        from tidelog.spark_ingest.writers import TidelogWriter

        if overwrite:
            raise ConfigError("save mode overwrite is not allowed: records are appended to a topic; use append")
        return TidelogWriter(_parse_sink(self.options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """The writer of a stream. As in Spark's connector the output mode complete (`overwrite`) appends
        the whole result of each micro-batch.
        """
        from tidelog.spark_ingest.writers import TidelogStreamWriter

        return TidelogStreamWriter(_parse_sink(self.options, schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from tidelog.protocol.errors import ConfigError
        from tidelog.spark_ingest.option_table import STREAM
        from tidelog.spark_ingest.schema import projection

        if SupportsTriggerAvailableNow is object:  # type: ignore[comparison-overlap,unused-ignore]
            return RefusedStreamReader(ConfigError("streams need PySpark 4.2 or newer"))
        try:
            return TidelogStreamReader(_parse(self.options, STREAM), projection(schema))
        except ConfigError as error:
            return RefusedStreamReader(error)


class RangePartition(InputPartition):  # type: ignore[misc,unused-ignore]
    """The ranges that one task reads one after the other, each with the id of its topic where it is known."""

    def __init__(self, ranges: Sequence[tuple[OffsetRange, bytes]]) -> None:
        super().__init__(tuple(tuple(each) for each, _ in ranges))
        self.ranges = tuple(ranges)


class TidelogReader(DataSourceReader):  # type: ignore[misc,unused-ignore]
    """One batch read: `partitions` runs on the driver, `read` in the tasks.

    It has no `pushFilters`: Spark up to 4.3 keeps the ranges of the last scan of a DataFrame and reads them for its
    other scans, so that ranges narrowed by one filter would lose the rows of another.
    """

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> Sequence[RangePartition]:
        """The ranges to read, fixed at this time.

        For an empty list Spark reads one empty partition.
        """
        from tidelog.spark_ingest.offsets import resolve_ranges
        from tidelog.spark_ingest.planning import plan_ranges

        options = self._options
        _warn_of(options.without_effect, "source")
        ranges, topic_ids = resolve_ranges(options)
        ranges = plan_ranges(ranges, options.min_partitions, options.max_records_per_partition)
        return _tasks(options, ranges, topic_ids.__getitem__)

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The records of one range as Arrow record batches of the selected columns."""
        return _read(self._options, self._columns, partition)


class TidelogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc,unused-ignore]
    """One stream: `read` runs in the tasks, all else in one process of the driver."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._driver: StreamDriver | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Tasks get the options alone; connections stay on the driver.
        return type(self), (self._options, self._columns)

    def _stream(self) -> StreamDriver:
        from tidelog.spark_ingest.stream import StreamDriver

        if self._driver is None:
            self._driver = StreamDriver(self._options)
        return self._driver

    def initialOffset(self) -> dict[str, Any]:
        return self._stream().initial_offset()

    def getDefaultReadLimit(self) -> ReadLimit:
        """The limit that Spark hands back to `latestOffset`.

        Spark has no limit of both kinds, so a minimum stands for both.
        """
        if self._options.min_offsets_per_trigger:
            return ReadMinRows(self._options.min_offsets_per_trigger)
        if self._options.max_offsets_per_trigger:
            return ReadMaxRows(self._options.max_offsets_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        options = self._options
        if isinstance(limit, ReadAllAvailable):  # also of a trigger that wants everything in one batch
            return self._stream().latest_offset(start)
        max_offsets = limit.max_rows if isinstance(limit, ReadMaxRows) else options.max_offsets_per_trigger
        min_offsets = limit.min_rows if isinstance(limit, ReadMinRows) else None
        return self._stream().latest_offset(start, max_offsets=max_offsets, min_offsets=min_offsets)

    def prepareForTriggerAvailableNow(self) -> None:
        self._stream().prepare_for_available_now()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._stream().reported_offset()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[RangePartition]:
        stream = self._stream()
        return _tasks(self._options, stream.ranges(start, end), stream.topic_id)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, self._columns, partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._stream().commit(end)

    def stop(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()


class RefusedStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc,unused-ignore]
    """Raises the error of a stream's options at the first call.

    Where `streamReader` itself raises, Spark's message ends with an UnboundLocalError of Spark. PySpark before 4.2
    calls `latestOffset` without arguments.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def getDefaultReadLimit(self) -> ReadLimit:
        raise self._error

    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        raise self._error


def _tasks(
    options: SourceOptions, ranges: Sequence[OffsetRange], topic_id: Callable[[str], bytes]
) -> list[RangePartition]:
    from tidelog.spark_ingest.planning import share_tasks

    tasks = share_tasks(ranges, options.min_records_per_partition, options.max_records_per_partition)
    return [RangePartition([(each, topic_id(each.topic)) for each in task]) for task in tasks]


def _read(
    options: SourceOptions, columns: tuple[str, ...], partition: InputPartition | None
) -> Iterator[pa.RecordBatch]:
    from tidelog.spark_ingest.fetch import read_ranges
    from tidelog.spark_ingest.task_process import task_process

    if not isinstance(partition, RangePartition):
        return  # Spark's empty partition of a read without ranges
    check_libraries()
    with task_process():
        yield from read_ranges(options, partition.ranges, columns)


def _parse_sink(options: Mapping[str, str], schema: StructType) -> SinkOptions:
    from tidelog.spark_ingest.sink_options import SinkOptions, check_columns

    parsed = SinkOptions.parse(options)
    check_columns(schema, parsed)
    _warn_of(parsed.without_effect, "sink")
    return parsed


def _warn_of(without_effect: Sequence[str], owner: str) -> None:
    for name in without_effect:
        logger.warning("option %r has no effect on this %s", name, owner)


def _parse(options: Mapping[str, str], mode: str) -> SourceOptions:
    from tidelog.spark_ingest.options import SourceOptions

    return SourceOptions.parse(options, mode)
