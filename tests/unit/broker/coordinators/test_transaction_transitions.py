"""The rules of one transactional id: what a state takes over from the one before, and what follows it."""

from __future__ import annotations

from typing import Any

from tests.unit.broker.coordinators.transaction_world import TransactionWorld
from tidelog.broker.coordinators.outcome import Now
from tidelog.broker.coordinators.transaction import transitions
from tidelog.broker.coordinators.transaction.records import TransactionRecord
from tidelog.broker.coordinators.transaction.states import TransactionState
from tidelog.broker.coordinators.transaction.transitions import ProducerIdentity, TransactionMetadata
from tidelog.protocol.errors import ErrorCode

PARTITIONS = frozenset({("t", 0)})


def state_of(**fields: Any) -> TransactionMetadata:
    values: dict[str, Any] = {"producer_id": 7, "timeout_ms": 60_000, "update_ms": 100, "producer_epoch": 5}
    return TransactionMetadata(**(values | fields))


def ongoing(**fields: Any) -> TransactionMetadata:
    values = {"state": TransactionState.ONGOING, "partitions": PARTITIONS, "start_ms": 90, "client_version": 2}
    return state_of(**(values | fields))


def no_id() -> int | None:
    raise AssertionError("no producer id is needed")


def decided(decision: transitions.Decision) -> TransactionMetadata:
    assert isinstance(decision, TransactionMetadata)
    return decision


def test_a_producer_that_begins_anew_has_the_timeout_that_it_asks_for() -> None:
    after = decided(transitions.initialize(state_of(), 9_000, None, 2, no_id, 200))
    assert (after.timeout_ms, after.update_ms, after.producer_epoch) == (9_000, 200, 6)


def test_a_producer_that_was_fenced_does_not_pass_for_one_whose_answer_was_lost() -> None:
    """It had asked for its next epoch before. Its late request would get the epoch that fences it."""
    aborting = decided(transitions.fence_and_abort(ongoing(last_producer_epoch=4), 1, no_id, 200))
    assert (aborting.producer_epoch, aborting.last_producer_epoch) == (6, -1)
    aborted = transitions.complete(aborting, 300)
    late = transitions.initialize(aborted, 60_000, ProducerIdentity(7, 4), 1, no_id, 400)
    assert late is ErrorCode.PRODUCER_FENCED


def test_an_abort_by_the_coordinator_before_version_2_is_marked_so() -> None:
    """The leaders of its partitions check the epoch of a marker by the version."""
    aborting = decided(transitions.fence_and_abort(ongoing(), 1, no_id, 200))
    assert (aborting.client_version, aborting.next_producer_id) == (0, -1)


def test_an_abort_without_a_transaction_begins_when_it_is_asked_for() -> None:
    after = decided(transitions.end_v2(state_of(), ProducerIdentity(7, 5), False, 2, no_id, 200))
    assert (after.state, after.start_ms, after.partitions) == (TransactionState.PREPARE_ABORT, 200, frozenset())


def test_markers_are_due_at_once_where_an_error_came_between_the_replay_and_what_follows_it() -> None:
    world = TransactionWorld()
    world.add(world.producer(), ("t", 0))
    coordinator = world.coordinator()
    coordinator.replay(0, TransactionRecord("tx", world.state()._replace(state=TransactionState.PREPARE_COMMIT)))
    assert coordinator.next_deadline_ms() == 0
    [message] = coordinator.on_deadline(Now(0, 0)).messages
    assert (message.transactional_id, message.is_commit, message.partitions) == ("tx", True, PARTITIONS)
    assert coordinator.next_deadline_ms() != 0


def test_an_end_before_the_producer_is_stored_is_to_be_asked_for_again() -> None:
    world = TransactionWorld(commits_at_once=False)
    world.init()
    for version in (0, 2):
        assert world.end(ProducerIdentity(7, 0), version=version).error == ErrorCode.CONCURRENT_TRANSACTIONS
