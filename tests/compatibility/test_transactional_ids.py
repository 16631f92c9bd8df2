"""Stock clients with a transactional id: what they commit is read, what they abort is not, an older one is fenced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.clients.client import Client
from tests.compatibility.clients.known import KINDS, Missing, environment
from tests.patience import PATIENCE_S
from tidelog.client.sync import Admin, Producer
from tidelog.testing.processes import ServerProcess

NewTopic = Callable[..., str]
ROUNDS = 6


def committed(server: ServerProcess, topic: str, count: int) -> list[str]:
    """What a reader of committed records gets, to the end of the topic."""
    confluent = pytest.importorskip("confluent_kafka")
    consumer = confluent.Consumer(
        {
            "bootstrap.servers": server.bootstrap_servers,
            "group.id": f"read-{topic}",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    partitions = [confluent.TopicPartition(topic, index, 0) for index in range(2)]
    consumer.assign(partitions)
    values: list[str] = []
    ended: set[int] = set()
    while len(ended) < len(partitions) or len(values) < count:
        message = consumer.poll(PATIENCE_S)
        assert message is not None, (values, ended)
        if message.error() is None:
            values.append(message.value().decode())
        else:
            ended.add(message.partition())
    consumer.close()
    return sorted(values)


def expected() -> list[str]:
    return sorted(f"{number}-{index}" for number in range(0, ROUNDS, 2) for index in range(2))


def test_confluent_kafka(server: ServerProcess, new_topic: NewTopic) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    topic = new_topic(partitions=2)
    config = {"bootstrap.servers": server.bootstrap_servers, "transactional.id": topic, "log_level": 0}
    old = confluent.Producer(config)
    old.init_transactions(PATIENCE_S)
    producer = confluent.Producer(config)
    producer.init_transactions(PATIENCE_S)
    for number in range(ROUNDS):
        producer.begin_transaction()
        for index in range(2):
            producer.produce(topic, f"{number}-{index}", partition=index)
        end = producer.abort_transaction if number % 2 else producer.commit_transaction
        producer.flush(PATIENCE_S)
        end(PATIENCE_S)
    old.begin_transaction()
    old.produce(topic, "fenced", partition=0)
    with pytest.raises(confluent.KafkaException) as caught:
        old.commit_transaction(PATIENCE_S)
    assert caught.value.args[0].code() == confluent.KafkaError._FENCED
    assert committed(server, topic, ROUNDS) == expected()


async def test_aiokafka(server: ServerProcess, new_topic: NewTopic) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    topic = new_topic(partitions=2)

    def client() -> Any:
        return aiokafka.AIOKafkaProducer(bootstrap_servers=server.bootstrap_servers, transactional_id=topic)

    old, producer = client(), client()
    await old.start()
    await producer.start()
    for number in range(ROUNDS):
        await producer.begin_transaction()
        for index in range(2):
            await producer.send_and_wait(topic, f"{number}-{index}".encode(), partition=index)
        await (producer.abort_transaction() if number % 2 else producer.commit_transaction())
    await old.begin_transaction()
    with pytest.raises(aiokafka.errors.ProducerFenced):
        await old.send_and_wait(topic, b"fenced", partition=0)
    await producer.stop()
    await old.stop()
    assert await asyncio.to_thread(committed, server, topic, ROUNDS) == expected()


def test_kafka_python(server: ServerProcess, new_topic: NewTopic) -> None:
    kafka = pytest.importorskip("kafka")
    topic = new_topic(partitions=2)
    producer = kafka.KafkaProducer(
        bootstrap_servers=server.bootstrap_servers, transactional_id=topic, max_block_ms=1000 * PATIENCE_S
    )
    producer.init_transactions()
    for number in range(ROUNDS):
        producer.begin_transaction()
        for index in range(2):
            producer.send(topic, f"{number}-{index}".encode(), partition=index).get(PATIENCE_S)
        (producer.abort_transaction if number % 2 else producer.commit_transaction)()
    producer.close()
    assert committed(server, topic, ROUNDS) == expected()


def client_of(kind: str, server: ServerProcess, directory: Path) -> Client:
    """A stock client that is not Python's, or skip with the reason."""
    try:
        command = KINDS[kind].command()
    except Missing as reason:
        pytest.skip(f"{kind}: {reason}")
    return Client(kind, command, server.bootstrap_servers, directory / f"{kind}.log", environment(KINDS[kind]))


@pytest.mark.parametrize("kind", ["kafkajs", "franz-go"])
def test_a_client_of_another_language(server: ServerProcess, new_topic: NewTopic, tmp_path: Path, kind: str) -> None:
    topic = new_topic(partitions=2)
    with client_of(kind, server, tmp_path) as client:
        refusal = client.ask("transact", topic=topic, group=f"group-{topic}", rounds=ROUNDS)
    assert "FENCED" in refusal or "INVALID_PRODUCER_EPOCH" in refusal, refusal
    assert committed(server, topic, ROUNDS) == expected()
    if kind == "kafkajs":
        with Admin(bootstrap_servers=server.bootstrap_servers) as admin:
            offsets = admin.list_group_offsets(f"group-{topic}", require_stable=True)
        assert [each.offset for each in offsets.values()] == [ROUNDS - 1], "the last round was aborted"


@pytest.mark.parametrize("kind", ["franz-go"])
def test_what_is_read_and_written_in_one_transaction(
    server: ServerProcess, new_topic: NewTopic, tmp_path: Path, kind: str
) -> None:
    """Its transaction session: a group's offsets and the records made of them, every second transaction aborted."""
    given, got = new_topic(partitions=2), new_topic(partitions=2)
    with Producer(bootstrap_servers=server.bootstrap_servers) as producer:
        for number in range(30):
            producer.send(given, f"{number}".encode(), partition=number % 2).result(PATIENCE_S)
    with client_of(kind, server, tmp_path) as client:
        assert client.ask("copy", name=given, topic=got, group=f"group-{got}", count=30) == 30
    assert committed(server, got, 30) == sorted(map(str, range(30)))
