"""Ends work on topics that are deleted, or created again under their name, while it runs.

The leader of a deleted partition gives the same errors as one that is just being elected, and work goes on trying. So
the metadata is looked at meanwhile. A broker that lags behind does not know a new topic yet, or knows the one before
it. So a topic is gone when every broker says so, twice: one that does not answer may have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.metadata import NO_TOPIC_ID, TopicMetadata
from tidelog.client.network.outcomes import start_task
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataResponseTopic

Result = TypeVar("Result")

_LOOK_INTERVAL_S = 0.2
_CONFIRM_AFTER_S = 1.0


class TopicGone(KafkaError):
    """A topic was deleted, and perhaps created again."""

    def __init__(self, topic: str, is_recreated: bool = False) -> None:
        happened = "created again" if is_recreated else "deleted"
        super().__init__(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"topic {topic!r} was {happened}")


async def unless_gone(cluster: Cluster, topic_ids: Mapping[str, bytes], work: Coroutine[Any, Any, Result]) -> Result:
    """The result of the work. Raises TopicGone as soon as one of these topics is gone; zeros stand for any id."""
    async with TopicWatch(cluster, topic_ids) as watch:
        return await watch.unless_gone(work)


class TopicWatch:
    """Looks at topics while pieces of work run one after the other."""

    def __init__(self, cluster: Cluster, topic_ids: Mapping[str, bytes]) -> None:
        self._cluster = cluster
        self._topic_ids = topic_ids

    async def __aenter__(self) -> TopicWatch:
        self._task = start_task(_wait_until_gone(self._cluster, self._topic_ids))
        return self

    async def __aexit__(self, *_: object) -> None:
        await _end(self._task)

    async def unless_gone(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The same as the function `unless_gone`."""
        task = start_task(work)
        try:
            await asyncio.wait((task, self._task), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._task.result()
            return task.result()
        finally:
            if not task.done():
                await _end(task)


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _wait_until_gone(cluster: Cluster, topic_ids: Mapping[str, bytes]) -> TopicGone:
    while True:
        await asyncio.sleep(_LOOK_INTERVAL_S)
        for name, topic_id in topic_ids.items():
            topic = cluster.metadata.topics.get(name)
            if _is_in_doubt(topic, topic_id) and await _is_gone(cluster, name, topic_id):
                return TopicGone(name, _is_other(topic, topic_id))


def _is_in_doubt(topic: TopicMetadata | None, topic_id: bytes) -> bool:
    """Whether the last metadata lacks the topic. Without any metadata of it, it is not known yet."""
    return topic is not None and (topic.error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION or _is_other(topic, topic_id))


def _is_other(topic: TopicMetadata | MetadataResponseTopic | None, topic_id: bytes) -> bool:
    return topic is not None and NO_TOPIC_ID not in (topic_id, topic.topic_id) and topic.topic_id != topic_id


async def check_gone(cluster: Cluster, partitions: Iterable[TopicPartition], topic_ids: Mapping[str, bytes]) -> None:
    """Return when no broker has any of these partitions; zeros, or no id, stand for any topic id.

    Raises KafkaError: LEADER_NOT_AVAILABLE where a broker has one, or does not answer, TOPIC_AUTHORIZATION_FAILED.
    """
    first_indexes: dict[str, int] = {}  # a broker that has a partition has all that are before it
    for topic, index in partitions:
        first_indexes[topic] = min(index, first_indexes.get(topic, index))
    are_gone = await asyncio.gather(
        *(_is_gone(cluster, topic, topic_ids.get(topic, NO_TOPIC_ID), index) for topic, index in first_indexes.items())
    )
    for (topic, index), is_gone in zip(first_indexes.items(), are_gone):
        if not is_gone:
            text = f"the broker does not know {topic}-{index}, but another may have it"
            raise KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, text)


async def _is_gone(cluster: Cluster, name: str, topic_id: bytes, index: int = 0) -> bool:
    """Whether all brokers say that they do not have the partition, and say it again after a moment."""
    if not await _all_lack(cluster, name, topic_id, index):
        return False
    await asyncio.sleep(_CONFIRM_AFTER_S)
    return await _all_lack(cluster, name, topic_id, index)


async def _all_lack(cluster: Cluster, name: str, topic_id: bytes, index: int) -> bool:
    answers = await asyncio.gather(*(_lacks(cluster, node, name, topic_id, index) for node in cluster.metadata.nodes))
    return bool(answers) and all(answers)


async def _lacks(cluster: Cluster, node_id: int, name: str, topic_id: bytes, index: int) -> bool:
    try:
        response = await cluster.fetch_metadata([name], node_id=node_id)
    except KafkaError:
        return False
    for topic in response.topics:
        code = ErrorCode.of(topic.error_code)
        if code is not ErrorCode.NONE and not code.retriable:  # the topic is there, and hidden from all lists
            raise KafkaError(code, f"topic {name!r} cannot be read")
    return all(
        topic.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        or (not topic.error_code and (_is_other(topic, topic_id) or len(topic.partitions) <= index))
        for topic in response.topics
    )
