"""Offsets by time, and the ends of partitions: ListOffsets asked of the leaders, until all have answered.

Used by consumer, admin and the raw reader. Nothing is kept here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from tidelog.client.model import OffsetAndTimestamp, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopic,
)

ISOLATION = {"read_uncommitted": 0, "read_committed": 1}
_CONSUMER = -1


async def list_offsets(
    cluster: Cluster,
    timestamps: Mapping[TopicPartition, int],
    *,
    isolation_level: str = "read_uncommitted",
    timeout_ms: float,
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """For each partition the first offset at or after a timestamp in ms, or -1 the end, -2 the beginning, -3 the latest
    timestamp; None where no record is that late. Raises KafkaError, REQUEST_TIMED_OUT at the latest.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
    attempts = 0
    while True:
        missing = {partition: timestamp for partition, timestamp in timestamps.items() if partition not in found}
        if not missing:
            return found
        problem = await ask_leaders(cluster, missing, isolation_level=isolation_level, on_found=found.update)
        if len(found) == len(timestamps):
            return found
        attempts += 1
        wait_ms = cluster.retry_backoff.wait_ms(attempts)
        left_ms = (deadline - loop.time()) * 1000
        if left_ms <= wait_ms:
            names = ", ".join(str(partition) for partition in list(missing)[:3])
            raise KafkaError(
                ErrorCode.REQUEST_TIMED_OUT, f"offsets of {names} not found in {timeout_ms:.0f} ms: {problem}"
            )
        await cluster.wait_for_metadata(left_ms)
        if attempts > 1:
            await asyncio.sleep(wait_ms / 1000)


async def ask_leaders(
    cluster: Cluster,
    timestamps: Mapping[TopicPartition, int],
    *,
    isolation_level: str,
    on_found: Callable[[dict[TopicPartition, OffsetAndTimestamp | None]], None],
) -> KafkaError | None:
    """Ask each leader once, all at the same time. `on_found` gets what one knows as soon as it has answered.

    Returns the last error after which asking again can help. Raises KafkaError of the others.
    """
    cluster.track({partition.topic for partition in timestamps})
    by_leader: dict[int, dict[TopicPartition, int]] = {}
    for partition, timestamp in timestamps.items():
        by_leader.setdefault(cluster.metadata.leader(partition), {})[partition] = timestamp
    unled = by_leader.pop(-1, {})
    problem: KafkaError | None = None

    async def ask(leader: int, wanted: dict[TopicPartition, int]) -> None:
        nonlocal problem
        try:
            found, refusal = await _ask_leader(cluster, leader, wanted, isolation_level)
        except KafkaError as error:
            if not error.retriable:
                raise
            problem = error
        else:
            problem = refusal or problem
            on_found(found)

    outcomes = await asyncio.gather(*(ask(*each) for each in by_leader.items()), return_exceptions=True)
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
    _refuse_what_is_not_there(cluster, unled)
    if unled:
        problem = problem or KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, str(next(iter(unled))))
    return problem


def _refuse_what_is_not_there(cluster: Cluster, unled: Mapping[TopicPartition, int]) -> None:
    """A partition number beyond the topic's will not appear by waiting."""
    for topic, number in unled:
        known = cluster.metadata.topics.get(topic)
        if known is None:
            continue
        if known.error is not ErrorCode.NONE and not known.error.retriable:
            raise KafkaError(known.error, f"topic {topic!r}")
        if known.usable and number >= len(known.partitions):
            count = len(known.partitions)
            raise KafkaError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{topic} has {count} partitions, not one numbered {number}"
            )


async def _ask_leader(
    cluster: Cluster, leader: int, timestamps: Mapping[TopicPartition, int], isolation_level: str
) -> tuple[dict[TopicPartition, OffsetAndTimestamp | None], KafkaError | None]:
    """What one leader knew, and the last retriable error among its answers."""
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
        replica_id=_CONSUMER,
        isolation_level=ISOLATION[isolation_level],
        topics=list(topics.values()),
        timeout_ms=cluster.config.request_timeout_ms,
    )
    response = await cluster.call(leader, request, ListOffsetsResponse)
    found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
    problem: KafkaError | None = None
    for answer in response.topics:
        for each in answer.partitions:
            partition = TopicPartition(answer.name, each.partition_index)
            code = ErrorCode.of(each.error_code)
            if code is ErrorCode.NONE:
                known = each.offset >= 0
                found[partition] = OffsetAndTimestamp(each.offset, each.timestamp, each.leader_epoch) if known else None
            elif code.retriable:
                problem = KafkaError(code, str(partition))
            else:
                raise KafkaError(code, f"offsets of {partition}")
    return found, problem
