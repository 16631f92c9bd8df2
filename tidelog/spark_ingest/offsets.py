"""Resolves the bounds of a read on the present cluster: partitions and offsets.

Runs on the driver: once per batch read, and before each micro-batch of a stream. "latest" is the
high watermark (or the last stable offset under read_committed) at this moment, so every task reads
committed records only and a repeated task reads the same ones. An explicit offset may lie between
the two: its records exist, and the task waits for the transaction that holds them back. Nothing
here fetches records.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tidelog.client.groups.coordinator import Coordinator, GroupIdentity
from tidelog.client.model import OffsetAndMetadata, OffsetAndTimestamp, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.epoch_ends import Epochs, epoch_ends
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.network.offsets import list_offsets
from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError, join_some
from tidelog.protocol.messages.metadata import MetadataResponseTopic
from tidelog.spark_ingest.connecting import connect
from tidelog.spark_ingest.java_pattern import compile_java_pattern
from tidelog.spark_ingest.options import EARLIEST, LATEST, OffsetBound, SourceOptions
from tidelog.spark_ingest.planning import OffsetRange
from tidelog.spark_ingest.topic_watch import unless_gone

logger = logging.getLogger(__name__)

Offsets = dict[TopicPartition, int]
TopicIds = dict[str, bytes]

COMMIT_TIMEOUT_MS_MAX = 10_000
"""A stream does not wait longer for the commit of its progress, which only tools read."""


class DataLoss(Exception):
    """Requested records are gone.

    With failOnDataLoss=false the read continues with the remaining records.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. To read what is left, set the option failOnDataLoss to false")


class MissingPartition(KafkaError):
    """A partition to read that the asked broker does not know; another broker may have it."""

    def __init__(self, partition: TopicPartition, message: str) -> None:
        super().__init__(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message)
        self.partition = partition


class ResolvedRanges(NamedTuple):
    """The ranges of a batch read, and the ids of their topics."""

    ranges: list[OffsetRange]
    topic_ids: TopicIds


def resolve_ranges(options: SourceOptions) -> ResolvedRanges:
    """One range per partition, empty ones included. Raises KafkaError, ConfigError or DataLoss."""
    return asyncio.run(_resolve(options))


async def _resolve(options: SourceOptions) -> ResolvedRanges:
    cluster = await connect(options.consumer, options.consumer.default_api_timeout_ms)
    try:
        edges = await _edges_of_batch(cluster, options)
    finally:
        await cluster.close()
    topics, partitions, earliest, bounds, latest, ends = edges
    starting, ending = (bound.complete() for bound in bounds)
    ranges = []
    for partition in partitions:
        start = _resolve_special(starting[partition], earliest[partition], latest[partition])
        end = _resolve_special(ending[partition], earliest[partition], latest[partition])
        if start > end and ending[partition] != LATEST and not options.starting.group:
            raise ConfigError(
                f"{options.starting.option} of {partition} is offset {start}, above its {options.ending.option}, "
                f"offset {end}"
            )
        start, end = _clip_to_log(options, partition, start, end, earliest, ends)
        ranges.append(OffsetRange(*partition, start, end))
    return ResolvedRanges(ranges, _ids(topics))


async def _edges_of_batch(cluster: Cluster, options: SourceOptions) -> _Edges:
    bounds = (options.starting, options.ending)
    try:
        return await _edges(cluster, options, bounds)
    except KafkaError as error:
        # Another look finds what is there without a topic that was there a moment before, or with the new one.
        is_gone = error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and not isinstance(error, MissingPartition)
        if options.fail_on_data_loss or not is_gone:
            raise
        logger.warning("%s; the read is planned again", error)
    return await _edges(cluster, options, bounds)


class FirstOffsets(NamedTuple):
    """The offsets at which a stream begins, and the ids of its topics."""

    offsets: Offsets
    at_end: frozenset[TopicPartition]
    """The partitions that begin at the end of their log, as by `latest`."""
    without_start: frozenset[TopicPartition]
    """Partitions for which the options give no start."""
    topic_ids: TopicIds
    refusal: ConfigError | None
    """Why a new query cannot begin so. A query that runs its first micro-batch again may need no other start."""
    missing: MissingPartition | None = None
    """A topic or partition that is left out, which a new query needs."""
    trimmed: frozenset[TopicPartition] = frozenset()
    """Partitions whose start was looked up and is the first offset of a log that has lost some."""


async def find_first_offsets(cluster: Cluster, options: SourceOptions, omit_missing: bool = False) -> FirstOffsets:
    """Where a stream begins. `omit_missing` leaves out topics and partitions that do not exist.

    Raises KafkaError, or DataLoss for offsets that the logs lack.
    """
    edges = await _edges(cluster, options, (options.starting,), omit_missing)
    topics, partitions, earliest, ((starting, refusal),), latest, ends = edges
    offsets = {}
    for partition, bound in starting.items():
        start = _resolve_special(bound, earliest[partition], latest[partition])
        offsets[partition], _ = _clip_to_log(options, partition, start, start, earliest, ends)
    at_end = frozenset(partition for partition, bound in starting.items() if bound == LATEST)
    trimmed = frozenset(
        partition
        for partition, bound in starting.items()
        if (bound == EARLIEST or options.starting.by_time) and offsets[partition] == earliest[partition] > 0
    )
    without_start = frozenset(partitions).difference(offsets)
    return FirstOffsets(offsets, at_end, without_start, _ids(topics), refusal, trimmed=trimmed)


class _Edges(NamedTuple):
    """The topics and partitions to read, their logs' first offsets, readable ends and high watermarks, and the bounds
    of the read.
    """

    topics: list[MetadataResponseTopic]
    partitions: list[TopicPartition]
    earliest: Offsets
    bounds: list[_BoundOffsets]
    latest: Offsets
    high_watermarks: Offsets


async def _edges(
    cluster: Cluster, options: SourceOptions, bounds: Sequence[OffsetBound], omit_missing: bool = False
) -> _Edges:
    topics = await _topics(cluster, options, omit_missing)
    partitions = _all_partitions(topics, options, omit_missing)
    await _await_metadata(cluster, options, topics)
    earliest = await list_edge_offsets(cluster, options, partitions, EARLIEST)
    # `latest` stands for a time that no record has: records of that time may come after it, and none is before it.
    latest = await list_edge_offsets(cluster, options, partitions, LATEST)
    bound_offsets = [await _bound_offsets(cluster, options, bound, partitions) for bound in bounds]
    # A group may commit, and a record of the time come, behind it.
    is_looked_up = any(bound.group or bound.by_time for bound in bounds)
    is_at_latest = options.consumer.isolation_level == "read_uncommitted" and not is_looked_up
    ends = latest if is_at_latest else await _high_watermarks(cluster, options, partitions, latest)
    return _Edges(topics, partitions, earliest, bound_offsets, latest, ends)


class PresentEnds(NamedTuple):
    """The readable end of each existing partition, and the ids of the topics."""

    offsets: Offsets
    topic_ids: TopicIds
    leader_epochs: Mapping[TopicPartition, int] = MappingProxyType({})
    """Those of the leaders that gave the ends; without partitions whose leader does not say it."""


async def find_ends(cluster: Cluster, options: SourceOptions) -> PresentEnds:
    """The ends of all partitions of the read at this time.

    With failOnDataLoss=false it omits missing topics and partitions. Raises KafkaError.
    """
    topics = await _topics(cluster, options, omit_missing=not options.fail_on_data_loss)
    partitions = _all_partitions(topics, options, omit_missing=not options.fail_on_data_loss)
    await _await_metadata(cluster, options, topics)
    ends = await _list_offsets(cluster, options, dict.fromkeys(partitions, LATEST))
    epochs = {each: end.leader_epoch for each, end in ends.items() if end is not None and end.leader_epoch >= 0}
    return PresentEnds(_numbers(ends), _ids(topics), epochs)


async def find_replaced(
    cluster: Cluster, offsets: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, Epochs]
) -> Offsets:
    """Where the logs differ from those that were read up to `offsets`, of partitions where they differ before them.

    An unclean election has replaced the records from there on (KIP-320). Raises KafkaError.
    """
    ends = await epoch_ends(cluster, epochs)
    return {partition: end for partition, end in ends.items() if end < offsets[partition]}


def target_ends(target: PresentEnds, present: PresentEnds) -> PresentEnds:
    """The earlier ends `target` of the partitions that exist at this time; of a topic that was created again since, the
    present ones.
    """
    ids = present.topic_ids
    offsets = {
        each: target.offsets[each] if target.topic_ids[each.topic] == ids[each.topic] else end
        for each, end in present.offsets.items()
        if each in target.offsets
    }
    return PresentEnds(offsets, ids, present.leader_epochs)


async def find_log_starts(cluster: Cluster, options: SourceOptions, partitions: Sequence[TopicPartition]) -> Offsets:
    """The beginnings of these logs.

    With failOnDataLoss=false it omits missing topics and partitions. Raises KafkaError.
    """
    names = list(dict.fromkeys(partition.topic for partition in partitions))
    topics = await _fetch_topics(cluster, options, names, omit_missing=not options.fail_on_data_loss)
    existing = {TopicPartition(topic.name or "", each.partition_index) for topic in topics for each in topic.partitions}
    await _await_metadata(cluster, options, topics)
    return await list_edge_offsets(cluster, options, [each for each in partitions if each in existing], EARLIEST)


async def ends_after(
    cluster: Cluster, options: SourceOptions, present: PresentEnds, start: Mapping[TopicPartition, int]
) -> PresentEnds:
    """The same ends, at least `start` where a transaction holds back records before it, or the log has grown since."""
    behind = [partition for partition, end in present.offsets.items() if end < start.get(partition, end)]
    if not behind:
        return present
    marks = await _high_watermarks(cluster, options, behind, dict.fromkeys(behind, 0))
    held_back = {partition: start[partition] for partition in behind if marks[partition] >= start[partition]}
    return present._replace(offsets={**present.offsets, **held_back})


async def commit_offsets(cluster: Cluster, options: SourceOptions, offsets: Mapping[TopicPartition, int]) -> None:
    """Commit a stream's progress for the group of `commitOffsetsToGroup`. Raises KafkaError."""
    coordinator = Coordinator(cluster, options.commit_group)
    to_commit = {partition: OffsetAndMetadata(offset) for partition, offset in offsets.items()}
    timeout_ms = min(options.consumer.default_api_timeout_ms, COMMIT_TIMEOUT_MS_MAX)
    await coordinator.commit(to_commit, GroupIdentity(), timeout_ms)


def _clip_to_log(
    options: SourceOptions, partition: TopicPartition, start: int, end: int, starts: Offsets, ends: Offsets
) -> tuple[int, int]:
    """Limit the range to the offsets in the log.

    Raises DataLoss for a removed part when that is an error.
    """
    earliest, latest = starts[partition], ends[partition]
    loss = None
    if start < earliest:
        loss = f"{options.starting.option} of {partition} is {start}, but its log begins at {earliest}"
    elif start > latest:
        loss = f"{options.starting.option} of {partition} is {start}, but its log ends at {latest}"
    elif end > latest:
        loss = f"{options.ending.option} of {partition} is {end}, but its log ends at {latest}"
    if loss is not None and options.fail_on_data_loss:
        raise DataLoss(loss)
    if loss is not None:
        logger.warning("%s; the read goes on with what is left", loss)
    start = min(max(start, earliest), latest)
    return start, max(start, min(end, latest))


def _resolve_special(offset: int, earliest: int, latest: int) -> int:
    return earliest if offset == EARLIEST else latest if offset == LATEST else offset


async def _topics(cluster: Cluster, options: SourceOptions, omit_missing: bool = False) -> list[MetadataResponseTopic]:
    """The metadata of the topics to read.

    Raises KafkaError for a named topic that does not exist.
    """
    if options.pattern:
        pattern = compile_java_pattern(options.pattern)
        topics = (await cluster.fetch_metadata_within(None, options.consumer.default_api_timeout_ms)).topics
        matching = [topic for topic in topics if not topic.is_internal and pattern.search(topic.name or "")]
        return await _fetch_topics(cluster, options, [topic.name or "" for topic in matching], omit_missing=True)
    names = options.topics or tuple(dict.fromkeys(topic for topic, _ in options.partitions))
    return await _fetch_topics(cluster, options, names, omit_missing)


def selected(options: SourceOptions, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Those of the partitions that the read includes, if they exist."""
    if options.partitions:
        assigned = set(options.partitions)
        return [partition for partition in partitions if partition in assigned]
    if options.pattern:
        pattern = compile_java_pattern(options.pattern)
        return [partition for partition in partitions if pattern.search(partition.topic)]
    topics = set(options.topics)
    return [partition for partition in partitions if partition.topic in topics]


def _all_partitions(
    topics: Sequence[MetadataResponseTopic], options: SourceOptions, omit_missing: bool = False
) -> list[TopicPartition]:
    """The partitions to read, sorted.

    Raises KafkaError for an assigned partition that does not exist.
    """
    existing = sorted(
        TopicPartition(topic.name or "", partition.partition_index)
        for topic in topics
        for partition in topic.partitions
    )
    if not options.partitions:
        return existing
    partitions = set(existing)
    for partition in options.partitions:
        if partition not in partitions and not omit_missing:
            raise MissingPartition(partition, f"assign names {partition}, which does not exist")
    return [partition for partition in options.partitions if partition in partitions]


def _ids(topics: Iterable[MetadataResponseTopic]) -> TopicIds:
    return {topic.name or "": topic.topic_id for topic in topics}


async def _fetch_topics(
    cluster: Cluster, options: SourceOptions, names: Sequence[str], omit_missing: bool
) -> list[MetadataResponseTopic]:
    """The metadata of these topics, with retries: not every broker knows a new topic at once."""
    if not names:
        return []
    for attempt in range(options.fetch_offset_retries + 1):
        if attempt:
            await asyncio.sleep(options.fetch_offset_retry_interval_ms / 1000)
        response = await cluster.fetch_metadata_within(list(names), options.consumer.default_api_timeout_ms)
        topics = response.topics
        failed = [topic for topic in topics if topic.error_code and not topic.partitions]
        if not failed:
            return topics
    missing = [topic for topic in failed if topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    if omit_missing and len(missing) == len(failed):
        return [topic for topic in topics if topic.partitions]
    name = failed[0].name or ""
    if failed[0] in missing:
        partition = next((each for each in options.partitions if each.topic == name), TopicPartition(name, 0))
        raise MissingPartition(partition, f"topic {name!r} does not exist")
    raise KafkaError(ErrorCode.of(failed[0].error_code), f"topic {name!r} cannot be read")


async def _await_metadata(cluster: Cluster, options: SourceOptions, topics: Sequence[MetadataResponseTopic]) -> None:
    """Wait until the cluster's own metadata has these topics, new partitions and new ids included."""
    cluster.track(topic.name or "" for topic in topics)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + options.consumer.request_timeout_ms / 1000

    def is_known(topic: MetadataResponseTopic) -> bool:
        known = cluster.metadata.topics.get(topic.name or "")
        return known is not None and known.topic_id == topic.topic_id and len(known.partitions) >= len(topic.partitions)

    async def wait() -> None:
        while not all(map(is_known, topics)) and (remaining_s := deadline - loop.time()) > 0:
            await cluster.wait_for_metadata(remaining_s * 1000)

    await unless_gone(cluster, _ids(topics), wait())


async def list_edge_offsets(
    cluster: Cluster, options: SourceOptions, partitions: Iterable[TopicPartition], edge: int
) -> Offsets:
    """The beginning (EARLIEST) or readable end (LATEST) of each log. Raises KafkaError."""
    return _numbers(await _list_offsets(cluster, options, dict.fromkeys(partitions, edge)))


def _numbers(offsets: Mapping[TopicPartition, OffsetAndTimestamp | None]) -> Offsets:
    return {partition: each.offset if each is not None else 0 for partition, each in offsets.items()}


async def _high_watermarks(
    cluster: Cluster, options: SourceOptions, partitions: Sequence[TopicPartition], latest: Offsets
) -> Offsets:
    """The high watermarks, at least `latest`."""
    offsets = await _list_offsets(cluster, options, dict.fromkeys(partitions, LATEST), "read_uncommitted")
    # A log only grows, but the high watermark of a new leader may lag.
    return {
        partition: max(latest[partition], offset_result.offset if offset_result is not None else 0)
        for partition, offset_result in offsets.items()
    }


async def _list_offsets(
    cluster: Cluster, options: SourceOptions, timestamps: Mapping[TopicPartition, int], isolation_level: str = ""
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """The offsets, by the isolation level of the read unless another is given. Raises TopicGone, KafkaError."""
    config = options.consumer
    listing = list_offsets(
        cluster,
        timestamps,
        isolation_level=isolation_level or config.isolation_level,
        timeout_ms=config.default_api_timeout_ms,
    )
    return await unless_gone(cluster, dict.fromkeys((each.topic for each in timestamps), NO_TOPIC_ID), listing)


class _BoundOffsets(NamedTuple):
    """A bound by partition: an offset, -2 (earliest) or -1 (latest)."""

    offsets: Offsets
    refusal: ConfigError | None = None
    """What is wrong with the bound, as where a partition has none."""

    def complete(self) -> Offsets:
        """The bound of every partition. Raises ConfigError."""
        if self.refusal is not None:
            raise self.refusal
        return self.offsets


async def _bound_offsets(
    cluster: Cluster, options: SourceOptions, bound: OffsetBound, partitions: Sequence[TopicPartition]
) -> _BoundOffsets:
    if bound.group:
        return await _committed_offsets(cluster, options, bound, partitions)
    refusal: ConfigError | None = None
    if isinstance(bound.value, int):
        values = dict.fromkeys(partitions, bound.value)
    else:
        refusal = _incomplete(bound, partitions)
        values = {each: bound.value[each] for each in partitions if each in bound.value}
    if not bound.by_time:
        return _BoundOffsets(values, refusal)
    offsets: Offsets = {}
    for partition, offset_result in (await _list_offsets(cluster, options, values)).items():
        if offset_result is not None:
            offsets[partition] = offset_result.offset
        elif bound is options.ending or options.latest_when_no_timestamp_matches:
            offsets[partition] = LATEST
        else:
            refusal = refusal or ConfigError(
                f"{bound.option}: {partition} has no record at or after {values[partition]}; "
                "set startingOffsetsByTimestampStrategy to latest to begin at its end"
            )
            if not options.fail_on_data_loss:
                offsets[partition] = LATEST  # a first micro-batch that had records there runs again without them
    return _BoundOffsets(offsets, refusal)


async def _committed_offsets(
    cluster: Cluster, options: SourceOptions, bound: OffsetBound, partitions: Sequence[TopicPartition]
) -> _BoundOffsets:
    """The offsets that the bound's group has committed.

    Under read_committed it waits for the end of transactions that commit offsets.
    """
    assert isinstance(bound.value, int)
    is_committed_only = options.consumer.isolation_level == "read_committed"
    timeout_ms = options.consumer.default_api_timeout_ms
    coordinator = Coordinator(cluster, bound.group)
    committed = await coordinator.committed(partitions, timeout_ms, require_stable=is_committed_only)
    offsets = {each: committed[each].offset for each in partitions if each in committed}
    missing = [partition for partition in partitions if partition not in committed]
    if missing and bound.is_commit_required:
        names = join_some(missing)
        return _BoundOffsets(
            offsets, ConfigError(f"{bound.option}: group {bound.group!r} has committed no offset of {names}")
        )
    return _BoundOffsets(offsets | dict.fromkeys(missing, bound.value))


def _incomplete(bound: OffsetBound, partitions: Sequence[TopicPartition]) -> ConfigError | None:
    """An error unless a bound names exactly the partitions of the read, as in Spark."""
    assert not isinstance(bound.value, int)
    missing = [str(partition) for partition in partitions if partition not in bound.value]
    unread = [str(partition) for partition in sorted(bound.value.keys() - set(partitions))]
    if missing:
        hint = (
            ""
            if bound.by_time
            else "; use -2 for earliest"
            if bound.option.startswith("start")
            else "; use -1 for latest"
        )
        return ConfigError(
            f"{bound.option} must name every partition that is read; it lacks {join_some(missing)}{hint}"
        )
    if unread:
        return ConfigError(f"{bound.option} names partitions that are not read: {join_some(unread)}")
    return None
