"""Random histories of commands: the live image, the replay of the log and the replay of a snapshot are one."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.unit.replication.clusters import broker_records
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages import metadata_records as kafka
from tidelog.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from tidelog.replication.controller.decisions.activation import (
    ControllerIdentity,
    activation_records,
    bootstrap_records,
)
from tidelog.replication.controller.decisions.leaders import (
    fence_brokers,
    forget_incarnation,
    unfence_broker,
)
from tidelog.replication.controller.decisions.reassignment import alter_partition_reassignments
from tidelog.replication.controller.decisions.state import (
    ControllerSettings,
    ControllerState,
    CreatedTopic,
    NewTopic,
    at_once,
)
from tidelog.replication.controller.metadata.image import MetadataImage
from tidelog.replication.controller.metadata.image_records import image_records
from tidelog.replication.controller.metadata.loader import MetadataLoader
from tidelog.replication.controller.metadata.record_codec import (
    CONTROLLERS_VERSION,
    DIRECTORIES_VERSION,
    ELR_VERSION,
    LATEST_METADATA_VERSION,
    LOWEST_METADATA_VERSION,
    encode_record,
)
from tidelog.replication.controller.metadata.records import ImageBuilder

NAMES = st.sampled_from(["a", "b", "a.b", "a_b", "bad name", "__consumer_offsets", "x-1"])
CONFIGS = st.lists(
    st.tuples(st.sampled_from(["retention.ms", "cleanup.policy"]), st.sampled_from(["1", "2"])), max_size=2
)

# On both sides of what changes the records.
LEVELS = (LOWEST_METADATA_VERSION, DIRECTORIES_VERSION - 1, DIRECTORIES_VERSION, ELR_VERSION, LATEST_METADATA_VERSION)


class Cluster(RuleBasedStateMachine):
    topics = Bundle("topics")

    def __init__(self) -> None:
        super().__init__()
        self.state = ControllerState(ControllerSettings(2, 1), random.Random(1))
        self.log: list[bytes] = []
        self.level = LATEST_METADATA_VERSION

    def append(self, records: list) -> None:
        if not records:
            return
        self.log += [encode_record(record, self.level) for record in records]
        builder = ImageBuilder(self.state.image)
        builder.replay_all(records)
        self.state.adopt(*builder.build(len(self.log) - 1, 1, 5, -1))

    @initialize(level=st.sampled_from(LEVELS))
    def start(self, level: int) -> None:
        self.level = level
        self.append(
            bootstrap_records(
                {"metadata.version": level, "eligible.leader.replicas.version": int(level >= ELR_VERSION)}
            )
        )
        self.register(1, False, None)

    @rule(node_id=st.integers(1, 4), fenced=st.booleans(), rack=st.sampled_from([None, "r1", "r2"]))
    def register(self, node_id: int, fenced: bool, rack: str | None) -> None:
        directories = int(self.level >= DIRECTORIES_VERSION)
        self.append(broker_records(node_id, fenced=fenced, rack=rack, directories=directories))

    @rule(node_id=st.integers(1, 4), clean=st.booleans())
    def broker_returns(self, node_id: int, clean: bool) -> None:
        if node_id in self.state.image.brokers:
            self.append(forget_incarnation(self.state, node_id, clean=clean))
            self.append(unfence_broker(self.state, node_id))

    @rule(node_ids=st.sets(st.integers(1, 4), min_size=1))
    def brokers_die(self, node_ids: set[int]) -> None:
        self.append(fence_brokers(self.state, [one for one in sorted(node_ids) if one in self.state.image.brokers]))

    @rule(target=topics, name=NAMES, partitions=st.integers(-2, 5), factor=st.integers(-2, 4), configs=CONFIGS)
    def create_topic(self, name: str, partitions: int, factor: int, configs: list) -> str:
        existed = name in self.state.image.topics_by_name
        records, results = self.state.create_topics([NewTopic(name, partitions, factor, configs=configs)])
        self.append(records)
        outcome = results[name]
        assert isinstance(outcome, CreatedTopic) != bool(isinstance(outcome, KafkaError))
        assert bool(records) is isinstance(outcome, CreatedTopic)
        assert not (existed and records)
        return name

    @rule(name=consumes(topics))
    def delete_topic(self, name: str) -> None:
        topic = self.state.image.topics_by_name.get(name)
        topic_id = topic.topic_id if topic else b"?" * 16
        records, results = self.state.delete_topics([topic_id])
        self.append(records)
        assert (results[topic_id] is None) is (topic is not None)
        assert name not in self.state.image.topics_by_name

    @rule(name=NAMES, replicas=st.sampled_from([[1], [1, 2], [2, 1, 3], [4, 3]]))
    def move_replicas(self, name: str, replicas: list[int]) -> None:
        moved = ReassignableTopic(name=name, partitions=[ReassignablePartition(partition_index=0, replicas=replicas)])
        request = AlterPartitionReassignmentsRequest(topics=[moved])
        self.append(at_once(alter_partition_reassignments(self.state, request))[0])

    @rule()
    def allocate_producer_ids(self) -> None:
        before = self.state.image.next_producer_id
        records, block = self.state.allocate_producer_ids(1)
        self.append(records)
        assert block.first == before
        assert self.state.image.next_producer_id == block.first + block.size

    @rule(begin=st.booleans())
    def idle(self, begin: bool) -> None:
        self.append([kafka.NoOpRecord()])

    @invariant()
    def replaying_the_log_gives_the_same_image(self) -> None:
        loader = MetadataLoader()
        loader.feed(self.log, len(self.log) - 1, 1, 5)
        assert loader.finish()[0] == self.state.image

    @invariant()
    def replaying_a_snapshot_gives_the_same_image(self) -> None:
        loader = MetadataLoader()
        values = [encode_record(record, self.level) for record in image_records(self.state.image)]
        loader.feed(values, len(self.log) - 1, 1, 5)
        assert loader.finish()[0] == self.state.image

    @invariant()
    def every_leader_is_in_sync_and_every_partition_has_distinct_replicas(self) -> None:
        for topic in self.state.image.topics_by_name.values():
            assert self.state.image.topics_by_id[topic.topic_id] is topic
            assert sorted(topic.partitions) == list(range(len(topic.partitions)))
            for partition in topic.partitions.values():
                assert partition.leader == -1 or partition.leader in partition.isr
                assert set(partition.isr) <= set(partition.replicas)
                assert len(set(partition.replicas)) == len(partition.replicas) == len(partition.directories)


TestRandomHistories = Cluster.TestCase
TestRandomHistories.settings = settings(stateful_step_count=25)


@pytest.mark.parametrize("level", range(LOWEST_METADATA_VERSION, LATEST_METADATA_VERSION + 1))
def test_topics_are_made_and_moved_at_every_metadata_version(level: int) -> None:
    """Records below 3.7 have no directories: neither may the records of a new partition, nor those of a snapshot.
    Kafka does not read registrations of controllers there.
    """
    cluster = Cluster()
    cluster.start(level)
    for node_id in (2, 3):
        cluster.register(node_id, False, None)
    cluster.append(activation_records(cluster.state, ControllerIdentity(b"i" * 16), list, in_transaction=False))
    assert bool(cluster.state.image.controllers) is (level >= CONTROLLERS_VERSION)
    cluster.create_topic("a", 1, 1, [])
    cluster.move_replicas("a", [2, 1, 3])
    partition = cluster.state.image.topics_by_name["a"].partitions[0]
    assert len(partition.replicas) == len(partition.directories) == 3
    cluster.replaying_the_log_gives_the_same_image()
    cluster.replaying_a_snapshot_gives_the_same_image()


def test_an_empty_image_needs_no_records():
    assert list(image_records(MetadataImage())) == []
