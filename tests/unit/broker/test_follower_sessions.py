"""Fetch sessions of those who say that they are brokers: who gets one, what it may hold, and who makes place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from tests.unit.replication.replicas import TOPIC_ID, Replicas
from tidelog.broker.network.request import Deferred
from tidelog.broker.replicas.fetching import follower_fetches, follower_sessions
from tidelog.broker.replicas.fetching.follower_sessions import (
    EPOCH_FINAL,
    SESSIONS_OF_BROKER_MAX,
    SILENT_MS_MAX,
    WAIT_MS_MAX,
    Key,
)
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, ReplicaState
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.reader import ColdRead

VERSION = 18
REAL = 2
STRANGER = 77
WAIT_OF_A_FOLLOWER_MS = 1000


def ask(
    cluster: Replicas,
    replica_id: int,
    *,
    topic_id: bytes = TOPIC_ID,
    count: int = 1,
    epoch: int = -1,
    session: tuple[int, int] = (0, 0),
    wait_ms: int = 0,
    offset: int = 0,
    times: int = 1,
    at_once: bool = True,
) -> FetchResponse:
    """A fetch of `count` partitions of one topic from node 1, which must answer at once, or soon."""
    partitions = [
        FetchPartition(
            partition=index, current_leader_epoch=0, fetch_offset=offset, last_fetched_epoch=-1, log_start_offset=0,
            partition_max_bytes=1000,
        )
        for index in range(count)
    ]  # fmt: skip
    request = FetchRequest(
        replica_state=ReplicaState(replica_id=replica_id, replica_epoch=epoch),
        max_wait_ms=wait_ms,
        min_bytes=1,
        max_bytes=1 << 20,
        session_id=session[0],
        session_epoch=session[1],
        topics=[FetchTopic(topic_id=topic_id, partitions=partitions * times)] if count else [],
    )
    frames = cluster.nodes[1].serve(1, VERSION, memoryview(bytearray(request.encode(VERSION))))
    if isinstance(frames, Deferred) and not at_once:
        cluster.loop.settle()
        frames = frames.response
    if isinstance(frames, list):
        frames = b"".join(frames)
    assert isinstance(frames, bytes | bytearray), "it waits"
    return FetchResponse.decode(bytes(frames[9:]), VERSION)


def errors(answer: FetchResponse) -> set[int]:
    return {each.error_code for topic in answer.responses for each in topic.partitions}


def followers(cluster: Replicas) -> follower_fetches.FollowerFetches:
    return cluster.nodes[1].partitions.follower_fetches


@pytest.fixture
def cluster() -> Replicas:
    return Replicas(2)


def test_who_is_no_broker_of_the_cluster_gets_no_session_and_leaves_nothing_behind(cluster: Replicas) -> None:
    before = followers(cluster).entry_count
    sessions = dict(followers(cluster).sessions)
    for number in range(1100):
        answer = ask(cluster, STRANGER + number)
        assert (answer.error_code, answer.session_id) == (0, 0)
        assert errors(answer) == {ErrorCode.UNKNOWN_LEADER_EPOCH}
    assert ask(cluster, STRANGER, topic_id=b"?" * 16, count=5000, wait_ms=10_000).session_id == 0
    assert ask(cluster, STRANGER, count=0, wait_ms=10_000).session_id == 0
    assert followers(cluster).sessions == sessions, "the real follower keeps its own"
    assert followers(cluster).entry_count == before
    assert len(cluster.nodes[1].partition.watch.followers) == 1


def test_who_claims_to_be_a_broker_gets_so_many_sessions_and_the_real_one_keeps_its_own(cluster: Replicas) -> None:
    (real,) = followers(cluster).sessions
    given = [ask(cluster, REAL).session_id for _ in range(SESSIONS_OF_BROKER_MAX + 20)]
    assert sum(bool(each) for each in given) == SESSIONS_OF_BROKER_MAX - 1
    assert len(followers(cluster).sessions) == SESSIONS_OF_BROKER_MAX
    assert real in followers(cluster).sessions
    cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    assert real in followers(cluster).sessions
    assert cluster.nodes[2].values() == [b"a"]


def test_a_claimed_epoch_does_not_end_the_sessions_of_the_real_broker(cluster: Replicas) -> None:
    (real,) = followers(cluster).sessions
    assert ask(cluster, REAL, epoch=cluster.broker_epochs[REAL] - 1).session_id == 0
    assert ask(cluster, REAL, epoch=cluster.broker_epochs[REAL] + 1000).session_id
    assert ask(cluster, STRANGER, epoch=0, session=(real, 0)).session_id == 0
    assert real in followers(cluster).sessions


def test_sessions_of_a_process_before_the_present_one_make_place(cluster: Replicas) -> None:
    old = ask(cluster, REAL, epoch=100).session_id
    cluster.broker_epochs[REAL] = 101
    cluster._publish()
    assert ask(cluster, REAL, epoch=101).session_id
    assert old not in followers(cluster).sessions


def test_silence_is_judged_by_our_own_time_whatever_wait_is_claimed(cluster: Replicas) -> None:
    asked = ask(cluster, REAL, wait_ms=2**31 - 1)
    cluster.loop.run_for(SILENT_MS_MAX)
    ask(cluster, REAL)
    assert asked.session_id in followers(cluster).sessions
    cluster.loop.run_for(WAIT_MS_MAX + 1)
    ask(cluster, REAL)
    assert asked.session_id not in followers(cluster).sessions


def test_a_session_holds_few_partitions_that_are_not_hosted(cluster: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower may hear of a topic first; more than a few of those it is to ask for anew."""
    before = followers(cluster).entry_count
    monkeypatch.setattr(follower_sessions, "NOT_HOSTED_MAX", 10)
    few = ask(cluster, REAL, topic_id=b"?" * 16, count=10)
    assert few.session_id
    assert errors(few) == {ErrorCode.UNKNOWN_TOPIC_ID}
    grown = ask(cluster, REAL, topic_id=b"!" * 16, count=1, session=(few.session_id, 1))
    assert (grown.error_code, grown.session_id, errors(grown)) == (0, 0, {ErrorCode.UNKNOWN_TOPIC_ID})
    assert ask(cluster, REAL, topic_id=b"?" * 16, count=11).session_id == 0
    assert followers(cluster).entry_count == before


@pytest.mark.parametrize(("count", "times"), [(55, 1), (1, 55), (12, 5)])
@pytest.mark.parametrize("replica", [REAL, STRANGER])
def test_a_request_for_many_partitions_that_are_not_hosted_is_answered_in_several_turns(
    cluster: Replicas, monkeypatch: pytest.MonkeyPatch, replica: int, count: int, times: int
) -> None:
    """40,000 of one request of a megabyte held up all others for half a second. Any client can claim to be a broker."""
    before, sessions = followers(cluster).entry_count, dict(followers(cluster).sessions)
    pieces: list[int] = []

    def sliced(left: Iterator[Key], count: int) -> list[Key]:
        piece = list(islice(left, count))
        pieces.append(len(piece))
        return piece

    monkeypatch.setattr(follower_fetches, "islice", sliced)
    monkeypatch.setattr(follower_fetches, "NOT_HOSTED_AT_ONCE_MAX", 20)
    monkeypatch.setattr(follower_fetches, "REFUSED_PER_TURN", 10)
    answer = ask(cluster, replica, count=count, times=times, wait_ms=10_000 * (count > 1), at_once=False)
    assert (answer.error_code, answer.session_id) == (0, 0)
    of_first = ErrorCode.NONE if replica == REAL else ErrorCode.UNKNOWN_LEADER_EPOCH
    found = [(each.partition_index, each.error_code) for each in answer.responses[0].partitions]
    assert found == [(0, of_first), *((index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) for index in range(1, count))]
    assert pieces == [10] * ((count - 1) // 10) + [(count - 1) % 10]
    assert followers(cluster).entry_count == before
    assert followers(cluster).sessions == sessions
    cluster.nodes[1].produce(b"a")
    cluster.loop.settle()
    assert cluster.nodes[2].values() == [b"a"]


def test_a_session_that_asks_for_many_partitions_that_are_not_hosted_ends(
    cluster: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_fetches, "NOT_HOSTED_AT_ONCE_MAX", 20)
    opened = ask(cluster, REAL).session_id
    asked = ask(cluster, REAL, topic_id=b"?" * 16, count=21, session=(opened, 1))
    assert (asked.error_code, asked.session_id) == (ErrorCode.FETCH_SESSION_ID_NOT_FOUND, 0)
    assert opened not in followers(cluster).sessions


def test_partitions_of_all_sessions_are_bounded(cluster: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = followers(cluster).entry_count
    monkeypatch.setattr(follower_fetches, "ENTRIES_MAX", entries + 2)
    first, second = ask(cluster, REAL), ask(cluster, REAL)
    assert first.session_id
    assert second.session_id
    third = ask(cluster, REAL, wait_ms=10_000)
    assert (third.session_id, errors(third)) == (0, {0}), "served at once, and not remembered"
    assert followers(cluster).entry_count == entries + 2
    grown = ask(cluster, REAL, topic_id=b"?" * 16, session=(first.session_id, 1))
    assert (grown.error_code, grown.session_id) == (0, 0)
    assert followers(cluster).entry_count == entries + 1


def test_a_real_follower_that_lost_its_session_follows_on(cluster: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a session, too, and with one as soon as there is room."""
    monkeypatch.setattr(follower_sessions, "SESSIONS_OF_BROKER_MAX", 0)
    (real,) = followers(cluster).sessions
    followers(cluster)._close(real)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(100)
    assert cluster.nodes[2].values() == [b"a"]
    assert not followers(cluster).sessions
    monkeypatch.undo()
    cluster.loop.run_for(1000)
    assert len(followers(cluster).sessions) == 1
    cluster.nodes[1].produce(b"b")
    cluster.loop.settle()
    assert cluster.nodes[2].values() == [b"a", b"b"]


@pytest.mark.parametrize("broker_epoch", ["of another process", "unknown", "its own"])
def test_a_late_fetch_holds_up_an_acknowledgement_only_until_the_followers_next_one(broker_epoch: str) -> None:
    """It lowered the recorded end of the follower until the next append."""
    cluster = Replicas(3)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(1)
    cluster.cut.add((3, 1))
    sent = cluster.nodes[1].produce(b"b", timeout_ms=60_000)
    cluster.loop.run_for(1)
    own = cluster.broker_epochs[REAL]
    epoch = {"of another process": own + 1000, "unknown": -1, "its own": own}[broker_epoch]
    assert errors(ask(cluster, REAL, epoch=epoch, offset=0)) == {0}
    follower = cluster.nodes[1].partition.in_sync.followers[REAL]
    assert follower.log_end_offset == 0
    cluster.heal()
    cluster.loop.run_for(WAIT_OF_A_FOLLOWER_MS)
    assert (sent.code, follower.log_end_offset, follower.broker_epoch) == (0, 2, own)


def test_a_session_that_was_left_behind_makes_no_follower_late() -> None:
    """At the next append its last fetch counted as the follower's last one."""
    cluster = Replicas(2, replica_lag_time_max_ms="2000")
    assert ask(cluster, REAL, epoch=cluster.broker_epochs[REAL]).session_id
    cluster.loop.run_for(5000)
    cluster.nodes[1].produce(b"a")
    cluster.nodes[1].partition.check_isr()
    assert not cluster.nodes[1].proposals


def test_a_late_fetch_lowers_the_low_watermark_only_until_the_followers_next_one() -> None:
    """It kept it down, so that a repeated DeleteRecords waited for nothing."""
    cluster = Replicas(3)
    partition = cluster.nodes[1].partition
    for value in (b"a", b"b", b"c"):
        cluster.nodes[1].produce(value)
    cluster.loop.run_for(WAIT_OF_A_FOLLOWER_MS)
    cluster.nodes[1].partitions.delete_records(partition, 2)
    cluster.loop.run_for(WAIT_OF_A_FOLLOWER_MS)
    assert partition.low_watermark == 2
    assert errors(ask(cluster, REAL, epoch=cluster.broker_epochs[REAL], offset=3)) == {0}
    assert partition.low_watermark == 0
    told: list[tuple[int, ErrorCode]] = []
    cluster.nodes[1].partitions.deletions.wait(partition, 2, lambda *answer: told.append(answer))
    cluster.loop.run_for(WAIT_OF_A_FOLLOWER_MS)
    assert told == [(2, ErrorCode.NONE)]
    assert partition.in_sync.followers[REAL].log_end_offset == 3


SELECTOR = "org.apache.kafka.common.replica.RackAwareReplicaSelector"


@pytest.mark.parametrize("cause", ["its fetch alone", "consumers of followers", "a write that waited"])
def test_a_follower_that_never_reaches_the_end_is_not_caught_up_by_the_high_watermark_that_it_moves(cause: str) -> None:
    """It stayed in the ISR where consumers read from followers, or where a write waited for the high watermark."""
    cluster = Replicas(2, replica_lag_time_max_ms="2000")
    followers(cluster).tells_high_watermark = cause == "consumers of followers"
    cluster.cut.add((REAL, 1))
    leader, own = cluster.nodes[1], cluster.broker_epochs[REAL]
    for _ in range(20):
        leader.produce(b"a", acks=1)
    session_id = ask(cluster, REAL, epoch=own).session_id
    for offset in range(1, 8):
        if cause == "a write that waited":
            leader.partition.watch.writes.add(offset, lambda error: leader.produce(b"b", acks=1))
        cluster.loop.run_for(500)
        ask(cluster, REAL, epoch=own, offset=offset, session=(session_id, offset))
        assert leader.marks[0] == offset
        leader.partition.check_isr()
    assert [proposal.removes for _, proposal in leader.proposals] == [(REAL,)]


def test_news_of_a_high_watermark_alone_does_not_keep_a_late_fetch_in_force() -> None:
    """The session forgot to record the follower's end again, and an acknowledgement waited for the next append."""
    cluster = Replicas(2, replica_selector_class=SELECTOR)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(WAIT_OF_A_FOLLOWER_MS)
    (session,) = followers(cluster).sessions.values()
    (entry,) = session.entries.values()
    own = cluster.broker_epochs[REAL]
    ask(cluster, REAL, epoch=own, offset=0)
    session.dirty[entry] = None  # as with other partitions that have such news, so that no answer leaves at once
    ask(cluster, REAL, epoch=own, session=(session.id, session.epoch), count=0)
    assert cluster.nodes[1].partition.in_sync.followers[REAL].log_end_offset == 1


def test_without_a_session_a_fetch_waits_also_where_followers_are_told_of_high_watermarks() -> None:
    """Nothing is kept of what it was told. Answered at once, the follower would ask again without end."""
    cluster = Replicas(2, replica_selector_class=SELECTOR)
    cluster.nodes[1].produce(b"a")
    cluster.loop.run_for(WAIT_OF_A_FOLLOWER_MS)
    with pytest.raises(AssertionError, match="it waits"):
        ask(cluster, REAL, epoch=cluster.broker_epochs[REAL], session=(0, EPOCH_FINAL), wait_ms=500, offset=1)


def test_a_follower_whose_connection_breaks_is_late_only_after_the_whole_lag_time() -> None:
    """In a quiet partition it counted as caught up when it had last copied a record, and left the ISR at once."""
    cluster = Replicas(2, replica_lag_time_max_ms="2000")
    leader = cluster.nodes[1]
    leader.produce(b"a")
    cluster.loop.run_for(60_000)
    cluster.cut.add((REAL, 1))
    for link in cluster.links:
        link.close()
    cluster.loop.settle()
    assert not followers(cluster).sessions
    leader.produce(b"b", timeout_ms=60_000)
    cluster.loop.run_for(1400)
    leader.partition.check_isr()
    assert not leader.proposals
    cluster.loop.run_for(1000)
    leader.partition.check_isr()
    assert [proposal.removes for _, proposal in leader.proposals] == [(REAL,)]


def test_a_follower_outside_the_isr_does_not_count_as_caught_up_because_a_leader_epoch_begins() -> None:
    """News of the old epoch counted it so, and acknowledgements waited for it for the whole lag time."""
    cluster = Replicas(2, replica_lag_time_max_ms="2000")
    leader = cluster.nodes[1]
    leader.produce(b"a")
    cluster.loop.run_for(WAIT_OF_A_FOLLOWER_MS)
    cluster.cut.add((REAL, 1))
    cluster.elect(1, [1], tell=[1])
    assert leader.produce(b"b").code == 0


def test_a_late_fetch_makes_no_follower_late_in_a_quiet_partition() -> None:
    """It counted as caught up when it had last copied a record, and left the ISR at a check before its next fetch."""
    cluster = Replicas(2, replica_lag_time_max_ms="2000")
    leader = cluster.nodes[1]
    leader.produce(b"a")
    cluster.loop.run_for(60_000)
    assert errors(ask(cluster, REAL, epoch=cluster.broker_epochs[REAL])) == {0}
    follower = leader.partition.in_sync.followers[REAL]
    assert follower.log_end_offset == 0
    leader.partition.check_isr()
    assert not leader.proposals
    cluster.cut.add((REAL, 1))
    cluster.loop.run_for(2600)
    leader.partition.check_isr()
    assert [proposal.removes for _, proposal in leader.proposals] == [(REAL,)], "it has not fetched since"


class Cold(ColdRead):
    path = "/data/t-0/00000000000000000000.log"

    def __init__(self) -> None: ...
    def pin(self) -> None: ...
    def unpin(self) -> None: ...
    def warm(self) -> None: ...


def test_a_wait_that_ends_while_records_are_loaded_is_answered_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """There were fewer bytes than min.bytes, and no timer was left: the answer waited for the next append."""
    cluster = Replicas(2)
    leader = cluster.nodes[1]
    cluster.stop(REAL)
    leader.produce(b"a")
    request = FetchRequest(
        replica_state=ReplicaState(replica_id=REAL, replica_epoch=cluster.broker_epochs[REAL]),
        max_wait_ms=500,
        min_bytes=1000,
        max_bytes=1 << 20,
        session_epoch=EPOCH_FINAL,
        topics=[
            FetchTopic(
                topic_id=TOPIC_ID,
                partitions=[
                    FetchPartition(
                        partition=0, current_leader_epoch=0, fetch_offset=0, last_fetched_epoch=-1, log_start_offset=0,
                        partition_max_bytes=1000,
                    )
                ],
            )
        ],
    )  # fmt: skip

    def read(*args: object, **options: object) -> None:
        raise Cold

    cluster.loop.device_waits = True
    with monkeypatch.context() as context:
        context.setattr(PartitionLog, "read", read)
        waiting = leader.serve(1, VERSION, memoryview(bytearray(request.encode(VERSION))))
    assert isinstance(waiting, Deferred)
    cluster.loop.run_for(600)
    assert waiting.response is None
    cluster.loop.waiting.pop()()
    cluster.loop.settle()
    assert waiting.response is not None
