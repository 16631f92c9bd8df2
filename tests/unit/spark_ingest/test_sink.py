"""The sink without Spark, against a real node: crashes at every step of a micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tidelog import EmbeddedBroker
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Consumer
from tidelog.protocol.errors import ConfigError, KafkaError
from tidelog.spark_ingest import sink
from tidelog.spark_ingest.sink import TaskId, Written, end_transactions, write_task
from tidelog.spark_ingest.sink_options import SinkOptions

pa = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as running:
        yield running


@pytest.fixture
def topic(broker: EmbeddedBroker, request: pytest.FixtureRequest) -> str:
    name = "t" + str(abs(hash(request.node.nodeid)))[:12]
    with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(name, 2)])
    return name


@pytest.fixture
def options(broker: EmbeddedBroker, topic: str) -> SinkOptions:
    return SinkOptions.parse(
        {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, "exactlyonce": "true"}
    )


def rows(*values: str) -> list[Any]:
    return [pa.record_batch({"value": pa.array(values, pa.string())})]


def written(options: SinkOptions, topic: str) -> Counter[bytes]:
    partitions = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
    with Consumer(
        bootstrap_servers=options.producer["bootstrap_servers"],
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    ) as consumer:
        ends = consumer.end_offsets(partitions)
        consumer.assign(partitions)
        found: Counter[bytes] = Counter()
        while any(consumer.position(partition) < end for partition, end in ends.items()):
            for records in consumer.poll(500).values():
                found.update(record.value or b"" for record in records)
    return found


class MicroBatch:
    """Two tasks of one query that write one micro-batch, as often as Spark runs it."""

    def __init__(self, options: SinkOptions, query: str, batch: int) -> None:
        self.options, self.query, self.batch = options, query, batch

    def write(self, task: int) -> Written:
        return write_task(self.options, TaskId(self.query, task, self.batch), rows(f"{self.batch}/{task}"))

    def end(self, *tasks: Written, committed: bool = True) -> None:
        end_transactions(self.options, [each.transaction for each in tasks if each.transaction], committed=committed)

    def expected(self) -> Counter[bytes]:
        return Counter(f"{self.batch}/{task}".encode() for task in (0, 1))


def test_nothing_is_seen_before_the_commit_and_all_after_it(options, topic):
    batch = MicroBatch(options, "q1", 0)
    tasks = [batch.write(0), batch.write(1)]
    assert [each.rows for each in tasks] == [1, 1]
    assert written(options, topic) == Counter()
    batch.end(*tasks)
    assert written(options, topic) == batch.expected()


@pytest.mark.parametrize("crash", ["before_any_commit", "between_the_commits", "after_the_commits", "a_task_twice"])
def test_a_crash_at_any_step_neither_loses_nor_doubles(options, topic, crash):
    first = MicroBatch(options, f"q-{crash}", 0)
    first.end(first.write(0), first.write(1))
    batch = MicroBatch(options, f"q-{crash}", 1)
    tasks = [batch.write(0), batch.write(1)]
    if crash == "between_the_commits":
        batch.end(tasks[1])
    elif crash == "after_the_commits":
        batch.end(*tasks)
    elif crash == "a_task_twice":
        batch.write(1)
    # Spark starts again from its checkpoint and runs the micro-batch once more.
    batch.end(batch.write(0), batch.write(1))
    assert written(options, topic) == first.expected() + batch.expected()


def test_a_task_that_a_later_attempt_has_taken_over_from_cannot_be_committed(options, topic):
    batch = MicroBatch(options, "q2", 0)
    zombie, task = batch.write(0), batch.write(0)
    with pytest.raises(KafkaError):
        batch.end(zombie)
    batch.end(task)
    assert written(options, topic) == Counter([b"0/0"])


def test_an_end_may_be_sent_again(options, topic):
    batch = MicroBatch(options, "q3", 0)
    task = batch.write(0)
    batch.end(task)
    batch.end(task)
    assert written(options, topic) == Counter([b"0/0"])


def test_an_aborted_write_is_not_seen_and_an_abort_after_it_does_no_harm(options, topic):
    batch = MicroBatch(options, "q4", 0)
    task = batch.write(0)
    batch.end(task, committed=False)
    batch.end(task, committed=False)
    with pytest.raises(KafkaError):
        batch.end(task)
    assert written(options, topic) == Counter()


def test_another_query_writes_its_own_micro_batch_0(options, topic):
    for query in ("q5", "q6"):
        batch = MicroBatch(options, query, 0)
        batch.end(batch.write(0))
    assert written(options, topic) == Counter({b"0/0": 2})


def test_a_task_without_rows_has_no_transaction(options):
    assert write_task(options, TaskId("q7", 0, 0), rows()) == Written(0, None)
    assert write_task(options, TaskId("q7", 0, 0), []) == Written(0, None)


def test_without_the_guard_a_replay_doubles(options, topic, monkeypatch):
    """The planted mistake: were it not seen, the tests above would show nothing."""

    async def nothing(options: SinkOptions, group: str) -> int:
        return -1

    monkeypatch.setattr(sink, "_committed_batch", nothing)
    batch = MicroBatch(options, "q8", 0)
    batch.end(batch.write(0))
    batch.end(batch.write(0))
    assert written(options, topic) == Counter({b"0/0": 2})


def test_a_row_that_cannot_be_sent_fails_its_task_and_leaves_nothing(options, topic):
    large = pa.record_batch({"value": pa.array(["x", "y" * 2_000_000], pa.string())})
    with pytest.raises(KafkaError, match="MESSAGE_TOO_LARGE"):
        write_task(options, TaskId("q9", 0, 0), [large])
    assert written(options, topic) == Counter()


def test_a_row_without_a_topic_is_refused(broker):
    options = SinkOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers})
    batch = pa.record_batch({"topic": pa.array([None], pa.string()), "value": pa.array(["x"])})
    with pytest.raises(ConfigError, match="null topic"):
        write_task(options, TaskId("q", 0, -1), [batch])
