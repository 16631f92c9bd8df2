"""Tidelog's own client, of asyncio, as the client of a history: the methods that `performing.Call` lists."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from tests.transactions.history import Record
from tests.transactions.performing import ClientError
from tests.transactions.topics import ClientSettings
from tidelog.client.consuming.consumer import Consumer
from tidelog.client.consuming.subscription import RebalanceListener
from tidelog.client.model import TopicPartition
from tidelog.client.producing.producer import Producer
from tidelog.client.producing.transaction_errors import TransactionAbortable, TransactionAborted, TransactionError
from tidelog.protocol.errors import KafkaError

IMPATIENT: dict[str, Any] = {
    "request_timeout_ms": 3_000,
    "retry_backoff_ms": 20,
    "retry_backoff_max_ms": 200,
    "reconnect_backoff_ms": 20,
    "reconnect_backoff_max_ms": 200,
}
POLL_MS = 150


class _Listener(RebalanceListener):
    def __init__(self, changed: Callable[[Collection[TopicPartition]], None]) -> None:
        self._changed = changed

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self._changed(())

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self._changed(assigned)


class OwnClient:
    """`options`: of all its clients, over those here."""

    def __init__(self, settings: ClientSettings, options: Mapping[str, Any] | None = None) -> None:
        self._settings = settings
        self._options = {**IMPATIENT, "bootstrap_servers": settings.bootstrap, **(options or {})}
        self._producer: Any = None
        self._rival: Any = None
        self._plain: Any = None
        self._consumer: Any = None
        self._assignment: dict[int, int | None] | None = None
        self._positions: dict[int, int] = {}

    # Producers

    async def open(self) -> None:
        await self._drop(self._producer, self._plain)
        self._producer = self._plain = None
        self._producer = await self._new_producer()

    async def rival(self) -> None:
        self._rival = await self._new_producer()

    async def settle(self) -> None:
        await self._drop(self._producer)
        self._producer, self._rival = self._rival, None

    async def begin(self) -> None:
        await self._do(self._producer.begin_transaction())

    async def commit(self) -> None:
        await self._do(self._producer.commit_transaction())

    async def abort(self) -> None:
        await self._do(self._producer.abort_transaction())

    async def flush(self) -> None:
        if self._plain is not None:
            await self._do(self._plain.flush())

    async def send(self, partition: int, value: int, done: Callable[[int | None], None]) -> None:
        await self._send(self._producer, partition, value, done)

    async def send_plain(self, partition: int, value: int, done: Callable[[int | None], None]) -> None:
        if self._plain is None:
            self._plain = Producer(
                **self._options, linger_ms=0, delivery_timeout_ms=self._settings.transaction_timeout_ms
            )
            await self._start(self._plain)
        await self._send(self._plain, partition, value, done)

    async def send_offsets(self, offsets: dict[int, int]) -> None:
        positions = {TopicPartition(*self._settings.topics.place(at)): end for at, end in offsets.items()}
        await self._do(self._producer.send_offsets_to_transaction(positions, self._consumer))

    # The consumer

    async def attach(self, positions: dict[int, int]) -> None:
        consumer = await self._consumer_for(None)
        places = {TopicPartition(*self._settings.topics.place(at)): to for at, to in positions.items()}
        consumer.assign(list(places))
        for place, to in places.items():
            consumer.seek(place, to)

    async def poll(self, limit: int) -> list[Record]:
        consumer = await self._consumer_for(self._settings.group)
        try:
            polled = await consumer.poll(timeout_ms=POLL_MS, max_records=limit)
        except KafkaError as error:
            raise ClientError(f"poll: {error}", may_abort=True) from error
        number = self._settings.topics.number
        return [
            Record(number(place.topic, place.partition), record.offset, int(record.value))
            for place, records in polled.items()
            for record in records
        ]

    def assignment(self) -> dict[int, int | None] | None:
        changed, self._assignment = self._assignment, None
        return changed

    async def rewind(self) -> None:
        consumer = await self._consumer_for(self._settings.group)
        places = list(consumer.assignment())
        try:
            committed = await consumer.committed(*places) if places else {}
        except KafkaError as error:
            raise ClientError(str(error), may_abort=False) from error
        positions: dict[int, int | None] = {}
        for place, found in committed.items():
            offset = 0 if found is None else found.offset
            if place in consumer.assignment():
                consumer.seek(place, offset)
                positions[self._settings.topics.number(place.topic, place.partition)] = offset
        self._assignment = positions

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self._drop(self._producer, self._rival, self._plain)
        if self._consumer is not None:
            await self._consumer.close()

    # Inside

    @property
    def _timeout_ms(self) -> int:
        return int(self._settings.timeout_s * 1000)

    async def _consumer_for(self, group: str | None) -> Any:
        if self._consumer is not None:
            return self._consumer
        settings = self._settings
        member = {"group_id": group, "session_timeout_ms": 6_000, "heartbeat_interval_ms": 500}
        consumer = Consumer(
            **self._options,
            **(member if group is not None else {}),
            isolation_level=settings.isolation.value,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_wait_ms=50,
        )
        await self._start(consumer)
        if group is not None:
            consumer.subscribe([settings.topics.input_topic], listener=_Listener(self._on_change))
        self._consumer = consumer
        return consumer

    def _on_change(self, assigned: Collection[TopicPartition]) -> None:
        number = self._settings.topics.number
        self._assignment = {number(each.topic, each.partition): None for each in assigned}

    async def _new_producer(self) -> Any:
        settings = self._settings
        producer = Producer(
            **self._options,
            transactional_id=settings.transactional_id,
            transaction_timeout_ms=settings.transaction_timeout_ms,
            max_block_ms=self._timeout_ms,
            delivery_timeout_ms=settings.transaction_timeout_ms,
            linger_ms=0,
        )
        await self._start(producer)
        try:
            await self._do(producer.init_transactions())
        except ClientError:
            await self._drop(producer)
            raise
        return producer

    @staticmethod
    async def _start(client: Any) -> None:
        try:
            await client.start()
        except KafkaError as error:
            raise ClientError(f"start: {error}", may_abort=False) from error

    async def _send(self, producer: Any, partition: int, value: int, done: Callable[[int | None], None]) -> None:
        topic, index = self._settings.topics.place(partition)
        try:
            future = await producer.send(topic, str(value).encode(), partition=index)
        except KafkaError as error:
            raise self._translated("send", error) from error

        def report(future: asyncio.Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                offset = future.result().offset
                done(offset if offset is not None and offset >= 0 else None)

        future.add_done_callback(report)

    async def _do(self, call: Awaitable[Any]) -> None:
        try:
            await call
        except KafkaError as error:
            raise self._translated("", error) from error

    @staticmethod
    def _translated(what: str, error: KafkaError) -> ClientError:
        is_plain = not isinstance(error, TransactionError)
        may_abort = isinstance(error, TransactionAbortable | TransactionAborted) or is_plain
        return ClientError(f"{what} {type(error).__name__}: {error}", may_abort=may_abort)

    @staticmethod
    async def _drop(*producers: Any) -> None:
        for producer in producers:
            if producer is not None:
                await producer.close(0)
