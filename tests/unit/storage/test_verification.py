"""Verification of transactions before their first batch, and markers of transaction version 2 (KIP-890, KIP-1228)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.storage.batches import NOW, Logs, idempotent, marker
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log.partition_log import AppendInfo, PartitionLog
from tidelog.storage.producers import verification as verification_module
from tidelog.storage.producers.producer_state import ProducerState
from tidelog.storage.producers.refused_batches import RefusedBatches, sequenced_header
from tidelog.storage.producers.verification import TransactionAppend, Verification, Verifications

MakeLogs = Callable[..., Logs]
PID = 7
DAY_MS = 86_400_000


@pytest.fixture
def log(logs: MakeLogs) -> PartitionLog:
    return logs(verifies_transactions=True).log


def begin(
    log: PartitionLog, *, epoch: int = 0, sequence: int = 0, adds: bool = False, now_ms: int = NOW
) -> Verification | None:
    return log.producers.begin_verification(PID, epoch, sequence, adds, now_ms)


def send(log: PartitionLog, sequence: int, verification: Verification | None = None, **kw: Any) -> AppendInfo:
    transaction = TransactionAppend(verification)
    return log.append_as_leader(idempotent(sequence, transactional=True, **kw), 0, NOW, transaction=transaction)


def end(log: PartitionLog, *, version: int = 0, abort: bool = False, **kw: Any) -> AppendInfo:
    batch = marker(abort=abort, **kw)
    return log.append_as_leader(
        batch, 0, NOW, from_client=False, transaction=TransactionAppend(transaction_version=version)
    )


def refused(call: Callable[..., Any], *args: Any, **kw: Any) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        call(*args, **kw)
    return caught.value.code


def test_the_first_batch_of_a_transaction_needs_its_verification(log: PartitionLog):
    assert refused(send, log, 0) == ErrorCode.INVALID_TXN_STATE
    verification = begin(log)
    assert refused(send, log, 0, None) == ErrorCode.INVALID_TXN_STATE
    assert send(log, 0, verification).first_offset == 0


def test_the_batches_after_it_need_none(log: PartitionLog):
    send(log, 0, begin(log))
    assert begin(log, sequence=1) is None
    assert send(log, 1).first_offset == 1


def test_an_open_transaction_of_an_earlier_epoch_is_none_of_a_later_one(log: PartitionLog):
    send(log, 0, begin(log))
    assert refused(send, log, 0, epoch=1) == ErrorCode.INVALID_TXN_STATE
    assert begin(log, epoch=1) is not None


def test_a_verification_serves_one_transaction(log: PartitionLog):
    verification = begin(log)
    send(log, 0, verification)
    end(log)
    assert refused(send, log, 1, verification) == ErrorCode.INVALID_TXN_STATE
    assert send(log, 1, begin(log, sequence=1)).first_offset == 2


def test_a_marker_that_comes_first_ends_the_verification(log: PartitionLog):
    """The transaction was aborted after its coordinator had confirmed it: its batch would never be ended."""
    verification = begin(log)
    end(log, abort=True)
    assert refused(send, log, 0, verification) == ErrorCode.INVALID_TXN_STATE
    assert log.last_stable_offset == log.high_watermark
    assert begin(log) is not verification, "an answer to the earlier question is none to the next"


def test_a_replicated_marker_ends_it_too(log: PartitionLog):
    verification = begin(log)
    log.append_as_follower(marker(abort=True), NOW)
    assert refused(send, log, 0, verification) == ErrorCode.INVALID_TXN_STATE


def test_with_version_2_the_marker_of_the_transaction_before_leaves_the_next_one_alone(log: PartitionLog):
    verification = begin(log, epoch=1, adds=True)
    end(log, epoch=1, version=2)  # it ended the transaction of epoch 0
    assert send(log, 0, verification, epoch=1).first_offset == 1
    verification = begin(log, epoch=2, adds=True)
    end(log, epoch=3, version=2)
    assert refused(send, log, 0, verification, epoch=2) == ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_marker_of_another_epoch_ends_the_verification_with_version_2(log: PartitionLog):
    verification = begin(log, epoch=2, adds=True)
    end(log, epoch=1, version=2)
    assert refused(send, log, 0, verification, epoch=2) == ErrorCode.INVALID_TXN_STATE


def test_the_epoch_is_checked_before_the_verification(log: PartitionLog):
    """From INVALID_PRODUCER_EPOCH a producer recovers, from INVALID_TXN_STATE it does not (KAFKA-19690)."""
    send(log, 0, begin(log, epoch=3), epoch=3)
    end(log, epoch=3)
    assert refused(send, log, 0, epoch=2) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert refused(begin, log, epoch=2) == ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_repeated_batch_needs_no_verification(log: PartitionLog):
    send(log, 0, begin(log))
    assert (send(log, 0).duplicate, send(log, 0).first_offset) == (True, 0)


@pytest.mark.parametrize("abort", [True, False])
def test_what_repeats_a_batch_of_an_ended_transaction_is_refused(log: PartitionLog, abort: bool):
    """After an abort librdkafka gives another batch the sequence of one whose answer was lost, without a new epoch.
    Taken for repeated, records would be committed that are nowhere.
    """
    send(log, 0, begin(log))
    end(log, abort=abort)
    assert refused(send, log, 0) == ErrorCode.INVALID_TXN_STATE
    assert refused(send, log, 0, begin(log)) == ErrorCode.INVALID_TXN_STATE
    end(log, abort=True)
    assert send(log, 1, begin(log, sequence=1)).first_offset == 3
    assert refused(send, log, 0) == ErrorCode.INVALID_TXN_STATE
    assert (send(log, 1).duplicate, send(log, 1).first_offset) == (True, 3)


def test_without_the_setting_nothing_is_verified(logs: MakeLogs):
    assert send(logs(verifies_transactions=False).log, 0).first_offset == 0


def test_a_batch_does_not_overtake_one_that_waits_for_the_same_verification(log: PartitionLog):
    verification = begin(log, sequence=0)
    assert begin(log, sequence=1) is verification
    assert refused(send, log, 1, verification) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    send(log, 0, verification)
    assert send(log, 1).first_offset == 1


def test_a_higher_epoch_has_its_own_lowest_sequence(log: PartitionLog):
    verification = begin(log, sequence=4)
    assert begin(log, sequence=2) is verification
    assert verification is not None
    assert verification.lowest_sequence == 2
    begin(log, epoch=1, sequence=3)
    assert (verification.producer_epoch, verification.lowest_sequence) == (1, 3)
    begin(log, epoch=0, sequence=0)
    assert verification.lowest_sequence == 3


def test_with_version_2_an_unknown_producer_begins_at_zero(log: PartitionLog):
    assert refused(send, log, 5, begin(log, sequence=5, adds=True)) == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    log.producers.verifications.end(PID)
    assert send(log, 5, begin(log, sequence=5)).first_offset == 0, "with version 1 it may begin anywhere"


def test_a_batch_behind_one_that_was_refused_is_refused_alike(log: PartitionLog):
    """OUT_OF_ORDER_SEQUENCE_NUMBER would make the producer give up a transaction that only had to wait."""
    log.producers.refused = RefusedBatches().of(("t", 0))
    verification = begin(log, adds=True)
    header = sequenced_header(idempotent(0, transactional=True))
    assert header is not None
    log.producers.refused.note(header, ErrorCode.NOT_ENOUGH_REPLICAS, None, NOW)  # its coordinator did not answer
    assert refused(send, log, 1, verification) == ErrorCode.NOT_ENOUGH_REPLICAS
    assert send(log, 0, verification).first_offset == 0


def test_coordinators_batches_are_verified_too(log: PartitionLog):
    batch = idempotent(-1, transactional=True)
    assert refused(log.append_as_leader, batch, 0, NOW, from_client=False) == ErrorCode.INVALID_TXN_STATE
    transaction = TransactionAppend(begin(log, sequence=-1))
    log.append_as_leader(idempotent(-1, transactional=True), 0, NOW, from_client=False, transaction=transaction)
    assert log.producers.entries[PID].transaction_first_offset == 0


def test_a_coordinators_batch_has_no_last_sequence(logs: MakeLogs):
    """As Kafka's snapshots and DescribeProducers have it."""
    log = logs().log
    log.append_as_leader(idempotent(-1, 3, transactional=True), 0, NOW, from_client=False)
    assert log.producers.entries[PID].batches == [(-1, -1, 0, 2, NOW + 2)]


def test_what_is_never_answered_is_forgotten_in_time(log: PartitionLog):
    verification = begin(log)
    log.expire_producers(NOW + DAY_MS - 1)
    assert log.producers.verifications.holds(PID, verification)
    log.expire_producers(NOW + DAY_MS)
    assert not log.producers.verifications.holds(PID, verification)


def test_verifications_of_one_partition_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verification_module, "VERIFICATIONS_MAX", 3)
    verifications = Verifications()
    begun = [verifications.begin(producer_id, 0, 0, False, NOW) for producer_id in range(5)]
    assert [verifications.holds(producer_id, begun[producer_id]) for producer_id in range(5)] == [False] * 2 + [
        True
    ] * 3
    assert len(verifications) == 3


class TestMarkersOfVersion2:
    def test_the_epoch_of_a_marker_is_above_the_producers(self, log: PartitionLog):
        send(log, 0, begin(log, epoch=4), epoch=4)
        assert refused(end, log, epoch=4, version=2) == ErrorCode.INVALID_PRODUCER_EPOCH
        assert log.producers.entries[PID].transaction_first_offset == 0
        end(log, epoch=5, version=2)
        assert log.producers.entries[PID].transaction_first_offset == -1

    def test_a_repeated_marker_succeeds_where_nothing_is_open(self, log: PartitionLog):
        """The coordinator has not heard that it was written; refused, the transaction would never end (KAFKA-19999)."""
        send(log, 0, begin(log, epoch=4), epoch=4)
        end(log, epoch=5, version=2)
        assert end(log, epoch=5, version=2).first_offset == 2

    def test_a_late_marker_does_not_end_the_next_transaction(self, log: PartitionLog):
        send(log, 0, begin(log, epoch=4), epoch=4)
        end(log, epoch=5, version=2)
        send(log, 0, begin(log, epoch=5, adds=True), epoch=5)
        assert refused(end, log, epoch=5, version=2) == ErrorCode.INVALID_PRODUCER_EPOCH

    def test_at_the_last_epoch_a_marker_of_the_same_one_is_accepted(self, log: PartitionLog):
        """KAFKA-20090: a transaction that began at the last epoch must be able to end."""
        send(log, 0, begin(log, epoch=32767), epoch=32767)
        end(log, epoch=32767, version=2)
        assert log.producers.entries[PID].transaction_first_offset == -1

    @pytest.mark.parametrize("version", [0, 1])
    def test_before_version_2_the_marker_has_the_producers_epoch(self, log: PartitionLog, version: int):
        send(log, 0, begin(log, epoch=4), epoch=4)
        end(log, epoch=4, version=version)
        assert log.producers.entries[PID].transaction_first_offset == -1

    def test_a_marker_of_an_older_coordinator_is_fenced(self, log: PartitionLog):
        end(log, epoch=4, version=2, coordinator_epoch=9)
        assert refused(end, log, epoch=5, version=2, coordinator_epoch=8) == ErrorCode.TRANSACTION_COORDINATOR_FENCED

    def test_followers_take_what_the_leader_has_accepted(self, log: PartitionLog):
        for offset, batch in enumerate([idempotent(0, transactional=True, epoch=4), marker(abort=False, epoch=4)]):
            batch[0:8] = offset.to_bytes(8, "big")
            log.append_as_follower(batch, NOW)
        assert log.producers.entries[PID].transaction_first_offset == -1


def test_a_marker_fits_every_topic(logs: MakeLogs):
    """The limit of the topic was lowered while a transaction was open."""
    log = logs(max_message_bytes=10).log
    assert end(log).first_offset == 0


def test_verifications_are_no_part_of_the_replayed_state():
    state = ProducerState()
    verification = state.begin_verification(PID, 0, 0, False, NOW)
    state.load([], 0)
    assert state.verifications.holds(PID, verification)
