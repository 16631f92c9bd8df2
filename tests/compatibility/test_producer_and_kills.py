"""Our idempotent producer while its broker is killed again and again: each record once, and in order.

A Kafka broker that comes back from a kill remembers only the last batch of a producer, so that a producer which takes
"out of sequence" for "not in the log" doubles records; see `tidelog/client/producing/producer_session.py`. A proxy
swallows the broker's last answers, so that several batches of a partition are in the log unheard.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compatibility.conftest import SERVERS, start
from tests.stream_server import StreamServer
from tidelog.client import Admin, Consumer, NewTopic, Producer, TopicPartition
from tidelog.client.model import RecordMetadata
from tidelog.testing.ports import free_port
from tidelog.testing.processes import ServerProcess

UNHEARD_S = 0.3
KILLS = int(os.environ.get("TIDELOG_KILLS", "4"))
PARTITIONS = [TopicPartition("t", number) for number in range(3)]
Sent = dict[int, asyncio.Future[RecordMetadata]]


class Proxy:
    """Between producer and broker; while it is `deaf`, the broker's answers are lost."""

    def __init__(self) -> None:
        self.port = free_port()
        self.deaf = False
        self._broker_port = 0
        self._server = StreamServer(self._pass_on)

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, broker_port: int) -> None:
        self._broker_port = broker_port
        await self._server.listen(self.port)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await self._server.connect(self._broker_port)
        pumps = [
            asyncio.create_task(self._pump(reader, to_broker, False)),
            asyncio.create_task(self._pump(from_broker, writer, True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            to_broker.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        while data := await reader.read(65_536):
            if not (answers and self.deaf):
                writer.write(data)
                await writer.drain()

    def cut(self) -> None:
        self._server.drop_connections()

    async def stop(self) -> None:
        await self._server.close()


@pytest.fixture
def proxy() -> Proxy:
    return Proxy()


@pytest.fixture(params=SERVERS)
def node(request: pytest.FixtureRequest, tmp_path: Path, proxy: Proxy) -> Iterator[ServerProcess]:
    """A node of its own: others must not see it die."""
    with start(
        request.param, tmp_path, **{"advertised.listeners": f"PLAINTEXT://{proxy.bootstrap_servers}"}
    ) as started:
        yield started


async def send_until(producer: Producer, stop: asyncio.Event, sent: Sent) -> None:
    while not stop.is_set():
        number = len(sent)
        sent[number] = await producer.send("t", b"%d" % number, partition=number % len(PARTITIONS))
        if number % 50 == 0:
            await asyncio.sleep(0.001)


async def kill_and_restart(node: ServerProcess, proxy: Proxy, sent: Sent) -> None:
    for _ in range(KILLS):
        last = len(sent) + 1_000
        while last not in sent:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.wait([sent[last]])
        proxy.deaf = True
        await asyncio.sleep(UNHEARD_S)
        await asyncio.to_thread(node.kill)
        proxy.cut()
        proxy.deaf = False
        await asyncio.to_thread(node.restart, 300)


async def read_all(bootstrap: str) -> dict[TopicPartition, list[int]]:
    found: dict[TopicPartition, list[int]] = {partition: [] for partition in PARTITIONS}
    async with Consumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign(PARTITIONS)
        ends = await consumer.end_offsets(PARTITIONS)
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for partition, records in (await consumer.poll(1_000)).items():
                found[partition].extend(int(record.value or b"") for record in records)
    return found


async def test_no_record_is_doubled_when_the_broker_is_killed_under_an_idempotent_producer(node, proxy):
    await proxy.start(node.port)
    async with Admin(bootstrap_servers=proxy.bootstrap_servers) as admin:
        await admin.create_topics([NewTopic("t", len(PARTITIONS), 1)])
    sent: Sent = {}
    options = {"linger_ms": 0, "batch_size": 500, "buffer_memory": 300_000, "delivery_timeout_ms": 600_000}
    async with Producer(bootstrap_servers=proxy.bootstrap_servers, max_block_ms=600_000, **options) as producer:
        stop = asyncio.Event()
        sending = asyncio.create_task(send_until(producer, stop, sent))
        await kill_and_restart(node, proxy, sent)
        stop.set()
        await sending
        await producer.flush()
    outcomes = {number: future.exception() for number, future in sent.items()}
    assert {str(error) for error in outcomes.values() if error is not None} == set()
    found = await read_all(proxy.bootstrap_servers)
    await proxy.stop()
    for partition, numbers in found.items():
        assert numbers == sorted(set(numbers)), f"{partition}: {len(numbers) - len(set(numbers))} records twice"
    assert {number for numbers in found.values() for number in numbers} == set(sent)
    for number, future in sent.items():
        metadata = future.result()
        if metadata.offset >= 0:
            assert found[TopicPartition("t", metadata.partition)][metadata.offset] == number
