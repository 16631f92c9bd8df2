"""Who comes with one request waits a few milliseconds, however many others want however much.

Time is counted, not taken. The machine here charges for what is read and for what is served, and reads as libuv does:
a connection whose buffer was filled to the brim is read again, up to 32 times, before anybody else.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S as WAIT_S
from tests.unit.broker.test_connection import Owner, Transport, connect
from tidelog.broker.network.connection import TURN_REQUESTS_MAX, KafkaConnection
from tidelog.broker.network.receive_buffers import READ_S_PER_BYTE
from tidelog.broker.scheduling.fair_scheduler import (
    COSTLY_WAITS,
    LARGE_ANSWERS_MAX,
    LONG_TURN_S,
    QUEUE_S,
    REQUEST_BYTES_MAX,
    FairScheduler,
)
from tidelog.broker.scheduling.host_queue import REQUEST_HOST

PRODUCE, FETCH, METADATA, ALTER_PARTITION, HEARTBEAT = 0, 1, 3, 56, 63
COST_S = {PRODUCE: 10e-6, FETCH: 10e-6, METADATA: 150e-6, ALTER_PARTITION: 150e-6, HEARTBEAT: 150e-6}
READS_IN_A_ROW = 32
# All lines and what is read, each with as much as goes over its time at the most.
PATIENCE_S = 8 * (QUEUE_S + COST_S[METADATA]) + LONG_TURN_S + 500e-6


class Machine(Owner):
    """An owner whose clock moves by what is done, and the loop around it."""

    frame_bytes_max = 100_000_000

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = FairScheduler(self.due.append, lambda: self.now)
        self.clients: list[Client] = []
        self.served: list[KafkaConnection] = []
        self.served_at: dict[KafkaConnection, float] = {}

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        key = struct.unpack_from(">h", frame)[0]
        self.now += COST_S[key]
        self.served.append(connection)
        self.served_at[connection] = self.now
        if key > FETCH:
            self.scheduler.add_work(COST_S[key])  # as dispatch does
            return bytearray(b"answered")
        return b"answered"

    def turn(self) -> None:
        due, self.due[:] = self.due[:], []
        for callback in due:
            callback()
        for client in self.clients:
            client.read()


class Client:
    """`unsent` goes out as fast as the machine takes it; `flood` again and again."""

    def __init__(self, machine: Machine, unsent: bytes = b"", flood: bytes = b"") -> None:
        self.machine = machine
        self.flood = memoryview(flood)
        self.connection, self.transport = connect(machine)
        self.unsent = memoryview(unsent)
        machine.clients.append(self)

    def read(self) -> None:
        for _ in range(READS_IN_A_ROW):
            self.unsent = self.unsent or self.flood
            if not (self.unsent and self.transport.reading):
                break
            buffer = self.connection.get_buffer(-1)
            size = min(len(buffer), len(self.unsent))
            buffer[:size] = self.unsent[:size]
            self.unsent = self.unsent[size:]
            self.machine.now += size * READ_S_PER_BYTE
            self.connection.buffer_updated(size)
            if size < len(buffer):
                break

    @property
    def answers(self) -> int:
        return len(self.transport.written) // len(b"answered")


def request(key: int, size_bytes: int = 20) -> bytes:
    return struct.pack(">ih", size_bytes, key) + bytes(size_bytes - 2)


def longest_wait(machine: Machine, arrivals: int = 40, key: int = PRODUCE, *, is_known: bool = False) -> float:
    """Of a client that asks again and again, one request at a time, while the others do what they do."""
    victim = Client(machine)
    victim.connection.known_key = key if is_known else -1
    longest = 0.0
    for number in range(arrivals):
        began = machine.now
        victim.unsent = memoryview(request(key))
        while victim.answers <= number:
            machine.turn()
            assert machine.now - began < 1, "never served"
        longest = max(longest, machine.served_at[victim.connection] - began)
        machine.now += 100e-6
    return longest


@pytest.mark.parametrize("flood", [[PRODUCE], [METADATA], [PRODUCE, METADATA, METADATA]])
def test_one_request_is_served_soon_while_hundreds_send_as_many_as_they_can(flood: list[int]) -> None:
    machine = Machine()
    for number in range(300):
        Client(machine, flood=request(flood[number % len(flood)]) * 1000)
    for _ in range(20):
        machine.turn()  # all of them have come, and stand in line
    assert longest_wait(machine) < PATIENCE_S


def test_a_produce_does_not_wait_for_a_thousand_who_ask_at_the_same_moment() -> None:
    machine = Machine()
    for _ in range(1000):
        Client(machine, request(METADATA))
    assert longest_wait(machine) < PATIENCE_S
    for _ in range(400):
        machine.turn()
    assert all(client.answers for client in machine.clients)


@pytest.mark.parametrize(("others", "key"), [(METADATA, HEARTBEAT), (METADATA, FETCH), (HEARTBEAT, FETCH)])
def test_a_node_does_not_wait_for_thousands_of_clients(others: int, key: int) -> None:
    """Heartbeats waited behind 4,000 connections, each with one small request, and live brokers were fenced.

    The quorum's fetches do not wait for a stranger's heartbeats either: the lead would move.
    """
    machine = Machine()
    machine.keys_of_nodes = frozenset({FETCH, HEARTBEAT})
    for _ in range(1000):
        Client(machine, flood=request(others))
    for _ in range(20):
        machine.turn()
    assert longest_wait(machine, 20, key) < PATIENCE_S


@pytest.mark.parametrize("key", [FETCH, HEARTBEAT])
@pytest.mark.parametrize("others", [FETCH, HEARTBEAT, ALTER_PARTITION])
def test_the_requests_on_known_connections_do_not_wait_for_thousands_of_others(key: int, others: int) -> None:
    """4,000 connections fetched the metadata log: voters waited for four seconds, and the lead moved. 4,000 refused
    AlterPartitions of 15 KB each held up heartbeats for 29 s, and live brokers were fenced.

    Others may have places, and send as many requests as they can. Any number may be known in the other queue.
    """
    machine = Machine()
    machine.keys_of_nodes = frozenset({FETCH, HEARTBEAT, ALTER_PARTITION})
    for number in range(1000):
        client = Client(machine, flood=request(others) * (100 if others == FETCH or number < 2 else 1))
        if number < 2 or others != key:
            client.connection.known_key = key if others == ALTER_PARTITION else others
    for _ in range(20):
        machine.turn()
    assert longest_wait(machine, 20, key, is_known=True) < PATIENCE_S


@pytest.mark.parametrize(
    ("others", "others_bytes", "key", "size_bytes"),
    [
        (METADATA, 17_000, ALTER_PARTITION, 17_000),
        (ALTER_PARTITION, 17_000, HEARTBEAT, 20),
        (ALTER_PARTITION, 1_100, HEARTBEAT, 1_000),
    ],
)
def test_a_large_request_of_a_node_waits_neither_for_clients_nor_before_heartbeats(
    others: int, others_bytes: int, key: int, size_bytes: int
) -> None:
    machine = Machine()
    machine.keys_of_nodes = frozenset({ALTER_PARTITION, HEARTBEAT})
    for client in [Client(machine, flood=request(others, others_bytes)) for _ in range(400)]:
        client.connection._resize(32 * 1024)
    for _ in range(20):
        machine.turn()
    began = machine.now
    node = Client(machine, request(key, size_bytes))
    node.connection._resize(32 * 1024)
    while not node.answers:
        machine.turn()
        assert machine.now - began < PATIENCE_S


def test_a_connection_without_a_request_does_not_wait() -> None:
    """Its answer was complete in a long turn: it waited behind clients before its next heartbeat could be read."""
    machine = Machine()
    client = Client(machine)
    client.connection.rest()
    client.connection._resting = False
    machine.scheduler.is_turn_long = True
    client.connection._resume()
    assert client.transport.reading
    assert len(machine.scheduler) == 0


@pytest.mark.slow
def test_one_request_is_served_soon_while_many_send_large_ones() -> None:
    machine = Machine()
    half = request(PRODUCE, 64_000_000)[:20_000_000]
    for _ in range(20):
        Client(machine, half)
    assert longest_wait(machine, 400) < PATIENCE_S
    assert not any(client.unsent for client in machine.clients[:20])


@pytest.mark.slow
def test_who_stands_in_line_is_served_in_order() -> None:
    machine = Machine()
    clients = [Client(machine, request(PRODUCE) * 400) for _ in range(50)]
    for client in clients:
        client.connection._resize(16 * 1024)
    for _ in range(400):
        machine.turn()
        served = Counter(machine.served)
        counts = [served[client.connection] for client in clients]
        assert max(counts) - min(counts) <= 2 * TURN_REQUESTS_MAX, counts
    assert counts == [400] * 50


@pytest.mark.slow
def test_who_stands_in_line_is_served_though_others_come_without_end() -> None:
    machine = Machine()
    early = [Client(machine, request(METADATA) * 100) for _ in range(30)]
    for _ in range(1000):
        for client in [Client(machine, request(METADATA)) for _ in range(6)]:
            client.read()
        machine.clients[30:] = []
        machine.turn()
    assert [client.answers for client in early] == [100] * 30


def test_a_turn_ends_when_it_has_become_long() -> None:
    machine = Machine()
    client = Client(machine, request(METADATA) * TURN_REQUESTS_MAX)
    client.transport.reading = False
    client.connection._resize(16 * 1024)
    client.transport.reading = True
    machine.turn()
    at_first = client.answers
    assert 0 < at_first < TURN_REQUESTS_MAX
    machine.turn()
    assert (client.answers - at_first) * COST_S[METADATA] <= QUEUE_S + COST_S[METADATA]
    machine.turn()
    assert client.answers == TURN_REQUESTS_MAX


def test_a_host_with_one_large_request_waits_for_one_of_each_other_host() -> None:
    """It waited for 45 s behind those of 4,250 connections from one host."""
    due: list[Callable[[], None]] = []
    scheduler = FairScheduler(due.append)
    served: list[tuple[str, int]] = []

    def serve(host: str, number: int) -> None:
        assert scheduler.has_room
        served.append((host, number))
        scheduler.begin_request(REQUEST_BYTES_MAX)

    scheduler.begin_request(REQUEST_BYTES_MAX)
    for host, count in (("many", 4), ("two", 2), ("one", 1)):
        for number in range(count):
            scheduler.wait_for_room(partial(serve, host, number), host)
    assert not scheduler.has_room
    for _ in range(7):
        scheduler.end_request(REQUEST_BYTES_MAX)
        due.pop()()
    hosts = [("many", 0), ("two", 0), ("one", 0), ("many", 1), ("two", 1), ("many", 2), ("many", 3)]
    assert served == hosts
    scheduler.end_request(REQUEST_BYTES_MAX)
    assert scheduler.has_room


def test_large_requests_that_have_room_take_the_turns_of_their_hosts() -> None:
    """Those of all hosts shared one turn: beside a hundred hosts with small requests, each waited for a hundred."""
    due: list[Callable[[], None]] = []
    scheduler = FairScheduler(due.append)
    served: list[str] = []
    for _ in range(2):
        scheduler.begin_request(REQUEST_BYTES_MAX // 2)
    for host in ("one", "two"):
        scheduler.wait_for_room(partial(served.append, host), host)
    for host in "abc" * 2:
        scheduler.wait(partial(served.append, host), is_first=True, for_records=False, host=host)
    for _ in range(2):
        scheduler.end_request(REQUEST_BYTES_MAX // 2)
    due.pop()()
    assert served == ["a", "b", "c", "one", "two", "a", "b", "c"]


def test_where_no_time_passes_everybody_in_line_is_served_in_each_turn() -> None:
    due: list[Callable[[], None]] = []
    scheduler = FairScheduler(due.append)
    served: list[int] = []
    for number in range(500):
        scheduler.wait(partial(served.append, number), is_first=number % 5 == 0, for_records=bool(number % 2), host="")
    assert len(scheduler) == 500
    assert len(due) == 1
    due.pop()()
    assert served == sorted(range(500), key=lambda number: (number % 5 > 0, number % 2 == 0, number))
    assert not scheduler.is_turn_long
    assert not due


@pytest.mark.parametrize("key", [PRODUCE, METADATA, HEARTBEAT])
def test_costly_requests_of_two_hundred_connections_of_one_host_hold_no_other_host_up(
    key: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside 200 connections that produced 2,000 records in 2 KB each, another client had no answer for 2 s."""
    machine = Machine()
    monkeypatch.setattr(machine, "keys_of_nodes", frozenset({HEARTBEAT}))
    dispatch = machine.dispatch

    def costly(frame: memoryview, connection: KafkaConnection) -> Any:
        machine.now += 0.002
        machine.scheduler.add_work(0.002)
        return dispatch(frame, connection)

    monkeypatch.setattr(machine, "dispatch", costly)
    for _ in range(200):
        Client(machine, request(key))
    machine.turn()
    Client(machine, request(key))
    other = Client(machine, request(key))
    other.connection.host = "10.0.0.2"
    began = machine.now
    for _ in range(10):
        machine.turn()
    assert 0 < machine.served_at.get(other.connection, 0) - began < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("key", [PRODUCE, METADATA])
def test_nor_do_they_hold_up_who_asks_for_little_on_their_own_host(key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for 0.7 to 4.8 s: each of the two hundred was served before it."""
    machine = Machine()
    dispatch = machine.dispatch
    many = {Client(machine).connection for _ in range(200)}

    def costly(frame: memoryview, connection: KafkaConnection) -> Any:
        if connection in many:
            connection.costly_waits = COSTLY_WAITS  # as the dispatcher does
            machine.now += 0.002
            machine.scheduler.add_work(0.002)
        return dispatch(frame, connection)

    def ask_again() -> None:
        for client in machine.clients[:200]:
            if client.answers == machine.served.count(client.connection):
                client.unsent = client.unsent or memoryview(request(key))
        turn()

    turn = machine.turn
    monkeypatch.setattr(machine, "dispatch", costly)
    monkeypatch.setattr(machine, "turn", ask_again)
    for _ in range(300):
        machine.turn()
    assert longest_wait(machine, 10, key) < 0.02
    assert len({*machine.served[-300:]} & many) > 20  # those many are served as well


def test_who_fails_does_not_hold_up_the_line(caplog: pytest.LogCaptureFixture) -> None:
    due: list[Callable[[], None]] = []
    scheduler = FairScheduler(due.append)
    served: list[str] = []

    def fails() -> None:
        raise ValueError("a bug of ours")

    scheduler.wait(fails, is_first=True, for_records=True, host="")
    scheduler.wait(lambda: served.append("behind it"), is_first=True, for_records=True, host="")
    scheduler.wait(lambda: served.append("beside it"), is_first=False, for_records=False, host="")
    due.pop(0)()
    assert served == ["behind it", "beside it"]
    assert "a bug of ours" in caplog.text


def test_a_closed_connection_leaves_the_line_in_its_turn() -> None:
    machine = Machine()
    client = Client(machine, request(PRODUCE) * (TURN_REQUESTS_MAX + 5))
    client.connection._resize(16 * 1024)
    machine.turn()
    assert len(machine.scheduler) == 1
    client.connection.connection_lost(None)
    machine.turn()
    assert len(machine.scheduler) == 0
    assert len(machine.served) == TURN_REQUESTS_MAX


def test_a_stand_in_for_the_loop_is_no_more_than_that() -> None:
    """The tests above would say nothing if the machine's clock stood still."""
    machine = Machine()
    Client(machine, request(PRODUCE) * 10)
    machine.turn()
    assert machine.now == pytest.approx(10 * COST_S[PRODUCE] + 240 * READ_S_PER_BYTE)
    assert isinstance(cast(Any, machine.clients[0].transport), Transport)


async def test_one_coroutine_goes_on_in_a_turn_and_those_of_records_do_not_wait_for_others() -> None:
    loop = asyncio.get_running_loop()
    scheduler = FairScheduler(loop.call_soon)
    turn = 0
    steps: list[tuple[int, str]] = []

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count_turns)

    async def describe(number: int) -> None:
        await scheduler.begin()
        steps.append((turn, f"begins {number}"))
        await scheduler.pause()
        steps.append((turn, f"ends {number}"))

    async def inspect() -> None:
        for _ in range(3):
            await scheduler.pause(for_records=True)
            steps.append((turn, "records"))

    count_turns()
    tasks = [asyncio.create_task(describe(number)) for number in range(50)]
    tasks.append(asyncio.create_task(inspect()))
    await asyncio.sleep(0)
    tasks[7].cancel()
    await asyncio.wait(tasks, timeout=WAIT_S)
    others = [(at, name) for at, name in steps if name != "records"]
    numbers = [number for number in range(50) if number != 7]
    for step in ("begins", "ends"):
        assert [name for _, name in others if name.startswith(step)] == [f"{step} {number}" for number in numbers]
    assert max(Counter(at for at, _ in others).values()) == 1
    assert max(at for at, name in steps if name == "records") <= 8
    assert len(scheduler) == 0


@pytest.mark.parametrize("is_large", [False, True])
async def test_a_coroutine_of_one_host_waits_for_one_of_each_other_host(is_large: bool) -> None:
    """A DescribeConfigs and a CreateTopics waited for ten seconds behind 1,500 connections from one host."""
    scheduler = FairScheduler(asyncio.get_running_loop().call_soon)
    ended: list[str] = []

    async def describe(host: str) -> None:
        REQUEST_HOST.set(host)
        if is_large:
            await scheduler.begin_large_answer()
            await asyncio.sleep(0)
            scheduler.end_large_answer()
        else:
            await scheduler.begin()
            await scheduler.pause()
        ended.append(host)

    tasks = [asyncio.create_task(describe(host)) for host in ["many"] * 40 + ["two"] * 2 + ["one"]]
    await asyncio.wait(tasks, timeout=WAIT_S)
    assert ended.index("one") < 2 * LARGE_ANSWERS_MAX
    assert len(ended) - 1 - ended[::-1].index("two") < 3 * LARGE_ANSWERS_MAX
    assert len(scheduler) == scheduler._large_answers == 0
