from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.schema import SPARK_TYPES, projection, source_schema

types = pytest.importorskip("pyspark.sql.types")


def struct(**columns):
    made = types.StructType()
    for name, kind in columns.items():
        made.add(name, kind)
    return made


def test_the_columns_are_those_of_sparks_kafka_source():
    assert source_schema(include_headers=False) == (
        "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp_ltz, "
        "timestampType int"
    )
    assert source_schema(True).endswith("timestampType int, headers array<struct<key:string,value:binary>>")


def test_a_users_schema_is_the_projection_in_its_order():
    assert projection(struct(offset="long", value="binary")) == ("offset", "value")
    headers = types.ArrayType(types.StructType().add("key", "string").add("value", "binary"))
    assert projection(struct(headers=headers)) == ("headers",)


def test_every_type_is_the_one_arrow_columns_have():
    pyspark_arrow = pytest.importorskip("pyspark.sql.pandas.types")
    from tidelog.protocol.batches.columnar import arrow_schema

    for name in SPARK_TYPES:
        arrow = arrow_schema((name,)).field(name)
        spark = pyspark_arrow.from_arrow_type(arrow.type)
        assert spark.simpleString() == SPARK_TYPES[name]


@pytest.mark.parametrize(
    ("column", "kind", "says"),
    [
        ("value", "string", "binary, not string"),
        ("offset", "integer", "bigint, not int"),
        ("timestamp", "timestamp_ntz", "timestamp_ltz, not timestamp_ntz"),
        ("Value", "binary", "no column 'Value'"),
        ("carrier", "string", "no column 'carrier'"),
    ],
)
def test_other_columns_and_types_are_refused(column, kind, says):
    with pytest.raises(ConfigError, match=says):
        projection(struct(**{column: kind}))


def test_a_column_that_cannot_be_null_is_refused():
    with pytest.raises(ConfigError, match="nullable"):
        projection(types.StructType().add("value", "binary", nullable=False))


def test_a_schema_without_columns_is_refused():
    """Its read had no rows: Arrow counts the rows of a batch by its columns."""
    with pytest.raises(ConfigError, match="the schema has no column; name one or more of key, value, topic"):
        projection(types.StructType())


def test_a_column_that_stands_twice_is_refused():
    with pytest.raises(ConfigError, match="column 'value' is named twice"):
        projection(types.StructType().add("value", "binary").add("key", "binary").add("value", "binary"))


@pytest.mark.slow
def test_the_module_spark_finds_is_cheap_and_holds_the_source():
    script = (
        "import sys, pyspark_tidelog\n"
        "assert pyspark_tidelog.DefaultSource.name() == 'tidelog'\n"
        "print([name for name in ('tidelog.client', 'numpy', 'numba', 'pyarrow', 'asyncio') if name in sys.modules])"
    )
    clean = (
        "import sys, pyspark.sql.datasource\nprint([n for n in ('numpy', 'pyarrow', 'asyncio') if n in sys.modules])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", each], capture_output=True, text=True, check=True, timeout=PATIENCE_S
        ).stdout
        for each in (script, clean)
    ]
    assert outputs[0] == outputs[1]  # nothing beyond what pyspark itself loads
