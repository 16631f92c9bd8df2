"""One client in a process of its own.

`python -m tidelog.bench.clients.worker KIND CLIENT BOOTSTRAP TOPIC RECORDS SIZE` prints one line of JSON: the records
that count, seconds, CPU seconds of all threads and, one at a time, the latencies in microseconds. All clients send with
acks=all, idempotence and a linger of 5 ms (0 one at a time); the rest is each client's default.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_ACKS = {"acks": "all", "enable_idempotence": True, "linger_ms": 5}
_ROWS_PER_TABLE = 50_000
_RECORDS_PER_CALL = 1_000
_RECORDS_PER_POLL = 5_000
_SLOW_CLIENTS = {"confluent-kafka, asyncio poll"}
"""They work on a tenth of the records, so that a round takes seconds as with the others."""
_UNCOUNTED_DIVISORS = {"consume": 3}
"""A tenth of the records does not count; of those that are read a third, in which tidelog's compiled loop is loaded."""
_TIMEOUT_S = 120.0


class Work(NamedTuple):
    """What to do: `records` of `size` bytes in `topic`."""

    bootstrap: str
    topic: str
    records: int
    size: int

    @property
    def value(self) -> bytes:
        return b"v" * self.size


class Meter:
    """Time, CPU and latencies of the counted records, which follow `uncounted` others."""

    def __init__(self, records: int, uncounted: int) -> None:
        self.latencies_us: list[float] = []
        self._wanted = records
        self._uncounted = uncounted
        self._seen = 0
        self._start()

    def _start(self) -> None:
        self.counted_from = self._seen
        self.latencies_us.clear()
        self._start_s, self._start_cpu_s = time.perf_counter(), time.process_time()

    def parts(self) -> Iterator[int]:
        """How many records to send, in two parts; the second is counted."""
        yield self._uncounted
        self._seen = self._uncounted
        self._start()
        yield self._wanted - self._uncounted
        self._seen = self._wanted
        self.stop()

    def wants_more(self, records: int) -> bool:
        """Whether records are left to read, after so many more of them."""
        self._seen += records
        if self.counted_from == 0 and self._uncounted < self._seen < self._wanted:
            self._start()
        if self._seen < self._wanted:
            return True
        self.stop()
        return False

    def stop(self) -> None:
        self.elapsed_s, self.cpu_s = time.perf_counter() - self._start_s, time.process_time() - self._start_cpu_s

    def as_json(self) -> str:
        counted = self._seen - self.counted_from
        return json.dumps(
            {"records": counted, "elapsed_s": self.elapsed_s, "cpu_s": self.cpu_s, "latencies_us": self.latencies_us}
        )


async def _produce(work: Work, meter: Meter, send: Callable[[Any, int], Any]) -> None:
    from tidelog import Producer

    async with Producer(bootstrap_servers=work.bootstrap, **_ACKS) as producer:
        for count in meter.parts():
            await send(producer, count)
            await producer.flush()


def tidelog_produce(work: Work, meter: Meter) -> None:
    async def send(producer: Any, count: int) -> None:
        value = work.value
        for _ in range(count):
            await producer.send(work.topic, value)

    asyncio.run(_produce(work, meter, send))


def tidelog_produce_many(work: Work, meter: Meter) -> None:
    async def send(producer: Any, count: int) -> None:
        values = [work.value] * _RECORDS_PER_CALL
        for start in range(0, count, _RECORDS_PER_CALL):
            await producer.send_many(work.topic, values[: count - start])

    asyncio.run(_produce(work, meter, send))


def tidelog_produce_arrow(work: Work, meter: Meter) -> None:
    import pyarrow as pa

    rows = pa.array([work.value] * _ROWS_PER_TABLE, pa.binary())
    table = pa.table({"key": pa.nulls(_ROWS_PER_TABLE, pa.binary()), "value": rows})

    async def send(producer: Any, count: int) -> None:
        for start in range(0, count, _ROWS_PER_TABLE):
            await producer.send_arrow(work.topic, table.slice(0, count - start))

    asyncio.run(_produce(work, meter, send))


def tidelog_blocking_produce(work: Work, meter: Meter) -> None:
    from tidelog.client.sync import Producer

    with Producer(bootstrap_servers=work.bootstrap, **_ACKS) as producer:
        value = work.value
        for count in meter.parts():
            for _ in range(count):
                producer.send(work.topic, value)
            producer.flush()


def aiokafka_produce(work: Work, meter: Meter) -> None:
    from aiokafka import AIOKafkaProducer

    async def run() -> None:
        async with AIOKafkaProducer(bootstrap_servers=work.bootstrap, **_ACKS) as producer:
            value = work.value
            for count in meter.parts():
                for _ in range(count):
                    await producer.send(work.topic, value)
                await producer.flush()

    asyncio.run(run())


def kafka_python_produce(work: Work, meter: Meter) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(bootstrap_servers=work.bootstrap, **_ACKS)
    value = work.value
    for count in meter.parts():
        for _ in range(count):
            producer.send(work.topic, value)
        producer.flush()
    producer.close()


def _confluent_producer(work: Work) -> Any:
    from confluent_kafka import Producer

    own = {name.replace("_", "."): value for name, value in _ACKS.items()}
    return Producer({"bootstrap.servers": work.bootstrap, "log_level": 0, **own})


def confluent_produce(work: Work, meter: Meter) -> None:
    producer = _confluent_producer(work)
    value, failed = work.value, []

    def delivered(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error)

    for count in meter.parts():
        for _ in range(count):
            while True:
                try:
                    producer.produce(work.topic, value, on_delivery=delivered)
                    break
                except BufferError:
                    producer.poll(0.01)
            producer.poll(0)
        if producer.flush(_TIMEOUT_S) or failed:
            raise RuntimeError(f"not delivered: {failed[:1]}")


def tidelog_one(work: Work, meter: Meter) -> None:
    async def send(producer: Any, count: int) -> None:
        value = work.value
        for _ in range(count):
            start_s = time.perf_counter()
            await producer.send_and_wait(work.topic, value)
            meter.latencies_us.append((time.perf_counter() - start_s) * 1e6)

    async def run() -> None:
        from tidelog import Producer

        async with Producer(bootstrap_servers=work.bootstrap, **{**_ACKS, "linger_ms": 0}) as producer:
            for count in meter.parts():
                await send(producer, count)

    asyncio.run(run())


def confluent_one(work: Work, meter: Meter) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": work.bootstrap, "log_level": 0, "acks": "all",
                         "enable.idempotence": True, "linger.ms": 0})  # fmt: skip
    value = work.value
    for count in meter.parts():
        for _ in range(count):
            start_s = time.perf_counter()
            producer.produce(work.topic, value)
            if producer.flush(_TIMEOUT_S):
                raise RuntimeError("not delivered")
            meter.latencies_us.append((time.perf_counter() - start_s) * 1e6)


def aiokafka_one(work: Work, meter: Meter) -> None:
    from aiokafka import AIOKafkaProducer

    async def run() -> None:
        producer = AIOKafkaProducer(bootstrap_servers=work.bootstrap, **{**_ACKS, "linger_ms": 0})
        async with producer:
            value = work.value
            for count in meter.parts():
                for _ in range(count):
                    start_s = time.perf_counter()
                    await producer.send_and_wait(work.topic, value)
                    meter.latencies_us.append((time.perf_counter() - start_s) * 1e6)

    asyncio.run(run())


def tidelog_consume(work: Work, meter: Meter) -> None:
    async def run() -> None:
        from tidelog import Consumer

        async with Consumer(work.topic, bootstrap_servers=work.bootstrap, auto_offset_reset="earliest") as consumer:
            count = 0
            while meter.wants_more(count):
                count = sum(map(len, (await consumer.poll(1000, _RECORDS_PER_POLL)).values()))

    asyncio.run(run())


def tidelog_iterate(work: Work, meter: Meter) -> None:
    async def run() -> None:
        from tidelog import Consumer

        async with Consumer(work.topic, bootstrap_servers=work.bootstrap, auto_offset_reset="earliest") as consumer:
            async for _ in consumer:
                if not meter.wants_more(1):
                    break

    asyncio.run(run())


def tidelog_consume_arrow(work: Work, meter: Meter) -> None:
    async def run() -> None:
        from tidelog import Consumer

        async with Consumer(work.topic, bootstrap_servers=work.bootstrap, auto_offset_reset="earliest") as consumer:
            count = 0
            while meter.wants_more(count):
                count = (await consumer.poll_arrow(1000, _ROWS_PER_TABLE)).num_rows

    asyncio.run(run())


def tidelog_blocking_consume(work: Work, meter: Meter) -> None:
    from tidelog.client.sync import Consumer

    with Consumer(work.topic, bootstrap_servers=work.bootstrap, auto_offset_reset="earliest") as consumer:
        count = 0
        while meter.wants_more(count):
            count = sum(map(len, consumer.poll(1000, _RECORDS_PER_POLL).values()))


def aiokafka_consume(work: Work, meter: Meter) -> None:
    from aiokafka import AIOKafkaConsumer

    async def run() -> None:
        options: Any = {"bootstrap_servers": work.bootstrap, "auto_offset_reset": "earliest"}
        async with AIOKafkaConsumer(work.topic, **options) as consumer:
            count = 0
            while meter.wants_more(count):
                batches = await consumer.getmany(timeout_ms=1000, max_records=_RECORDS_PER_POLL)
                count = sum(map(len, batches.values()))

    asyncio.run(run())


def aiokafka_iterate(work: Work, meter: Meter) -> None:
    from aiokafka import AIOKafkaConsumer

    async def run() -> None:
        options: Any = {"bootstrap_servers": work.bootstrap, "auto_offset_reset": "earliest"}
        async with AIOKafkaConsumer(work.topic, **options) as consumer:
            async for _ in consumer:
                if not meter.wants_more(1):
                    break

    asyncio.run(run())


def kafka_python_consume(work: Work, meter: Meter) -> None:
    from kafka import KafkaConsumer

    consumer = KafkaConsumer(work.topic, bootstrap_servers=work.bootstrap, auto_offset_reset="earliest")
    count = 0
    while meter.wants_more(count):
        count = sum(map(len, consumer.poll(timeout_ms=1000, max_records=_RECORDS_PER_POLL).values()))
    consumer.close()


def _confluent_consumer_options(work: Work) -> dict[str, Any]:
    return {
        "bootstrap.servers": work.bootstrap, "group.id": "bench", "enable.auto.commit": False, "log_level": 0,
        # Its default of a second after a full queue would measure sleep.
        "fetch.queue.backoff.ms": 5,
    }  # fmt: skip


def confluent_consume(work: Work, meter: Meter) -> None:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer(_confluent_consumer_options(work))
    partitions = consumer.list_topics(work.topic, timeout=_TIMEOUT_S).topics[work.topic].partitions
    consumer.assign([TopicPartition(work.topic, index, OFFSET_BEGINNING) for index in partitions])
    count = 0
    while meter.wants_more(count):
        count = sum(1 for message in consumer.consume(_RECORDS_PER_POLL, 1.0) if message.error() is None)
    consumer.close()


def _confluent_asyncio(work: Work, meter: Meter, read: Callable[[Any], Any]) -> None:
    """Read with confluent-kafka's own asyncio consumer, which calls the blocking one on a thread."""
    from confluent_kafka import OFFSET_BEGINNING, TopicPartition
    from confluent_kafka.aio import AIOConsumer

    async def run() -> None:
        consumer = AIOConsumer(_confluent_consumer_options(work))
        topics = (await consumer.list_topics(work.topic, timeout=_TIMEOUT_S)).topics
        await consumer.assign(
            [TopicPartition(work.topic, at, OFFSET_BEGINNING) for at in topics[work.topic].partitions]
        )
        count = 0
        while meter.wants_more(count):
            count = await read(consumer)
        await consumer.close()

    asyncio.run(run())


def confluent_asyncio_consume(work: Work, meter: Meter) -> None:
    async def read(consumer: Any) -> int:
        return sum(1 for message in await consumer.consume(_RECORDS_PER_POLL, 1.0) if message.error() is None)

    _confluent_asyncio(work, meter, read)


def confluent_asyncio_poll(work: Work, meter: Meter) -> None:
    async def read(consumer: Any) -> int:
        message = await consumer.poll(1.0)
        return int(message is not None and message.error() is None)

    _confluent_asyncio(work, meter, read)


CLIENTS: dict[str, dict[str, Callable[[Work, Meter], None]]] = {
    "produce": {
        "tidelog": tidelog_produce,
        "tidelog, send_many": tidelog_produce_many,
        "tidelog, send_arrow": tidelog_produce_arrow,
        "tidelog, blocking": tidelog_blocking_produce,
        "aiokafka": aiokafka_produce,
        "kafka-python": kafka_python_produce,
        "confluent-kafka": confluent_produce,
    },
    "consume": {
        "tidelog": tidelog_consume,
        "tidelog, async for": tidelog_iterate,
        "tidelog, poll_arrow": tidelog_consume_arrow,
        "tidelog, blocking": tidelog_blocking_consume,
        "aiokafka": aiokafka_consume,
        "aiokafka, async for": aiokafka_iterate,
        "kafka-python": kafka_python_consume,
        "confluent-kafka": confluent_consume,
        "confluent-kafka, asyncio": confluent_asyncio_consume,
        "confluent-kafka, asyncio poll": confluent_asyncio_poll,
    },
    "one at a time": {
        "tidelog": tidelog_one,
        "aiokafka": aiokafka_one,
        "confluent-kafka": confluent_one,
    },
}


def main(arguments: list[str]) -> None:
    kind, client, bootstrap, topic, records, size = arguments
    work = Work(bootstrap, topic, int(records) // (10 if client in _SLOW_CLIENTS else 1), int(size))
    meter = Meter(work.records, work.records // _UNCOUNTED_DIVISORS.get(kind, 10))
    CLIENTS[kind][client](work, meter)
    print(meter.as_json())


if __name__ == "__main__":
    main(sys.argv[1:])
