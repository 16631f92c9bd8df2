from __future__ import annotations

import pytest

from tests.unit.replication.clusters import broker_records, directory_id, replay
from tidelog.protocol.messages import metadata_records as kafka
from tidelog.protocol.uuids import MIGRATING_DIRECTORY
from tidelog.replication.controller.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, MetadataDelta, MetadataImage
from tidelog.replication.controller.metadata.record_codec import UnknownRecord
from tidelog.replication.controller.metadata.records import ImageBuilder, MetadataError

TOPIC_ID = b"t" * 16
OTHER_ID = b"o" * 16


def topic(name="t", topic_id=TOPIC_ID, partitions=1):
    return [
        kafka.TopicRecord(name=name, topic_id=topic_id),
        *(
            kafka.PartitionRecord(
                partition_id=index,
                topic_id=topic_id,
                replicas=[1, 2],
                isr=[1, 2],
                leader=1,
                leader_epoch=0,
                partition_epoch=0,
                directories=[directory_id(1), directory_id(2)],
            )
            for index in range(partitions)
        ),
    ]


def config(name, value, *, resource=TOPIC_RESOURCE, of="t"):
    return kafka.ConfigRecord(resource_type=resource, resource_name=of, name=name, value=value)


def test_a_published_image_never_changes():
    first = replay(MetadataImage(), [*broker_records(1), *topic(partitions=2), config("a", "1")])
    before = first.topics_by_name["t"].partitions[0]
    second = replay(
        first,
        [
            kafka.PartitionChangeRecord(partition_id=0, topic_id=TOPIC_ID, leader=2),
            config("a", "2"),
            *topic("o", OTHER_ID),
        ],
    )
    assert first.topics_by_name["t"].partitions[0] is before
    assert first.topic_config("t") == {"a": "1"}
    assert set(first.topics_by_name) == {"t"}
    assert second.topics_by_name["t"].partitions[0].leader == 2
    assert second.topic_config("t") == {"a": "2"}
    # What did not change is shared.
    assert second.topics_by_name["t"].partitions[1] is first.topics_by_name["t"].partitions[1]
    assert second.brokers is first.brokers


def test_a_new_leader_is_a_new_leader_epoch_and_any_change_a_new_partition_epoch():
    image = replay(MetadataImage(), topic())
    image = replay(image, [kafka.PartitionChangeRecord(partition_id=0, topic_id=TOPIC_ID, isr=[1])])
    partition = image.topics_by_id[TOPIC_ID].partitions[0]
    assert (partition.leader, partition.leader_epoch, partition.partition_epoch, partition.isr) == (1, 0, 1, (1,))
    image = replay(image, [kafka.PartitionChangeRecord(partition_id=0, topic_id=TOPIC_ID, leader=-1)])
    partition = image.topics_by_id[TOPIC_ID].partitions[0]
    assert (partition.leader, partition.leader_epoch, partition.partition_epoch) == (-1, 1, 2)


def test_a_reassignment_changes_the_replica_lists():
    image = replay(MetadataImage(), topic())
    change = kafka.PartitionChangeRecord(
        partition_id=0,
        topic_id=TOPIC_ID,
        replicas=[1, 2, 3],
        adding_replicas=[3],
        removing_replicas=[1],
        directories=[directory_id(1), directory_id(2), directory_id(3)],
    )
    partition = replay(image, [change]).topics_by_id[TOPIC_ID].partitions[0]
    assert (partition.replicas, partition.adding_replicas, partition.removing_replicas) == ((1, 2, 3), (3,), (1,))
    assert partition.directory_of(3) == directory_id(3)


def test_records_without_directories_leave_the_data_where_it_is():
    record = kafka.PartitionRecord(partition_id=0, topic_id=TOPIC_ID, replicas=[1, 2], isr=[1], leader=1)
    image = replay(MetadataImage(), [kafka.TopicRecord(name="t", topic_id=TOPIC_ID), record])
    assert image.topics_by_name["t"].partitions[0].directories == (MIGRATING_DIRECTORY, MIGRATING_DIRECTORY)


def test_configs_come_and_go():
    image = replay(MetadataImage(), [config("a", "1"), config("b", "2"), config("a", None)])
    assert image.topic_config("t") == {"b": "2"}
    assert replay(image, [config("b", None)]).configs == {}


def test_broker_configs_are_layered_own_before_the_clusters():
    image = replay(
        MetadataImage(),
        [config("x", "all", resource=BROKER_RESOURCE, of=""), config("x", "own", resource=BROKER_RESOURCE, of="1")],
    )
    assert [layer["x"] for layer in image.broker_config_layers(1)] == ["own", "all"]


def test_removing_a_topic_removes_its_configs_only():
    image = replay(MetadataImage(), [*topic(), *topic("o", OTHER_ID), config("a", "1"), config("a", "2", of="o")])
    image = replay(image, [kafka.RemoveTopicRecord(topic_id=TOPIC_ID)])
    assert set(image.topics_by_name) == {"o"}
    assert set(image.topics_by_id) == {OTHER_ID}
    assert image.topic_config("o") == {"a": "2"}
    assert image.topic_config("t") == {}


def test_a_feature_at_level_zero_is_gone():
    records = [kafka.FeatureLevelRecord(name="group.version", feature_level=level) for level in (1, 0)]
    image = replay(MetadataImage(), records[:1])
    assert image.feature_level("group.version") == 1
    assert replay(image, records[1:]).features == {}


def test_a_broker_is_fenced_unfenced_and_shut_down_by_change_records():
    image = replay(MetadataImage(), broker_records(1))
    assert image.brokers[1].is_active

    def change(**fields):
        return kafka.BrokerRegistrationChangeRecord(broker_id=1, broker_epoch=101, **fields)

    fenced = replay(image, [change(fenced=1)])
    assert fenced.brokers[1].fenced
    leaving = replay(image, [change(in_controlled_shutdown=1)])
    assert leaving.brokers[1].in_controlled_shutdown
    assert not leaving.brokers[1].is_active
    assert replay(image, [change(cordoned_log_dirs=[directory_id(1)])]).brokers[1].cordoned_log_dirs == (
        directory_id(1),
    )
    assert not replay(fenced, [kafka.UnfenceBrokerRecord(id=1, epoch=101)]).brokers[1].fenced
    assert replay(image, [kafka.UnregisterBrokerRecord(broker_id=1, broker_epoch=101)]).brokers == {}


def test_the_delta_says_what_changed():
    builder = ImageBuilder(replay(MetadataImage(), [*broker_records(1), *topic(partitions=3)]))
    builder.replay_all(
        [
            kafka.PartitionChangeRecord(partition_id=1, topic_id=TOPIC_ID, isr=[1]),
            *topic("o", OTHER_ID, partitions=2),
            config("a", "1"),
        ]
    )
    _, delta = builder.build(9, 1, 0, -1)
    assert delta.changed_partitions == {TOPIC_ID: {1}, OTHER_ID: {0, 1}}
    assert set(delta.created_topics) == {OTHER_ID}
    assert delta.changed_configs == {(TOPIC_RESOURCE, "t")}
    assert not delta.changed_brokers


def test_a_topic_created_and_removed_in_one_step_leaves_no_trace():
    builder = ImageBuilder(MetadataImage())
    builder.replay_all([*topic(), config("a", "1"), kafka.RemoveTopicRecord(topic_id=TOPIC_ID)])
    image, delta = builder.build(9, 1, 0, -1)
    assert not image.topics_by_name
    assert not image.configs
    assert delta == MetadataDelta()


@pytest.mark.parametrize(
    "record",
    [
        kafka.PartitionRecord(partition_id=0, topic_id=OTHER_ID),
        kafka.PartitionChangeRecord(partition_id=7, topic_id=TOPIC_ID),
        kafka.PartitionChangeRecord(partition_id=0, topic_id=OTHER_ID),
        kafka.RemoveTopicRecord(topic_id=OTHER_ID),
        kafka.TopicRecord(name="t", topic_id=OTHER_ID),
        kafka.UnregisterBrokerRecord(broker_id=9, broker_epoch=1),
        kafka.BrokerRegistrationChangeRecord(broker_id=9, broker_epoch=1, fenced=1),
        kafka.FenceBrokerRecord(id=9, epoch=1),
        kafka.ClearElrRecord(topic_name="nope"),
    ],
)
def test_a_record_that_contradicts_the_image_is_an_error(record):
    image = replay(MetadataImage(), topic())
    with pytest.raises(MetadataError):
        replay(image, [record])


def test_eligible_replicas_are_cleared_of_one_topic_or_of_all():
    def with_elr(name, topic_id):
        return [
            kafka.TopicRecord(name=name, topic_id=topic_id),
            kafka.PartitionRecord(
                partition_id=0, topic_id=topic_id, replicas=[1, 2], isr=[1], leader=1, eligible_leader_replicas=[2]
            ),
        ]

    image = replay(MetadataImage(), [*with_elr("t", TOPIC_ID), *with_elr("o", OTHER_ID)])
    one = replay(image, [kafka.ClearElrRecord(topic_name="t")])
    assert (one.topics_by_name["t"].partitions[0].elr, one.topics_by_name["o"].partitions[0].elr) == ((), (2,))
    # Kafka's nodes count it as a change. A leader with another epoch could not change the ISR any more.
    epochs = [each.topics_by_name["t"].partitions[0].partition_epoch for each in (image, one)]
    assert epochs[1] == epochs[0] + 1
    assert replay(image, [kafka.ClearElrRecord(topic_name="")]).topics_by_name["o"].partitions[0].elr == ()


def test_what_is_not_acted_upon_is_carried_and_dropped_when_it_ends():
    acl = kafka.AccessControlEntryRecord(id=b"a" * 16, resource_type=2, resource_name="t", principal="User:x", host="*")
    quota = kafka.ClientQuotaRecord(
        entity=[kafka.EntityData(entity_type="user", entity_name="x")], key="producer_byte_rate", value=1.0
    )
    unknown = UnknownRecord(b"\x01\x63\x00rest")
    image = replay(MetadataImage(), [acl, quota, unknown, unknown])
    assert list(image.carried.values()) == [acl, quota, unknown]
    quota_end = kafka.ClientQuotaRecord(entity=quota.entity, key=quota.key, remove=True)
    image = replay(image, [kafka.RemoveAccessControlEntryRecord(id=b"a" * 16), quota_end])
    assert list(image.carried.values()) == [unknown]


def test_no_op_changes_nothing_but_the_offset():
    image = replay(MetadataImage(), topic())
    after = replay(image, [kafka.NoOpRecord()])
    assert after.topics_by_name is image.topics_by_name
    assert after.offset == image.offset + 1
