"""Our transactional producer against real brokers, with both versions of transactions.

Every test runs on Tidelog, and on Apache Kafka beside it where that is wanted (`make compat`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.compatibility.conftest import SERVERS, create_topic, start
from tests.compatibility.wire import Wire
from tests.patience import PATIENCE_S, until
from tidelog import (
    Admin,
    Consumer,
    KafkaError,
    Producer,
    ProducerFenced,
    TopicPartition,
    TransactionAborted,
    TransactionFatal,
)
from tidelog.client.network.connection import Connection
from tidelog.client.producing.transaction_manager import TransactionManager
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.end_txn import EndTxnRequest
from tidelog.testing.processes import ServerProcess

PARTITIONS = 3
OPTIONS = {
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "300",
}
UPGRADE, DOWNGRADE = 1, 2
_numbers = itertools.count(1)


@pytest.fixture(scope="module", params=SERVERS)
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start(request.param, tmp_path_factory.mktemp(request.param), **OPTIONS) as started:
        yield started


@pytest.fixture(params=[2, 1])
async def version(request: pytest.FixtureRequest, node: ServerProcess) -> int:
    await finalize(node, request.param)
    level: int = request.param
    return level


async def finalize(node: ServerProcess, level: int) -> None:
    """Finalize a version of transactions, and wait until the node says so to new connections."""
    async with Admin(bootstrap_servers=address(node)) as admin:

        async def present() -> int:
            return (await admin.describe_versions()).finalized_features.get("transaction.version", 0)

        before = await present()
        if before != level:
            kind = UPGRADE if level > before else DOWNGRADE
            await admin.update_features({"transaction.version": level}, upgrade_type=kind)
        async with asyncio.timeout(PATIENCE_S):
            while await present() != level:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def address(node: ServerProcess) -> str:
    return f"127.0.0.1:{node.port}"


def producer(node: ServerProcess, name: str = "", **options: Any) -> Producer:
    name = name or f"tx-{os.getpid()}-{next(_numbers)}"
    return Producer(**{"bootstrap_servers": address(node), "transactional_id": name, **options})


def topic_of(node: ServerProcess) -> str:
    return create_topic(node.port, f"transactions-{os.getpid()}-{next(_numbers)}", PARTITIONS)


async def read(node: ServerProcess, topic: str, isolation_level: str = "read_committed") -> list[list[bytes]]:
    """The values of each partition, up to its end at present."""
    values: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    async with Consumer(
        bootstrap_servers=address(node), isolation_level=isolation_level, auto_offset_reset="earliest"
    ) as consumer:
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        async with asyncio.timeout(PATIENCE_S):
            while any([await consumer.position(partition) < end for partition, end in ends.items()]):
                for partition, records in (await consumer.poll(200)).items():
                    values[partition.partition] += [record.value or b"" for record in records]
    return values


async def read_when_settled(node: ServerProcess, topic: str) -> list[list[bytes]]:
    """As `read`, once no transaction of the topic is open any more."""
    async with Admin(bootstrap_servers=address(node)) as admin:
        partitions: dict[TopicPartition, int | str] = {
            TopicPartition(topic, number): "latest" for number in range(PARTITIONS)
        }
        async with asyncio.timeout(PATIENCE_S):
            while True:
                stable = await admin.list_offsets(partitions, isolation_level="read_committed")
                if stable == await admin.list_offsets(partitions):
                    break
                await asyncio.sleep(0.05)
    return await read(node, topic)


async def test_readers_see_exactly_what_was_committed(node: ServerProcess, version: int) -> None:
    topic, rng = topic_of(node), random.Random(version)
    committed: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    written: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    async with producer(node, linger_ms=0) as sending:
        for number in range(60):
            is_committed = rng.random() < 0.6
            values = [(rng.randrange(PARTITIONS), b"%d-%d" % (number, each)) for each in range(rng.randrange(20))]
            await sending.begin_transaction()
            for partition, value in values:
                await sending.send(topic, value, partition=partition)
                written[partition].append(value)
            if is_committed:
                await sending.commit_transaction()
                for partition, value in values:
                    committed[partition].append(value)
            else:
                await sending.flush()
                await sending.abort_transaction()
    assert await read_when_settled(node, topic) == committed
    assert await read(node, topic, "read_uncommitted") == written


async def test_positions_move_only_with_the_records_they_belong_to(node: ServerProcess, version: int) -> None:
    topic, group = topic_of(node), f"group-{next(_numbers)}"
    source = TopicPartition(topic_of(node), 0)
    async with producer(node) as sending, Admin(bootstrap_servers=address(node)) as admin:

        async def position() -> int:
            """Kafka, too, answers for a moment as if there were none: when the marker is written and not replicated."""
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    offsets = await admin.list_group_offsets(group, require_stable=True)
                    if source in offsets:
                        return offsets[source].offset
                    await asyncio.sleep(0.05)

        async with sending.transaction():
            await sending.send(topic, b"1", partition=0)
            await sending.send_offsets_to_transaction({source: 1}, group)
        assert await position() == 1
        await sending.begin_transaction()
        await sending.send(topic, b"2", partition=0)
        await sending.send_offsets_to_transaction({source: 2}, group)
        await sending.abort_transaction()
        assert await position() == 1
    assert (await read_when_settled(node, topic))[0] == [b"1"]


async def test_a_successor_fences_and_ends_what_was_open(node: ServerProcess, version: int) -> None:
    topic = topic_of(node)
    async with producer(node, f"shared-{version}") as zombie, producer(node, f"shared-{version}") as successor:
        await zombie.begin_transaction()
        await zombie.send_and_wait(topic, b"zombie", partition=0)
        async with successor.transaction():
            await successor.send(topic, b"successor", partition=0)
        with pytest.raises(ProducerFenced):
            await zombie.commit_transaction()
        with pytest.raises(ProducerFenced):
            await zombie.begin_transaction()
    assert (await read_when_settled(node, topic))[0] == [b"successor"]


async def test_a_transaction_that_outlives_its_timeout_is_never_committed(node: ServerProcess, version: int) -> None:
    topic = topic_of(node)
    async with producer(node, transaction_timeout_ms=1_000) as sending:
        await sending.begin_transaction()
        await sending.send_and_wait(topic, b"late", partition=0)
        assert (await read_when_settled(node, topic))[0] == []  # the coordinator has aborted it
        with pytest.raises(TransactionFatal, match="transaction_timeout_ms"):
            await sending.commit_transaction()
    assert (await read_when_settled(node, topic))[0] == []


async def test_a_bad_timeout_is_told_in_one_line(node: ServerProcess) -> None:
    async with producer(node, transaction_timeout_ms=2**31 - 1) as sending:
        with pytest.raises(KafkaError, match="INVALID_TRANSACTION_TIMEOUT") as caught:
            await sending.init_transactions()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_cured", [True, False], ids=["our client", "without its rule"])
async def test_a_delayed_end_of_version_1_cannot_end_the_next_transaction(
    node: ServerProcess, monkeypatch: pytest.MonkeyPatch, is_cured: bool
) -> None:
    """KAFKA-17754: without a new epoch the late EndTxn commits half of the next transaction, which is aborted here."""
    await finalize(node, 1)
    topic = topic_of(node)
    delayed: list[EndTxnRequest] = []
    send = Connection._send

    def lose_the_first_end(self: Connection, request: Any, *arguments: Any) -> Any:
        if isinstance(request, EndTxnRequest) and not delayed:
            delayed.append(request)
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "the connection broke")
        return send(self, request, *arguments)

    monkeypatch.setattr(Connection, "_send", lose_the_first_end)
    if not is_cured:
        monkeypatch.setattr(TransactionManager, "handle_unanswered", lambda self, request: None)
    async with producer(node) as sending:
        async with sending.transaction():
            await sending.send(topic, b"first", partition=0)
        await sending.begin_transaction()
        await sending.send_and_wait(topic, b"second", partition=0)
        [late] = delayed
        code = ErrorCode.CONCURRENT_TRANSACTIONS
        with Wire(node.port) as connection:
            while code is ErrorCode.CONCURRENT_TRANSACTIONS:
                answer: Any = connection.ask(
                    "end_txn",
                    3,
                    transactional_id=late.transactional_id,
                    producer_id=late.producer_id,
                    producer_epoch=late.producer_epoch,
                    committed=True,
                )
                code = ErrorCode.of(int(answer.error_code))
        if is_cured:
            assert code in (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH)
            await sending.abort_transaction()
        else:
            assert code is ErrorCode.NONE
    seen = (await read_when_settled(node, topic))[0]
    assert seen == ([b"first"] if is_cured else [b"first", b"second"])


async def test_a_producer_follows_the_version_of_the_cluster(node: ServerProcess) -> None:
    topic = topic_of(node)
    await finalize(node, 2)
    async with producer(node) as sending:
        for number, level in enumerate((2, 1, 2, 1)):
            await sending.begin_transaction()
            await sending.send_and_wait(topic, b"%d" % number, partition=0)
            await finalize(node, level)  # under the open transaction
            assert sending._cluster is not None
            for link in sending._cluster._links.values():  # a client learns of it with its next connection
                if link.connection is not None:
                    link.connection.close()
            await sending.commit_transaction()
    assert (await read_when_settled(node, topic))[0] == [b"0", b"1", b"2", b"3"]


async def test_a_cancelled_block_leaves_nothing_behind(node: ServerProcess, version: int) -> None:
    topic = topic_of(node)
    async with producer(node) as sending:
        sent = asyncio.Event()
        results: list[asyncio.Future[Any]] = []

        async def work() -> None:
            async with sending.transaction():
                results.extend([await sending.send(topic, b"dropped" * 100) for _ in range(100)])
                sent.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await sent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: all(result.done() for result in results))
        errors = {type(result.exception()) for result in results}
        assert errors <= {type(None), TransactionAborted}
        async with sending.transaction():
            await sending.send(topic, b"kept", partition=1)
    assert await read_when_settled(node, topic) == [[], [b"kept"], []]
