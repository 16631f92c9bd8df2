"""Thousands of fetches that wait for one partition: an append does not try them all, and none waits in vain."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.broker.test_node import produce, produced
from tidelog.broker.apis.records import fetch as fetch_module
from tidelog.broker.replicas.fetching import fetch_wakes
from tidelog.broker.replicas.fetching.fetch_sessions import UNKNOWN, WAITERS_MAX, FetchSession, Need, SessionPartition
from tidelog.broker.replicas.fetching.fetch_wakes import FetchWakes, WaitingFetches
from tidelog.broker.scheduling import timers
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.broker.scheduling.timers import DeadlineTimer
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.replication.partition import Partition

NEVER_MS = 250_000
MIB = 1 << 20
MakeBatch = Callable[..., bytes]


def fetch(
    min_bytes: int,
    offset: int = 0,
    partition_max_bytes: int = MIB,
    wait_ms: int = NEVER_MS,
    session: tuple[int, int] = (0, -1),
) -> FetchRequest:
    asked = FetchPartition(partition=0, fetch_offset=offset, partition_max_bytes=partition_max_bytes)
    return FetchRequest(
        max_wait_ms=wait_ms,
        min_bytes=min_bytes,
        max_bytes=50 * MIB,
        session_id=session[0],
        session_epoch=session[1],
        topics=[FetchTopic(topic="t", partitions=[asked])],
    )


class Tries:
    """How often a fetch was tried."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        attempt = fetch_module._Fetch._attempt

        def counted(one: Any) -> Any:
            self.count += 1
            return attempt(one)

        monkeypatch.setattr(fetch_module._Fetch, "_attempt", counted)


def waiting_of(running: Any) -> WaitingFetches:
    watch: WaitingFetches = running.node._broker.partitions.leader("t", 0).watch
    return watch


async def wait_many(running: Any, request: FetchRequest, count: int) -> Any:
    """A connection on which so many fetches wait."""
    other = await running.connect()
    for _ in range(count):
        other.send(request, 11)
    watch = waiting_of(running)
    await until(lambda: len(watch.fetches) + len(watch.patient) >= count)
    return other


async def append(wire: Any, batch: bytes) -> None:
    assert produced(await wire.call(produce("t", batch), 9, ProduceResponse))[0][0] == 0


async def test_an_append_does_not_try_every_fetch_that_waits(
    running: Any, wire: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t")
    await wait_many(running, fetch(1 << 30), 1000)
    tries = Tries(monkeypatch)
    turns: list[int] = []
    run = DeferredCallbacks.run

    def counted(callbacks: Any) -> None:
        before = tries.count
        run(callbacks)
        turns.append(tries.count - before)

    monkeypatch.setattr(DeferredCallbacks, "run", counted)
    await append(wire, make_batch(b"a"))
    await until(lambda: tries.count >= 1000)
    assert max(turns) <= 100
    await until(lambda: len(waiting_of(running).patient) == 1000)
    # Their bytes are far away, so further appends try none of them, and a consumer is served at once.
    tries.count = 0
    for offset in range(1, 20):
        consumer = await running.connect()
        consumer.send(fetch(1, offset), 11)
        await until(lambda: len(waiting_of(running).fetches) == 1)
        await append(wire, make_batch(b"b"))
        answer = await asyncio.wait_for(consumer.receive(FetchResponse, 11), PATIENCE_S)
        assert answer.responses[0].partitions[0].records
    assert tries.count <= 2 * 19


@pytest.mark.parametrize("seed", range(8))
async def test_a_fetch_is_answered_by_the_append_that_completes_its_bytes(
    start_node: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """After every append a try of each fetch that still waits is in vain, across segments and limits."""
    rng = random.Random(seed)
    monkeypatch.setattr(fetch_wakes, "AT_ONCE_MAX", rng.choice((0, 3, 100)))
    running = await start_node()
    wire = await running.connect()
    await wire.create_topic("t", segment_bytes=str(MIB))
    await append(wire, make_batch(b"x" * rng.randrange(60_000)))
    wires = []
    for _ in range(40):
        other = await running.connect()
        other.send(fetch(rng.randrange(2, 3 * MIB // 2), rng.randrange(2), rng.choice((100, 200_000, MIB))), 11)
        wires.append(other)
    fetches: list[Any] = []
    attempt = fetch_module._Fetch._attempt

    def seen(one: Any) -> Any:
        fetches.append(one)
        return attempt(one)

    monkeypatch.setattr(fetch_module._Fetch, "_attempt", seen)
    watch, wakes = waiting_of(running), running.node._broker.partitions.fetch_wakes
    for count in range(80):
        await append(wire, make_batch(b"x" * rng.randrange(60_000)))
        await until(lambda: not wakes._is_armed and not wakes._callbacks.waiting)
        for one in {id(each): each for each in fetches}.values():
            if one._deferred is not None and one._deferred.response is None:
                assert attempt(one) is None, f"append {count}: it could be answered, and is not tried"
    assert not watch.fetches
    assert len(fetches) < 40 * 80 // 4, "not every append tries every fetch"


async def test_patient_fetches_learn_that_their_topic_is_gone(running: Any, wire: Any, make_batch: MakeBatch) -> None:
    await wire.create_topic("t")
    other = await wait_many(running, fetch(1 << 30), 300)
    await append(wire, make_batch(b"a"))
    await until(lambda: len(waiting_of(running).patient) == 300)
    request = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=60_000)
    assert (await wire.call(request, 6, DeleteTopicsResponse)).responses[0].error_code == 0
    for _ in range(300):
        answer = await asyncio.wait_for(other.receive(FetchResponse, 11), PATIENCE_S)
        assert answer.responses[0].partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_the_partitions_of_a_deleted_topic_leave_no_garbage(running: Any, wire: Any) -> None:
    def count() -> int:
        return sum(type(each) is Partition for each in gc.get_objects())

    gc.collect()
    before = count()
    await wire.create_topic("t", 20)
    await until(lambda: count() == before + 20)
    gc.disable()
    try:
        request = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=60_000)
        assert (await wire.call(request, 6, DeleteTopicsResponse)).responses[0].error_code == 0
        await until(lambda: count() <= before)
    finally:
        gc.enable()


class World:
    """`FetchWakes` on a loop that turns when it is told to."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        self.callbacks = DeferredCallbacks(cast(Any, SimpleNamespace(call_soon=self.due.append)))
        self.wakes = FetchWakes(self.due.append, self.callbacks)
        self.segment = SimpleNamespace(size_bytes=0)
        self.waiting = WaitingFetches(lambda: cast(Any, self.segment))
        self.notified: list[int] = []

    def fetch(self, number: int) -> SessionPartition:
        session = FetchSession(0, False, 0)
        session.ask([(("t", 0), FetchPartition(partition=0))])
        session.wait(lambda: self.callbacks.defer(tell), lambda: None)

        def tell() -> None:
            self.notified.append(number)

        (entry,) = session.partitions.values()
        self.waiting.watch(entry)
        return entry

    def turn(self) -> None:
        due, self.due[:] = list(self.due), []
        for each in due:
            each()

    def turns(self) -> int:
        count = 0
        while self.due:
            self.turn()
            count += 1
        return count


def test_each_turn_tells_some_and_a_change_meanwhile_tells_all_again() -> None:
    world = World()
    for number in range(1000):
        world.fetch(number)
    world.wakes.appended(world.waiting)
    assert world.notified == []
    world.turn()
    assert world.notified == list(range(fetch_wakes.NOTIFIED_PER_TURN))
    world.wakes.appended(world.waiting)
    assert world.turns() >= 1950 // fetch_wakes.NOTIFIED_PER_TURN
    assert world.notified == [*range(1000)] * 2
    world.wakes.appended(world.waiting)
    assert world.turns() >= 20
    assert len(world.notified) == 3000


def test_many_partitions_do_not_add_up_in_one_turn() -> None:
    world = World()
    partitions = [WaitingFetches(lambda: cast(Any, world.segment)) for _ in range(100)]
    for waiting in partitions:
        world.waiting = waiting
        for number in range(50):
            world.fetch(number)
    for waiting in partitions:
        world.wakes.appended(waiting)
    world.turn()
    assert len(world.notified) <= fetch_wakes.AT_ONCE_MAX + fetch_wakes.NOTIFIED_PER_TURN
    world.turns()
    assert len(world.notified) == 5000


def test_those_that_take_any_record_do_not_wait_behind_the_patient_ones() -> None:
    world = World()
    for number in range(1000):
        world.waiting.tried_in_vain(world.fetch(number), UNKNOWN)
    world.fetch(-1)
    world.wakes.appended(world.waiting)
    world.turn()
    assert -1 in world.notified
    assert len(world.notified) <= 1 + fetch_wakes.NOTIFIED_PER_TURN
    world.turns()
    assert sorted(world.notified) == list(range(-1, 1000))


def test_sessions_of_which_no_fetch_waits_do_not_hold_up_one_that_waits() -> None:
    """A thousand that clients had left cost 24 turns of the loop for each record."""
    world = World()
    idle = [world.fetch(number) for number in range(1000)]
    for entry in idle:
        entry.session.waiters.clear()
        entry.session.dirty.clear()
    world.fetch(-1)
    world.wakes.appended(world.waiting)
    assert world.turns() == 1
    assert world.notified == [-1]
    assert all(entry.session.dirty for entry in idle), "their next fetch reads it"


def test_an_append_looks_at_no_session_that_has_marked_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand that clients had left cost each record two thirds of a millisecond."""
    world = World()
    for number in range(1000):
        world.fetch(number).session.waiters.clear()
    world.wakes.appended(world.waiting)
    world.fetch(-1)
    marked: list[SessionPartition] = []
    monkeypatch.setattr(SessionPartition, "changed", lambda entry: marked.append(entry))
    world.wakes.appended(world.waiting)
    assert len(marked) == 1
    assert len(world.waiting.fetches) == 1


async def test_the_next_fetch_of_a_session_reads_what_it_has_marked_and_waits_for_more(
    running: Any, wire: Any, make_batch: MakeBatch
) -> None:
    await wire.create_topic("t")
    other = await running.connect()
    answer = await other.call(fetch(1, wait_ms=0, session=(0, 0)), 11, FetchResponse)
    assert answer.session_id
    await append(wire, make_batch(b"a"))
    await append(wire, make_batch(b"b"))
    assert not waiting_of(running).fetches
    read = await other.call(fetch(1, session=(answer.session_id, 1)), 11, FetchResponse)
    assert read.responses[0].partitions[0].high_watermark == 2
    other.send(fetch(1, offset=2, session=(answer.session_id, 2)), 11)
    await until(lambda: any(entry.session.waiters for entry in waiting_of(running).fetches))
    await append(wire, make_batch(b"c"))
    woken = await asyncio.wait_for(other.receive(FetchResponse, 11), PATIENCE_S)
    assert woken.responses[0].partitions[0].high_watermark == 3


def test_the_least_need_begins_a_round_which_tells_only_those_whose_need_is_reached() -> None:
    world = World()
    segment = cast(Any, world.segment)
    for number in range(2000):
        world.waiting.tried_in_vain(world.fetch(number), Need(segment, 1000 + number))
    segment.size_bytes = 999
    world.wakes.appended(world.waiting)
    assert world.turns() == 0
    segment.size_bytes = 1001
    world.wakes.appended(world.waiting)
    world.turns()
    assert world.notified == [0, 1]
    assert world.waiting.least_need == Need(segment, 1002)
    world.segment = SimpleNamespace(size_bytes=0)  # the log has rolled
    world.wakes.appended(world.waiting)
    world.turns()
    assert len(world.notified) == 2002


def test_closed_and_forgotten_entries_are_not_told() -> None:
    world = World()
    entries = [world.fetch(number) for number in range(200)]
    world.wakes.appended(world.waiting)
    entries[60].session.forget([entries[60].key])
    world.waiting.unwatch(entries[60])
    world.turns()
    assert sorted(world.notified) == [each for each in range(200) if each != 60]
    assert entries[60].session.dirty == {}


def test_of_one_session_so_many_fetches_wait_at_most() -> None:
    session = FetchSession(7, False, 0)
    given_way: list[int] = []
    for number in range(1000):
        session.wait(lambda number=number: None, lambda number=number: given_way.append(number))  # type: ignore[misc]
    assert given_way == list(range(1000 - WAITERS_MAX))
    assert len(session.waiters) == WAITERS_MAX


async def test_waits_that_end_at_the_same_time_end_in_several_turns() -> None:
    loop = asyncio.get_running_loop()
    timer = DeadlineTimer(loop)
    ended: list[int] = []
    for number in range(1000):
        timer.add(0, lambda number=number: ended.append(number))  # type: ignore[misc]
    steps: list[int] = []
    while len(ended) < 1000:
        before = len(ended)
        await asyncio.sleep(0)
        steps.append(len(ended) - before)
    assert max(steps) <= timers.EXPIRED_PER_TURN
    assert ended == list(range(1000))
    timer.close()
