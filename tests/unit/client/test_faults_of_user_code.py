"""Serializers, partitioners, interceptors, deserializers and assignors that raise what is no Exception."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.patience import PATIENCE_S, wait_until
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_admin import served
from tests.unit.client.test_consumer import FAST, T0, T1, consumer, fill, read
from tests.unit.client.test_producer import producer
from tests.unit.client.test_sync_consumer import in_thread
from tests.unit.client.test_sync_producer import producer as blocking_producer
from tidelog import Assignor, ProducerInterceptor, ProducerRecord, TopicPartition
from tidelog.client import TransactionAbortable, sync
from tidelog.protocol.batches.records import encode_batch


class Own(BaseException):
    pass


FAULTS = [Own, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit]
"""The last two end an event loop."""


class RaisingOnce:
    """Raises at one call only."""

    def __init__(self, fault: type[BaseException], at: int = 3) -> None:
        self._fault = fault
        self._at = at
        self.calls = 0

    def __call__(self, result: Any) -> Any:
        self.calls += 1
        if self.calls == self._at:
            raise self._fault
        return result


def sent_by_blocking_producer(**options: Any) -> list[type | None]:
    """What became of five records, and of one after a flush, while the producer could be closed."""

    def work() -> list[type | None]:
        with served(t=1) as fake:
            sending = blocking_producer(fake, **options)

            def send() -> Future[Any]:
                try:
                    return sending.send("t", b"x")
                except BaseException as interrupt:
                    raised: Future[Any] = Future()
                    raised.set_exception(interrupt)
                    return raised

            futures = [send() for _ in range(5)]
            sending.flush()
            futures.append(send())
            sending.close()
            errors = [future.exception(PATIENCE_S) for future in futures]
            return [None if error is None else type(error) for error in errors]

    outcome = in_thread(work)
    assert isinstance(outcome, list), outcome
    return outcome


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["value_serializer", "partitioner"])
def test_what_a_serializer_or_partitioner_raises_is_the_outcome_of_one_record(kind, fault):
    once = RaisingOnce(fault)
    function: Callable[..., Any] = once if kind == "value_serializer" else lambda *_: once(0)
    assert sent_by_blocking_producer(**{kind: function}) == [None, None, fault, None, None, None]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_partitioner_that_raises_at_the_first_record_of_a_topic_stops_no_other_record(fault):
    once = RaisingOnce(fault, at=1)
    assert sent_by_blocking_producer(partitioner=lambda *_: once(0)) == [fault, *[None] * 5]


class Speechless(Exception):
    def __str__(self) -> str:
        raise AttributeError


def refuse_bad(value: bytes) -> bytes:
    if value == b"bad":
        raise Speechless
    return value


def test_an_exception_whose_text_cannot_be_made_stops_no_later_record():
    """Nothing took records from the queue any more, and `send` waited for room in it for good."""
    with served(t=1) as fake, blocking_producer(fake, value_serializer=refuse_bad) as sending:
        refused = sending.send("t", b"bad")
        wait_until(refused.done)
        assert isinstance(refused.exception(0), Speechless)
        later = sending.send("t", b"x")
        wait_until(later.done)  # no call that waits for it wakes the loop


def test_a_record_that_fails_with_such_an_exception_is_missed_by_its_transaction():
    with served(t=1) as fake, blocking_producer(fake, value_serializer=refuse_bad, transactional_id="tx") as sending:
        sending.begin_transaction()
        for value in (b"x", b"bad"):
            sending.send("t", value)
        with pytest.raises(TransactionAbortable):
            sending.commit_transaction()
        assert fake.transactions.committed == []


def test_a_number_of_a_partition_that_cannot_be_read_stops_no_later_record():
    class Number:
        def __index__(self) -> int:
            raise AttributeError

    partition: Any = Number()
    with served(t=1) as fake, blocking_producer(fake) as sending:
        sending.send_and_wait("t", b"x")
        refused = sending.send("t", b"x", partition=partition)
        wait_until(refused.done)
        later = sending.send("t", b"x")
        wait_until(later.done)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", ["on_send", "on_acknowledgement"])
def test_what_an_interceptor_raises_leaves_no_record_without_an_outcome(method, fault):
    once = RaisingOnce(fault)

    class Raising(ProducerInterceptor):
        def on_send(self, topic: str, record: ProducerRecord) -> ProducerRecord:
            return once(record) if method == "on_send" else record

        def on_acknowledgement(self, metadata: Any, error: Any) -> None:
            if method == "on_acknowledgement":
                once(None)

    is_interrupt = method == "on_send" and fault in (KeyboardInterrupt, SystemExit)
    assert (
        sent_by_blocking_producer(interceptors=[Raising()])
        == [None, None, fault if is_interrupt else None] + [None] * 3
    )
    assert once.calls == 6


async def test_an_interrupt_in_an_interceptor_ends_the_loop_after_the_records_have_their_outcome(monkeypatch):
    class Raising(ProducerInterceptor):
        def on_acknowledgement(self, metadata: Any, error: Any) -> None:
            raise SystemExit

    raised: list[Any] = []
    loop = asyncio.get_running_loop()
    async with FakeCluster(t=1) as fake, producer(fake, interceptors=[Raising()]) as sending:
        scheduled = loop.call_soon

        def call_soon(callback: Any, *arguments: Any, **options: Any) -> Any:
            if arguments and isinstance(arguments[0], SystemExit):
                return raised.append(callback)
            return scheduled(callback, *arguments, **options)

        monkeypatch.setattr(loop, "call_soon", call_soon)
        futures = [await sending.send("t", b"x") for _ in range(3)]
        assert [(await future).offset for future in futures] == [0, 1, 2]
        monkeypatch.undo()
    assert len(raised) == 3
    with pytest.raises(SystemExit):
        raised[0](SystemExit())


@pytest.mark.parametrize("fault", FAULTS[:3])
@pytest.mark.parametrize("at", [3, 7])  # in the first partition, and when the records of that are taken
async def test_a_poll_that_a_deserializer_breaks_off_has_consumed_nothing(fault, at):
    async with FakeCluster(t=2) as fake:
        for partition in range(2):
            fill(fake, "t", partition, 4)
        async with consumer(fake, value_deserializer=RaisingOnce(fault, at)) as reading:
            reading.assign([T0, T1])
            offsets: dict[TopicPartition, list[int]] = {T0: [], T1: []}
            broken = 0
            async with asyncio.timeout(PATIENCE_S):
                while sum(map(len, offsets.values())) < 8:
                    try:
                        batch = await reading.poll(1000)
                    except fault:
                        broken += 1
                        assert await reading.position(T0) + await reading.position(T1) == 0
                        continue
                    for read, records in batch.items():
                        offsets[read] += [record.offset for record in records]
        assert broken == 1
        assert offsets == {T0: [0, 1, 2, 3], T1: [0, 1, 2, 3]}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_blocking_consumer_works_on_after_a_deserializer_has_raised(fault):
    def work() -> list[int]:
        with served(t=1) as fake:
            fill(fake, "t", 0, 5)
            options = {"bootstrap_servers": fake.bootstrap, "group_id": "g", "auto_offset_reset": "earliest", **FAST}
            reading = sync.Consumer("t", value_deserializer=RaisingOnce(fault), **options)
            found: list[int] = []
            broken = 0
            while len(found) < 5:
                try:
                    found += [record.offset for _, record in zip(range(5 - len(found)), reading)]
                except (fault, RuntimeError):
                    broken += 1
            reading.close()
            return [broken, *found]

    assert in_thread(work) == [1, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit, Own])
def test_a_poll_raises_what_an_assignor_raises_and_the_next_one_joins_again(fault):
    class OwnAssignor(Assignor):
        name = "own"
        cooperative = False
        once = RaisingOnce(fault, at=1)

        def user_data(self, owned: Any, generation: int) -> bytes:
            return b""

        def assign(self, partition_counts: Any, members: Any) -> Any:
            return self.once({member: [T0] for member in members})

    def work() -> list[int]:
        with served(t=1) as fake:
            fill(fake, "t", 0, 5)
            options = {"bootstrap_servers": fake.bootstrap, "group_id": "g", "auto_offset_reset": "earliest", **FAST}
            with sync.Consumer("t", partition_assignment_strategy=[OwnAssignor()], **options) as reading:
                with pytest.raises(fault):
                    next(reading)
                found: list[int] = []
                while len(found) < 5:
                    found += [record.offset for records in reading.poll(100).values() for record in records]
                return found

    assert in_thread(work) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("call", "expected"), [("seek", {T0: [1, 2, 3]}), ("assign", {T1: [0, 1, 2, 3]})])
async def test_a_deserializer_may_move_the_positions(call, expected):
    async with FakeCluster(t=2) as fake:
        for number in range(2):
            fill(fake, "t", number, 4)
        calls = 0

        def deserializer(value: bytes) -> bytes:
            nonlocal calls
            calls += 1
            if calls == 3 and call == "assign":
                reading.assign([T1])
            elif calls == 3:
                reading.seek(T0, 1)
            return value

        async with consumer(fake, value_deserializer=deserializer) as reading:
            reading.assign([T0])
            found: dict[TopicPartition, list[int]] = {}
            async with asyncio.timeout(PATIENCE_S):
                while sum(map(len, found.values())) < len(*expected.values()):
                    for partition, records in (await reading.poll(50)).items():
                        found.setdefault(partition, []).extend(record.offset for record in records)
        assert found == expected


async def test_records_that_cannot_be_decoded_hold_up_no_other_partition_of_the_broker():
    """The answers with them counted against the broker, so that it was asked for no others."""

    def refuse(value: bytes) -> bytes:
        if value == b"bad":
            raise ValueError("a bad record")
        return value

    async with FakeCluster(t=3) as cluster, consumer(cluster, "t", value_deserializer=refuse) as consuming:
        offsets: list[int] = []
        errors = 0
        async with asyncio.timeout(PATIENCE_S):
            for number in range(8):
                if number < 2:  # in two answers
                    cluster.topics["t"][number].append(bytes(encode_batch([(0, None, b"bad", ())])))
                fill(cluster, "t", 2, 2)
                while len(offsets) < 2 * number + 2 or errors <= number:
                    try:
                        taken = await consuming.poll(20)
                    except ValueError:
                        errors += 1
                    else:
                        assert taken.keys() <= {TopicPartition("t", 2)}
                        offsets += [record.offset for records in taken.values() for record in records]
        assert offsets == list(range(16))
        for partition in (T0, T1):
            consuming.seek(partition, 1)
            fill(cluster, "t", partition.partition, 1)
        assert sorted(await read(consuming, 2)) == [1, 1]
