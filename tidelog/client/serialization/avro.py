"""Avro values that begin with the id of their schema, in the format of Confluent's serializers.

Needs the extra `avro` (fastavro). A value is a zero byte, the id as four bytes in network order, and Avro's binary
encoding.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from tidelog.client.serialization.registry import RegisteredSchema, SchemaReference, SchemaRegistry, SchemaRegistryError

_HEADER = struct.Struct(">bI")
_MAGIC = 0
# A schema may name others, and they more: at most so many in all.
_REFERENCES_MAX = 100


class AvroSerializer:
    """Makes bytes of values, for `key_serializer` or `value_serializer`. None stays None.

    `subject` is `TOPIC-value` or `TOPIC-key` by custom. The schema is registered with the first value;
    `register=False` only looks it up.

    Fields that the schema does not name are left out.

    >>> AvroSerializer(registry, "flights-value", {"type": "record", "name": "Flight", "fields": [...]})
    """

    def __init__(
        self,
        registry: SchemaRegistry,
        subject: str,
        schema: str | Mapping[str, Any],
        *,
        references: tuple[SchemaReference, ...] = (),
        register: bool = True,
    ) -> None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        self._registry = registry
        self._subject = subject
        self._registered = RegisteredSchema(text, references=references)
        self._register = register
        self._header = b""
        self._parsed: _Schema | None = None

    def prepare(self) -> None:
        """Ask the registry for the id now, and not with the first value.

        Raises:
            SchemaRegistryError: the registry refuses the schema or does not answer.
            ValueError: the text is no Avro schema.
        """
        parsed = _parsed(self._registry, self._registered)
        find = self._registry.register if self._register else self._registry.look_up
        self._header = _HEADER.pack(_MAGIC, find(self._subject, self._registered))
        self._parsed = parsed

    def __call__(self, value: Any) -> bytes | None:
        """Encode one value.

        Raises:
            ValueError: the value does not fit the schema.
            SchemaRegistryError: with the first value, as `prepare`.
        """
        if value is None:
            return None
        if self._parsed is None:
            self.prepare()
        assert self._parsed is not None
        functions = _functions(self._parsed)

        out = io.BytesIO()
        out.write(self._header)
        try:
            # The writer by itself makes 1 of 1.5, and an int of more than 32 bits.
            functions.validate(value, self._parsed.parsed, raise_errors=True)
            functions.write(out, self._parsed.parsed, value)
        except Exception as error:  # of many classes
            raise ValueError(f"the value does not fit the schema of {self._subject}: {_line(error)}") from error
        return out.getvalue()


class AvroDeserializer:
    """Makes values of bytes, for `key_deserializer` or `value_deserializer`.

    Each schema is asked for once, with its first value. `schema` is the reader's: fields are added, left out and
    widened by Avro's rules of schema resolution; without it a value has the fields with which it was written.
    """

    def __init__(self, registry: SchemaRegistry, schema: str | Mapping[str, Any] | None = None) -> None:
        self._registry = registry
        text = schema if schema is None or isinstance(schema, str) else json.dumps(schema)
        self._reader = None if text is None else _parsed(registry, RegisteredSchema(text)).parsed
        self._writers: dict[int, _Schema] = {}

    def __call__(self, data: bytes) -> Any:
        """Decode one value.

        Raises:
            ValueError: the bytes are no Avro value with the id of a schema, or do not fit their schema.
            SchemaRegistryError: the registry does not know the id, or does not answer.
        """
        if len(data) < _HEADER.size:
            raise ValueError(f"{len(data)} bytes are no Avro value with the id of a schema")
        magic, schema_id = _HEADER.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"an Avro value with the id of a schema begins with a zero byte, not with {data[0]}")
        writer = self._writers.get(schema_id)
        if writer is None:
            writer = self._writers[schema_id] = _parsed(self._registry, self._registry.schema(schema_id))
        source = io.BytesIO(data)
        source.seek(_HEADER.size)
        try:
            value = _functions(writer).read(source, writer.parsed, self._reader)
        except Exception as error:  # of many classes: fastavro does not check the bytes first
            raise ValueError(f"the value does not fit schema {schema_id}: {_line(error)}") from error
        if source.tell() != len(data):
            raise ValueError(f"{len(data) - source.tell()} bytes follow the value of schema {schema_id}")
        return value


class _Schema(NamedTuple):
    parsed: Any
    is_recursive: bool
    """Whether a value may have any depth, as that of a list or a tree."""


def _parsed(registry: SchemaRegistry, registered: RegisteredSchema) -> _Schema:
    """The schema as fastavro takes it, after those that it names. Raises ValueError, SchemaRegistryError."""
    if registered.type != "AVRO":
        raise ValueError(f"the schema is {registered.type}, not AVRO")
    named: dict[str, Any] = {}
    _parse_references(registry, registered, named, set())
    parsed = _parse(registered.text, named)
    try:
        return _Schema(parsed, _is_recursive(parsed, named, frozenset(), set()))
    except RecursionError:  # not recursive, but too deep for the compiled functions, too
        return _Schema(parsed, True)


def _is_recursive(schema: Any, named: Mapping[str, Any], outer: frozenset[str], finite: set[str]) -> bool:
    """Whether a record is a part of itself. `outer` are the records around `schema`; `finite` gets the
    records that are not.
    """
    if isinstance(schema, list):
        return any(_is_recursive(each, named, outer, finite) for each in schema)
    if isinstance(schema, str):
        return schema in outer or (schema in named and _is_recursive(named[schema], named, outer, finite))
    if "fields" not in schema:
        parts = [schema[key] for key in ("type", "items", "values") if key in schema]
        return schema["type"] not in ("enum", "fixed") and any(
            _is_recursive(part, named, outer, finite) for part in parts
        )
    name = schema["name"]
    if name in outer:
        return True
    if name not in finite:
        if any(_is_recursive(field["type"], named, outer | {name}, finite) for field in schema["fields"]):
            return True
        finite.add(name)
    return False


class _Functions(NamedTuple):
    read: Any
    write: Any
    validate: Any


def _functions(schema: _Schema) -> _Functions:
    """fastavro's functions for values of this schema.

    The compiled ones end the process by a stack overflow where a value is some thousand levels deep, and 5 kB make so
    many. Those in Python raise a RecursionError.
    """
    fastavro = _fastavro()
    if not schema.is_recursive:
        return _Functions(fastavro.schemaless_reader, fastavro.schemaless_writer, fastavro.validate)
    from fastavro import _read_py, _validation_py, _write_py

    return _Functions(_read_py.schemaless_reader, _write_py.schemaless_writer, _validation_py.validate)


def _parse_references(
    registry: SchemaRegistry, registered: RegisteredSchema, named: dict[str, Any], visited: set[tuple[str, int]]
) -> None:
    for each in registered.references:
        if (each.subject, each.version) in visited:
            continue
        visited.add((each.subject, each.version))
        if len(visited) > _REFERENCES_MAX:
            raise SchemaRegistryError(f"a schema refers to more than {_REFERENCES_MAX} others")
        schema = registry.version(each.subject, each.version)
        _parse_references(registry, schema, named, visited)
        _parse(schema.text, named)


def _parse(text: str, named: dict[str, Any]) -> Any:
    fastavro = _fastavro()

    try:
        return fastavro.parse_schema(json.loads(text), named_schemas=named)
    except Exception as error:  # of many classes: fastavro does not check the JSON first
        raise ValueError(f"no Avro schema: {_line(error)}") from error


def _fastavro() -> Any:
    try:
        import fastavro
    except ImportError as error:
        raise ImportError("Avro needs fastavro: pip install 'tidelog[avro]'") from error
    return fastavro


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
