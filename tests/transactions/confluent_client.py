"""confluent-kafka as the client of a history: the methods that `performing.Call` lists, blocking."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import confluent_kafka

from tests.transactions.history import Isolation, Record
from tests.transactions.performing import ClientError
from tests.transactions.topics import ClientSettings

confluent: Any = confluent_kafka
IMPATIENT = {
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 100,
    "retry.backoff.ms": 10,
    "retry.backoff.max.ms": 100,
    "socket.timeout.ms": 3_000,
    "log_level": 0,
}
POLL_S = 0.15
SETTLE_S = 1.0


class ConfluentClient:
    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._common = {"bootstrap.servers": settings.bootstrap, **IMPATIENT}
        self._timeout_s = settings.timeout_s
        self._producer: Any = None
        self._rival: Any = None
        self._plain: Any = None
        self._assignment: dict[int, int | None] | None = None
        self._consumer = self._new_consumer()

    def _new_consumer(self) -> Any:
        settings = self._settings
        consumer = confluent.Consumer(
            {
                **self._common,
                "group.id": settings.group or f"none-{settings.transactional_id}",
                "isolation.level": settings.isolation.value,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 50,
                "session.timeout.ms": 6_000,
                "heartbeat.interval.ms": 500,
                "topic.metadata.refresh.interval.ms": 2_000,
            }
        )
        if settings.group is not None:
            consumer.subscribe([settings.topics.input_topic], on_assign=self._on_assign, on_revoke=self._on_revoke)
        return consumer

    # Producers

    def open(self) -> None:
        self._drop(self._producer)
        self._drop(self._plain)
        self._producer = self._plain = None
        self._producer = self._new_producer()

    def rival(self) -> None:
        self._rival = self._new_producer()

    def settle(self) -> None:
        self._drop(self._producer)
        self._producer, self._rival = self._rival, None

    def begin(self) -> None:
        self._do(self._producer.begin_transaction)

    def commit(self) -> None:
        self._do(self._producer.flush, self._timeout_s)
        self._do(self._producer.commit_transaction, self._timeout_s)

    def abort(self) -> None:
        # An answer to AddPartitionsToTxn that comes after the abort ends the process by an assertion of librdkafka 2.16
        # (rd_kafka_txn_handle_AddPartitionsToTxn: txn_req_cnt > 0), so it is waited for.
        try:
            self._producer.flush(SETTLE_S)
        except confluent.KafkaException:
            pass  # the abort says so too
        self._do(self._producer.abort_transaction, self._timeout_s)

    def flush(self) -> None:
        if self._plain is not None and self._plain.flush(self._timeout_s):
            raise ClientError("not all is acknowledged", may_abort=False)

    def send(self, partition: int, value: int, done: Callable[[int | None], None]) -> None:
        self._send(self._producer, partition, value, done)

    def send_plain(self, partition: int, value: int, done: Callable[[int | None], None]) -> None:
        if self._plain is None:
            self._plain = confluent.Producer({**self._common, "enable.idempotence": True, "linger.ms": 1})
        self._send(self._plain, partition, value, done)

    def send_offsets(self, offsets: dict[int, int]) -> None:
        topics = self._settings.topics
        positions = [confluent.TopicPartition(*topics.place(at), end) for at, end in offsets.items()]
        metadata = self._consumer.consumer_group_metadata()
        self._do(self._producer.send_offsets_to_transaction, positions, metadata, self._timeout_s)

    # The consumer

    def attach(self, positions: dict[int, int]) -> None:
        topics = self._settings.topics
        self._consumer.assign([confluent.TopicPartition(*topics.place(at), to) for at, to in positions.items()])

    def poll(self, limit: int) -> list[Record]:
        """What came after the last change of the assignment."""
        records: list[Record] = []
        deadline = time.monotonic() + POLL_S
        while len(records) < limit and (left_s := deadline - time.monotonic()) > 0:
            changed = self._assignment
            message = self._consumer.poll(left_s)
            if self._assignment is not changed:
                records = []
            if message is None:
                break
            if message.error() is None:
                number = self._settings.topics.number(message.topic(), message.partition())
                records.append(Record(number, message.offset(), int(message.value())))
                deadline = min(deadline, time.monotonic() + 0.01)
        return records

    def assignment(self) -> dict[int, int | None] | None:
        changed, self._assignment = self._assignment, None
        return changed

    def rewind(self) -> None:
        try:
            assigned = self._consumer.assignment()
            committed = self._consumer.committed(assigned, self._timeout_s) if assigned else []
            for each in committed:
                each.offset = max(each.offset, 0)
                self._consumer.seek(each)
        except confluent.KafkaException as error:
            raise ClientError(str(error), may_abort=False) from error
        number = self._settings.topics.number
        self._assignment = {number(each.topic, each.partition): each.offset for each in committed}

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        for producer in (self._producer, self._rival, self._plain):
            self._drop(producer)
        self._consumer.close()

    # Inside

    def _on_assign(self, consumer: Any, partitions: list[Any]) -> None:
        number = self._settings.topics.number
        self._assignment = {number(each.topic, each.partition): None for each in partitions}

    def _on_revoke(self, consumer: Any, partitions: list[Any]) -> None:
        self._assignment = {}

    def _new_producer(self) -> Any:
        settings = self._settings
        producer = confluent.Producer(
            {
                **self._common,
                "transactional.id": settings.transactional_id,
                "transaction.timeout.ms": settings.transaction_timeout_ms,
                "message.timeout.ms": settings.transaction_timeout_ms,
                "linger.ms": 1,
            }
        )
        self._do(producer.init_transactions, self._timeout_s)
        return producer

    def _send(self, producer: Any, partition: int, value: int, done: Callable[[int | None], None]) -> None:
        def report(error: Any, message: Any) -> None:
            if error is None:
                done(message.offset() if message.offset() >= 0 else None)

        topic, index = self._settings.topics.place(partition)
        try:
            producer.produce(topic, str(value).encode(), partition=index, on_delivery=report)
        except (confluent.KafkaException, BufferError) as error:
            raise ClientError(str(error), may_abort=True) from error
        producer.poll(0)

    @staticmethod
    def _do(call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except confluent.KafkaException as error:
            reason = error.args[0]
            may_abort = reason.txn_requires_abort() and not reason.fatal()
            raise ClientError(f"{call.__name__}: {reason.name()}: {reason.str()}", may_abort=may_abort) from error
        except SystemError as error:
            if not isinstance(error.__cause__, confluent.KafkaException):
                raise
            # The binding lets a fatal error of the client out so when it appears while a call waits.
            raise ClientError(f"{call.__name__}: {error.__cause__}", may_abort=False) from error

    @staticmethod
    def _drop(producer: Any) -> None:
        if producer is not None:
            producer.purge()
            try:
                producer.flush(0)
            except confluent.KafkaException:
                pass  # it failed for good before


def final_read(bootstrap: str, topics: Any, isolation: Isolation, ends: dict[int, int]) -> dict[int, list[Record]]:
    """Every partition from its beginning to its end (number -> last stable offset or high watermark)."""
    consumer = confluent.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "final",
            "isolation.level": isolation.value,
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
            **IMPATIENT,
        }
    )
    found: dict[int, list[Record]] = {number: [] for number in ends}
    unread = {number for number, end in ends.items() if end > 0}
    try:
        consumer.assign([confluent.TopicPartition(*topics.place(number), 0) for number in ends])
        deadline = time.monotonic() + 120
        while unread:
            assert time.monotonic() < deadline, f"{isolation}: {unread} are not read to their ends {ends}"
            message = consumer.poll(1.0)
            if message is None:
                continue
            number = topics.number(message.topic(), message.partition())
            if message.error() is None:
                found[number].append(Record(number, message.offset(), int(message.value())))
            elif message.error().code() == confluent.KafkaError._PARTITION_EOF:
                if message.offset() >= ends[number]:
                    unread.discard(number)
            else:
                raise AssertionError(f"{isolation} {number}: {message.error()}")
    finally:
        consumer.close()
    return found
