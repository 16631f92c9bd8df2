"""The ends of leader epochs in the leaders' logs, with OffsetForLeaderEpoch: whether a log is still the one that was
read (KIP-320). For readers that keep no positions of their own, unlike `consuming/validation.py`. Stateless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)

FIRST_VERSION_FOR_CONSUMERS = 3
"""Older versions are for brokers only."""


class Epochs(NamedTuple):
    """Two leader epochs of a partition."""

    read: int
    """That of the leader whose log was read."""
    current: int
    """That of the leader that is asked."""


async def epoch_ends(cluster: Cluster, epochs: Mapping[TopicPartition, Epochs]) -> dict[TopicPartition, int]:
    """Where the records of the epoch `read`, and of older ones, end in the log of the leader of the epoch `current`.

    A partition is left out whose leader does not say it: the broker is too old, or a damage hides the end. Raises a
    retriable KafkaError where a leader does not answer or has changed.
    """
    by_leader: dict[int, dict[TopicPartition, Epochs]] = {}
    for partition, each in epochs.items():
        by_leader.setdefault(cluster.metadata.leader(partition), {})[partition] = each
    ends: dict[TopicPartition, int] = {}
    for answer in await asyncio.gather(*(_ask(cluster, leader, led) for leader, led in by_leader.items())):
        ends.update(answer)
    return ends


async def _ask(cluster: Cluster, leader: int, epochs: Mapping[TopicPartition, Epochs]) -> dict[TopicPartition, int]:
    if leader < 0:
        raise KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, str(next(iter(epochs))))
    connection = await cluster.connection(leader)
    if not connection.supports(OffsetForLeaderEpochRequest, FIRST_VERSION_FOR_CONSUMERS):
        return {}
    topics: dict[str, OffsetForLeaderTopic] = {}
    for partition, each in epochs.items():
        topic = topics.setdefault(partition.topic, OffsetForLeaderTopic(topic=partition.topic))
        topic.partitions.append(
            OffsetForLeaderPartition(
                partition=partition.partition, current_leader_epoch=each.current, leader_epoch=each.read
            )
        )
    request = OffsetForLeaderEpochRequest(topics=list(topics.values()))
    response = await cluster.call(leader, request, OffsetForLeaderEpochResponse)
    ends = {}
    for topic_result in response.topics:
        for result in topic_result.partitions:
            partition = TopicPartition(topic_result.topic, result.partition)
            code = ErrorCode.of(result.error_code)
            if code.retriable and code is not ErrorCode.CORRUPT_MESSAGE:
                raise KafkaError(code, f"the end of leader epoch {epochs[partition].read} of {partition}")
            if code is ErrorCode.NONE and result.leader_epoch >= 0:
                ends[partition] = result.end_offset
    return ends
