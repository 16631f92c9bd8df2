"""Reads whose topic is deleted while they run, and brokers that do not know a topic yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.network import raw_fetch
from tidelog.client.network.metadata import NO_TOPIC_ID, TopicMetadata, merge_metadata
from tidelog.client.sync import Admin
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata import MetadataResponse, MetadataResponsePartition, MetadataResponseTopic
from tidelog.spark_ingest import offsets, topic_watch
from tidelog.spark_ingest.fetch import read_range
from tidelog.spark_ingest.offsets import DataLoss
from tidelog.spark_ingest.options import SourceOptions
from tidelog.spark_ingest.planning import OffsetRange
from tidelog.spark_ingest.stream import StreamDriver
from tidelog.spark_ingest.topic_watch import TopicGone, TopicWatch, check_gone, unless_gone

OLD, NEW = bytes(15) + b"\1", bytes(15) + b"\2"
UNKNOWN = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


class Brokers:
    """A cluster whose nodes answer as listed: the id of the topic, an error, or None for no answer."""

    partitions = 1

    def __init__(self, last: bytes | ErrorCode, *answers: bytes | ErrorCode | None) -> None:
        error, topic_id = (last, NO_TOPIC_ID) if isinstance(last, ErrorCode) else (ErrorCode.NONE, last)
        topics = {"t": TopicMetadata("t", topic_id, error, False, ())}
        self.metadata = SimpleNamespace(topics=topics, nodes=dict.fromkeys(range(len(answers))))
        self.answers = list(answers)
        self.on_answer: Callable[[], None] = lambda: None
        self.asked = 0

    async def fetch_metadata(self, topics, *, node_id):
        self.asked += 1
        answer = self.answers[node_id]
        self.on_answer()
        if answer is None:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION)
        code, topic_id = (int(answer), NO_TOPIC_ID) if isinstance(answer, ErrorCode) else (0, answer)
        partitions = [MetadataResponsePartition(partition_index=index) for index in range(self.partitions)]
        topic = MetadataResponseTopic(name="t", error_code=code, topic_id=topic_id, partitions=partitions)
        return MetadataResponse(topics=[topic])


def watch(monkeypatch: pytest.MonkeyPatch, brokers: Any, topic_id: bytes = NO_TOPIC_ID) -> str:
    """Work that waits for a moment beside the watch."""
    monkeypatch.setattr(topic_watch, "_LOOK_INTERVAL_S", 0.001)
    monkeypatch.setattr(topic_watch, "_CONFIRM_AFTER_S", 0.01)

    async def run() -> str:
        return await unless_gone(brokers, {"t": topic_id}, asyncio.sleep(0.3, "done"))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("last", "answers", "topic_id"),
    [
        (OLD, [UNKNOWN, UNKNOWN], NO_TOPIC_ID),  # the last metadata has it, and no broker is asked
        (ErrorCode.LEADER_NOT_AVAILABLE, [UNKNOWN, UNKNOWN], NO_TOPIC_ID),
        (UNKNOWN, [UNKNOWN, OLD], OLD),  # one broker lags behind
        (UNKNOWN, [UNKNOWN, ErrorCode.LEADER_NOT_AVAILABLE], NO_TOPIC_ID),
        (UNKNOWN, [UNKNOWN, None], NO_TOPIC_ID),  # one does not answer
        (UNKNOWN, [], NO_TOPIC_ID),
        (OLD, [OLD, NEW], NEW),  # one knows the topic before this one
    ],
)
def test_a_topic_that_one_broker_may_have_is_not_gone(monkeypatch, last, answers, topic_id):
    assert watch(monkeypatch, Brokers(last, *answers), topic_id) == "done"


@pytest.mark.parametrize(
    ("last", "answers", "says"),
    [(UNKNOWN, [UNKNOWN, UNKNOWN], "topic 't' was deleted"), (NEW, [NEW, UNKNOWN], "topic 't' was created again")],
)
def test_a_topic_that_no_broker_has_ends_the_work(monkeypatch, last, answers, says):
    with pytest.raises(TopicGone, match=says):
        watch(monkeypatch, Brokers(last, *answers), OLD)


@pytest.mark.parametrize(
    ("answers", "partitions", "is_gone"),
    [
        ([UNKNOWN, UNKNOWN], 1, True),
        ([UNKNOWN, NEW], 2, True),  # the topic was created again
        ([OLD, OLD], 2, True),  # no broker has the third partition
        ([UNKNOWN, OLD], 3, False),
        ([UNKNOWN, None], 3, False),
        ([UNKNOWN, ErrorCode.LEADER_NOT_AVAILABLE], 3, False),
    ],
)
def test_partitions_are_gone_when_no_broker_has_any_of_them(monkeypatch, answers, partitions, is_gone):
    monkeypatch.setattr(topic_watch, "_CONFIRM_AFTER_S", 0.01)
    brokers: Any = Brokers(UNKNOWN, *answers)
    brokers.partitions = partitions

    async def check() -> None:
        await check_gone(brokers, [TopicPartition("t", 3), TopicPartition("t", 2)], {"t": OLD})

    if is_gone:
        asyncio.run(check())
        return
    with pytest.raises(KafkaError, match="LEADER_NOT_AVAILABLE: the broker does not know t-2, but another may have it"):
        asyncio.run(check())


def test_a_topic_that_may_not_be_read_is_in_no_list_and_not_gone():
    brokers: Any = Brokers(UNKNOWN, UNKNOWN, ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(KafkaError, match="TOPIC_AUTHORIZATION_FAILED: topic 't' cannot be read"):
        asyncio.run(check_gone(brokers, [TopicPartition("t", 0)], {}))


def test_brokers_are_asked_a_second_time(monkeypatch):
    brokers = Brokers(UNKNOWN, UNKNOWN)

    def know_it_now():
        brokers.answers = [OLD]
        brokers.metadata.topics["t"] = TopicMetadata("t", OLD, ErrorCode.NONE, False, ())

    brokers.on_answer = know_it_now
    assert watch(monkeypatch, brokers) == "done"
    assert brokers.asked == 2


def test_an_error_of_the_work_passes_up(monkeypatch):
    async def fail():
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION)

    brokers: Any = Brokers(OLD, OLD)
    with pytest.raises(KafkaError, match="INVALID_TOPIC_EXCEPTION"):
        asyncio.run(unless_gone(brokers, {"t": OLD}, fail()))


def test_a_watch_ends_the_piece_of_work_during_which_the_topic_goes(monkeypatch):
    monkeypatch.setattr(topic_watch, "_LOOK_INTERVAL_S", 0.001)
    monkeypatch.setattr(topic_watch, "_CONFIRM_AFTER_S", 0.01)
    brokers: Any = Brokers(OLD, UNKNOWN, UNKNOWN)

    async def run() -> None:
        async with TopicWatch(brokers, {"t": OLD}) as watch:
            assert await watch.unless_gone(asyncio.sleep(0.05, "first")) == "first"
            brokers.metadata.topics["t"] = TopicMetadata("t", NO_TOPIC_ID, UNKNOWN, False, ())
            with pytest.raises(TopicGone, match="topic 't' was deleted"):
                await watch.unless_gone(asyncio.sleep(PATIENCE_S, "second"))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_range_of_many_chunks_has_one_watch(node, new_topic, monkeypatch):
    topic = new_topic(1000, batch_size=500)
    real, begun = topic_watch._wait_until_gone, []

    async def wait(cluster, topic_ids):
        begun.append(topic_ids)
        return await real(cluster, topic_ids)

    monkeypatch.setattr(topic_watch, "_wait_until_gone", wait)
    options = node.options(subscribe=topic, **{"kafka.max.partition.fetch.bytes": "2000"})
    batches = list(read_range(options, OffsetRange(topic, 0, 0, 1000), ("offset",)))
    assert sum(batch.num_rows for batch in batches) == 1000
    assert len(batches) > 10
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        topic_id = admin.describe_topics([topic])[topic].topic_id
    assert begun == [{topic: NO_TOPIC_ID}, {topic: topic_id}]  # one until the id is known


def delete(node, topic):
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        admin.delete_topics([topic])


@pytest.mark.slow
def test_a_task_whose_topic_is_deleted_says_so_and_does_not_wait_for_records(node, new_topic):
    topic = new_topic(1000, batch_size=500)
    timeout_ms = int(PATIENCE_S * 1000)
    given = {"kafka.max.partition.fetch.bytes": "2000", "kafkaConsumer.pollTimeoutMs": str(timeout_ms)}
    strict = node.options(subscribe=topic, **given)
    lenient = node.options(subscribe=topic, failOnDataLoss="false", **given)
    readings = [read_range(each, OffsetRange(topic, 0, 0, 1000), ("offset",)) for each in (strict, lenient)]
    rows = [next(each).num_rows for each in readings]
    delete(node, topic)
    with pytest.raises(DataLoss, match=f"topic '{topic}' was deleted, and the rest of {topic}-0 is gone"):
        list(readings[0])
    assert rows[1] + sum(batch.num_rows for batch in readings[1]) < 1000
    with pytest.raises(DataLoss, match="was deleted"):  # a task that begins after that
        list(read_range(strict, OffsetRange(topic, 0, 0, 1000), ("offset",)))


@pytest.mark.slow
@pytest.mark.parametrize("is_fatal", [True, False])
def test_a_topic_that_is_deleted_while_its_offsets_are_looked_up(node, new_topic, monkeypatch, is_fatal):
    topic = new_topic(3)
    node.topic(f"{topic}-other", 5)
    given = {"subscribe": f"{topic},{topic}-other", "startingOffsets": "earliest", "failOnDataLoss": str(is_fatal)}
    driver = StreamDriver(SourceOptions.parse({"kafka.bootstrap.servers": node.bootstrap_servers, **given}, "stream"))
    real = offsets._list_offsets
    deleted: list[str] = []

    async def list_late(*given):
        if not deleted:
            deleted.append(topic)
            await asyncio.to_thread(delete, node, topic)
        return await real(*given)

    try:
        start, begin_s = driver.initial_offset(), time.monotonic()
        monkeypatch.setattr(offsets, "_list_offsets", list_late)
        if is_fatal:
            with pytest.raises(KafkaError, match=f"topic '{topic}' does not exist"):
                driver.latest_offset(start)
        else:
            assert driver.latest_offset(start) == {f"{topic}-other": {"0": 5}}
        assert time.monotonic() - begin_s < PATIENCE_S / 2  # not default.api.timeout.ms
    finally:
        driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("step", ["_list_offsets", "epoch_ends"])
@pytest.mark.parametrize("partitions", [0, 1])
def test_a_stream_outlives_a_topic_that_is_deleted_between_two_requests_of_a_look(
    node, new_topic, monkeypatch, step, partitions
):
    other = new_topic(5)
    topic = f"{other}-gone"
    given = {"subscribe": f"{topic},{other}", "startingOffsets": "earliest", "failOnDataLoss": "false"}
    driver = StreamDriver(SourceOptions.parse({"kafka.bootstrap.servers": node.bootstrap_servers, **given}, "stream"))
    real = vars(offsets)[step]
    deleted: list[str] = []

    def delete_and_create() -> None:
        delete(node, topic)
        if partitions:
            with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
                admin.create_topics([NewTopic(topic, partitions)])

    async def call_late(*arguments):
        if not deleted:
            deleted.append(topic)
            await asyncio.to_thread(delete_and_create)
        return await real(*arguments)

    try:
        with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
            admin.create_topics([NewTopic(topic, 3)])
        start = driver.latest_offset(driver.initial_offset())
        assert len(start[topic]) == 3
        driver._leader_epochs = {each: epoch - 1 for each, epoch in driver._leader_epochs.items()}
        monkeypatch.setattr(offsets, step, call_late)
        end, begin_s = driver.latest_offset(start), time.monotonic()
        while end.get(topic, {}) != {str(each): 0 for each in range(partitions)}:
            assert time.monotonic() - begin_s < PATIENCE_S
            end = driver.latest_offset(end)
        assert deleted
        assert end[other] == {"0": 5}
    finally:
        driver.close()


def test_a_broker_that_knows_the_topic_before_this_one_is_asked_again(node, new_topic, monkeypatch):
    topic = new_topic(5)
    with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
        topic_id = admin.describe_topics([topic])[topic].topic_id
    answers: list[bytes] = []

    def lag(previous, response, names):
        for each in response.topics:
            if not answers:
                answers.append(each.topic_id)
                each.topic_id = OLD
        return merge_metadata(previous, response, names)

    monkeypatch.setattr("tidelog.client.network.cluster.merge_metadata", lag)
    rows = list(read_range(node.options(subscribe=topic), OffsetRange(topic, 0, 0, 5), ("offset",), topic_id))
    assert answers
    assert sum(batch.num_rows for batch in rows) == 5


@pytest.mark.parametrize("is_in_flight", [False, True])
def test_a_broker_that_lags_ends_no_task_that_runs_and_gives_it_no_rows_of_another_topic(
    node, new_topic, monkeypatch, is_in_flight
):
    topic = new_topic(1000, batch_size=500)
    fetched: list[tuple[int, bytes]] = []
    real = raw_fetch._Reader._fetch

    def other(cluster):
        known = cluster.metadata.topics[topic]
        stale = TopicMetadata(topic, OLD, known.error, False, known.partitions)
        cluster.metadata = cluster.metadata._replace(topics={topic: stale})

    async def fetch(self, offset):
        fetched.append((offset, self._cluster.metadata.topic_id(topic)))
        answer = await real(self, offset)
        if len(fetched) == 5:
            if is_in_flight:
                other(self._cluster)
            else:
                asyncio.get_running_loop().call_soon(other, self._cluster)
        return answer

    monkeypatch.setattr(raw_fetch._Reader, "_fetch", fetch)
    options = node.options(subscribe=topic, failOnDataLoss="false", **{"kafka.max.partition.fetch.bytes": "2000"})
    batches = list(read_range(options, OffsetRange(topic, 0, 0, 1000), ("offset",)))
    rows = [offset for batch in batches for offset in batch["offset"].to_pylist()]
    assert rows == list(range(1000))
    assert OLD not in {topic_id for _, topic_id in fetched}
    offsets_asked = [offset for offset, _ in fetched]
    assert (offsets_asked[4] in offsets_asked[5:]) == is_in_flight  # an answer of which the topic is in doubt
