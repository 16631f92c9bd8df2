"""The admin client, the raw reader and the blocking twins, on a cluster in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.patience import PATIENCE_S, join
from tests.unit.client.fake_broker import DROP, FakeCluster, FakeNode
from tidelog.client import Admin, NewTopic, OffsetAndMetadata, TopicPartition, sync
from tidelog.client.config import ClientConfig
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.raw_fetch import RawBatches, fetch_raw
from tidelog.protocol.batches.records import encode_batch, iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_topics import CreatableTopicResult, CreateTopicsRequest, CreateTopicsResponse
from tidelog.protocol.messages.fetch import FetchRequest, FetchResponse
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest

FAST = {"retry_backoff_ms": 5, "retry_backoff_max_ms": 10, "reconnect_backoff_ms": 5, "reconnect_backoff_max_ms": 10}
T0 = TopicPartition("t", 0)


def fill(cluster: FakeCluster, count: int, per_batch: int = 3) -> None:
    log = cluster.topics["t"][0]
    for at in range(0, count, per_batch):
        numbers = range(at, min(at + per_batch, count))
        log.append(bytes(encode_batch([(1000 + n, None, b"%d" % n, ()) for n in numbers])))


class TestAdmin:
    def admin(self, cluster: FakeCluster) -> Admin:
        return Admin(bootstrap_servers=cluster.bootstrap, **FAST)

    async def test_topics_are_created_described_and_listed(self):
        async with FakeCluster(nodes=2) as cluster, self.admin(cluster) as admin:
            await admin.create_topics([NewTopic("a", 2), NewTopic("b")])
            assert await admin.list_topics() == ["a", "b"]
            described = await admin.describe_topics(["a"])
            assert [each.leader for each in described["a"].partitions] == [1, 2]

    async def test_what_is_refused_is_named(self):
        async with FakeCluster(a=1) as cluster, self.admin(cluster) as admin:
            with pytest.raises(KafkaError, match="topic 'a'") as caught:
                await admin.create_topics([NewTopic("a")])
            assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
            with pytest.raises(KafkaError, match="topic 'nowhere'"):
                await admin.describe_topics(["nowhere"])
            assert "nowhere" not in cluster.topics, "asking does not create"

    async def test_one_name_is_not_taken_for_many_of_one_letter(self):
        wrong: Any = "ab"
        async with FakeCluster(a=1, b=1) as cluster, self.admin(cluster) as admin:
            with pytest.raises(TypeError, match="a list of topic names, not 'ab'"):
                await admin.delete_topics(wrong)
            with pytest.raises(TypeError, match="a list of topic names, not 'ab'"):
                await admin.describe_topics(wrong)
            with pytest.raises(TypeError, match="topics must be a list of NewTopic, not 'ab'"):
                await admin.create_topics(wrong)
            assert await admin.list_topics() == ["a", "b"]

    async def test_another_controller_is_looked_for_when_this_one_is_none(self):
        refusal = CreateTopicsResponse(topics=[CreatableTopicResult(name="a", error_code=ErrorCode.NOT_CONTROLLER)])
        async with FakeCluster() as cluster, self.admin(cluster) as admin:
            cluster.script(CreateTopicsRequest, lambda request, node: refusal)
            await admin.create_topics([NewTopic("a")])
            assert "a" in cluster.topics

    async def test_a_creation_that_was_not_answered_is_not_sent_twice(self):
        async with FakeCluster() as cluster, self.admin(cluster) as admin:
            cluster.script(CreateTopicsRequest, lambda request, node: DROP)
            with pytest.raises(KafkaError) as caught:
                await admin.create_topics([NewTopic("a")])
            assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
            assert len(cluster.sent(CreateTopicsRequest)) == 1

    async def test_topics_beyond_the_controllers_quota_are_sent_again_when_it_says(self):
        answer = CreateTopicsResponse(
            throttle_time_ms=150,
            topics=[
                CreatableTopicResult(name="a", topic_id=bytes(15) + b"a"),
                CreatableTopicResult(name="b", error_code=ErrorCode.THROTTLING_QUOTA_EXCEEDED),
            ],
        )
        async with FakeCluster() as cluster, self.admin(cluster) as admin:
            cluster.script(CreateTopicsRequest, lambda *_: answer)
            began = time.monotonic()
            ids = await admin.create_topics([NewTopic("a"), NewTopic("b")])
            assert time.monotonic() - began >= 0.15
            assert (list(ids), ids["a"]) == (["a", "b"], bytes(15) + b"a")
            sent = [[topic.name for topic in each.topics] for each in cluster.sent(CreateTopicsRequest)]
            assert sent == [["a", "b"], ["b"]]

    async def test_a_quota_that_demands_more_than_the_limit_of_the_call_is_an_error_at_once(self):
        refused = CreatableTopicResult(name="a", error_code=ErrorCode.THROTTLING_QUOTA_EXCEEDED)
        async with FakeCluster() as cluster, self.admin(cluster) as admin:
            cluster.script(
                CreateTopicsRequest, lambda *_: CreateTopicsResponse(throttle_time_ms=100_000, topics=[refused])
            )
            with pytest.raises(KafkaError, match="topic 'a'") as caught:
                await admin.create_topics([NewTopic("a")])
            assert caught.value.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED

    async def test_offsets_by_name_and_time(self):
        async with FakeCluster(t=1) as cluster, self.admin(cluster) as admin:
            fill(cluster, 6, per_batch=1)
            cluster.script(ListOffsetsRequest, lambda request, node: DROP)
            assert (await admin.list_offsets({T0: "latest"}))[T0] == (6, -1, 0)
            assert (await admin.list_offsets({T0: 1004}))[T0] == (4, 1004, 0)
            with pytest.raises(ValueError, match="'newest' is none of earliest, latest"):
                await admin.list_offsets({T0: "newest"})

    async def test_offsets_of_a_group(self):
        async with FakeCluster(t=1) as cluster, self.admin(cluster) as admin:
            cluster.groups.group("g").offsets["t", 0] = (7, "note")
            assert await admin.list_consumer_group_offsets("g") == {T0: OffsetAndMetadata(7, "note")}


class TestRawReader:
    async def read(self, cluster: FakeCluster, start: int, end: int, **how: Any) -> list[RawBatches]:
        reading = Cluster(ClientConfig.from_options({"bootstrap_servers": cluster.bootstrap, **FAST}))
        await reading.start()
        try:
            return [chunk async for chunk in fetch_raw(reading, T0, start, end, max_wait_ms=20, **how)]
        finally:
            await reading.close()

    async def test_whole_batches_from_the_one_with_the_start_to_the_one_with_the_end(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, 30)
            [chunk] = await self.read(cluster, 4, 10)
            assert [record.offset for record in iter_records(chunk.data)] == list(range(3, 12))
            assert (chunk.first_offset, chunk.next_offset, chunk.high_watermark) == (4, 12, 30)

    async def test_leaders_and_broken_connections_are_followed(self):
        async with FakeCluster(nodes=2, t=1) as cluster:
            fill(cluster, 30)

            def move(request: FetchRequest, node: FakeNode) -> object:
                cluster.move_leader("t", 0, 2)
                return DROP

            cluster.script(FetchRequest, move)
            [chunk] = await self.read(cluster, 0, 30)
            assert chunk.next_offset == 30

    async def test_a_broker_that_holds_the_reader_to_its_quota_names_no_partition_and_is_waited_for(self):
        """KIP-219. The reader was refused by an IndexError; the wait does not count as a stall."""
        async with FakeCluster(t=1) as cluster:
            fill(cluster, 6)
            for _ in range(3):
                cluster.script(FetchRequest, lambda *_: FetchResponse(throttle_time_ms=100))
            began = time.monotonic()
            chunks = await self.read(cluster, 0, 6, stall_timeout_ms=200)
            assert time.monotonic() - began >= 0.3
            assert chunks[-1].next_offset == 6
            assert len(cluster.sent(FetchRequest)) >= 4

    async def test_an_answer_without_the_partition_is_an_error(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, 6)
            cluster.script(FetchRequest, lambda *_: FetchResponse())
            with pytest.raises(KafkaError, match="does not mention t-0"):
                await self.read(cluster, 0, 6)

    async def test_offsets_that_are_gone_and_ends_that_never_come_are_errors(self):
        async with FakeCluster(t=1) as cluster:
            fill(cluster, 6)
            with pytest.raises(KafkaError) as caught:
                await self.read(cluster, 7, 10)
            assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
            with pytest.raises(KafkaError, match="no records came for 100 ms"):
                await self.read(cluster, 0, 10, stall_timeout_ms=100)

    async def test_nothing_between_equal_offsets(self):
        async with FakeCluster(t=1) as cluster:
            assert await self.read(cluster, 5, 5) == []
            assert not cluster.sent(FetchRequest)


@contextmanager
def served(**topics: int) -> Iterator[FakeCluster]:
    """A fake cluster on a loop of its own, as blocking clients need."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> FakeCluster:
        return await FakeCluster(**topics).__aenter__()

    cluster = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE_S)
    try:
        yield cluster
    finally:
        asyncio.run_coroutine_threadsafe(cluster.__aexit__(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        join(thread)
        loop.close()


class TestBlocking:
    def test_records_go_out_and_come_back(self):
        with served(t=2) as cluster:
            options = {"bootstrap_servers": cluster.bootstrap, **FAST}
            with sync.Producer(**options) as producer:
                sent = [producer.send("t", b"%d" % n, partition=n % 2) for n in range(9_000)]
                producer.flush()
                assert [future.result(0).offset for future in sent] == [n // 2 for n in range(9_000)]
                with pytest.raises(TypeError, match="not str"):
                    producer.send("t", "text").result(PATIENCE_S)
            with sync.Consumer("t", group_id="g", auto_offset_reset="earliest", **options) as consumer:
                seen = set()
                for record in consumer:
                    seen.add(int(record.value or b""))
                    if len(seen) == 5_000:
                        break
                consumed = sum(consumer.position(partition) for partition in consumer.assignment())
                assert consumed == 5_000, "not what was polled but what was handed out"
            assert sum(offset for offset, _ in cluster.groups.group("g").offsets.values()) == 5_000

    def test_what_cannot_be_sent_is_logged_and_what_was_handed_over_not_taken_back(self, caplog):
        with served(t=1) as cluster, sync.Producer(bootstrap_servers=cluster.bootstrap, **FAST) as producer:
            futures = [producer.send("t", value) for value in ["text"] * 20 + [b"1"]]
            assert not any(future.cancel() for future in futures)
            producer.flush()
            assert isinstance(futures[0].exception(PATIENCE_S), TypeError)
            assert futures[-1].result(PATIENCE_S).offset == 0
            assert [record.message for record in caplog.records] == [
                "a record was not sent: value must be bytes or None, not str; set value_serializer to convert"
            ]

    def test_several_threads_may_send(self):
        with served(t=1) as cluster, sync.Producer(bootstrap_servers=cluster.bootstrap, **FAST) as producer:

            def send(name: int) -> None:
                for n in range(500):
                    producer.send("t", b"%d %d" % (name, n))

            threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                join(thread)
            producer.flush()
            log = [bytes(r.value or b"") for batch in cluster.topics["t"][0].batches for r in iter_records(batch)]
            for name in range(4):
                mine = [value for value in log if value.startswith(b"%d " % name)]
                assert mine == [b"%d %d" % (name, n) for n in range(500)]

    def test_admin_and_raw_reader(self):
        with served(t=1) as cluster:
            fill(cluster, 9)
            with sync.Admin(bootstrap_servers=cluster.bootstrap) as admin:
                admin.create_topics([NewTopic("new")])
                assert admin.list_topics() == ["new", "t"]
            with sync.RawReader(bootstrap_servers=cluster.bootstrap) as reader:
                for chunk in reader.fetch(T0, 2, 8):
                    assert chunk.next_offset == 9
                    break

    def test_closing_in_one_thread_wakes_the_other_that_waits(self):
        with served(t=1) as cluster:
            reading = sync.Consumer("t", bootstrap_servers=cluster.bootstrap)
            reading.start()
            closing = threading.Timer(0.1, reading.close)
            closing.start()
            assert list(reading) == []
            join(closing)
            with pytest.raises(RuntimeError, match="closed"):
                iter(reading)
            with pytest.raises(RuntimeError, match="closed"):
                reading.poll()

    def test_a_client_that_reaches_nobody_leaves_no_thread(self):
        before = threading.active_count()
        options = {"bootstrap_servers": "127.0.0.1:1", "socket_connection_setup_timeout_ms": 50, **FAST}
        for kind in (sync.Producer, sync.Consumer, sync.Admin):
            with pytest.raises(KafkaError, match="no broker reached"), kind(**options):
                pass
        assert threading.active_count() == before

    def test_threads_end_with_their_clients(self):
        before = threading.active_count()
        with served(t=1) as cluster:
            for kind in (sync.Producer, sync.Admin, sync.RawReader):
                client = kind(bootstrap_servers=cluster.bootstrap)
                client.start()
                client.close()
                client.close()
                with pytest.raises(RuntimeError, match="closed"):
                    client.start()
        assert threading.active_count() == before


async def test_topics_are_created_when_a_broker_can_be_reached_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster() as cluster, Admin(bootstrap_servers=cluster.bootstrap) as admin:
        open_connection, refusals = Cluster._open_connection, iter([True, True])

        async def refuse_first(self: Cluster, host: str, port: int) -> Any:
            if next(refusals, False):
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "refused")
            return await open_connection(self, host, port)

        monkeypatch.setattr(Cluster, "_open_connection", refuse_first)
        (await admin._connected_cluster()).close_connections()
        await admin.create_topics([NewTopic("new")])
        assert len(cluster.sent(CreateTopicsRequest)) == 1
