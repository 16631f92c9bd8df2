"""A follower's request that differs from an earlier one in session epoch and offset alone: when not to believe it.

Each test sends a request that the leader knows by now, after something that makes it mean something else.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.replication.replicas import TOPIC_ID, Replicas
from tidelog.broker.network.request import Deferred
from tidelog.broker.replicas.fetching import follower_fetches
from tidelog.broker.replicas.fetching.follower_sessions import FollowerSession
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.hot_replication import VERSION, RequestTemplate
from tidelog.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    ForgottenTopic,
    ReplicaState,
)

REAL = 2
WAIT_MS = 500


class Follower:
    """Node 2 as node 1 sees it: a session of its own, beside that of the real follower, which is cut off."""

    def __init__(self, wait_ms: int = WAIT_MS) -> None:
        self.cluster = Replicas(2)
        self.cluster.flush()
        self.cluster.loop.run_for(1)
        self.cluster.cut.add((2, 1))
        self.node = self.cluster.nodes[1]
        self.fetches = self.node.partitions.follower_fetches
        self.epoch = 0
        self.template = RequestTemplate(REAL, self.cluster.broker_epochs[REAL], wait_ms, 1, 1 << 20, 1 << 20)
        self.session_id = self.ask_many(0, [0]).session_id
        assert self.session_id
        for _ in range(3):
            self.node.produce(b"a", timeout_ms=60_000)
        for offset in (0, 1, 2):
            answer = self.ask(offset)
            assert (answer.error_code, self.partition_error(answer)) == (0, 0)

    @property
    def session(self) -> FollowerSession:
        return self.fetches.sessions[self.session_id]

    @property
    def end_offset(self) -> int:
        """What the leader has recorded."""
        return self.node.partition.in_sync.followers[REAL].log_end_offset

    def answered(self, body: bytes) -> FetchResponse:
        frames = self.node.serve(1, VERSION, memoryview(bytearray(body)))
        if isinstance(frames, Deferred):
            self.cluster.loop.run_for(2 * WAIT_MS)
            frames = frames.response
        assert frames is not None
        frame = b"".join(frames) if isinstance(frames, list) else bytes(frames)
        return FetchResponse.decode(frame[9:], VERSION)

    def ask(self, offset: int, *, leader_epoch: int = 0, template: RequestTemplate | None = None) -> FetchResponse:
        last_epoch = 0 if offset else -1
        body = (template or self.template).one(
            self.session_id, self.epoch, TOPIC_ID, 0, leader_epoch, offset, last_epoch, 0
        )
        self.epoch += 1
        return self.answered(body)

    def ask_many(self, offset: int, indexes: list[int], forgotten: Any = ()) -> FetchResponse:
        """By the compiled messages."""
        entries = [
            FetchPartition(
                partition=index, current_leader_epoch=0, fetch_offset=offset, last_fetched_epoch=0 if offset else -1,
                log_start_offset=0, partition_max_bytes=1 << 20,
            )
            for index in indexes
        ]  # fmt: skip
        request = FetchRequest(
            replica_state=ReplicaState(replica_id=REAL, replica_epoch=self.cluster.broker_epochs[REAL]),
            max_wait_ms=0,
            min_bytes=1,
            max_bytes=1 << 20,
            session_id=getattr(self, "session_id", 0),
            session_epoch=self.epoch,
            topics=[FetchTopic(topic_id=TOPIC_ID, partitions=entries)] if entries else [],
            forgotten_topics_data=list(forgotten),
        )
        self.epoch += 1
        return self.answered(request.encode(VERSION))

    def ask_in_vain(self, offset: int, **how: Any) -> None:
        """Ask from the log end: the answer may have a new high watermark, but no records and no error."""
        answer = self.ask(offset, **how)
        told = [
            (each.error_code, bytes(each.records or b"")) for topic in answer.responses for each in topic.partitions
        ]
        assert (answer.error_code, told) in ((0, []), (0, [(0, b"")]))

    @staticmethod
    def partition_error(answer: FetchResponse) -> int:
        ((error,),) = [[each.error_code for each in topic.partitions] for topic in answer.responses]
        return error


@pytest.fixture
def follower() -> Follower:
    return Follower()


def test_a_request_that_is_known_is_recorded(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_fetches, "decode_one", None)
    assert follower.end_offset == 2
    follower.ask_in_vain(3)
    assert follower.end_offset == 3


def test_a_session_that_was_closed_is_not_found(follower: Follower) -> None:
    follower.fetches._close(follower.session_id)
    assert follower.ask(3).error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert follower.end_offset == 2


def test_a_session_that_ends_with_its_next_answer_is_not_found(follower: Follower) -> None:
    follower.fetches._end_with_this_answer(follower.session)
    assert follower.ask(3).error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert follower.end_offset == 2


@pytest.mark.parametrize("difference", [-1, 1])
def test_another_epoch_of_the_session_is_refused(follower: Follower, difference: int) -> None:
    follower.epoch += difference
    assert follower.ask(3).error_code == ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert follower.end_offset == 2


def test_another_replica_has_not_the_session(follower: Follower) -> None:
    epoch = follower.cluster.broker_epochs[REAL]
    for other in (RequestTemplate(3, epoch, WAIT_MS, 1, 1 << 20, 1 << 20), RequestTemplate(2, 7, WAIT_MS, 1, 1, 1)):
        assert follower.ask(3, template=other).error_code == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        follower.epoch -= 1
    assert not follower.ask(3).error_code
    assert follower.end_offset == 3


def test_a_partition_that_was_forgotten_and_is_mentioned_again_is_the_present_one(follower: Follower) -> None:
    (before,) = follower.session.entries.values()
    follower.ask_many(0, [], [ForgottenTopic(topic_id=TOPIC_ID, partitions=[0])])
    assert not follower.session.entries
    follower.ask_many(2, [0])
    (entry,) = follower.session.entries.values()
    assert entry is not before
    follower.ask_in_vain(3)
    assert (entry.fetch_offset, before.fetch_offset, follower.end_offset) == (3, 2, 3)


def test_a_partition_that_is_gone_is_refused(follower: Follower) -> None:
    follower.node.partitions.remove(follower.node.partition, ErrorCode.NOT_LEADER_OR_FOLLOWER)
    assert follower.partition_error(follower.ask(3)) == ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_each_request_counts_as_it_says_also_after_others(follower: Follower) -> None:
    """Epochs and wait are those of the request, not of the one before it."""
    other = RequestTemplate(REAL, follower.cluster.broker_epochs[REAL], 77, 1, 1 << 20, 1 << 20)
    (entry,) = follower.session.entries.values()
    assert follower.partition_error(follower.ask(3, leader_epoch=4)) == ErrorCode.UNKNOWN_LEADER_EPOCH
    follower.ask_in_vain(3)
    assert (entry.leader_epoch, entry.problem, follower.session.max_wait_ms) == (0, None, WAIT_MS)
    for template, wait_ms in ((other, 77), (None, WAIT_MS), (other, 77)):
        follower.ask_in_vain(3, template=template)
        assert follower.session.max_wait_ms == wait_ms
    follower.ask_many(3, [0])
    assert follower.session.max_wait_ms == 0
    follower.ask_in_vain(3)
    assert follower.session.max_wait_ms == WAIT_MS


def test_another_leader_epoch_here_is_noticed(follower: Follower) -> None:
    follower.cluster.elect(1, [1, 2], tell=[1])
    assert follower.partition_error(follower.ask(3)) == ErrorCode.FENCED_LEADER_EPOCH
    assert follower.end_offset == -1


def test_a_follower_that_is_throttled_waits_also_with_a_known_request(follower: Follower) -> None:
    follower.cluster.alter(isr=(1,))  # from where it is, a fetch of offset 2 would bring it back
    follower.node.partition.throttled_as_leader = True
    follower.fetches.answers.throttle.bytes_per_s = 1
    follower.fetches.answers.throttle.record(1 << 30, follower.cluster.loop.time() * 1000)
    assert not follower.ask(1).responses


def test_an_answer_that_was_kept_for_the_next_follower_names_the_log_start_of_now(follower: Follower) -> None:
    """Else the next one says only after its wait that it has deleted the records, and DeleteRecords waits for it."""
    before = follower.ask(2)
    follower.node.partitions.delete_records(follower.node.partition, 2)
    after = follower.ask(2)
    told = [
        (each.log_start_offset, each.high_watermark, bytes(each.records or b"") != b"")
        for answer in (before, after)
        for each in answer.responses[0].partitions
    ]
    assert told == [(0, 2, True), (2, 2, True)]


def test_the_leader_remembers_a_bounded_number_of_requests(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_fetches, "KNOWN_REQUESTS_MAX", 5)
    for number in range(20):
        follower.ask(3, leader_epoch=number)
        assert len(follower.fetches._known) <= 5
    follower.ask_in_vain(3)
    assert follower.end_offset == 3


def test_a_fetch_that_waits_behind_another_connections_request_keeps_its_answer(follower: Follower) -> None:
    """Each waiting fetch is an object of its own: the next one of the session does not take the answer away."""
    body = follower.template.one(follower.session_id, follower.epoch, TOPIC_ID, 0, 0, 3, 0, 0)
    first = follower.node.serve(1, VERSION, memoryview(bytearray(body)))
    follower.epoch += 1
    body = follower.template.one(follower.session_id, follower.epoch, TOPIC_ID, 0, 0, 3, 0, 0)
    second = follower.node.serve(1, VERSION, memoryview(bytearray(body)))
    assert first is not second
    assert first.response is not None, "with nothing, because another one came"
    assert second.response is None
