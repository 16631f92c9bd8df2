"""Fetch sessions (KIP-227): ids, epochs, eviction, and that only changed partitions are looked at again."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.conftest import RunningNode, Wire
from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tidelog.broker.apis.records import fetch as fetching
from tidelog.broker.replicas.fetching import fetch_sessions
from tidelog.broker.replicas.fetching.fetch_sessions import (
    EPOCH_FINAL,
    EPOCH_INITIAL,
    EPOCH_MAX,
    EVICTION_MS_MIN,
    FetchSession,
    FetchSessions,
    Need,
    SessionPartition,
)
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest, CreateTopicsResponse
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, ForgottenTopic
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.storage.producers.verification import TransactionAppend

A, B, C = ("t", 0), ("t", 1), ("t", 2)


def request(
    *indexes: int, session_id: int = 0, epoch: int = EPOCH_INITIAL, forget: tuple[int, ...] = ()
) -> FetchRequest:
    return FetchRequest(
        session_id=session_id,
        session_epoch=epoch,
        topics=[FetchTopic(topic="t", partitions=[FetchPartition(partition=index) for index in indexes])]
        if indexes
        else [],
        forgotten_topics_data=[ForgottenTopic(topic="t", partitions=list(forget))] if forget else [],
    )


def sessions(slots: int = 10) -> FetchSessions:
    return FetchSessions(slots, random.Random(1))


def refused(found: FetchSessions, asked: FetchRequest, by_id: bool = False) -> ErrorCode:
    with pytest.raises(KafkaError) as refusal:
        found.resolve(asked, by_id, 0)
    return refusal.value.code


def test_epoch_minus_one_makes_a_session_for_one_request() -> None:
    cache = sessions()
    session, answer_all = cache.resolve(request(0, 1, epoch=EPOCH_FINAL), False, 0)
    assert (session.id, answer_all, len(cache)) == (0, True, 0)
    assert list(session.partitions) == [A, B]


def test_epoch_zero_opens_a_session_and_the_next_requests_count_up() -> None:
    cache = sessions()
    session, answer_all = cache.resolve(request(0, 1), False, 0)
    assert session.id
    assert answer_all
    for epoch in (1, 2, 3):
        again, answer_all = cache.resolve(request(session_id=session.id, epoch=epoch), False, 0)
        assert again is session
        assert not answer_all


def test_the_epoch_wraps_to_one_after_the_largest() -> None:
    cache = sessions()
    session, _ = cache.resolve(request(0), False, 0)
    session.epoch = EPOCH_MAX
    cache.resolve(request(session_id=session.id, epoch=EPOCH_MAX), False, 0)
    assert session.epoch == 1


def test_unknown_sessions_wrong_epochs_and_a_change_to_topic_ids_are_refused() -> None:
    cache = sessions()
    session, _ = cache.resolve(request(0), False, 0)
    assert refused(cache, request(session_id=session.id + 1, epoch=1)) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert refused(cache, request(session_id=session.id, epoch=2)) == ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert refused(cache, request(session_id=session.id, epoch=1), by_id=True) == ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR


def test_a_partition_asked_for_and_forgotten_at_once_is_forgotten() -> None:
    cache = sessions()
    session, _ = cache.resolve(request(0), False, 0)
    cache.resolve(request(1, session_id=session.id, epoch=1, forget=(1,)), False, 0)
    assert list(session.partitions) == [A]


def test_forgetting_the_last_partition_ends_the_session() -> None:
    cache = sessions()
    session, _ = cache.resolve(request(0, 1), False, 0)
    cache.resolve(request(session_id=session.id, epoch=1, forget=(1,)), False, 0)
    assert list(session.partitions) == [A]
    ended, answer_all = cache.resolve(request(session_id=session.id, epoch=2, forget=(0,)), False, 0)
    assert (ended.id, ended.partitions, answer_all, len(cache)) == (0, {}, True, 0)


def test_a_full_request_that_names_a_session_replaces_it() -> None:
    cache = sessions()
    session, _ = cache.resolve(request(0), False, 0)
    other, _ = cache.resolve(request(1, session_id=session.id), False, 0)
    assert other.id != session.id
    assert len(cache) == 1
    assert not session.partitions, "the old session has left its partitions"


def test_a_full_cache_serves_without_a_session_until_one_is_stale() -> None:
    cache = sessions(slots=1)
    first, _ = cache.resolve(request(0), False, 0)
    second, _ = cache.resolve(request(0), False, EVICTION_MS_MIN)
    assert second.id == 0
    first.wait(lambda: None, lambda: None)
    assert cache.resolve(request(0), False, EVICTION_MS_MIN + 1)[0].id == 0, "a fetch still waits on it"
    first.waiters.clear()
    third, _ = cache.resolve(request(0), False, EVICTION_MS_MIN + 1)
    assert third.id not in (0, first.id)
    assert len(cache) == 1


def test_the_session_that_was_not_used_for_longest_makes_place() -> None:
    """One that began first and is used on stays, also when all are old enough to go."""
    cache = sessions(slots=2)
    begun_first, _ = cache.resolve(request(0), False, 0)
    begun_second, _ = cache.resolve(request(1), False, 1)
    cache.resolve(request(session_id=begun_first.id, epoch=1), False, 2)
    begun_third, _ = cache.resolve(request(2), False, EVICTION_MS_MIN + 10)
    assert {session.id for session in cache} == {begun_first.id, begun_third.id}
    assert not begun_second.partitions


def test_who_is_asked_for_again_goes_behind_those_that_waited_longer() -> None:
    session = FetchSession(7, False, 0)
    session.ask([(A, FetchPartition(partition=0)), (B, FetchPartition(partition=1)), (C, FetchPartition(partition=2))])
    session.ask([(A, FetchPartition(partition=0, fetch_offset=5))])
    assert list(session.dirty) == [B, C, A]
    session.ask([(C, FetchPartition(partition=2)), (B, FetchPartition(partition=1))])
    assert list(session.dirty) == [A, C, B]


async def test_with_capped_answers_every_partition_has_its_turn(wire: Wire, make_batch: Any) -> None:
    """A client asks again for what it was given; were that answered first, the others would wait until its end."""
    await wire.create_topic("t", 3)
    for _ in range(4):
        answer = await wire.call(produce("t", *[make_batch(bytes(1000))] * 3), 9, ProduceResponse)
        assert produced(answer) == [(0, answer.responses[0].partition_responses[0].base_offset)] * 3
    session_id, epoch = 0, 0
    offsets = {0: 0, 1: 0, 2: 0}
    asked = [0, 1, 2]
    served: list[int] = []
    while len(served) < 12:
        partitions = [
            FetchPartition(partition=index, fetch_offset=offsets[index], partition_max_bytes=1100) for index in asked
        ]
        topics = [FetchTopic(topic="t", partitions=partitions)]
        fetch = FetchRequest(min_bytes=1, max_bytes=1100, session_id=session_id, session_epoch=epoch, topics=topics)
        answer = await wire.call(fetch, 11, FetchResponse)
        session_id, epoch = answer.session_id, epoch + 1
        asked = [each.partition_index for topic in answer.responses for each in topic.partitions if each.records]
        assert len(asked) == 1
        offsets[asked[0]] += 1
        served += asked
    assert served == [0, 1, 2] * 4


async def test_an_answer_that_is_nearly_full_looks_at_no_other_partition(
    wire: Wire, make_batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes as long as the read of a partition with records. Those left out come first in the next answer."""
    looks: list[int] = []
    look = fetching._Fetch._read

    def counted(self: Any, entry: SessionPartition, *arguments: Any) -> Any:
        looks.append(entry.key[1])
        return look(self, entry, *arguments)

    monkeypatch.setattr(fetching._Fetch, "_read", counted)
    await wire.create_topic("t", 6)
    batch = make_batch(bytes(1000))
    for _ in range(3):
        await wire.call(produce("t", *[batch] * 6), 9, ProduceResponse)
    most = 2 * len(batch) + len(batch) // 20
    session_id, served, asked = 0, [0] * 6, list(range(6))
    for epoch in range(9):
        looks.clear()
        partitions = [
            FetchPartition(partition=index, fetch_offset=served[index], partition_max_bytes=len(batch))
            for index in asked
        ]
        topics = [FetchTopic(topic="t", partitions=partitions)]
        fetch = FetchRequest(min_bytes=1, max_bytes=most, session_id=session_id, session_epoch=epoch, topics=topics)
        answer = await wire.call(fetch, 11, FetchResponse)
        session_id = answer.session_id
        asked = [each.partition_index for topic in answer.responses for each in topic.partitions if each.records]
        assert len(asked) == 2
        assert looks == asked if epoch else list(range(6))
        for index in asked:
            served[index] += 1
    assert served == [3] * 6


class Watch:
    def __init__(self) -> None:
        self.entries: list[SessionPartition] = []

    def watch(self, entry: SessionPartition) -> None:
        self.entries.append(entry)
        entry.watched = self

    def unwatch(self, entry: SessionPartition) -> None:
        self.entries.remove(entry)

    def tried_in_vain(self, entry: SessionPartition, need: Need) -> None:
        raise NotImplementedError


def test_only_partitions_that_changed_or_were_asked_anew_are_dirty() -> None:
    session = FetchSession(7, False, 0)
    session.ask([(A, FetchPartition(partition=0)), (B, FetchPartition(partition=1)), (C, FetchPartition(partition=2))])
    assert list(session.dirty) == [A, B, C]
    session.dirty.clear()
    session.ask([(C, FetchPartition(partition=2, fetch_offset=5))])
    session.partitions[A].changed()
    assert list(session.dirty) == [C, A]
    assert session.partitions[C].request.fetch_offset == 5


def test_a_touch_reaches_the_fetch_that_waits_and_closing_leaves_every_partition() -> None:
    touched: list[int] = []
    watch = Watch()
    session = FetchSession(7, False, 0)
    session.ask([(A, FetchPartition(partition=0))])
    watch.watch(session.partitions[A])
    session.wait(lambda: touched.append(1), lambda: touched.append(-1))
    watch.entries[0].changed()
    assert touched == [1]
    session.close()
    assert watch.entries == []


def test_so_many_partitions_are_remembered_for_all_sessions_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "PARTITIONS_MAX", 5)
    cache = sessions()
    first = cache.resolve(request(0, 1, 2), False, 0)[0]
    second = cache.resolve(request(0, 1), False, 0)[0]
    assert first.id
    assert second.id
    assert cache.resolve(request(0), False, 0)[0].id == 0
    # One that would grow beyond it is told to ask anew, and gets no session then.
    grown = request(0, 1, 2, session_id=second.id, epoch=1)
    assert refused(cache, grown) == ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert cache.resolve(request(0, 1, 2), False, 0)[0].id == 0
    assert cache.resolve(request(session_id=first.id, epoch=1, forget=(0,)), False, 0)[0] is first
    assert cache.resolve(request(0, 1), False, 0)[0].id
    cache.resolve(request(session_id=first.id, epoch=EPOCH_FINAL), False, 0)
    assert cache._partition_count == 2


def test_a_session_does_not_grow_beyond_what_one_request_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end, and each answer about all of it, would hold up all others."""
    monkeypatch.setattr(fetch_sessions, "SESSION_PARTITIONS_MAX", 3)
    known = sessions()
    session, _ = known.resolve(request(0, 1), False, 0)
    known.resolve(request(1, 2, session_id=session.id, epoch=1), False, 0)
    assert refused(known, request(3, session_id=session.id, epoch=2)) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert len(known) == 0
    known.resolve(request(0, 1, 2, 3), False, 0)
    assert len(known) == 1


async def test_an_answer_about_many_partitions_of_a_session_leaves_some_to_the_next(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch of 30 bytes was answered with 240,000 errors, in one turn of the loop of half a second."""
    monkeypatch.setattr(fetching, "PIECE_ELEMENTS_MAX", 10)
    monkeypatch.setattr(fetching, "ANSWERED_MAX", 20)
    opened = await wire.call(request(*range(50)), 11, FetchResponse)
    names_all = request(*range(50), session_id=opened.session_id, epoch=1)
    later = [request(session_id=opened.session_id, epoch=epoch) for epoch in (2, 3)]
    found = []
    for each in (names_all, *later):
        each.max_wait_ms, each.min_bytes = 60_000, 1
        answer = await asyncio.wait_for(wire.call(each, 11, FetchResponse), PATIENCE_S)
        found += [entry.partition_index for topic in answer.responses for entry in topic.partitions]
    assert found == [*range(50), *range(10)]


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_fetch_of_many_partitions_without_news_waits(
    running: RunningNode, wire: Wire, make_batch: Any, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """It was answered at once, empty. A consumer behind many open transactions fetched without a pause."""
    monkeypatch.setattr(fetching, "PIECE_ELEMENTS_MAX", 10)
    monkeypatch.setattr(fetching, "ANSWERED_MAX", 20)
    await wire.create_topic("t", 51)
    now_ms = int(time.time() * 1000)
    batch = encode_batch(
        [(now_ms, b"k", b"v", ())], producer_id=7, producer_epoch=0, base_sequence=0, transactional=True
    )
    node: Any = running.node
    partitions = node._broker.partitions
    await until(lambda: sum(each.leads for each in partitions.hosted() if each.topic == "t") == 51)
    for index in range(50 * is_open):
        partition = partitions.leader("t", index)
        given = TransactionAppend(partition.begin_verification(7, 0, 0, True, now_ms))
        partition.append_as_leader(memoryview(bytearray(batch)), now_ms, transaction=given)
    opened = await wire.call(request(*range(51)), 11, FetchResponse)
    asked = request(*range(51), session_id=opened.session_id, epoch=1)
    asked.max_wait_ms, asked.min_bytes, asked.isolation_level = 60_000, 1, 1
    for each in asked.topics[0].partitions:
        each.partition_max_bytes = 1 << 20
    wire.send(asked, 11)
    other = await running.connect()
    await other.create_topic("another")  # the fetch has looked at all partitions meanwhile
    await other.call(produce("t", *[None] * 50, make_batch(b"a")), 9, ProduceResponse)
    answer = await asyncio.wait_for(wire.receive(FetchResponse, 11), PATIENCE_S)
    assert fetched(answer) == [b"a"]


def test_the_partitions_of_those_who_have_left_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "PARTITIONS_MAX", 5)
    cache = sessions()
    for _ in range(2):
        assert cache.resolve(request(0, 1), False, 0)[0].id
    assert cache.resolve(request(0, 1, 2, 3), False, EVICTION_MS_MIN)[0].id == 0
    assert cache.resolve(request(0, 1, 2, 3), False, EVICTION_MS_MIN + 1)[0].id
    assert (len(cache), cache._partition_count, cache.evictions) == (1, 4, 2)


def test_so_many_partitions_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "PARKED_MAX", 20)
    cache = sessions()
    alone = cache.resolve(request(*range(10), epoch=EPOCH_FINAL), False, 0)[0]
    in_session = cache.resolve(request(*range(100)), False, 0)[0]
    monkeypatch.setattr(fetch_sessions, "GIVEN_WAY_MAX", 0)
    fetches = [list[int]() for _ in range(4)]
    ways = [each.clear for each in fetches]
    waiting = [alone, alone, in_session, in_session]
    assert [cache.park(*each) for each in zip(waiting, ways, strict=True)] == [True, False, True, False]
    for way in ways:
        cache.unpark(way)
    assert cache._parked == 0
    assert cache.park(alone, ways[0])


def test_those_that_have_waited_longest_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "PARKED_MAX", 20)
    cache = sessions()
    given = list[str]()
    small = cache.resolve(request(0, epoch=EPOCH_FINAL), False, 0)[0]
    large = cache.resolve(request(*range(10), epoch=EPOCH_FINAL), False, 0)[0]
    ways = {name: partial(given.append, name) for name in "abcdefg"}
    assert all(cache.park(small, ways[name]) for name in "abcd")
    assert not given
    cache.unpark(ways["b"])
    assert cache.park(small, ways["e"])
    assert not given
    assert cache.park(small, ways["f"])
    assert given == ["a"]
    assert cache.park(large, ways["g"])
    assert given == ["a", "c", "d", "e"], "each at most once, until there is room"
    for way in ways.values():
        cache.unpark(way)
    assert cache._parked == 0


@pytest.mark.parametrize("has_session", [True, False])
async def test_a_fetch_that_waits_finds_the_records_of_a_topic_that_was_made_again(
    running: RunningNode, wire: Wire, make_batch: Any, has_session: bool
) -> None:
    """One image has the deletion and the new topic, whose partition answers for the old one by its name."""
    deleting, creating = await running.connect(), await running.connect()
    await wire.create_topic("t")
    version, session_id = 11, 0
    if has_session:
        session_id = (await wire.call(fetch("t", session_epoch=EPOCH_INITIAL), version, FetchResponse)).session_id
        assert session_id
    waiting = fetch(
        "t",
        wait_ms=300 if has_session else 60_000,
        session_id=session_id,
        session_epoch=1 if has_session else EPOCH_FINAL,
    )
    if has_session:
        waiting.topics = []
    wire.send(waiting, version)
    while not running.node._broker.partitions.deadlines._deadlines:  # type: ignore[union-attr]  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    deleting.send(DeleteTopicsRequest(topic_names=["t"], timeout_ms=60_000), 5)
    again = CreatableTopic(name="t", num_partitions=1, replication_factor=1)
    creating.send(CreateTopicsRequest(topics=[again], timeout_ms=60_000), 6)
    await deleting.receive(DeleteTopicsResponse, 5)
    assert (await creating.receive(CreateTopicsResponse, 6)).topics[0].error_code == 0
    if has_session:
        await wire.receive(FetchResponse, version)  # there are no records yet
    produces = await creating.call(produce("t", make_batch(b"new")), 9, ProduceResponse)
    assert produced(produces) == [(0, 0)]
    if has_session:
        wire.send(FetchRequest(min_bytes=1, session_id=session_id, session_epoch=2), version)
    async with asyncio.timeout(20):
        assert fetched(await wire.receive(FetchResponse, version)) == [b"new"]
