"""The source's columns, exactly those of Spark's own Kafka source, and what a user's `.schema(...)` may take of them.

Spark prunes no columns of a Python source, so the schema a user gives is the projection. Types cannot be converted
here: a column under its name with another type is refused, with the cast to write instead.
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


def source_schema(include_headers: bool) -> str:
    """The schema without a user's own, as Spark's DDL; headers only when asked for."""
    return ", ".join(f"{name} {kind}" for name, kind in SPARK_TYPES.items() if include_headers or name != "headers")


def projection(schema: StructType) -> tuple[str, ...]:
    """The columns that a schema asks for, in its order. Raises ConfigError for one that the source does not have."""
    columns = []
    for field in schema.fields:
        kind = SPARK_TYPES.get(field.name)
        if kind is None:
            raise ConfigError(f"the tidelog source has no column {field.name!r}; it has {', '.join(SPARK_TYPES)}")
        given = field.dataType.simpleString()
        if given != kind:
            raise ConfigError(f"column {field.name!r} is {kind}, not {given}: read it as {kind} and cast it afterwards")
        if not field.nullable:
            raise ConfigError(f"column {field.name!r} must be nullable")
        columns.append(field.name)
    return tuple(columns)
