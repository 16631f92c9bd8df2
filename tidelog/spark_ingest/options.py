"""The options of `format("tidelog")`, parsed and checked before any connection.

Pure: text in, one frozen `SourceOptions` out, or a ConfigError of one line that names the option.
`offsets.py` looks up topics and offsets later. Names and rules are those of Spark's
KafkaSourceProvider. Spark passes keys in lower case; they are matched without regard to case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tidelog.client.arguments import shown
from tidelog.client.config import ConsumerConfig
from tidelog.client.model import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP, TopicPartition
from tidelog.protocol.batches.compression import DEFAULT_MAX_BYTES
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.java_pattern import compile_java_pattern
from tidelog.spark_ingest.option_checks import (
    check_given,
    check_name,
    client_config,
    client_options,
    flag,
    is_digits,
    lower_names,
    positive_number,
    whole_number,
)
from tidelog.spark_ingest.option_table import (
    BATCH,
    BOTH,
    FORBIDDEN,
    KAFKA_SUPPORTED,
    KAFKA_WITHOUT_EFFECT,
    MODES,
    SPELLING,
    STREAM,
    WRONG_MODE,
)

EARLIEST: Final = EARLIEST_TIMESTAMP
LATEST: Final = LATEST_TIMESTAMP

STRATEGIES: Final = ("subscribe", "subscribePattern", "assign")

COMMITTED: Final = "committed"

MAX_BATCH_BYTES_OPTION: Final = "maxDecompressedBatchBytes"
"""Not in Spark: the maximum decompressed size of a record batch, which bounds a task's memory."""

# For each bound: one timestamp, timestamps by partition, offsets. The first option present counts.
_STARTING: Final = ("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets")
_ENDING: Final = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")

DEFAULT_MAX_TRIGGER_DELAY_MS: Final = 15 * 60 * 1000
DEFAULT_POLL_TIMEOUT_MS: Final = 120_000
_TOPIC_CHARACTERS_MAX: Final = 249
_KINDS: Final = {BATCH: "batch read", STREAM: "stream"}
_PARTITION_FETCH_BYTES: Final = 8 * 1024 * 1024
"""Kafka's default of 1 MiB is for consumers of many partitions. A task reads one partition."""

_EXPECTED_VALUES: Final = '{} must be {}JSON like {{"topic": {{"0": 23, "1": -2}}}}'

_LONG_NUMBERS: Final = (
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxRecordsPerPartition",
    "minRecordsPerPartition",
)
_UNITS_US: Final = {
    "us": 1,
    "": 1000,
    "ms": 1000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}

Bound = int | Mapping[TopicPartition, int]
"""One value for every partition, or one for each."""


@dataclass(frozen=True, slots=True)
class OffsetBound:
    """A start or end: offsets (-2 earliest, -1 latest) or, with `by_time`, timestamps in ms since
    1970.

    With `group` it is the group's committed offsets, and `value` (EARLIEST or LATEST) is for
    partitions without one; `is_commit_required` makes such a partition an error.
    """

    value: Bound
    by_time: bool = False
    option: str = ""
    group: str = ""
    is_commit_required: bool = False


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a batch read or a stream. Exactly one of `topics`, `pattern` and `partitions`
    is set.
    """

    consumer: ConsumerConfig
    topics: tuple[str, ...] = ()
    pattern: str = ""
    partitions: tuple[TopicPartition, ...] = ()
    starting: OffsetBound = field(default_factory=lambda: OffsetBound(EARLIEST, option="startingOffsets"))
    ending: OffsetBound = field(default_factory=lambda: OffsetBound(LATEST, option="endingOffsets"))
    latest_when_no_timestamp_matches: bool = False
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    min_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    poll_timeout_ms: int = DEFAULT_POLL_TIMEOUT_MS
    max_batch_bytes: int = DEFAULT_MAX_BYTES
    fetch_offset_retries: int = 3
    fetch_offset_retry_interval_ms: int = 10
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = DEFAULT_MAX_TRIGGER_DELAY_MS
    commit_group: str = ""
    """The group that gets a stream's progress as commits; empty for none."""
    without_effect: tuple[str, ...] = ()
    """Accepted options without effect."""

    @property
    def may_begin_later(self) -> bool:
        """Whether a later look may find a later start within a log, though retention has removed nothing.

        By time it does where compaction has removed the record.
        """
        return bool(self.starting.group) or self.starting.by_time

    @classmethod
    def parse(cls, raw_options: Mapping[str, str], mode: str = BATCH) -> SourceOptions:
        """Check and convert the options of a batch read (BATCH) or a stream (STREAM). Raises
        ConfigError.
        """
        check_given(raw_options)
        options = lower_names(raw_options)
        _check_names(options, mode)
        topics, pattern, partitions = _parse_topics(options)
        starting, ending = _starting(options, mode), _ending(options)
        _check_order(starting, ending)
        min_offsets = _positive(options, "minOffsetsPerTrigger")
        max_offsets = _positive(options, "maxOffsetsPerTrigger")
        if min_offsets and max_offsets and min_offsets > max_offsets:
            raise ConfigError(f"minOffsetsPerTrigger ({min_offsets}) is above maxOffsetsPerTrigger ({max_offsets})")
        without_effect = KAFKA_WITHOUT_EFFECT.intersection(options)
        if flag(options, "pushFilters", False):
            without_effect |= {"pushFilters"}
        if starting.group:
            without_effect -= {"kafka.group.id"}
        return cls(
            consumer=_consumer(options),
            topics=topics,
            pattern=pattern,
            partitions=partitions,
            starting=starting,
            ending=ending,
            latest_when_no_timestamp_matches=_by_timestamp_strategy(options),
            min_partitions=_positive(options, "minPartitions"),
            max_records_per_partition=_positive(options, "maxRecordsPerPartition"),
            min_records_per_partition=_min_records(options),
            fail_on_data_loss=flag(options, "failOnDataLoss", True),
            include_headers=flag(options, "includeHeaders", False),
            poll_timeout_ms=_positive(options, "kafkaConsumer.pollTimeoutMs") or DEFAULT_POLL_TIMEOUT_MS,
            max_batch_bytes=_positive(options, MAX_BATCH_BYTES_OPTION) or DEFAULT_MAX_BYTES,
            fetch_offset_retries=_number(options, "fetchOffset.numRetries", 3),
            fetch_offset_retry_interval_ms=_number(options, "fetchOffset.retryIntervalMs", 10),
            max_offsets_per_trigger=max_offsets,
            min_offsets_per_trigger=min_offsets,
            max_trigger_delay_ms=_duration_ms(options, "maxTriggerDelay", DEFAULT_MAX_TRIGGER_DELAY_MS),
            commit_group=_group(options, "commitOffsetsToGroup"),
            without_effect=tuple(sorted(without_effect)),
        )


def wants_headers(raw_options: Mapping[str, str]) -> bool:
    """`includeHeaders`, for the schema: Spark asks for it before it says whether the read is a
    stream.

    Raises ConfigError, also for an option that neither kind of read has.
    """
    options = lower_names(raw_options)
    _check_names(options, BOTH)
    return flag(options, "includeHeaders", False)


def _check_names(options: Mapping[str, str], mode: str) -> None:
    for key in options:
        if BOTH not in (mode, MODES.get(key, BOTH)) and MODES[key] != mode:
            raise ConfigError(f"option {SPELLING[key]!r} is not allowed in a {_KINDS[mode]}: {WRONG_MODE[key]}")
        check_name(key, SPELLING, KAFKA_SUPPORTED | KAFKA_WITHOUT_EFFECT, FORBIDDEN, "source")


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
        compile_java_pattern(text)
        return (), text, ()
    return (), "", parse_assignment(text)


def parse_assignment(text: str) -> tuple[TopicPartition, ...]:
    """Parse `{"topic": [0, 1]}` to sorted partitions. Raises ConfigError."""
    expected = 'assign must be JSON like {"topic": [0, 1]}'
    value = _json_object(text, expected)
    partitions: set[TopicPartition] = set()
    for topic, numbers in value.items():
        if not isinstance(numbers, list) or not all(_is_number(number) and 0 <= number < 2**31 for number in numbers):
            raise ConfigError(f"{expected}, not {shown(numbers)} for {shown(topic)}")
        partitions.update(TopicPartition(topic, number) for number in numbers)
    if not partitions:
        raise ConfigError(f"{expected}; it names no partition")
    return tuple(sorted(partitions))


def parse_partition_values(option: str, text: str, words: Sequence[str] = ()) -> dict[TopicPartition, int]:
    """Parse `{"topic": {"0": 23, "1": -2}}` to a number by partition.

    Raises ConfigError with `option`, and with the `words` that it takes as well.
    """
    expected = _EXPECTED_VALUES.format(option, ", ".join((*words, "or ")) if words else "")
    return read_partition_values(option, _json_object(text, expected))


def read_partition_values(option: str, value: Mapping[str, Any]) -> dict[TopicPartition, int]:
    """`parse_partition_values` of JSON that is parsed already."""
    expected = _EXPECTED_VALUES.format(option, "")
    values: dict[TopicPartition, int] = {}
    for topic, by_partition in value.items():
        if not isinstance(by_partition, dict):
            raise ConfigError(f"{expected}, not {shown(by_partition)} for {shown(topic)}")
        for partition, number in by_partition.items():
            if not _is_partition(partition) or not _is_number(number):
                raise ConfigError(f"{expected}, not {shown(partition)}: {shown(number)} for {shown(topic)}")
            values[TopicPartition(topic, int(partition))] = number
    return values


def to_partition_object(values: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """The reverse of `read_partition_values`, sorted by topic and partition number."""
    nested: dict[str, dict[str, int]] = {}
    for (topic, partition), value in sorted(values.items()):
        nested.setdefault(topic, {})[str(partition)] = value
    return nested


def _json_object(text: str, expected: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_object_without_duplicates)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{expected}, not {shown(text)}")
    return value


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a duplicate name, whose value would be ambiguous."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return value


def _name(partition: TopicPartition) -> str:
    """The partition for an error: what no topic can be named is cut."""
    return str(partition._replace(topic=partition.topic[:_TOPIC_CHARACTERS_MAX]))


def _is_partition(text: str) -> bool:
    return is_digits(text) and int(text) < 2**31 and text == str(int(text))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _bound(options: Mapping[str, str], names: tuple[str, str, str], words: Mapping[str, int]) -> OffsetBound | None:
    timestamp, by_partition, offsets = names
    if timestamp.lower() in options:
        text = options[timestamp.lower()]
        if not is_digits(text) or int(text) >= 2**63:
            raise ConfigError(f"{timestamp} must be milliseconds since 1970, not {shown(text)}")
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
        # Only the start may be that of a group.
        more_words = () if offsets == _ENDING[-1] else (COMMITTED,)
        values = parse_partition_values(offsets, text, (*words, *more_words))
        for partition, value in values.items():
            if value < 0 and value not in words.values():
                allowed = " or ".join(f"{number} ({word})" for word, number in words.items())
                raise ConfigError(
                    f"{offsets} of {_name(partition)} cannot be {value} in this read; {allowed} or an offset"
                )
        return OffsetBound(values, option=offsets)
    return None


def _starting(options: Mapping[str, str], mode: str) -> OffsetBound:
    words = {"earliest": EARLIEST}
    default = EARLIEST
    if mode == STREAM:
        words["latest"] = default = LATEST
    offsets = _effective_offsets(options, _STARTING)
    if offsets == COMMITTED:
        return _starting_committed(options, mode)
    if options.get("startingoffsets", "").lower() != COMMITTED:
        _refuse_without_committed(options)
    if offsets == "latest" and mode == BATCH:
        raise ConfigError("startingOffsets cannot be latest in a batch read: there would be nothing to read")
    return _bound(options, _STARTING, words) or OffsetBound(default, option="startingOffsets")


def _effective_offsets(options: Mapping[str, str], names: tuple[str, str, str]) -> str:
    """The offsets of a bound in lower case; empty where a timestamp goes before them."""
    *timestamps, offsets = names
    return "" if any(name.lower() in options for name in timestamps) else options.get(offsets.lower(), "").lower()


def _starting_committed(options: Mapping[str, str], mode: str) -> OffsetBound:
    group = _group(options, "startingOffsetsGroup")
    group = group or _group(options, "kafka.group.id") or _group(options, "commitOffsetsToGroup")
    if not group:
        raise ConfigError("startingOffsets=committed needs a group: give startingOffsetsGroup or kafka.group.id")
    fallback = options.get("startingoffsetswithoutcommit", "earliest").lower()
    fallbacks = {"earliest": EARLIEST, "error": EARLIEST, "latest": LATEST}
    if fallback not in fallbacks or (fallback == "latest" and mode == BATCH):
        allowed = "earliest or error" if mode == BATCH else "earliest, latest or error"
        raise ConfigError(f"startingOffsetsWithoutCommit must be {allowed}, not {shown(fallback)}")
    return OffsetBound(
        fallbacks[fallback], option="startingOffsets", group=group, is_commit_required=fallback == "error"
    )


def _refuse_without_committed(options: Mapping[str, str]) -> None:
    for name in ("startingOffsetsGroup", "startingOffsetsWithoutCommit"):
        if name.lower() in options:
            raise ConfigError(f"{name} has a meaning with startingOffsets=committed only")


def _ending(options: Mapping[str, str]) -> OffsetBound:
    if _effective_offsets(options, _ENDING) == "earliest":
        raise ConfigError("endingOffsets cannot be earliest in a batch read: there would be nothing to read")
    return _bound(options, _ENDING, {"latest": LATEST}) or OffsetBound(LATEST, option="endingOffsets")


def _check_order(starting: OffsetBound, ending: OffsetBound) -> None:
    """Raise ConfigError when both bounds name partitions and do not fit each other, as in Spark."""
    if isinstance(starting.value, int) or isinstance(ending.value, int) or starting.by_time != ending.by_time:
        return
    if starting.value.keys() != ending.value.keys():
        odd = min(starting.value.keys() ^ ending.value.keys())
        raise ConfigError(
            f"{starting.option} and {ending.option} must name the same partitions; {_name(odd)} is in one only"
        )
    for partition, start in starting.value.items():
        end = ending.value[partition]
        if start > end >= 0:
            raise ConfigError(f"{starting.option} of {_name(partition)} is {start}, above its {ending.option}, {end}")


def _by_timestamp_strategy(options: Mapping[str, str]) -> bool:
    text = options.get("startingoffsetsbytimestampstrategy", "error").lower()
    if text not in ("error", "latest"):
        raise ConfigError(f"startingOffsetsByTimestampStrategy must be error or latest, not {shown(text)}")
    return text == "latest"


def _bits(name: str) -> int:
    return 63 if name in _LONG_NUMBERS else 31


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    return whole_number(options, name, default, bits=_bits(name))


def _min_records(options: Mapping[str, str]) -> int | None:
    smallest, largest = _positive(options, "minRecordsPerPartition"), _positive(options, "maxRecordsPerPartition")
    if smallest and "minpartitions" in options:
        raise ConfigError("minRecordsPerPartition makes tasks fewer and minPartitions more: give one of them")
    if smallest and largest and smallest > largest:
        raise ConfigError(f"minRecordsPerPartition ({smallest}) is above maxRecordsPerPartition ({largest})")
    return smallest


def _duration_ms(options: Mapping[str, str], name: str, default_ms: int) -> int:
    """A time as Spark writes it: a number with a unit, milliseconds without one."""
    text = options.get(name.lower())
    if text is None:
        return default_ms
    match = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", text.lower())
    if match is None or match[2] not in _UNITS_US:
        raise ConfigError(f"{name} must be a time such as 90s, 15m or 1h, not {shown(text)}")
    return int(match[1]) * _UNITS_US[match[2]] // 1000


def _group(options: Mapping[str, str], name: str) -> str:
    group = options.get(name.lower())
    if group == "":
        raise ConfigError(f"{name} is empty; give the name of a group")
    return group or ""


def _positive(options: Mapping[str, str], name: str) -> int | None:
    return positive_number(options, name, 0, bits=_bits(name)) or None


def _consumer(options: Mapping[str, str]) -> ConsumerConfig:
    defaults = {"client_id": "tidelog-spark", "max_partition_fetch_bytes": _PARTITION_FETCH_BYTES}
    return client_config(ConsumerConfig, client_options(options, KAFKA_SUPPORTED, defaults))
