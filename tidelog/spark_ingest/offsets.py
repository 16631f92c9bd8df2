"""What a read's bounds mean on this cluster now: which partitions there are, and the offsets between which to read.

Runs once per read, on the driver. "latest" is the high watermark (or the last stable offset under read_committed) at
this moment, so every task reads committed records only and a repeated task reads the same ones. An offset that is given
may lie between the two: its records are there, and the task waits for the transaction that holds them back. Nothing
here fetches records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from tidelog.client.model import OffsetAndTimestamp, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.offsets import list_offsets
from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataResponseTopic
from tidelog.spark_ingest.options import EARLIEST, LATEST, OffsetBound, SourceOptions, compile_pattern
from tidelog.spark_ingest.planning import OffsetRange

Offsets = dict[TopicPartition, int]


class DataLoss(Exception):
    """Records that were asked for are gone; with failOnDataLoss=false the read goes on with those that are left."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. To read what is left, set the option failOnDataLoss to false")


def resolve_ranges(options: SourceOptions) -> list[OffsetRange]:
    """One range per partition, empty ones included. Raises KafkaError, ConfigError or DataLoss."""
    return asyncio.run(_resolve(options))


async def _resolve(options: SourceOptions) -> list[OffsetRange]:
    cluster = Cluster(options.consumer)
    try:
        await cluster.start()
        partitions = await _partitions(cluster, options)
        earliest = await _edges(cluster, options, partitions, EARLIEST)
        latest = await _edges(cluster, options, partitions, LATEST)
        ends = await _high_watermarks(cluster, options, partitions, latest)
        starting = await _bound_offsets(cluster, options, options.starting, partitions)
        ending = await _bound_offsets(cluster, options, options.ending, partitions)
    finally:
        await cluster.close()
    ranges = []
    for partition in partitions:
        start = _known(starting[partition], earliest[partition], latest[partition])
        end = _known(ending[partition], earliest[partition], latest[partition])
        ranges.append(OffsetRange(*partition, *_within(options, partition, start, end, earliest, ends)))
    return ranges


def _within(
    options: SourceOptions, partition: TopicPartition, start: int, end: int, starts: Offsets, ends: Offsets
) -> tuple[int, int]:
    """The range as offsets that the log holds; what had to be cut off is data loss."""
    earliest, latest = starts[partition], ends[partition]
    lost = None
    if start < earliest:
        lost = f"{options.starting.option} of {partition} is {start}, but its log begins at {earliest}"
    elif start > latest:
        lost = f"{options.starting.option} of {partition} is {start}, but its log ends at {latest}"
    elif end > latest:
        lost = f"{options.ending.option} of {partition} is {end}, but its log ends at {latest}"
    if lost is not None and options.fail_on_data_loss:
        raise DataLoss(lost)
    start = min(max(start, earliest), latest)
    return start, max(start, min(end, latest))


def _known(offset: int, earliest: int, latest: int) -> int:
    return earliest if offset == EARLIEST else latest if offset == LATEST else offset


async def _partitions(cluster: Cluster, options: SourceOptions) -> list[TopicPartition]:
    """The partitions to read, sorted. A topic or partition that is named and not there is an error."""
    if options.pattern:
        pattern = compile_pattern(options.pattern)
        listed = (await cluster.fetch_metadata(None)).topics
        matching = [topic for topic in listed if not topic.is_internal and pattern.search(topic.name or "")]
        return _all_partitions(await _described(cluster, options, [topic.name or "" for topic in matching]))
    names = options.topics or tuple(dict.fromkeys(topic for topic, _ in options.partitions))
    there = _all_partitions(await _described(cluster, options, names))
    if options.topics:
        return there
    for partition in options.partitions:
        if partition not in there:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"assign names {partition}, which does not exist")
    return list(options.partitions)


def _all_partitions(topics: Sequence[MetadataResponseTopic]) -> list[TopicPartition]:
    return sorted(
        TopicPartition(topic.name or "", each.partition_index) for topic in topics for each in topic.partitions
    )


async def _described(cluster: Cluster, options: SourceOptions, names: Sequence[str]) -> list[MetadataResponseTopic]:
    """Metadata of these topics; a topic just created may need a moment to be known everywhere."""
    if not names:
        return []
    for attempt in range(options.fetch_offset_retries + 1):
        if attempt:
            await asyncio.sleep(options.fetch_offset_retry_interval_ms / 1000)
        topics = (await cluster.fetch_metadata(list(names))).topics
        failed = [topic for topic in topics if topic.error_code and not topic.partitions]
        if not failed:
            return topics
    code = ErrorCode.of(failed[0].error_code)
    what = "does not exist" if code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION else "cannot be read"
    raise KafkaError(code, f"topic {failed[0].name!r} {what}")


async def _edges(cluster: Cluster, options: SourceOptions, partitions: Sequence[TopicPartition], edge: int) -> Offsets:
    found = await _asked(cluster, options, dict.fromkeys(partitions, edge))
    return {partition: answer.offset if answer is not None else 0 for partition, answer in found.items()}


async def _high_watermarks(
    cluster: Cluster, options: SourceOptions, partitions: Sequence[TopicPartition], latest: Offsets
) -> Offsets:
    """Where the logs end for readers that look at no transactions; `latest` itself for those."""
    if options.consumer.isolation_level == "read_uncommitted":
        return latest
    timeout_ms = options.consumer.default_api_timeout_ms
    found = await list_offsets(cluster, dict.fromkeys(partitions, LATEST), timeout_ms=timeout_ms)
    # A log only grows, but a new leader may not know yet how far it is committed.
    return {
        partition: max(latest[partition], answer.offset if answer is not None else 0)
        for partition, answer in found.items()
    }


async def _asked(
    cluster: Cluster, options: SourceOptions, timestamps: Mapping[TopicPartition, int]
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    config = options.consumer
    return await list_offsets(
        cluster, timestamps, isolation_level=config.isolation_level, timeout_ms=config.default_api_timeout_ms
    )


async def _bound_offsets(
    cluster: Cluster, options: SourceOptions, bound: OffsetBound, partitions: Sequence[TopicPartition]
) -> Offsets:
    """The bound as an offset, -2 or -1 for each partition."""
    if isinstance(bound.value, int):
        values = dict.fromkeys(partitions, bound.value)
    else:
        _check_complete(bound, partitions)
        values = dict(bound.value)
    if not bound.by_time:
        return values
    offsets: Offsets = {}
    for partition, answer in (await _asked(cluster, options, values)).items():
        if answer is not None:
            offsets[partition] = answer.offset
        elif bound is options.ending or options.latest_when_no_timestamp_matches:
            offsets[partition] = LATEST
        else:
            raise ConfigError(
                f"{bound.option}: {partition} has no record at or after {values[partition]}; "
                "set startingOffsetsByTimestampStrategy to latest to begin at its end"
            )
    return offsets


def _check_complete(bound: OffsetBound, partitions: Sequence[TopicPartition]) -> None:
    """Bounds by partition must name every partition that is read and no other, as in Spark."""
    assert not isinstance(bound.value, int)
    missing = [str(partition) for partition in partitions if partition not in bound.value]
    unread = [str(partition) for partition in sorted(bound.value) if partition not in set(partitions)]
    if missing:
        hint = (
            ""
            if bound.by_time
            else "; use -2 for earliest"
            if bound.option.startswith("start")
            else "; use -1 for latest"
        )
        raise ConfigError(f"{bound.option} must name every partition that is read, {_some(missing)} is missing{hint}")
    if unread:
        raise ConfigError(f"{bound.option} names {_some(unread)}, which is not read")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
