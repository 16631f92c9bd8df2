"""The options of `format("tidelog")`: Spark's own Kafka options, read and checked before anything is connected.

Pure: text in, one frozen `SourceOptions` out, or a ConfigError of one line that names the option. What topics exist and
which offsets the bounds mean is found out later (`offsets.py`). Names and rules are those of Spark's
KafkaSourceProvider; keys arrive lower-cased from Spark and are matched without regard to case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from tidelog.client.config import ConfigError, ConsumerConfig
from tidelog.client.model import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, TopicPartition

EARLIEST: Final = EARLIEST_TIMESTAMP
LATEST: Final = LATEST_TIMESTAMP

STRATEGIES: Final = ("subscribe", "subscribePattern", "assign")

# For each bound: a timestamp for everything, timestamps by partition, offsets. The first one given counts.
_STARTING: Final = ("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets")
_ENDING: Final = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")

_KNOWN: Final = (
    *STRATEGIES,
    *_STARTING,
    *_ENDING,
    "startingOffsetsByTimestampStrategy",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    # Taken and without effect: they shape streams, or groups that a read of committed offsets has no use for.
    "groupIdPrefix",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
)
_SPELLING: Final = {name.lower(): name for name in _KNOWN}

_FORBIDDEN: Final = {
    "kafka.auto.offset.reset": "say where to begin with startingOffsets",
    "kafka.key.deserializer": "keys come as binary columns; cast them afterwards",
    "kafka.value.deserializer": "values come as binary columns; cast them afterwards",
    "kafka.key.serializer": "keys come as binary columns; cast them afterwards",
    "kafka.value.serializer": "values come as binary columns; cast them afterwards",
    "kafka.enable.auto.commit": "the source commits nothing",
    "kafka.interceptor.classes": "there is no JVM to run them",
}
_SECURITY: Final = ("kafka.sasl.", "kafka.ssl.")

DEFAULT_POLL_TIMEOUT_MS: Final = 120_000
_PARTITION_FETCH_BYTES: Final = 8 * 1024 * 1024
"""Kafka's default of 1 MiB is for consumers of many partitions; a task here reads one."""

Bound = int | Mapping[TopicPartition, int]
"""One value for every partition, or one for each."""


@dataclass(frozen=True, slots=True)
class OffsetBound:
    """Where to begin or end: offsets (-2 earliest, -1 latest) or, with `by_time`, timestamps in ms since 1970."""

    value: Bound
    by_time: bool = False
    option: str = ""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Everything a batch read needs to know. Exactly one of `topics`, `pattern` and `partitions` is set."""

    consumer: ConsumerConfig
    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: tuple[TopicPartition, ...] = ()
    starting: OffsetBound = field(default_factory=lambda: OffsetBound(EARLIEST, option="startingOffsets"))
    ending: OffsetBound = field(default_factory=lambda: OffsetBound(LATEST, option="endingOffsets"))
    latest_when_no_timestamp_matches: bool = False
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    poll_timeout_ms: int = DEFAULT_POLL_TIMEOUT_MS
    fetch_offset_retries: int = 3
    fetch_offset_retry_interval_ms: int = 10

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """Check and convert the options of a batch read. Raises ConfigError."""
        options = {key.lower(): str(value).strip() for key, value in given.items()}
        _refuse(options)
        topics, pattern, partitions = _which(options)
        return cls(
            consumer=_consumer(options),
            topics=topics,
            pattern=pattern,
            partitions=partitions,
            starting=_starting(options),
            ending=_ending(options),
            latest_when_no_timestamp_matches=_by_timestamp_strategy(options),
            min_partitions=_positive(options, "minPartitions"),
            max_records_per_partition=_positive(options, "maxRecordsPerPartition"),
            fail_on_data_loss=_flag(options, "failOnDataLoss", True),
            include_headers=_flag(options, "includeHeaders", False),
            poll_timeout_ms=_positive(options, "kafkaConsumer.pollTimeoutMs") or DEFAULT_POLL_TIMEOUT_MS,
            fetch_offset_retries=_number(options, "fetchOffset.numRetries", 3),
            fetch_offset_retry_interval_ms=_number(options, "fetchOffset.retryIntervalMs", 10),
        )


def _refuse(options: Mapping[str, str]) -> None:
    for key in options:
        if key in _FORBIDDEN:
            raise ConfigError(f"option {key!r} is not allowed: {_FORBIDDEN[key]}")
        if key.startswith(_SECURITY):
            raise ConfigError(f"option {key!r} is not supported: the client speaks PLAINTEXT only")
        if not key.startswith("kafka.") and key not in _SPELLING:
            near = get_close_matches(key, _SPELLING, n=1)
            hint = f"; did you mean {_SPELLING[near[0]]}?" if near else ""
            raise ConfigError(f"the tidelog source has no option {key!r}{hint}")


def _which(options: Mapping[str, str]) -> tuple[tuple[str, ...], str, tuple[TopicPartition, ...]]:
    given = [name for name in STRATEGIES if name.lower() in options]
    if len(given) != 1:
        said = f"not {' and '.join(given)}" if given else "none is given"
        raise ConfigError(f"say what to read with exactly one of {', '.join(STRATEGIES)}: {said}")
    text = options[given[0].lower()]
    if given[0] == "subscribe":
        topics = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not topics:
            raise ConfigError("subscribe names no topic; give one or several, separated by commas")
        return topics, "", ()
    if given[0] == "subscribePattern":
        if not text:
            raise ConfigError("subscribePattern is empty")
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"subscribePattern {text!r} is no regular expression: {error}") from None
        return (), text, ()
    return (), "", parse_assignment(text)


def parse_assignment(text: str) -> tuple[TopicPartition, ...]:
    """`{"topic": [0, 1]}` as sorted partitions. Raises ConfigError."""
    shape = 'assign must be JSON like {"topic": [0, 1]}'
    found = _json_object(text, shape)
    partitions: set[TopicPartition] = set()
    for topic, numbers in found.items():
        if not isinstance(numbers, list) or not all(_is_number(number) and number >= 0 for number in numbers):
            raise ConfigError(f"{shape}, not {numbers!r} for {topic!r}")
        partitions.update(TopicPartition(topic, number) for number in numbers)
    if not partitions:
        raise ConfigError(f"{shape}; it names no partition")
    return tuple(sorted(partitions))


def parse_partition_values(option: str, text: str) -> dict[TopicPartition, int]:
    """`{"topic": {"0": 23, "1": -2}}` as a number per partition. Raises ConfigError naming `option`."""
    shape = f'{option} must be JSON like {{"topic": {{"0": 23, "1": -2}}}}'
    values: dict[TopicPartition, int] = {}
    for topic, by_partition in _json_object(text, shape).items():
        if not isinstance(by_partition, dict):
            raise ConfigError(f"{shape}, not {by_partition!r} for {topic!r}")
        for partition, value in by_partition.items():
            if not partition.isdecimal() or not _is_number(value):
                raise ConfigError(f"{shape}, not {partition!r}: {value!r} for {topic!r}")
            values[TopicPartition(topic, int(partition))] = value
    return values


def format_partition_values(values: Mapping[TopicPartition, int]) -> str:
    """The reverse of `parse_partition_values`, sorted, as Spark writes offsets."""
    nested: dict[str, dict[str, int]] = {}
    for (topic, partition), value in sorted(values.items()):
        nested.setdefault(topic, {})[str(partition)] = value
    return json.dumps(nested, separators=(",", ":"))


def _json_object(text: str, shape: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{shape}, not {text!r}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{shape}, not {text!r}")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _bound(options: Mapping[str, str], names: tuple[str, str, str], words: Mapping[str, int]) -> OffsetBound | None:
    timestamp, by_partition, offsets = names
    if timestamp.lower() in options:
        text = options[timestamp.lower()]
        if not text.isdecimal():
            raise ConfigError(f"{timestamp} must be milliseconds since 1970, not {text!r}")
        return OffsetBound(int(text), by_time=True, option=timestamp)
    if by_partition.lower() in options:
        times = parse_partition_values(by_partition, options[by_partition.lower()])
        if any(time < 0 for time in times.values()):
            raise ConfigError(f"{by_partition} holds a negative timestamp")
        return OffsetBound(times, by_time=True, option=by_partition)
    if offsets.lower() in options:
        text = options[offsets.lower()]
        if text.lower() in words:
            return OffsetBound(words[text.lower()], option=offsets)
        values = parse_partition_values(offsets, text)
        for partition, value in values.items():
            if value < 0 and value not in words.values():
                allowed = " or ".join(f"{number} ({word})" for word, number in words.items())
                raise ConfigError(f"{offsets} of {partition} cannot be {value} in a batch read; {allowed} or an offset")
        return OffsetBound(values, option=offsets)
    return None


def _starting(options: Mapping[str, str]) -> OffsetBound:
    if options.get("startingoffsets", "").lower() == "latest":
        raise ConfigError("startingOffsets cannot be latest in a batch read: there would be nothing to read")
    return _bound(options, _STARTING, {"earliest": EARLIEST}) or OffsetBound(EARLIEST, option="startingOffsets")


def _ending(options: Mapping[str, str]) -> OffsetBound:
    if options.get("endingoffsets", "").lower() == "earliest":
        raise ConfigError("endingOffsets cannot be earliest in a batch read: there would be nothing to read")
    return _bound(options, _ENDING, {"latest": LATEST}) or OffsetBound(LATEST, option="endingOffsets")


def _by_timestamp_strategy(options: Mapping[str, str]) -> bool:
    text = options.get("startingoffsetsbytimestampstrategy", "error").lower()
    if text not in ("error", "latest"):
        raise ConfigError(f"startingOffsetsByTimestampStrategy must be error or latest, not {text!r}")
    return text == "latest"


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    text = options.get(name.lower())
    if text is None:
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name} must be a whole number, not {text!r}")
    return int(text)


def _positive(options: Mapping[str, str], name: str) -> int | None:
    number = _number(options, name, 0)
    if number == 0 and name.lower() in options:
        raise ConfigError(f"{name} must be at least 1")
    return number or None


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name.lower(), str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, not {text!r}")
    return text == "true"


_CONSUMER_OPTIONS: Final = frozenset(
    (
        "bootstrap_servers",
        "client_id",
        "security_protocol",
        "request_timeout_ms",
        "default_api_timeout_ms",
        "retry_backoff_ms",
        "retry_backoff_max_ms",
        "reconnect_backoff_ms",
        "reconnect_backoff_max_ms",
        "socket_connection_setup_timeout_ms",
        "metadata_max_age_ms",
        "fetch_min_bytes",
        "fetch_max_bytes",
        "fetch_max_wait_ms",
        "max_partition_fetch_bytes",
        "check_crcs",
        "isolation_level",
    )
)


def _consumer(options: Mapping[str, str]) -> ConsumerConfig:
    """The `kafka.` options that mean something to a read without a group; Kafka too ignores those it does not know."""
    if not options.get("kafka.bootstrap.servers"):
        raise ConfigError("option 'kafka.bootstrap.servers' is missing; give host:port, several separated by commas")
    chosen: dict[str, Any] = {"client_id": "tidelog-spark", "max_partition_fetch_bytes": _PARTITION_FETCH_BYTES}
    for key, value in options.items():
        name = key.removeprefix("kafka.").replace(".", "_")
        if key.startswith("kafka.") and name in _CONSUMER_OPTIONS:
            chosen[name] = value
    try:
        return ConsumerConfig.from_options(chosen)
    except ConfigError as error:
        raise ConfigError(f"kafka options: {error}") from None
