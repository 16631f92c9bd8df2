"""The states of one transactional producer: what one transaction leaves to the next, and answers that come late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidelog.client.model import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from tidelog.client.producing.transaction_errors import TransactionAborted, TransactionFatal
from tidelog.client.producing.transaction_manager import (
    AddOffsets,
    AddPartitions,
    CommitOffsets,
    EndTxn,
    InitProducerId,
    State,
    TransactionManager,
)
from tidelog.protocol.errors import ErrorCode

GROUP = ConsumerGroupMetadata("g")
FIRST, SECOND = TopicPartition("t", 0), TopicPartition("t", 1)


def begun(*, version_2: bool) -> TransactionManager:
    manager = TransactionManager("tx")
    manager.initialize()
    assert isinstance(manager.next_request(False), InitProducerId)
    manager.handle_identity(7, 0)
    assert manager.begin(version_2)
    return manager


def with_partition(manager: TransactionManager, partition: TopicPartition = FIRST) -> None:
    """Version 1: the coordinator acknowledges the partition."""
    manager.add_partition(partition)
    request = manager.next_request(False)
    assert isinstance(request, AddPartitions)
    assert manager.confirm_sending(request)
    manager.handle_partitions_added(request)


def end_of(manager: TransactionManager) -> EndTxn:
    """The end that is sent now."""
    request = manager.next_request(False)
    assert isinstance(request, EndTxn)
    assert manager.confirm_sending(request)
    return request


def complete(manager: TransactionManager) -> None:
    manager.commit()
    manager.handle_ended(end_of(manager), *((7, 1) if manager.uses_version_2 else (-1, -1)))
    assert manager.state is State.READY


def test_a_record_that_waited_does_not_get_into_the_next_transaction() -> None:
    manager = begun(version_2=False)
    with_partition(manager)
    number = manager.check_open()
    manager.check_still_open(number)
    complete(manager)
    assert manager.begin(False)
    with pytest.raises(TransactionAborted, match="ended before it was sent"):
        manager.check_still_open(number)


def test_a_partition_that_comes_while_others_are_added_is_added_next() -> None:
    manager = begun(version_2=False)
    manager.add_partition(FIRST)
    request = manager.next_request(False)
    assert isinstance(request, AddPartitions)
    assert manager.confirm_sending(request)
    manager.add_partition(SECOND)
    manager.handle_partitions_added(request)
    assert manager.may_send(FIRST, is_resend=False)
    assert not manager.may_send(SECOND, is_resend=False)
    assert manager.next_request(False) == AddPartitions(frozenset({SECOND}))


@pytest.mark.parametrize("version_2", [False, True])
def test_a_commit_of_a_transaction_that_the_coordinator_does_not_have_is_no_success(version_2: bool) -> None:
    manager = begun(version_2=version_2)
    if version_2:
        manager.note_batch_sent()
    else:
        with_partition(manager)
    manager.commit()
    manager.handle_refusal(end_of(manager), ErrorCode.INVALID_TXN_STATE, "refused")
    assert manager.state is State.FATAL_ERROR
    assert (manager.ended_number, manager.ended_by_commit) == (0, False)


def with_group(manager: TransactionManager) -> None:
    """Version 1: the coordinator acknowledges the group."""
    manager.add_offsets(GROUP, {FIRST: OffsetAndMetadata(3)})
    request = manager.next_request(False)
    assert isinstance(request, AddOffsets)
    assert manager.confirm_sending(request)
    manager.handle_group_added(request)


def with_offsets(manager: TransactionManager) -> None:
    """Version 2: the group coordinator acknowledges the offsets."""
    manager.add_offsets(GROUP, {FIRST: OffsetAndMetadata(3)})
    request = manager.next_request(False)
    assert isinstance(request, CommitOffsets)
    assert manager.confirm_sending(request)
    manager.handle_offsets_committed(request)


@pytest.mark.parametrize(("open_it", "version_2"), [(with_partition, False), (with_group, False), (with_offsets, True)])
def test_an_abort_of_what_was_acknowledged_and_is_not_known_any_more_is_no_success(
    open_it: Callable[[TransactionManager], None], version_2: bool
) -> None:
    manager = begun(version_2=version_2)
    open_it(manager)
    manager.abort()
    manager.handle_refusal(end_of(manager), ErrorCode.INVALID_TXN_STATE, "refused")
    assert manager.state is State.FATAL_ERROR
    with pytest.raises(TransactionFatal):
        manager.raise_error()


def test_an_abort_that_is_refused_is_not_sent_again() -> None:
    manager = begun(version_2=True)
    manager.note_batch_sent()
    manager.abort()
    manager.handle_refusal(end_of(manager), ErrorCode.TRANSACTION_ABORTABLE, "refused")
    assert manager.state is State.FATAL_ERROR
    assert manager.next_request(False) is None


@pytest.mark.parametrize("version_2", [False, True])
def test_an_empty_transaction_sends_nothing_after_one_with_records(version_2: bool) -> None:
    manager = begun(version_2=version_2)
    if version_2:
        manager.note_batch_sent()
    else:
        with_partition(manager)
    complete(manager)
    assert manager.begin(version_2)
    manager.commit()
    assert manager.next_request(False) is None  # the coordinator would refuse it
    assert (manager.state, manager.ended_number, manager.ended_by_commit) == (State.READY, 2, True)


def test_an_abort_ends_where_the_transaction_was_not_opened_though_the_one_before_was() -> None:
    manager = begun(version_2=False)
    with_partition(manager)
    complete(manager)
    assert manager.begin(False)
    manager.add_partition(FIRST)
    request = manager.next_request(False)
    assert isinstance(request, AddPartitions)
    assert manager.confirm_sending(request)  # it does not arrive
    manager.abort()
    manager.handle_refusal(end_of(manager), ErrorCode.INVALID_TXN_STATE, "refused")
    assert (manager.state, manager.ended_number) == (State.READY, 2)


def test_a_refusal_is_not_taken_for_that_of_the_commit_before() -> None:
    """The commit before had an answer at last, so that only this transaction fails."""
    manager = begun(version_2=True)
    manager.note_batch_sent()
    manager.commit()
    manager.handle_unanswered(end_of(manager))
    manager.handle_ended(end_of(manager), 7, 1)
    assert manager.begin(True)
    manager.note_batch_sent()
    manager.commit()
    manager.handle_refusal(end_of(manager), ErrorCode.TRANSACTION_ABORTABLE, "refused")
    assert manager.state is State.ABORTABLE_ERROR


def test_an_abort_without_an_answer_leaves_no_doubt_about_a_commit() -> None:
    manager = begun(version_2=True)
    manager.note_batch_sent()
    manager.abort()
    request = end_of(manager)
    manager.handle_unanswered(request)
    manager.handle_refusal(request, ErrorCode.INVALID_PRODUCER_ID_MAPPING, "refused")
    assert manager.next_request(False) == InitProducerId(7, 0)
    assert (manager.ended_number, manager.ended_by_commit) == (1, False)


def test_an_end_of_version_2_without_an_identity_is_followed_by_a_new_epoch() -> None:
    """The coordinator has bumped the epoch: the next record would be refused as a fenced producer's."""
    manager = begun(version_2=True)
    manager.note_batch_sent()
    manager.commit()
    manager.handle_ended(end_of(manager), -1, -1)
    assert manager.next_request(False) == InitProducerId(7, 0)
