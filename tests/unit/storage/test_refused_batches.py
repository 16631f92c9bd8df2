"""Which gaps are refused as the batches in them were, and for how long: one sentence each."""

from __future__ import annotations

import pytest

from tests.unit.storage.batches import NOW, batch, idempotent
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.producers.refused_batches import (
    AWAITED_MS_MAX,
    GAPS_AFTER_ELECTION_REFUSED_MS,
    GAPS_REFUSED_MAX,
    UNKNOWN_AWAITED_MS_MAX,
    RefusedBatches,
    RefusedOfPartition,
    sequenced_header,
)

HERE, ELSEWHERE = (b"T" * 16, 0), (b"T" * 16, 1)
LAST_SEQUENCE = 2**31 - 1
PID = 7


class Refused:
    """One partition's refusals, in short."""

    def __init__(self, producers_max: int = 10) -> None:
        self.all = RefusedBatches(producers_max)

    def note(
        self, first: int, count: int = 10, code: ErrorCode = ErrorCode.NOT_ENOUGH_REPLICAS, *,
        expected: int | None = None, epoch: int = 0, producer_id: int = PID, now_ms: int = NOW, place=HERE,
    ) -> None:  # fmt: skip
        header = sequenced_header(idempotent(first, count, producer_id=producer_id, epoch=epoch))
        assert header is not None
        self.all.note((place,), header, code, expected, now_ms)

    def gap(
        self, first: int, *, expected: int | None = None, epoch: int = 0, producer_id: int = PID, now_ms: int = NOW,
        place=HERE,
    ) -> ErrorCode | None:  # fmt: skip
        return self.all.find_cause((place,), producer_id, epoch, first, expected, now_ms)


@pytest.fixture
def refused() -> Refused:
    return Refused()


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
    ],
)
def test_a_gap_of_refused_batches_is_refused_in_the_same_way(refused: Refused, code: ErrorCode):
    refused.note(100, code=code, expected=100)
    assert refused.gap(110, expected=100) == code
    refused.note(110, code=code, expected=100)
    assert refused.gap(120, expected=100) == code
    assert refused.gap(110, expected=100) == code


def test_a_gap_that_holds_more_is_none_of_ours(refused: Refused):
    refused.note(100, expected=100)
    assert refused.gap(111, expected=100) is None, "one record was never seen"
    assert refused.gap(110, expected=99) is None, "one before the refused batch was never seen"
    assert refused.gap(110, expected=105) is None
    assert refused.gap(100, expected=90) is None
    assert refused.gap(110, expected=100, epoch=1) is None
    assert refused.gap(110, expected=100, producer_id=8) is None
    assert refused.gap(110, expected=100, place=ELSEWHERE) is None


def test_a_batch_of_a_later_epoch_follows_none_of_an_earlier_one(refused: Refused):
    refused.note(100)
    refused.note(110, epoch=1)
    assert refused.gap(120, epoch=1) == ErrorCode.NOT_ENOUGH_REPLICAS
    assert refused.gap(110, epoch=1) is None


def test_a_batch_refused_for_good_is_not_awaited(refused: Refused):
    refused.note(100, code=ErrorCode.MESSAGE_TOO_LARGE, expected=100)
    assert refused.gap(110, expected=100) is None
    refused.note(100, expected=100)
    refused.note(100, code=ErrorCode.MESSAGE_TOO_LARGE, expected=100)  # now it has come again
    assert refused.gap(110, expected=100) is None


def test_of_an_unknown_producer_any_run_is_awaited(refused: Refused):
    refused.note(0)
    assert refused.gap(10) == ErrorCode.NOT_ENOUGH_REPLICAS
    assert refused.gap(0) is None, "the first itself may be taken"
    assert refused.gap(11) is None


def test_of_an_unknown_producer_a_run_is_awaited_for_as_long_as_its_first_comes_again(refused: Refused):
    """Another leader may have taken it, and the producer may have expired since."""
    refused.note(100, expected=100)
    later_ms = NOW + UNKNOWN_AWAITED_MS_MAX
    assert refused.gap(110, now_ms=later_ms) is not None
    refused.note(110, now_ms=later_ms)
    assert refused.gap(110, now_ms=later_ms + 1) is None
    refused.note(100, now_ms=later_ms)
    assert refused.gap(110, now_ms=later_ms + 1) is not None


def test_the_first_coming_again_begins_anew(refused: Refused):
    refused.note(100, expected=100)
    refused.note(110, expected=100)
    refused.note(100, code=ErrorCode.KAFKA_STORAGE_ERROR, expected=100)
    assert refused.gap(120, expected=100) is None, "110 is to come again behind it"
    assert refused.gap(110, expected=100) == ErrorCode.KAFKA_STORAGE_ERROR


def test_a_batch_that_is_truncated_joins_those_that_were_refused_behind_it(refused: Refused):
    refused.note(120, code=ErrorCode.NOT_LEADER_OR_FOLLOWER, expected=120)
    for first in (110, 100):
        refused.note(first, code=ErrorCode.NOT_LEADER_OR_FOLLOWER, expected=100)
    assert refused.gap(130, expected=100) == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert refused.gap(140, expected=100) is None
    refused.note(80, expected=80)
    assert refused.gap(130, expected=80) is None, "90 was never seen"


def test_what_was_taken_meanwhile_is_not_awaited_any_more(refused: Refused):
    for first in (100, 110, 120):
        refused.note(first, expected=100)
    refused.note(110, expected=110)  # 100 came again and was taken, 110 was refused again
    assert refused.gap(120, expected=110) == ErrorCode.NOT_ENOUGH_REPLICAS
    assert refused.gap(130, expected=110) is None, "120 is to come again behind it"
    refused.note(120, expected=110)
    assert refused.gap(130, expected=110) == ErrorCode.NOT_ENOUGH_REPLICAS


def test_sequences_wrap(refused: Refused):
    first = LAST_SEQUENCE - 4
    refused.note(first, expected=first)
    assert refused.gap(5, expected=first) == ErrorCode.NOT_ENOUGH_REPLICAS
    refused.note(5, expected=first)
    assert refused.gap(15, expected=first) == ErrorCode.NOT_ENOUGH_REPLICAS
    assert refused.gap(16, expected=first) is None


def test_it_ends_with_time_and_with_number(refused: Refused):
    refused.note(100, expected=100)
    assert refused.gap(110, expected=100, now_ms=NOW + AWAITED_MS_MAX) is not None
    assert refused.gap(110, expected=100, now_ms=NOW + AWAITED_MS_MAX + 1) is None
    assert refused.gap(110, expected=100, now_ms=NOW - AWAITED_MS_MAX - 1) is None, "the clock was set back"
    answers = [refused.gap(110, expected=100) for _ in range(GAPS_REFUSED_MAX + 5)]
    assert answers.count(None) == 6
    assert answers[-6:] == [None] * 6
    refused.note(100, expected=100)
    assert refused.gap(110, expected=100) is not None


def test_invented_producers_push_out_none_that_the_log_knows():
    refused = Refused(producers_max=10)
    refused.note(100, expected=100)
    refused.note(0, producer_id=8)
    for stranger in range(1000, 2000):
        refused.note(0, producer_id=stranger)
    assert refused.gap(110, expected=100) is not None
    assert refused.gap(10, producer_id=8) is None
    assert refused.gap(10, producer_id=1999) is not None
    assert len(refused.all) == 11
    for known in range(100, 200):
        refused.note(50, producer_id=known, expected=50)
    assert len(refused.all) == 20
    assert refused.gap(110, expected=100) is None, "the oldest goes first"


def test_what_was_refused_before_the_partition_was_hosted_is_known_by_its_name():
    table = RefusedBatches()
    header = sequenced_header(idempotent(0, 10))
    assert header is not None
    table.note((("t", 0),), header, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None, NOW)
    here = table.of(HERE, ("t", 0))
    with pytest.raises(KafkaError) as caught:
        here.check_gap(PID, 0, 10, None, NOW)
    assert caught.value.code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    here.note(header, ErrorCode.NOT_ENOUGH_REPLICAS, None, NOW)
    assert len(table) == 1
    here.check_gap(PID, 0, 0, None, NOW)
    table.of(ELSEWHERE, ("t", 1)).check_gap(PID, 0, 10, None, NOW)


def check(here: RefusedOfPartition, sequence: int, expected: int | None, now_ms: int, epoch: int = 0) -> bool:
    """Whether this gap is refused as retriable."""
    try:
        here.check_gap(PID, epoch, sequence, expected, now_ms)
    except KafkaError as error:
        return error.code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    return False


def test_after_an_election_every_gap_is_refused_as_retriable():
    here = RefusedBatches().of(HERE)
    assert not check(here, 10, 5, NOW), "the first leader of the partition"
    here.on_election(NOW)
    for expected, sequence in ((5, 10), (None, 1), (2**31 - 1, 3)):
        assert check(here, sequence, expected, NOW + GAPS_AFTER_ELECTION_REFUSED_MS)
    for now_ms in (NOW - GAPS_AFTER_ELECTION_REFUSED_MS - 1, NOW + GAPS_AFTER_ELECTION_REFUSED_MS + 1):
        assert not check(here, 10, None, now_ms)
    assert not check(here, 3, 5, NOW), "an old batch"
    assert not check(here, 0, None, NOW), "a new producer"


def test_the_time_of_a_gap_counts_from_its_first_batch():
    """The client waits for the leader before, which may hang, and turns to this one long after the election."""
    here = RefusedBatches().of(HERE)
    here.on_election(NOW)
    met_ms = NOW + 60_000
    assert [check(here, 10, 5, met_ms + ms) for ms in (0, GAPS_AFTER_ELECTION_REFUSED_MS)] == [True] * 2
    late_ms = met_ms + GAPS_AFTER_ELECTION_REFUSED_MS + 1
    assert not check(here, 10, 5, late_ms)
    assert not check(here, 12, 5, late_ms), "the same gap, a later batch"
    assert check(here, 12, 10, late_ms), "a gap behind the batches that came"
    assert check(here, 10, 5, late_ms, epoch=1)
    assert not check(here, 20, 15, NOW + AWAITED_MS_MAX + 1)


def test_a_gap_behind_a_batch_that_this_leader_refused_for_good_is_none_of_the_leader_before():
    here = RefusedBatches().of(HERE)
    here.on_election(NOW)
    late_ms = NOW + GAPS_AFTER_ELECTION_REFUSED_MS + 1
    header = sequenced_header(idempotent(5, 1, producer_id=PID))
    assert header is not None
    here.note(header, ErrorCode.MESSAGE_TOO_LARGE, 3, late_ms)
    assert check(here, 6, 3, late_ms), "the leader before may have refused those before it"
    here = RefusedBatches().of(HERE)
    here.on_election(NOW)
    here.note(header, ErrorCode.MESSAGE_TOO_LARGE, 5, late_ms)
    assert not check(here, 6, 5, late_ms)
    assert check(here, 8, 6, late_ms), "a gap elsewhere"


def test_gaps_are_forgotten_by_number():
    table = RefusedBatches(producers_max=10)
    here = table.of(HERE)
    here.on_election(NOW)
    assert check(here, 10, 5, NOW)
    late_ms = NOW + GAPS_AFTER_ELECTION_REFUSED_MS + 1
    for stranger in range(100, 120):
        with pytest.raises(KafkaError):
            here.check_gap(stranger, 0, 10, 5, late_ms)
    assert len(table._gaps) == 10
    assert check(here, 10, 5, late_ms)


def test_only_batches_with_a_sequence_are_noted():
    assert sequenced_header(None) is None
    assert sequenced_header(memoryview(b"x" * 60)) is None
    assert sequenced_header(memoryview(b"x" * 100)) is None
    assert sequenced_header(batch(3)) is None
    header = sequenced_header(idempotent(5, 3))
    assert header is not None
    assert (header.base_sequence, header.last_sequence) == (5, 7)
