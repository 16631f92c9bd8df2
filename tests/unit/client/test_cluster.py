"""The cluster as a client holds it: how many connections there are, and what `close` leaves."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster, FakeNode
from tests.unit.client.test_silent_leader import answered_but_by
from tidelog.client import Consumer, Producer
from tidelog.client.config import ClientConfig
from tidelog.client.model import Node, TopicPartition
from tidelog.client.network import cluster as cluster_module
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import Connection
from tidelog.client.network.offsets import list_offsets
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.api_versions import ApiVersionsRequest
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.metadata import MetadataRequest


def connections(fake: FakeCluster) -> int:
    return sum(node.connections for node in fake.nodes.values())


async def test_all_who_need_any_connection_at_once_share_one():
    async with FakeCluster(nodes=2) as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        given = await asyncio.gather(*(cluster.any_connection() for _ in range(10)))
        assert len(set(given)) == 1
        assert len(fake.sent(ApiVersionsRequest)) == 1
        await cluster.close()
        await until(lambda: connections(fake) == 0)


async def test_a_broker_that_does_not_answer_does_not_hide_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_BROKER_WAIT_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with FakeCluster() as fake:
            servers = f"127.0.0.1:{silent.getsockname()[1]},{fake.bootstrap}"
            limit_ms = int(PATIENCE_S * 10_000)
            cluster = Cluster(ClientConfig(bootstrap_servers=servers, socket_connection_setup_timeout_ms=limit_ms))
            async with asyncio.timeout(PATIENCE_S):
                await cluster.start()
            assert connections(fake) == 1
            await cluster.close()


async def test_one_who_gives_up_does_not_take_the_connection_from_the_others():
    async with FakeCluster() as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        first, second = (asyncio.ensure_future(cluster.any_connection()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert not (await second).closed
        await cluster.close()


async def test_closing_ends_a_connection_on_its_way_with_an_error():
    async with FakeCluster() as fake:
        fake.script(ApiVersionsRequest, lambda request, node: SILENCE)
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        waiting = asyncio.ensure_future(cluster.any_connection())
        await until(lambda: fake.sent(ApiVersionsRequest))
        await cluster.close()
        with pytest.raises(KafkaError) as caught:
            await waiting
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
        await until(lambda: connections(fake) == 0)


async def test_closing_ends_every_wait_for_metadata_with_an_error_also_one_that_begins_later():
    async with FakeCluster(t=1) as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        await cluster.start()
        beyond = asyncio.ensure_future(list_offsets(cluster, {TopicPartition("missing", 0): -1}, timeout_ms=600_000))
        topic = asyncio.ensure_future(cluster.topic("missing", 600_000))
        await until(lambda: "missing" in cluster.metadata.topics)
        await cluster.close()
        async with asyncio.timeout(PATIENCE_S):
            for waiting in (beyond, topic, cluster.wait_for_metadata(600_000)):
                with pytest.raises(KafkaError) as caught:
                    await waiting
                assert caught.value.code is ErrorCode.NETWORK_EXCEPTION


@pytest.mark.parametrize(("host", "port"), [("a..b", 9092), ("x" * 70, 9092), ("127.0.0.1", 70_000), ("127.0.0.1", -1)])
async def test_an_address_that_cannot_exist_is_like_one_where_nothing_listens(host, port):
    async with FakeCluster() as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        await cluster.start()
        cluster.metadata = cluster.metadata._replace(nodes={7: Node(7, host, port, None)})
        with pytest.raises(KafkaError) as caught:
            await cluster.connection(7)
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
        await cluster.close()


async def test_closing_leaves_no_socket_to_a_broker_that_does_not_read() -> None:
    """What was written could not leave, so the transport outlived the client and its loop."""
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    _, connection = await loop.create_connection(
        lambda: Connection("deaf", "test", 1 << 20), "127.0.0.1", listener.getsockname()[1]
    )
    accepted, _ = await loop.sock_accept(listener)
    transport = connection._transport
    assert transport is not None
    transport.write(bytes(64 << 20))
    connection.close()
    await connection.wait_closed(0.05)
    await asyncio.wait_for(asyncio.shield(connection._closed_future), PATIENCE_S)
    accepted.close()
    listener.close()


async def test_a_fault_in_a_refresh_does_not_end_the_refreshes(caplog):
    async with FakeCluster() as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, retry_backoff_ms=5))
        await cluster.start()
        faults = [ZeroDivisionError(), ValueError()]

        def fail_twice() -> None:
            if faults:
                raise faults.pop()

        cluster.on_metadata = fail_twice
        cluster.request_refresh()
        await until(lambda: not faults)
        assert await cluster.wait_for_metadata(PATIENCE_S * 1000)
        assert "a fault of the client" in caplog.text
        await cluster.close()


@pytest.mark.slow
async def test_a_broker_that_cannot_be_reached_at_its_advertised_address_is_logged(caplog, monkeypatch) -> None:
    monkeypatch.setattr(cluster_module, "_UNREACHABLE_S", 0.1)
    async with FakeCluster(nodes=2) as fake:
        first, second = fake.nodes.values()
        cluster = Cluster(ClientConfig(bootstrap_servers=f"127.0.0.1:{first.port}", reconnect_backoff_ms=20))
        await cluster.start()
        await second.stop()
        for _ in range(8):
            with pytest.raises(KafkaError):
                await cluster.connection(second.node_id)
        await cluster.close()
    told = [each.getMessage() for each in caplog.records if each.name == cluster_module.__name__]
    assert len(told) == 1
    address = re.escape(f"127.0.0.1:{second.port}")
    at = f"broker {second.node_id} cannot be reached at its advertised address for \\d+ s: "
    assert re.fullmatch(f"{at}cannot connect to {address}: .*", told[0])


async def test_nodes_that_have_changed_their_addresses_with_each_other_are_found() -> None:
    """A connection to an address that a node has left is no connection to this node, also when one listens there."""
    async with FakeCluster(nodes=2, t=2) as fake:
        options = {"bootstrap_servers": fake.bootstrap, "retry_backoff_ms": 5, "reconnect_backoff_ms": 5}
        async with (
            Producer(**options, linger_ms=0) as producer,
            Consumer("t", **options, auto_offset_reset="earliest") as consumer,
        ):
            for partition in (0, 1):
                await producer.send_and_wait("t", b"before", partition=partition)
            first, second = fake.nodes.values()
            await first.stop()
            await second.stop()
            first.port, second.port = second.port, first.port
            await first.start()
            await second.start()
            async with asyncio.timeout(PATIENCE_S):
                for partition in (0, 1):
                    await producer.send_and_wait("t", b"after", partition=partition)
                read = 0
                while read < 4:
                    read += sum(map(len, (await consumer.poll(100)).values()))


async def test_a_broker_that_hangs_does_not_hide_what_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_ANSWER_WAIT_S", 0.01)
    async with FakeCluster(t=2, nodes=3) as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, request_timeout_ms=3_600_000))
        await cluster.start()
        hanging = next(node for node, _, each in fake.requests if isinstance(each, MetadataRequest))
        fake.script(
            MetadataRequest,
            *[lambda request, node: SILENCE if node.node_id == hanging else node.on_metadata(request)] * 99,
        )
        assert await cluster.wait_for_metadata(PATIENCE_S * 1000)
        await cluster.close()
        await until(lambda: connections(fake) == 0)


@pytest.mark.parametrize("keeps_broker", [False, True])
async def test_a_broker_that_hangs_does_not_hold_the_start(monkeypatch: pytest.MonkeyPatch, keeps_broker: bool) -> None:
    monkeypatch.setattr(cluster_module, "_ANSWER_WAIT_S", 0.01)
    async with FakeCluster(t=2, nodes=3) as fake:
        hanging: list[int] = []

        def answer(request: MetadataRequest, node: FakeNode) -> object:
            hanging.extend([] if hanging else [node.node_id])
            return SILENCE if node.node_id in hanging else node.on_metadata(request)

        fake.script(MetadataRequest, *[answer] * 99)
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, request_timeout_ms=3_600_000))
        cluster.keeps_broker = keeps_broker
        async with asyncio.timeout(PATIENCE_S):
            await cluster.start()
            monkeypatch.setattr(cluster_module, "_ANSWER_WAIT_S", 3_600.0)
            assert len((await cluster.fetch_metadata([])).brokers) == 3, "another one is asked first now"
        assert fake.nodes[hanging[0]].connections == 0
        await cluster.close()
        await until(lambda: connections(fake) == 0)


@pytest.mark.parametrize("unanswered", [MetadataRequest, ApiVersionsRequest])
async def test_closing_ends_a_start_that_asks_several_bootstrap_servers(
    monkeypatch: pytest.MonkeyPatch, unanswered: type[Message]
) -> None:
    monkeypatch.setattr(cluster_module, "_ANSWER_WAIT_S", 0.01)
    async with FakeCluster(nodes=3) as fake:
        fake.script(unanswered, *[lambda request, node: SILENCE] * 99)
        cluster = Cluster(
            ClientConfig(
                bootstrap_servers=fake.bootstrap,
                request_timeout_ms=3_600_000,
                socket_connection_setup_timeout_ms=3_600_000,
            )
        )
        start = asyncio.ensure_future(cluster.start())
        await until(lambda: len(fake.sent(unanswered)) >= 4)  # one server twice: first as any, then by its address
        await cluster.close()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(KafkaError, match="this client is closed"):
                await start
        await until(lambda: connections(fake) == 0)


async def test_closing_ends_a_start_whose_first_connection_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_ANSWER_WAIT_S", 0.01)
    second_is_asked = asyncio.Event()

    async def drop_first(request: MetadataRequest, node: FakeNode) -> object:
        await second_is_asked.wait()
        return DROP

    def hang_second(request: MetadataRequest, node: FakeNode) -> object:
        second_is_asked.set()
        return SILENCE

    async with FakeCluster() as fake:
        fake.script(MetadataRequest, drop_first, hang_second)
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, request_timeout_ms=3_600_000))
        start = asyncio.ensure_future(cluster.start())
        await until(lambda: second_is_asked.is_set() and connections(fake) == 1)
        await cluster.close()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(KafkaError, match="this client is closed"):
                await start
        await until(lambda: connections(fake) == 0)


async def test_a_slow_bootstrap_server_does_not_replace_the_one_that_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_module, "_ANSWER_WAIT_S", 0.01)
    monkeypatch.setattr(cluster_module, "_BROKER_WAIT_S", 3_600.0)
    connect, is_slow, has_started = Cluster._connect_first_reachable, iter([True]), asyncio.Event()

    async def connect_slowly(cluster: Cluster) -> Connection:
        if next(is_slow, False):
            await has_started.wait()
        return await connect(cluster)

    monkeypatch.setattr(Cluster, "_connect_first_reachable", connect_slowly)
    async with FakeCluster(nodes=3) as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        async with asyncio.timeout(PATIENCE_S):
            await cluster.start()
            await until(lambda: connections(fake) == 1)
            opened = len(fake.sent(ApiVersionsRequest))
            has_started.set()
            await until(lambda: len(fake.sent(ApiVersionsRequest)) > opened and connections(fake) == 1)
        await cluster.close()
        await until(lambda: connections(fake) == 0)


async def test_a_broker_that_hangs_does_not_hold_what_another_one_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_ANSWER_WAIT_S", 0.01)
    async with FakeCluster(nodes=3) as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, request_timeout_ms=3_600_000))
        await cluster.start()
        hanging = next(node for node, _, each in fake.requests if isinstance(each, MetadataRequest))
        handlers: dict[type[Message], Callable[[FakeNode, Any], Any]] = {
            MetadataRequest: FakeNode.on_metadata,
            FindCoordinatorRequest: FakeNode.on_find_coordinator,
            InitProducerIdRequest: FakeNode.on_init_producer_id,
        }
        for kind, handler in handlers.items():
            fake.script(kind, *[answered_but_by(hanging, handler)] * 99)
        cluster.keeps_broker = True  # the one that hangs
        async with asyncio.timeout(PATIENCE_S):
            assert await cluster.find_coordinator("g") == fake.coordinator
            assert len((await cluster.fetch_metadata([])).brokers) == 3
            assert (await cluster.call_any(InitProducerIdRequest(), InitProducerIdResponse)).producer_id >= 0
            monkeypatch.setattr(cluster_module, "_ANSWER_WAIT_S", 3_600.0)
            assert len((await cluster.fetch_metadata([])).brokers) == 3, "another one is asked first now"
        await cluster.close()


async def test_idle_connections_are_closed_in_time_and_cost_no_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were looked at only where metadata had grown old, and a refresh then connected anew at once."""
    monkeypatch.setattr(cluster_module, "_IDLE_LOOK_S_MIN", 0.01)
    async with FakeCluster(nodes=2) as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, connections_max_idle_ms=50))
        await cluster.start()
        await cluster.connection(1)
        refreshes = cluster.refreshes_begun
        await until(lambda: connections(fake) == 0)
        assert cluster.ready(1) is None
        assert cluster._idle_timer is None, "without a connection there is nothing to look at"
        assert cluster.refreshes_begun == refreshes
        await cluster.connection(1)
        await until(lambda: connections(fake) == 0)
        await cluster.close()


@pytest.mark.slow
async def test_a_connection_that_is_used_or_waits_for_an_answer_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_IDLE_LOOK_S_MIN", 0.01)
    async with FakeCluster(nodes=2) as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, connections_max_idle_ms=1_000))
        await cluster.start()
        fake.script(InitProducerIdRequest, lambda request, node: SILENCE)
        waiting = await cluster.connection(2)
        answer = waiting.send(InitProducerIdRequest(), InitProducerIdResponse, 0, 600_000)
        used = await cluster.connection(1)
        for _ in range(20):
            await asyncio.sleep(0.1)
            used.last_used = asyncio.get_running_loop().time()
        assert not waiting.closed
        assert not used.closed
        assert cluster._idle_timer is not None
        await until(lambda: used.closed)
        assert not waiting.closed
        await cluster.close()
        assert isinstance(answer.exception(), KafkaError)


@pytest.mark.slow
async def test_a_connection_is_idle_from_its_last_answer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was idle from its last request on, so an answer that took longer was its end."""
    monkeypatch.setattr(cluster_module, "_IDLE_LOOK_S_MIN", 0.01)
    async with FakeCluster() as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, connections_max_idle_ms=500))
        await cluster.start()
        answer = asyncio.Event()

        async def answer_late(request: Any, node: FakeNode) -> InitProducerIdResponse:
            await answer.wait()
            return InitProducerIdResponse(producer_id=1)

        fake.script(InitProducerIdRequest, answer_late)
        used = await cluster.connection(1)
        waiting = used.send(InitProducerIdRequest(), InitProducerIdResponse, 0, 600_000)
        await asyncio.sleep(1.2)
        answered_s = (
            asyncio.get_running_loop().time()
        )  # after the answer it may show a moment later than the idle time's
        answer.set()
        await waiting
        await until(lambda: used.closed)
        assert asyncio.get_running_loop().time() - answered_s >= 0.5
        await cluster.close()


@pytest.mark.parametrize("node_id", [1, None])
async def test_a_new_connection_is_not_idle_before_its_caller_uses_it(
    monkeypatch: pytest.MonkeyPatch, node_id: int | None
) -> None:
    """A loop that stood still for longer than the limit closed it before the caller came to its turn."""
    async with FakeCluster() as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, connections_max_idle_ms=50))
        await cluster.start()
        cluster.close_connections()
        looks = []

        def stand_still_and_look() -> None:
            looks.extend(cluster._connections())
            for each in looks:
                each.last_used -= 1.0
            monkeypatch.undo()
            cluster._close_idle()

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(cluster, "_await_idle", lambda delay_s: loop.call_soon(stand_still_and_look))
        connection = await (cluster.any_connection() if node_id is None else cluster.connection(node_id))
        assert connection in looks
        assert not connection.closed
        await cluster.close()


async def test_without_a_limit_connections_are_kept_and_with_none_at_all_those_that_wait() -> None:
    async with FakeCluster() as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, connections_max_idle_ms=-1))
        await cluster.start()
        assert cluster._idle_timer is None
        await cluster.close()
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, connections_max_idle_ms=0))
        await cluster.start()
        fake.script(InitProducerIdRequest, lambda request, node: SILENCE)
        waiting = await cluster.connection(1)
        answer = waiting.send(InitProducerIdRequest(), InitProducerIdResponse, 0, 600_000)
        cluster._close_idle()
        assert not waiting.closed
        await cluster.close()
        assert isinstance(answer.exception(), KafkaError)


async def test_looks_for_idle_connections_keep_a_distance() -> None:
    async with FakeCluster() as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, connections_max_idle_ms=1))
        await cluster.start()
        timer = cluster._idle_timer
        assert timer is not None
        assert timer.when() - asyncio.get_running_loop().time() > cluster_module._IDLE_LOOK_S_MIN / 2
        await cluster.close()
        assert timer.cancelled()


async def test_a_wait_for_a_topic_may_be_longer_than_an_idle_topic_is_kept():
    async with FakeCluster() as fake:
        fake.auto_create_partitions = 0
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, retry_backoff_ms=5, retry_backoff_max_ms=5))
        cluster.forget_idle_topics_after(20)
        await cluster.start()
        waiting = asyncio.create_task(cluster.topic("late", PATIENCE_S * 1000))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        fake.create("late", 1)
        async with asyncio.timeout(PATIENCE_S / 2):
            assert (await waiting).is_usable
        await cluster.close()


async def test_a_start_fetches_the_metadata_once() -> None:
    """A consumer names its topics before the start, which then left their refresh requested."""
    async with FakeCluster(t=1) as fake:
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap))
        cluster.track(("t",))
        await cluster.start()
        assert cluster.metadata.topics["t"].is_usable
        assert not cluster._refresh_requested.is_set()
        assert len(fake.sent(MetadataRequest)) == 1
        await cluster.close()


async def test_a_topic_that_stays_missing_is_asked_for_later_and_later() -> None:
    """The metadata of all topics was fetched every 100 ms: with 300 of them a fifth of a core."""
    async with FakeCluster(t=1) as fake:
        options: dict[str, Any] = {"retry_backoff_ms": 10, "retry_backoff_max_ms": 3_600_000}
        cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, **options))
        cluster.track(("t", "misspelt"))
        await cluster.start()
        started_s = asyncio.get_running_loop().time()
        await until(lambda: len(fake.sent(MetadataRequest)) >= 6)
        assert asyncio.get_running_loop().time() - started_s > 0.2, "10, 20, 40, 80 and 160 ms, less a fifth"
        fake.create("misspelt", 1)
        while not cluster.metadata.topics["misspelt"].is_usable:  # the first one may have been on its way before
            assert await cluster.wait_for_metadata(PATIENCE_S * 1000), "another cause does not wait"
        assert cluster._all_due_s - asyncio.get_running_loop().time() > 100, "as metadata.max.age.ms says"
        await cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("client", ["consumer", "producer"])
async def test_a_leader_that_stays_missing_is_asked_for_later_and_later(client: str) -> None:
    """A partition without a leader cost ten refreshes of the metadata each second for as long as it had none."""
    async with FakeCluster(t=2) as fake, contextlib.AsyncExitStack() as stack:
        options: dict[str, Any] = {"bootstrap_servers": fake.bootstrap, "retry_backoff_ms": 5}
        lost = fake.topics["t"][0]
        lost.leader = -1
        inner: Cluster | None
        polling: asyncio.Task[Any]
        if client == "consumer":
            consumer = await stack.enter_async_context(Consumer(**options, auto_offset_reset="earliest"))
            consumer.assign([TopicPartition("t", 0)])
            polling = asyncio.create_task(consumer.poll(PATIENCE_S * 1000))
            inner = consumer._cluster
        else:
            producer = await stack.enter_async_context(Producer(**options))
            polling = asyncio.create_task(producer.send_and_wait("t", b"v", partition=0))
            inner = producer._cluster
        assert inner is not None
        stack.callback(setattr, lost, "leader", 1)  # else a failure waits for the record
        await until(lambda: len(fake.sent(MetadataRequest)) > 10)
        await asyncio.sleep(0.5)
        asked = len(fake.sent(MetadataRequest))
        await asyncio.sleep(1.0)
        assert len(fake.sent(MetadataRequest)) - asked <= 4, "5 ms, doubled up to 1 s"

        begun_s = asyncio.get_running_loop().time()
        assert await inner.wait_for_metadata(PATIENCE_S * 1000)
        assert asyncio.get_running_loop().time() - begun_s < 0.5, "another cause does not wait"

        lost.leader = 1
        if client == "consumer":
            await send_one(fake, TopicPartition("t", 0))
        async with asyncio.timeout(PATIENCE_S):
            assert await polling
        assert inner._leader_rounds == 0
        assert inner._leader_timer is None


async def send_one(fake: FakeCluster, partition: TopicPartition) -> None:
    async with Producer(bootstrap_servers=fake.bootstrap) as producer:
        await producer.send_and_wait(partition.topic, b"v", partition=partition.partition)
