"""The loop stays awake for a short answer, and only then: where the last answer says nothing of the next, it sleeps."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_producer import producer, values
from tidelog.client.producing import busy_poll
from tidelog.client.producing.busy_poll import BusyPoll

LIMIT_US = 300


class Clock:
    """The seconds that `busy_poll` sees. Each look moves it by a microsecond, so that no turn lasts for ever."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.step_s = 1e-6

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(busy_poll, "monotonic", clock)
    return clock


class Turns:
    """Counts the turns that a loop keeps awake by itself: `call_soon` of the one callback."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.count = 0

    def call_soon(self, callback, *arguments):
        self.count += 1
        return self.loop.call_soon(callback, *arguments)

    def create_future(self) -> asyncio.Future[None]:
        return self.loop.create_future()


async def call(polling: BusyPoll, turns: Turns, clock: Clock, wait_us: float, turn_count: int = 5) -> int:
    """One call with an answer after `turn_count` turns and `wait_us`. How many turns were kept awake for it."""
    before = turns.count
    future = turns.create_future()
    polling.begin(future, turns, clock())  # type: ignore[arg-type]
    for _ in range(turn_count):
        await asyncio.sleep(0)
    clock.now_s += wait_us / 1e6
    await asyncio.sleep(0)
    future.set_result(None)
    polling.end(future)
    return turns.count - before


async def test_only_a_call_after_a_short_answer_keeps_the_loop_awake(clock: Clock) -> None:
    polling, turns = BusyPoll(LIMIT_US), Turns()
    assert await call(polling, turns, clock, 100) == 0
    assert await call(polling, turns, clock, 100) >= 5
    assert await call(polling, turns, clock, 100) >= 5


async def test_an_answer_that_is_late_after_short_ones_keeps_the_loop_awake_for_the_limit_alone(clock: Clock) -> None:
    polling, turns = BusyPoll(LIMIT_US), Turns()
    await call(polling, turns, clock, 100)
    assert 5 <= await call(polling, turns, clock, 2 * LIMIT_US) <= 7
    assert await call(polling, turns, clock, 2 * LIMIT_US) == 0
    assert await call(polling, turns, clock, 100) == 0
    assert await call(polling, turns, clock, 100) >= 5


async def test_an_answer_that_never_comes_keeps_the_loop_awake_for_the_limit_alone(clock: Clock) -> None:
    polling, turns = BusyPoll(LIMIT_US), Turns()
    await call(polling, turns, clock, 100)
    polling.begin(turns.create_future(), turns, clock())  # type: ignore[arg-type]
    for _ in range(10 * LIMIT_US):
        await asyncio.sleep(0)
    assert turns.count <= LIMIT_US + 1  # the first turn looks at no clock


async def test_a_cancelled_call_ends_it_and_the_next_one_sleeps(clock: Clock) -> None:
    polling, turns = BusyPoll(LIMIT_US), Turns()
    await call(polling, turns, clock, 100)
    future = turns.create_future()
    polling.begin(future, turns, clock())  # type: ignore[arg-type]
    future.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert turns.count == 1
    assert await call(polling, turns, clock, 100) == 0
    assert await call(polling, turns, clock, 100) >= 5


async def test_of_calls_that_wait_together_one_is_watched(clock: Clock) -> None:
    polling, turns = BusyPoll(LIMIT_US), Turns()
    await call(polling, turns, clock, 100)
    first, second = turns.create_future(), turns.create_future()
    polling.begin(first, turns, clock())  # type: ignore[arg-type]
    polling.begin(second, turns, clock())  # type: ignore[arg-type]
    assert turns.count == 1
    second.set_result(None)
    polling.end(second)
    await asyncio.sleep(0)
    assert turns.count == 2
    first.set_result(None)
    polling.end(first)
    await asyncio.sleep(0)
    assert turns.count == 2


async def test_a_call_beside_the_watched_one_is_not_measured(clock: Clock) -> None:
    polling, turns = BusyPoll(LIMIT_US), Turns()
    first = turns.create_future()
    polling.begin(first, turns, clock())  # type: ignore[arg-type]
    for _ in range(2):  # short ones, while the first waits
        assert await call(polling, turns, clock, 100) == 0
    clock.now_s += LIMIT_US / 1e6
    assert await call(polling, turns, clock, 0) == 0
    first.set_result(None)
    polling.end(first)
    assert await call(polling, turns, clock, 100) == 0  # the watched one was late
    assert await call(polling, turns, clock, 100) >= 5


async def test_a_limit_of_zero_never_keeps_the_loop_awake(clock: Clock) -> None:
    polling, turns = BusyPoll(0), Turns()
    clock.step_s = 0  # an answer as short as the clock can tell
    for _ in range(3):
        assert await call(polling, turns, clock, 0) == 0


async def test_each_turn_gives_the_processor_to_others(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker may wait for it."""
    given: list[None] = []
    monkeypatch.setattr(busy_poll, "yield_processor", lambda: given.append(None))
    polling, turns = BusyPoll(LIMIT_US), Turns()
    await call(polling, turns, clock, 100)
    assert not given
    turns_kept_awake = await call(polling, turns, clock, 100)
    assert len(given) == turns_kept_awake - 1  # not the first one, in which the request is written


async def test_a_call_is_prompt_when_it_took_little_time_since_its_begin(clock: Clock) -> None:
    polling, turns = BusyPoll(LIMIT_US), Turns()
    assert not polling.last_was_prompt
    for wait_us, is_prompt in ((150, True), (250, False), (150, True), (2 * LIMIT_US, False), (150, True)):
        await call(polling, turns, clock, wait_us)
        assert polling.last_was_prompt is is_prompt
    future = turns.create_future()
    polling.begin(future, turns, clock() - 250e-6)  # type: ignore[arg-type]
    assert not polling.last_was_prompt, "while it waits nothing is known"
    polling.end(future)
    assert not polling.last_was_prompt


async def test_a_call_is_not_prompt_when_another_began_meanwhile(clock: Clock) -> None:
    polling, turns = BusyPoll(LIMIT_US), Turns()
    first, second = turns.create_future(), turns.create_future()
    polling.begin(first, turns, clock())  # type: ignore[arg-type]
    polling.begin(second, turns, clock())  # type: ignore[arg-type]
    polling.end(first)
    assert not polling.last_was_prompt
    await call(polling, turns, clock, 100)
    assert polling.last_was_prompt


async def test_a_cancelled_call_leaves_no_prompt_one_behind(clock: Clock) -> None:
    polling, turns = BusyPoll(LIMIT_US), Turns()
    await call(polling, turns, clock, 100)
    future = turns.create_future()
    polling.begin(future, turns, clock())  # type: ignore[arg-type]
    future.cancel()
    assert not polling.last_was_prompt


@pytest.mark.parametrize(("limit_us", "is_kept_awake"), [(LIMIT_US, True), (0, False)])
async def test_a_producer_keeps_its_loop_awake_by_its_option(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, limit_us: int, is_kept_awake: bool
) -> None:
    started: list[asyncio.Future[None]] = []
    keep_awake = BusyPoll._keep_awake

    def count(self: BusyPoll, future: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        started.append(future)
        keep_awake(self, future, loop)

    monkeypatch.setattr(BusyPoll, "_keep_awake", count)
    async with FakeCluster(t=1) as cluster, producer(cluster, busy_poll_us=limit_us) as sending:
        for value in (b"1", b"2", b"3"):
            await sending.send_and_wait("t", value)
        await (await sending.send("t", b"4"))
        assert values(cluster) == [b"1", b"2", b"3", b"4"]
    assert len(set(started)) == (2 if is_kept_awake else 0)
