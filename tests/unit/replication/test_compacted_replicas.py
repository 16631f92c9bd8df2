"""The replicas of a compacted topic: what one has lost to its cleaner decides on no record of another."""

from __future__ import annotations

import errno
import random
from typing import Any

import pytest

from tests.simulation.simulated_disk import SimulatedDisk
from tests.unit.replication.replicas import TOPIC_ID, ReplicaNode, Replicas
from tidelog.broker.replicas.fetching import follower_answers
from tidelog.broker.replicas.hosting import Hosting
from tidelog.broker.replicas.log_cleaner import ABSENCE_MS_MAX
from tidelog.protocol.batches.control_batches import ControlRecordType
from tidelog.protocol.batches.record import Record
from tidelog.protocol.batches.records import encode_batch, encode_control_batch, encode_end_txn_value, iter_records
from tidelog.replication.partition import ACKS_ALL, Partition
from tidelog.storage.cleaner.keys import PlainKeyTable
from tidelog.storage.log.compaction import Compaction, find_cleanable
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.producers.verification import TransactionAppend
from tidelog.storage.segments.append import UnexplainedGap


def record(number: int, now_ms: int, text: bytes) -> Record:
    """`text` is "key=value", or "key" for a tombstone."""
    key, has_value, _ = text.partition(b"=")
    return Record(number, now_ms, key, text if has_value else None)


def compacted(**options: Any) -> Replicas:
    cluster = Replicas(
        3, min_insync_replicas="1", replica_lag_time_max_ms="1000", transaction_partition_verification_enable="false",
        **options,
    )  # fmt: skip
    cluster.record_of = record
    cluster.configure(cleanup_policy="compact", delete_retention_ms="0")
    return cluster


def settle(cluster: Replicas) -> None:
    """Long enough for the ISR to shrink and to grow."""
    for _ in range(4):
        cluster.loop.run_for(3000)
        leader = cluster.nodes.get(cluster.placed.leader)
        while leader is not None and leader.proposals:
            cluster.agree(leader.id)


def clean(node: ReplicaNode) -> None:
    """All that is in the log now."""
    cleaning = begin_to_clean(node)
    cleaning.run()
    while cleaning.advance():
        cleaning.run()


def begin_to_clean(node: ReplicaNode) -> Compaction:
    log, now_ms = node.log, node.clock_ms()
    log.roll(now_ms)
    chosen = find_cleanable(log, now_ms)
    is_on_all = node.hosting.is_on_all_replicas(log)
    return Compaction(
        log, chosen, lambda: PlainKeyTable(1 << 20, 1.0), now_ms, piece_bytes=10_000,
        removes_until_ms=now_ms if is_on_all else now_ms - ABSENCE_MS_MAX,
    )  # fmt: skip


def end(cluster: Replicas, node_id: int) -> None:
    cluster.stop(node_id)
    cluster.broker_epochs[node_id] += 1
    cluster.fenced.add(node_id)


def begin(cluster: Replicas, node_id: int) -> None:
    cluster.fenced.discard(node_id)
    cluster.alter()
    cluster.start(node_id, killed=True)
    cluster.tell()
    settle(cluster)


def test_a_follower_keeps_no_record_in_the_place_of_the_compacted_first_ones_of_an_epoch() -> None:
    """The leader has copied that epoch without them, and its predecessor had a tail of its own at their offsets."""
    cluster = compacted()
    cluster.elect(3, (1, 2, 3))
    settle(cluster)
    cluster.nodes[3].produce(b"k=committed")
    settle(cluster)
    cluster.cut |= {(1, 3), (2, 3)}
    cluster.nodes[3].produce(b"k=never committed", timeout_ms=100)
    cluster.loop.run_for(50)
    end(cluster, 3)
    cluster.heal()
    cluster.elect(1, (1, 2))
    settle(cluster)
    for value in (b"x=1", b"x=2", b"x=3"):
        cluster.nodes[1].produce(value)
        cluster.loop.settle()
    clean(cluster.nodes[1])
    assert cluster.nodes[1].values() == [b"k=committed", b"x=3"]
    end(cluster, 2)
    cluster.alter(isr=(1,))
    settle(cluster)
    cluster.disks[2] = SimulatedDisk(random.Random(2))
    begin(cluster, 2)
    assert set(cluster.placed.isr) == {1, 2}
    cluster.elect(2, (1, 2))
    settle(cluster)
    begin(cluster, 3)
    assert set(cluster.placed.isr) == {1, 2, 3}
    assert [node.values() for _, node in sorted(cluster.nodes.items())] == [[b"k=committed", b"x=3"]] * 3


@pytest.mark.parametrize("policy", ["compact", "delete"])
def test_a_copy_that_an_unclean_election_cuts_below_what_was_cleaned_begins_again(policy: str) -> None:
    """The newest record of a key went with the cut, and the one before it with the cleaning."""
    cluster = compacted()
    for value in (b"k=1", b"j=1", b"h=1"):
        cluster.nodes[1].produce(value)
        cluster.loop.settle()
    settle(cluster)
    end(cluster, 2)
    end(cluster, 3)
    cluster.alter(isr=(1,))
    settle(cluster)
    assert cluster.nodes[1].produce(b"k=2").code == 0
    cluster.nodes[1].log.roll(cluster.nodes[1].clock_ms())
    cluster.nodes[1].produce(b"j=2")
    clean(cluster.nodes[1])
    assert cluster.nodes[1].values() == [b"h=1", b"k=2", b"j=2"]
    cluster.configure(cleanup_policy=policy)
    cluster.nodes[1].checkpoint()
    end(cluster, 1)
    cluster.elect(-1, (1,), tell=())
    begin(cluster, 2)
    cluster.elect(2, (2,))
    cluster.nodes[2].produce(b"i=1")
    settle(cluster)
    cluster.disks[1].end_process()
    begin(cluster, 1)
    assert set(cluster.placed.isr) == {1, 2}
    assert [cluster.nodes[each].values() for each in (1, 2)] == [[b"k=1", b"j=1", b"h=1", b"i=1"]] * 2


def clean_all_often(cluster: Replicas) -> None:
    """Often enough that what is due to go is gone."""
    for number in range(3):
        cluster.nodes[1].produce(b"z=%d" % number)
        settle(cluster)
        for node in cluster.nodes.values():
            clean(node)
        cluster.loop.run_for(1000)


def tables(cluster: Replicas) -> list[list[bytes]]:
    """What each replica has of the keys but "z"."""
    return [
        [value for value in node.values() if value and not value.startswith(b"z")]
        for _, node in sorted(cluster.nodes.items())
    ]


def test_a_replica_that_comes_back_has_no_key_that_was_deleted_meanwhile() -> None:
    cluster = compacted()
    cluster.nodes[1].produce(b"k=1", b"j=1")
    settle(cluster)
    end(cluster, 3)
    cluster.alter(isr=(1, 2))
    settle(cluster)
    cluster.nodes[1].produce(b"k")
    settle(cluster)
    clean_all_often(cluster)
    begin(cluster, 3)
    assert set(cluster.placed.isr) == {1, 2, 3}
    clean_all_often(cluster)
    assert tables(cluster) == [[b"j=1"]] * 3
    assert [tombstones(node) for node in cluster.nodes.values()] == [[]] * 3, "they go when all are back"


def tombstones(node: ReplicaNode) -> list[bytes | None]:
    log = node.log
    data = b"".join(map(bytes, log.read(log.log_start_offset, 1 << 20, log.log_end_offset).regions))
    return [each.key for each in iter_records(data) if each.value is None]


def append(cluster: Replicas, data: bytes | bytearray, *, version: int = 0) -> None:
    """`version` of a transaction's marker; 0 for records."""
    node = cluster.nodes[1]
    transaction = TransactionAppend(transaction_version=version) if version else TransactionAppend()
    node.partitions.append(
        node.partition, memoryview(bytearray(data)), node.clock_ms(), ACKS_ALL, not version, transaction
    )
    settle(cluster)


def test_a_replica_that_comes_back_has_no_transaction_open_that_was_ended_meanwhile() -> None:
    """Its last stable offset stood still, and readers of committed records with it, when it led."""
    cluster = compacted()
    now_ms = cluster.nodes[1].clock_ms()
    cluster.nodes[1].produce(b"k=1")
    opening = encode_batch(
        [Record(0, now_ms, b"t", b"t=1")], producer_id=7, producer_epoch=0, base_sequence=0, transactional=True
    )
    append(cluster, opening)
    end(cluster, 3)
    cluster.alter(isr=(1, 2))
    settle(cluster)
    marker = encode_control_batch(
        ControlRecordType.ABORT, encode_end_txn_value(0), timestamp=now_ms, producer_id=7, producer_epoch=1
    )
    append(cluster, marker, version=2)
    clean_all_often(cluster)
    begin(cluster, 3)
    assert set(cluster.placed.isr) == {1, 2, 3}
    assert [node.log.last_stable_offset for node in cluster.nodes.values()] == [cluster.nodes[1].log.log_end_offset] * 3


def test_a_replica_that_is_added_again_has_no_key_that_was_deleted_while_it_was_none() -> None:
    """Its node was down all the time, so that it still has its former copy."""
    cluster = compacted()
    cluster.nodes[1].produce(b"k=1", b"j=1")
    settle(cluster)
    end(cluster, 3)
    cluster.alter(replicas=(1, 2), isr=(1, 2))
    cluster.nodes[1].produce(b"k")
    settle(cluster)
    clean_all_often(cluster)
    assert [tombstones(node) for node in cluster.nodes.values()] == [[]] * 2
    cluster.alter(replicas=(1, 2, 3), adding_replicas=(3,))
    begin(cluster, 3)
    assert set(cluster.placed.isr) == {1, 2, 3}
    assert tables(cluster) == [[b"j=1"]] * 3


@pytest.mark.parametrize("becomes_another", ["never", "before", "meanwhile"])
def test_a_former_copy_of_a_topic_that_was_compacted_begins_again(becomes_another: str) -> None:
    """The others have not kept tombstones for it while the topic was compacted, which may have been after it left."""
    cluster = compacted()
    cluster.nodes[1].produce(b"k=1", b"j=1")
    settle(cluster)
    if becomes_another == "before":
        cluster.configure(cleanup_policy="delete")
    cluster.nodes[3].checkpoint()
    end(cluster, 3)
    if becomes_another == "meanwhile":
        cluster.configure(cleanup_policy="delete")
    cluster.alter(isr=(1, 2), adding_replicas=(3,))
    cluster.cut |= {(3, 1), (3, 2)}
    begin(cluster, 3)
    assert (cluster.nodes[3].values(), cluster.nodes[3].log.log_end_offset) == ([], 0)


def test_a_former_copy_begins_again_after_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node went on with the copy where no file could be opened for a moment."""
    cluster = compacted()
    cluster.nodes[1].produce(b"k=1", b"j=1")
    settle(cluster)
    end(cluster, 3)
    cluster.alter(isr=(1, 2), adding_replicas=(3,))
    cluster.cut |= {(3, 1), (3, 2)}
    truncate = PartitionLog.truncate_fully_and_start_at
    refused: list[int] = []

    def short(log: PartitionLog, offset: int) -> None:
        if len(refused) < 3:
            refused.append(offset)
            raise OSError(errno.EMFILE, "Too many open files")
        truncate(log, offset)

    monkeypatch.setattr(PartitionLog, "truncate_fully_and_start_at", short)
    begin(cluster, 3)
    cluster.nodes[3].hosting.start()
    cluster.loop.run_for(20_000)
    assert (len(refused), cluster.nodes[3].values(), cluster.nodes[3].log.log_end_offset) == (3, [], 0)
    assert not cluster.nodes[3].directories.offline


@pytest.mark.parametrize(
    "why", ["it is no copy that is being added", "nobody leads", "it may be elected", "one other is in sync"]
)
def test_a_copy_that_may_be_needed_does_not_begin_again(why: str) -> None:
    cluster = compacted()
    cluster.nodes[1].produce(b"k=1", b"j=1")
    settle(cluster)
    end(cluster, 3)
    isr = (1,) if why == "one other is in sync" else (1, 2)
    cluster.alter(isr=isr, adding_replicas=() if why == "it is no copy that is being added" else (3,))
    if why == "nobody leads":
        cluster.elect(-1, isr, tell=())
    elif why == "it may be elected":
        cluster.alter(elr=(3,))
    cluster.cut |= {(3, 1), (3, 2)}
    begin(cluster, 3)
    assert cluster.nodes[3].values() == [b"k=1", b"j=1"]


def accept_reports(cluster: Replicas) -> None:
    """The controller assigns the replicas to the directories that their nodes have reported."""
    for node in cluster.nodes.values():
        settle(cluster)
        assert node.assignments is not None
        reported = node.assignments.reported.pop((TOPIC_ID, 0), None)
        if reported is not None:
            directory_id, on_accepted = reported
            placed = cluster.placed
            own = [directory_id if each == node.id else placed.directory_of(each) for each in placed.replicas]
            cluster.alter(directories=tuple(own))
            if on_accepted is not None:
                on_accepted()
    settle(cluster)


def begin_to_move(cluster: Replicas, node: ReplicaNode) -> LogDirectory:
    """Have the replica of a node move to its other directory, which is returned."""
    assert node.moves is not None
    other = next(home for home in node.homes if not home.logs)
    node.moves.order("t", 0, other.path)
    settle(cluster)
    return other


def test_a_move_that_goes_on_after_its_directory_was_offline_brings_no_deleted_key_back() -> None:
    """The copy in it had not come to the tombstone, which is gone when the directory is back."""
    cluster = compacted(log_dirs="/data,/other")
    accept_reports(cluster)
    cluster.nodes[1].produce(b"k=1", b"j=1")
    settle(cluster)
    node = cluster.nodes[3]
    other = begin_to_move(cluster, node)
    copy = other.futures["t", 0]
    assert copy.log_end_offset == 2
    copy.flush()
    node.directories.failed(other, OSError(errno.EIO, "broken"))
    accept_reports(cluster)
    cluster.nodes[1].produce(b"k")
    clean_all_often(cluster)
    assert [tombstones(each) for each in cluster.nodes.values()] == [[]] * 3
    end(cluster, 3)
    cluster.alter(isr=(1, 2))
    begin(cluster, 3)
    for _ in range(3):
        accept_reports(cluster)
    homes = [home for home in cluster.nodes[3].homes if home.logs]
    assert [home.path for home in homes] == [other.path]
    assert tables(cluster) == [[b"j=1"]] * 3


@pytest.mark.parametrize("refused", ["to empty the copy", "to host the replica"])
def test_a_move_goes_on_after_a_shortage_at_the_start(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still until the next start where no file could be opened for a moment."""
    cluster = compacted(log_dirs="/data,/other")
    cluster.nodes[1].produce(b"k=1", b"j=1")
    settle(cluster)
    other = begin_to_move(cluster, cluster.nodes[3])
    other.futures["t", 0].flush()
    end(cluster, 3)
    cluster.alter(isr=(1, 2))
    refusals: list[object] = []
    is_copy = refused == "to empty the copy"
    owner, name = (PartitionLog, "truncate_fully_and_start_at") if is_copy else (Hosting, "_host")
    ask = getattr(owner, name)

    def short(*arguments: Any) -> Any:
        if len(refusals) < 3:
            refusals.append(arguments)
            raise OSError(errno.EMFILE, "Too many open files")
        return ask(*arguments)

    monkeypatch.setattr(owner, name, short)
    begin(cluster, 3)
    for _ in range(3):
        accept_reports(cluster)
    assert (len(refusals), cluster.nodes[3].directories.offline) == (3, {})
    assert [home.path for home in cluster.nodes[3].homes if home.logs] == [other.path]
    assert tables(cluster) == [[b"k=1", b"j=1"]] * 3


@pytest.mark.parametrize("is_moving", [True, False])
def test_a_stop_after_a_shortage_at_the_start_leaves_the_logs_as_they_are(
    is_moving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer that tries again found nothing deferred any more, and took the logs for those of no replica."""
    cluster = compacted(log_dirs="/data,/other")
    cluster.nodes[1].produce(b"k=1", b"j=1")
    settle(cluster)
    if is_moving:
        begin_to_move(cluster, cluster.nodes[3]).futures["t", 0].flush()
    end(cluster, 3)
    cluster.alter(isr=(1, 2))

    def short(*arguments: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Hosting, "_host", short)
        begin(cluster, 3)
        node = cluster.nodes[3]
        before = [(list(home.logs), list(home.futures)) for home in node.homes]
        assert sorted(before) == [([], [("t", 0)]), ([("t", 0)], [])] if is_moving else [([], []), ([("t", 0)], [])]
        node.hosting.close()
        cluster.loop.run_for(2000)
        assert [(list(home.logs), list(home.futures)) for home in node.homes] == before
    end(cluster, 3)
    begin(cluster, 3)
    for _ in range(3):
        accept_reports(cluster)
    assert tables(cluster) == [[b"k=1", b"j=1"]] * 3


def test_a_cleaning_ends_when_the_topic_is_not_compacted_any_more() -> None:
    cluster = compacted()
    for value in (b"k=1", b"k=2", b"k=3"):
        cluster.nodes[1].produce(value)
    settle(cluster)
    log = cluster.nodes[1].log
    cleaning = begin_to_clean(cluster.nodes[1])
    cleaning.run()
    assert cleaning.advance()
    cluster.configure(cleanup_policy="delete")
    cleaning.run()
    assert not cleaning.advance()
    assert (cleaning.is_given_up, log.compaction) == (True, None)
    assert cluster.nodes[1].values() == [b"k=1", b"k=2", b"k=3"]
    cluster.configure(cleanup_policy="compact")
    clean(cluster.nodes[1])
    assert cluster.nodes[1].values() == [b"k=3"]


@pytest.mark.parametrize("is_compacted", [True, False])
@pytest.mark.parametrize("is_usual", [True, False])
def test_a_follower_of_a_log_that_ends_behind_a_gap_ends_there_too(
    is_compacted: bool, is_usual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its fetches was answered at once, without records: both nodes did nothing else any more, and the follower
    did not come into the ISR before the next record. Of a topic that is not compacted any more it asks the other
    replicas about the gap. The usual answer, with news of one partition, is made apart.
    """
    if not is_usual:
        monkeypatch.setattr(follower_answers, "VERSION", -1)
    cluster = compacted()
    cluster.elect(1, (1,))
    cluster.stop(2)
    cluster.stop(3)
    log, epoch, far = cluster.nodes[1].log, cluster.nodes[1].partition.leader_epoch, 2**31 + 5
    log.append_as_leader(memoryview(bytearray(encode_batch([record(0, 0, b"k=1")]))), epoch, 0, from_client=False)
    log.roll(0)
    log.append_as_follower(memoryview(encode_batch([record(0, 0, b"k=2")], base_offset=far, leader_epoch=epoch)), 0)
    log.truncate_to(far)
    log.flush()
    if not is_compacted:
        cluster.configure(cleanup_policy="delete")
    asked: list[int] = []

    def explain(partition: Partition, gap: UnexplainedGap) -> None:
        asked.append(gap.end_offset)
        partition.log.explain_gaps(gap.end_offset)

    cluster.start(2).fetchers.on_gap = explain
    fetches_before = len(cluster.requests)
    settle(cluster)
    assert len(cluster.requests) - fetches_before < 100
    assert asked == ([] if is_compacted else [far - 1])
    assert cluster.placed.isr == (1, 2)
    assert cluster.nodes[2].marks == (far, far)
    cluster.nodes[1].produce(b"k=3")
    cluster.loop.settle()
    assert cluster.nodes[2].log.log_end_offset == far + 1
