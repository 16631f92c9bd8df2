"""Two and three logs that replicate: high watermarks, truncation by epoch, the cases of KIP-101, the ISR."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.old_truncation import truncate_by_high_watermark
from tests.simulation.simulated_disk import SimulatedDisk
from tests.unit.replication.replicas import LIST_OFFSETS, TOPIC_ID, FakeLink, ReplicaNode, Replicas
from tidelog.broker.replicas import hosting
from tidelog.broker.replicas.fetching.follower_fetches import FollowerFetches
from tidelog.broker.replicas.fetching.follower_sessions import FollowerEntry
from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.batches.record import Record
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.uuids import LOST_DIRECTORY, UNASSIGNED_DIRECTORY
from tidelog.replication import leader_bounds
from tidelog.replication.controller.metadata.image import METADATA_VERSION, MetadataDelta
from tidelog.replication.controller.metadata.record_codec import DIRECTORIES_VERSION
from tidelog.replication.partition import Partition
from tidelog.replication.ports import OnResponse
from tidelog.storage.log.partition_log import PartitionLog


def test_the_high_watermark_walks_in_two_fetch_rounds() -> None:
    cluster = Replicas(2)
    leader, follower = cluster.nodes[1], cluster.nodes[2]
    assert cluster.marks() == {1: (0, 0), 2: (0, 0)}
    sent = leader.produce(b"a")
    assert (leader.marks, follower.marks) == ((0, 1), (0, 0))
    assert sent.code is None
    while follower.log.log_end_offset == 0:  # round one: the records
        assert sent.code is None
        cluster.loop.turn()
    assert (leader.marks, follower.marks) == ((0, 1), (0, 1))
    cluster.loop.settle()  # round two says that they have arrived
    assert sent.code == 0
    assert (leader.marks, follower.marks) == ((1, 1), (0, 1)), "the follower's next answer will say so"
    cluster.loop.run_for(600)
    assert cluster.marks() == {1: (1, 1), 2: (1, 1)}


def test_a_line_of_the_log_names_a_partition_as_the_docs_do() -> None:
    assert str(Replicas(1).nodes[1].partition) == "t-0"


def test_three_replicas_hold_what_is_acknowledged() -> None:
    cluster = Replicas(3)
    sent = [cluster.nodes[1].produce(b"%d" % n) for n in range(20)]
    cluster.loop.settle()
    assert [each.code for each in sent] == [0] * 20
    assert [node.values() for node in cluster.nodes.values()] == [[b"%d" % n for n in range(20)]] * 3


def test_a_waiting_fetch_is_answered_by_an_append_and_not_by_a_moved_mark() -> None:
    cluster = Replicas(3)
    cluster.loop.run_for(1)
    cluster.requests.clear()
    cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    assert len(cluster.requests) == 2, "one more fetch of each follower, which now wait"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]


def test_a_follower_says_why_it_cannot_fetch_from_its_leader(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Replicas(2)
    cluster.loop.run_for(15_100)
    cluster.stop(1)
    cluster.loop.run_for(29_000)
    assert not warnings(caplog), "most leaders are back, or replaced, by then"
    cluster.loop.run_for(16_000)
    line = "no records come from broker 1 for the replicas here that follow it (1): node:1: the process has ended"
    assert set(warnings(caplog)) == {line}
    cluster.start(1)
    cluster.loop.run_for(5_000)
    caplog.clear()
    cluster.loop.run_for(60_000)
    assert not warnings(caplog)


def test_a_follower_says_that_its_leader_has_no_listener_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Replicas(2)
    cluster.stop(2)
    cluster.start(2)
    monkeypatch.setattr(cluster.nodes[2].fetchers, "endpoint_of", lambda broker_id: None)
    cluster.loop.run_for(46_000)
    (line,) = set(warnings(caplog))
    assert line.startswith("no records come from broker 1 ")
    assert "inter.broker.listener.name" in line


def test_a_follower_says_that_its_leader_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Replicas(2)
    cluster.loop.run_for(100)
    cluster.cut.add((2, 1))
    cluster.loop.run_for(90_000)
    line = "no records come from broker 1 for the replicas here that follow it (1): node:1: it does not answer"
    assert line in warnings(caplog)
    cluster.cut.clear()
    cluster.loop.run_for(31_000)
    caplog.clear()
    cluster.loop.run_for(60_000)
    assert not warnings(caplog)


def test_acks_1_does_not_wait_for_the_followers() -> None:
    cluster = Replicas(2)
    cluster.flush()
    assert cluster.nodes[1].produce(b"a", acks=1).code == 0


def test_a_follower_catches_up_from_nothing() -> None:
    cluster = Replicas(3)
    cluster.stop(3, power=True)
    cluster.elect(1, [1, 2])
    for n in range(50):
        cluster.nodes[1].produce(b"%d" % n * 100)
        cluster.loop.settle()
    cluster.broker_epochs[3] = 200
    cluster.alter()
    cluster.start(3)
    cluster.loop.run_for(50)
    assert cluster.nodes[3].values() == cluster.nodes[1].values()
    assert [broker_id for broker_id, _ in cluster.nodes[1].proposals[-1][1].isr] == [1, 2, 3]
    assert cluster.agree(1).isr[2] == (3, 200)
    assert cluster.nodes[1].partition.in_sync.isr == (1, 2, 3)


def loss() -> tuple[list[bytes], int | None]:
    """Both in sync. B has the record but not yet the mark; it restarts, and A dies before B could fetch."""
    cluster = Replicas(2)
    sent = cluster.nodes[1].produce(b"acknowledged")
    cluster.loop.settle()
    assert cluster.nodes[2].marks == (0, 1)
    code = sent.code
    cluster.nodes[2].checkpoint()
    cluster.stop(2)
    cluster.start(2)
    cluster.stop(1)
    cluster.elect(2, [2])
    return cluster.nodes[2].values(), code


def test_loss_kip_101(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loss() == ([b"acknowledged"], 0)
    truncate_by_high_watermark(monkeypatch)
    assert loss() == ([], 0), "the old rule loses an acknowledged record"


def divergence() -> tuple[list[bytes], list[bytes]]:
    """Both lose power; the one without the last record comes back first and takes another at the same offset."""
    cluster = Replicas(2)
    first, second = cluster.nodes[1], cluster.nodes[2]
    first.produce(b"m1")
    cluster.loop.run_for(600)
    cluster.cut.add((2, 1))
    cluster.fenced.add(2)
    cluster.alter(isr=(1,))
    first.produce(b"m2")
    cluster.loop.settle()
    assert first.marks == (2, 2)
    for node in (first, second):
        node.log.flush()
        node.checkpoint()
    cluster.stop(1, power=True)
    cluster.stop(2, power=True)
    cluster.heal()
    cluster.start(2)
    cluster.elect(2, [2])  # unclean
    cluster.nodes[2].produce(b"m3")
    cluster.start(1)
    cluster.loop.run_for(600)
    return cluster.nodes[1].values(), cluster.nodes[2].values()


def test_divergence_kip_101(monkeypatch: pytest.MonkeyPatch) -> None:
    assert divergence() == ([b"m1", b"m3"], [b"m1", b"m3"])
    truncate_by_high_watermark(monkeypatch)
    first, second = divergence()
    assert first != second, "the old rule leaves two histories at one offset"


def test_a_deposed_leader_cuts_what_the_new_one_does_not_have() -> None:
    cluster = Replicas(3)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(600)
    cluster.cut |= {(2, 1), (3, 1)}
    lost = [cluster.nodes[1].produce(b"x%d" % n) for n in range(3)]
    cluster.elect(2, [2, 3], tell=[2, 3])
    cluster.nodes[2].produce(b"b")
    cluster.loop.settle()
    cluster.heal()
    cluster.tell([1])
    assert [each.code for each in lost] == [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 3
    cluster.loop.run_for(600)
    assert cluster.nodes[1].values() == [b"a", b"b"]
    assert cluster.nodes[1].marks == cluster.nodes[2].marks == (2, 2)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_log_that_is_to_be_cut_without_descriptors(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut when there are some; one that was cut in part is not used any more."""
    cluster = Replicas(3)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(600)
    cluster.cut |= {(2, 1), (3, 1)}
    cluster.nodes[1].produce(b"x")
    cluster.elect(2, [2, 3], tell=[2, 3])
    cluster.nodes[2].produce(b"b")
    cluster.loop.settle()
    refused: list[str] = []

    def refuse(disk: SimulatedDisk, path: str) -> None:
        refused.append(path)
        raise OSError(errno.EMFILE, "too many open files")

    shortages: list[None] = []
    cluster.nodes[1].fetchers.on_shortage = lambda: shortages.append(None)
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedDisk, "list_directory" if is_whole else "sync_directory", refuse)
        cluster.heal()
        cluster.tell([1])
        cluster.loop.run_for(3000)
    assert len(refused) > is_whole, "it is tried again"
    assert bool(shortages) is is_whole
    cluster.loop.run_for(3000)
    assert cluster.nodes[1].partition.offline != is_whole
    if is_whole:
        assert cluster.nodes[1].values() == [b"a", b"b"]
        assert cluster.nodes[1].marks == cluster.nodes[2].marks == (2, 2)


def test_several_elections_leave_one_history() -> None:
    """KIP-279: each has records of an epoch that the others know nothing of."""
    cluster = Replicas(3)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(600)
    cluster.cut |= {(each, other) for each in (1, 2, 3) for other in (1, 2, 3)}
    for leader in (1, 2, 3, 1, 2):
        cluster.elect(leader, [leader], tell=[leader])
        cluster.nodes[leader].produce(b"by %d in %d" % (leader, cluster.placed.leader_epoch))
        cluster.loop.settle()
    cluster.heal()
    cluster.elect(3, [3])
    cluster.nodes[3].produce(b"last")
    cluster.loop.run_for(2000)
    histories = [node.values() for node in cluster.nodes.values()]
    assert histories[0] == histories[1] == histories[2] == [b"a", b"by 3 in 3", b"last"]


def test_who_lags_leaves_the_isr_and_comes_back() -> None:
    cluster = Replicas(3, replica_lag_time_max_ms="1000")
    cluster.loop.run_for(1)
    cluster.cut.add((3, 1))
    cluster.loop.run_for(1600)
    assert not cluster.nodes[1].proposals, "nothing was appended: it has all there is"
    sent = cluster.nodes[1].produce(b"a", timeout_ms=60_000)
    cluster.loop.run_for(500)
    assert sent.code is None
    cluster.loop.run_for(1000)
    assert cluster.agree(1).removes == (3,)
    assert sent.code == 0
    cluster.heal()
    cluster.loop.run_for(1000)
    assert cluster.agree(1).adds == 3
    assert cluster.nodes[1].partition.in_sync.isr == (1, 2, 3)


def test_a_follower_that_is_about_to_join_is_waited_for() -> None:
    cluster = Replicas(2, replica_lag_time_max_ms="1000")
    cluster.elect(1, [1])
    cluster.loop.run_for(1)
    cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    (partition, proposal) = cluster.nodes[1].proposals[-1]
    assert partition.in_sync.pending is proposal
    cluster.cut.add((2, 1))
    sent = cluster.nodes[1].produce(b"b", timeout_ms=60_000)
    cluster.loop.settle()
    assert sent.code is None, "the controller may have taken it in already"
    partition.on_proposal_rejected(proposal)
    cluster.loop.run_for(1600)
    assert sent.code == 0


def test_no_write_waits_for_a_replica_whose_log_directory_has_failed() -> None:
    """Its broker is active, and it had all records a moment ago. Its last fetch may arrive after the failure."""
    cluster = Replicas(3)
    cluster.loop.run_for(1)
    directories = (UNASSIGNED_DIRECTORY, UNASSIGNED_DIRECTORY, LOST_DIRECTORY)
    cluster.cut.add((3, 1))
    sent = cluster.nodes[1].produce(b"a", timeout_ms=60_000)
    cluster.loop.settle()
    assert sent.code is None
    cluster.alter(isr=(1, 2), directories=directories)
    assert sent.code == 0
    partition = cluster.nodes[1].partition
    partition.follower_fetched(partition.in_sync.followers[3], 1, cluster.loop.now_s * 1000)
    assert not cluster.nodes[1].proposals, "it does not come back"
    sent = cluster.nodes[1].produce(b"b", timeout_ms=60_000)
    cluster.loop.settle()
    assert sent.code == 0


@pytest.mark.parametrize("isr", [(1,), (1, 2)])
def test_too_few_in_sync_replicas(isr: tuple[int, ...]) -> None:
    cluster = Replicas(3, min_insync_replicas="2")
    cluster.cut |= {(2, 1), (3, 1)}
    waiting = cluster.nodes[1].produce(b"a", timeout_ms=60_000)
    cluster.alter(isr=isr)
    too_few = len(isr) < 2
    assert waiting.code == (ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND if too_few else None)
    refused = cluster.nodes[1].produce(b"b")
    assert refused.code == (ErrorCode.NOT_ENOUGH_REPLICAS if too_few else None)
    assert cluster.nodes[1].produce(b"c", acks=1).code == 0
    assert cluster.nodes[1].marks[0] == 0, "below min.insync.replicas the mark stands still (KIP-966)"


def test_too_few_in_sync_replicas_since_the_append_of_a_produce_in_steps() -> None:
    """It begins to wait at its last step, and waited in vain until its timeout."""
    cluster = Replicas(3, min_insync_replicas="2")
    node = cluster.nodes[1]
    node.produce(b"a")
    cluster.loop.settle()
    cluster.cut |= {(2, 1), (3, 1)}
    node.produce(b"b", timeout_ms=60_000)
    cluster.alter(isr=(1,))
    answers: list[Exception | None] = []
    for end_offset, is_repeated in ((1, False), (2, True), (2, False)):
        node.partitions.when_acknowledged(node.partition, end_offset, -1, answers.append, is_repeated)
    committed, error = answers
    assert committed is None
    assert isinstance(error, KafkaError)
    assert error.code is ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND


@pytest.mark.parametrize("of_all", [True, False])
def test_a_minimum_that_is_lowered_lets_the_mark_go_on(of_all: bool) -> None:
    cluster = Replicas(3, min_insync_replicas="2")
    cluster.flush()
    cluster.cut |= {(2, 1), (3, 1)}
    cluster.alter(isr=(1,))
    cluster.loop.run_for(60_000)  # nobody is thought to catch up any more
    assert cluster.nodes[1].produce(b"a", acks=1).code == 0
    assert cluster.nodes[1].marks[0] == 0
    (cluster.set_rates if of_all else cluster.configure)(min_insync_replicas="1")
    assert cluster.nodes[1].marks[0] == 1
    assert cluster.nodes[1].produce(b"b").code == 0


def test_a_follower_that_was_replaced_by_a_later_process_is_not_believed() -> None:
    cluster = Replicas(2)
    cluster.stop(2)
    cluster.broker_epochs[2] = 300
    cluster.elect(1, [1])
    cluster.broker_epochs[2] = 100
    cluster.start(2)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(500)
    assert not cluster.nodes[1].proposals
    cluster.broker_epochs[2] = 300
    cluster.loop.run_for(2000)
    assert cluster.agree(1).isr == [(1, 100), (2, 300)]


def test_with_flush_messages_a_follower_says_only_what_its_device_has() -> None:
    cluster = Replicas(2, log_flush_interval_messages="1")
    sent = cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    assert sent.code == 0
    for each in (1, 2):
        cluster.stop(each, power=True)
        cluster.start(each)
    assert [node.values() for node in cluster.nodes.values()] == [[b"a"], [b"a"]]


def end_syncs(cluster: Replicas) -> None:
    """The device ends the syncs that wait, and later ones at once."""
    cluster.loop.device_waits = False
    while cluster.loop.waiting:
        cluster.loop.waiting.pop(0)()


@pytest.mark.parametrize("led_before", [1, 3])
def test_what_came_before_the_leader_changed_is_told_when_the_device_has_it(led_before: int) -> None:
    cluster = Replicas(3, log_flush_interval_messages="1")
    cluster.elect(led_before, [1, 2, 3])
    cluster.loop.settle()
    cluster.loop.device_waits = True
    cluster.nodes[led_before].produce(b"a")
    cluster.loop.settle()
    assert cluster.nodes[1].log.log_end_offset == 1
    cluster.elect(2, [1, 2, 3])
    cluster.loop.run_for(600)
    followers = cluster.nodes[2].partition.in_sync.followers
    assert followers[1].log_end_offset <= 0, "node 1 would lose it with the power"
    end_syncs(cluster)
    cluster.loop.run_for(600)
    assert {node.marks for node in cluster.nodes.values()} == {(1, 1)}


def with_another_partition(cluster: Replicas) -> tuple[Partition, Callable[[], None]]:
    """Each record waits for the device from now on. A second partition of the same leader, and a produce to it."""
    cluster.configure(flush_messages="1")
    cluster.add_topic(b"M" * 16, "many", 1)
    for node in cluster.nodes.values():
        node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"M" * 16: {0}}))
    cluster.loop.run_for(100)
    (other,) = (each for each in cluster.nodes[1].partitions.hosted() if each.topic == "many")

    def produce() -> None:
        cluster.nodes[1].partitions.append(other, memoryview(encode_batch([Record(0, 0, None, b"x")])), 0, -1)
        cluster.loop.run_for(30)

    produce()  # the first record of a new log waits for the device
    return other, produce


@pytest.mark.parametrize("records_between", [1, 3])
def test_a_partition_that_waits_for_its_device_does_not_hold_up_the_others_of_its_leader(records_between: int) -> None:
    """Its follower had no fetch open meanwhile: each produce to the others, also in another directory, took a sync."""
    cluster = Replicas(2)
    other, produce_to_the_other = with_another_partition(cluster)
    for _ in range(2):
        cluster.loop.device_waits = True
        sent = cluster.nodes[1].produce(b"a")
        cluster.loop.settle()
        for _ in range(records_between):
            produce_to_the_other()
            assert other.log.high_watermark == other.log.log_end_offset
        assert sent.code is None
        end_syncs(cluster)
        cluster.loop.settle()
        assert sent.code == 0


@pytest.mark.parametrize("written_meanwhile", [0, 1, 3])
def test_the_fetches_during_a_slow_sync_wait_for_a_moment(
    monkeypatch: pytest.MonkeyPatch, written_meanwhile: int
) -> None:
    """Kafka's leader reads the request behind them when it has answered them. Each acks=all produce took 500 ms."""
    cluster = Replicas(2)
    request, waits_ms = FakeLink.request, list[int]()

    def noting(link: FakeLink, api_key: int, version: int, body: bytes, on_response: OnResponse) -> None:
        waits_ms.append(int.from_bytes(body[:4], "big"))
        request(link, api_key, version, body, on_response)

    monkeypatch.setattr(FakeLink, "request", noting)
    _, produce_to_the_other = with_another_partition(cluster)
    cluster.loop.device_waits = True
    sent = cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    waits_ms.clear()
    for _ in range(written_meanwhile):
        produce_to_the_other()
    cluster.loop.run_for(30)
    assert set(waits_ms) == {10}
    waits_ms.clear()
    end_syncs(cluster)
    cluster.loop.settle()
    assert sent.code == 0
    assert waits_ms[-1] == 500


def test_the_last_fetch_of_a_partition_that_moves_away_is_answered_at_once() -> None:
    cluster = Replicas(2)
    cluster.loop.run_for(1)
    cluster.elect(2, [1, 2])
    cluster.loop.run_for(30)
    sent = cluster.nodes[2].produce(b"a")
    cluster.loop.settle()
    assert sent.code == 0


def test_a_log_that_begins_above_the_followers_end_is_taken_over_from_there() -> None:
    cluster = Replicas(2)
    cluster.stop(2, power=True)
    cluster.elect(1, [1])
    for n in range(5):
        cluster.nodes[1].produce(b"%d" % n)
    cluster.loop.settle()
    cluster.nodes[1].log.delete_records(3)
    cluster.start(2)
    cluster.loop.run_for(600)
    assert cluster.nodes[2].log.log_start_offset == 3
    assert cluster.nodes[2].values() == [b"3", b"4"]


def cut_while_the_leaders_start_is_asked_for() -> Replicas:
    """Node 2 was away while node 1 deleted what it lacks, and has just asked it for its log start. No fetch is open."""
    cluster = Replicas(2)
    cluster.flush()
    cluster.stop(2)
    cluster.elect(1, [1])
    assert cluster.nodes[1].produce(*[b"%d" % number for number in range(5)]).code == 0
    cluster.nodes[1].log.delete_records(3)
    cluster.start(2)
    while (2, 1, LIST_OFFSETS) not in cluster.requests:
        assert cluster.loop.turn()
    cluster.cut.add((2, 1))
    cluster.loop.settle()
    return cluster


def test_a_connection_that_breaks_while_the_leaders_start_is_asked_for_is_made_anew() -> None:
    """No fetch was open that noticed the break: the follower of one partition never asked again."""
    cluster = cut_while_the_leaders_start_is_asked_for()
    assert cluster.nodes[2].log.log_end_offset == 0
    cluster.heal()
    cluster.loop.run_for(3000)
    assert (cluster.nodes[2].log.log_start_offset, cluster.nodes[2].log.log_end_offset) == (3, 5)


def test_a_leader_that_never_tells_its_logs_start_is_asked_on_another_connection() -> None:
    """The answer is lost, and the connection stays open. No fetch was open whose answer could be missed."""
    cluster = cut_while_the_leaders_start_is_asked_for()
    cluster.cut.clear()
    cluster.loop.run_for(32_000)
    assert (cluster.nodes[2].log.log_start_offset, cluster.nodes[2].log.log_end_offset) == (3, 5)


@pytest.mark.parametrize("asked_at_once", [3, 500])
def test_many_logs_that_begin_later_are_asked_for_a_few_at_a_time(
    asked_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection takes so many requests. Two for each partition were too many, and it was closed each time."""
    monkeypatch.setattr(leader_bounds, "ASKED_AT_ONCE_MAX", asked_at_once)
    cluster, count = Replicas(2), 10
    cluster.add_topic(b"M" * 16, "many", count)
    for node in cluster.nodes.values():
        node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"M" * 16: set(range(count))}))
    cluster.loop.run_for(100)
    cluster.cut.add((2, 1))
    leading, following = (
        [partition.log for partition in node.partitions.hosted() if partition.topic == "many"]
        for node in cluster.nodes.values()
    )
    for log in leading:
        for _ in range(4):
            log.append_as_leader(memoryview(encode_batch([Record(0, 0, None, b"x")])), 0, 0)
        log.set_high_watermark(4)
        log.delete_records(3)
    cluster.heal()
    most = 0
    ask = FakeLink.request

    def bounded(link: FakeLink, api_key: int, version: int, body: bytes | bytearray, on_response: OnResponse) -> None:
        nonlocal most
        most = max(most, len(link._open))
        if len(link._open) < 8:
            ask(link, api_key, version, body, on_response)
        else:
            cluster.loop.call_soon(on_response, None)

    monkeypatch.setattr(FakeLink, "request", bounded)
    cluster.loop.run_for(2000)
    assert [(log.log_start_offset, log.log_end_offset) for log in following] == [(3, 4)] * count
    assert most < 4


def begun_anew() -> Replicas:
    """Node 2 was away and begins anew at offset 4, where all is deleted: it knows no epoch. Node 3 has all records."""
    cluster = Replicas(3)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(600)
    cluster.stop(2)
    cluster.fenced |= {2, 3}
    cluster.alter(isr=(1,))
    for value in (b"b", b"c", b"d"):
        cluster.nodes[1].produce(value)
    cluster.loop.run_for(600)
    cluster.cut.add((3, 1))
    cluster.nodes[1].log.delete_records(4)
    cluster.start(2)
    cluster.loop.run_for(600)
    log = cluster.nodes[2].log
    assert (log.log_start_offset, log.log_end_offset, list(log.leader_epochs)) == (4, 4, [])
    return cluster


def test_a_log_begun_anew_joins_no_leader_of_another_history_without_its_records() -> None:
    """It fetched on at its start after an unclean election, and lacked what the leader had acknowledged below."""
    cluster = begun_anew()
    cluster.nodes[3].log.truncate_to(1)  # it was away, too
    cluster.stop(1)
    cluster.heal()
    cluster.elect(3, [3], tell=[3])
    acknowledged = [cluster.nodes[3].produce(b"%d" % n) for n in range(5)]
    cluster.loop.settle()
    assert [each.code for each in acknowledged] == [0] * 5
    cluster.tell([2])
    cluster.loop.run_for(600)
    assert cluster.nodes[2].values() == cluster.nodes[3].values() == [b"a", b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("where", ["in the ISR", "in the ELR", "leaves the ISR"])
def test_a_log_begun_anew_that_may_be_elected_stays_where_it_is_at_a_leader_that_begins_earlier(where: str) -> None:
    """It would be elected with an end below the high watermark."""
    cluster = begun_anew()
    cluster.stop(1)
    cluster.heal()
    if where == "leaves the ISR":
        cluster.cut.add((2, 3))
    cluster.placed = replace(cluster.placed, elr=(2,) if where == "in the ELR" else ())
    cluster.elect(3, [3] if where == "in the ELR" else [2, 3])
    if where == "leaves the ISR":
        cluster.nodes[3].produce(b"d", acks=1)
        cluster.loop.run_for(60_000)
        cluster.nodes[3].partition.check_isr()
        cluster.placed = replace(cluster.placed, elr=(2,))  # it stays eligible: the ISR is below the minimum now
        assert cluster.agree(3).removes == (2,)
        cluster.heal()
    cluster.loop.run_for(3000)
    assert [cluster.nodes[n].log.log_start_offset for n in (2, 3)] == [4, 0]
    cluster.nodes[3].produce(b"e")
    cluster.loop.run_for(600)
    assert cluster.nodes[2].values()[-1:] == [b"e"]


def test_a_follower_whose_records_are_all_deleted_at_the_leader_begins_inside_of_its_batch() -> None:
    """Of another history, after an unclean election. It called the batch corrupt at each fetch."""
    cluster = Replicas(2)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(600)
    cluster.cut.add((2, 1))
    cluster.fenced.add(2)
    cluster.alter(isr=(1,))
    for value in (b"x", b"y", b"z"):
        cluster.nodes[1].produce(value)
    cluster.loop.settle()
    cluster.nodes[1].checkpoint()
    cluster.stop(1)
    cluster.heal()
    cluster.elect(2, [2])
    cluster.nodes[2].produce(b"p", b"q", b"r", b"s")
    cluster.loop.settle()
    cluster.nodes[2].log.delete_records(3)
    cluster.start(1)
    cluster.loop.run_for(3000)
    assert cluster.nodes[1].log.log_start_offset == 3
    assert cluster.nodes[1].marks == (5, 5)
    assert cluster.nodes[1].log.read(3, 1000, 5).regions == cluster.nodes[2].log.read(3, 1000, 5).regions


@pytest.mark.parametrize("leaders_log", ["begins later", "ends earlier"])
def test_of_many_logs_one_is_truncated_in_a_turn_of_the_loop(leaders_log: str) -> None:
    """Each waits for the device: a follower of 300 that came back after the retention was fenced meanwhile."""
    count = 6
    cluster = Replicas(2)
    cluster.add_topic(b"M" * 16, "many", count)
    for node in cluster.nodes.values():
        node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"M" * 16: set(range(count))}))
    cluster.loop.run_for(100)
    cluster.cut.add((2, 1))
    leading, following = (
        [partition.log for partition in node.partitions.hosted() if partition.topic == "many"]
        for node in cluster.nodes.values()
    )
    for log in leading:
        for _ in range(4):
            log.append_as_leader(memoryview(encode_batch([Record(0, 0, None, b"x")])), 0, 0)
        if leaders_log == "begins later":
            log.set_high_watermark(4)
            log.delete_records(3)
    for log in following if leaders_log == "ends earlier" else ():
        log.append_as_follower(
            memoryview(encode_batch([Record(n, 0, None, b"y") for n in range(9)], leader_epoch=0)), 0
        )
    begun = [(log.log_start_offset, log.log_end_offset) for log in following]
    truncated: set[int] = set()
    in_one_turn: list[int] = []
    turn = cluster.loop.turn

    def turn_and_look() -> bool:
        is_busy = turn()
        now = {n for n, log in enumerate(following) if (log.log_start_offset, log.log_end_offset) != begun[n]}
        in_one_turn.append(len(now - truncated))
        truncated.update(now)
        return is_busy

    cluster.loop.turn = turn_and_look  # type: ignore[method-assign]
    cluster.cut.clear()
    for link in cluster.links:
        link._break()
    cluster.loop.run_for(2_000)
    assert [log.log_end_offset for log in following] == [4] * count
    assert sum(in_one_turn) == count
    assert max(in_one_turn) == 1


def test_who_asks_a_follower_to_write_is_told_the_leader() -> None:
    """KIP-951, also for what was waiting when the leader was deposed."""
    cluster = Replicas(3)
    answer = cluster.nodes[2].produce(b"a").response
    cluster.cut |= {(2, 1), (3, 1)}
    waiting = cluster.nodes[1].produce(b"b")
    cluster.elect(3, [2, 3])
    for response, leader, epoch in ((answer, 1, 0), (waiting.response, 3, 1)):
        told = response.responses[0].partition_responses[0]
        assert told.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert (told.current_leader.leader_id, told.current_leader.leader_epoch) == (leader, epoch)
        assert [(node.node_id, node.host, node.port) for node in response.node_endpoints] == [(leader, "node", leader)]


def test_consumers_may_read_from_followers_up_to_what_those_know_to_be_committed() -> None:
    cluster = Replicas(2)
    cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    assert not cluster.nodes[2].fetch(0).records, "it does not know yet that it is committed"
    cluster.loop.run_for(600)
    assert cluster.nodes[2].fetch(0).records
    refused = cluster.nodes[2].fetch(0, version=10)
    assert refused.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER, "too old to know of it"


def test_a_consumer_is_sent_to_the_replica_in_its_rack() -> None:
    """KIP-392. There the mark moves at once, not with the next records."""
    selector = "org.apache.kafka.common.replica.RackAwareReplicaSelector"
    cluster = Replicas(3, replica_selector_class=selector)
    cluster.racks.update({1: "a", 2: "b", 3: "c"})
    cluster.alter()
    cluster.nodes[1].produce(b"x")
    cluster.loop.settle()
    assert cluster.marks() == dict.fromkeys((1, 2, 3), (1, 1))
    leader = cluster.nodes[1]
    assert leader.fetch(0, rack="b").preferred_read_replica == 2
    for rack in ("", "a", "d"):
        told = leader.fetch(0, rack=rack)
        assert (told.preferred_read_replica, bool(told.records)) == (-1, True)
    cluster.alter(isr=(1, 3))
    assert leader.fetch(0, rack="b").preferred_read_replica == -1


def test_a_consumer_stays_at_the_leader_with_kafkas_other_selector() -> None:
    cluster = Replicas(2, replica_selector_class="org.apache.kafka.common.replica.LeaderSelector")
    cluster.racks.update({1: "a", 2: "b"})
    cluster.alter()
    cluster.nodes[1].produce(b"x")
    cluster.loop.settle()
    answer = cluster.nodes[1].fetch(0, rack="b")
    assert (answer.preferred_read_replica, bool(answer.records)) == (-1, True)


@pytest.mark.parametrize("count", [1, 2, 6])
def test_followers_of_which_consumers_read_learn_of_several_high_watermarks_at_once(count: int) -> None:
    """Only one was told at once. Where two partitions were written together, the fetch waited for its end."""
    cluster = Replicas(2, replica_selector_class="org.apache.kafka.common.replica.RackAwareReplicaSelector")
    cluster.add_topic(b"M" * 16, "many", count)
    for node in cluster.nodes.values():
        node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"M" * 16: set(range(count))}))
    cluster.loop.run_for(1000)
    leader, follower = (node.partitions for node in cluster.nodes.values())
    for partition in leader.hosted():
        if partition.topic == "many":
            leader.append(partition, memoryview(encode_batch([Record(0, 0, None, b"x")])), 0, -1)
    cluster.loop.settle()
    marks = [partition.log.high_watermark for partition in follower.hosted() if partition.topic == "many"]
    assert marks == [1] * count
    sent = len(cluster.requests)
    cluster.loop.run_for(2000)
    assert len(cluster.requests) - sent <= 5, "then it waits again"


def test_a_follower_is_sent_as_much_as_a_response_may_carry_and_comes_back_for_the_rest() -> None:
    cluster = Replicas(2, log_segment_bytes="1048576")
    cluster.stop(2, power=True)
    cluster.elect(1, [1])
    for _ in range(20):
        cluster.nodes[1].produce(b"x" * 200_000)
    cluster.start(2)
    cluster.loop.run_for(600)
    assert cluster.nodes[2].marks == (20, 20)
    assert cluster.nodes[2].values() == cluster.nodes[1].values()


def throttled(side: str, bytes_per_s: int) -> Replicas:
    """Node 2 lacks twenty records of half a megabyte, and has copied for five seconds at this rate."""
    cluster = Replicas(2)
    cluster.stop(2, power=True)
    cluster.elect(1, [1])
    cluster.configure(**{f"{side}_replication_throttled_replicas": "0:1,0:2"})
    for _ in range(20):
        cluster.nodes[1].produce(b"x" * 500_000)
    cluster.start(2)
    cluster.set_rates(**{f"{side}_replication_throttled_rate": str(bytes_per_s)})
    cluster.loop.run_for(5000)
    return cluster


@pytest.mark.parametrize("side", ["leader", "follower"])
def test_a_throttled_replica_is_copied_at_the_rate_and_not_held_back_once_in_sync(side: str) -> None:
    cluster = throttled(side, 1_000_000)
    node = cluster.nodes[2]
    assert 8 <= node.log.log_end_offset <= 14, "5 s at 1 MB/s, and the answer that went over it"
    cluster.loop.run_for(10_000)
    assert node.log.log_end_offset == 20
    cluster.agree(1)
    for n in range(10):
        sent = cluster.nodes[1].produce(b"x" * 500_000)
        cluster.loop.run_for(1)
        assert sent.code == 0, n


@pytest.mark.parametrize("change", ["no rate", "higher rate", "no throttled replicas"])
@pytest.mark.parametrize("side", ["leader", "follower"])
def test_a_replica_that_waits_for_a_tiny_rate_goes_on_when_the_throttle_goes(side: str, change: str) -> None:
    """Half a megabyte at ten bytes a second would be half a day."""
    cluster = throttled(side, 10)
    node = cluster.nodes[2]
    assert 0 < node.log.log_end_offset < 10
    if change == "no rate":
        cluster.set_rates()
    elif change == "higher rate":
        cluster.set_rates(**{f"{side}_replication_throttled_rate": "1000000000"})
    else:
        cluster.configure()
    cluster.loop.run_for(2000)
    assert node.log.log_end_offset == 20


@pytest.mark.parametrize("side", ["leader", "follower"])
def test_records_of_a_replica_in_sync_do_not_use_up_the_rate_of_those_that_lag(side: str) -> None:
    """Six megabytes in sync at a tenth of one a second would hold a replica that falls behind up for a minute."""
    cluster = Replicas(2)
    cluster.configure(**{f"{side}_replication_throttled_replicas": "*"})
    cluster.set_rates(**{f"{side}_replication_throttled_rate": "100000"})
    for _ in range(60):
        cluster.nodes[1].produce(b"x" * 100_000)
        cluster.loop.run_for(100)
    cluster.cut = {(2, 1)}
    cluster.loop.run_for(1000)
    cluster.elect(1, [1])
    for _ in range(15):
        cluster.nodes[1].produce(b"x" * 100_000)
    cluster.heal()
    cluster.loop.run_for(20_000)
    assert cluster.nodes[2].log.log_end_offset == 75


@pytest.mark.parametrize("begins", ["as one", "while the rate is used up"])
def test_the_rate_is_one_for_all_partitions_that_lag(begins: str) -> None:
    """Each of thirty brought a megabyte before it waited: thirty seconds of the rate at once."""
    count, topic_id = 30, b"M" * 16
    cluster = Replicas(2)
    cluster.configure(follower_replication_throttled_replicas="*")
    cluster.set_rates(follower_replication_throttled_rate="1000000")
    cluster.elect(1, [1])
    cluster.add_topic(topic_id, "many", count)
    cluster.image = replace(
        cluster.image, configs={**cluster.image.configs, (2, "many"): {"follower.replication.throttled.replicas": "*"}}
    )
    leader, follower = cluster.nodes[1].hosting, cluster.nodes[2].hosting
    everything = MetadataDelta(changed_partitions={topic_id: set(range(count))})
    leader.apply(cluster.image, everything)
    for partition in cluster.nodes[1].partitions.hosted():
        if partition.topic == "many":
            for _ in range(4):
                record = encode_batch([Record(0, 0, None, b"x" * 500_000)])
                cluster.nodes[1].partitions.append(partition, memoryview(record), 0, -1)
    if begins == "as one":
        follower.apply(cluster.image, everything)
    else:
        for index in range(count):
            follower.apply(cluster.image, MetadataDelta(changed_partitions={topic_id: {index}}))
            cluster.loop.run_for(5)
    copied = [each.log for each in cluster.nodes[2].partitions.hosted() if each.topic == "many"]
    assert len(copied) == count
    for second in range(2, 80, 2):
        cluster.loop.run_for(2000)
        records = sum(log.log_end_offset for log in copied)
        assert min(count * 4, 2 * second - 4) <= records <= 2 * second + 12, second
    assert {log.log_end_offset for log in copied} == {4}
    assert {log.high_watermark for log in copied} == {4}


def test_many_partitions_with_few_records_use_the_whole_rate() -> None:
    """Each answer used the rate up for a millisecond, and two partitions went on every ten: a quarter of the rate."""
    count, topic_id = 600, b"M" * 16
    cluster = Replicas(2)
    cluster.set_rates(follower_replication_throttled_rate="1000000")
    cluster.elect(1, [1])
    cluster.add_topic(topic_id, "many", count)
    cluster.image = replace(
        cluster.image, configs={**cluster.image.configs, (2, "many"): {"follower.replication.throttled.replicas": "*"}}
    )
    everything = MetadataDelta(changed_partitions={topic_id: set(range(count))})
    cluster.nodes[1].hosting.apply(cluster.image, everything)
    cluster.loop.settle()
    for partition in cluster.nodes[1].partitions.hosted():
        if partition.topic == "many":
            record = encode_batch([Record(0, 0, None, b"x" * 1000)])
            cluster.nodes[1].partitions.append(partition, memoryview(record), 0, -1)
    cluster.nodes[2].hosting.apply(cluster.image, everything)
    cluster.loop.run_for(400)
    copied = [each.log for each in cluster.nodes[2].partitions.hosted() if each.topic == "many"]
    assert len(copied) == count
    assert 350 <= sum(log.log_end_offset for log in copied) <= 420
    cluster.loop.run_for(400)
    assert {log.log_end_offset for log in copied} == {1}


def test_a_replica_in_the_isr_is_fetched_at_once_while_others_use_the_rate_up() -> None:
    """It does not know its leader's high watermark yet. If it waited, it would leave the ISR."""
    cluster = throttled("follower", 10)
    node = cluster.nodes[2]
    assert 0 < node.log.log_end_offset < 10
    cluster.placed = replace(cluster.placed, isr=(1, 2))
    cluster.add_topic(b"M" * 16, "many", 3)
    cluster.image = replace(
        cluster.image, configs={**cluster.image.configs, (2, "many"): {"follower.replication.throttled.replicas": "*"}}
    )
    for each in cluster.nodes.values():
        each.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"M" * 16: {0, 1, 2}}))
    leading = [each for each in cluster.nodes[1].partitions.hosted() if each.topic == "many"]
    for _ in range(3):
        for partition in leading:
            records = encode_batch([Record(0, 0, None, b"x" * 1000)])
            cluster.nodes[1].partitions.append(partition, memoryview(records), 0, -1)
        cluster.loop.run_for(100)
    assert [each.log.high_watermark for each in leading] == [3, 3, 3]
    assert node.log.log_end_offset < 10


def test_a_throttled_replica_that_waits_for_its_device_keeps_to_the_rate() -> None:
    cluster = Replicas(2, log_flush_interval_messages="1")
    cluster.stop(2, power=True)
    cluster.elect(1, [1])
    cluster.configure(follower_replication_throttled_replicas="0:2")
    for _ in range(20):
        cluster.nodes[1].produce(b"x" * 500_000)
        cluster.loop.settle()
    cluster.start(2)
    cluster.set_rates(follower_replication_throttled_rate="1000000")
    cluster.loop.run_for(5000)
    node = cluster.nodes[2]
    assert 8 <= node.log.log_end_offset <= 14, "5 s at 1 MB/s, and the answer that went over it"
    cluster.loop.run_for(10_000)
    assert node.log.log_end_offset == 20


def test_a_full_fetch_of_a_throttled_replica_waits_for_the_rate_as_well() -> None:
    """Each session of a follower begins with one, and without a session every fetch is."""
    cluster = throttled("leader", 10)
    node, leader = cluster.nodes[2], cluster.nodes[1]
    copied = node.log.log_end_offset
    assert 0 < copied < 10
    for _ in range(10):
        leader.partitions.follower_fetches.close()
        cluster.loop.run_for(2000)
    assert node.log.log_end_offset == copied
    cluster.set_rates()
    cluster.loop.run_for(2000)
    assert node.log.log_end_offset == 20
    cluster.agree(1)


def test_a_follower_tells_its_own_end_to_a_reader_that_compares_replicas() -> None:
    cluster = Replicas(3)
    cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    follower = cluster.nodes[2]
    assert follower.latest(replica_id=-2) == (0, 1)
    refused = (ErrorCode.NOT_LEADER_OR_FOLLOWER, -1)
    assert [follower.latest(replica_id=replica_id) for replica_id in (-1, 3)] == [refused, refused]


def test_the_end_is_not_told_while_it_may_lie_behind_what_was_shown_before() -> None:
    """KIP-207: the new leader does not know yet how much of its log is committed."""
    cluster = Replicas(3)
    cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    cluster.cut |= {(1, 2), (3, 2)}
    cluster.elect(2, [1, 2, 3])
    assert cluster.nodes[2].marks == (0, 1)
    assert cluster.nodes[2].latest() == (ErrorCode.OFFSET_NOT_AVAILABLE, -1)
    assert cluster.nodes[2].latest(replica_id=3) == (0, 1)
    cluster.heal()
    cluster.loop.run_for(1000)
    assert cluster.nodes[2].latest() == (0, 1)


def test_a_follower_whose_segments_are_smaller_than_an_answer_takes_it_in_pieces() -> None:
    cluster = Replicas(2)
    cluster.stop(2, power=True)
    cluster.elect(1, [1])
    for _ in range(10):
        cluster.nodes[1].produce(b"x" * 30_000)
    cluster.start(2).log.segment_bytes = 40_000
    cluster.loop.run_for(600)
    assert cluster.nodes[2].marks == (10, 10)
    assert cluster.nodes[2].log.segment_count == 10


def test_sessions_of_followers_that_came_back_another_way_do_not_pile_up() -> None:
    cluster = Replicas(2)
    for _ in range(30):
        for link in cluster.links:
            if not link.closed:
                link.served.clear()  # broken without the leader noticing
                link._break()
        cluster.loop.run_for(2000)
    assert len(cluster.nodes[1].partitions.follower_fetches) < 8


def test_a_new_isr_comes_with_the_metadata_alone() -> None:
    """Their min.insync.replicas is the one by which the controller has decided."""
    cluster = Replicas(3)
    cluster.elect(1, [1])
    cluster.loop.run_for(1)
    partition = cluster.nodes[1].partition
    first = cluster.nodes[1].proposals.pop()[1]
    partition.on_proposal_agreed(first, 2)
    cluster.loop.run_for(600)
    assert (partition.in_sync.isr, partition.in_sync.pending) == ((1,), first)
    cluster.tell([1])  # metadata that it has
    assert partition.in_sync.pending is first
    assert partition.in_sync.followers[2].in_maximal_isr
    cluster.place(isr=(1, 2))
    cluster.tell([1])
    assert partition.in_sync.isr == (1, 2)
    cluster.loop.run_for(600)
    assert partition.in_sync.pending not in (first, None), "the next one may join"


def test_a_proposal_that_changes_nothing_ends_with_the_answer() -> None:
    cluster = Replicas(2)
    partition = cluster.nodes[1].partition
    partition.confirm_reading()
    proposal = cluster.nodes[1].proposals.pop()[1]
    assert partition.in_sync.pending is proposal
    partition.on_proposal_agreed(proposal, partition.partition_epoch)
    assert partition.in_sync.pending is None


def test_a_flush_that_began_before_the_records_came_does_not_let_them_be_told() -> None:
    cluster = Replicas(2, log_flush_interval_messages="1")
    follower, booked = cluster.nodes[2], cluster.nodes[1].partition.in_sync.followers[2]
    cluster.loop.device_waits = True
    follower.partitions.flushes.flush(follower.partition)
    cluster.nodes[1].produce(b"a", acks=1)
    cluster.loop.settle()
    assert follower.log.log_end_offset == 1
    cluster.loop.waiting.pop(0)()  # the flush that began before
    cluster.loop.settle()
    assert booked.log_end_offset == 0
    cluster.loop.device_waits = False
    while cluster.loop.waiting:
        cluster.loop.waiting.pop()()
    cluster.loop.settle()
    assert booked.log_end_offset == 1


def test_with_flush_messages_acks_1_waits_for_the_leaders_device_alone() -> None:
    cluster = Replicas(2, log_flush_interval_messages="1")
    cluster.loop.run_for(1)
    cluster.cut.add((2, 1))
    cluster.loop.device_waits = True
    one, every = cluster.nodes[1].produce(b"a", acks=1), cluster.nodes[1].produce(b"b")
    cluster.loop.settle()
    assert (one.code, every.code) == (None, None)
    end_syncs(cluster)
    cluster.loop.settle()
    assert (one.code, every.code) == (0, None)


def test_with_flush_messages_the_mark_waits_for_the_leaders_device_also_where_a_follower_is_faster() -> None:
    cluster = Replicas(2, log_flush_interval_messages="1")
    cluster.loop.run_for(1)
    cluster.cut.add((2, 1))
    cluster.loop.device_waits = True
    partition = cluster.nodes[1].partition
    cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    partition.follower_fetched(partition.in_sync.followers[2], 1, cluster.loop.now_s * 1000)
    assert partition.high_watermark == 0
    end_syncs(cluster)
    cluster.loop.settle()
    assert partition.high_watermark == 1


def test_a_follower_at_damage_that_the_leader_cannot_send_stays_in_the_isr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the leader would commit alone what it cannot read."""
    cluster = Replicas(2, replica_lag_time_max_ms="2000")
    leader = cluster.nodes[1]
    leader.produce(b"a")
    cluster.loop.run_for(1000)
    cluster.cut.add((2, 1))
    leader.produce(b"b")
    leader.produce(b"c")
    assert (leader.log.high_watermark, leader.log.log_end_offset) == (1, 3)
    damaged = [(None, SimpleNamespace(first_offset=offset)) for offset in (0, 1, 2)]
    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "damaged_ranges", lambda log: damaged)
        cluster.loop.run_for(9000)
        assert not leader.proposals
    cluster.loop.run_for(9000)
    assert [proposal.removes for _, proposal in leader.proposals] == [(2,)]


def test_a_follower_learns_of_its_place_in_the_isr_in_the_same_leader_epoch() -> None:
    cluster = Replicas(3)
    follower = cluster.nodes[2].partition
    for isr in ((1, 3), (1, 2, 3)):
        cluster.alter(isr=isr)
        assert follower.is_in_isr == (2 in isr)
        assert follower.partition_epoch == cluster.placed.partition_epoch


@pytest.mark.slow
def test_thousands_of_new_partitions_do_not_keep_a_node_from_anything_else() -> None:
    cluster = Replicas(2)
    turns: list[int] = []
    cluster.add_topic(b"M" * 16, "many", 450)
    for node in cluster.nodes.values():
        node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"M" * 16: set(range(450))}))
    is_busy = True
    while is_busy:
        turns.append(sum(1 for each in cluster.nodes[1].partitions.hosted() if each.topic == "many"))
        is_busy = cluster.loop.turn()
    assert list(dict.fromkeys(turns)) == [100, 200, 300, 400, 450]
    cluster.loop.run_for(100)
    partitions = [cluster.nodes[1].partitions.find("many", index) for index in range(450)]
    assert all(partition is not None and partition.leads for partition in partitions)
    assert all(
        follower.log_end_offset == 0
        for partition in partitions
        if partition is not None
        for follower in partition.in_sync.followers.values()
    ), "they are followed"


def test_what_was_put_off_and_is_deleted_meanwhile_is_not_made() -> None:
    cluster = Replicas(1)
    topic = cluster.add_topic(b"M" * 16, "many", 150)
    hosting = cluster.nodes[1].hosting
    hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"M" * 16: set(range(150))}))
    cluster._publish()  # without it
    hosting.apply(cluster.image, MetadataDelta(deleted_topics={b"M" * 16: topic}))
    cluster.loop.settle()
    assert [each.topic for each in cluster.nodes[1].partitions.hosted()] == ["t"]


def test_an_error_of_a_later_version_holds_up_no_other_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Kafka it is an unknown error of the server. It ended the connection, and the link stood still for good."""
    cluster = Replicas(2)
    cluster.add_topic(b"M" * 16, "many", 3)
    for node in cluster.nodes.values():
        node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"M" * 16: set(range(3))}))
    cluster.loop.run_for(100)
    examine = FollowerFetches._examine

    def refuse(self: FollowerFetches, entry: FollowerEntry, now_ms: float) -> None:
        examine(self, entry, now_ms)
        if entry.key == (b"M" * 16, 1):
            entry.session.dirty[entry] = None
            entry.problem = 30_000

    monkeypatch.setattr(FollowerFetches, "_examine", refuse)
    for link in cluster.links:
        link._break()
    leader, follower = cluster.nodes[1], cluster.nodes[2]
    for index in range(3):
        batch = encode_batch([Record(0, leader.clock_ms(), None, b"x")])
        leader.partitions.append(leader.partitions.leader("many", index), memoryview(batch), leader.clock_ms(), 1)
    cluster.loop.run_for(5000)
    found = [follower.partitions.find("many", index) for index in range(3)]
    assert [each.log.log_end_offset for each in found if each is not None] == [1, 0, 1]


@pytest.mark.parametrize("size", [50_000, 300_000, 700_000, 1_500_000])
def test_partitions_that_an_answer_has_no_room_for_are_answered_next(size: int) -> None:
    cluster = Replicas(2)
    cluster.add_topic(b"M" * 16, "many", 6)
    for node in cluster.nodes.values():
        node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"M" * 16: set(range(6))}))
    cluster.loop.run_for(100)
    leader, follower = cluster.nodes[1], cluster.nodes[2]
    for link in cluster.links:
        link._break()
    for index in range(6):
        for _ in range(3):
            batch = encode_batch([Record(0, leader.clock_ms(), None, b"x" * size)])
            partition = leader.partitions.leader("many", index)
            partition.log.set_config(replace(partition.log.config, max_message_bytes=1 << 30))
            leader.partitions.append(partition, memoryview(batch), leader.clock_ms(), 1)
    cluster.loop.run_for(300)
    ends = [follower.partitions.find("many", index) for index in range(6)]
    assert [each.log.log_end_offset for each in ends if each is not None] == [3] * 6


@pytest.mark.parametrize(
    ("log_ms", "at_once"), [(50, hosting.FEW_NEW_LOGS), (1, 21), (0, hosting.NEW_LOGS_PER_TURN_MAX)]
)
def test_new_logs_take_a_small_part_of_each_turn_however_long_one_takes(log_ms: int, at_once: int) -> None:
    """A hundred took seconds on busy processors: the voters were silent, and the lead of the quorum moved."""
    cluster = Replicas(1)
    node = cluster.nodes[1]
    node.hosting._stopwatch = lambda: len(node.directory.logs) * log_ms / 1000
    cluster.add_topic(b"m" * 16, "many", 250)
    node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"m" * 16: set(range(250))}))
    counts = [len(node.directory.logs) - 1]
    while counts[-1] < 250:
        before = len(node.directory.logs)
        cluster.loop.turn()
        counts.append(len(node.directory.logs) - 1)
        assert counts[-1] - before + 1 > 0
    assert max(later - earlier for earlier, later in zip([0, *counts], counts)) == at_once
    assert all(node.partitions.find(b"m" * 16, index) is not None for index in range(250))


def test_new_logs_leave_as_much_time_as_they_take_to_those_that_waited() -> None:
    """A Metadata request for ten thousand partitions has dozens of pieces, and each came after a turn of new logs."""
    cluster = Replicas(1)
    node, loop = cluster.nodes[1], cluster.loop
    node.hosting._stopwatch = lambda: len(node.directory.logs) / 1024
    pauses = [0]
    node.hosting.pauses = lambda: pauses[0]
    cluster.add_topic(b"m" * 16, "many", 90)
    node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"m" * 16: set(range(90))}))
    assert len(node.directory.logs) == 22
    pauses[0] += 1
    loop.turn()
    assert len(node.directory.logs) == 43
    loop.run_for(19)
    assert len(node.directory.logs) == 43
    loop.run_for(4)  # nobody has waited meanwhile
    assert len(node.directory.logs) == 91


@pytest.mark.parametrize("has_started", [False, True])
def test_an_upgrade_reports_the_directories_also_of_replicas_that_a_start_in_turns_has_hosted(
    has_started: bool,
) -> None:
    cluster = Replicas(1, log_dirs="/data,/more")
    node = cluster.nodes[1]
    assert node.assignments is not None
    node.hosting._has_started = has_started
    for level in (DIRECTORIES_VERSION - 1, DIRECTORIES_VERSION):
        cluster.image = replace(cluster.image, features={METADATA_VERSION: level})
        node.assignments.reported.clear()
        node.hosting.apply(cluster.image, MetadataDelta(changed_features=True))
        assert list(node.assignments.reported) == [(TOPIC_ID, 0)] * (level == DIRECTORIES_VERSION)


def deletions_of(cluster: Replicas, node: ReplicaNode) -> None:
    """A hundred logs that take a millisecond each to delete."""
    topic = cluster.add_topic(b"m" * 16, "many", 100)
    node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"m" * 16: set(range(100))}))
    cluster.loop.run_for(1000)
    assert len(node.directory.logs) == 101
    node.hosting._deletions._stopwatch = lambda: -len(node.directory.logs) / 1024
    del cluster.image.topics_by_name["many"], cluster.image.topics_by_id[b"m" * 16]
    node.hosting.apply(cluster.image, MetadataDelta(deleted_topics={b"m" * 16: topic}))
    assert all(node.partitions.find(b"m" * 16, index) is None for index in range(100))
    assert len(node.directory.logs) == 90


def test_the_logs_of_a_deleted_topic_go_in_turns() -> None:
    """Ten thousand of them held the loop up for a third of a second, and for seconds on a busy machine."""
    cluster = Replicas(1)
    node = cluster.nodes[1]
    deletions_of(cluster, node)
    for left in (79, 68, 57, 46, 35, 24, 13, 2, 1, 1):
        cluster.loop.turn()
        assert len(node.directory.logs) == left


def test_a_topic_that_is_created_again_meanwhile_has_logs_of_its_own() -> None:
    cluster = Replicas(1)
    node = cluster.nodes[1]
    deletions_of(cluster, node)
    cluster.add_topic(b"n" * 16, "many", 100)
    node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"n" * 16: set(range(100))}))
    cluster.loop.run_for(1000)
    assert len(node.directory.logs) == 101
    assert {log.topic_id for key, log in node.directory.logs.items() if key[0] == "many"} == {b"n" * 16}


def test_a_node_that_stops_meanwhile_leaves_no_log_of_a_deleted_topic() -> None:
    """The next start would keep it, as one that the metadata does not know."""
    cluster = Replicas(1)
    node = cluster.nodes[1]
    deletions_of(cluster, node)
    cluster.stop(1, closed=True)
    assert [key for key in node.directory.logs if key[0] == "many"] == []


def test_a_node_that_stops_deletes_at_once_what_the_metadata_deletes_meanwhile() -> None:
    cluster = Replicas(1)
    node = cluster.nodes[1]
    topic = cluster.add_topic(b"m" * 16, "many", 30)
    node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"m" * 16: set(range(30))}))
    cluster.loop.run_for(1000)
    assert len(node.directory.logs) == 31
    node.hosting.close()
    node.hosting._deletions._stopwatch = lambda: -len(node.directory.logs) / 1024
    del cluster.image.topics_by_name["many"], cluster.image.topics_by_id[b"m" * 16]
    node.hosting.apply(cluster.image, MetadataDelta(deleted_topics={b"m" * 16: topic}))
    assert [key for key in node.directory.logs if key[0] == "many"] == []


def test_a_directory_that_fails_meanwhile_ends_its_deletions() -> None:
    cluster = Replicas(1)
    node = cluster.nodes[1]
    deletions_of(cluster, node)
    node.directories.failed(node.directory, OSError(errno.EIO, "broken"))
    cluster.loop.run_for(1000)
    assert (node.directory.logs, node.hosting._deletions._waiting) == ({}, {})


def test_new_logs_that_meet_a_shortage_wait_and_hold_up_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Replicas(1)
    node = cluster.nodes[1]
    node.hosting._stopwatch = lambda: len(node.directory.logs) / 100
    cluster.add_topic(b"m" * 16, "many", 30)
    create, tries = node.directory.create_log, []

    def create_but_seldom(*arguments: Any) -> Any:
        tries.append(arguments[1])
        if len(tries) < 40 and arguments[1] % 2:
            raise OSError(errno.EMFILE, "too many open files")
        return create(*arguments)

    monkeypatch.setattr(node.directory, "create_log", create_but_seldom)
    node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"m" * 16: set(range(30))}))
    cluster.loop.run_for(1500)
    assert len(tries) < 20, "there is a pause after a shortage"
    cluster.loop.run_for(20_000)
    assert len(node.directory.logs) == 31


@pytest.mark.parametrize("why", ["a shortage", "slow disks"])
def test_roles_do_not_wait_for_new_logs(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the death of a broker, 100 replicas a second took their roles while there were too few descriptors."""
    cluster = Replicas(1)
    node = cluster.nodes[1]
    old = cluster.add_topic(b"o" * 16, "old", 400)
    node.hosting.apply(cluster.image, MetadataDelta(changed_partitions={b"o" * 16: set(range(400))}))
    cluster.loop.run_for(1000)
    assert sum(1 for _ in node.partitions.hosted()) == 401
    create = node.directory.create_log

    def create_badly(*arguments: Any) -> Any:
        if why == "a shortage":
            raise OSError(errno.EMFILE, "too many open files")
        return create(*arguments)

    monkeypatch.setattr(node.directory, "create_log", create_badly)
    node.hosting._stopwatch = lambda: len(node.directory.logs) / 50
    cluster.add_topic(b"m" * 16, "many", 300)
    elected = {index: replace(each, leader_epoch=1, partition_epoch=1) for index, each in old.partitions.items()}
    newer = replace(old, partitions=elected)
    image = cluster.image
    cluster.image = replace(
        image,
        topics_by_name={**image.topics_by_name, "old": newer},
        topics_by_id={**image.topics_by_id, b"o" * 16: newer},
    )
    changed = {b"m" * 16: set(range(300)), b"o" * 16: set(range(400))}
    node.hosting.apply(cluster.image, MetadataDelta(changed_partitions=changed))
    for _ in range(5):
        cluster.loop.turn()
    assert {each.leader_epoch for each in node.partitions.hosted() if each.topic == "old"} == {1}
    assert len(node.directory.logs) < 450
