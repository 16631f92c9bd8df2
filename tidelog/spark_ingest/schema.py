"""The source's columns, those of Spark's own Kafka source, and the projection of a user.

Spark prunes no columns of a Python source, so the user's schema is the projection. Types are not
converted here: a column with another type is refused, and the error names the cast to write
instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from tidelog.protocol.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SPARK_TYPES: Final[Mapping[str, str]] = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}


_DDL_TYPES: Final[Mapping[str, str]] = {**SPARK_TYPES, "timestamp": "timestamp_ltz"}
"""The types in Spark's DDL, where `timestamp` alone means what `spark.sql.timestampType` says."""


def source_schema(include_headers: bool) -> str:
    """The schema without a user's schema, as Spark's DDL. `include_headers` adds the headers."""
    return ", ".join(
        f"{name} {type_name}" for name, type_name in _DDL_TYPES.items() if include_headers or name != "headers"
    )


def projection(schema: StructType) -> tuple[str, ...]:
    """The columns of a user's schema, in its order.

    Raises ConfigError for a column that the source lacks, that has another type there, or that stands twice, and for
    a schema without columns: an Arrow batch without columns has no rows, so that a count would be 0.
    """
    if not schema.fields:
        raise ConfigError(f"the schema has no column; name one or more of {', '.join(SPARK_TYPES)}")
    columns = []
    for field in schema.fields:
        type_name = SPARK_TYPES.get(field.name)
        if type_name is None:
            raise ConfigError(f"the tidelog source has no column {field.name!r}; it has {', '.join(SPARK_TYPES)}")
        user_type = field.dataType.simpleString()
        if user_type != type_name:
            ddl_type = _DDL_TYPES[field.name]
            raise ConfigError(
                f"column {field.name!r} is {ddl_type}, not {user_type}: read it as {ddl_type} and cast it afterwards"
            )
        if not field.nullable:
            raise ConfigError(f"column {field.name!r} must be nullable")
        if field.name in columns:
            raise ConfigError(f"column {field.name!r} is named twice")
        columns.append(field.name)
    return tuple(columns)
