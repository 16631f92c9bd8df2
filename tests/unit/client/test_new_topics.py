"""A producer's refresh for new topics names only them (KIP-526). Every other refresh names all topics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.client.fake_broker import DROP, FakeCluster, FakeNode
from tidelog.client import Consumer, Producer
from tidelog.client.config import ClientConfig
from tidelog.client.model import TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.sync import Producer as BlockingProducer
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse

FAST: dict[str, Any] = {"retry_backoff_ms": 5, "retry_backoff_max_ms": 5, "reconnect_backoff_ms": 5}
LIMIT_MS = PATIENCE_S * 1000


def named(fake: FakeCluster) -> list[list[str]]:
    """The topics that each Metadata request has named."""
    return [[topic.name for topic in request.topics or ()] for request in fake.sent(MetadataRequest)]


async def started(fake: FakeCluster, **options: Any) -> Cluster:
    """As a producer makes it."""
    cluster = Cluster(ClientConfig(bootstrap_servers=fake.bootstrap, **FAST, **options), auto_create_topics=True)
    cluster.names_new_topics_alone = True
    await cluster.start()
    return cluster


def fail(error: ErrorCode) -> Any:
    """An answer with this error of each topic."""

    def answer(request: MetadataRequest, node: FakeNode) -> MetadataResponse:
        response = node.on_metadata(request)
        assert isinstance(response, MetadataResponse)
        for topic in response.topics:
            topic.error_code, topic.partitions, topic.topic_id = error, [], bytes(16)
        return response

    return answer


async def test_a_first_record_to_a_topic_costs_the_metadata_of_no_other_topic():
    """Each of hundreds of topics, used one after another, had the metadata of all sent: 43 ms each of 300."""
    names = [f"t{number}" for number in range(5)]
    async with FakeCluster(**dict.fromkeys(names, 2)) as fake:
        async with asyncio.timeout(PATIENCE_S), Producer(bootstrap_servers=fake.bootstrap, **FAST) as producer:
            for name in names:
                await producer.send_and_wait(name, b"")
            for name in names:
                await producer.send_and_wait(name, b"")
        assert named(fake) == [[], *([name] for name in names)]


async def test_the_answer_is_merged_into_the_view_and_the_next_refresh_is_of_all():
    async with FakeCluster(a=2, b=1, nodes=2) as fake:
        cluster = await started(fake)
        first = await cluster.topic("a", LIMIT_MS)
        fake.move_leader("a", 0, 2)
        assert (await cluster.topic("b", LIMIT_MS)).is_usable
        assert cluster.metadata.topics["a"] is first, "the answer says nothing of it"
        assert (cluster.metadata.cluster_id, sorted(cluster.metadata.nodes)) == (fake.cluster_id, [1, 2])
        assert await cluster.wait_for_metadata(LIMIT_MS)
        assert named(fake) == [[], ["a"], ["b"], ["a", "b"]]
        assert cluster.metadata.leader(TopicPartition("a", 0)) == 2
        await cluster.close()


async def test_tasks_that_ask_at_once_share_requests():
    async with FakeCluster(a=1, b=1) as fake:
        cluster = await started(fake)
        await asyncio.gather(*(cluster.topic(name, LIMIT_MS) for name in "abab"))
        asked = [name for names in named(fake) for name in names]
        assert sorted(asked) == ["a", "b"]
        await cluster.close()


async def test_a_topic_that_is_still_being_made_is_asked_for_again_by_itself():
    async with FakeCluster(old=1) as fake:
        cluster = await started(fake)
        await cluster.topic("old", LIMIT_MS)
        fake.script(MetadataRequest, fail(ErrorCode.LEADER_NOT_AVAILABLE), fail(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
        assert (await cluster.topic("new", LIMIT_MS)).is_usable
        assert named(fake) == [[], ["old"], ["new"], ["new"], ["new"]]
        assert cluster.metadata.topics["old"].is_usable
        await cluster.close()


async def test_a_passing_error_of_a_topic_that_is_known_asks_for_all():
    async with FakeCluster(a=1, b=1) as fake:
        cluster = await started(fake)
        await cluster.topic("a", LIMIT_MS)
        await cluster.topic("b", LIMIT_MS)
        fake.script(MetadataRequest, fail(ErrorCode.LEADER_NOT_AVAILABLE))
        assert await cluster.wait_for_metadata(LIMIT_MS)
        await until(lambda: len(named(fake)) == 5)
        assert named(fake)[3:] == [["a", "b"], ["a", "b"]]
        await cluster.close()


async def test_a_new_topic_does_not_narrow_a_refresh_of_all_that_is_due():
    async with FakeCluster(a=1, b=1, c=1) as fake:
        cluster = await started(fake)
        await cluster.topic("a", LIMIT_MS)
        cluster.track(("b",))
        cluster.request_refresh()
        await cluster.topic("c", LIMIT_MS)
        assert named(fake)[2:] == [["a", "b", "c"]]
        await cluster.close()


async def test_a_request_that_fails_for_a_new_topic_asks_for_all():
    async with FakeCluster(a=1, b=1) as fake:
        cluster = await started(fake)
        await cluster.topic("a", LIMIT_MS)
        fake.script(MetadataRequest, lambda request, node: DROP)
        await cluster.topic("b", LIMIT_MS)
        assert named(fake)[2:] == [["b"], ["a", "b"]]
        await cluster.close()


async def test_new_topics_do_not_keep_the_others_from_growing_old():
    async with FakeCluster(a=1, **{f"t{number}": 1 for number in range(20)}) as fake:
        cluster = await started(fake, metadata_max_age_ms=100)
        await cluster.topic("a", LIMIT_MS)
        for number in range(20):
            await cluster.topic(f"t{number}", LIMIT_MS)
            await asyncio.sleep(0.02)
        refreshes = [names for names in named(fake)[2:] if "a" in names]
        assert refreshes
        assert len(refreshes) < 20
        await cluster.close()


async def test_a_topic_made_anew_keeps_its_old_id_until_it_is_asked_for():
    async with FakeCluster(a=1, b=1) as fake, Producer(bootstrap_servers=fake.bootstrap, **FAST) as producer:
        async with asyncio.timeout(PATIENCE_S):
            await producer.send_and_wait("a", b"1")
            del fake.topics["a"], fake.ids["a"]
            fake.create("a", 1)
            await producer.send_and_wait("b", b"2")
            assert (await producer.send_and_wait("a", b"3")).offset == 0
        assert named(fake)[:3] == [[], ["a"], ["b"]]
        assert ["a", "b"] in named(fake)[3:]


async def test_a_topic_that_was_idle_is_new_again():
    async with FakeCluster(a=1, b=1) as fake:
        cluster = await started(fake)
        cluster.forget_idle_topics_after(1_800_000)
        await cluster.topic("a", LIMIT_MS)
        cluster._topics["a"] -= 3_600
        await cluster.topic("b", LIMIT_MS)
        assert list(cluster.metadata.topics) == ["b"]
        await cluster.topic("a", LIMIT_MS)
        assert named(fake) == [[], ["a"], ["b"], ["a"]]
        await cluster.close()


async def test_a_consumer_asks_for_all_its_topics():
    """It must learn that a topic was deleted, also where it only takes another one."""
    async with FakeCluster(a=1, b=1) as fake, Consumer(bootstrap_servers=fake.bootstrap, **FAST) as consumer:
        consumer.assign([TopicPartition("a", 0)])
        await until(lambda: ["a"] in named(fake))
        consumer.assign([TopicPartition("a", 0), TopicPartition("b", 0)])
        await until(lambda: ["a", "b"] in named(fake))
        assert ["b"] not in named(fake)


async def test_a_refused_topic_is_asked_for_again_in_each_call():
    """Sends failed for `metadata.max.age.ms`, 5 minutes, behind the moment when an operator allowed the topic."""
    async with FakeCluster(a=1) as fake, Producer(bootstrap_servers=fake.bootstrap, **FAST) as producer:
        fake.script(MetadataRequest, *[fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED)] * 2)
        for asked in (2, 3):
            with pytest.raises(KafkaError, match="topic 'a'") as caught:
                await producer.send("a", b"refused")
            assert caught.value.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
            assert len(named(fake)) == asked
        async with asyncio.timeout(PATIENCE_S):
            assert (await producer.send_and_wait("a", b"allowed")).offset == 0


async def test_records_that_wait_for_a_refused_topic_share_one_answer():
    """Each asked for its own, 100 ms apart: a flush of 10,000 records took a quarter of an hour."""
    async with FakeCluster(a=1) as fake:
        fake.script(MetadataRequest, *[fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED)] * 100)

        def send() -> list[BaseException | None]:
            with BlockingProducer(bootstrap_servers=fake.bootstrap, **FAST) as producer:
                futures = [producer.send("a", b"") for _ in range(50)]
                return [future.exception(PATIENCE_S) for future in futures]

        errors = await asyncio.to_thread(send)
        assert {error.code for error in errors if isinstance(error, KafkaError)} == {
            ErrorCode.TOPIC_AUTHORIZATION_FAILED
        }
        assert len(named(fake)) < 10
