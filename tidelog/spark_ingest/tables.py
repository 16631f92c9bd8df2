"""Tables and columns on top of `format("tidelog")`, for use in jobs.

`latest` reads a compacted topic as a table. The other functions give plain column expressions: Spark
plans and runs them without Python. pyspark is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_CONFLUENT_HEADER_BYTES = 5
"""A zero byte and the schema's id before a value, as serializers with a schema registry write it."""


def latest(spark: SparkSession, topic: str, **options: str) -> DataFrame:
    """The table that a compacted topic stands for: the latest record of each key, in all columns.

    A key whose latest record is a tombstone (a null value) is not in the table; neither are records
    without a key. `options` are those of a batch read; write dots in names with a dictionary:
    `latest(spark, "t", **{"kafka.bootstrap.servers": "127.0.0.1:9092"})`.

    Within a partition the record with the highest offset is the latest. A key in several
    partitions, as after partitions were added, has one row: that with the highest timestamp.

    A key is missing whose record was removed while it was read, because of a newer one behind the end of the read: a
    `min.compaction.lag.ms` of the topic that is longer than a read prevents it.

    Spark asks for the offsets at the first read of a DataFrame only. Call it again for newer records, in a stream in
    each micro-batch (`foreachBatch`).
    """
    from pyspark.sql import functions as F

    records = spark.read.format("tidelog").options(**{"subscribe": topic, **options}).load()
    row = F.struct(*records.columns)
    in_partition = (
        records.where(F.col("key").isNotNull())
        .groupBy("key", "partition")
        .agg(F.max_by(row, F.col("offset")).alias("row"))
    )
    newest = F.max_by(F.col("row"), F.struct("row.timestamp", "partition"))
    rows = in_partition.groupBy("key").agg(newest.alias("row")).select("row.*")
    return rows.where(F.col("value").isNotNull())


def json_value(schema: str | StructType, column: str = "value") -> Column:
    """The JSON in a binary column as a struct of `schema`; all its fields are null where it is none.

    >>> flights.select(json_value("carrier string, delay int").alias("flight")).select("flight.*")
    """
    from pyspark.sql import functions as F

    return F.from_json(F.col(column).cast("string"), schema)


def schema_id(column: str = "value") -> Column:
    """The id of a value's schema in a schema registry; null for a value without one."""
    from pyspark.sql import functions as F

    value = F.col(column)
    number = F.conv(F.hex(F.substring(value, 2, 4)), 16, 10).cast("bigint")
    return F.when(_has_schema_id(value), number)


def schema_payload(column: str = "value") -> Column:
    """A value without the id of its schema, as `from_avro` takes it; null for a value without an id.

    `from_avro` of `pyspark.sql.avro.functions` needs Spark's package spark-avro.
    """
    from pyspark.sql import functions as F

    value = F.col(column)
    payload = F.substring(value, _CONFLUENT_HEADER_BYTES + 1, 2**31 - 1)
    return F.when(_has_schema_id(value), payload)


def _has_schema_id(value: Column) -> Column:
    from pyspark.sql import functions as F

    return (F.length(value) >= _CONFLUENT_HEADER_BYTES) & (F.substring(value, 1, 1) == F.lit(b"\0"))
