"""`spark.read.format("tidelog")`: the batch source for Spark's Python data source API.

Thin: the other modules of this package compute options, offsets and ranges on the driver; tasks
only fetch. The driver sends frozen options and offset ranges to the tasks. Imports here are light,
because Spark imports the module to find the source by name; the first read imports the client and
Arrow.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from tidelog.spark_ingest.options import SourceOptions
    from tidelog.spark_ingest.planning import OffsetRange


class TidelogDataSource(DataSource):  # type: ignore[misc,unused-ignore]
    """Reads topics of a Kafka-compatible cluster with the options and columns of Spark's own Kafka
    source.

    >>> spark.read.format("tidelog").option("kafka.bootstrap.servers",
    "127.0.0.1:9092").option("subscribe", "t").load()
    """

    @classmethod
    def name(cls) -> str:
        return "tidelog"

    def schema(self) -> str:
        from tidelog.spark_ingest.schema import source_schema

        return source_schema(_parse(self.options).include_headers)

    def reader(self, schema: StructType) -> TidelogReader:
        from tidelog.spark_ingest.schema import projection

        return TidelogReader(_parse(self.options), projection(schema))


class RangePartition(InputPartition):  # type: ignore[misc,unused-ignore]
    """The range that one task reads."""

    def __init__(self, offset_range: OffsetRange) -> None:
        super().__init__(tuple(offset_range))
        self.offset_range = offset_range


class TidelogReader(DataSourceReader):  # type: ignore[misc,unused-ignore]
    """One batch read: `partitions` runs on the driver, `read` in the tasks."""

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
        for name in options.without_effect:
            logger.warning("option %r has no effect on this source", name)
        ranges = plan_ranges(resolve_ranges(options), options.min_partitions, options.max_records_per_partition)
        return [RangePartition(offset_range) for offset_range in ranges]

    def read(self, partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The records of one range as Arrow record batches of the selected columns."""
        from tidelog.spark_ingest.fetch import read_range

        if not isinstance(partition, RangePartition):
            return iter(())  # Spark's empty partition of a read without ranges
        return read_range(self._options, partition.offset_range, self._columns)


def _parse(options: Mapping[str, str]) -> SourceOptions:
    from tidelog.spark_ingest.options import SourceOptions

    return SourceOptions.parse(options)
