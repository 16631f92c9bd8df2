"""The options of the sink, parsed and checked before any connection. Pure.

Names and rules are those of Spark's KafkaSourceProvider and KafkaWriter where Spark has the option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tidelog.client.arguments import shown
from tidelog.client.config import ProducerConfig
from tidelog.protocol.batches.compression import CODECS, LEVELS
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.option_checks import (
    check_given,
    check_name,
    client_config,
    client_options,
    flag,
    is_digits,
    lower_names,
    positive_number,
)
from tidelog.spark_ingest.option_table import KAFKA_CLIENT_WITHOUT_EFFECT, SourceOption

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SINK_OPTIONS: Final = (
    SourceOption("topic", "", "the column `topic`", "the topic of all rows; it goes before the column", "flights"),
    SourceOption("includeHeaders", "", "`false`", "accepted without effect: a column `headers` is written", "true"),
    SourceOption(
        "exactlyOnce",
        "",
        "`false`",
        "whether each task writes one transaction, which the driver commits. A micro-batch that Spark replays is "
        "written once",
        "true",
        in_spark=False,
    ),
    SourceOption(
        "atomic",
        "",
        "`false`",
        "with `exactlyOnce`: whether all rows of a write, or of a micro-batch, are one transaction. The tasks hand "
        "them to the driver, which writes them",
        "true",
        in_spark=False,
    ),
    SourceOption(
        "maxAtomicBytes",
        "",
        "`67108864`",
        "with `atomic`: the most bytes of rows that the driver takes; more fail the write",
        "1048576",
        in_spark=False,
    ),
    SourceOption(
        "transactionalIdPrefix",
        "",
        "`tidelog-spark`",
        "the beginning of the transactional ids and of the groups that remember micro-batches",
        "reports",
        in_spark=False,
    ),
)
_SPELLING: Final = {option.name.lower(): option.name for option in SINK_OPTIONS}

KAFKA_SUPPORTED: Final = frozenset(
    f"kafka.{name}"
    for name in (
        "bootstrap.servers",
        "client.id",
        "security.protocol",
        "acks",
        "batch.size",
        "buffer.memory",
        "compression.gzip.level",
        "compression.lz4.level",
        "compression.type",
        "compression.zstd.level",
        "delivery.timeout.ms",
        "enable.idempotence",
        "linger.ms",
        "max.block.ms",
        "max.in.flight.requests.per.connection",
        "max.request.size",
        "metadata.max.age.ms",
        "metadata.max.idle.ms",
        "partitioner.adaptive.partitioning.enable",
        "partitioner.availability.timeout.ms",
        "partitioner.ignore.keys",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "request.timeout.ms",
        "retries",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "socket.connection.setup.timeout.ms",
        "transaction.timeout.ms",
    )
)
"""Options of Kafka's producer that have an effect."""

_FORBIDDEN: Final[Mapping[str, str]] = {
    "kafka.key.serializer": "keys are written as the bytes of their column",
    "kafka.value.serializer": "values are written as the bytes of their column",
    "kafka.interceptor.classes": "there is no JVM to run them",
    "kafka.partitioner.class": "there is no JVM to run it; a column `partition` chooses for each row",
    "kafka.transactional.id": "exactlyOnce chooses one for each task; set transactionalIdPrefix",
    "subscribe": "the option topic names where rows go. A view that reads a topic cannot be written to",
    "path": "rows go to a topic, which the option topic names; write save() and start() without a path",
}
_COLUMN_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "key": ("string", "binary"),
    "value": ("string", "binary"),
    "topic": ("string",),
    "partition": ("int",),
    "headers": ("array<struct<key:string,value:binary>>",),
    "timestamp": ("timestamp",),
}
DEFAULT_PREFIX: Final = "tidelog-spark"
_MAX_ATOMIC_BYTES: Final = 67_108_864
_TRANSACTION_TIMEOUT_MS: Final = 900_000
"""Kafka's default maximum: a transaction must outlast its micro-batch and the driver's restart."""
_LINGER_MS: Final = 20
_BATCH_SIZE: Final = 524_288
"""A task writes as fast as it can: with rows of 1 KB such batches cost two thirds of the time of 128 KiB, and these a
third of Kafka's default of 16 KiB.
"""
_ZSTD_BATCH_SIZE: Final = 131_072
"""At its default level zstd takes 1.5 times the time for inputs above 128 KiB, and saves little with them."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write. `topic` is empty when the rows name theirs."""

    producer: Mapping[str, Any]
    topic: str = ""
    exactly_once: bool = False
    prefix: str = DEFAULT_PREFIX
    max_atomic_bytes: int = 0
    """The most bytes of rows that are written as one transaction; 0 where each task writes its own."""
    without_effect: tuple[str, ...] = ()
    """Accepted options without effect."""
    max_block_ms: int = 60_000
    """The time that a write waits for brokers that do not answer."""

    @classmethod
    def parse(cls, raw_options: Mapping[str, str]) -> SinkOptions:
        """Check and convert. Raises ConfigError."""
        check_given(raw_options)
        options = lower_names(raw_options)
        # Spark adds these of a stream for its own use.
        for name in ("checkpointlocation", "queryname"):
            options.pop(name, None)
        for key in options:
            check_name(key, _SPELLING, KAFKA_SUPPORTED | KAFKA_CLIENT_WITHOUT_EFFECT, _FORBIDDEN, "sink")
        exactly_once = flag(options, "exactlyOnce", False)
        flag(options, "includeHeaders", False)
        producer, max_block_ms = _producer(options, exactly_once)
        max_atomic_bytes = _max_atomic_bytes(options, exactly_once)
        without_effect = tuple(sorted(KAFKA_CLIENT_WITHOUT_EFFECT.intersection(options)))
        topic, prefix = options.get("topic", ""), _prefix(options)
        return cls(producer, topic, exactly_once, prefix, max_atomic_bytes, without_effect, max_block_ms)


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Refuse a schema that cannot be written, in the words of Spark's connector. Raises ConfigError."""
    fields = schema.fields
    places = column_places([field.name for field in fields])
    types = {name: fields[place].dataType.simpleString() for name, place in places.items()}
    if not options.topic and "topic" not in types:
        raise ConfigError(
            "topic option required when no 'topic' attribute is present. Use the topic option for setting a topic."
        )
    if "value" not in types:
        raise ConfigError("Required attribute 'value' not found")
    for name, allowed in _COLUMN_TYPES.items():
        if name in types and types[name] not in allowed:
            raise ConfigError(f"{name} attribute type must be a {' or '.join(allowed)}, not {types[name]}")


def column_places(names: Sequence[str]) -> dict[str, int]:
    """The places of a record's columns by name. Spark names columns without regard to case.

    Of several with one name, as `value` and `VALUE`, the one in lower case counts, which is the only one that Spark's
    connector knows. Raises ConfigError where there is none in lower case.
    """
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        column = name.lower()
        if column not in _COLUMN_TYPES or column in places:
            continue
        same = [each for each in names if each.lower() == column]
        if len(same) > 1 and column not in same:
            raise ConfigError(
                f"the columns {', '.join(map(repr, same))} differ in their case only; name one {column!r}"
            )
        places[column] = place if len(same) == 1 else names.index(column)
    return places


def check_speculation(options: SinkOptions, setting: str | None) -> None:
    """Refuse exactlyOnce where Spark may run a task twice at once. Raises ConfigError."""
    # Spark reads the setting so; SparkConf().set(name, True) writes "True".
    if options.exactly_once and setting is not None and setting.strip().lower() == "true":
        raise ConfigError(
            "exactlyOnce cannot be used with spark.speculation=true: of two attempts of one task each ends the "
            "transaction of the other. Set spark.speculation to false"
        )


def _max_atomic_bytes(options: Mapping[str, str], exactly_once: bool) -> int:
    if not flag(options, "atomic", False):
        if "maxatomicbytes" in options:
            raise ConfigError("maxAtomicBytes has no effect without atomic=true")
        return 0
    if not exactly_once:
        raise ConfigError("atomic needs exactlyOnce=true")
    return positive_number(options, "maxAtomicBytes", _MAX_ATOMIC_BYTES)


def _prefix(options: Mapping[str, str]) -> str:
    prefix = options.get("transactionalidprefix", DEFAULT_PREFIX)
    if not prefix:
        raise ConfigError("transactionalIdPrefix is empty; leave it out for the default")
    return prefix


def _producer(options: Mapping[str, str], exactly_once: bool) -> tuple[Mapping[str, Any], int]:
    """The options of the producer, and its max.block.ms."""
    # Options of the map have their names in lower case.
    batch_size = _ZSTD_BATCH_SIZE if options.get("kafka.compression.type") == "zstd" else _BATCH_SIZE
    defaults: dict[str, Any] = {"client_id": "tidelog-spark", "linger_ms": _LINGER_MS, "batch_size": batch_size}
    if exactly_once:
        defaults["transaction_timeout_ms"] = _TRANSACTION_TIMEOUT_MS
    config = client_options(options, KAFKA_SUPPORTED, defaults)
    levels = {name: config.pop(key) for name in CODECS if (key := f"compression_{name}_level") in config}
    codec = str(config.get("compression_type"))
    if codec in levels:  # that of another codec has no effect, as in Kafka
        config["compression_level"] = _level(codec, levels[codec])
    for_task = {**config, "transactional_id": "x"} if exactly_once else config
    checked = client_config(ProducerConfig, for_task, {"transactional_id": "exactlyOnce"})
    return config, checked.max_block_ms


def _level(codec: str, text: str) -> int:
    if not is_digits(text.removeprefix("-")) or int(text) not in LEVELS[CODECS[codec]]:
        levels = LEVELS[CODECS[codec]]
        raise ConfigError(
            f"kafka.compression.{codec}.level must be a number from {levels[0]} to {levels[-1]}, not {shown(text)}"
        )
    return int(text)
