"""The options of `format("tidelog")` as a table: name, kind of read, default, meaning, example.

Pure data. `options.py` checks names against it, and docs/spark.md is written from it. Names and
rules are those of Spark's KafkaSourceProvider where Spark has the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

BATCH: Final = "batch"
STREAM: Final = "stream"
BOTH: Final = "batch and stream"


class SourceOption(NamedTuple):
    """One option of the source. `mode` is BATCH, STREAM or BOTH."""

    name: str
    mode: str
    default: str
    meaning: str
    example: str
    in_spark: bool = True
    """Whether Spark's own Kafka source has the option."""


SOURCE_OPTIONS: Final = (
    SourceOption("subscribe", BOTH, "", "topics, separated by commas", "flights,delays"),
    SourceOption(
        "subscribePattern",
        BOTH,
        "",
        "a regular expression of Java that may match anywhere in a topic name: `^flights$` matches one topic, "
        "`flights` all topics that contain it. An expression that Python cannot read in the same way is refused",
        "^flights-.*$",
    ),
    SourceOption(
        "assign",
        BOTH,
        "",
        "partitions by topic. One that does not exist is an error; Spark's connector passes over it without a word",
        '{"flights": [0, 2]}',
    ),
    SourceOption(
        "startingOffsets",
        BOTH,
        "`earliest`; in a stream `latest`",
        "`earliest`, `latest` (streams only), `committed` (the offsets of a group), or offsets by partition: -2 is "
        "earliest, -1 is latest. A stream uses it on its first start only; later starts continue at the checkpoint",
        '{"flights": {"0": 100, "1": -2}}',
    ),
    SourceOption("startingTimestamp", BOTH, "", "milliseconds since 1970, for all partitions", "1700000000000"),
    SourceOption(
        "startingOffsetsByTimestamp",
        BOTH,
        "",
        "milliseconds since 1970, by partition",
        '{"flights": {"0": 1700000000000}}',
    ),
    SourceOption(
        "startingOffsetsByTimestampStrategy",
        BOTH,
        "`error`",
        "the action for a partition without a record that late: `error`, or `latest` to begin at its end",
        "latest",
    ),
    SourceOption(
        "startingOffsetsGroup",
        BOTH,
        "`kafka.group.id`, or the group of `commitOffsetsToGroup`",
        "the group whose committed offsets are the start with `startingOffsets` = `committed`",
        "reports",
        in_spark=False,
    ),
    SourceOption(
        "startingOffsetsWithoutCommit",
        BOTH,
        "`earliest`",
        "the start of a partition for which that group has committed nothing: `earliest`, `latest` or `error`",
        "error",
        in_spark=False,
    ),
    SourceOption(
        "endingOffsets", BATCH, "`latest`", "`latest`, or offsets by partition: -1 is latest", '{"flights": {"0": 200}}'
    ),
    SourceOption("endingTimestamp", BATCH, "", "milliseconds since 1970, for all partitions", "1700000360000"),
    SourceOption(
        "endingOffsetsByTimestamp",
        BATCH,
        "",
        "milliseconds since 1970, by partition",
        '{"flights": {"0": 1700000360000}}',
    ),
    SourceOption(
        "maxOffsetsPerTrigger",
        STREAM,
        "no limit",
        "the number of offsets in a micro-batch, shared among partitions in proportion to their backlog",
        "1000000",
    ),
    SourceOption(
        "minOffsetsPerTrigger",
        STREAM,
        "no limit",
        "a micro-batch waits for this number of new offsets. It works together with `maxOffsetsPerTrigger`. A stream "
        "with the trigger AvailableNow does not wait",
        "10000",
    ),
    SourceOption(
        "maxTriggerDelay", STREAM, "`15m`", "the longest wait for `minOffsetsPerTrigger`, as `90s`, `15m` or `1h`", "5m"
    ),
    SourceOption(
        "commitOffsetsToGroup",
        STREAM,
        "",
        "a group for which the stream commits its progress after each micro-batch, so that every lag tool shows it. "
        "The group must have no members",
        "reports",
        in_spark=False,
    ),
    SourceOption(
        "failOnDataLoss",
        BOTH,
        "`true`",
        "`true`: an error when offsets of the range are gone, or a topic was deleted. `false`: a warning, and the "
        "remaining records are read",
        "false",
    ),
    SourceOption(
        "minPartitions",
        BOTH,
        "",
        "the number of tasks to reach: larger ranges are divided. Rounding may miss it by one for each partition",
        "64",
    ),
    SourceOption("maxRecordsPerPartition", BOTH, "", "the largest number of offsets in a task", "500000"),
    SourceOption(
        "minRecordsPerPartition",
        BOTH,
        "",
        "smaller ranges share a task, until it has so many offsets. Without it each range is a task of its own. Not "
        "together with `minPartitions`",
        "10000",
        in_spark=False,
    ),
    SourceOption("includeHeaders", BOTH, "`false`", "whether there is a column `headers`", "true"),
    SourceOption(
        "pushFilters",
        BATCH,
        "",
        "accepted without effect: Spark would read what one filter has left also for other filters of the same "
        "DataFrame",
        "true",
        in_spark=False,
    ),
    SourceOption("kafkaConsumer.pollTimeoutMs", BOTH, "`120000`", "the time that a task waits for records", "30000"),
    SourceOption(
        "fetchOffset.numRetries", BOTH, "`3`", "how often the driver asks again for a topic or an offset", "10"
    ),
    SourceOption("fetchOffset.retryIntervalMs", BOTH, "`10`", "the time between these attempts", "1000"),
    SourceOption("groupIdPrefix", BOTH, "", "accepted without effect: the source joins no group", "spark"),
    SourceOption(
        "maxDecompressedBatchBytes",
        BOTH,
        "`134217728`",
        "the maximum decompressed size of a record batch. A larger batch ends the read with an error that names its "
        "offset",
        "268435456",
        in_spark=False,
    ),
)

SPELLING: Final[Mapping[str, str]] = {option.name.lower(): option.name for option in SOURCE_OPTIONS}
MODES: Final[Mapping[str, str]] = {option.name.lower(): option.mode for option in SOURCE_OPTIONS}

WRONG_MODE: Final[Mapping[str, str]] = {
    "maxoffsetspertrigger": "it shapes streams; in a batch read maxRecordsPerPartition bounds what one task reads",
    "minoffsetspertrigger": "it shapes streams; a batch read reads what there is",
    "maxtriggerdelay": "it shapes streams; a batch read reads what there is",
    "commitoffsetstogroup": "a batch read has no progress to commit; it shapes streams",
    "endingoffsets": "ending offset not valid in streaming queries; the trigger AvailableNow ends a stream at the end "
    "of the present records",
    "endingoffsetsbytimestamp": "ending timestamp not valid in streaming queries; read a batch instead",
    "endingtimestamp": "ending timestamp not valid in streaming queries; read a batch instead",
    "pushfilters": "Spark pushes filters into batch reads only",
}
"""Why an option is refused in the other kind of read."""

FORBIDDEN: Final[Mapping[str, str]] = {
    "kafka.auto.offset.reset": "say where to begin with startingOffsets",
    "kafka.key.deserializer": "keys come as binary columns; cast them afterwards",
    "kafka.value.deserializer": "values come as binary columns; cast them afterwards",
    "kafka.key.serializer": "keys come as binary columns; cast them afterwards",
    "kafka.value.serializer": "values come as binary columns; cast them afterwards",
    "kafka.enable.auto.commit": "the source commits nothing by itself; commitOffsetsToGroup does in a stream",
    "kafka.interceptor.classes": "there is no JVM to run them",
    "path": "the option subscribe names the topics; write load() without a path",
    "topic": "the option subscribe names the topics to read",
    "provider": "Spark hands the options of a table to no source in Python; create a temporary view instead",
}

KAFKA_SUPPORTED: Final = frozenset(
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
        "fetch.max.bytes",
        "fetch.max.wait.ms",
        "max.partition.fetch.bytes",
        "check.crcs",
        "isolation.level",
    )
)
"""Options of Kafka's consumer that have an effect on a read without a group."""

KAFKA_CLIENT_WITHOUT_EFFECT: Final = frozenset(
    f"kafka.{name}"
    for name in (
        "client.dns.lookup",
        "config.providers",
        "connections.max.idle.ms",
        "enable.metrics.push",
        "metadata.recovery.rebootstrap.trigger.ms",
        "metadata.recovery.strategy",
        "metric.reporters",
        "metrics.num.samples",
        "metrics.recording.level",
        "metrics.sample.window.ms",
        "receive.buffer.bytes",
        "security.providers",
        "send.buffer.bytes",
        "socket.connection.setup.timeout.max.ms",
    )
)
"""Options of all clients of Kafka 4.3 that change nothing here: jobs for Spark's connector have them."""

KAFKA_WITHOUT_EFFECT: Final = KAFKA_CLIENT_WITHOUT_EFFECT | frozenset(
    f"kafka.{name}"
    for name in (
        "allow.auto.create.topics",
        "auto.commit.interval.ms",
        "client.rack",
        "exclude.internal.topics",
        "fetch.min.bytes",
        "group.id",
        "group.instance.id",
        "group.protocol",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "max.poll.interval.ms",
        "max.poll.records",
        "partition.assignment.strategy",
        "session.timeout.ms",
    )
)
"""The rest of Kafka 4.3's consumer options, accepted with a warning: jobs for Spark's connector
have them. `kafka.group.id` has an effect with committed offsets.
"""
