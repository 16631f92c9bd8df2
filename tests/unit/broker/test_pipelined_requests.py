"""Requests that are in the buffer at the same time may be handled together: their answers are those of each alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from struct import Struct
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.patience import until
from tests.unit.broker.conftest import RunningNode, StartNode, Wire
from tests.unit.broker.test_connection import Owner, connect, feed, framed
from tests.unit.broker.test_node import fetch, fetched, hold_flushes, produce, produced
from tests.unit.storage.batches import NOW, batch, idempotent
from tidelog.broker.apis.records import produce as produce_api
from tidelog.broker.apis.records.produce import VERSIONS
from tidelog.broker.network.connection import IN_FLIGHT_MAX, UNPIPELINED_READS, KafkaConnection
from tidelog.broker.replicas.partitions import Partitions
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.protocol import hot
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.hot import decode_one_produce
from tidelog.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicsResponse, DeleteTopicState
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.produce import ProduceRequest, ProduceResponse
from tidelog.replication.partition import Partition


class Pipelining(Owner):
    """Handles at most `counts` requests together, time after time, as long as they may be; -1: they never can be."""

    def __init__(self, counts: Iterator[int]) -> None:
        super().__init__()
        self.counts = counts
        self.together: list[int] = []
        self.dispatch_pipelined = self._pipelined

    def _pipelined(self, frames: Sequence[memoryview], connection: KafkaConnection) -> list[Any] | None:
        answers: list[Any] = []
        assert len(frames) > 1
        count = next(self.counts, 0)
        if count < 0:  # requests of another kind
            self.together.append(0)
            return None
        for frame in frames[:count]:
            if bytes(frame[:1]) not in (b"a", b"p"):
                break
            answers.append(self.dispatch(frame, connection))
        self.together.append(len(answers))
        return answers


requests = st.lists(
    st.builds(
        lambda kind, size, number: kind + b"%03d" % number + bytes(size),
        st.sampled_from([b"a", b"a", b"p", b"l", b"n", b"e"]),
        st.sampled_from([20, 100, 200, 9000]),
        st.integers(0, 999),
    ),
    max_size=12,
    unique_by=lambda frame: frame[:4],
)


@given(requests, st.lists(st.integers(-1, 8)), st.lists(st.integers(1, 3000), max_size=20), st.randoms())
def test_answers_are_those_of_each_alone(frames: list[bytes], counts: list[int], sizes: list[int], rng: Any) -> None:
    written = []
    order = rng.sample(frames, len(frames))
    for owner in (Owner(), Pipelining(iter(counts))):
        connection, transport = connect(owner)
        data = framed(*frames)
        pieces = list(sizes)
        for _ in range(len(frames) + 1):
            fed = min(pieces.pop(0) if pieces else len(data), len(data))
            feed(connection, transport, data[:fed])
            data = data[fed:]
        for _ in frames:  # a request that the others wait for lets the next ones in
            for frame in order:
                deferred = owner.parked.pop(frame, None)
                if deferred is not None:
                    deferred.complete(b"<%b>" % frame[:4])
            owner.turn()
        assert owner.frames == frames[: len(owner.frames)]
        written.append(transport.written)
    assert written[0] == written[1]


def test_all_that_were_read_are_handled_together_and_answered_with_one_write() -> None:
    owner = Pipelining(iter([99]))
    connection, transport = connect(owner)
    feed(connection, transport, framed(*[b"a%07d" % number + bytes(100) for number in range(8)]))
    assert owner.together == [8]
    assert transport.writes == 1


def test_a_connection_without_such_requests_is_asked_now_and_then() -> None:
    """Looking for them costs more than a small request where there are none."""
    owner = Pipelining(iter([-1] * 3 + [99]))
    connection, transport = connect(owner)
    data = framed(*[b"a%07d" % number + bytes(100) for number in range(3)])
    for _ in range(3 * (UNPIPELINED_READS + 1)):
        feed(connection, transport, data)
    assert owner.together == [0, 0, 0]
    feed(connection, transport, data)
    assert owner.together == [0, 0, 0, 3]
    assert len(owner.frames) == 3 * 3 * (UNPIPELINED_READS + 1) + 3


def test_one_attempt_that_fails_is_followed_by_the_next() -> None:
    """Requests for partitions in turn cannot be handled together, and others of the same connection can."""
    owner = Pipelining(iter([0, 0, 99]))
    connection, transport = connect(owner)
    for _ in range(3):
        feed(connection, transport, framed(*[b"a%07d" % number + bytes(100) for number in range(3)]))
    assert owner.together == [0, 0, 3]


def test_no_more_than_a_turn_has_are_handled_together() -> None:
    owner = Pipelining(iter([99] * 9))
    connection, _ = connect(owner)
    connection._resize(1 << 16)
    data = framed(*[b"a%07d" % number + bytes(100) for number in range(40)])
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))
    assert owner.together == [16]
    owner.turn()
    assert owner.together == [16, 16, 8]


def test_no_more_wait_than_without() -> None:
    owner = Pipelining(iter([99] * 999))
    connection, transport = connect(owner)
    frames = [b"p%07d" % number + bytes(50) for number in range(IN_FLIGHT_MAX + 10)]
    feed(connection, transport, framed(*frames))
    assert len(owner.frames) == IN_FLIGHT_MAX
    assert not transport.reading


def test_a_request_above_the_limit_of_its_size_closes_the_connection() -> None:
    owner = Pipelining(iter([99]))
    owner.frame_bytes_max = 150
    connection, transport = connect(owner)
    feed(connection, transport, framed(b"a1" + bytes(100), b"a2" + bytes(100), b"a3" + bytes(200)))
    assert [frame[:2] for frame in owner.frames] == [b"a1", b"a2"]
    assert transport.closed


def test_those_that_the_last_one_needs_are_called_before_it_is_parked() -> None:
    owner = Pipelining(iter([99]))
    owner.callbacks = DeferredCallbacks(cast(Any, SimpleNamespace(call_soon=owner.due.append)))
    calls: list[int] = []
    connection, transport = connect(owner)
    owner.callbacks.defer(lambda: calls.append(len(connection._pending)))
    feed(connection, transport, framed(*[b"p%07d" % number + bytes(100) for number in range(4)]))
    assert owner.together == [4]
    assert calls == [3]


# ------------------------------------------------------------------------------------------------------- on a node


VERSION = 12
PRODUCE_HEAD = Struct(">hhih")
CLIENT: Any = SimpleNamespace(listener_name="PLAINTEXT", host="", produce_topic_at=0)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many batches each call has appended together."""
    together: list[int] = []
    whole = Partitions.append_pipelined

    def append_pipelined(self: Partitions, *arguments: Any) -> Any:
        appended = whole(self, *arguments)
        together.append(len(appended))
        return appended

    with monkeypatch.context() as patched:
        patched.setattr(Partitions, "append_pipelined", append_pipelined)
        yield together


async def ask(wire: Wire, asked: Sequence[ProduceRequest]) -> list[tuple[int, int]]:
    """The (error, base offset) of each request; all are sent at once."""
    first = wire.send(asked[0], VERSION)
    for request in asked[1:]:
        wire.send(request, VERSION)
    answers = []
    for number in range(len(asked)):
        answers += produced(await wire.receive(ProduceResponse, VERSION))
        assert wire.last_correlation_id == first + number
    return answers


@pytest.mark.parametrize("acks", [-1, 1])
async def test_pipelined_produces_are_appended_together(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch, acks: int
) -> None:
    await wire.create_topic("t", 2)
    asked = [produce("t", bytes(batch(2)), acks=acks) for _ in range(10)]
    node: Any = running.node
    counters = node._services.requests.produce
    with counted(monkeypatch) as together:
        assert await ask(wire, asked[:1]) == [(0, 0)]
        assert await ask(wire, asked[1:]) == [(0, 2 * number) for number in range(1, 10)]
    assert sum(together) >= 8, "only the first of a read may go alone"
    assert counters.versions[VERSION] == sum(counters.durations.counts) == 10
    traffic = node._broker.partitions.traffic["t"]
    assert (traffic.records_in, traffic.bytes_in) == (20, 10 * len(batch(2)))


async def test_a_request_like_an_earlier_one_is_not_decoded_again(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t", 2)
    await wire.create_topic("another", 1)
    node: Any = running.node
    decoded: list[Any] = []
    monkeypatch.setattr(hot, "_known_heads", {})  # another test may have sent the same

    def decode_one(*arguments: Any) -> Any:
        decoded.append(decode_one_produce(*arguments))
        return decoded[-1]

    monkeypatch.setattr(produce_api, "decode_one_produce", decode_one)
    for name in ("t", "another", "t", "another"):
        await ask(wire, [produce(name, bytes(batch(2)))])
    assert len(decoded) == 2
    # Neither a request of another kind nor a refusal between them changes an answer.
    assert await ask(wire, [produce("t", bytes(batch()), bytes(batch()))]) == [(0, 4), (0, 0)]
    assert await ask(wire, [produce("t", bytes(idempotent(0, transactional=True)))]) == [(53, -1)]
    assert len(fetched(await wire.call(fetch("t"), 12, FetchResponse))) == 5
    assert await ask(wire, [produce("t", bytes(batch()))]) == [(0, 5)]
    assert await ask(wire, [produce("t", bytes(batch())[:-1])]) == [(87, -1)]
    assert await ask(wire, [produce("t", bytes(batch()))]) == [(0, 6)]
    await wire.call(DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=5000), 6, DeleteTopicsResponse)
    assert await ask(wire, [produce("t", bytes(batch()))]) == [(3, -1)]
    counters = node._services.requests.produce
    assert counters.versions[VERSION] == sum(counters.durations.counts) == 10


async def test_an_append_looks_at_whatever_waits_for_it(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t", 1)
    node: Any = running.node
    partitions = node._broker.partitions
    partition = partitions.find("t", 0)
    watch, durability = partition.watch, partition.log.durability
    partition.log.flush()  # the first record would wait for it
    looked: list[Any] = []
    monkeypatch.setattr(Partitions, "_appended", lambda *arguments: looked.append(arguments))

    def looks() -> bool:
        looked.clear()
        partitions.append(partition, batch(), NOW, 1)
        return len(looked) == 1

    assert not looks()
    for waiting in (watch.followers, watch.fetches):
        waiting[None] = None
        assert looks()
        waiting.clear()
    for waiting in (watch.produces.waiting, watch.writes.waiting):
        waiting.append((1000, None))
        assert looks()
        waiting.clear()
    for name, value in (("is_wanted", True), ("blocked_from", 0)):
        usual = getattr(durability, name)
        setattr(durability, name, value)
        assert looks()
        setattr(durability, name, usual)
    assert not looks()


@pytest.mark.parametrize("transactional_id", [None, "tx"])
async def test_a_transaction_says_that_its_requests_are_of_another_kind(
    running: RunningNode, wire: Wire, transactional_id: str | None
) -> None:
    await wire.create_topic("t", 1)
    node: Any = running.node
    dispatcher = node._dispatchers[-1]
    request = produce("t", bytes(batch()))
    request.transactional_id = transactional_id
    body = bytearray()
    request.write(body, VERSION)
    frames = [memoryview(bytearray(PRODUCE_HEAD.pack(0, VERSION, number, -1) + b"\0" + body)) for number in range(2)]
    answers = dispatcher.dispatch_pipelined(frames, CLIENT)
    assert (answers is None) == (transactional_id is not None)
    frames = [memoryview(PRODUCE_HEAD.pack(18, 3, number, -1) + bytes(20)) for number in range(2)]
    assert dispatcher.dispatch_pipelined(frames, CLIENT) is None


@pytest.mark.parametrize("version", [VERSIONS.stop, 32767])
async def test_a_version_that_is_not_served_appends_nothing(running: RunningNode, version: int) -> None:
    wire = await running.connect()
    topic_id = await wire.create_topic("t", 1)
    await ask(wire, [produce("t", bytes(batch()))])
    node: Any = running.node
    request, body = produce("t", bytes(batch())), bytearray()
    request.topic_data[0].topic_id = topic_id
    request.write(body, VERSIONS[-1])
    head = PRODUCE_HEAD.pack(0, version, 1, -1)
    frames = [memoryview(bytearray(head + b"\0" + body)) for _ in range(2)]
    assert node._dispatchers[-1].dispatch_pipelined(frames, CLIENT) == []
    wire.writer.write(framed(*map(bytes, frames)))
    assert await wire.reader.read() == b""
    assert node._broker.partitions.find("t", 0).log.log_end_offset == 1


async def test_one_that_is_refused_or_repeated_does_not_harm_the_others(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t", 1)
    damaged = bytearray(batch())
    damaged[-1] ^= 1
    other = bytes(batch(value=b"other"))
    asked = [bytes(batch()), bytes(batch()), other, bytes(damaged), bytes(batch()), bytes(batch(3)), other]
    assert await ask(wire, [produce("t", bytes(batch()))]) == [(0, 0)]
    with counted(monkeypatch) as together:
        answers = await ask(wire, [produce("t", each) for each in asked])
        assert answers == [(0, 1), (0, 2), (0, 3), (2, -1), (0, 4), (0, 5), (0, 8)]
        sequenced = [bytes(idempotent(number)) for number in (0, 1, 2, 2, 3, 5, 4)]
        answers = await ask(wire, [produce("t", each) for each in sequenced])
    assert answers == [(0, 9), (0, 10), (0, 11), (0, 11), (0, 12), (45, -1), (0, 13)]
    assert sum(together) > 3


async def test_clients_may_not_write_to_internal_topics(running: RunningNode, wire: Wire) -> None:
    await wire.create_topic("__consumer_offsets", cleanup_policy="delete")
    node: Any = running.node
    node._broker.partitions.find("__consumer_offsets", 0).append_as_leader(batch(), NOW)
    answers = await ask(wire, [produce("__consumer_offsets", bytes(batch())) for _ in range(3)])
    assert answers == [(ErrorCode.INVALID_TOPIC_EXCEPTION, -1)] * 3


async def test_they_are_refused_while_too_few_replicas_are_in_sync(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.create_topic("t", 1)
    await ask(wire, [produce("t", bytes(batch()))])
    node: Any = running.node
    partition = node._broker.partitions.find("t", 0)
    partition.min_insync_replicas = 2
    monkeypatch.setattr(Partition, "is_under_min_isr", True)
    answers = await ask(wire, [produce("t", bytes(batch()), acks=acks) for acks in (-1, -1, -1, 1, 1)])
    assert answers == [(ErrorCode.NOT_ENOUGH_REPLICAS, -1)] * 3 + [(0, 1), (0, 2)]


@pytest.mark.parametrize("acks", [-1, 1])
async def test_they_wait_for_the_followers(running: RunningNode, wire: Wire, acks: int) -> None:
    await wire.create_topic("t", 1)
    await ask(wire, [produce("t", bytes(batch()))])
    node: Any = running.node
    partition = node._broker.partitions.find("t", 0)
    partition.awaits_followers = True
    asking = asyncio.gather(ask(wire, [produce("t", bytes(batch()), acks=acks) for _ in range(5)]))
    await until(lambda: partition.log.log_end_offset == 6)
    if acks == -1:
        assert len(partition.watch.produces.waiting) == 5
        assert partition.log.high_watermark == 1
        partition.awaits_followers = False
        partition.advance_high_watermark()
    (answers,) = await asking
    assert answers == [(0, number) for number in range(1, 6)]


async def test_they_wait_for_the_device_and_are_answered_in_order(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_node(**{"log.flush.interval.messages": "4"})
    node: Any = running.node
    wire = await running.connect()
    await wire.create_topic("t", 1)
    await ask(wire, [produce("t", bytes(batch()))])
    gate = hold_flushes(monkeypatch)
    with counted(monkeypatch) as together:
        asking = asyncio.gather(ask(wire, [produce("t", bytes(batch())) for _ in range(12)]))
        log = node._broker.partitions.find("t", 0).log
        await until(lambda: log.log_end_offset == 13)
        assert log.high_watermark < 13
        assert not asking.done()
        gate.set()
        (answers,) = await asking
    assert answers == [(0, number) for number in range(1, 13)]
    assert sum(together) > 1
    counters = node._services.requests.produce
    assert counters.versions[VERSION] == sum(counters.durations.counts) == 13


async def test_a_fetch_that_waits_is_answered_by_them(running: RunningNode, wire: Wire) -> None:
    await wire.create_topic("t", 1)
    await ask(wire, [produce("t", bytes(batch()))])
    reader = await running.connect()
    reader.send(fetch("t", 1, wait_ms=30_000), 12)
    await ask(reader_of := await running.connect(), [produce("t", bytes(batch(value=b"%d" % n))) for n in range(3)])
    assert reader_of.last_correlation_id == 3
    assert fetched(await reader.receive(FetchResponse, 12))[:1] == [b"0"]
