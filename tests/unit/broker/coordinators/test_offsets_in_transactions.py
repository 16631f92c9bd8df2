"""TxnOffsetCommit at the group coordinator: offsets wait for the marker of their transaction (KIP-98, KIP-447)."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.unit.broker.coordinators.fakes import Reply, World, context
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.memory import offset_size_bytes
from tidelog.broker.coordinators.group.offsets import OffsetStore
from tidelog.broker.coordinators.group.records import OffsetCommit
from tidelog.broker.coordinators.outcome import TransactionEnd, WriteTransaction
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.group_records import OffsetCommitValue
from tidelog.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)

E = ErrorCode
PID = 5


def commit(
    world: World, offset: int, *, group: str = "g", producer_id: int = PID, epoch: int = 0, partition: int = 0,
    member: str = "", generation: int = -1, instance: str | None = None, metadata: str | None = "", version: int = 4,
    topic_id: bytes = bytes(16),
) -> Reply:  # fmt: skip
    partitions = [
        TxnOffsetCommitRequestPartition(partition_index=partition, committed_offset=offset, committed_metadata=metadata)
    ]
    request = TxnOffsetCommitRequest(
        transactional_id="txn", group_id=group, producer_id=producer_id, producer_epoch=epoch, generation_id=generation,
        member_id=member, group_instance_id=instance,
        topics=[TxnOffsetCommitRequestTopic(name="t", partitions=partitions)],
    )  # fmt: skip

    def run() -> Any:
        verification = world.service.begin_verification(group, producer_id, epoch, version >= 5)
        ids = {"t": topic_id}
        return world.service.commit_offsets_of_transaction(context(28, version), request, ids, verification)

    return world.ask(run)


def end(world: World, *, is_commit: bool = True, producer_id: int = PID, epoch: int = 0) -> Reply:
    transaction = WriteTransaction(producer_id, epoch)
    return world.ask(lambda: world.service.end_transaction(0, transaction, TransactionEnd(is_commit, 3)))


def errors(reply: Reply) -> list[int]:
    return [each.error_code for topic in reply.response.topics for each in topic.partitions]


def stable_error(world: World, group: str = "g") -> int:
    reply = world.ask(lambda: world.service.fetch_offsets(group, [("t", bytes(16), [0])], True))
    return int(reply.response[0][1][0].error)


def test_offsets_are_visible_when_their_transaction_is_committed():
    world = World()
    world.commit(offsets={("t", 0): 3})
    assert errors(commit(world, 10)) == [0]
    assert (world.committed(), stable_error(world)) == (3, E.UNSTABLE_OFFSET_COMMIT)
    assert end(world).response is True
    assert (world.committed(), stable_error(world)) == (10, E.NONE)


def test_offsets_of_an_aborted_transaction_are_dropped():
    world = World()
    commit(world, 10)
    end(world, is_commit=False)
    assert (world.committed(), stable_error(world)) == (-1, E.NONE)


def test_a_retried_commit_wins_inside_its_transaction():
    world = World()
    commit(world, 10)
    commit(world, 12)
    end(world)
    assert world.committed() == 12


def test_the_later_record_wins_when_an_earlier_transaction_ends_later():
    world = World()
    commit(world, 10, producer_id=1)
    commit(world, 20, producer_id=2)
    end(world, producer_id=2)
    end(world, producer_id=1)
    assert world.committed() == 20


def test_transactions_of_other_producers_stay_open():
    world = World()
    commit(world, 10, producer_id=1)
    commit(world, 20, producer_id=2, partition=1)
    end(world, producer_id=1)
    assert [world.committed(partition=index) for index in (0, 1)] == [10, -1]


def test_the_log_holds_transactional_batches_and_a_marker_as_kafka_writes_them():
    world = World()
    commit(world, 10, epoch=4)
    end(world, epoch=5)
    data, marker = (read_header(batch) for batch in world.ports.logs[0])
    assert (data.producer_id, data.producer_epoch, data.base_sequence) == (PID, 4, -1)
    assert (data.is_transactional, data.is_control) == (True, False)
    assert (marker.producer_id, marker.producer_epoch, marker.base_sequence) == (PID, 5, -1)
    assert (marker.is_transactional, marker.is_control) == (True, True)


@pytest.mark.parametrize(("is_ended", "offset"), [(False, -1), (True, 10)])
def test_a_new_coordinator_learns_it_from_the_log(is_ended: bool, offset: int):
    world = World()
    commit(world, 10)
    if is_ended:
        end(world)
    world.restart()
    assert world.committed() == offset
    assert stable_error(world) == (E.NONE if is_ended else E.UNSTABLE_OFFSET_COMMIT)
    end(world)
    assert world.committed() == 10


def test_the_marker_is_replayed_behind_the_offsets_that_were_written_before_it():
    world = World(commits_at_once=False)
    committed, ended = commit(world, 10), end(world)
    assert committed.is_parked
    assert ended.is_parked
    world.ports.commit(0, 1)
    assert errors(committed) == [0]
    assert ended.is_parked, "the marker itself is not committed"
    world.ports.commit(0)
    assert ended.response is True
    assert world.committed() == 10


def test_a_marker_that_is_not_committed_in_time_is_refused_and_takes_effect_all_the_same():
    world = World(commits_at_once=False)
    commit(world, 10)
    ended = end(world)
    world.advance(world.config.offsets_commit_timeout_ms + 1)
    assert ended.response.code == E.COORDINATOR_NOT_AVAILABLE
    world.ports.commit(0)
    assert world.committed() == 10


def test_a_refused_marker_ends_nothing():
    world = World()
    commit(world, 10)
    world.ports.refuse_appends = KafkaError(E.INVALID_PRODUCER_EPOCH)
    assert end(world).error == E.INVALID_PRODUCER_EPOCH
    assert stable_error(world) == E.UNSTABLE_OFFSET_COMMIT


def test_a_refused_commit_stages_nothing():
    world = World()
    world.ports.refuse_appends = KafkaError(E.INVALID_TXN_STATE)
    assert commit(world, 10).error == E.INVALID_TXN_STATE
    world.ports.refuse_appends = None
    assert stable_error(world) == E.NONE
    end(world)
    assert world.committed() == -1


def test_the_epoch_is_checked_before_anything_is_staged():
    world = World()
    world.ports.verifies = True
    world.ports.producers.accept(PID, 3, 0, 0, 0, 0, False)
    assert commit(world, 10, epoch=2).error == E.INVALID_PRODUCER_EPOCH
    assert 0 not in world.ports.logs


class TestMembers:
    def test_the_member_and_its_generation_must_be_right(self):
        world = World()
        (member,) = world.stable()
        assert errors(commit(world, 1, member=member, generation=1)) == [0]
        assert commit(world, 1, member=member, generation=2).error == E.ILLEGAL_GENERATION
        assert commit(world, 1, member=member, generation=-1).error == E.ILLEGAL_GENERATION
        assert commit(world, 1, member="ghost", generation=1).error == E.UNKNOWN_MEMBER_ID
        assert commit(world, 1, member=member, generation=1, instance="i").error == E.UNKNOWN_MEMBER_ID

    def test_clients_that_do_not_name_a_member_may_commit(self):
        """Versions 0 to 2 have no such fields; other commits are refused there."""
        world = World()
        world.stable()
        assert errors(commit(world, 1, version=2)) == [0]

    def test_they_may_while_the_group_rebalances(self):
        world = World()
        (member,) = world.stable()
        world.join(member=member, protocols={"range": b"other"})
        world.member()
        assert errors(commit(world, 1, member=member, generation=world.coordinator().groups["g"].generation)) == [0]

    def test_an_unknown_group_is_made_for_clients_without_a_generation(self):
        world = World()
        assert commit(world, 1, generation=0).error == E.ILLEGAL_GENERATION
        assert errors(commit(world, 1)) == [0]

    def test_no_group_id_is_invalid(self):
        assert commit(World(), 1, group="").error == E.INVALID_GROUP_ID


@pytest.mark.parametrize("groups", [1, 3000])
def test_very_many_open_transactions_do_not_slow_a_group(groups: int):
    """Thousands of producers may have offsets of a partition of the log pending, of one group or of as many."""
    store = OffsetStore()
    value = OffsetCommitValue(offset=1)
    for producer_id in range(3000):
        store.replay(producer_id, OffsetCommit(f"g{producer_id % groups}", "t", 0, value), producer_id)
    began_s = time.process_time()
    ((_, partitions),) = store.fetch("g0", [("t", bytes(16), list(range(5000)))], True)
    for index in range(1, 5000):
        store.replay(4000, OffsetCommit("g0", "t", index, None), -1)
    assert not any(f"other-{number}" in store for number in range(5000))
    assert time.process_time() - began_s < 5, "looking at each transaction takes a minute"
    assert [each.error for each in partitions[:2]] == [E.UNSTABLE_OFFSET_COMMIT, E.NONE]
    assert list(store.keys("g0")) == [("t", 0)]
    for producer_id in range(3000):
        store.replay_end_transaction(producer_id, True)
    assert not store.is_pending("g0", "t", 0)
    assert len(store.group_ids()) == groups


@pytest.mark.parametrize(("is_commit", "found"), [(True, 7), (False, -1)])
def test_an_open_transaction_keeps_its_offset_when_that_of_a_deleted_topic_is_deleted(is_commit: bool, found: int):
    """A tombstone deletes the offsets of open transactions, too."""
    world = World()
    world.commit(offsets={("t", 0): 1})
    world.service.on_topics_deleted([("x", bytes(16))])
    world.service.on_topics_deleted([("t", bytes(16))])  # has its turn after the other one
    commit(world, 7)
    world.advance(1000)
    end(world, is_commit=is_commit)
    world.advance(1000)
    assert world.committed() == found


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_commit_for_a_new_topic_is_not_deleted_with_an_offset_of_the_old_one_in_a_transaction(is_commit: bool):
    """Both were under way when the topic was deleted and made anew."""
    world = World(commits_at_once=False)
    commit(world, 7)
    world.service.on_topics_deleted([("t", bytes(16))])
    renewed = world.commit(offsets={("t", 0): 2})
    for _ in range(3):
        world.ports.commit(0)
        world.advance(1000)
    assert renewed.response is not None
    assert world.committed() == 2
    end(world, is_commit=is_commit)
    for _ in range(3):
        world.ports.commit(0)
        world.advance(1000)
    assert world.committed() == 2
    assert not world.coordinator()._groups_to_sweep_later


def test_metadata_is_limited():
    world = World()
    assert errors(commit(world, 1, metadata="x" * 4097)) == [E.OFFSET_METADATA_TOO_LARGE]
    end(world)
    assert world.committed() == -1


def test_pending_offsets_are_charged_and_given_back():
    world = World()
    memory = world.coordinator().offsets.memory
    for offset in range(3):
        commit(world, offset, metadata="m" * 100)
    held_bytes = memory.held_bytes
    assert held_bytes >= offset_size_bytes("m" * 100)
    end(world, is_commit=False)
    assert memory.held_bytes == 0
    commit(world, 1, metadata="m" * 100)
    assert memory.held_bytes == held_bytes, "a retried commit takes no more than one"


def test_a_retried_commit_needs_no_more_room():
    world = World()
    commit(world, 1)
    room = world.coordinator().offsets.memory.held_bytes
    world = World(GroupCoordinatorConfig(max_offsets_memory_bytes=room))
    assert [errors(commit(world, offset)) for offset in (1, 2)] == [[0], [0]]


def test_pending_offsets_are_bounded():
    room = 3 * offset_size_bytes("")
    world = World(GroupCoordinatorConfig(max_offsets_memory_bytes=room))
    replies = [commit(world, 1, producer_id=producer_id) for producer_id in range(10)]
    assert E.COORDINATOR_NOT_AVAILABLE in [
        reply.response.code for reply in replies if isinstance(reply.response, KafkaError)
    ]
    assert world.coordinator().offsets.memory.held_bytes <= room


# -- a coordinator that the controller may have replaced -----------------------------------------------------------


def test_a_coordinator_without_a_session_proves_that_it_leads_before_it_tells_stable_offsets():
    world = World()
    world.commit("g", {("t", 0): 100})
    world.ports.commits_at_once = False
    world.has_session = False
    reply = world.committed(stable=True)
    assert isinstance(reply, Reply)
    assert reply.is_parked
    assert world.committed() == 100  # other readers may process a record twice
    world.ports.commit(0)
    assert reply.response[0][1][0].offset == 100
    world.has_session = True
    assert world.committed(stable=True) == 100


@pytest.mark.parametrize("learns_of_it", [True, False])
def test_a_coordinator_that_was_replaced_tells_no_stable_offsets(learns_of_it: bool):
    world = World()
    world.commit("g", {("t", 0): 100})
    world.ports.commits_at_once = False
    world.has_session = False
    reply = world.committed(stable=True)
    if learns_of_it:
        world.service.on_partition_resigned(0)
        assert reply.error == E.NOT_COORDINATOR
    else:
        world.advance(world.config.offsets_commit_timeout_ms)
        assert reply.error == E.COORDINATOR_NOT_AVAILABLE


def test_the_record_of_that_proof_changes_nothing():
    world = World()
    world.has_session = False
    assert world.committed("none", stable=True) == -1
    world.commit("g", {("t", 0): 100})
    assert world.committed(stable=True) == 100
    world.restart()
    assert world.committed() == 100
    assert [group.group_id for group in world.list_groups((), ())] == ["g"]
