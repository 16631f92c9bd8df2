"""A record that is sent directly is in the log as any other, once and in order, whatever comes instead of the answer.

The brokers run in a thread of their own, because a direct send does not let the test's event loop run.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import DROP, FakeCluster, FakeNode, refuse_produce, then
from tests.unit.client.test_admin import served
from tests.unit.client.test_producer import FAST, handled, numbered, values
from tests.unit.client.test_sync_fork import in_child
from tidelog.client import Producer, RecordMetadata
from tidelog.client.config import ProducerConfig
from tidelog.client.network.connection import Connection
from tidelog.client.producing import busy_poll, direct_send
from tidelog.client.producing.accumulator import RECORD_OVERHEAD_BYTES
from tidelog.client.producing.busy_poll import BusyPoll
from tidelog.client.producing.direct_send import DirectSend, allows_direct_sends
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.produce import ProduceRequest

ALWAYS_S = 1e9


class Outcomes(list[str]):
    """What became of each direct send: "answered", "in flight" or "refused"."""

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        send = DirectSend.send

        def note(direct: DirectSend, *arguments: Any) -> Any:
            place = send(direct, *arguments)
            in_flight_or_refused = "refused" if place is None else "in flight"
            self.append("answered" if isinstance(place, RecordMetadata) else in_flight_or_refused)
            return place

        monkeypatch.setattr(DirectSend, "send", note)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Outcomes:
    outcomes = Outcomes()
    outcomes.patch(monkeypatch)
    return outcomes


@pytest.fixture(autouse=True)
def every_answer_is_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "PROMPT_S", ALWAYS_S)


@asynccontextmanager
async def producing(cluster: FakeCluster, *, waits_s: float = PATIENCE_S, **options: Any) -> AsyncIterator[Producer]:
    """A producer that waits so long for the answer of a direct send."""
    async with Producer(bootstrap_servers=cluster.bootstrap, **FAST, **options) as sending:
        if sending._direct_send is not None:
            sending._direct_send._exchange_s = waits_s
        yield sending


async def test_a_call_after_a_prompt_one_is_sent_directly(outcomes: Outcomes) -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            places = [await sending.send_and_wait("t", value) for value in numbered(20)]
        assert [place.offset for place in places] == list(range(20))
        assert outcomes == ["answered"] * 19
        assert values(cluster) == numbered(20)


async def test_the_requests_and_totals_are_those_of_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys, without, to partitions that are named and that are chosen, and over the bytes of several turns."""
    monkeypatch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)
    seen = []
    for busy_poll_us in (0, 1000):
        with served(t=5, other=1) as cluster:
            async with producing(cluster, busy_poll_us=busy_poll_us, batch_size=2_000) as sending:
                sending._rng.seed(7)
                for number, value in enumerate(numbered(60)):
                    partition = number % 5 if number % 3 == 1 else None
                    key = b"key %d" % (number % 11) if number % 3 == 2 else None
                    place = await sending.send_and_wait("t", value * 100, key, partition=partition)
                    assert place.timestamp_ms == 1_700_000_000_000
                await sending.send_and_wait("other", b"")
                totals = sending.metrics()
            seen.append(
                (cluster.sent(ProduceRequest), replace(totals, request_latency_avg_ms=0, request_latency_max_ms=0))
            )
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 61


async def test_a_record_never_passes_another(outcomes: Outcomes) -> None:
    """A record that waits for its batch, or for its answer, goes first."""
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            first = await sending.send("t", b"1")
            await sending.send_and_wait("t", b"2")
            await first
            second = await sending.send("t", b"3")
            await asyncio.sleep(0)  # it is in flight
            await sending.send_and_wait("t", b"4")
            await second
        assert values(cluster) == numbered(5)
        assert outcomes == ["refused"] * 2


ANSWERS: list[tuple[str, Callable[[], Any]]] = [
    ("another leader", lambda: refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER)),
    ("no other replica", lambda: refuse_produce(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, append=True)),
    ("a cut connection", lambda: lambda request, node: DROP),
    ("a cut connection after the append", lambda: then(handled, DROP)),
]


@pytest.mark.parametrize("answer", [answer for _, answer in ANSWERS], ids=[name for name, _ in ANSWERS])
async def test_a_record_without_the_usual_answer_is_sent_again_and_is_there_once(
    outcomes: Outcomes, answer: Callable[[], Any]
) -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            for value in numbered(3):
                await sending.send_and_wait("t", value)
            cluster.script(ProduceRequest, answer())
            assert (await sending.send_and_wait("t", b"3")).offset == 3
            assert outcomes == ["answered", "answered", "in flight"]
            assert sending.metrics().record_retry_total == 1
            await sending.send_and_wait("t", b"4")
            await sending.send_and_wait("t", b"5")
        assert values(cluster) == numbered(6)
        assert outcomes[-1] == "answered"


async def test_an_error_that_is_final_is_raised(outcomes: Outcomes) -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            cluster.script(ProduceRequest, refuse_produce(ErrorCode.MESSAGE_TOO_LARGE))
            with pytest.raises(Exception, match="MESSAGE_TOO_LARGE"):
                await sending.send_and_wait("t", b"lost")
            await sending.send_and_wait("t", b"1")
        assert outcomes[0] == "in flight"
        assert values(cluster) == numbered(2)


def after_a_while(request: Any, node: FakeNode) -> Awaitable[Any]:
    async def answer() -> Any:
        await asyncio.sleep(0.05)
        return node.on_produce(request)

    return answer()


async def test_a_late_answer_is_awaited_while_the_loop_runs(outcomes: Outcomes) -> None:
    with served(t=1) as cluster:
        async with producing(cluster, waits_s=0.001) as sending:
            await sending.send_and_wait("t", b"0")
            cluster.script(ProduceRequest, after_a_while)
            turns = 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0.001)

            counting = asyncio.ensure_future(count())
            assert (await sending.send_and_wait("t", b"1")).offset == 1
            counting.cancel()
            assert turns > 2
        assert outcomes == ["in flight"]
        assert values(cluster) == numbered(2)


async def test_a_throttled_producer_waits_as_it_is_asked(outcomes: Outcomes) -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")

            def throttle(request: Any, node: FakeNode) -> Any:
                answer: Any = node.on_produce(request)
                answer.throttle_time_ms = 100
                return answer

            cluster.script(ProduceRequest, throttle)
            await sending.send_and_wait("t", b"1")
            started_s = asyncio.get_running_loop().time()
            await sending.send_and_wait("t", b"2")
            assert asyncio.get_running_loop().time() - started_s > 0.05
        assert outcomes == ["in flight", "refused"]
        assert values(cluster) == numbered(3)


@pytest.mark.parametrize("codec", ["none", "gzip"])
async def test_the_memory_of_a_record_in_flight_is_counted_and_given_back(outcomes: Outcomes, codec: str) -> None:
    with served(t=1) as cluster:
        async with producing(cluster, waits_s=0.001, compression_type=codec) as sending:
            await sending.send_and_wait("t", b"0")
            free_bytes = sending.metrics().buffer_available_bytes
            cluster.script(ProduceRequest, after_a_while)
            waiting = asyncio.ensure_future(sending.send_and_wait("t", b"1234", b"key"))
            await until(lambda: "in flight" in outcomes)
            assert sending._accumulator.opened_batch_count == 2, "each batch has a number of its own"
            totals = sending.metrics()
            assert totals.incomplete_batches == totals.requests_in_flight == 1
            assert free_bytes - totals.buffer_available_bytes == 7 + RECORD_OVERHEAD_BYTES
            await waiting
            totals = sending.metrics()
            assert totals.buffer_available_bytes == free_bytes
            assert totals.byte_total == sum(
                len(bytes(data.records or b""))
                for request in cluster.sent(ProduceRequest)
                for topic in request.topic_data
                for data in topic.partition_data
            )


async def test_the_time_of_a_direct_send_counts_for_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is not prompt because the rest of its wait was short."""
    waited_s: list[float] = []
    begin = BusyPoll.begin

    def note(polling: BusyPoll, future: Any, loop: Any, started_s: float) -> None:
        waited_s.append(time.monotonic() - started_s)
        begin(polling, future, loop, started_s)

    monkeypatch.setattr(BusyPoll, "begin", note)
    with served(t=1) as cluster:
        async with producing(cluster, waits_s=0.01) as sending:
            await sending.send_and_wait("t", b"0")
            cluster.script(ProduceRequest, after_a_while)
            await sending.send_and_wait("t", b"1")
    assert waited_s[1] >= 0.01


async def test_the_time_of_the_append_is_the_records_where_the_topic_says_so(outcomes: Outcomes) -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")

            def stamped(request: Any, node: FakeNode) -> Any:
                answer: Any = node.on_produce(request)
                answer.responses[0].partition_responses[0].log_append_time_ms = 5
                return answer

            cluster.script(ProduceRequest, stamped)
            assert (await sending.send_and_wait("t", b"1")).timestamp_ms == 5
        assert outcomes == ["answered"]


async def test_a_new_leader_gets_the_next_record(outcomes: Outcomes) -> None:
    with served(nodes=2, t=1) as cluster:
        async with producing(cluster) as sending:
            for value in numbered(3):
                await sending.send_and_wait("t", value)
            assert sending._cluster is not None
            cluster.move_leader("t", 0, 2)
            await sending._cluster.wait_for_metadata(PATIENCE_S * 1000)
            for value in numbered(6)[3:]:
                await sending.send_and_wait("t", value)
        assert values(cluster) == numbered(6)
        assert [node for node, _, request in cluster.requests if isinstance(request, ProduceRequest)] == [1] * 3 + [
            2
        ] * 3
        assert outcomes[-1] == "answered"
        assert "in flight" not in outcomes


async def test_a_topic_that_is_only_sent_to_directly_stays_in_use(
    outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that is not in use loses its metadata, and its sequences begin anew under another epoch."""
    monkeypatch.setattr(direct_send, "_USE_NOTED_MS", 10)
    with served(t=1) as cluster:
        async with producing(cluster, metadata_max_age_ms=100) as sending:
            await sending.start()
            assert sending._cluster is not None
            sending._cluster.forget_idle_topics_after(400)
            ends_s = time.monotonic() + 1.2
            count = 0
            while time.monotonic() < ends_s:
                await sending.send_and_wait("t", b"%d" % count)
                count += 1
                await asyncio.sleep(0.002)
            assert sending._session.identity[1] == 0
        assert values(cluster) == numbered(count)
        assert outcomes.count("answered") > count / 2


@pytest.mark.parametrize(
    "versions", [{ProduceRequest.API_KEY: (3, 8)}, {MetadataRequest.API_KEY: (4, 9)}], ids=["Produce 8", "no topic ids"]
)
async def test_an_older_broker_gets_its_records_the_usual_way(
    outcomes: Outcomes, versions: dict[int, tuple[int, int]]
) -> None:
    with served(t=1) as cluster:
        cluster.versions.update(versions)
        async with producing(cluster) as sending:
            for value in numbered(3):
                await sending.send_and_wait("t", value)
        assert values(cluster) == numbered(3)
        assert outcomes == ["refused"] * 2


async def test_a_call_during_a_close_is_refused() -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            closing = asyncio.ensure_future(sending.close())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="closed"):
                await sending.send_and_wait("t", b"late")
            await closing
        assert values(cluster) == [b"0"]


async def test_a_record_that_waits_for_memory_goes_first(outcomes: Outcomes) -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            sending._appender.waiting_count = 1
            assert sending._direct_send is not None
            assert sending._direct_send.send("t", b"1", None, None) is None
            sending._appender.waiting_count = 0
            await sending.send_and_wait("t", b"1")
        assert outcomes == ["refused", "answered"]


def interrupted_before(connection: Connection, *arguments: Any) -> NoReturn:
    raise KeyboardInterrupt


def interrupted_after(connection: Connection, *arguments: Any) -> NoReturn:
    EXCHANGE(connection, *arguments)
    raise KeyboardInterrupt


EXCHANGE = Connection.exchange


@pytest.mark.parametrize("exchange", [interrupted_before, interrupted_after])
async def test_a_record_after_an_interrupt_is_not_taken_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch, exchange: Any
) -> None:
    """With the same sequence the broker would take it for a duplicate, and it would be acknowledged and lost."""
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            for value in numbered(3):
                await sending.send_and_wait("t", value)
            assert sending._direct_send is not None
            with monkeypatch.context() as patch:
                patch.setattr(Connection, "exchange", exchange)
                with pytest.raises(KeyboardInterrupt):
                    sending._direct_send.send("t", b"interrupted", None, None)
            offsets = [(await sending.send_and_wait("t", value)).offset for value in numbered(6)[3:]]
        written = [b"interrupted"] if exchange is interrupted_after else []
        assert values(cluster) == [*numbered(3), *written, *numbered(6)[3:]]
        assert offsets == [3 + len(written) + place for place in range(3)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
async def test_the_child_of_a_fork_sends_nothing() -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")

            def send() -> str:
                try:
                    sending.send_and_wait("t", b"of the child").send(None)
                except RuntimeError as error:
                    return str(error)
                return "sent"

            sending._direct_send._turn_s = ALWAYS_S  # type: ignore[union-attr]
            assert "before a fork" in in_child(send) or "no running event loop" in in_child(send)
            await sending.send_and_wait("t", b"1")
        assert values(cluster) == numbered(2)


# -- the turns of the loop


async def turns_during(sending: Producer, count: int) -> int:
    turns = 0
    ends = False

    async def turn() -> None:
        nonlocal turns
        while not ends:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turn())
    await asyncio.sleep(0)
    before = turns
    for value in numbered(count):
        await sending.send_and_wait("t", value)
    during = turns - before
    ends = True
    await turning
    return during


@pytest.mark.parametrize(("held_s", "turns_min", "turns_max"), [(0.0, 10, 20), (ALWAYS_S, 0, 0)])
async def test_the_loop_runs_as_soon_as_it_was_held_for_its_time(
    outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch, held_s: float, turns_min: int, turns_max: int
) -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"first")
            await sending.send_and_wait("t", b"second")  # the first direct one always lets the loop run
            monkeypatch.setattr(direct_send, "_HELD_S", held_s)
            assert turns_min <= await turns_during(sending, 10) <= turns_max
        assert outcomes == ["answered"] * 11


async def test_calls_at_the_same_time_share_their_batches(outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_send, "_HELD_S", 0.0)
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"first")

            async def send(sender: int) -> None:
                for number in range(10):
                    await sending.send_and_wait("t", b"%d %d" % (sender, number))

            await asyncio.gather(*(send(sender) for sender in range(50)))
        assert len(values(cluster)) == 501
        for sender in range(50):
            own = [value for value in values(cluster) if value is not None and value.startswith(b"%d " % sender)]
            assert own == [b"%d %d" % (sender, number) for number in range(10)]
        assert outcomes.count("answered") < 25
        assert len(cluster.sent(ProduceRequest)) < 120


async def test_a_call_that_is_cancelled_while_the_loop_runs_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_send, "_HELD_S", 0.0)
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            call = asyncio.ensure_future(sending.send_and_wait("t", b"lost"))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await sending.send_and_wait("t", b"1")
        assert values(cluster) == numbered(2)


async def send_and_wait_for(sending: Producer, value: bytes) -> None:
    await sending.send_and_wait("t", value)


async def send(sending: Producer, value: bytes) -> None:
    await (await sending.send("t", value))


async def send_many(sending: Producer, value: bytes) -> None:
    await (await sending.send_many("t", [value]))


async def send_batch(sending: Producer, value: bytes) -> None:
    await (await sending.send_batch("t", [value], partition=0))


async def send_arrow(sending: Producer, value: bytes) -> None:
    pa = pytest.importorskip("pyarrow")
    await (await sending.send_arrow("t", pa.table({"key": pa.nulls(1, pa.binary()), "value": [value]})))


LATER = [send_and_wait_for, send, send_many, send_batch, send_arrow]


@pytest.mark.parametrize("later", LATER, ids=lambda each: each.__name__)
async def test_a_call_that_lets_the_loop_run_is_passed_by_no_later_one(
    later: Callable[[Producer, bytes], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_send, "_HELD_S", 0.0)
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            first, *_ = await asyncio.gather(
                sending.send_and_wait("t", b"1"), later(sending, b"2"), sending.send_and_wait("t", b"3")
            )
            assert first.offset == 1
            await sending.send_and_wait("t", b"4")
        assert values(cluster)[:2] == numbered(2)
        assert later is send_arrow or values(cluster) == numbered(5)  # an arrow table waits for its kernel


@pytest.mark.parametrize("end", [Producer.flush, Producer.close], ids=lambda end: end.__name__)
async def test_a_call_that_lets_the_loop_run_is_delivered_by_a_later_flush_or_close(
    end: Callable[[Producer], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_send, "_HELD_S", 0.0)
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            call = asyncio.create_task(sending.send_and_wait("t", b"1"))
            ending = asyncio.create_task(end(sending))
            await ending
            assert values(cluster) == numbered(2)
            assert (await call).offset == 1


async def test_a_call_that_takes_the_record_of_an_earlier_one_follows_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where that record opens a batch after which a task lets the loop run."""
    monkeypatch.setattr(direct_send, "_HELD_S", 0.0)
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            for number in range(0, 400, 4):
                await sending.send_and_wait("t", b"%d" % number)
                later = [send(sending, b"%d" % (number + 2)), send(sending, b"%d" % (number + 3))]
                await asyncio.gather(sending.send_and_wait("t", b"%d" % (number + 1)), *later)
        assert values(cluster) == numbered(400)


async def test_calls_for_a_topic_that_is_not_known_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_send, "_HELD_S", 0.0)
    with served(t=1, u=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            places = await asyncio.gather(*(sending.send_and_wait("u", value) for value in numbered(4)))
            assert [place.offset for place in places] == [0, 1, 2, 3]


async def test_a_call_may_be_cancelled_when_a_later_one_has_taken_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_send, "_HELD_S", 0.0)
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            call: asyncio.Task[Any]

            async def send_and_cancel() -> None:
                last = await sending.send("t", b"2")
                call.cancel()
                await last

            call = asyncio.create_task(sending.send_and_wait("t", b"1"))
            await asyncio.create_task(send_and_cancel())
            assert call.cancelled()
            await sending.send_and_wait("t", b"3")
        assert values(cluster) == numbered(4)


async def test_a_record_that_cannot_be_sent_fails_its_own_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_send, "_HELD_S", 0.0)
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            wrong: Any = 5
            outcomes = await asyncio.gather(
                sending.send_and_wait("t", wrong), sending.send_and_wait("t", b"1"), return_exceptions=True
            )
            assert isinstance(outcomes[0], TypeError)
        assert values(cluster) == numbered(2)


# -- where the usual way is the only one


@pytest.mark.parametrize(
    "record",
    [
        {"value": None},
        {"value": bytearray(b"v")},
        {"value": b"v", "key": memoryview(b"k")},
        {"value": b"v", "headers": [("h", b"")]},
        {"value": b"v", "timestamp_ms": 1},
        {"value": b"v" * 20_000},
    ],
    ids=["no value", "another type", "another type of key", "headers", "a time", "a large one"],
)
async def test_an_unusual_record_goes_the_usual_way(outcomes: Outcomes, record: dict[str, Any]) -> None:
    with served(t=1) as cluster:
        async with producing(cluster) as sending:
            await sending.send_and_wait("t", b"0")
            await sending.send_and_wait("t", **record)
        assert "answered" not in outcomes
        assert values(cluster) == [b"0", None if record["value"] is None else bytes(record["value"])]


async def test_arguments_are_refused_as_before(outcomes: Outcomes) -> None:
    with served(t=1) as cluster:
        async with producing(cluster, max_request_size=10_000, max_block_ms=50) as sending:
            await sending.send_and_wait("t", b"0")
            for wrong, error in (
                ({"topic": ["t"]}, TypeError),
                ({"topic": "t", "value": "text"}, TypeError),
                ({"topic": "t", "value": b"v", "partition": 1}, Exception),
                ({"topic": "t", "value": b"v", "partition": True}, TypeError),
                ({"topic": "t", "value": b"v" * 10_001}, Exception),
            ):
                with pytest.raises(error):
                    await sending.send_and_wait(**wrong)
        with pytest.raises(RuntimeError, match="closed"):
            await sending.send_and_wait("t", b"late")
        assert values(cluster) == [b"0"]
        assert "answered" not in outcomes


@pytest.mark.parametrize(
    "options",
    [
        {"acks": 1},
        {"enable_idempotence": False},
        {"transactional_id": "t"},
        {"linger_ms": 1},
        {"busy_poll_us": 0},
        {"partitioner": "round_robin"},
        {"partitioner": lambda topic, key, value, count: 0},
        {"value_serializer": str.encode},
        {"key_serializer": str.encode},
        {"interceptors": [SimpleNamespace(on_send=print, on_acknowledgement=print)]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_need_the_usual_way(options: dict[str, Any]) -> None:
    assert allows_direct_sends(ProducerConfig.from_options({"bootstrap_servers": "a:1"}))
    assert allows_direct_sends(ProducerConfig.from_options({"bootstrap_servers": "a:1", "linger_ms": 0}))
    assert not allows_direct_sends(ProducerConfig.from_options({"bootstrap_servers": "a:1", **options}))
