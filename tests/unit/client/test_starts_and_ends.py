"""Starts, limits and ends of all clients against brokers that do not answer: what a call may take, what it leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster, refuse_produce
from tests.unit.client.test_consumer import FAST as FAST_CONSUMER
from tests.unit.client.test_consumer import T0
from tests.unit.client.test_producer import producer
from tests.unit.client.transacting import cluster_of, limited, transactional
from tidelog.client import Admin, Consumer, Producer, RebalanceListener, TopicPartition, TransactionTimeout
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.api_versions import ApiVersionsRequest
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.produce import ProduceRequest

LONG_MS = int(PATIENCE_S * 10_000)
CLIENTS = pytest.mark.parametrize("client", [Producer, Consumer, Admin])


@CLIENTS
@pytest.mark.parametrize("silent", [ApiVersionsRequest, MetadataRequest])
async def test_close_ends_a_start_in_progress(client, silent):
    async with FakeCluster(t=1) as cluster:
        cluster.script(silent, *[lambda request, node: SILENCE] * 20)
        options: dict[str, Any] = {"socket_connection_setup_timeout_ms": LONG_MS, "request_timeout_ms": LONG_MS}
        if client is Producer:
            options["delivery_timeout_ms"] = 2 * LONG_MS
        starting = client(bootstrap_servers=cluster.bootstrap, **options)
        start = asyncio.create_task(starting.start())
        await until(lambda: cluster.sent(silent))
        async with asyncio.timeout(PATIENCE_S):
            await starting.close()
            with pytest.raises(RuntimeError, match="closed"):
                await start
        assert not tasks_of_clients()


@pytest.mark.parametrize("call", ["send", "init_transactions", "begin_transaction", "transaction"])
async def test_a_call_of_a_producer_that_reaches_no_broker_ends_within_max_block_ms(call):
    """The start that it began goes on, and a later call uses it."""
    async with FakeCluster(t=1) as cluster:
        cluster.script(ApiVersionsRequest, *[lambda request, node: DROP] * 1000)
        options: dict[str, Any] = {"socket_connection_setup_timeout_ms": LONG_MS}
        if call != "send":
            options["transactional_id"] = "tx"
        sending = Producer(bootstrap_servers=cluster.bootstrap, max_block_ms=300, **options)

        async def run() -> None:
            if call == "send":
                await sending.send("t", b"1")
            elif call == "transaction":
                async with sending.transaction():
                    pytest.fail("the transaction began")
            else:
                await getattr(sending, call)()

        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(KafkaError, match=r"no broker of .* reached within max_block_ms=300") as caught:
                await run()
            assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
            assert isinstance(caught.value, TransactionTimeout) is (call != "send")
            cluster.scripts.clear()
            await sending.start()
            await sending.close()


async def test_a_transactional_call_that_reaches_no_broker_at_all_says_that_it_may_be_repeated():
    options: dict[str, Any] = {"socket_connection_setup_timeout_ms": 1, "bootstrap_servers": "127.0.0.1:1"}
    sending = Producer(transactional_id="tx", **options)
    with pytest.raises(TransactionTimeout, match=r"no broker reached at 127\.0\.0\.1:1"):
        await sending.begin_transaction()
    await sending.close()


async def test_a_transaction_whose_records_are_not_delivered_in_time_is_not_detached():
    async with cluster_of(2) as cluster, transactional(cluster) as sending:
        await sending.begin_transaction()
        cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER)] * 10_000)
        await sending.send("t", b"1", partition=0)
        async with asyncio.timeout(PATIENCE_S):
            with limited(sending, max_block_ms=300), pytest.raises(TransactionTimeout, match="max_block_ms=300"):
                await sending.detach_transaction()
            cluster.scripts.clear()
            assert await sending.detach_transaction() is not None


def tasks_of_clients() -> list[asyncio.Task[Any]]:
    tasks: list[Any] = list(asyncio.all_tasks())
    return [task for task in tasks if "/tidelog/client/" in task.get_coro().cr_code.co_filename]


@CLIENTS
async def test_close_ends_the_wait_before_another_attempt_to_start(client):
    starting = client(
        bootstrap_servers="127.0.0.1:1",
        reconnect_backoff_ms=LONG_MS,
        reconnect_backoff_max_ms=LONG_MS,
        socket_connection_setup_timeout_ms=10 * LONG_MS,
    )
    start = asyncio.create_task(starting.start())
    await asyncio.sleep(0.05)
    async with asyncio.timeout(PATIENCE_S):
        await starting.close()
        with pytest.raises(RuntimeError, match="closed"):
            await start


async def test_first_calls_of_an_admin_at_once_share_one_connection():
    async with FakeCluster(t=1) as cluster:
        admin = Admin(bootstrap_servers=cluster.bootstrap)
        assert await asyncio.gather(*(admin.list_topics() for _ in range(5))) == [["t"]] * 5
        await admin.close()
        await until(lambda: all(node.connections == 0 for node in cluster.nodes.values()))


async def test_a_call_of_an_admin_ends_in_time():
    async with FakeCluster(t=1) as cluster:
        admin = Admin(bootstrap_servers=cluster.bootstrap, default_api_timeout_ms=100, request_timeout_ms=LONG_MS)
        await admin.start()
        cluster.script(MetadataRequest, *[lambda request, node: SILENCE] * 20)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(KafkaError, match="default_api_timeout_ms=100") as caught:
                await admin.list_topics()
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
        await admin.close()


async def test_offsets_that_no_leader_names_end_in_time():
    async with FakeCluster(t=1) as cluster:
        options = {"default_api_timeout_ms": 100, "request_timeout_ms": LONG_MS}
        async with Consumer(bootstrap_servers=cluster.bootstrap, **options) as consumer:
            cluster.script(ListOffsetsRequest, *[lambda request, node: SILENCE] * 20)
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(KafkaError) as caught:
                    await consumer.end_offsets([TopicPartition("t", 0)])
            assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


async def test_a_poll_whose_listener_outlasts_close_is_not_cancelled():
    class Endless(RebalanceListener):
        called = asyncio.Event()

        async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
            self.called.set()
            await asyncio.Event().wait()

    async with FakeCluster(t=1) as cluster:
        consumer = Consumer(bootstrap_servers=cluster.bootstrap, group_id="g", **FAST_CONSUMER)
        consumer.subscribe(["t"], listener=Endless())
        poll = asyncio.create_task(consumer.poll(LONG_MS))
        await Endless.called.wait()
        await consumer.close(timeout_ms=20)
        assert await poll == {}


async def test_the_batches_that_close_gives_up_are_logged_once(caplog):
    caplog.set_level(logging.ERROR, "tidelog")
    async with FakeCluster(t=1) as cluster:
        sending = producer(cluster, batch_size=1)
        cluster.script(ProduceRequest, *[lambda request, node: SILENCE] * 50)
        sent = [await sending.send("t", b"%d" % number) for number in range(100)]
        await sending.close(timeout_ms=10)
        assert all(isinstance(future.exception(), KafkaError) for future in sent)
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            "100 records were not delivered"
        ]


@CLIENTS
@pytest.mark.parametrize("silent", [ApiVersionsRequest, MetadataRequest])
async def test_a_client_whose_start_is_cancelled_in_an_async_with_leaves_nothing(client, silent):
    async with FakeCluster(t=1) as cluster:
        cluster.script(silent, *[lambda request, node: SILENCE] * 20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), client(bootstrap_servers=cluster.bootstrap):
                pytest.fail("the client was started")
        assert not tasks_of_clients()
        await until(lambda: all(node.connections == 0 for node in cluster.nodes.values()))


CALLS_BEFORE_THE_START: dict[str, Callable[[Consumer], Awaitable[object]]] = {
    "commit": lambda consumer: consumer.commit({T0: 1}),
    "commit_async": lambda consumer: consumer.commit_async({T0: 1}),
    "committed": lambda consumer: consumer.committed(T0),
    "position": lambda consumer: consumer.position(T0),
    "seek_to_end": lambda consumer: consumer.seek_to_end(T0),
    "end_offsets": lambda consumer: consumer.end_offsets([T0]),
    "offsets_for_times": lambda consumer: consumer.offsets_for_times({T0: 0}),
    "topics": lambda consumer: consumer.topics(),
    "partitions_for_topic": lambda consumer: consumer.partitions_for_topic("t"),
}


def hanging(cluster: FakeCluster, client: Any, **options: Any) -> Any:
    """A client of a cluster whose nodes take connections and do not answer."""
    cluster.script(ApiVersionsRequest, *[lambda request, node: SILENCE] * 20)
    limits = {"socket_connection_setup_timeout_ms": LONG_MS, "request_timeout_ms": LONG_MS}
    return client(bootstrap_servers=cluster.bootstrap, **limits, **options)


@pytest.mark.parametrize("name", CALLS_BEFORE_THE_START)
async def test_a_call_of_a_consumer_that_reaches_no_broker_ends_in_time(name):
    async with FakeCluster(t=1) as cluster:
        consumer = hanging(cluster, Consumer, group_id="g", default_api_timeout_ms=100)
        consumer.assign([T0])
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(KafkaError, match="reached within default_api_timeout_ms=100") as caught:
                await CALLS_BEFORE_THE_START[name](consumer)
            assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
            await consumer.close()


async def test_a_call_of_an_admin_that_reaches_no_broker_ends_in_time():
    async with FakeCluster(t=1) as cluster:
        admin = hanging(cluster, Admin, default_api_timeout_ms=100)
        for call in (admin.list_topics, lambda: admin.list_offsets({T0: "latest"})):
            async with asyncio.timeout(PATIENCE_S):
                with pytest.raises(KafkaError, match="reached within default_api_timeout_ms=100") as caught:
                    await call()
                assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
        async with asyncio.timeout(PATIENCE_S):
            await admin.close()


@pytest.mark.parametrize("timeout_ms", [0, 50])
async def test_a_poll_that_reaches_no_broker_ends_in_time_and_a_later_one_uses_the_start(timeout_ms):
    async with FakeCluster(t=1) as cluster:
        consumer = hanging(cluster, Consumer, auto_offset_reset="earliest")
        consumer.assign([T0])
        async with asyncio.timeout(PATIENCE_S):
            assert await consumer.poll(timeout_ms) == {}
            assert await consumer.poll(timeout_ms) == {}
            await until(lambda: cluster.sent(ApiVersionsRequest))
            assert len(cluster.sent(ApiVersionsRequest)) == 1
            await consumer.close()
        assert not tasks_of_clients()


async def test_a_topic_that_is_subscribed_while_a_poll_starts_the_consumer_is_read():
    async with FakeCluster(t=1, u=1) as cluster:
        consumer = Consumer("t", bootstrap_servers=cluster.bootstrap, **FAST_CONSUMER)
        assert await consumer.poll(0) == {}
        consumer.subscribe(["u"])
        async with asyncio.timeout(PATIENCE_S):
            while not consumer.assignment():
                await consumer.poll(10)
            await consumer.close()
        assert cluster.sent(MetadataRequest)


@pytest.mark.parametrize("call", ["topics", "partitions_for_topic"])
async def test_topics_are_asked_for_again_after_a_lost_answer_and_in_time(call):
    async with FakeCluster(t=1) as cluster:
        options: dict[str, Any] = {"default_api_timeout_ms": 300, "request_timeout_ms": LONG_MS}
        consumer = Consumer(bootstrap_servers=cluster.bootstrap, retry_backoff_ms=5, reconnect_backoff_ms=5, **options)
        await consumer.start()
        cluster.script(MetadataRequest, lambda request, node: DROP, lambda request, node: DROP)
        async with asyncio.timeout(PATIENCE_S):
            assert await (consumer.topics() if call == "topics" else consumer.partitions_for_topic("t"))
            cluster.script(MetadataRequest, *[lambda request, node: SILENCE] * 20)
            with pytest.raises(KafkaError, match=r"no broker described the topics in \d+ ms") as caught:
                await (consumer.topics() if call == "topics" else consumer.partitions_for_topic("t"))
            assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
            await consumer.close()


@CLIENTS
async def test_a_client_that_was_started_in_another_event_loop_says_so(client):
    async with FakeCluster(t=1) as cluster, client(bootstrap_servers=cluster.bootstrap) as started:
        call = {Producer: "start", Consumer: "topics", Admin: "list_topics"}[client]

        def call_in_another_loop() -> None:
            asyncio.run(getattr(started, call)())

        with pytest.raises(RuntimeError, match="was started in another event loop; make one in each loop"):
            await asyncio.to_thread(call_in_another_loop)
