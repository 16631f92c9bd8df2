"""Differences between images: of a snapshot, and of several changes together. Pure.

Replay (`records.py`) makes the difference in all other cases.
"""

from __future__ import annotations

from typing import Any

from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage


def everything(image: MetadataImage) -> MetadataDelta:
    """The difference between an empty image and this one."""
    return difference(MetadataImage(), image)


def difference(before: MetadataImage, after: MetadataImage) -> MetadataDelta:
    """Compare all values of two images. A topic that was deleted and created again
    counts as deleted and created.
    """
    delta = MetadataDelta(changed_features=before.features != after.features)
    delta.changed_configs = _changed(before.configs, after.configs)
    delta.changed_brokers = _changed(before.brokers, after.brokers)
    for topic_id, topic in before.topics_by_id.items():
        if topic_id not in after.topics_by_id:
            delta.deleted_topics[topic_id] = topic
    for topic_id, topic in after.topics_by_id.items():
        old_topic = before.topics_by_id.get(topic_id)
        if old_topic is None:
            delta.created_topics[topic_id] = topic
            indexes = set(topic.partitions)
        else:
            indexes = _changed(old_topic.partitions, topic.partitions)
        if indexes:
            delta.changed_partitions[topic_id] = indexes
    return delta


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> set[Any]:
    return {key for key in {**before, **after} if before.get(key) != after.get(key)}


def merge(first: MetadataDelta, second: MetadataDelta, after: MetadataImage) -> MetadataDelta:
    """Merge two successive differences; `after` is the image after the second."""
    merged = MetadataDelta(
        deleted_topics=dict(first.deleted_topics),
        changed_partitions={topic_id: set(indexes) for topic_id, indexes in first.changed_partitions.items()},
        changed_configs=first.changed_configs | second.changed_configs,
        changed_brokers=first.changed_brokers | second.changed_brokers,
        changed_features=first.changed_features or second.changed_features,
    )
    created = {**first.created_topics, **second.created_topics}
    for topic_id, topic in second.deleted_topics.items():
        merged.changed_partitions.pop(topic_id, None)
        if topic_id not in first.created_topics:
            merged.deleted_topics[topic_id] = topic
    # The newest values: a change after the creation made a new TopicImage.
    merged.created_topics = {
        topic_id: after.topics_by_id[topic_id] for topic_id in created if topic_id in after.topics_by_id
    }
    for topic_id, indexes in second.changed_partitions.items():
        merged.changed_partitions.setdefault(topic_id, set()).update(indexes)
    return merged
