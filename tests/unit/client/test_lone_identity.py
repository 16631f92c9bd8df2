"""A batch that is sent alone takes the place in its sequences that it would have in the queue, or it is not sent so."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tidelog.client.model import TopicPartition
from tidelog.client.producing.accumulator import ProducerBatch
from tidelog.client.producing.producer_session import IDLE_MS, ProducerSession, _PartitionSequences
from tidelog.protocol.batches.records import BatchBuilder
from tidelog.protocol.errors import ErrorCode

PARTITION = TopicPartition("t", 0)


def batch(number: int) -> ProducerBatch[Any]:
    builder = BatchBuilder(1_000)
    builder.append(0, None, b"v")
    return ProducerBatch(number, PARTITION, builder, 0.0)


def acknowledged(count: int = 1, now_ms: float = 1.0) -> ProducerSession:
    """A session whose batches of one record, so many, are in the log."""
    session = ProducerSession(idempotent=True)
    session.adopt_identity(7, 0)
    for number in range(count):
        sent = batch(number)
        session.prepare_send(sent, now_ms)
        session.handle_acknowledgement(sent)
    return session


def state_of(session: ProducerSession) -> dict[str, Any]:
    state = session._partitions[PARTITION]
    return {name: getattr(state, name) for name in _PartitionSequences.__slots__}


@pytest.mark.parametrize("next_sequence", [3, 0x7FFFFFFF])
def test_it_leaves_the_session_as_a_batch_of_the_queue_does(next_sequence: int) -> None:
    alone = acknowledged(3)
    state = alone._partitions[PARTITION]
    state.next_sequence = state.acknowledged_end = next_sequence
    queued = deepcopy(alone)
    assert alone.lone_identity(PARTITION, 9.0) == (7, 0, next_sequence)
    alone.begin_lone_send(PARTITION, 9.0)
    assert alone.lone_identity(PARTITION, 9.0) is None
    alone.handle_lone_acknowledgement(PARTITION)
    sent = batch(3)
    queued.prepare_send(sent, 9.0)
    assert (sent.producer_id, sent.producer_epoch, sent.base_sequence) == (7, 0, next_sequence)
    queued.handle_acknowledgement(sent)
    assert state_of(alone) == state_of(queued)
    assert alone.lone_identity(PARTITION, 9.0) == (7, 0, (next_sequence + 1) & 0x7FFFFFFF)


@pytest.mark.parametrize("next_sequence", [3, 0x7FFFFFFF])
def test_a_record_without_an_answer_leaves_the_session_as_a_batch_in_flight_does(next_sequence: int) -> None:
    alone = acknowledged(3)
    state = alone._partitions[PARTITION]
    state.next_sequence = state.acknowledged_end = next_sequence
    queued = deepcopy(alone)
    identity = alone.lone_identity(PARTITION, 9.0)
    assert identity is not None
    sent, queued_sent = batch(3), batch(3)
    alone.begin_lone_send(PARTITION, 9.0)
    alone.adopt_lone_batch(sent, identity)
    assert (sent.producer_id, sent.producer_epoch, sent.base_sequence) == (7, 0, next_sequence)
    queued.prepare_send(queued_sent, 9.0)
    assert {**state_of(alone), "unsettled_batches": [queued_sent]} == state_of(queued)
    assert state_of(alone)["unsettled_batches"] == [sent]
    alone.handle_acknowledgement(sent)
    assert alone.lone_identity(PARTITION, 9.0) == (7, 0, (next_sequence + 1) & 0x7FFFFFFF)


def after_an_interrupt(session: ProducerSession) -> None:
    session.begin_lone_send(PARTITION, 1.0)


def of_unknown_partition(session: ProducerSession) -> None:
    session.forget([PARTITION])


def not_confirmed(session: ProducerSession) -> None:
    session._partitions[PARTITION].is_confirmed = False


def with_a_batch_in_flight(session: ProducerSession) -> None:
    session.prepare_send(batch(9), 1.0)


def after_a_failure(session: ProducerSession) -> None:
    """Its sequence is missing in the log, until a batch under a higher epoch restarts them."""
    lost = batch(9)
    session.prepare_send(lost, 1.0)
    session.handle_failure(lost)
    assert session.pending_restarts
    session.pending_restarts.clear()


def before_a_restart(session: ProducerSession) -> None:
    session.pending_restarts[PARTITION] = None


def of_another_log(session: ProducerSession) -> None:
    session._partitions[PARTITION].has_other_log = True


def of_another_identity(session: ProducerSession) -> None:
    session.drop_identity()
    session.adopt_identity(8, 0)


def of_a_later_epoch(session: ProducerSession) -> None:
    session.adopt_identity(7, 1)


def without_identity(session: ProducerSession) -> None:
    session.drop_identity()


def after_an_error(session: ProducerSession) -> None:
    refused = batch(9)
    session.prepare_send(refused, 1.0)
    session.handle_error(refused, ErrorCode.NOT_LEADER_OR_FOLLOWER, 1)


@pytest.mark.parametrize(
    "change",
    [
        of_unknown_partition,
        not_confirmed,
        with_a_batch_in_flight,
        after_a_failure,
        before_a_restart,
        of_another_log,
        of_another_identity,
        of_a_later_epoch,
        without_identity,
        after_an_error,
        after_an_interrupt,
    ],
)
def test_nothing_is_sent_alone(change: Callable[[ProducerSession], None]) -> None:
    session = acknowledged()
    assert session.lone_identity(PARTITION, 1.0) is not None
    change(session)
    assert session.lone_identity(PARTITION, 1.0) is None


def test_after_an_idle_time_the_broker_may_have_forgotten_the_producer() -> None:
    session = acknowledged(now_ms=5.0)
    assert session.lone_identity(PARTITION, 5.0 + IDLE_MS - 1) is not None
    assert session.lone_identity(PARTITION, 5.0 + IDLE_MS) is None
    session.begin_lone_send(PARTITION, 100.0)
    session.handle_lone_acknowledgement(PARTITION)
    assert session.lone_identity(PARTITION, 100.0 + IDLE_MS - 1) is not None
