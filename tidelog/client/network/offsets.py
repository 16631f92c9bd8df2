"""Offsets by time, and log start and end offsets: ListOffsets to the leaders, with retries.

Used by consumer, admin and the raw reader. Stateless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from tidelog.client.model import OffsetAndTimestamp, PartitionErrors, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.leaders import ask_leaders
from tidelog.protocol.errors import ErrorCode, KafkaError, counted, join_some
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)

ISOLATION = {"read_uncommitted": 0, "read_committed": 1}
_CONSUMER_REPLICA_ID = -1


async def list_offsets(
    cluster: Cluster,
    timestamps: Mapping[TopicPartition, int],
    *,
    isolation_level: str = "read_uncommitted",
    timeout_ms: float,
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """For each partition, the first offset at or after a timestamp in ms; None when no record is
    that late.

    Timestamp -1 means the end, -2 the beginning, -3 the record with the latest timestamp. Raises
    KafkaError, at the latest PartitionErrors with REQUEST_TIMED_OUT after `timeout_ms`.
    """
    deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
    refreshes_before = cluster.refreshes_begun
    offsets: dict[TopicPartition, OffsetAndTimestamp | None] = {}
    errors: dict[TopicPartition, KafkaError] = {}

    async def ask(partitions: list[TopicPartition]) -> Iterable[TopicPartition]:
        led = [partition for partition in partitions if cluster.metadata.leader(partition) >= 0]
        refused = await list_offsets_once(
            cluster,
            {partition: timestamps[partition] for partition in partitions},
            isolation_level=isolation_level,
            on_offsets=offsets.update,
            refreshes_before=refreshes_before,
        )
        # The others have errors of the metadata, which may be older than this call: a refresh comes first.
        raise_lasting(refused[partition] for partition in led if partition in refused)
        errors.update(refused)
        return [partition for partition in partitions if partition not in offsets]

    cluster.track({partition.topic for partition in timestamps})
    await ask_leaders(cluster, timestamps, ask, deadline)
    missing = [partition for partition in timestamps if partition not in offsets]
    if missing:
        raise _not_answered(offsets, missing, errors, timeout_ms)
    return offsets


def _not_answered(
    offsets: Mapping[TopicPartition, OffsetAndTimestamp | None],
    missing: Sequence[TopicPartition],
    errors: Mapping[TopicPartition, KafkaError],
    timeout_ms: float,
) -> PartitionErrors:
    """The error of these missing partitions. Those without an error of their own have waited until the end."""
    silence = KafkaError(ErrorCode.REQUEST_TIMED_OUT, "the leader did not answer")
    causes = {partition: errors.get(partition, silence) for partition in missing}

    def problem(names: str, cause: KafkaError) -> str:
        return f"offsets of {names} not found in {timeout_ms:.0f} ms: {cause}"

    return PartitionErrors(
        ErrorCode.REQUEST_TIMED_OUT,
        problem(join_some(missing), causes[missing[0]]),
        offsets,
        {each: KafkaError(ErrorCode.REQUEST_TIMED_OUT, problem(str(each), cause)) for each, cause in causes.items()},
    )


async def list_offsets_once(
    cluster: Cluster,
    timestamps: Mapping[TopicPartition, int],
    *,
    isolation_level: str,
    on_offsets: Callable[[dict[TopicPartition, OffsetAndTimestamp | None]], None],
    refreshes_before: int = -1,
) -> dict[TopicPartition, KafkaError]:
    """Send one request to each leader, in parallel. `on_offsets` gets the offsets of each response
    as it arrives. That a partition does not exist is believed of metadata of a refresh behind `refreshes_before`.

    Returns the errors by partition, so that one does not hold up the others. Raises the KafkaError of partitions that
    do not exist.
    """
    cluster.track({partition.topic for partition in timestamps})
    by_leader: dict[int, dict[TopicPartition, int]] = {}
    for partition, timestamp in timestamps.items():
        by_leader.setdefault(cluster.metadata.leader(partition), {})[partition] = timestamp
    leaderless = by_leader.pop(-1, {})
    errors: dict[TopicPartition, KafkaError] = {}

    async def request(leader: int, timestamps: dict[TopicPartition, int]) -> None:
        try:
            offsets, refused = await _request_from_leader(cluster, leader, timestamps, isolation_level)
        except KafkaError as error:
            errors.update(dict.fromkeys(timestamps, error))
        else:
            errors.update(refused)
            on_offsets(offsets)

    calls = [request(leader, part) for leader, part in by_leader.items()]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        if error is not None:
            raise error
    raise_for_missing_partitions(cluster, leaderless, refreshes_before)
    errors.update({each: no_leader(cluster, each) for each in leaderless})
    return errors


def raise_lasting(errors: Iterable[KafkaError]) -> None:
    """Raise the first of these errors that another attempt would meet again."""
    for error in errors:
        if not error.retriable:
            raise error


def no_leader(cluster: Cluster, partition: TopicPartition) -> KafkaError:
    """Why the metadata has no leader of this partition: its topic may not exist."""
    topic = cluster.metadata.topics.get(partition.topic)
    if topic is not None and topic.error is not ErrorCode.NONE:
        return KafkaError(topic.error, f"topic {partition.topic!r} did not come into the metadata in time")
    return KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, str(partition))


def raise_for_missing_partitions(cluster: Cluster, leaderless: Iterable[TopicPartition], refreshes_before: int) -> None:
    """Raise for unusable topics and for partition numbers beyond the topic's: waiting does not
    help. Metadata of the first `refreshes_before` refreshes may lack what was added or allowed since.
    """
    for topic, number in leaderless:
        metadata = cluster.metadata.topics.get(topic)
        if metadata is None or cluster.metadata_refresh <= refreshes_before:
            continue
        if metadata.error is not ErrorCode.NONE and not metadata.error.retriable:
            raise KafkaError(metadata.error, f"topic {topic!r}")
        if metadata.is_usable and number >= len(metadata.partitions):
            count = len(metadata.partitions)
            raise KafkaError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"{topic} has {counted(count, 'partition')}, not one numbered {number}",
            )


async def _request_from_leader(
    cluster: Cluster, leader: int, timestamps: Mapping[TopicPartition, int], isolation_level: str
) -> tuple[dict[TopicPartition, OffsetAndTimestamp | None], dict[TopicPartition, KafkaError]]:
    """The offsets from one leader, and the errors in its response."""
    topics: dict[str, ListOffsetsTopic] = {}
    for partition, timestamp in timestamps.items():
        topic = topics.setdefault(partition.topic, ListOffsetsTopic(name=partition.topic))
        topic.partitions.append(
            ListOffsetsPartition(
                partition_index=partition.partition,
                current_leader_epoch=cluster.metadata.leader_epoch(partition),
                timestamp=timestamp,
            )
        )
    request = ListOffsetsRequest(
        replica_id=_CONSUMER_REPLICA_ID,
        isolation_level=ISOLATION[isolation_level],
        topics=list(topics.values()),
        timeout_ms=cluster.config.request_timeout_ms,
    )
    response = await cluster.call(leader, request, ListOffsetsResponse)
    offsets: dict[TopicPartition, OffsetAndTimestamp | None] = {}
    errors: dict[TopicPartition, KafkaError] = {}
    for topic_result in response.topics:
        for result in topic_result.partitions:
            partition = TopicPartition(topic_result.name, result.partition_index)
            code = ErrorCode.of(result.error_code)
            if code is ErrorCode.NONE:
                offset = OffsetAndTimestamp(result.offset, result.timestamp, result.leader_epoch)
                offsets[partition] = offset if result.offset >= 0 else None
            else:
                errors[partition] = KafkaError(code, str(partition) if code.retriable else f"offsets of {partition}")
    return offsets, errors
