"""Several batches of one producer under way, and the broker's mind changes between two of them."""

from __future__ import annotations

import errno

import pytest

from tests.unit.replication.replicas import Replicas, Sent
from tests.unit.storage.batches import NOW, idempotent, marker
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.producers.refused_batches import AWAITED_MS_MAX, GAPS_AFTER_ELECTION_REFUSED_MS
from tidelog.storage.producers.verification import TransactionAppend
from tidelog.storage.segments.segment import Segment

PID = 7


def cluster_of(count: int = 3) -> Replicas:
    return Replicas(count, min_insync_replicas="2")


def send(cluster: Replicas, sequence: int, *, node: int = 1, producer_id: int = PID, epoch: int = 0, **kw) -> Sent:
    sent = cluster.nodes[node].produce(
        b"%d.%d" % (producer_id, sequence), producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, **kw
    )
    cluster.loop.settle()
    return sent


def codes(cluster: Replicas, *sequences: int, **kw) -> list[int | None]:
    return [send(cluster, sequence, **kw).code for sequence in sequences]


def shrink(cluster: Replicas) -> None:
    for follower in (2, 3):
        cluster.cut.add((follower, 1))
    cluster.alter(isr=(1,))


def grow(cluster: Replicas) -> None:
    cluster.heal()
    cluster.loop.run_for(2000)
    cluster.agree(1)
    cluster.loop.run_for(100)


NOT_ENOUGH = ErrorCode.NOT_ENOUGH_REPLICAS
OUT_OF_ORDER = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
NOT_LEADER = ErrorCode.NOT_LEADER_OR_FOLLOWER


@pytest.mark.parametrize("known", [True, False])
def test_the_isr_grows_between_two_batches(known: bool) -> None:
    cluster = cluster_of()
    first = 1 if known else 0
    if known:
        assert send(cluster, 0).code == 0
    shrink(cluster)
    assert send(cluster, first).code == NOT_ENOUGH
    grow(cluster)
    assert codes(cluster, first + 1, first + 2, first + 1) == [NOT_ENOUGH] * 3
    assert codes(cluster, first, first + 1, first + 2) == [0, 0, 0]
    assert cluster.nodes[1].values() == [b"7.%d" % n for n in range(first + 3)]


def test_a_gap_that_nobody_refused_is_still_one() -> None:
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    assert send(cluster, 2).code == OUT_OF_ORDER
    shrink(cluster)
    assert codes(cluster, 1, 3) == [NOT_ENOUGH, NOT_ENOUGH]
    grow(cluster)
    assert send(cluster, 4).code == OUT_OF_ORDER, "2 was never sent"
    assert send(cluster, 3).code == OUT_OF_ORDER


def test_several_producers_and_epochs_are_kept_apart() -> None:
    cluster = cluster_of()
    for producer_id in (7, 8):
        assert send(cluster, 0, producer_id=producer_id).code == 0
    shrink(cluster)
    assert send(cluster, 1).code == NOT_ENOUGH
    assert send(cluster, 0, producer_id=9, epoch=3).code == NOT_ENOUGH
    grow(cluster)
    assert send(cluster, 2, producer_id=8).code == OUT_OF_ORDER
    assert send(cluster, 1, producer_id=9, epoch=3).code == NOT_ENOUGH
    assert send(cluster, 1, producer_id=9, epoch=2).code == 0, "an epoch of which nothing was refused"
    # A producer that gives up its batch begins another epoch; the old one is over then.
    assert codes(cluster, 0, 1, epoch=1) == [0, 0]
    assert send(cluster, 2, epoch=0).code == ErrorCode.INVALID_PRODUCER_EPOCH


def test_the_first_batch_of_a_new_epoch_is_awaited_too() -> None:
    cluster = cluster_of()
    assert codes(cluster, 0, 1) == [0, 0]
    shrink(cluster)
    assert send(cluster, 0, epoch=1).code == NOT_ENOUGH
    grow(cluster)
    assert codes(cluster, 1, 2, epoch=1) == [NOT_ENOUGH, NOT_ENOUGH]
    assert codes(cluster, 0, 1, 2, epoch=1) == [0, 0, 0]


def test_refused_again_in_the_middle() -> None:
    """Refused, sent again, and the ISR shrinks once more behind the first of them."""
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    shrink(cluster)
    assert codes(cluster, 1, 2, 3) == [NOT_ENOUGH] * 3
    grow(cluster)
    assert send(cluster, 1).code == 0
    shrink(cluster)
    assert send(cluster, 2).code == NOT_ENOUGH
    grow(cluster)
    assert codes(cluster, 3, 4) == [NOT_ENOUGH] * 2
    assert codes(cluster, 2, 3, 4) == [0, 0, 0]


def test_it_becomes_the_leader_between_two_batches() -> None:
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    cluster.loop.run_for(600)
    assert send(cluster, 1, node=2).code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    cluster.elect(2, [1, 2, 3])
    cluster.loop.run_for(100)
    assert codes(cluster, 2, 3, node=2) == [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 2
    assert codes(cluster, 1, 2, 3, node=2) == [0, 0, 0]


def test_a_new_leader_does_not_know_what_the_leader_before_refused() -> None:
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    shrink(cluster)
    assert send(cluster, 1).code == NOT_ENOUGH
    cluster.heal()
    cluster.elect(2, [2, 3])
    cluster.loop.run_for(100)
    assert codes(cluster, 2, 3, node=2) == [NOT_LEADER] * 2
    assert codes(cluster, 1, 2, 3, node=2) == [0, 0, 0]


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_partition_has_no_leader_before_another_replica_is_elected(is_killed: bool) -> None:
    """The old leader hangs with a batch when the last other replica that may lead is away, too."""
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    cluster.loop.run_for(600)
    if is_killed:
        cluster.stop(2)
    cluster.elect(-1, [1, 2], tell=[3] if is_killed else [2, 3])
    cluster.loop.run_for(100)
    if is_killed:
        cluster.start(2, killed=True)
    cluster.elect(2, [2, 3], tell=[2, 3])
    cluster.loop.run_for(100)
    assert codes(cluster, 2, node=2) == [NOT_LEADER]
    assert codes(cluster, 1, 2, node=2) == [0, 0]


def test_a_producer_whose_first_batch_the_leader_before_refused() -> None:
    cluster = cluster_of()
    shrink(cluster)
    assert send(cluster, 0).code == NOT_ENOUGH
    cluster.heal()
    cluster.elect(2, [2, 3])
    cluster.loop.run_for(100)
    assert codes(cluster, 1, node=2) == [NOT_LEADER]
    assert codes(cluster, 0, 1, node=2) == [0, 0]


def test_a_batch_in_the_middle_whose_refusal_is_still_on_its_way() -> None:
    """The first refused batch is sent again, and a new one with it, before the client has the answer to the second."""
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    cluster.elect(2, [1, 2, 3])
    cluster.loop.run_for(100)
    assert codes(cluster, 1, 2, node=1) == [NOT_LEADER] * 2
    assert codes(cluster, 1, 3, 4, node=2) == [0, NOT_LEADER, NOT_LEADER]
    assert codes(cluster, 2, 3, 4, node=2) == [0, 0, 0]


def test_gaps_are_refused_for_good_later() -> None:
    cluster = cluster_of()
    assert codes(cluster, 0, producer_id=7) == codes(cluster, 0, producer_id=8) == [0]
    assert codes(cluster, 1, producer_id=8) == [0]
    cluster.elect(2, [1, 2, 3])
    cluster.loop.run_for(100)
    assert codes(cluster, 1, 3, producer_id=7, node=2) == [0, NOT_LEADER]
    cluster.loop.run_for(GAPS_AFTER_ELECTION_REFUSED_MS + 1)
    assert codes(cluster, 3, producer_id=7, node=2) == [OUT_OF_ORDER]
    assert codes(cluster, 5, producer_id=9, node=2) == [0], "an unknown producer begins anywhere"
    assert codes(cluster, 3, producer_id=8, node=2) == [NOT_LEADER], "this one has only come now"
    cluster.loop.run_for(GAPS_AFTER_ELECTION_REFUSED_MS + 1)
    assert codes(cluster, 3, producer_id=8, node=2) == [OUT_OF_ORDER]


def test_a_client_that_turns_late_to_the_new_leader_with_the_later_batch_first() -> None:
    """The old leader hung with the first batch. When the request has timed out, the next batch overtakes it."""
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    cluster.elect(2, [1, 2, 3])
    cluster.loop.run_for(6 * GAPS_AFTER_ELECTION_REFUSED_MS)
    assert codes(cluster, 2, node=2) == [NOT_LEADER]
    assert codes(cluster, 1, 2, node=2) == [0, 0]


def test_a_gap_is_refused_for_good_when_no_client_keeps_the_missing_batch_any_longer() -> None:
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    cluster.elect(2, [1, 2, 3])
    cluster.loop.run_for(AWAITED_MS_MAX + 1)
    assert codes(cluster, 2, node=2) == [OUT_OF_ORDER]


def test_a_gap_that_it_has_met_before_it_led_again() -> None:
    """The lead comes back. The client, which has waited for the leader between, has sent nothing else meanwhile."""
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    cluster.loop.run_for(600)
    cluster.elect(2, [1, 2, 3])
    cluster.loop.run_for(100)
    assert codes(cluster, 2, node=2) == [NOT_LEADER]
    cluster.elect(3, [1, 2, 3])
    cluster.loop.run_for(GAPS_AFTER_ELECTION_REFUSED_MS + 1)
    cluster.elect(2, [1, 2, 3])
    cluster.loop.run_for(100)
    assert codes(cluster, 2, node=2) == [NOT_LEADER]
    assert codes(cluster, 1, 2, node=2) == [0, 0]


def test_a_leader_that_succeeds_no_other_refuses_a_gap_for_good_at_once() -> None:
    cluster = cluster_of()
    assert codes(cluster, 0, 2) == [0, OUT_OF_ORDER]
    cluster.elect(1, [1, 2, 3])  # a new epoch of the same leader
    cluster.loop.run_for(100)
    assert codes(cluster, 2) == [OUT_OF_ORDER]
    assert codes(cluster, 5, producer_id=8) == [0]


def test_the_device_refuses_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is out of something for a moment: the partition stays, the batch comes again."""
    cluster = cluster_of()
    assert send(cluster, 0).code == 0

    def exhausted(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "append", exhausted)
        patch.setattr(Segment, "append_one", exhausted)
        assert send(cluster, 1).code == ErrorCode.KAFKA_STORAGE_ERROR
    assert codes(cluster, 2, 3) == [ErrorCode.KAFKA_STORAGE_ERROR] * 2
    assert codes(cluster, 1, 2, 3) == [0, 0, 0]


def test_a_partition_that_is_not_here_yet() -> None:
    """The client knows of the new topic before this node does, whose first answer is that there is none."""
    cluster = cluster_of()
    node = cluster.nodes[1]
    partition = node.partition
    node.partitions.remove(partition, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert send(cluster, 0).code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    again = node.partitions.add("t", 0, partition.topic_id, partition.log)
    again.min_insync_replicas = 1
    again.become_leader(cluster.placed, cluster.nodes[1].clock_ms())
    assert send(cluster, 1).code == ErrorCode.NOT_LEADER_OR_FOLLOWER, "it would be taken as the first of all"
    send(cluster, 0)
    send(cluster, 1)
    assert node.values() == [b"7.0", b"7.1"]


def test_a_batch_in_the_log_waits_for_its_acknowledgement_where_new_ones_are_refused() -> None:
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    for follower in (2, 3):
        cluster.cut.add((follower, 1))
    lost = send(cluster, 1)
    assert lost.code is None
    cluster.alter(isr=(1,))
    assert lost.code == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
    known, again, new = send(cluster, 0), send(cluster, 1, timeout_ms=30_000), send(cluster, 2)
    assert (known.code, again.code, new.code) == (0, None, NOT_ENOUGH)
    cluster.heal()
    cluster.loop.run_for(700)
    cluster.agree(1)
    cluster.loop.run_for(10)
    assert again.code == 0
    assert again.response.responses[0].partition_responses[0].base_offset == 1
    assert codes(cluster, 3) == [NOT_ENOUGH]
    assert codes(cluster, 2, 3) == [0, 0]
    assert cluster.nodes[1].values() == [b"7.%d" % n for n in range(4)]


def test_it_does_not_wait_long_for_answers_wait_behind_it() -> None:
    cluster = cluster_of()
    for follower in (2, 3):
        cluster.cut.add((follower, 1))
    send(cluster, 0)
    cluster.alter(isr=(1,))
    again = send(cluster, 0, timeout_ms=30_000)
    cluster.loop.run_for(900)
    assert again.code is None
    cluster.loop.run_for(200)
    assert again.code == ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND


def test_what_is_truncated_joins_the_refused_batches_behind_it() -> None:
    """The first of it begins where the log ends then."""
    cluster = cluster_of()
    partition = cluster.nodes[1].partition
    for sequence in range(3):
        partition.append_as_leader(idempotent(sequence), NOW)
    partition.note_refused(idempotent(3), NOT_ENOUGH, NOW)
    partition.truncate_to(1, NOW)
    for sequence in (2, 3, 4):
        with pytest.raises(KafkaError) as refused:
            partition.append_as_leader(idempotent(sequence), NOW)
        assert refused.value.code == NOT_LEADER
    assert not partition.append_as_leader(idempotent(1), NOW).duplicate


def test_a_damaged_batch_is_not_taken_for_one_in_the_log() -> None:
    cluster = cluster_of()
    assert send(cluster, 0).code == 0
    shrink(cluster)
    node = cluster.nodes[1]
    batch = memoryview(bytearray(b"".join(map(bytes, node.log.read(0, 1 << 20, 1).regions))))
    assert node.partition.append_as_leader(batch, 0).duplicate
    batch[-1] ^= 1
    with pytest.raises(KafkaError, match="insufficient"):
        node.partition.append_as_leader(batch, 0)


def test_one_of_an_ended_transaction_is_not_taken_for_one_in_the_log() -> None:
    """Its sequence is that of other records now: they are not in the log."""
    cluster = cluster_of()
    partition = cluster.nodes[1].partition
    verified = TransactionAppend(partition.begin_verification(PID, 0, 0, False, NOW))
    partition.append_as_leader(idempotent(0, transactional=True), NOW, transaction=verified)
    shrink(cluster)
    assert partition.append_as_leader(idempotent(0, transactional=True), NOW).duplicate, "its transaction is open"
    grow(cluster)
    partition.append_as_leader(marker(abort=True), NOW, from_client=False)
    shrink(cluster)
    with pytest.raises(KafkaError, match="insufficient"):
        partition.append_as_leader(idempotent(0, transactional=True), NOW)
