"""The options of `format("tidelog")`, parsed and checked before any connection.

Pure: text in, one frozen `SourceOptions` out, or a ConfigError of one line that names the option.
`offsets.py` looks up topics and offsets later. Names and rules are those of Spark's
KafkaSourceProvider. Spark passes keys in lower case; they are matched without regard to case.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from tidelog.client.config import ConsumerConfig
from tidelog.client.model import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, TopicPartition
from tidelog.protocol.batches.compression import DEFAULT_MAX_BYTES
from tidelog.protocol.errors import ConfigError

EARLIEST: Final = EARLIEST_TIMESTAMP
LATEST: Final = LATEST_TIMESTAMP

STRATEGIES: Final = ("subscribe", "subscribePattern", "assign")

MAX_BATCH_BYTES_OPTION: Final = "maxDecompressedBatchBytes"
"""Not in Spark: the maximum decompressed size of a record batch, which bounds a task's memory."""

# For each bound: one timestamp, timestamps by partition, offsets. The first option present counts.
_STARTING: Final = ("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets")
_ENDING: Final = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")

_OPTIONS: Final = (
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
    MAX_BATCH_BYTES_OPTION,
    "groupIdPrefix",  # without effect: a batch read has no group
)
_SPELLING: Final = {name.lower(): name for name in _OPTIONS}

_STREAMS_ONLY: Final = "it shapes streams; in a batch read maxRecordsPerPartition bounds what one task reads"
_FORBIDDEN: Final = {
    "maxoffsetspertrigger": _STREAMS_ONLY,
    "minoffsetspertrigger": _STREAMS_ONLY,
    "maxtriggerdelay": _STREAMS_ONLY,
    "kafka.auto.offset.reset": "say where to begin with startingOffsets",
    "kafka.key.deserializer": "keys come as binary columns; cast them afterwards",
    "kafka.value.deserializer": "values come as binary columns; cast them afterwards",
    "kafka.key.serializer": "keys come as binary columns; cast them afterwards",
    "kafka.value.serializer": "values come as binary columns; cast them afterwards",
    "kafka.enable.auto.commit": "the source commits nothing",
    "kafka.interceptor.classes": "there is no JVM to run them",
}
_STREAM_OPTION_SPELLING: Final = {
    name.lower(): name for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
}
_SECURITY: Final = ("kafka.sasl.", "kafka.ssl.")

_KAFKA_SUPPORTED: Final = frozenset(
    f"kafka.{name}"
    for name in (
        "bootstrap.servers",
        "client.id",
        "security.protocol",
        "request.timeout.ms",
        "default.api.timeout.ms",
        "retry.backoff.ms",
        "retry.backoff.max.ms",
        "reconnect.backoff.ms",
        "reconnect.backoff.max.ms",
        "socket.connection.setup.timeout.ms",
        "metadata.max.age.ms",
        "fetch.min.bytes",
        "fetch.max.bytes",
        "fetch.max.wait.ms",
        "max.partition.fetch.bytes",
        "check.crcs",
        "isolation.level",
    )
)
"""Options of Kafka's consumer that have an effect on a read without a group."""

_KAFKA_WITHOUT_EFFECT: Final = frozenset(
    f"kafka.{name}"
    for name in (
        "allow.auto.create.topics",
        "auto.commit.interval.ms",
        "client.dns.lookup",
        "client.rack",
        "config.providers",
        "connections.max.idle.ms",
        "enable.metrics.push",
        "exclude.internal.topics",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "max.poll.interval.ms",
        "max.poll.records",
        "metadata.recovery.rebootstrap.trigger.ms",
        "metadata.recovery.strategy",
        "metric.reporters",
        "metrics.num.samples",
        "metrics.recording.level",
        "metrics.sample.window.ms",
        "partition.assignment.strategy",
        "receive.buffer.bytes",
        "security.providers",
        "send.buffer.bytes",
        "session.timeout.ms",
        "socket.connection.setup.timeout.max.ms",
    )
)
"""The rest of Kafka 4.3's consumer options, accepted with a warning: jobs for Spark's connector
have them.
"""

DEFAULT_POLL_TIMEOUT_MS: Final = 120_000
_PARTITION_FETCH_BYTES: Final = 8 * 1024 * 1024
"""Kafka's default of 1 MiB is for consumers of many partitions. A task reads one partition."""

Bound = int | Mapping[TopicPartition, int]
"""One value for every partition, or one for each."""


@dataclass(frozen=True, slots=True)
class OffsetBound:
    """A start or end: offsets (-2 earliest, -1 latest) or, with `by_time`, timestamps in ms since
    1970.
    """

    value: Bound
    by_time: bool = False
    option: str = ""


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a batch read. Exactly one of `topics`, `pattern` and `partitions` is set."""

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
    max_batch_bytes: int = DEFAULT_MAX_BYTES
    fetch_offset_retries: int = 3
    fetch_offset_retry_interval_ms: int = 10
    without_effect: tuple[str, ...] = ()
    """Accepted options without effect."""

    @classmethod
    def parse(cls, raw_options: Mapping[str, str]) -> SourceOptions:
        """Check and convert the options of a batch read. Raises ConfigError."""
        options = {key.lower(): str(value).strip() for key, value in raw_options.items()}
        _check_names(options)
        topics, pattern, partitions = _parse_topics(options)
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
            max_batch_bytes=_positive(options, MAX_BATCH_BYTES_OPTION) or DEFAULT_MAX_BYTES,
            fetch_offset_retries=_number(options, "fetchOffset.numRetries", 3),
            fetch_offset_retry_interval_ms=_number(options, "fetchOffset.retryIntervalMs", 10),
            without_effect=tuple(sorted(_KAFKA_WITHOUT_EFFECT.intersection(options))),
        )


def _check_names(options: Mapping[str, str]) -> None:
    for key in options:
        if key in _FORBIDDEN:
            raise ConfigError(f"option {_STREAM_OPTION_SPELLING.get(key, key)!r} is not allowed: {_FORBIDDEN[key]}")
        if key.startswith(_SECURITY):
            raise ConfigError(f"option {key!r} is not supported: the client speaks PLAINTEXT only")
        if key in _SPELLING or key in _KAFKA_SUPPORTED or key in _KAFKA_WITHOUT_EFFECT:
            continue
        close_matches = get_close_matches(key, (*_SPELLING, *_KAFKA_SUPPORTED, *_KAFKA_WITHOUT_EFFECT), n=1)
        hint = f"; did you mean {_SPELLING.get(close_matches[0], close_matches[0])}?" if close_matches else ""
        raise ConfigError(f"the tidelog source has no option {key!r}{hint}")


def _parse_topics(options: Mapping[str, str]) -> tuple[tuple[str, ...], str, tuple[TopicPartition, ...]]:
    strategies = [name for name in STRATEGIES if name.lower() in options]
    if len(strategies) != 1:
        problem = f"not {' and '.join(strategies)}" if strategies else "none is given"
        raise ConfigError(f"say what to read with exactly one of {', '.join(STRATEGIES)}: {problem}")
    text = options[strategies[0].lower()]
    if strategies[0] == "subscribe":
        topics = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not topics:
            raise ConfigError("subscribe names no topic; give one or several, separated by commas")
        return topics, "", ()
    if strategies[0] == "subscribePattern":
        if not text:
            raise ConfigError("subscribePattern is empty")
        compile_pattern(text)
        return (), text, ()
    return (), "", parse_assignment(text)


def compile_pattern(text: str) -> re.Pattern[str]:
    """Compile a subscribePattern, which as in Spark may match anywhere in a topic name. Raises
    ConfigError.

    Patterns are written for Java. Refuses patterns that Python cannot compile, and patterns with a
    warning that Python reads them differently (`[a&&b]`). Java's classes like `\\d` are ASCII.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return re.compile(text, re.ASCII)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ConfigError(f"subscribePattern {text!r} is no regular expression of Python's: {error}") from None


def parse_assignment(text: str) -> tuple[TopicPartition, ...]:
    """Parse `{"topic": [0, 1]}` to sorted partitions. Raises ConfigError."""
    expected = 'assign must be JSON like {"topic": [0, 1]}'
    value = _json_object(text, expected)
    partitions: set[TopicPartition] = set()
    for topic, numbers in value.items():
        if not isinstance(numbers, list) or not all(_is_number(number) and 0 <= number < 2**31 for number in numbers):
            raise ConfigError(f"{expected}, not {numbers!r} for {topic!r}")
        partitions.update(TopicPartition(topic, number) for number in numbers)
    if not partitions:
        raise ConfigError(f"{expected}; it names no partition")
    return tuple(sorted(partitions))


def parse_partition_values(option: str, text: str) -> dict[TopicPartition, int]:
    """Parse `{"topic": {"0": 23, "1": -2}}` to a number by partition.

    Raises ConfigError with `option`.
    """
    expected = f'{option} must be JSON like {{"topic": {{"0": 23, "1": -2}}}}'
    values: dict[TopicPartition, int] = {}
    for topic, by_partition in _json_object(text, expected).items():
        if not isinstance(by_partition, dict):
            raise ConfigError(f"{expected}, not {by_partition!r} for {topic!r}")
        for partition, value in by_partition.items():
            if not _is_partition(partition) or not _is_number(value):
                raise ConfigError(f"{expected}, not {partition!r}: {value!r} for {topic!r}")
            values[TopicPartition(topic, int(partition))] = value
    return values


def format_partition_values(values: Mapping[TopicPartition, int]) -> str:
    """The reverse of `parse_partition_values`, sorted, as Spark writes offsets."""
    nested: dict[str, dict[str, int]] = {}
    for (topic, partition), value in sorted(values.items()):
        nested.setdefault(topic, {})[str(partition)] = value
    return json.dumps(nested, separators=(",", ":"))


def _json_object(text: str, expected: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_object_without_duplicates)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{expected}, not {text[:200]!r}")
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a duplicate name, whose value would be ambiguous."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return value


def _is_partition(text: str) -> bool:
    return _is_digits(text) and int(text) < 2**31 and text == str(int(text))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _bound(options: Mapping[str, str], names: tuple[str, str, str], words: Mapping[str, int]) -> OffsetBound | None:
    timestamp, by_partition, offsets = names
    if timestamp.lower() in options:
        text = options[timestamp.lower()]
        if not _is_digits(text) or int(text) >= 2**63:
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
    if not _is_digits(text) or int(text) >= 2**31:
        raise ConfigError(f"{name} must be a whole number below 2^31, not {text[:40]!r}")
    return int(text)


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


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


def _consumer(options: Mapping[str, str]) -> ConsumerConfig:
    if not options.get("kafka.bootstrap.servers"):
        raise ConfigError("option 'kafka.bootstrap.servers' is missing; give host:port, several separated by commas")
    config: dict[str, Any] = {"client_id": "tidelog-spark", "max_partition_fetch_bytes": _PARTITION_FETCH_BYTES}
    for key, value in options.items():
        if key in _KAFKA_SUPPORTED:
            config[key.removeprefix("kafka.").replace(".", "_")] = value
    try:
        return ConsumerConfig.from_options(config)
    except ConfigError as error:
        raise ConfigError(f"kafka options: {error}") from None
