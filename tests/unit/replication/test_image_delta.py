from __future__ import annotations

import random

from tests.unit.replication.clusters import cluster_state
from tidelog.replication.controller.decisions.leaders import fence_brokers, unfence_broker
from tidelog.replication.controller.decisions.state import NewTopic
from tidelog.replication.controller.metadata.image_delta import difference, everything, merge
from tidelog.replication.controller.metadata.records import ImageBuilder


def step(state, rng):
    match rng.randrange(4):
        case 0:
            return state.create_topics([NewTopic(rng.choice("abc"), 2, 2)])[0]
        case 1 if state.image.topics_by_name:
            topic = rng.choice(list(state.image.topics_by_name.values()))
            return state.delete_topics([topic.topic_id])[0]
        case 2:
            return fence_brokers(state, [1])
    return unfence_broker(state, 1)


def test_merged_steps_are_the_difference_between_the_ends():
    """In what was created, deleted and changed; a change and its reverse may be named as well."""
    rng = random.Random(3)
    for _ in range(200):
        state = cluster_state([1, 2])
        for _ in range(rng.randrange(4)):
            builder = ImageBuilder(state.image)
            builder.replay_all(step(state, rng))
            state.adopt(*builder.build(state.image.offset + 1, 1, 0, -1))
        start = state.image
        merged = difference(start, start)
        for _ in range(rng.randrange(1, 5)):
            builder = ImageBuilder(state.image)
            builder.replay_all(step(state, rng))
            image, delta = builder.build(state.image.offset + 1, 1, 0, -1)
            state.adopt(image, delta)
            merged = merge(merged, delta, image)
        wanted = difference(start, state.image)
        assert merged.created_topics == wanted.created_topics
        assert merged.deleted_topics.keys() == wanted.deleted_topics.keys()
        assert wanted.changed_brokers <= merged.changed_brokers
        for topic_id, indexes in wanted.changed_partitions.items():
            assert indexes <= merged.changed_partitions[topic_id]
        assert merged.changed_partitions.keys() <= state.image.topics_by_id.keys()


def test_everything_names_everything():
    state = cluster_state([1, 2])
    builder = ImageBuilder(state.image)
    builder.replay_all(state.create_topics([NewTopic("t", 2, 2)])[0])
    image, _ = builder.build(9, 1, 0, -1)
    delta = everything(image)
    assert [topic.name for topic in delta.created_topics.values()] == ["t"]
    assert list(delta.changed_partitions.values()) == [{0, 1}]
    assert delta.changed_brokers == {1, 2}
