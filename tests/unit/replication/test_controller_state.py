from __future__ import annotations

import pytest

from tests.unit.replication.clusters import apply, cluster_state, directory_id
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata_records import ConfigRecord, FeatureLevelRecord, PartitionRecord, TopicRecord
from tidelog.protocol.uuids import UNASSIGNED_DIRECTORY
from tidelog.replication.controller.decisions.state import CreatedTopic, NewTopic
from tidelog.replication.controller.metadata.record_codec import DIRECTORIES_VERSION


def create(state, *topics):
    records, results = state.create_topics(topics)
    apply(state, records)
    return results


def refused(state, topic):
    outcome = create(state, topic)[topic.name]
    assert isinstance(outcome, KafkaError), outcome
    assert topic.name not in state.image.topics_by_name
    return outcome


def test_a_topic_becomes_a_topic_record_then_its_configs_then_its_partitions():
    state = cluster_state([1])
    apply(state, [FeatureLevelRecord(name="metadata.version", feature_level=DIRECTORIES_VERSION)])
    records, results = state.create_topics([NewTopic("t", 2, 1, configs=[("retention.ms", "5")])])
    assert [type(record) for record in records] == [TopicRecord, ConfigRecord, PartitionRecord, PartitionRecord]
    created = results["t"]
    assert isinstance(created, CreatedTopic)
    assert created.topic_id == records[0].topic_id
    assert (created.partition_count, created.replication_factor) == (2, 1)
    first = records[2]
    assert (first.leader, first.isr, first.replicas) == (1, [1], [1])
    assert first.directories == [directory_id(1)]


def test_deciding_changes_nothing():
    state = cluster_state([1])
    before = state.image
    state.create_topics([NewTopic("t", 1, 1)])
    assert state.image is before
    assert not before.topics_by_name


def test_minus_one_takes_the_clusters_defaults():
    state = cluster_state([1, 2, 3], default_partition_count=4, default_replication_factor=2)
    created = create(state, NewTopic("t"))["t"]
    assert isinstance(created, CreatedTopic)
    assert (created.partition_count, created.replication_factor) == (4, 2)


def test_a_broker_with_two_directories_gets_its_partitions_unassigned():
    state = cluster_state([])
    from tests.unit.replication.clusters import broker_records

    apply(state, [FeatureLevelRecord(name="metadata.version", feature_level=DIRECTORIES_VERSION)])
    apply(state, broker_records(1, directories=2))
    create(state, NewTopic("t", 1, 1))
    assert state.image.topics_by_name["t"].partitions[0].directories == (UNASSIGNED_DIRECTORY,)


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        (NewTopic("bad name", 1, 1), ErrorCode.INVALID_TOPIC_EXCEPTION),
        (NewTopic("t", 0, 1), ErrorCode.INVALID_PARTITIONS),
        (NewTopic("t", -2, 1), ErrorCode.INVALID_PARTITIONS),
        (NewTopic("t", 1, 0), ErrorCode.INVALID_REPLICATION_FACTOR),
        (NewTopic("t", 1, -2), ErrorCode.INVALID_REPLICATION_FACTOR),
        (NewTopic("t", 1, 4), ErrorCode.INVALID_REPLICATION_FACTOR),
        (NewTopic("t", 1, 1, configs=[("retention.ms", None)]), ErrorCode.INVALID_CONFIG),
        (NewTopic("t", 1, 1, configs=[("retention.ms", "9" * 40_000)]), ErrorCode.INVALID_CONFIG),
        (NewTopic("t", 1, -1, [(0, [1])]), ErrorCode.INVALID_REQUEST),
        (NewTopic("t", -1, 1, [(0, [1])]), ErrorCode.INVALID_REQUEST),
        (NewTopic("t", assignments=[(0, [])]), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("t", assignments=[(0, [9])]), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("t", assignments=[(0, [1, 1])]), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("t", assignments=[(0, [1]), (0, [2])]), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("t", assignments=[(1, [1])]), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("t", assignments=[(0, [1]), (1, [1, 2])]), ErrorCode.INVALID_REPLICA_ASSIGNMENT),
    ],
)
def test_what_kafka_refuses_is_refused_with_its_code(topic, code):
    assert refused(cluster_state([1, 2, 3]), topic).code is code


def test_the_brokers_word_on_configs_decides():
    refusal = KafkaError(ErrorCode.INVALID_CONFIG, "no such key")
    state = cluster_state([1], config_problem=lambda resource_type, configs: refusal if "foo" in configs else None)
    error = refused(state, NewTopic("t", 1, 1, configs=[("foo", "1")]))
    assert (error.code, error.message) == (ErrorCode.INVALID_CONFIG, "no such key")


def test_a_topic_that_exists_is_refused_even_before_it_is_committed():
    state = cluster_state([1])
    create(state, NewTopic("t", 1, 1))
    error = create(state, NewTopic("t", 1, 1))["t"]
    assert isinstance(error, KafkaError)
    assert error.code is ErrorCode.TOPIC_ALREADY_EXISTS


def test_a_name_that_collides_is_refused_until_the_other_is_gone():
    state = cluster_state([1])
    created = create(state, NewTopic("a.b", 1, 1))["a.b"]
    assert isinstance(created, CreatedTopic)
    error = refused(state, NewTopic("a_b", 1, 1))
    assert error.code is ErrorCode.INVALID_TOPIC_EXCEPTION
    assert "collides with existing topic: a.b" in str(error.message)
    records, _ = state.delete_topics([created.topic_id])
    apply(state, records)
    assert not state._collisions  # a topic that is gone leaves nothing behind
    assert isinstance(create(state, NewTopic("a_b", 1, 1))["a_b"], CreatedTopic)


def test_one_bad_topic_does_not_hold_up_the_others():
    state = cluster_state([1])
    results = create(state, NewTopic("good", 1, 1), NewTopic("bad", 0, 1), NewTopic("fine", 1, 1))
    assert isinstance(results["bad"], KafkaError)
    assert set(state.image.topics_by_name) == {"good", "fine"}


def test_fenced_brokers_are_replicas_but_not_in_sync():
    state = cluster_state([1, 2, 3], fenced=[2])
    create(state, NewTopic("t", assignments=[(0, [2, 3, 1])]))
    partition = state.image.topics_by_name["t"].partitions[0]
    assert (partition.replicas, partition.isr, partition.leader) == ((2, 3, 1), (3, 1), 3)


def test_a_manual_assignment_to_fenced_brokers_only_is_refused():
    error = refused(cluster_state([1, 2], fenced=[2]), NewTopic("t", assignments=[(0, [2])]))
    assert error.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT


def test_too_many_partitions_for_one_request_are_refused_whole():
    state = cluster_state([1])
    with pytest.raises(KafkaError) as caught:
        state.create_topics([NewTopic("a", 6000, 1), NewTopic("b", 6000, 1)])
    assert caught.value.code is ErrorCode.POLICY_VIOLATION


def test_deleting_takes_the_topic_its_partitions_and_its_configs():
    state = cluster_state([1])
    created = create(state, NewTopic("t", 3, 1, configs=[("retention.ms", "5")]))["t"]
    assert isinstance(created, CreatedTopic)
    records, results = state.delete_topics([created.topic_id, bytes(16)])
    apply(state, records)
    assert results[created.topic_id] is None
    unknown = results[bytes(16)]
    assert unknown is not None
    assert unknown.code is ErrorCode.UNKNOWN_TOPIC_ID
    assert not state.image.topics_by_name
    assert not state.image.topics_by_id
    assert not state.image.topic_config("t")


def test_producer_id_blocks_follow_one_another():
    state = cluster_state([1])
    blocks = []
    for _ in range(3):
        records, block = state.allocate_producer_ids(1)
        apply(state, records)
        blocks.append((block.first, block.size))
    assert blocks == [(0, 1000), (1000, 1000), (2000, 1000)]


def test_an_unknown_broker_gets_no_producer_ids():
    with pytest.raises(KafkaError) as caught:
        cluster_state([1]).allocate_producer_ids(2)
    assert caught.value.code is ErrorCode.BROKER_ID_NOT_REGISTERED
