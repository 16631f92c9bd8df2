"""AlterPartition: who may change an ISR, and that nothing stale ever does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.replication.clusters import apply, cluster_state, directory_id
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.alter_partition import (
    AlterPartitionRequest,
    AlterPartitionRequestPartitionData,
    AlterPartitionRequestTopicData,
    BrokerState,
)
from tidelog.protocol.messages.metadata_records import BrokerRegistrationChangeRecord, ConfigRecord, FeatureLevelRecord
from tidelog.replication.controller.decisions.isr_alterations import alter_partition
from tidelog.replication.controller.decisions.leaders import fence_brokers
from tidelog.replication.controller.decisions.partition_changes import PartitionChange
from tidelog.replication.controller.decisions.state import NewTopic, at_once
from tidelog.replication.controller.metadata.image import RECOVERING


def proposal(image, broker_id, broker_epoch, topic_name, isr, **fields):
    """`isr`: broker id -> epoch. Everything else as the newest image has it, unless given."""
    topic = image.topics_by_name[topic_name]
    partition = topic.partitions[0]
    values: dict[str, Any] = {
        "partition_index": 0,
        "leader_epoch": partition.leader_epoch,
        "partition_epoch": partition.partition_epoch,
        "new_isr": list(isr),
        "new_isr_with_epochs": [BrokerState(broker_id=one, broker_epoch=epoch) for one, epoch in isr.items()],
        "leader_recovery_state": 0,
    }
    return AlterPartitionRequest(
        broker_id=broker_id,
        broker_epoch=broker_epoch,
        topics=[
            AlterPartitionRequestTopicData(
                topic_id=topic.topic_id, partitions=[AlterPartitionRequestPartitionData(**(values | fields))]
            )
        ],
    )


@pytest.fixture
def state():
    state = cluster_state([1, 2, 3])
    apply(state, [FeatureLevelRecord(name="metadata.version", feature_level=30)])
    apply(state, [FeatureLevelRecord(name="eligible.leader.replicas.version", feature_level=1)])
    apply(state, state.create_topics([NewTopic("t", assignments=[(0, [1, 2, 3])])])[0])
    return state


def part(state):
    return state.image.topics_by_name["t"].partitions[0]


def ask(state, isr, *, broker_id=1, broker_epoch=101, version=3, **fields):
    request = proposal(state.image, broker_id, broker_epoch, "t", isr, **fields)
    records, response = at_once(alter_partition(state, request, version))
    apply(state, records)
    return response.topics[0].partitions[0]


@pytest.mark.parametrize("version", [2, 3])
def test_the_leader_shrinks_and_expands(state, version):
    answer = ask(state, {1: 101, 3: 103}, version=version)
    assert (answer.error_code, answer.isr, answer.partition_epoch, answer.leader_epoch) == (0, [1, 3], 1, 0)
    assert part(state).isr == (1, 3)
    answer = ask(state, {1: 101, 3: 103, 2: 102}, version=version)
    assert (answer.isr, answer.partition_epoch) == ([1, 3, 2], 2)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"leader_epoch": -1}, ErrorCode.FENCED_LEADER_EPOCH),
        ({"leader_epoch": 7}, ErrorCode.NOT_CONTROLLER),
        ({"partition_epoch": -1}, ErrorCode.INVALID_UPDATE_VERSION),
        ({"partition_epoch": 7}, ErrorCode.NOT_CONTROLLER),
        ({"partition_index": 9}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ({"leader_recovery_state": 1}, ErrorCode.INVALID_REQUEST),
        ({"leader_recovery_state": 5}, ErrorCode.INVALID_REQUEST),
    ],
)
def test_a_stale_or_wrong_proposal_changes_nothing(state, change, code):
    before = state.image
    assert ask(state, {1: 101, 3: 103}, **change).error_code == code
    assert state.image.topics_by_name == before.topics_by_name


@pytest.mark.parametrize(
    ("isr", "code"),
    [
        ({2: 102}, ErrorCode.INVALID_REQUEST),  # without its leader, and not the rest of the ISR
        ({2: 102, 3: 99}, ErrorCode.INELIGIBLE_REPLICA),
        ({1: 101, 4: -1}, ErrorCode.INVALID_REQUEST),  # no replica
        ({}, ErrorCode.INVALID_REQUEST),
        ({1: 101, 2: 99}, ErrorCode.INELIGIBLE_REPLICA),  # an incarnation that is gone
    ],
)
def test_an_impossible_isr_is_refused(state, isr, code):
    assert ask(state, isr).error_code == code
    assert part(state).isr == (1, 2, 3)


def test_a_leader_resigns_by_leaving_the_isr(state):
    """Where Kafka answers INVALID_REQUEST."""
    assert ask(state, {2: 102, 3: 103}).error_code == ErrorCode.NEW_LEADER_ELECTED
    after = part(state)
    assert (after.leader, after.leader_epoch, after.isr, after.elr) == (2, 1, (2, 3), ())


def test_a_leader_that_resigns_stays_eligible_below_the_minimum_isr(state):
    apply(state, [ConfigRecord(resource_type=2, resource_name="t", name="min.insync.replicas", value="2")])
    ask(state, {1: 101, 3: 103})
    assert ask(state, {3: 103}).error_code == ErrorCode.NEW_LEADER_ELECTED
    assert (part(state).leader, part(state).isr, part(state).elr) == (3, (3,), (1,))


def test_a_leader_that_is_alone_in_the_isr_resigns_for_an_eligible_replica(state):
    apply(state, [ConfigRecord(resource_type=2, resource_name="t", name="min.insync.replicas", value="2")])
    ask(state, {1: 101, 3: 103})
    ask(state, {1: 101})
    assert part(state).elr == (3,)
    assert ask(state, {}).error_code == ErrorCode.NEW_LEADER_ELECTED
    assert (part(state).leader, part(state).isr, part(state).elr) == (3, (3,), (1,))


@pytest.mark.parametrize("unclean", ["false", "true"])
def test_a_leader_stays_where_no_replica_is_in_sync_or_eligible(state, unclean):
    apply(
        state, [ConfigRecord(resource_type=2, resource_name="t", name="unclean.leader.election.enable", value=unclean)]
    )
    ask(state, {1: 101})
    before = part(state)
    assert ask(state, {}).error_code == ErrorCode.INELIGIBLE_REPLICA
    assert part(state) == before


def test_only_the_leader_may(state):
    assert ask(state, {1: 101, 2: 102}, broker_id=2, broker_epoch=102).error_code == ErrorCode.INVALID_REQUEST


def test_another_incarnation_of_the_leader_may_not(state):
    with pytest.raises(KafkaError) as caught:
        ask(state, {1: 101}, broker_epoch=100)
    assert caught.value.code is ErrorCode.STALE_BROKER_EPOCH
    with pytest.raises(KafkaError) as caught:
        ask(state, {1: 101}, broker_id=9)
    assert caught.value.code is ErrorCode.BROKER_ID_NOT_REGISTERED


def test_an_unknown_topic_is_said_per_partition(state):
    request = proposal(state.image, 1, 101, "t", {1: 101})
    request.topics[0].topic_id = b"?" * 16
    records, response = at_once(alter_partition(state, request, 3))
    assert not records
    assert response.topics[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_ID


@pytest.mark.parametrize("change", [{"fenced": 1}, {"in_controlled_shutdown": 1}])
def test_a_broker_that_is_fenced_or_leaving_cannot_be_in_sync(state, change):
    ask(state, {1: 101, 3: 103})
    apply(state, [BrokerRegistrationChangeRecord(broker_id=2, broker_epoch=102, **change)])
    assert ask(state, {1: 101, 2: 102, 3: 103}).error_code == ErrorCode.INELIGIBLE_REPLICA


def test_a_replica_whose_log_directory_has_failed_does_not_join(state):
    """Its leader may not know yet. A write waited for it up to `replica.lag.time.max.ms`, or longer."""
    ask(state, {1: 101, 2: 102})
    apply(state, [BrokerRegistrationChangeRecord(broker_id=3, broker_epoch=103, log_dirs=[directory_id(3, 1)])])
    assert ask(state, {1: 101, 2: 102, 3: 103}).error_code == ErrorCode.INELIGIBLE_REPLICA
    assert part(state).isr == (1, 2)


def test_a_member_whose_log_directory_has_failed_keeps_no_other_from_leaving(state):
    apply(state, [BrokerRegistrationChangeRecord(broker_id=3, broker_epoch=103, log_dirs=[directory_id(3, 1)])])
    assert ask(state, {1: 101, 3: 103}).error_code == ErrorCode.NONE
    assert part(state).isr == (1, 3)


def test_the_former_leader_is_told_so(state):
    old = proposal(state.image, 1, 101, "t", {1: 101})
    apply(state, fence_brokers(state, [1]))
    records, response = at_once(alter_partition(state, old, 3))
    assert not records
    assert response.topics[0].partitions[0].error_code == ErrorCode.FENCED_LEADER_EPOCH


def test_the_same_proposal_twice_counts_once(state):
    request = proposal(state.image, 1, 101, "t", {1: 101, 3: 103})
    apply(state, at_once(alter_partition(state, request, 3))[0])
    records, response = at_once(alter_partition(state, request, 3))
    assert not records
    assert response.topics[0].partitions[0].error_code == ErrorCode.INVALID_UPDATE_VERSION
    request.topics[0].partitions *= 2
    codes = [one.error_code for one in at_once(alter_partition(state, request, 3))[1].topics[0].partitions]
    assert codes == [ErrorCode.INVALID_UPDATE_VERSION, ErrorCode.INVALID_REQUEST]


def test_a_partition_whose_topic_is_named_again_and_again_is_changed_once(state):
    """12,000 of them were as many metadata records of one decision, in which each forgot the others."""
    request = proposal(state.image, 1, 101, "t", {1: 101, 3: 103})
    request.topics *= 3
    records, response = at_once(alter_partition(state, request, 3))
    codes = [topic.partitions[0].error_code for topic in response.topics]
    assert codes == [ErrorCode.NONE, ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_REQUEST]
    assert len(records) == 1
    apply(state, records)
    assert (part(state).isr, part(state).partition_epoch) == ((1, 3), 1)


def test_a_leader_that_recovers_says_so_before_others_join(state):
    topic = state.image.topics_by_name["t"]
    change = PartitionChange(topic.partitions[0], 0, state.topic_rules(topic), state.election_rules())
    change.recovery_state, change.isr = RECOVERING, [1]
    apply(state, [change.build()])
    assert ask(state, {1: 101, 2: 102}, leader_recovery_state=1).error_code == ErrorCode.INVALID_REQUEST
    answer = ask(state, {1: 101, 2: 102}, leader_recovery_state=0)
    assert (answer.error_code, answer.leader_recovery_state) == (0, 0)


def test_below_the_minimum_those_who_leave_stay_eligible(state):
    state.settings.min_insync_replicas = 2
    ask(state, {1: 101})
    assert (part(state).isr, part(state).elr) == ((1,), (2, 3))
    ask(state, {1: 101, 2: 102})
    assert (part(state).isr, part(state).elr) == ((1, 2), ())
