"""The sequences of a producer: when they restart, and what is known of batches without an answer."""

from __future__ import annotations

from tests.unit.client.test_lone_identity import PARTITION, acknowledged, batch
from tidelog.client.producing.producer_session import Verdict
from tidelog.protocol.errors import ErrorCode


def test_sequences_restart_when_the_later_batches_have_come_back() -> None:
    """Until then the broker may still append them, and they would be written a second time."""
    session = acknowledged()
    failed, in_flight = batch(1), batch(2)
    for sent in (failed, in_flight):
        session.prepare_send(sent, 2.0)
        sent.in_flight = True
    failed.in_flight = False
    assert session.handle_error(failed, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 1) is Verdict.RETRY
    assert session.restart_partitions() == []
    assert (in_flight.producer_epoch, in_flight.base_sequence) == (0, 2)
    in_flight.in_flight = False
    assert session.restart_partitions() == [PARTITION]
    assert [(sent.producer_epoch, sent.base_sequence) for sent in (failed, in_flight)] == [(1, 0), (1, 1)]


def test_the_sequences_of_a_forgotten_partition_begin_under_a_higher_epoch() -> None:
    """Under the same epoch the first batch would count as a duplicate of the first one before."""
    session = acknowledged()
    session.forget([PARTITION])
    assert session.identity == (7, 1)
    following = batch(1)
    session.prepare_send(following, 2.0)
    assert (following.producer_epoch, following.base_sequence) == (1, 0)


def test_a_forgotten_partition_with_a_batch_under_way_goes_on_in_order() -> None:
    """The broker may still append the batch. Under another epoch it would be written a second time."""
    session = acknowledged()
    sent = batch(1)
    session.prepare_send(sent, 2.0)
    session.forget([PARTITION])
    assert session.identity == (7, 0)
    following = batch(2)
    session.handle_acknowledgement(sent)
    session.prepare_send(following, 3.0)
    assert (following.producer_epoch, following.base_sequence) == (0, sent.base_sequence + sent.record_count)


def test_after_the_last_epoch_a_forgotten_partition_begins_under_another_producer_id() -> None:
    session = acknowledged()
    session.adopt_identity(7, 32767)
    session.prepare_send(sent := batch(1), 2.0)
    session.handle_acknowledgement(sent)
    session.forget([PARTITION])
    assert session.identity == (-1, -1), "a new one is to be asked for"


def test_a_forgotten_partition_of_an_earlier_epoch_needs_no_other_one() -> None:
    session = acknowledged()
    session.adopt_identity(7, 5)
    session.forget([PARTITION])
    session.forget([PARTITION])
    assert session.identity == (7, 5)


def test_a_log_that_lacked_a_batch_is_asked_again_after_another_attempt_without_an_answer() -> None:
    session = acknowledged()
    sent = batch(1)
    session.prepare_send(sent, 2.0)
    for _ in range(2):
        session.handle_error(sent, ErrorCode.NETWORK_EXCEPTION, 1)
        session.handle_error(sent, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 1)
        assert not session.pending_restarts, "the last attempt may be in the log"
        [(_, inquiry)] = session.inquiries()
        assert session.handle_log_end(PARTITION, inquiry, 1, 0, 0) is None
    session.handle_error(sent, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 1)
    assert session.restart_partitions() == [PARTITION]


def test_a_batch_under_new_sequences_is_not_in_the_log() -> None:
    """Refused again, it restarts again; without an answer of the log it is not given up."""
    session = acknowledged()
    sent = batch(1)
    session.prepare_send(sent, 2.0)
    session.handle_error(sent, ErrorCode.NETWORK_EXCEPTION, 1)
    session.handle_error(sent, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 1)
    [(_, inquiry)] = session.inquiries()
    session.handle_log_end(PARTITION, inquiry, 1, 0, 0)
    session.handle_error(sent, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 1)
    for epoch in (1, 2):
        assert session.restart_partitions() == [PARTITION]
        assert (sent.producer_epoch, sent.base_sequence) == (epoch, 0)
        session.handle_error(sent, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, 2)
        assert not session.open_inquiries
