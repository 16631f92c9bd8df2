"""The producer against brokers that refuse, forget, fall silent and move: each record once, in order, or an error."""

from __future__ import annotations

import asyncio
import gc
import logging
from itertools import pairwise
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import DROP, SILENCE, FakeCluster, FakeNode, refuse_produce, then
from tidelog.client import Producer, TopicPartition
from tidelog.client.config import DEFAULT_BATCH_SIZE
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.codec.encoding import CUT_BYTES
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.api_versions import ApiVersionsRequest
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.produce import ProduceRequest

FAST = {"retry_backoff_ms": 5, "retry_backoff_max_ms": 10, "reconnect_backoff_ms": 5, "reconnect_backoff_max_ms": 10}


def producer(cluster: FakeCluster, **options: Any) -> Producer:
    return Producer(**{"bootstrap_servers": cluster.bootstrap, "linger_ms": 0, **FAST, **options})


def handled(request: Any, node: FakeNode) -> None:
    """The broker does its part."""
    node.on_produce(request)


def values(cluster: FakeCluster, topic: str = "t", partition: int = 0) -> list[bytes | None]:
    return [record.value for batch in cluster.topics[topic][partition].batches for record in iter_records(batch)]


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def test_records_arrive_with_everything_they_had():
    async with FakeCluster(t=3) as cluster, producer(cluster) as sending:
        sent = await sending.send_and_wait(
            "t", b"v", b"k", headers=[("a", b"1"), ("b", None)], partition=2, timestamp_ms=1234
        )
        assert sent == ("t", 2, 0, 1234)
        [record] = [each for batch in cluster.topics["t"][2].batches for each in iter_records(batch)]
        assert (record.key, record.value, record.timestamp) == (b"k", b"v", 1234)
        assert record.headers == (("a", b"1"), ("b", None))


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_every_codec_is_written(codec):
    async with FakeCluster(t=1) as cluster, producer(cluster, compression_type=codec) as sending:
        for value in numbered(100):
            await sending.send("t", value * 10)
        await sending.flush()
        assert values(cluster) == [value * 10 for value in numbered(100)]


async def test_keys_choose_the_partition_as_java_does():
    async with FakeCluster(t=6) as cluster, producer(cluster) as sending:
        assert (await sending.send_and_wait("t", b"", b"foobar")).partition == (-790332482 & 0x7FFFFFFF) % 6
        assert (await sending.send_and_wait("t", b"", b"abc")).partition == 479470107 % 6


async def test_a_custom_partitioner_decides_and_its_nonsense_is_refused():
    chosen = [1, 7]
    async with (
        FakeCluster(t=2) as cluster,
        producer(cluster, partitioner=lambda topic, key, value, count: chosen.pop(0)) as sending,
    ):
        assert (await sending.send_and_wait("t", b"", b"foobar")).partition == 1
        with pytest.raises(ValueError, match="chose 7 of the 2 partitions"):
            await sending.send("t", b"")


async def test_records_are_batched_and_one_request_serves_many_partitions():
    async with FakeCluster(t=4) as cluster, producer(cluster, linger_ms=80_000) as sending:
        sent = [await sending.send("t", b"x", partition=number % 4) for number in range(40)]
        await sending.flush()
        await asyncio.gather(*sent)
        [request] = cluster.sent(ProduceRequest)
        assert [len(topic.partition_data) for topic in request.topic_data] == [4]


async def test_linger_waits_for_more_and_a_full_batch_does_not():
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=80_000, batch_size=1_000) as sending:
        waiting = await sending.send("t", b"small")
        await asyncio.sleep(0.02)
        assert not cluster.sent(ProduceRequest)
        filled = [await sending.send("t", b"x" * 300) for _ in range(4)]
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert not filled[-1].done()
        await sending.flush()
        assert filled[-1].done()


async def test_a_record_that_is_waited_for_does_not_linger_unless_linger_is_asked_for(monkeypatch):
    monkeypatch.setattr("tidelog.client.config.DEFAULT_LINGER_MS", 80_000)
    monkeypatch.setattr("tidelog.client.producing.sender._EXPIRY_CHECK_MS", 80_000)  # no other wake-up
    async with FakeCluster(t=2) as cluster, producer(cluster, linger_ms=None) as sending:
        lingering = await sending.send("t", b"x", partition=1)
        calls = [sending.send_and_wait("t", b"x", partition=0) for _ in range(10)]
        assert [each.offset for each in await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)] == list(range(10))
        # Those that wait at the same time share a batch.
        assert [len(topic.partition_data) for topic in cluster.sent(ProduceRequest)[0].topic_data] == [1]
        assert len(cluster.sent(ProduceRequest)) == 1
        assert not lingering.done()
        # One in a batch that has begun to linger takes the batch along.
        assert (await asyncio.wait_for(sending.send_and_wait("t", b"x", partition=1), PATIENCE_S)).offset == 1
        assert lingering.done()
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=80_000) as sending:
        waiting = asyncio.ensure_future(sending.send_and_wait("t", b"x"))
        await asyncio.sleep(0.02)
        assert not cluster.sent(ProduceRequest)
        await sending.flush()
        assert (await waiting).offset == 0


async def test_a_lost_answer_is_asked_for_again_and_the_record_is_there_once():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        cluster.script(ProduceRequest, then(handled, DROP))
        assert (await sending.send_and_wait("t", b"once")).offset == 0
        assert values(cluster) == [b"once"]
        assert len(cluster.sent(ProduceRequest)) == 2


async def test_without_idempotence_a_lost_answer_makes_a_duplicate():
    """So that the test above proves something."""
    async with FakeCluster(t=1) as cluster, producer(cluster, enable_idempotence=False) as sending:
        cluster.script(ProduceRequest, then(handled, DROP))
        await sending.send_and_wait("t", b"twice")
        assert values(cluster) == [b"twice", b"twice"]


async def test_a_silent_broker_is_given_up_after_the_request_timeout():
    async with FakeCluster(t=1) as cluster, producer(cluster, request_timeout_ms=50) as sending:
        cluster.script(ProduceRequest, then(handled, SILENCE))
        assert (await sending.send_and_wait("t", b"once")).offset == 0
        assert values(cluster) == [b"once"]


async def test_order_is_kept_when_the_first_of_many_in_flight_is_refused():
    async with FakeCluster(t=1) as cluster, producer(cluster, batch_size=100) as sending:
        await sending.send_and_wait("t", b"first")
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        sent = [await sending.send("t", value * 20) for value in numbered(20)]
        outcomes = await asyncio.gather(*sent)
        assert values(cluster) == [b"first", *[value * 20 for value in numbered(20)]]
        assert [outcome.offset for outcome in outcomes] == list(range(1, 21))


async def test_appended_but_not_replicated_in_time_is_a_success_after_the_retry():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND, append=True))
        assert (await sending.send_and_wait("t", b"once")).offset == 0
        assert values(cluster) == [b"once"]


async def test_a_broker_that_forgot_the_producer_gets_a_new_epoch():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await sending.send_and_wait("t", b"0")
        await sending.send_and_wait("t", b"1")
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.UNKNOWN_PRODUCER_ID))
        await sending.send_and_wait("t", b"2")
        await sending.send_and_wait("t", b"3")
        assert values(cluster) == numbered(4)
        [(epoch, _, _)] = cluster.topics["t"][0].producers.values()
        assert epoch == 1
        assert len(cluster.sent(InitProducerIdRequest)) == 1


async def test_a_record_refused_for_good_fails_alone_and_the_rest_goes_on():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await sending.send_and_wait("t", b"0")
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.MESSAGE_TOO_LARGE))
        with pytest.raises(KafkaError) as caught:
            await sending.send_and_wait("t", b"big")
        assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE
        assert (await sending.send_and_wait("t", b"1")).offset == 1
        assert values(cluster) == [b"0", b"1"]


async def test_a_duplicate_is_a_success_without_an_offset():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        cluster.script(ProduceRequest, refuse_produce(ErrorCode.DUPLICATE_SEQUENCE_NUMBER))
        assert (await sending.send_and_wait("t", b"0")).offset == -1


@pytest.mark.slow
async def test_the_delivery_timeout_ends_retries(caplog):
    async with FakeCluster(t=1) as cluster:
        sending = producer(cluster, delivery_timeout_ms=1500, request_timeout_ms=500)
        cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.NOT_ENOUGH_REPLICAS)] * 1000)
        async with sending:
            with pytest.raises(KafkaError) as caught:
                await sending.send_and_wait("t", b"0")
            assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
            assert "delivery_timeout_ms=1500" in str(caught.value)
            assert str(caught.value).endswith(" attempts: NOT_ENOUGH_REPLICAS"), "what to mend"
            assert "1 record was not delivered" in caplog.text
            await asyncio.sleep(0.02)  # a request may still be on its way, and would then be served
            cluster.scripts.clear()
            await sending.send_and_wait("t", b"1")
            assert values(cluster) == [b"1"]


async def test_retries_are_counted():
    async with FakeCluster(t=1) as cluster, producer(cluster, retries=2, enable_idempotence=False) as sending:
        cluster.script(ProduceRequest, *[refuse_produce(ErrorCode.NOT_ENOUGH_REPLICAS)] * 3)
        with pytest.raises(KafkaError) as caught:
            await sending.send_and_wait("t", b"0")
        assert caught.value.code is ErrorCode.NOT_ENOUGH_REPLICAS
        assert len(cluster.sent(ProduceRequest)) == 3


async def test_a_moved_leader_is_followed():
    async with FakeCluster(nodes=2, t=1) as cluster, producer(cluster) as sending:
        await sending.send_and_wait("t", b"0")
        cluster.move_leader("t", 0, 2)
        await sending.send_and_wait("t", b"1")
        assert values(cluster) == [b"0", b"1"]


async def test_a_dead_leader_is_waited_for():
    async with FakeCluster(nodes=2, t=1) as cluster, producer(cluster) as sending:
        await sending.send_and_wait("t", b"0")
        await cluster.nodes[1].stop()
        waiting = await sending.send("t", b"1")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await cluster.nodes[1].start()
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert values(cluster) == [b"0", b"1"]


async def test_acks_0_is_not_answered_and_has_no_offset():
    async with FakeCluster(t=1) as cluster, producer(cluster, acks=0) as sending:
        assert (await sending.send_and_wait("t", b"0")).offset == -1
        await asyncio.sleep(0.01)
        assert values(cluster) == [b"0"]


@pytest.mark.slow
async def test_a_full_buffer_blocks_and_then_says_so():
    async with FakeCluster(t=1) as cluster:
        sending = producer(cluster, buffer_memory=2_000, max_block_ms=500, batch_size=200, request_timeout_ms=2000)
        async with sending:
            await sending.send_and_wait("t", b"x")
            cluster.script(ProduceRequest, *[lambda request, node: SILENCE] * 5)

            async def too_many() -> None:
                for _ in range(100):
                    await sending.send("t", b"x" * 100)

            with pytest.raises(KafkaError, match="no room in buffer_memory"):
                await too_many()
            # And goes on when there is room again.
            await sending.flush()
            await sending.send_and_wait("t", b"y")
            assert sending._accumulator.used_bytes == 0


async def test_a_tight_loop_of_sends_stays_within_its_memory():
    async with FakeCluster(t=2) as cluster, producer(cluster, buffer_memory=50_000, batch_size=1_000) as sending:
        for number in range(2_000):
            await sending.send("t", b"%06d" % number * 10, partition=number % 2)
            assert sending._accumulator.used_bytes <= 50_000
        await sending.flush()
        assert values(cluster, "t", 0) == [b"%06d" % number * 10 for number in range(0, 2_000, 2)]


async def test_a_record_that_is_too_large_is_refused_at_once():
    async with FakeCluster(t=1) as cluster, producer(cluster, max_request_size=1_000) as sending:
        with pytest.raises(KafkaError) as caught:
            await sending.send("t", b"x" * 1_001)
        assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


async def test_what_is_not_bytes_is_a_type_error_and_a_serializer_cures_it():
    async with FakeCluster(t=1) as cluster:
        async with producer(cluster) as sending:
            with pytest.raises(TypeError, match="value must be bytes or None, not str; set value_serializer"):
                await sending.send("t", "text")
            with pytest.raises(TypeError, match="headers"):
                await sending.send("t", b"", headers=[("a", "text")])  # type: ignore[list-item]
            with pytest.raises(TypeError, match="headers must be pairs of str and bytes or None, not 'a'"):
                await sending.send("t", b"", headers={"a": b"1"})  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="topic must be a str, not bytes"):
                await sending.send(b"t", b"")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="timestamp_ms"):
                await sending.send("t", b"", timestamp_ms=-5)
        async with producer(cluster, value_serializer=str.encode, key_serializer=str.encode) as sending:
            await sending.send_and_wait("t", "text", "key")
        assert values(cluster) == [b"text"]


@pytest.mark.slow
async def test_a_missing_topic_is_created_or_times_out():
    async with FakeCluster() as cluster, producer(cluster, max_block_ms=1000) as sending:
        assert (await sending.send_and_wait("new", b"x")).topic == "new"
        cluster.auto_create_partitions = 0
        with pytest.raises(KafkaError) as caught:
            await sending.send("other", b"x")
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        with pytest.raises(KafkaError, match="has 1 partition, not one numbered 5"):
            await sending.send("new", b"x", partition=5)


async def test_a_topic_made_anew_under_its_name_is_sent_to():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        for value in numbered(3):
            await sending.send_and_wait("t", value)
        cluster.create("t", 2)
        sent = await sending.send_and_wait("t", b"anew", partition=0)
        assert sent.offset == 0
        assert values(cluster) == [b"anew"]


async def test_records_keep_their_order_in_a_topic_that_is_made_anew_while_one_is_in_flight():
    """The new log takes any sequence first. A later record there refused the earlier one, which came back, for good."""
    may_answer = asyncio.Event()

    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await sending.send_and_wait("t", b"before")

        async def refused(request: Any, node: FakeNode) -> object:
            await may_answer.wait()
            return node.on_produce(request)  # under the id of the former topic

        cluster.script(ProduceRequest, refused)
        first = await sending.send("t", b"1")
        await until(lambda: len(cluster.sent(ProduceRequest)) == 2)
        cluster.create("t", 1)
        knows: Any = sending._cluster
        knows.request_refresh()
        await until(lambda: knows.metadata.topic_id("t") == cluster.ids["t"])
        second = await sending.send("t", b"2")
        for _ in range(20):
            await asyncio.sleep(0)
        may_answer.set()
        await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S)
        assert values(cluster) == [b"1", b"2"]


def producer_ids(cluster: FakeCluster) -> list[int]:
    return [read_header(batch, 0).producer_id for batch in cluster.topics["t"][0].batches]


async def test_in_another_cluster_at_the_same_address_a_producer_has_another_id():
    """Its old one may be that of another producer there, and records of either counted as duplicates."""
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await sending.send_and_wait("t", b"1")
        cluster.cluster_id = "other"
        assert sending._cluster is not None
        assert await sending._cluster.wait_for_metadata(PATIENCE_S * 1000)
        await sending.send_and_wait("t", b"2")
        assert producer_ids(cluster) == [101, 102]


async def test_a_record_that_the_former_cluster_did_not_acknowledge_is_sent_under_the_new_id():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await sending.send_and_wait("t", b"1")
        knows: Any = sending._cluster

        def replaced(request: Any, node: FakeNode) -> object:
            cluster.cluster_id = "other"
            return DROP

        def reached_when_known(request: Any, node: FakeNode) -> object:
            return node.on_produce(request) if knows.metadata.cluster_id == "other" else DROP

        cluster.script(ProduceRequest, replaced, *[reached_when_known] * 1000)
        first, second = await sending.send("t", b"2"), await sending.send("t", b"3")
        assert await first != await second
        assert values(cluster) == [b"1", b"2", b"3"]
        assert producer_ids(cluster)[0] == 101
        assert set(producer_ids(cluster)[1:]) == {102}


async def test_no_broker_is_one_clear_error():
    cluster = FakeCluster(t=1)
    async with cluster:
        options = {"bootstrap_servers": cluster.bootstrap, "socket_connection_setup_timeout_ms": 100, **FAST}
    with pytest.raises(KafkaError, match=r"no broker reached at 127\.0\.0\.1"):
        async with Producer(**options):
            pass


async def test_a_start_that_was_cancelled_leaves_no_complaint_behind():
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    sending = Producer(bootstrap_servers="127.0.0.1:1", **{**FAST, "socket_connection_setup_timeout_ms": 100})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await sending.start()
    await asyncio.sleep(0.2)
    del sending
    gc.collect()
    assert complaints == []


async def test_a_refused_producer_id_fails_everything_with_its_reason(caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")

    def refusal(request: object, node: FakeNode) -> InitProducerIdResponse:
        return InitProducerIdResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)

    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        cluster.script(InitProducerIdRequest, refusal, refusal)
        for topic in ("t", "new"):
            with pytest.raises(KafkaError) as caught:
                await sending.send_and_wait(topic, b"x")
            assert caught.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        # Once it is allowed, the same producer goes on.
        await sending.send_and_wait("other", b"x")
        assert len(await sending.partitions_for("t")) == 1


async def test_a_refused_producer_id_is_asked_for_again_after_the_backoff() -> None:
    """A program that sends on sent one InitProducerId for each record."""

    def refusal(request: object, node: FakeNode) -> InitProducerIdResponse:
        return InitProducerIdResponse(error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED)

    async with (
        FakeCluster(t=1) as cluster,
        producer(cluster, retry_backoff_ms=200, retry_backoff_max_ms=200) as sending,
    ):
        cluster.script(InitProducerIdRequest, *[refusal] * 10_000)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(5):
            with pytest.raises(KafkaError) as caught:
                await sending.send_and_wait("t", b"x")
            assert caught.value.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        assert loop.time() - began_s >= 4 * 0.8 * 0.2, "with its jitter"
        assert len(cluster.sent(InitProducerIdRequest)) == 5
        cluster.scripts.clear()
        assert (await sending.send_and_wait("t", b"x")).offset == 0


async def test_a_producer_that_was_closed_or_never_used_closes():
    async with FakeCluster(t=1) as cluster:
        sending = producer(cluster)
        await sending.close()
        with pytest.raises(RuntimeError, match="closed"):
            await sending.send("t", b"x")
        async with producer(cluster) as other:
            await other.send("t", b"x")
        assert values(cluster) == [b"x"]
        with pytest.raises(RuntimeError, match="closed"):
            await other.send("t", b"x")


async def test_closing_with_a_deadline_fails_what_is_left(caplog):
    caplog.set_level(logging.CRITICAL, "tidelog")
    async with FakeCluster(t=1) as cluster:
        sending = producer(cluster)
        await sending.send_and_wait("t", b"x")
        cluster.script(ProduceRequest, lambda request, node: SILENCE)
        left = await sending.send("t", b"y")
        await sending.close(timeout_ms=30)
        with pytest.raises(KafkaError):
            await left


async def test_closing_with_a_deadline_does_not_wait_for_a_broker_that_is_silent():
    async with FakeCluster(t=1) as cluster:
        cluster.script(ApiVersionsRequest, *[lambda request, node: SILENCE] * 100)
        sending = producer(cluster, socket_connection_setup_timeout_ms=1000 * 2 * int(PATIENCE_S))
        waiting = asyncio.create_task(sending.send("t", b"x"))
        await until(lambda: cluster.sent(ApiVersionsRequest))
        async with asyncio.timeout(PATIENCE_S):
            await sending.close(timeout_ms=30)
        with pytest.raises(RuntimeError, match="this producer is closed"):
            await waiting


async def test_older_brokers_are_spoken_to_in_their_versions():
    async with FakeCluster(t=1) as cluster:
        cluster.versions = {0: (3, 7), 3: (0, 5), 18: (0, 0), 22: (0, 1)}
        async with producer(cluster) as sending:
            for value in (b"x", bytes(CUT_BYTES)):
                await sending.send_and_wait("t", value)
        assert values(cluster) == [b"x", bytes(CUT_BYTES)]
        assert cluster.versions_of(ProduceRequest) == {7}
        assert cluster.versions_of(ApiVersionsRequest) == {0}


async def test_partitions_are_described():
    async with FakeCluster(nodes=2, t=2) as cluster, producer(cluster) as sending:
        described = await sending.partitions_for("t")
        assert [(each.partition, each.leader) for each in described] == [(0, 1), (1, 2)]
        assert TopicPartition("t", 0) == ("t", 0)


async def test_a_cancelled_send_leaves_the_others_alone():
    async with FakeCluster(t=1) as cluster, producer(cluster, linger_ms=20) as sending:
        first, second = await sending.send("t", b"1"), await sending.send("t", b"2")
        first.cancel()
        assert (await second).offset == 1


@pytest.mark.parametrize(
    ("size", "batch_size", "count", "count_at_once"),
    [(0, DEFAULT_BATCH_SIZE, 60_000, 15_000), (100, 1_000, 2_000, 200)],
)
async def test_a_loop_that_sends_small_records_lets_others_run(size, batch_size, count, count_at_once):
    """Before 8 batches are full, if each has thousands of them."""
    async with FakeCluster(t=1) as cluster, producer(cluster, batch_size=batch_size) as sending:
        await sending.send_and_wait("t", b"")
        turns: list[int] = []
        sent_count = 0

        async def note_turns() -> None:
            while True:
                turns.append(sent_count)
                await asyncio.sleep(0)

        others = asyncio.create_task(note_turns())
        for _ in range(count):
            await sending.send("t", bytes(size))
            sent_count += 1
        others.cancel()
        await sending.flush()
    assert max(after - before for before, after in pairwise([0, *turns, sent_count])) < count_at_once
