"""Partitions move: the list grows, the ISR follows, the list shrinks; or it is cancelled on the way."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.replication.clusters import apply, cluster_state
from tests.unit.replication.controller_harness import cluster
from tests.unit.replication.test_isr_alterations import proposal
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.alter_partition_reassignments import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
    ReassignableTopic,
)
from tidelog.protocol.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsTopics,
)
from tidelog.protocol.messages.metadata_records import FeatureLevelRecord, PartitionChangeRecord
from tidelog.replication.controller.decisions.isr_alterations import alter_partition
from tidelog.replication.controller.decisions.leaders import fence_brokers, forget_incarnation, unfence_broker
from tidelog.replication.controller.decisions.reassignment import (
    alter_partition_reassignments,
    list_partition_reassignments,
)
from tidelog.replication.controller.decisions.state import NewTopic, at_once
from tidelog.replication.controller.decisions.supported_features import READS_BEFORE_REMOVAL
from tidelog.replication.controller.metadata.image import NO_LEADER, RECOVERED, RECOVERING


@pytest.fixture
def state():
    state = cluster_state([1, 2, 3, 4])
    apply(state, [FeatureLevelRecord(name="metadata.version", feature_level=30)])
    apply(state, [FeatureLevelRecord(name="eligible.leader.replicas.version", feature_level=1)])
    apply(state, state.create_topics([NewTopic("t", assignments=[(0, [1, 2])])])[0])
    return state


def move(state, replicas, *, name="t", index=0, factor_may_change=True):
    request = AlterPartitionReassignmentsRequest(
        allow_replication_factor_change=factor_may_change,
        topics=[
            ReassignableTopic(name=name, partitions=[ReassignablePartition(partition_index=index, replicas=replicas)])
        ],
    )
    records, response = at_once(alter_partition_reassignments(state, request))
    apply(state, records)
    return ErrorCode(response.responses[0].partitions[0].error_code)


def in_sync(state, *members):
    """The leader reports this ISR."""
    leader = part(state).leader
    request = proposal(state.image, leader, 100 + leader, "t", dict.fromkeys(members, -1))
    records, response = at_once(alter_partition(state, request, 3))
    apply(state, records)
    return ErrorCode(response.topics[0].partitions[0].error_code)


def part(state):
    return state.image.topics_by_name["t"].partitions[0]


def listed(state, topics=None):
    response = list_partition_reassignments(state, ListPartitionReassignmentsRequest(topics=topics))
    return {
        (topic.name, one.partition_index): (one.replicas, one.adding_replicas, one.removing_replicas)
        for topic in response.topics
        for one in topic.partitions
    }


def test_a_move_from_beginning_to_end(state):
    assert move(state, [3, 4]) is ErrorCode.NONE
    assert part(state).replicas == (3, 4, 1, 2)
    assert (part(state).leader, part(state).isr, part(state).leader_epoch) == (1, (1, 2), 0)
    assert len(part(state).directories) == 4
    assert listed(state) == {("t", 0): ([3, 4, 1, 2], [3, 4], [1, 2])}
    assert in_sync(state, 1, 2, 3) is ErrorCode.NONE
    assert part(state).replicas == (3, 4, 1, 2)
    # With the last of the newcomers it is over, and the leader is another.
    assert in_sync(state, 1, 2, 3, 4) is ErrorCode.NEW_LEADER_ELECTED
    assert (part(state).replicas, part(state).isr) == ((3, 4), (3, 4))
    assert (part(state).leader, part(state).leader_epoch) == (3, 1)
    assert listed(state) == {}


def test_a_growing_replica_list(state):
    assert move(state, [1, 2, 3]) is ErrorCode.NONE
    assert in_sync(state, 1, 2, 3) is ErrorCode.NONE
    assert (part(state).replicas, part(state).leader, part(state).leader_epoch) == ((1, 2, 3), 1, 0)
    assert listed(state) == {}


def test_a_shrinking_one_is_done_at_once(state):
    assert move(state, [1]) is ErrorCode.NONE
    assert (part(state).replicas, part(state).isr, part(state).leader, part(state).leader_epoch) == ((1,), (1,), 1, 1)
    assert move(state, [1]) is ErrorCode.NONE
    assert part(state).leader_epoch == 1


def test_another_order_is_done_at_once_and_moves_no_leader(state):
    assert move(state, [2, 1]) is ErrorCode.NONE
    assert (part(state).replicas, part(state).leader) == ((2, 1), 1)


def test_cancelled_on_the_way(state):
    move(state, [3, 4])
    in_sync(state, 1, 2, 3)
    assert move(state, None) is ErrorCode.NONE
    assert (part(state).replicas, part(state).isr) == ((1, 2), (1, 2))
    assert (part(state).adding_replicas, part(state).removing_replicas, part(state).leader_epoch) == ((), (), 1)
    assert move(state, None) is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS


def only_3_has_all_records(state):
    """The partition moves to 3 and 4. 1 and 2 died before 3, which is the last known leader, and eligible."""
    move(state, [3, 4])
    in_sync(state, 1, 2, 3)
    for broker_id in (1, 2, 3):
        apply(state, fence_brokers(state, [broker_id]))
    assert (part(state).leader, part(state).isr, part(state).elr) == (-1, (), (3,))


@pytest.mark.parametrize("may_have_lost_records", [False, True])
def test_a_cancellation_keeps_the_only_replica_that_may_lead(state, may_have_lost_records):
    """Without it the partition had no leader for good, and the replica, of which it no longer was one, was removed."""
    only_3_has_all_records(state)
    if may_have_lost_records:
        apply(state, forget_incarnation(state, 3, clean=False))
        assert (part(state).elr, part(state).last_known_elr) == ((), (3,))
    assert move(state, None) is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert part(state).adding_replicas == (3, 4)
    apply(state, unfence_broker(state, 3))
    assert (part(state).leader, part(state).isr) == (3, (3,))


def test_it_is_cancelled_without_a_leader_where_an_old_replica_may_lead(state):
    move(state, [3, 4])
    in_sync(state, 1, 2, 3)
    apply(state, fence_brokers(state, [1, 2, 3]))
    assert (part(state).leader, part(state).elr) == (-1, (1, 2, 3))
    assert move(state, None) is ErrorCode.NONE
    assert (part(state).replicas, part(state).elr) == ((1, 2), (1, 2))
    apply(state, unfence_broker(state, 2))
    assert part(state).leader == 2


def test_it_is_cancelled_where_the_topic_may_lose_records(state):
    only_3_has_all_records(state)
    state.settings.unclean_leader_election = True
    assert move(state, None) is ErrorCode.NONE
    apply(state, unfence_broker(state, 1))
    assert (part(state).replicas, part(state).leader) == ((1, 2), 1)


def test_replaced_on_the_way_by_another_target(state):
    move(state, [3, 4])
    assert move(state, [1, 3]) is ErrorCode.NONE
    assert (part(state).replicas, part(state).adding_replicas) == ((1, 3, 2, 4), (3,))
    assert in_sync(state, 1, 2, 3) is ErrorCode.NONE
    assert (part(state).replicas, part(state).isr, part(state).leader) == ((1, 3), (1, 3), 1)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"replicas": []}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ({"replicas": [1, 1]}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ({"replicas": [1, 9]}, ErrorCode.INVALID_REPLICA_ASSIGNMENT),
        ({"replicas": [1], "name": "u"}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ({"replicas": [1], "index": 5}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ({"replicas": None}, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS),
        ({"replicas": [1, 2, 3], "factor_may_change": False}, ErrorCode.INVALID_REPLICATION_FACTOR),
    ],
)
def test_what_cannot_be_is_refused(state, arguments, code):
    before = state.image
    assert move(state, **arguments) is code
    assert state.image.topics_by_name == before.topics_by_name


def test_what_is_listed_can_be_chosen(state):
    move(state, [3, 4])
    assert listed(state, [ListPartitionReassignmentsTopics(name="t", partition_indexes=[0, 7])])
    assert not listed(state, [ListPartitionReassignmentsTopics(name="u", partition_indexes=[0])])


def let_read(state, *brokers):
    """These brokers read their log before replicas are removed."""
    for broker in brokers:
        state.image.brokers[broker].features[READS_BEFORE_REMOVAL] = (0, 1)


def test_a_removal_waits_until_the_leader_has_read_its_log(state):
    let_read(state, 1, 2)
    assert move(state, [1]) is ErrorCode.NONE
    assert (part(state).replicas, part(state).isr, part(state).leader) == ((1, 2), (1, 2), 1)
    assert listed(state) == {("t", 0): ([1, 2], [], [2])}
    assert in_sync(state, 1, 2) is ErrorCode.NONE  # the ISR as it is: it has read its log
    assert (part(state).replicas, part(state).isr, part(state).leader_epoch) == ((1,), (1,), 1)
    assert listed(state) == {}


def test_a_removal_of_the_leader_makes_one_that_stays_lead_and_read(state):
    let_read(state, 2)
    assert move(state, [2]) is ErrorCode.NONE
    assert (part(state).replicas, part(state).isr, part(state).leader) == ((2, 1), (1, 2), 2)
    assert in_sync(state, 1, 2) is ErrorCode.NONE
    assert (part(state).replicas, part(state).leader) == ((2,), 2)


def test_a_removal_does_not_end_because_the_removed_replica_leaves_the_isr(state):
    let_read(state, 1, 2)
    move(state, [1])
    assert in_sync(state, 1) is ErrorCode.NONE
    assert (part(state).replicas, part(state).isr) == ((1, 2), (1,))
    assert in_sync(state, 1) is ErrorCode.NONE
    assert part(state).replicas == (1,)


def test_a_leader_that_has_recovered_has_not_read_its_log(state):
    let_read(state, 1, 2)
    move(state, [1])
    in_sync(state, 1)
    topic_id = state.image.topics_by_name["t"].topic_id
    apply(state, [PartitionChangeRecord(partition_id=0, topic_id=topic_id, leader_recovery_state=RECOVERING)])
    assert in_sync(state, 1) is ErrorCode.NONE
    assert (part(state).replicas, part(state).leader_recovery_state) == ((1, 2), RECOVERED)
    assert in_sync(state, 1) is ErrorCode.NONE
    assert part(state).replicas == (1,)


def test_the_present_leader_is_the_one_that_reads_also_where_another_replica_comes_first(state):
    apply(state, state.create_topics([NewTopic("u", assignments=[(0, [1, 2, 3])])])[0])
    topic_id = state.image.topics_by_name["u"].topic_id
    apply(state, [PartitionChangeRecord(partition_id=0, topic_id=topic_id, leader=2)])
    let_read(state, 2)
    move(state, [1, 2], name="u")
    moved = state.image.topics_by_name["u"].partitions[0]
    assert (moved.replicas, moved.removing_replicas, moved.leader) == ((1, 2, 3), (3,), 2)


def test_a_removal_waits_for_a_leader_that_reads(state):
    apply(state, [FeatureLevelRecord(name="eligible.leader.replicas.version", feature_level=0)])
    let_read(state, 1)
    for broker in (2, 1):
        apply(state, fence_brokers(state, [broker]))
    assert (part(state).isr, part(state).leader) == ((1,), NO_LEADER)
    move(state, [1])
    assert part(state).replicas == (1, 2)
    apply(state, unfence_broker(state, 1))
    assert (part(state).replicas, part(state).leader) == ((1, 2), 1)
    assert in_sync(state, 1) is ErrorCode.NONE
    assert part(state).replicas == (1,)


def test_a_removal_goes_on_with_the_next_leader(state):
    apply(state, state.create_topics([NewTopic("u", assignments=[(0, [1, 2, 3])])])[0])
    let_read(state, 1, 2, 3)
    move(state, [1, 2], name="u")
    apply(state, fence_brokers(state, [1]))
    moved = state.image.topics_by_name["u"].partitions[0]
    assert (moved.replicas, moved.isr, moved.leader) == ((1, 2, 3), (2, 3), 2)
    apply(state, fence_brokers(state, [2]))
    moved = state.image.topics_by_name["u"].partitions[0]
    assert (moved.isr, moved.leader) == ((3,), 3)  # the partition stays in use


def test_a_removal_is_cancelled_while_it_waits(state):
    let_read(state, 1, 2)
    move(state, [2])
    assert move(state, None) is ErrorCode.NONE
    assert (part(state).replicas, part(state).isr, part(state).removing_replicas) == ((2, 1), (1, 2), ())
    assert listed(state) == {}


def test_a_removal_does_not_wait_for_a_broker_that_does_not_read_or_where_a_copy_is_fresh(state):
    let_read(state, 1)
    assert move(state, [2]) is ErrorCode.NONE
    assert part(state).replicas == (2,)
    let_read(state, 2, 3)
    assert move(state, [3]) is ErrorCode.NONE
    assert in_sync(state, 2, 3) is ErrorCode.NEW_LEADER_ELECTED
    assert part(state).replicas == (3,)


@pytest.mark.parametrize("apart", [False, True])
def test_a_partition_that_is_named_again_is_decided_on_as_the_first_change_leaves_it(state, apart):
    targets = [ReassignablePartition(partition_index=0, replicas=replicas) for replicas in ([3, 4], None, None)]
    topics = [ReassignableTopic(name="t", partitions=[each]) for each in targets]
    if not apart:
        topics = [ReassignableTopic(name="t", partitions=targets)]
    request = AlterPartitionReassignmentsRequest(allow_replication_factor_change=True, topics=topics)
    records, response = at_once(alter_partition_reassignments(state, request))
    assert [each.error_code for topic in response.responses for each in topic.partitions] == [
        ErrorCode.NONE,
        ErrorCode.NONE,
        ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
    ]
    apply(state, records)
    assert (set(part(state).replicas), part(state).isr, part(state).leader) == ({1, 2}, (1, 2), 1)
    assert (part(state).adding_replicas, part(state).removing_replicas) == ((), ())


@pytest.mark.parametrize(("count", "pauses"), [(100, 0), (101, 1)])
async def test_a_list_of_many_reassignments_waits_for_a_turn_of_its_own(count, pauses):
    """4,000 requests of 21 bytes, each for 2,000 partitions, had the active controller lose its lead."""
    _, member, _ = await cluster()
    created = await member.controller.create_topics([NewTopic("t", count, 2)])
    assert "t" in created
    topic = member.controller.image.topics_by_name["t"]
    targets = {
        index: [*partition.replicas, *({1, 2, 3} - {*partition.replicas})]
        for index, partition in topic.partitions.items()
    }
    await member.controller.alter_partition_reassignments(
        AlterPartitionReassignmentsRequest(
            topics=[
                ReassignableTopic(
                    name="t",
                    partitions=[ReassignablePartition(partition_index=i, replicas=each) for i, each in targets.items()],
                )
            ]
        )
    )
    noted = []

    async def pause():
        noted.append(1)
        await asyncio.sleep(0)

    member.controller.pause = pause
    response = await member.controller.list_partition_reassignments(ListPartitionReassignmentsRequest(topics=None))
    assert [one.partition_index for one in response.topics[0].partitions] == list(range(count))
    assert len(noted) == pauses


def test_a_partition_that_is_named_again_is_listed_once(state):
    move(state, [3, 4])
    named = [ListPartitionReassignmentsTopics(name="t", partition_indexes=[0, 0, 7, 0])]
    response = list_partition_reassignments(state, ListPartitionReassignmentsRequest(topics=named))
    assert [one.partition_index for one in response.topics[0].partitions] == [0]
