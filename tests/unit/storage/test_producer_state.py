"""Sequences, duplicates, transactions: the rules of KIP-98, one sentence each."""

from __future__ import annotations

import pytest

from tests.unit.storage.batches import marker
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log.recovery import read_marker
from tidelog.storage.producers import producer_state
from tidelog.storage.producers.producer_state import (
    CompletedTransaction,
    EndMarker,
    ProducerEntry,
    ProducerState,
)

LAST_SEQUENCE = 2**31 - 1
MANY = 800
PID = 7


class Producer:
    """Sends batches to a state, as a log would."""

    def __init__(self) -> None:
        self.state = ProducerState()
        self.offset = 0

    def send(
        self, sequence: int, count: int = 1, *, epoch: int = 0, transactional: bool = False, producer_id: int = PID
    ):
        repeated = self.state.check(producer_id, epoch, sequence, count - 1, transactional, True)
        if repeated is None:
            last = self.offset + count - 1
            self.state.accept(producer_id, epoch, sequence, self.offset, last, 1000 + self.offset, transactional)
            self.offset = last + 1
        return repeated

    def refused(self, sequence: int, count: int = 1, **kw) -> ErrorCode:
        with pytest.raises(KafkaError) as caught:
            self.send(sequence, count, **kw)
        return caught.value.code

    def end(
        self, *, abort: bool, epoch: int = 0, coordinator_epoch: int = 0, producer_id: int = PID
    ) -> CompletedTransaction | None:
        end = EndMarker(producer_id, epoch, coordinator_epoch, abort, self.offset, 5000)
        self.state.check_marker(end)
        completed = self.state.accept_marker(end)
        self.offset += 1
        return completed


@pytest.fixture
def producer() -> Producer:
    return Producer()


def test_sequences_follow_each_other(producer: Producer):
    assert producer.send(0, 3) is None
    assert producer.send(3, 2) is None
    assert producer.refused(6) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producer.refused(4) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producer.send(5) is None


def test_a_repeated_batch_is_answered_with_its_first_offset(producer: Producer):
    producer.offset = 40
    producer.send(0, 3)
    producer.send(3, 2)
    assert producer.send(0, 3) == (0, 2, 40, 42, 1040)
    assert producer.send(3, 2) == (3, 4, 43, 44, 1043)
    assert producer.refused(0, 2) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER  # not the batch it was


def test_only_the_last_five_batches_are_known(producer: Producer):
    for sequence in range(7):
        producer.send(sequence)
    for sequence in (2, 3, 4, 5, 6):
        assert producer.send(sequence) is not None
    for sequence in (0, 1):
        assert producer.refused(sequence) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_an_unknown_producer_may_begin_anywhere(producer: Producer):
    assert producer.send(12, 2) is None
    assert producer.send(14) is None


def test_a_new_epoch_begins_at_zero_and_fences_the_old(producer: Producer):
    producer.send(0, 3)
    assert producer.refused(3, epoch=1) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producer.send(0, epoch=1) is None
    assert producer.refused(3, epoch=0) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert producer.refused(0, 3, epoch=0) == ErrorCode.INVALID_PRODUCER_EPOCH


def test_an_epoch_below_that_of_no_producer_is_older_than_any(producer: Producer):
    assert producer.refused(0, epoch=-2) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert producer.refused(0, epoch=-2, transactional=True) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert producer.send(0, epoch=-1) is None  # as in Kafka


def test_sequences_wrap_to_zero_between_batches(producer: Producer):
    producer.send(LAST_SEQUENCE - 1, 2)
    assert producer.send(0, 2) is None
    assert producer.send(LAST_SEQUENCE - 1, 2) == (LAST_SEQUENCE - 1, LAST_SEQUENCE, 0, 1, 1000)
    assert producer.send(0, 2) == (0, 1, 2, 3, 1002)
    assert producer.send(2) is None


def test_sequences_wrap_inside_a_batch(producer: Producer):
    producer.send(LAST_SEQUENCE - 1, 4)
    assert producer.state.entries[PID].last_sequence == 1
    assert producer.send(LAST_SEQUENCE - 1, 4) is not None
    assert producer.refused(0) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert producer.send(2) is None


def test_the_nodes_own_batches_are_checked_for_their_epoch_alone(producer: Producer):
    producer.send(0, epoch=3)
    assert producer.state.check(PID, 3, 50, 0, False, False) is None
    with pytest.raises(KafkaError):
        producer.state.check(PID, 2, 50, 0, False, False)


def test_silent_producers_expire_unless_a_transaction_is_open(producer: Producer):
    producer.send(0, producer_id=1)
    producer.send(0, producer_id=2, transactional=True)
    assert producer.state.remove_expired(1001, 100) == 0
    assert producer.state.remove_expired(1001 + 99, 100) == 0
    assert producer.state.remove_expired(1001 + 100, 100) == 1
    assert list(producer.state.entries) == [2]


def test_a_producer_whose_records_have_old_times_expires_when_it_is_idle(producer: Producer):
    """As one that writes what happened long ago. What it sends again is known meanwhile."""
    now_ms = 1_000_000
    for sequence in range(20):
        producer.send(sequence)
        assert producer.state.remove_expired(now_ms, 100) == 0
        assert producer.send(sequence) is not None
        now_ms += 60
    assert producer.state.remove_expired(now_ms + 39, 100) == 0
    assert producer.state.remove_expired(now_ms + 40, 100) == 1


class TestManyProducers:
    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(producer_state, "PRODUCERS_MAX", MANY)

    def test_those_that_have_not_written_for_the_longest_are_forgotten(self, producer: Producer):
        many = 3 * MANY
        producer.send(0, producer_id=1)
        for producer_id in range(10, many):
            producer.send(0, producer_id=producer_id)
            assert len(producer.state) <= MANY
            if producer_id % 100 == 0:
                producer.send(producer_id // 100, producer_id=1)
        assert producer.send(many // 100, producer_id=1) is None, "one that writes now and then is known"
        assert producer.send(0, producer_id=many - 1) is not None
        assert 10 not in producer.state.entries

    def test_one_with_an_open_transaction_is_kept(self, producer: Producer):
        producer.send(0, producer_id=1, transactional=True)
        for producer_id in range(10, 2 * MANY):
            producer.send(0, producer_id=producer_id)
        completed = producer.end(abort=True, producer_id=1)
        assert completed is not None
        assert completed.first_offset == 0

    def test_many_open_transactions_are_not_looked_at_each_time(self, producer: Producer):
        for producer_id in range(2 * MANY):
            producer.send(0, producer_id=producer_id, transactional=True)
        assert len(producer.state) == producer.state.open_transaction_count == 2 * MANY
        for producer_id in range(2 * MANY):
            producer.end(abort=True, producer_id=producer_id)
        for producer_id in range(-MANY, 0):
            producer.end(abort=True, producer_id=producer_id)
        assert len(producer.state) <= MANY


class TestTransactions:
    def test_the_first_batch_opens_one(self, producer: Producer):
        producer.send(0)
        assert producer.state.first_unstable_offset == -1
        producer.send(1, 2, transactional=True)
        producer.send(3, transactional=True)
        assert producer.state.first_unstable_offset == 1
        assert producer.state.oldest_transaction_timestamp == 1003

    def test_other_batches_are_refused_while_one_is_open(self, producer: Producer):
        producer.send(0, transactional=True)
        assert producer.refused(1) == ErrorCode.INVALID_TXN_STATE

    def test_its_end_is_stable_once_it_is_replicated(self, producer: Producer):
        producer.send(0, 3, transactional=True)
        assert producer.end(abort=True) == (PID, 0, 3, True, 4)
        assert producer.state.first_unstable_offset == 0
        producer.state.on_high_watermark(3)
        assert producer.state.first_unstable_offset == 0
        producer.state.on_high_watermark(4)
        assert producer.state.first_unstable_offset == -1
        assert not producer.state.has_transactions

    def test_the_oldest_decides_what_is_stable(self, producer: Producer):
        producer.send(0, transactional=True, producer_id=1)
        producer.send(0, transactional=True, producer_id=2)
        assert producer.end(abort=False, producer_id=2) == (2, 1, 2, False, 0)
        producer.state.on_high_watermark(3)
        assert producer.state.first_unstable_offset == 0
        assert producer.end(abort=False, producer_id=1) == (1, 0, 3, False, 4)

    def test_a_marker_without_a_transaction_ends_nothing_but_is_remembered(self, producer: Producer):
        assert producer.end(abort=True, epoch=4, coordinator_epoch=9) is None
        assert (producer.state.entries[PID].epoch, producer.state.entries[PID].coordinator_epoch) == (4, 9)

    def test_an_old_epoch_or_an_old_coordinator_cannot_end_one(self, producer: Producer):
        producer.send(0, epoch=2, transactional=True)
        with pytest.raises(KafkaError) as caught:
            producer.end(abort=True, epoch=1)
        assert caught.value.code == ErrorCode.INVALID_PRODUCER_EPOCH
        producer.end(abort=True, epoch=2, coordinator_epoch=5)
        with pytest.raises(KafkaError) as caught:
            producer.end(abort=True, epoch=2, coordinator_epoch=4)
        assert caught.value.code == ErrorCode.TRANSACTION_COORDINATOR_FENCED

    def test_a_marker_that_raises_the_epoch_lets_sequences_begin_anew(self, producer: Producer):
        producer.send(0, 3, epoch=2, transactional=True)
        producer.end(abort=True, epoch=3)
        assert producer.refused(3, epoch=3) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert producer.send(0, epoch=3) is None

    def test_open_ones_come_back_from_a_snapshot_in_order(self):
        state = ProducerState()
        state.load([ProducerEntry(2, 0, 0, 5, 30), ProducerEntry(1, 0, 0, 9, 10), ProducerEntry(3, 0)], 40)
        assert (state.end_offset, state.first_unstable_offset, state.oldest_transaction_timestamp) == (40, 10, 9)


def test_a_marker_is_read_from_its_batch():
    data = marker(abort=True, producer_id=5, epoch=3, coordinator_epoch=8, timestamp=77)
    assert read_marker(data, read_header(data)) == (5, 3, 8, True, 0, 77)
    data = marker(abort=False)
    found = read_marker(data, read_header(data))
    assert found is not None
    assert not found.is_abort
