"""Differences between images: what a snapshot changed, what several changes amount to. Pure.

The usual difference is a by-product of replay (`records.py`); here are those that replay does not give.
"""

from __future__ import annotations

from typing import Any

from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage


def everything(image: MetadataImage) -> MetadataDelta:
    """The difference between nothing and an image."""
    return difference(MetadataImage(), image)


def difference(before: MetadataImage, after: MetadataImage) -> MetadataDelta:
    """Compares values, so it costs as much as the images are large; a topic created again is gone and new."""
    delta = MetadataDelta(changed_features=before.features != after.features)
    delta.changed_configs = _changed(before.configs, after.configs)
    delta.changed_brokers = _changed(before.brokers, after.brokers)
    for topic_id, topic in before.topics_by_id.items():
        if topic_id not in after.topics_by_id:
            delta.deleted_topics[topic_id] = topic
    for topic_id, topic in after.topics_by_id.items():
        known = before.topics_by_id.get(topic_id)
        if known is None:
            delta.created_topics[topic_id] = topic
            indexes = set(topic.partitions)
        else:
            indexes = _changed(known.partitions, topic.partitions)
        if indexes:
            delta.changed_partitions[topic_id] = indexes
    return delta


def _changed(before: dict[Any, Any], after: dict[Any, Any]) -> set[Any]:
    return {key for key in {**before, **after} if before.get(key) != after.get(key)}


def merge(first: MetadataDelta, then: MetadataDelta, after: MetadataImage) -> MetadataDelta:
    """Two differences in a row as one; `after` is the image behind the second."""
    merged = MetadataDelta(
        deleted_topics=dict(first.deleted_topics),
        changed_partitions={topic_id: set(indexes) for topic_id, indexes in first.changed_partitions.items()},
        changed_configs=first.changed_configs | then.changed_configs,
        changed_brokers=first.changed_brokers | then.changed_brokers,
        changed_features=first.changed_features or then.changed_features,
    )
    created = {**first.created_topics, **then.created_topics}
    for topic_id, topic in then.deleted_topics.items():
        merged.changed_partitions.pop(topic_id, None)
        if topic_id not in first.created_topics:
            merged.deleted_topics[topic_id] = topic
    # As they are now: a change after the creation made another value of the topic.
    merged.created_topics = {one: after.topics_by_id[one] for one in created if one in after.topics_by_id}
    for topic_id, indexes in then.changed_partitions.items():
        merged.changed_partitions.setdefault(topic_id, set()).update(indexes)
    return merged
