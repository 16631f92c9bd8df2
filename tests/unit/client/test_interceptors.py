"""Interceptors and delivery callbacks: what they see and change, and that their exceptions break nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import FakeCluster, refuse_produce
from tests.unit.client.test_producer import numbered, producer, values
from tests.unit.client.test_sync_producer import cluster as cluster_on_a_thread
from tests.unit.client.test_sync_producer import producer as blocking_producer
from tidelog import BatchSendError, ConfigError, ProducerInterceptor, ProducerRecord
from tidelog.client import sync
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.produce import ProduceRequest
from tidelog.testing.embedded import EmbeddedBroker


class Noting(ProducerInterceptor):
    def __init__(self) -> None:
        self.sent: list[ProducerRecord] = []
        self.acknowledged: list[Any] = []

    def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
        self.sent.append(record)
        return record._replace(value=record.value + b"!")

    def on_acknowledgement(self, metadata: Any, error: Any) -> None:
        self.acknowledged.append(error if metadata is None else (metadata.partition, metadata.offset))


class Raising(ProducerInterceptor):
    def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
        raise RuntimeError("a fault in on_send")

    def on_acknowledgement(self, metadata: Any, error: Any) -> None:
        raise RuntimeError("a fault in on_acknowledgement")


class Wrong(ProducerInterceptor):
    def on_send(self, topic: str, record: ProducerRecord) -> Any:
        return None


async def test_records_pass_the_interceptors_in_order_and_faults_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    first, last = Noting(), Noting()
    async with (
        FakeCluster(t=2) as cluster,
        producer(cluster, interceptors=[first, Raising(), Wrong(), last]) as sending,
    ):
        await sending.send_and_wait("t", b"1", b"k", headers=[("h", b"x")], partition=1, timestamp_ms=5)
        assert await (await sending.send_many("t", [ProducerRecord(b"2", partition=1)] * 2)) == [("t", 1, 1, 2)]
        assert values(cluster, "t", 1) == [b"1!!", b"2!!", b"2!!"]
    assert first.sent[0] == ProducerRecord(b"1", b"k", [("h", b"x")], 1, 5)
    assert last.sent[0].value == b"1!"
    assert first.acknowledged == last.acknowledged == [(1, 0), (1, 1), (1, 2)]
    assert "Raising: on_send raised" in caplog.text
    assert "Raising: on_acknowledgement raised" in caplog.text
    assert "Wrong: on_send returned None" in caplog.text


async def test_an_interceptor_that_reads_a_cancelled_future_stops_no_record(caplog: pytest.LogCaptureFixture) -> None:
    """The CancelledError that it raises is no cancellation of the sender."""

    class Reading(ProducerInterceptor):
        def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
            raise asyncio.CancelledError

        def on_acknowledgement(self, metadata: Any, error: Any) -> None:
            raise asyncio.CancelledError

    def note(metadata: Any, error: Any) -> None:
        raise asyncio.CancelledError

    async with FakeCluster(t=1) as cluster, producer(cluster, interceptors=[Reading()]) as sending:
        futures = [await sending.send("t", b"1", on_delivery=note) for _ in range(3)]
        async with asyncio.timeout(PATIENCE_S):
            assert [(await future).offset for future in futures] == [0, 1, 2]
            await sending.flush()
    assert caplog.text.count("Reading: on_send raised") == 3
    assert caplog.text.count("Reading: on_acknowledgement raised") == 3
    assert caplog.text.count("a delivery callback raised") == 3


async def test_records_that_are_not_delivered_are_acknowledged_with_their_error() -> None:
    noting = Noting()
    async with FakeCluster(t=1) as cluster, producer(cluster, interceptors=[noting]) as sending:
        cluster.topics["t"][0].max_batch_bytes = 80
        with pytest.raises(KafkaError):
            await sending.send_and_wait("t", b"x" * 100)
        with pytest.raises(TypeError):
            await sending.send("t", b"x", 17)
        outcome = await sending.send_many("t", [b"", (17, b""), b""])
        with pytest.raises(BatchSendError):
            await outcome
    assert [type(each) for each in noting.acknowledged if not isinstance(each, tuple)] == [
        KafkaError,
        TypeError,
        TypeError,
        TypeError,
    ]
    assert noting.acknowledged.count((0, 0)) == 1


async def test_what_an_interceptor_does_with_an_error_does_not_change_that_of_another_record() -> None:
    class Remarking(Noting):
        def on_acknowledgement(self, metadata: Any, error: Any) -> None:
            super().on_acknowledgement(metadata, error)
            error.add_note("seen")

    interceptors = [Remarking(), Remarking()]
    async with (
        FakeCluster(t=1) as cluster,
        producer(cluster, interceptors=interceptors, linger_ms=60_000) as sending,
    ):
        futures = [await sending.send("t", b"") for _ in range(3)]
        await sending.close(0)
        for future in futures:
            with pytest.raises(KafkaError, match="NETWORK_EXCEPTION") as raised:
                await future
            assert not hasattr(raised.value, "__notes__")
    for noting in interceptors:
        assert [(str(error), error.__notes__) for error in noting.acknowledged] == [(str(raised.value), ["seen"])] * 3


async def test_records_of_a_cancelled_call_are_acknowledged_too() -> None:
    """An interceptor that counts what is underway never came back to zero."""
    noting = Noting()
    async with (
        FakeCluster(t=1) as cluster,
        producer(cluster, interceptors=[noting], buffer_memory=300, linger_ms=60_000) as sending,
    ):
        cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 1_000)
        await sending.send("t", b"1" * 100)
        waiting = [
            asyncio.ensure_future(call)
            for call in (sending.send("t", b"2" * 100), sending.send_many("t", [b"3" * 100, b"4"]))
        ]
        await until(lambda: len(noting.sent) == 3)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert [str(each) for each in noting.acknowledged] == [
            "REQUEST_TIMED_OUT: the call was cancelled before its record was sent"
        ] * 3
        await sending.close(0)
    assert len(noting.acknowledged) == 4


@pytest.mark.parametrize("wrong", [[Noting], [object()], "x", 5, Noting()])
def test_what_is_no_interceptor_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="interceptors"):
        sync.Producer(interceptors=wrong)


async def test_a_delivery_callback_gets_the_outcome_and_its_fault_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[Any] = []

    def fault(metadata: Any, error: Any) -> None:
        raise RuntimeError("a fault of the application")

    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await sending.send("t", b"1", on_delivery=lambda *outcome: outcomes.append(outcome))
        await sending.send("t", b"2", on_delivery=fault)
        await sending.flush()
        cluster.topics["t"][0].max_batch_bytes = 80
        refused = await sending.send("t", b"x" * 100, on_delivery=lambda *outcome: outcomes.append(outcome))
        with pytest.raises(KafkaError):
            await refused
        with pytest.raises(TypeError, match="on_delivery"):
            await sending.send("t", b"not sent", on_delivery=17)  # type: ignore[arg-type]
        await until(lambda: len(outcomes) == 2)
        assert values(cluster) == [b"1", b"2"]
    assert outcomes[0][0].offset == 0
    assert outcomes[0][1] is None
    assert (outcomes[1][0], type(outcomes[1][1])) == (None, KafkaError)
    assert "a delivery callback raised" in caplog.text


blocking_cluster = cluster_on_a_thread


def test_the_blocking_producer_has_both(blocking_cluster: FakeCluster) -> None:
    noting = Noting()
    outcomes: list[Any] = []
    with blocking_producer(blocking_cluster, interceptors=[noting, Raising()]) as sending:
        for value in numbered(3):
            sending.send("t", value, on_delivery=lambda *outcome: outcomes.append(outcome))
        sending.send("t", b"", 17, on_delivery=lambda *outcome: outcomes.append(outcome))
        with pytest.raises(TypeError):
            sending.send("t", b"not sent", on_delivery=17)  # type: ignore[arg-type]
        sending.flush()
    assert [metadata.offset for metadata, _ in outcomes if metadata is not None] == [0, 1, 2]
    assert [type(error) for metadata, error in outcomes if metadata is None] == [TypeError]
    assert len(noting.acknowledged) == 4
    assert values(blocking_cluster) == [b"0!", b"1!", b"2!"]


def test_a_record_of_the_blocking_producer_that_an_interrupt_stops_is_acknowledged(
    blocking_cluster: FakeCluster,
) -> None:
    """Its serializer is interrupted, after the interceptors have seen it. Without headers it has an empty tuple."""
    noting = Noting()
    headers: list[Any] = []

    class NotingHeaders(ProducerInterceptor):
        def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
            headers.append(record.headers)
            return record

    def encode(value: Any) -> bytes:
        raise KeyboardInterrupt

    with blocking_producer(
        blocking_cluster, interceptors=[NotingHeaders(), noting], value_serializer=encode
    ) as sending:
        with pytest.raises(KeyboardInterrupt):
            sending.send("t", b"x", headers=None)
        sending.flush()
    assert headers == [()]
    assert len(noting.acknowledged) == 1


def test_the_blocking_producer_asks_in_the_thread_that_sends(blocking_cluster: FakeCluster) -> None:
    """Before serializers, which run there, too: the sender may change its value after the call."""
    threads: list[Any] = []

    class NotingThread(ProducerInterceptor):
        def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
            threads.append(threading.current_thread())
            return record._replace(value=dict(record.value))

    def encode(value: Any) -> bytes:
        threads.append(threading.current_thread())
        return b"%d" % value["n"]

    with blocking_producer(blocking_cluster, interceptors=[NotingThread()], value_serializer=encode) as sending:
        sending.start()
        value = {"n": 0}
        for number in range(3):
            value["n"] = number
            sending.send("t", value)
    assert values(blocking_cluster) == numbered(3)
    assert threads == [threading.current_thread()] * 6


def test_on_a_real_node_every_record_is_acknowledged_once() -> None:
    noting = Noting()
    outcomes: list[Any] = []
    with (
        EmbeddedBroker() as broker,
        sync.Producer(bootstrap_servers=broker.bootstrap_servers, interceptors=[noting]) as sending,
    ):
        for value in numbered(500):
            sending.send("t", value, on_delivery=lambda *outcome: outcomes.append(outcome))
        sending.flush()
    assert sorted(noting.acknowledged) == [(0, offset) for offset in range(500)]
    assert [metadata.offset for metadata, _ in outcomes] == list(range(500))
