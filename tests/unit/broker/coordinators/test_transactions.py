"""The transaction coordinator: identities, partitions, ends of transactions, markers, and who comes too late."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from tests.unit.broker.coordinators.transaction_world import FIRST_PRODUCER_ID, T0, T1, TransactionWorld
from tidelog.broker.coordinators.transaction import coordinator
from tidelog.broker.coordinators.transaction.config import TransactionCoordinatorConfig
from tidelog.broker.coordinators.transaction.coordinator import WAIT_MS
from tidelog.broker.coordinators.transaction.states import TransactionState
from tidelog.broker.coordinators.transaction.transitions import NO_IDENTITY, ProducerIdentity
from tidelog.protocol.errors import ErrorCode, KafkaError

E = ErrorCode
S = TransactionState
P = ProducerIdentity


def test_a_transaction_of_version_2_from_its_producer_to_its_completion():
    world = TransactionWorld()
    producer = world.producer()
    assert producer == (FIRST_PRODUCER_ID, 0)
    assert world.add(producer, T0, T1).response == {T0: E.NONE, T1: E.NONE}
    assert world.state().state is S.ONGOING
    assert world.end(producer).response == P(FIRST_PRODUCER_ID, 1), "the next transaction has the next epoch"
    assert world.state().state is S.PREPARE_COMMIT
    (marker,) = world.markers.sent
    assert tuple(marker) == (0, 1, FIRST_PRODUCER_ID, 1, True, 2, {T0, T1})
    world.write_markers()
    state = world.state()
    assert (state.state, state.partitions, state.producer_epoch) == (S.COMPLETE_COMMIT, frozenset(), 1)


def test_a_transaction_of_version_1_keeps_the_epoch():
    world = TransactionWorld(version=1)
    producer = world.producer()
    assert world.add_error(producer, version=0) is E.NONE
    assert world.end(producer, commit=False, version=0).response == NO_IDENTITY
    assert world.markers.sent[0][3:6] == (0, False, 0)
    world.write_markers()
    assert world.state().state is S.COMPLETE_ABORT
    assert world.transact(producer, version=0) == producer


def test_a_new_producer_of_the_same_id_gets_the_next_epoch_and_fences_the_old():
    world = TransactionWorld()
    old = world.producer()
    new = world.producer()
    assert new == (old.producer_id, 1)
    assert world.add_error(old) is E.PRODUCER_FENCED
    assert world.end(old).error == E.PRODUCER_FENCED
    assert world.add_error(old, verify=True) is E.PRODUCER_FENCED


def test_an_id_without_a_producer_is_refused():
    world = TransactionWorld()
    producer = P(5, 0)
    assert world.add_error(producer) is E.INVALID_PRODUCER_ID_MAPPING
    assert world.add_error(producer, verify=True) is E.INVALID_PRODUCER_ID_MAPPING
    assert world.end(producer).error == E.INVALID_PRODUCER_ID_MAPPING
    assert world.end(producer, version=0).error == E.INVALID_PRODUCER_ID_MAPPING
    world.producer()
    assert world.add_error(producer) is E.INVALID_PRODUCER_ID_MAPPING, "another producer id"


def test_an_empty_transactional_id_and_odd_timeouts_are_refused():
    world = TransactionWorld()
    assert world.init("").error == E.INVALID_REQUEST
    assert world.add_error(P(1, 0), transactional_id="") is E.INVALID_REQUEST
    assert world.end(P(1, 0), transactional_id="").error == E.INVALID_REQUEST
    for timeout_ms in (0, -1, 900_001):
        assert world.init(timeout_ms=timeout_ms).error == E.INVALID_TRANSACTION_TIMEOUT
    assert world.init(timeout_ms=900_000).response == (FIRST_PRODUCER_ID, 0)


def test_a_complete_transaction_waits_for_each_of_its_markers():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer, T0, T1)
    world.end(producer)
    ((_, on_done),) = world.markers.waiting
    on_done(frozenset({T0}))
    world.advance()
    assert world.state().state is S.PREPARE_COMMIT
    assert world.service.describe("tx").partitions == {T1}, "operators see what the transaction waits for"
    on_done(frozenset({T0}))  # once more
    world.advance()
    assert world.state().state is S.PREPARE_COMMIT
    on_done(frozenset({T1}))
    world.advance()
    assert world.state().state is S.COMPLETE_COMMIT
    on_done(frozenset({T1}))
    world.advance()


def test_a_late_answer_about_markers_does_not_count_for_the_next_transaction():
    world = TransactionWorld()
    producer = world.producer()
    assert world.add_error(producer) is E.NONE
    producer = world.end(producer).response
    ((marker, on_done),) = world.markers.waiting
    world.write_markers()
    assert world.add_error(producer) is E.NONE
    world.end(producer)
    on_done(marker.partitions)
    world.advance()
    assert world.state().state is S.PREPARE_COMMIT
    world.write_markers()
    assert world.state().state is S.COMPLETE_COMMIT


def test_markers_that_are_answered_twice_have_one_completion_stored():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    world.end(producer)
    ((marker, on_done),) = world.markers.waiting
    end_offset = world.ports.end_offsets[0]
    world.ports.commits_at_once = False
    for _ in range(2):
        on_done(marker.partitions)
        world.advance()
    assert world.ports.end_offsets[0] == end_offset + 1


def test_while_markers_are_written_the_next_transaction_waits():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    following = world.end(producer).response
    assert world.add_error(following) is E.CONCURRENT_TRANSACTIONS
    assert world.end(following).error == E.CONCURRENT_TRANSACTIONS
    assert world.end(producer).error == E.CONCURRENT_TRANSACTIONS, "a repetition"
    assert world.init().error == E.CONCURRENT_TRANSACTIONS
    world.write_markers()
    assert world.add_error(following) is E.NONE


def test_an_add_waits_for_the_last_markers_and_begins_in_the_batch_of_the_completion():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    following = world.end(producer).response
    waiting = world.add(following)
    assert waiting.response is None
    end_offset, appends = world.ports.end_offsets[0], len(world.ports.logs[0])
    world.write_markers()
    assert waiting.response == {T0: E.NONE}
    assert world.state().state is S.ONGOING
    assert world.ports.end_offsets[0] == end_offset + 2, "the completion, and the next transaction"
    assert len(world.ports.logs[0]) == appends + 1
    before = world.state()
    world.restart()
    assert world.state() == before._replace(last_producer_epoch=-1)
    assert isinstance(world.end(following).response, ProducerIdentity)


def test_it_waits_until_both_are_committed():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    following = world.end(producer).response
    waiting = world.add(following)
    world.ports.commits_at_once = False
    world.write_markers()
    assert waiting.response is None
    assert world.state().state is S.PREPARE_COMMIT
    world.ports.commit(0)
    assert waiting.response == {T0: E.NONE}


def test_several_adds_wait_and_each_is_judged_when_its_turn_comes():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    following = world.end(producer).response
    late = world.add(producer)
    waiting = [world.add(following, partition) for partition in (T0, T1)]
    strange = world.add(P(9, 9))
    world.write_markers()
    assert [each.response for each in waiting] == [{T0: E.NONE}, {T1: E.NONE}]
    assert late.response == {T0: E.PRODUCER_FENCED}
    assert strange.response == {T0: E.INVALID_PRODUCER_ID_MAPPING}
    assert world.state().partitions == {T0, T1}
    assert not world.coordinator()._waiting_count


def test_an_add_waits_for_the_add_of_another_broker():
    world = TransactionWorld()
    producer = world.producer()
    world.ports.commits_at_once = False
    first, second = world.add(producer, T0), world.add(producer, T1)
    world.ports.commit(0)
    assert first.response == {T0: E.NONE}
    assert second.response is None
    world.ports.commit(0)
    assert second.response == {T1: E.NONE}


def test_a_completion_that_fails_takes_the_waiting_add_with_it():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    following = world.end(producer).response
    first, second = world.add(following), world.add(following, T1)
    world.ports.refuse_appends = KafkaError(E.NOT_ENOUGH_REPLICAS)
    world.write_markers()
    assert first.response == {T0: E.COORDINATOR_NOT_AVAILABLE}
    assert world.state().state is S.PREPARE_COMMIT
    world.advance(WAIT_MS)
    assert second.response == {T1: E.CONCURRENT_TRANSACTIONS}
    world.ports.refuse_appends = None
    world.advance(100)
    assert world.state().state is S.COMPLETE_COMMIT
    assert world.add_error(following) is E.NONE


def test_an_add_waits_only_for_a_transition_of_a_few_milliseconds():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    following = world.end(producer).response
    world.advance(WAIT_MS - 1)
    waiting = world.add(following)
    assert waiting.response is None
    world.advance(1)
    assert waiting.response == {T0: E.CONCURRENT_TRANSACTIONS}
    assert world.add(following).response == {T0: E.CONCURRENT_TRANSACTIONS}, "it takes longer: nothing waits"
    world.restart()
    assert world.add(following).response == {T0: E.CONCURRENT_TRANSACTIONS}


def test_waiting_adds_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coordinator, "WAITING_ADDS_MAX", 2)
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    following = world.end(producer).response
    many = [("t", number) for number in range(coordinator.WAITING_PARTITIONS_MAX + 1)]
    assert set(world.add(following, *many).response.values()) == {E.CONCURRENT_TRANSACTIONS}
    waiting = [world.add(following), world.add(following)]
    assert world.add(following).response == {T0: E.CONCURRENT_TRANSACTIONS}
    world.service.on_partition_resigned(0)
    assert [each.response for each in waiting] == [{T0: E.NOT_COORDINATOR}] * 2


def test_an_add_among_others_of_one_request_does_not_wait():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    following = world.end(producer).response
    answer = world.service.add_partitions(
        "tx", following.producer_id, following.epoch, [T0], verify_only=False, transaction_version=2, waits=False
    )
    assert answer == {T0: E.CONCURRENT_TRANSACTIONS}


def test_adding_a_partition_that_is_there_writes_nothing():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer, T0, T1)
    end_offset = world.ports.end_offsets[0]
    assert world.add_error(producer, T1) is E.NONE
    assert world.ports.end_offsets[0] == end_offset


def test_partitions_are_verified_one_by_one():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer, T0)
    assert world.add(producer, T0, T1, verify=True).response == {T0: E.NONE, T1: E.TRANSACTION_ABORTABLE}
    following = world.end(producer).response
    assert world.add_error(following, verify=True) is E.CONCURRENT_TRANSACTIONS
    world.write_markers()
    assert world.add_error(following, verify=True) is E.TRANSACTION_ABORTABLE


# -- EndTxn again and too late -----------------------------------------------------------------------------------------


def test_trap_13_a_repeated_end_of_version_2_is_answered_with_the_same_identity():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    following = world.end(producer).response
    world.write_markers()
    assert world.end(producer).response == following
    assert world.end(producer, commit=False).error == E.INVALID_TXN_STATE
    assert world.state().producer_epoch == following.epoch, "nothing was bumped"
    world.add(following)
    assert world.end(producer).error == E.PRODUCER_FENCED, "the next transaction is not ended by it"


def test_trap_13_a_repeated_end_of_version_1_succeeds_in_the_same_direction_only():
    world = TransactionWorld(version=1)
    producer = world.producer()
    world.add(producer, version=0)
    assert world.end(producer, version=0).response == NO_IDENTITY
    assert world.end(producer, version=0).error == E.CONCURRENT_TRANSACTIONS
    world.write_markers()
    assert world.end(producer, version=0).response == NO_IDENTITY
    assert world.end(producer, commit=False, version=0).error == E.INVALID_TXN_STATE


def test_trap_17_a_late_end_of_version_1_ends_the_next_transaction_and_version_2_cures_it():
    world = TransactionWorld(version=1)
    producer = world.transact(world.producer(), version=0)
    world.add(producer, version=0)
    assert world.end(producer, version=0).response == NO_IDENTITY, "KAFKA-17754, as in Kafka"
    world = TransactionWorld()
    first = world.producer()
    second = world.transact(first)
    world.add(second)
    assert world.end(first).error == E.PRODUCER_FENCED


def test_trap_15_an_abort_without_a_transaction_is_taken_from_version_2_alone():
    world = TransactionWorld()
    producer = world.producer()
    assert world.end(producer, commit=True).error == E.INVALID_TXN_STATE
    following = world.end(producer, commit=False).response
    assert following == (producer.producer_id, 1)
    state = world.state()
    assert (state.state, state.start_ms) == (S.COMPLETE_ABORT, world.ports.wall_ms())
    assert not world.markers.sent
    assert world.end(following, commit=False).response == (producer.producer_id, 2)
    assert world.end(P(producer.producer_id, 2), commit=True).error == E.INVALID_TXN_STATE
    world = TransactionWorld(version=1)
    assert world.end(world.producer(), commit=False, version=0).error == E.INVALID_TXN_STATE


def test_an_abort_after_a_commit_is_the_abort_of_a_next_transaction_that_has_nothing():
    world = TransactionWorld()
    following = world.transact(world.producer())
    assert world.end(following, commit=False).response.epoch == following.epoch + 1


# -- InitProducerId over something -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 2])
def test_trap_2_a_new_producer_over_an_open_transaction_bumps_the_epoch_once_for_the_fence(version: int):
    world = TransactionWorld(version=version)
    old = world.producer()
    world.add(old, version=version if version > 1 else 0)
    assert world.init().error == E.CONCURRENT_TRANSACTIONS
    assert (world.state().state, world.state().producer_epoch) == (S.PREPARE_ABORT, 1)
    assert world.markers.sent[0][3:5] == (1, False)
    assert world.init().error == E.CONCURRENT_TRANSACTIONS, "its markers are not written yet"
    world.write_markers()
    assert world.producer() == (old.producer_id, 2)
    assert world.end(old, version=version).error == E.PRODUCER_FENCED


@pytest.mark.parametrize(("version", "epochs"), [(1, [32_766, 32_767]), (2, [32_766, 32_767])])
def test_trap_2_at_the_limit_the_fence_does_not_overflow_and_the_producer_id_rotates(version: int, epochs: list[int]):
    for epoch in epochs:
        world = TransactionWorld(version=version)
        old = world.producer()
        world.set_state(producer_epoch=epoch)
        world.add(P(old.producer_id, epoch), version=version if version > 1 else 0)
        assert world.init().error == E.CONCURRENT_TRANSACTIONS
        assert world.state().producer_epoch == 32_767
        assert world.markers.sent[0].producer_epoch == 32_767
        assert world.markers.sent[0].producer_id == old.producer_id
        world.write_markers()
        new = world.producer()
        assert new.producer_id == old.producer_id + 1
        assert new.epoch == (1 if version == 2 else 0), "with version 2 the abort rotates the id, and the request bumps"


def test_trap_3_a_late_end_after_the_timeout_at_32766_gets_the_new_identity():
    world = TransactionWorld()
    old = world.producer()
    world.set_state(producer_epoch=32_766)
    last = P(old.producer_id, 32_766)
    world.add(last)
    world.advance(80_000)
    state = world.state()
    assert (state.state, state.producer_epoch, state.next_producer_id) == (S.PREPARE_ABORT, 32_767, old.producer_id + 1)
    world.write_markers()
    assert world.state().identity == (old.producer_id + 1, 0)
    assert world.state().previous_producer_id == old.producer_id
    assert world.end(last, commit=True).error == E.INVALID_TXN_STATE
    assert world.end(last, commit=False).response == (old.producer_id + 1, 0)


def test_trap_3_the_markers_of_a_prepared_transaction_at_32767_are_sent_again_after_a_change_of_coordinators():
    world = TransactionWorld()
    old = world.producer()
    world.set_state(producer_epoch=32_766)
    world.add(P(old.producer_id, 32_766))
    assert world.end(P(old.producer_id, 32_766)).response == (old.producer_id + 1, 0)
    world.restart()
    assert [marker.producer_epoch for marker in world.markers.sent] == [32_767, 32_767]
    assert world.markers.sent[1].coordinator_epoch == 2
    world.write_markers()
    assert world.state().identity == (old.producer_id + 1, 0)


def test_the_last_epoch_of_a_client_is_32766():
    world = TransactionWorld()
    producer = world.producer()
    world.set_state(producer_epoch=32_765)
    assert world.producer() == (producer.producer_id, 32_766)
    following = world.transact(P(producer.producer_id, 32_766))
    assert following == (producer.producer_id + 1, 0)


def test_trap_4_a_repeated_end_over_an_overflow_gets_the_new_identity():
    world = TransactionWorld()
    producer = world.producer()
    world.set_state(producer_epoch=32_766)
    last = P(producer.producer_id, 32_766)
    world.add(last)
    following = world.end(last).response
    assert world.add_error(following) is E.CONCURRENT_TRANSACTIONS, "it is pending, and not a wrong producer id"
    assert world.end(following).error == E.CONCURRENT_TRANSACTIONS
    assert world.end(last).error == E.CONCURRENT_TRANSACTIONS
    world.write_markers()
    assert world.end(last).response == following
    assert world.add_error(following) is E.NONE


def test_trap_4_a_transition_under_way_comes_before_fencing():
    world = TransactionWorld(commits_at_once=False)
    first = world.init()
    assert world.init().error == E.CONCURRENT_TRANSACTIONS
    assert world.add_error(P(9, 9)) is E.CONCURRENT_TRANSACTIONS
    assert world.end(P(9, 9)).error == E.CONCURRENT_TRANSACTIONS
    world.ports.commit(0)
    assert first.response == (FIRST_PRODUCER_ID, 0)
    assert world.add_error(P(9, 9)) is E.INVALID_PRODUCER_ID_MAPPING


# -- KIP-360 -----------------------------------------------------------------------------------------------------------


def test_a_producer_that_names_its_identity_goes_on_in_the_next_epoch():
    world = TransactionWorld()
    producer = world.producer()
    following = world.init(expected=producer).response
    assert following == (producer.producer_id, 1)
    assert world.init(expected=producer).response == following, "the answer was lost: nothing is bumped"
    assert world.init(expected=following).response.epoch == 2
    assert world.init(expected=producer).error == E.PRODUCER_FENCED


def test_a_producer_whose_place_was_taken_is_fenced():
    world = TransactionWorld()
    old = world.producer()
    world.producer()
    assert world.init(expected=old).error == E.PRODUCER_FENCED
    assert world.init(expected=P(old.producer_id + 99, 1)).error == E.PRODUCER_FENCED


def test_a_producer_of_an_id_that_has_expired_gets_a_new_identity():
    world = TransactionWorld()
    assert world.init(expected=P(77, 3)).response == (FIRST_PRODUCER_ID, 0)


def test_an_exhausted_identity_is_replaced_and_a_lost_answer_repeated():
    world = TransactionWorld()
    old = world.producer()
    world.set_state(producer_epoch=32_766)
    last = P(old.producer_id, 32_766)
    assert world.init(expected=P(old.producer_id, 32_765)).error == E.PRODUCER_FENCED
    new = world.init(expected=last).response
    assert new == (old.producer_id + 1, 0)
    assert world.init(expected=old).error == E.PRODUCER_FENCED, "an earlier producer, with the epoch of the new one"
    assert world.init(expected=last).response == new


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_trap_5_a_failed_append_leaves_no_bumped_epoch(version: int):
    world = TransactionWorld(version=version)
    producer = world.producer()
    world.add(producer, version=version if version > 1 else 0)
    before = world.state()
    world.ports.refuse_appends = KafkaError(E.NOT_ENOUGH_REPLICAS)
    for _ in range(3):
        assert world.init().error == E.COORDINATOR_NOT_AVAILABLE
        assert world.end(producer, version=version).error == E.COORDINATOR_NOT_AVAILABLE
    assert world.state() == before
    world.ports.refuse_appends = None
    assert world.init().error == E.CONCURRENT_TRANSACTIONS
    assert world.state().producer_epoch == producer.epoch + 1


def test_a_first_producer_that_cannot_be_stored_leaves_nothing():
    world = TransactionWorld()
    world.ports.refuse_appends = KafkaError(E.NOT_LEADER_OR_FOLLOWER)
    assert world.init().error == E.NOT_COORDINATOR
    assert not world.coordinator().ids
    assert world.service._memory.used_bytes == 0


def test_a_completion_that_cannot_be_stored_is_stored_later():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    world.end(producer)
    world.ports.refuse_appends = KafkaError(E.NOT_ENOUGH_REPLICAS)
    world.write_markers()
    world.advance(1_000)
    assert world.state().state is S.PREPARE_COMMIT
    world.ports.refuse_appends = None
    world.advance(100)
    assert world.state().state is S.COMPLETE_COMMIT


def test_a_decision_that_is_committed_after_its_request_timed_out_gets_its_markers():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    world.ports.commits_at_once = False
    ended = world.end(producer)
    world.advance(world.config.write_timeout_ms)
    assert ended.error == E.COORDINATOR_NOT_AVAILABLE
    assert world.end(producer).error == E.CONCURRENT_TRANSACTIONS, "it may still be committed"
    assert world.state().state is S.ONGOING
    world.ports.commits_at_once = True
    world.ports.commit(0)
    world.advance(1)
    assert world.state().state is S.PREPARE_COMMIT
    assert len(world.markers.sent) == 1
    world.write_markers()
    assert world.end(producer).response == (producer.producer_id, 1)


def test_without_a_producer_id_the_client_asks_again():
    world = TransactionWorld()
    world.has_producer_ids = False
    assert world.init().error == E.COORDINATOR_LOAD_IN_PROGRESS
    world.has_producer_ids = True
    producer = world.producer()
    world.set_state(producer_epoch=32_766)
    world.add(P(producer.producer_id, 32_766))
    world.has_producer_ids = False
    assert world.end(P(producer.producer_id, 32_766)).error == E.COORDINATOR_LOAD_IN_PROGRESS
    assert world.init().error == E.COORDINATOR_LOAD_IN_PROGRESS
    world.advance(200_000)
    assert world.state().state is S.ONGOING, "its timeout waits too"
    world.has_producer_ids = True
    world.advance(10_000)
    assert world.state().state is S.PREPARE_ABORT


def test_a_coordinator_that_resigned_sends_nothing_and_hears_nothing():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    world.end(producer)
    ((_, on_done),) = world.markers.waiting
    world.service.on_partition_resigned(0)
    assert not world.markers.waiting
    assert world.init().error == E.NOT_COORDINATOR
    world.service.on_partition_elected(0, 9)
    world.advance()
    on_done(frozenset({T0}))  # of the former epoch
    world.advance()
    assert world.state().state is S.PREPARE_COMMIT
    world.write_markers()
    assert world.state().state is S.COMPLETE_COMMIT


# -- timeouts and expiry -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_a_transaction_beyond_its_timeout_is_aborted_in_a_new_epoch(version: int):
    world = TransactionWorld(version=version)
    producer = world.producer()
    world.add(producer, version=version if version > 1 else 0)
    world.advance(60_000)
    assert world.state().state is S.ONGOING
    world.advance(10_001)
    assert world.state().state is S.PREPARE_ABORT
    assert world.markers.sent[0][3:5] == (producer.epoch + 1, False)
    world.write_markers()
    late = world.end(producer, version=version)
    # Version 2 cannot tell its own end of the transaction from the coordinator's: a commit is refused all the same.
    assert late.error == (E.INVALID_TXN_STATE if version == 2 else E.PRODUCER_FENCED)
    assert world.add_error(producer) is E.PRODUCER_FENCED
    world.advance(100_000)
    assert len(world.markers.sent) == 1


def test_a_transaction_whose_commit_is_being_stored_is_not_aborted_by_its_timeout():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    world.ports.commits_at_once = False
    world.end(producer)
    end_offset = world.ports.end_offsets[0]
    world.advance(world.state().timeout_ms + 2 * world.config.abort_timed_out_interval_ms)
    assert world.ports.end_offsets[0] == end_offset
    world.ports.commits_at_once = True
    world.ports.commit(0)
    world.advance(1)
    assert world.state().state is S.PREPARE_COMMIT


def test_the_timeout_goes_on_with_the_next_coordinator():
    world = TransactionWorld()
    producer = world.producer()
    world.add(producer)
    world.advance(59_000)
    world.restart()
    world.advance(10_001)
    assert world.state().state is S.PREPARE_ABORT


def test_many_transactions_time_out_in_several_turns():
    world = TransactionWorld()
    for number in range(450):
        producer = world.producer(f"tx-{number}")
        world.add(producer, transactional_id=f"tx-{number}")
    world.advance(70_010)
    assert len(world.markers.sent) == 450


def test_an_unused_id_expires_and_its_producer_begins_anew():
    world = TransactionWorld(TransactionCoordinatorConfig(transactional_id_expiration_ms=5_000_000))
    producer = world.producer()
    world.producer("used")
    world.advance(4_000_000)
    world.transact(world.producer("tx"))
    world.add(world.producer("open"), transactional_id="open")
    world.advance(3_600_000)
    assert set(world.coordinator().ids) == {"tx", "open"}
    assert world.service._memory.used_bytes > 0
    world.write_markers()
    world.advance(14_400_000)
    assert not world.coordinator().ids
    assert world.service._memory.used_bytes == 0
    world.restart()
    assert not world.coordinator().ids, "tombstones are in the log"
    assert world.init(expected=producer).response == (FIRST_PRODUCER_ID + 3, 0)


def test_an_expiry_that_cannot_be_stored_leaves_the_id():
    world = TransactionWorld(TransactionCoordinatorConfig(transactional_id_expiration_ms=1))
    producer = world.producer()
    world.ports.refuse_appends = KafkaError(E.NOT_ENOUGH_REPLICAS)
    world.advance(3_600_000)
    world.ports.refuse_appends = None
    assert world.add_error(producer) is E.NONE


def test_an_id_does_not_expire_while_its_transaction_is_open():
    """Its partitions would wait for an end that no coordinator knows of."""
    hours_ms = 10 * 3_600_000
    config = TransactionCoordinatorConfig(transactional_id_expiration_ms=1, transaction_max_timeout_ms=hours_ms)
    world = TransactionWorld(config)
    producer = world.init(timeout_ms=hours_ms).response
    assert world.add_error(producer) is E.NONE
    world.advance(2 * 3_600_000)
    assert world.state().state is TransactionState.ONGOING
    world.transact(producer)
    world.advance(3_600_000)
    assert not world.coordinator().ids


def test_an_id_does_not_expire_while_its_transaction_begins():
    world = TransactionWorld(TransactionCoordinatorConfig(transactional_id_expiration_ms=1))
    producer = world.producer()
    world.advance(3_599_995)
    world.ports.commits_at_once = False
    add = world.add(producer)
    world.advance(5)
    world.ports.commit(0)
    world.ports.commits_at_once = True
    assert add.response == {T0: E.NONE}
    world.restart()
    assert world.state().state is TransactionState.ONGOING


def test_an_add_does_not_wait_for_an_id_that_expires():
    """It went with the id, without an answer, and counted as waiting for ever."""
    world = TransactionWorld(TransactionCoordinatorConfig(transactional_id_expiration_ms=1))
    world.advance(3_599_990)
    producer = world.transact(world.producer())
    world.ports.commits_at_once = False
    world.advance(10)
    add = world.add(producer)
    assert add.response == {T0: E.CONCURRENT_TRANSACTIONS}
    world.ports.commit(0)
    assert not world.coordinator().ids
    assert not world.coordinator()._waiting_count


@pytest.mark.slow
def test_thousands_of_ids_expire_in_batches_that_the_log_takes():
    world = TransactionWorld(TransactionCoordinatorConfig(transactional_id_expiration_ms=1))
    for number in range(2_500):
        world.producer(f"{number:0>300}")
    world.advance(3_600_100)
    assert not world.coordinator().ids
    assert max(len(batch) for batch in world.ports.logs[0]) < 1_000_000


# -- memory ------------------------------------------------------------------------------------------------------------


def test_more_ids_or_partitions_than_the_memory_holds_are_refused_and_the_others_go_on():
    world = TransactionWorld(TransactionCoordinatorConfig(max_memory_bytes=5_000))
    first, second = world.producer("a"), world.producer("b")
    assert world.init("c").error == E.COORDINATOR_NOT_AVAILABLE
    many = [("t", index) for index in range(10)]
    assert world.add_error(first, *many, transactional_id="a") is E.COORDINATOR_NOT_AVAILABLE
    assert world.add_error(second, transactional_id="b") is E.NONE
    assert world.end(second, transactional_id="b").response.epoch == 1, "what is there can end"
    assert world.init("a").response.epoch == 1


def test_a_client_with_ever_new_ids_does_not_shut_out_others():
    """As batch writes of Spark. The ids that are unused for the longest go as if they had expired."""
    world = TransactionWorld(TransactionCoordinatorConfig(max_memory_bytes=2_100 * 40))
    for number in range(200):
        if number % 20 == 0:
            world.producer("used")
        world.producer(f"write-{number}")
        world.advance(180_000)
    ids = set(world.coordinator().ids)
    assert "used" in ids
    assert ids >= {f"write-{number}" for number in range(180, 200)}, "used within the last hour"
    world.restart()
    assert set(world.coordinator().ids) == ids, "tombstones are in the log"


def test_ids_that_were_used_within_an_hour_do_not_give_way():
    world = TransactionWorld(TransactionCoordinatorConfig(max_memory_bytes=2_100 * 40))
    names: list[str] = []
    while isinstance(world.init(f"write-{len(names)}").response, ProducerIdentity):
        names.append(f"write-{len(names)}")
        world.advance(60_000)
    assert len(names) == 40
    assert set(world.coordinator().ids) == set(names)
    world.advance(3_600_000)
    world.init("new")
    world.advance(1)
    assert isinstance(world.init("new").response, ProducerIdentity)


def grow(world: TransactionWorld, name: str) -> None:
    """One more id, and the look at the others if it is due."""
    assert isinstance(world.init(name).response, ProducerIdentity)
    world.advance(1)


def test_the_quarter_that_is_unused_for_the_longest_goes_from_seven_eighths_on():
    world = TransactionWorld(TransactionCoordinatorConfig(max_memory_bytes=2_100 * 40))
    for number in range(30):
        world.producer(f"{number}")
        world.advance(1000)
    for number in range(20):  # in another order than that of their first use
        world.producer(f"{number}")
        world.advance(1000)
    world.advance(7_200_000)
    grow(world, "30")
    assert len(world.coordinator().ids) == 31, "there is room"
    for number in range(31, 37):
        grow(world, f"{number}")
    assert set(map(str, range(37))).difference(world.coordinator().ids) == set(map(str, range(20, 30)))
    world.advance(7_200_000)
    assert len(world.coordinator().ids) == 27, "the others have their week again"


def test_the_ids_of_a_partition_are_looked_at_once_a_minute():
    """Where those of the other partitions take the room, none of its own would be left."""
    world = TransactionWorld(TransactionCoordinatorConfig(max_memory_bytes=2_100 * 40), partitions=2)
    names = [f"{number}" for number in range(200)]
    own, others = ([each for each in names if world.service.partition_for(each) == index] for index in range(2))
    world.advance(600_000)
    for name in own[:8]:
        world.producer(name)
    world.advance(1_000_000)
    for name in others[:30]:
        world.producer(name)
    world.advance(2_600_000)
    for index, left in enumerate((6, 7, 8)):
        grow(world, own[8 + index])
        assert len(world.coordinator(0).ids) == left
    world.advance(60_000)
    grow(world, own[11])
    assert len(world.coordinator(0).ids) == 6


def test_a_time_of_expiration_below_an_hour_holds_where_the_memory_is_nearly_full():
    world = TransactionWorld(
        TransactionCoordinatorConfig(max_memory_bytes=2_100 * 40, transactional_id_expiration_ms=60_000)
    )
    for number in range(36):
        world.producer(f"{number}")
    world.advance(60_000)
    grow(world, "36")
    assert len(world.coordinator().ids) == 27


def test_an_id_that_is_being_stored_has_the_others_looked_at():
    world = TransactionWorld(TransactionCoordinatorConfig(max_memory_bytes=2_100 * 40))
    for number in range(34):
        world.producer(f"{number}")
    world.advance(3_660_000)
    world.ports.commits_at_once = False
    new = [world.init(f"new-{number}") for number in range(6)]
    world.advance(1)
    world.ports.commit(0)
    assert all(isinstance(each.response, ProducerIdentity) for each in new)
    assert len(world.coordinator().ids) == 36


def test_the_charge_follows_the_state():
    world = TransactionWorld()
    memory = world.service._memory
    producer = world.producer()
    empty = memory.used_bytes
    world.add(producer, T0, T1)
    assert memory.used_bytes > empty
    world.end(producer)
    world.write_markers()
    assert memory.used_bytes == empty
    world.service.on_partition_resigned(0)
    assert memory.used_bytes == 0


@pytest.mark.parametrize(
    ("ids", "partitions"),
    [(200, 10), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2_000, 0), (20, 500)))],
)
def test_the_charge_is_at_least_the_memory_that_is_used(ids: int, partitions: int):
    world = TransactionWorld()
    world.producer("warm")
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(ids):
        name = f"{number:0>40}"
        producer = world.producer(name)
        if partitions:
            added = [(f"topic-{number}-{index}", index) for index in range(partitions)]
            assert world.add_error(producer, *added, transactional_id=name) is E.NONE
            world.end(producer, transactional_id=name)
        world.ports.logs.clear()
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert world.service._memory.used_bytes > used > 0
