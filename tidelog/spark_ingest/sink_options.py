"""The options of the sink, parsed and checked before any connection. Pure.

Names and rules are those of Spark's KafkaSourceProvider and KafkaWriter where Spark has the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from tidelog.client.config import ProducerConfig
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.option_table import SECURITY, SourceOption

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
        "compression.type",
        "delivery.timeout.ms",
        "enable.idempotence",
        "linger.ms",
        "max.block.ms",
        "max.in.flight.requests.per.connection",
        "max.request.size",
        "metadata.max.age.ms",
        "metadata.max.idle.ms",
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
    "kafka.transactional.id": "exactlyOnce chooses one for each task; set transactionalIdPrefix",
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
_TRANSACTION_TIMEOUT_MS: Final = 900_000
"""Kafka's default maximum: a transaction must outlast its micro-batch and the driver's restart."""
_LINGER_MS: Final = 20
"""A task writes as fast as it can: larger batches, and no row waits for another program's."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a write. `topic` is empty when the rows name theirs."""

    producer: Mapping[str, Any]
    topic: str = ""
    exactly_once: bool = False
    prefix: str = DEFAULT_PREFIX

    @classmethod
    def parse(cls, raw_options: Mapping[str, str]) -> SinkOptions:
        """Check and convert. Raises ConfigError."""
        options = {key.lower(): str(value).strip() for key, value in raw_options.items()}
        # Spark adds these for its own use.
        options.pop("path", None)
        options.pop("checkpointlocation", None)
        _check_names(options)
        exactly_once = _flag(options, "exactlyOnce")
        _flag(options, "includeHeaders")
        return cls(_producer(options, exactly_once), options.get("topic", ""), exactly_once, _prefix(options))


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Refuse a schema that cannot be written, in the words of Spark's connector. Raises ConfigError."""
    types = {field.name.lower(): field.dataType.simpleString() for field in schema.fields}
    if not options.topic and "topic" not in types:
        raise ConfigError(
            "topic option required when no 'topic' attribute is present. Use the topic option for setting a topic."
        )
    if "value" not in types:
        raise ConfigError("Required attribute 'value' not found")
    for name, allowed in _COLUMN_TYPES.items():
        if name in types and types[name] not in allowed:
            raise ConfigError(f"{name} attribute type must be a {' or '.join(allowed)}, not {types[name]}")


def _check_names(options: Mapping[str, str]) -> None:
    for key in options:
        if key in _FORBIDDEN:
            raise ConfigError(f"option {key!r} is not allowed: {_FORBIDDEN[key]}")
        if key.startswith(SECURITY):
            raise ConfigError(f"option {key!r} is not supported: the client speaks PLAINTEXT only")
        if key in _SPELLING or key in KAFKA_SUPPORTED:
            continue
        close_matches = get_close_matches(key, (*_SPELLING, *KAFKA_SUPPORTED), n=1)
        hint = f"; did you mean {_SPELLING.get(close_matches[0], close_matches[0])}?" if close_matches else ""
        raise ConfigError(f"the tidelog sink has no option {key!r}{hint}")


def _flag(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name.lower(), "false").lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, not {text[:40]!r}")
    return text == "true"


def _prefix(options: Mapping[str, str]) -> str:
    prefix = options.get("transactionalidprefix", DEFAULT_PREFIX)
    if not prefix:
        raise ConfigError("transactionalIdPrefix is empty; leave it out for the default")
    return prefix


def _producer(options: Mapping[str, str], exactly_once: bool) -> Mapping[str, Any]:
    if not options.get("kafka.bootstrap.servers"):
        raise ConfigError("option 'kafka.bootstrap.servers' is missing; give host:port, several separated by commas")
    config: dict[str, Any] = {"client_id": "tidelog-spark", "linger_ms": _LINGER_MS}
    if exactly_once:
        config["transaction_timeout_ms"] = _TRANSACTION_TIMEOUT_MS
    for key, value in options.items():
        if key in KAFKA_SUPPORTED:
            config[key.removeprefix("kafka.").replace(".", "_")] = value
    try:
        ProducerConfig.from_options({**config, "transactional_id": "x"} if exactly_once else config)
    except ConfigError as error:
        raise ConfigError(f"kafka options: {error}") from None
    return config
