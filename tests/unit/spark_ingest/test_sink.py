"""The sink without Spark, against a real node: crashes at every step of a micro-batch."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import wait_until
from tidelog import EmbeddedBroker, client
from tidelog.client.model import NewTopic, TopicPartition, TransactionDescription
from tidelog.client.network.cluster import Cluster
from tidelog.client.producing.arrow_batches import ArrowBatches
from tidelog.client.producing.producer import Producer
from tidelog.client.sync import Admin, Consumer
from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError
from tidelog.spark_ingest import sink
from tidelog.spark_ingest.micro_batches import CommittedBatch
from tidelog.spark_ingest.sink import (
    TaskId,
    TaskOutput,
    abort_micro_batch,
    abort_write,
    commit_micro_batch,
    commit_write,
    end_transactions,
    write_task,
)
from tidelog.spark_ingest.sink_options import SinkOptions, check_speculation

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

    def write(self, task: int) -> TaskOutput:
        return write_task(self.options, TaskId(self.query, task, self.batch), rows(f"{self.batch}/{task}"))

    def end(self, *tasks: TaskOutput, committed: bool = True) -> None:
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


@pytest.mark.parametrize("batch", [-1, 7])
def test_an_abort_also_ends_what_killed_tasks_of_the_write_have_left_open(options, topic, batch):
    def last_stable_offsets():
        partitions = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        with Consumer(
            bootstrap_servers=options.producer["bootstrap_servers"], isolation_level="read_committed"
        ) as consumer:
            return sum(consumer.end_offsets(partitions).values())

    query = f"q-killed-{batch}"
    aborted, other = MicroBatch(options, query, batch), MicroBatch(options, "other", -1)
    done, _killed, running = aborted.write(0), aborted.write(1), other.write(0)
    assert last_stable_offsets() == 0
    assert done.transaction is not None
    if batch < 0:
        abort_write(options, query, [done.transaction])
    else:
        abort_micro_batch(options, query, batch, [done.transaction])
    other.end(running)
    # Three records, and three markers: nothing is open.
    assert last_stable_offsets() == 6
    assert written(options, topic) == Counter([b"-1/0"])


def test_a_task_that_begins_its_transaction_as_the_write_is_aborted_leaves_none_open(broker, options, monkeypatch):
    """Spark aborts a write when one task has failed, and kills the others later. Readers waited for its timeout."""
    pytest.importorskip("pyspark")
    from tidelog.spark_ingest.writers import TidelogWriter

    writer, look = TidelogWriter(options), sink._abort_open
    begun: list[str] = []

    async def look_before_a_task_begins(options, id_prefix):
        await look(options, id_prefix)
        if not begun:
            begun.append(id_prefix)
            await asyncio.to_thread(write_task, options, TaskId(writer._query, 1, -1), rows("late"))

    monkeypatch.setattr(sink, "_abort_open", look_before_a_task_begins)
    monkeypatch.setattr(sink, "_KILL_TIME_S", 0.1)
    writer.abort([None, None])
    with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        listings = admin.list_transactions(states=["Ongoing"])
    assert begun
    assert not [each for each in listings if writer._query in each.transactional_id]


@pytest.mark.parametrize("has_running_tasks", [False, True])
def test_an_abort_waits_for_running_tasks_alone(options, monkeypatch, has_running_tasks):
    """Spark kills them some seconds later. Where all have ended there is nothing to wait for."""
    pytest.importorskip("pyspark")
    from pyspark.sql.datasource import WriterCommitMessage

    from tidelog.spark_ingest import writers

    ended = WriterCommitMessage()
    steps: list[object] = []

    async def look(options, id_prefix):
        steps.append("look")

    async def sleep(seconds):
        steps.append(seconds)

    monkeypatch.setattr(sink, "_abort_open", look)
    monkeypatch.setattr(sink, "asyncio", SimpleNamespace(run=asyncio.run, sleep=sleep))
    monkeypatch.setattr(writers, "_transactions", lambda messages: [])
    writers.TidelogWriter(options).abort([ended, None] if has_running_tasks else [ended])
    assert steps == (["look", sink._KILL_TIME_S, "look"] if has_running_tasks else ["look"])


def test_another_query_writes_its_own_micro_batch_0(options, topic):
    for query in ("q5", "q6"):
        batch = MicroBatch(options, query, 0)
        batch.end(batch.write(0))
    assert written(options, topic) == Counter({b"0/0": 2})


def test_a_task_without_rows_has_no_transaction(options):
    assert write_task(options, TaskId("q7", 0, 0), rows()) == TaskOutput(0, None)
    assert write_task(options, TaskId("q7", 0, 0), []) == TaskOutput(0, None)
    commit_micro_batch(options, "q7", 0, [TaskOutput(0, None)])


def test_without_the_guard_a_replay_doubles(options, topic, monkeypatch):
    """The planted mistake: were it not seen, the tests above would show nothing."""

    async def nothing(*arguments: Any, **named: Any) -> CommittedBatch:
        return CommittedBatch(-1, 0)

    monkeypatch.setattr(sink, "committed_batch", nothing)
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


class Query:
    """A query whose micro-batches are divided among any number of tasks."""

    def __init__(self, options: SinkOptions, name: str) -> None:
        self.options, self.name = options, name

    def run(self, batch: int, task_count: int, rows_of_batch: int = 12) -> None:
        self.commit(batch, self.write(batch, task_count, rows_of_batch))

    def write(self, batch: int, task_count: int, rows_of_batch: int = 12) -> list[TaskOutput]:
        values = [f"{batch}/{number}" for number in range(rows_of_batch)]
        return [
            write_task(self.options, TaskId(self.name, task, batch), rows(*values[task::task_count]))
            for task in range(task_count)
        ]

    def commit(self, batch: int, tasks: list[TaskOutput]) -> None:
        commit_micro_batch(self.options, self.name, batch, tasks)


@pytest.mark.slow
@pytest.mark.parametrize("task_count", [1, 2, 3, 5])
@pytest.mark.parametrize("crash", ["between_the_commits", "after_the_commits"])
def test_a_micro_batch_that_is_divided_otherwise_when_it_is_replayed_is_written_once_or_refused(
    options, topic, monkeypatch, task_count, crash
):
    query = Query(options, f"divided-{crash}-{task_count}")
    query.run(0, 2)
    tasks = query.write(1, 3)
    if crash == "between_the_commits":
        with monkeypatch.context() as planted:
            planted.setattr(sink, "end_transactions", lambda options, transactions, committed: None)
            query.commit(1, tasks)
        last = tasks[-1].transaction
        assert last is not None
        end_transactions(options, [last], committed=True)
    else:
        query.commit(1, tasks)
    if task_count != 3:
        with pytest.raises(ConfigError, match=f"was run with 3 tasks before.* and now with {task_count}"):
            query.run(1, task_count)
    # What was refused has left nothing: the same tasks as before write the rest.
    query.run(1, 3)
    query.run(2, task_count)
    assert written(options, topic) == Counter(f"{batch}/{row}".encode() for batch in range(3) for row in range(12))


def test_tasks_of_a_micro_batch_that_was_not_going_to_be_committed_may_be_others(options, topic):
    query = Query(options, "others")
    query.write(0, 3)
    query.run(0, 4)
    assert written(options, topic) == Counter(f"0/{row}".encode() for row in range(12))


@pytest.mark.slow
def test_a_restart_with_fewer_tasks_ends_the_transactions_of_the_others(options, topic):
    """Readers with read_committed stood at them until their timeout, 15 minutes, while the query went on."""
    query = Query(options, "fewer-tasks")
    query.run(0, 3)
    query.write(1, 3)  # and the driver dies
    query.run(1, 1)
    assert written(options, topic) == Counter(f"{batch}/{row}".encode() for batch in range(2) for row in range(12))


def test_a_driver_that_lives_yet_cannot_commit_tasks_that_its_successor_lacks(options, topic, monkeypatch):
    query = Query(options, "held")
    first = query.write(0, 3)
    right = Producer.send_offsets_to_transaction

    async def held(self: Producer, *arguments: Any) -> None:
        # It has seen no mark of the micro-batch, and now another run of the query comes before its own mark.
        monkeypatch.setattr(Producer, "send_offsets_to_transaction", right)
        await asyncio.to_thread(query.run, 0, 2)
        await right(self, *arguments)

    monkeypatch.setattr(Producer, "send_offsets_to_transaction", held)
    with pytest.raises(KafkaError, match="another attempt has taken over"):
        query.commit(0, first)
    assert written(options, topic) == Counter(f"0/{row}".encode() for row in range(12))


@pytest.mark.slow
def test_a_run_looks_for_open_transactions_once(options, monkeypatch):
    """All brokers are asked for them."""
    looked, right = [], sink._abort_open

    async def look(*arguments: Any) -> None:
        looked.append(batch)
        await right(*arguments)

    monkeypatch.setattr(sink, "_abort_open", look)
    query = Query(options, "looks-once")
    for batch in range(6):
        commit_micro_batch(options, query.name, batch, query.write(batch, 2), run="first" if batch < 3 else "second")
    assert looked == [0, 3]


@pytest.mark.slow
def test_a_driver_whose_micro_batch_is_over_aborts_nothing_of_its_successor(options, topic):
    query = Query(options, "over")
    first = query.write(0, 1)
    for batch in range(2):
        query.run(batch, 2)
    last = query.write(2, 2)
    with pytest.raises(ConfigError, match="has committed micro-batch 1, and Spark runs micro-batch 0"):
        query.commit(0, first)
    abort_micro_batch(options, query.name, 0, [])
    query.commit(2, last)
    assert written(options, topic) == Counter(f"{batch}/{row}".encode() for batch in range(3) for row in range(12))


class Division:
    """A query of two tasks whose first micro-batch is committed in part, and run again with rows divided otherwise."""

    def __init__(self, options: SinkOptions, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options, self.name, self.monkeypatch = options, name, monkeypatch

    def write(self, *tasks: str) -> list[TaskOutput]:
        return [
            write_task(self.options, TaskId(self.name, number, 0), rows(*values) if values else [])
            for number, values in enumerate(tasks)
        ]

    def run(self, *tasks: str) -> None:
        commit_micro_batch(self.options, self.name, 0, self.write(*tasks))

    def run_until_tasks_are_committed(self, tasks: tuple[str, ...], committed: tuple[int, ...]) -> None:
        done = self.write(*tasks)
        with self.monkeypatch.context() as planted:
            planted.setattr(sink, "end_transactions", lambda options, transactions, committed: None)
            commit_micro_batch(self.options, self.name, 0, done)
        ended = [done[number].transaction for number in committed]
        end_transactions(self.options, [each for each in ended if each is not None], committed=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "committed", "now"),
    [
        (("abcdef", "gh"), (0,), ("abcd", "efgh")),
        (("abcdef", "gh"), (1,), ("abcd", "efgh")),
        (("abcdef", ""), (0,), ("", "abcdef")),
        (("abcdef", ""), (0,), ("abc", "def")),
        (("abc", "def"), (0,), ("abcdef", "")),
        (("abc", "def"), (0, 1), ("abcdef", "")),
        (("abc", "def", ""), (0, 1), ("abc", "de", "f")),
    ],
)
def test_rows_that_change_their_task_in_a_replay_are_refused(options, topic, monkeypatch, before, committed, now):
    """As after a repartition() that deals rows out at random: they were lost or written twice."""
    division = Division(options, f"moved-{topic}", monkeypatch)
    division.run_until_tasks_are_committed(before, committed)
    with pytest.raises(ConfigError, match="rows have changed their task"):
        division.run(*now)
    # What was refused has left nothing: the rows as they were go on.
    division.run(*before)
    assert written(options, topic) == Counter(value.encode() for value in "".join(before))


@pytest.mark.parametrize("now", [("abc", "de"), ("", ""), ("", "def"), ("abc", "def")])
def test_a_micro_batch_that_is_committed_whole_may_have_fewer_rows_in_its_replay(options, topic, monkeypatch, now):
    """Retention has removed records of the source since. Nothing is left to write."""
    division = Division(options, f"fewer-{topic}", monkeypatch)
    division.run("abc", "def")
    division.run(*now)
    assert written(options, topic) == Counter([b"a", b"b", b"c", b"d", b"e", b"f"])


@pytest.mark.slow
def test_a_checkpoint_that_is_older_than_the_topic_is_refused(options, topic):
    """Spark plans such micro-batches anew: to take them for written would lose their rows."""
    query = Query(options, "set-back")
    for batch in range(3):
        query.run(batch, 2)
    with pytest.raises(ConfigError, match="has committed micro-batch 2, and Spark runs micro-batch 1"):
        query.run(1, 2)
    task_of_its_own = [TaskOutput(0, None)] * 2 + [write_task(options, TaskId("set-back", 2, 1), rows("other"))]
    with pytest.raises(ConfigError, match="the query 'tidelog-spark-set-back' has committed micro-batch 2"):
        query.commit(1, task_of_its_own)
    assert written(options, topic) == Counter(f"{batch}/{row}".encode() for batch in range(3) for row in range(12))


def test_a_query_with_a_copy_of_the_checkpoint_does_not_count_as_written_what_the_first_wrote_elsewhere(options, topic):
    """Its rows were lost where it came to the same micro-batch, in one of the two topics."""
    other_topic = f"{topic}-other"
    with Admin(bootstrap_servers=options.producer["bootstrap_servers"]) as admin:
        admin.create_topics([NewTopic(other_topic, 2)])
    first = MicroBatch(options, "copied", 0)
    first.end(first.write(0), first.write(1))
    copy = MicroBatch(replace(options, topic=other_topic), "copied", 0)
    with pytest.raises(ConfigError, match=f"has written micro-batch 0 to '{topic}', and not to '{other_topic}'"):
        copy.write(0)
    ahead = MicroBatch(copy.options, "copied", 1)
    ahead.end(ahead.write(0), ahead.write(1))
    with pytest.raises(ConfigError, match=f"has written micro-batch 1 to '{other_topic}', and not to '{topic}'"):
        MicroBatch(options, "copied", 1).write(1)
    apart = MicroBatch(replace(copy.options, prefix="apart"), "copied", 0)
    apart.end(apart.write(0), apart.write(1))
    assert written(options, topic) == first.expected()
    assert written(options, other_topic) == ahead.expected() + apart.expected()


@pytest.mark.slow
@pytest.mark.parametrize("exactly_once", ["false", "true"])
def test_rows_are_sent_while_spark_computes_the_next(broker, topic, exactly_once):
    """The time in which a record must be delivered is over before the second row comes."""
    given = {"kafka.delivery.timeout.ms": "1500", "kafka.request.timeout.ms": "1000", "topic": topic}
    options = SinkOptions.parse(
        given | {"kafka.bootstrap.servers": broker.bootstrap_servers, "exactlyonce": exactly_once}
    )

    def slow() -> Iterator[Any]:
        yield from rows("a")
        time.sleep(3)
        yield from rows("b")

    task = write_task(options, TaskId("slow", 0, 0), slow())
    commit_micro_batch(options, "slow", 0, [task])
    assert (task.rows, written(options, topic)) == (2, Counter([b"a", b"b"]))


def test_a_row_that_is_not_delivered_fails_a_task_without_transactions(broker, topic):
    """The last records of a task fail while it waits for them alone."""
    with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(f"{topic}-small", 1, configs={"max.message.bytes": "200"})])
    options = SinkOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": f"{topic}-small"})
    with pytest.raises(KafkaError, match="MESSAGE_TOO_LARGE"):
        write_task(options, TaskId("q", 0, -1), rows("x" * 1000))


def test_an_abort_after_a_commit_that_failed_calls_no_committed_transaction_open(options, topic, caplog):
    batch = MicroBatch(options, "partly", 0)
    tasks = [batch.write(0), batch.write(1)]
    batch.end(tasks[1], committed=False)  # as by its timeout
    with pytest.raises(KafkaError):
        batch.end(*tasks)
    batch.end(*tasks, committed=False)
    assert written(options, topic) == Counter([b"0/0"])
    assert "left to its timeout" not in caplog.text


def test_a_transaction_whose_time_was_over_says_so(broker, topic):
    given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, "exactlyonce": "true"}
    options = SinkOptions.parse(given | {"kafka.transaction.timeout.ms": "54321"})
    batch = MicroBatch(options, "late", 0)
    task = batch.write(0)
    batch.end(task, committed=False)
    with pytest.raises(KafkaError, match=r"open for longer than kafka\.transaction\.timeout\.ms \(54321\)"):
        commit_micro_batch(options, "late", 0, [task])


def test_a_batch_write_of_which_one_transaction_is_over_commits_none(options, topic):
    """It committed the others: a job that ran again wrote their rows twice."""
    write = MicroBatch(options, "long", -1)
    tasks = [write.write(task) for task in (0, 1)]
    write.end(tasks[0], committed=False)
    transactions = [each.transaction for each in tasks if each.transaction]
    with pytest.raises(KafkaError, match=r"nothing of the write is committed.*kafka\.transaction\.timeout\.ms"):
        commit_write(options, transactions)
    abort_write(options, "long", transactions)
    assert not written(options, topic)
    again = [MicroBatch(options, "again", -1).write(task) for task in (0, 1)]
    commit_write(options, [each.transaction for each in again if each.transaction])
    assert written(options, topic) == write.expected()


@pytest.mark.parametrize("change", [{"state": "CompleteAbort"}, {"producer_id": 999}, {"producer_epoch": 999}])
def test_a_batch_write_commits_no_transaction_that_another_producer_has_begun(options, topic, monkeypatch, change):
    describe = client.Admin.describe_transactions

    async def describe_changed(admin: client.Admin, ids: list[str]) -> dict[str, TransactionDescription]:
        return {name: replace(each, **change) for name, each in (await describe(admin, ids)).items()}

    monkeypatch.setattr(client.Admin, "describe_transactions", describe_changed)
    transaction = MicroBatch(options, "other", -1).write(0).transaction
    assert transaction is not None
    with pytest.raises(KafkaError, match="nothing of the write is committed"):
        commit_write(options, [transaction])
    abort_write(options, "other", [transaction])
    assert not written(options, topic)


def test_the_writer_of_spark_commits_none_either(options, topic, monkeypatch):
    pytest.importorskip("pyspark")
    from tidelog.spark_ingest import writers

    write = MicroBatch(options, "of Spark", -1)
    tasks = [write.write(task) for task in (0, 1)]
    write.end(tasks[1], committed=False)
    transactions = [each.transaction for each in tasks if each.transaction]
    monkeypatch.setattr(writers, "_transactions", lambda messages: transactions)
    with pytest.raises(KafkaError, match="nothing of the write is committed"):
        writers.TidelogWriter(options).commit([])
    abort_write(options, "of Spark", transactions)
    assert not written(options, topic)


def test_a_batch_write_is_committed_where_the_broker_describes_no_transactions(options, topic, monkeypatch):
    async def refuse(admin: client.Admin, ids: list[str]) -> None:
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION)

    monkeypatch.setattr(client.Admin, "describe_transactions", refuse)
    write = MicroBatch(options, "old", -1)
    tasks = [write.write(task) for task in (0, 1)]
    commit_write(options, [each.transaction for each in tasks if each.transaction])
    assert written(options, topic) == write.expected()


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("headers", pa.array([[{"key": None, "value": b"x"}]], HEADERS), "a header's key must not be null"),
        ("headers", pa.array([[None]], HEADERS), "a header's key must not be null"),
        ("partition", pa.array([-1], pa.int32()), "a partition must not be negative, not -1"),
        (
            "timestamp",
            pa.array([-5_000_500], pa.timestamp("us", "UTC")),
            "a timestamp must be a whole number of milliseconds since 1970, not -5000",
        ),
    ],
)
def test_a_row_that_cannot_be_a_record_is_refused_in_one_line(options, topic, column, values, reason):
    batch = pa.record_batch({"value": pa.array(["x"]), column: values})
    with pytest.raises(ConfigError, match=f"^a row cannot be written: .*{reason}"):
        write_task(options, TaskId(f"q-{topic}", 0, 0), [batch])
    assert written(options, topic) == Counter()


@pytest.mark.parametrize("setting", ["true", "True", " TRUE"])
def test_speculation_is_refused_in_every_spelling_that_spark_takes(options, setting):
    with pytest.raises(ConfigError, match=r"exactlyOnce cannot be used with spark\.speculation=true"):
        check_speculation(options, setting)
    check_speculation(options, "false")
    check_speculation(options, None)
    check_speculation(replace(options, exactly_once=False), setting)


def test_the_options_that_spark_adds_for_itself_are_passed_over(broker):
    added = {"queryname": "reports", "checkpointlocation": "y"}
    options = SinkOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": "t", **added})
    assert options == SinkOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": "t"})


def test_rows_of_many_topics_reach_theirs_in_order(broker, topic):
    names = [f"{topic}-{number}" for number in range(3)]
    with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(name, 1) for name in names])
    options = SinkOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers})
    columns = {"TOPIC": pa.array([names[row % 3] for row in range(9)]), "Value": pa.array(map(str, range(9)))}
    assert write_task(options, TaskId("q", 0, -1), [pa.record_batch(columns)] * 2).rows == 18
    for number, name in enumerate(names):
        with Consumer(name, bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest") as consumer:
            found = [next(iter(consumer)).value for _ in range(6)]
        assert found == [b"%d" % row for row in (number, number + 3, number + 6)] * 2


@pytest.mark.slow
def test_a_micro_batch_of_several_topics_is_remembered_where_one_of_them_is_deleted(broker, topic):
    """Its number lay with the first topic alone, and went with it: the rows of the others were written again."""
    names = [f"{topic}-{number}" for number in range(3)]
    with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(name, 2) for name in names])
        options = SinkOptions.parse({"kafka.bootstrap.servers": broker.bootstrap_servers, "exactlyonce": "true"})
        batch = pa.record_batch({"topic": names, "value": ["a", "b", "c"]})
        task = TaskId(topic, 0, 0)
        commit_micro_batch(options, topic, 0, [write_task(options, task, [batch.slice(0, 2), batch.slice(2)])])
        admin.delete_topics(names[:2])
        wait_until(lambda: names[0] not in admin.list_topics())
        assert write_task(options, task, [batch]).is_repeated
    assert written(options, names[2]) == Counter([b"c"])


@pytest.mark.slow
def test_the_level_of_the_codec_is_taken_and_those_of_others_are_not(broker, topic):
    """Spark's connector passes these options of Kafka's producer on."""
    given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, "kafka.compression.type": "zstd"}
    levels = {"kafka.compression.zstd.level": "-5", "kafka.compression.gzip.level": "9"}
    options = SinkOptions.parse(given | levels)
    assert options.producer["compression_level"] == -5
    assert write_task(options, TaskId("q", 0, -1), rows("x" * 1000)).rows == 1
    assert written(options, topic) == Counter([b"x" * 1000])
    assert "compression_level" not in SinkOptions.parse(given | {"kafka.compression.gzip.level": "9"}).producer
    for wrong in ("23", "x", "", "1.5"):
        with pytest.raises(ConfigError, match=r"^kafka\.compression\.zstd\.level must be a number from -131072 to 22"):
            SinkOptions.parse(given | {"kafka.compression.zstd.level": wrong})


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_topic_that_takes_small_batches_only_gets_them(broker, topic, codec):
    """The sink's batches are larger than the topic takes: they are divided."""
    with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.create_topics([NewTopic(f"{topic}-small", 2, configs={"max.message.bytes": "100000"})])
    options = SinkOptions.parse(
        {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "topic": f"{topic}-small",
            "kafka.compression.type": codec,
        }
    )
    values = [random.Random(row).randbytes(500).hex() for row in range(2000)]
    assert write_task(options, TaskId("q", 0, -1), rows(*values)).rows == 2000
    assert written(options, f"{topic}-small") == Counter(value.encode() for value in values)


class Absence:
    """Brokers that are away for the next `failures` starts of a client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures, self.met = 0, 0
        real = Cluster.start

        async def start(cluster: Cluster) -> None:
            if self.failures:
                self.failures -= 1
                self.met += 1
                await cluster.close()  # as a start that has failed
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "no broker reached")
            await real(cluster)

        monkeypatch.setattr(Cluster, "start", start)


@pytest.mark.parametrize("exactly_once", [False, True])
def test_tasks_and_commits_wait_for_brokers_that_are_away(options, topic, monkeypatch, exactly_once):
    """A cluster that restarts as a whole may be away for longer than a client's start tries."""
    options = options if exactly_once else replace(options, exactly_once=False)
    absence, batch = Absence(monkeypatch), MicroBatch(options, "away", 0)
    tasks = []
    for task in (0, 1):
        absence.failures = 2
        tasks.append(batch.write(task))
        assert not absence.failures
    absence.failures = 2
    commit_micro_batch(options, "away", 0, tasks) if exactly_once else batch.end(*tasks)
    assert absence.failures == (0 if exactly_once else 2)
    absence.failures = 0
    assert written(options, topic) == batch.expected()


def test_the_end_of_transactions_waits_for_brokers_that_are_away(options, topic, monkeypatch):
    batch = MicroBatch(options, "ends", 0)
    tasks, absence = [batch.write(0), batch.write(1)], Absence(monkeypatch)
    absence.failures = 2
    batch.end(*tasks)
    assert written(options, topic) == batch.expected()


def test_brokers_that_stay_away_fail_a_task_after_its_max_block_ms(options, monkeypatch):
    absence = Absence(monkeypatch)
    absence.failures = 10**6
    with pytest.raises(KafkaError, match="no broker reached"):
        MicroBatch(replace(options, max_block_ms=300), "gone", 0).write(0)
    assert absence.met > 1


@pytest.mark.slow
def test_loops_that_are_compiled_for_the_first_time_take_none_of_the_time_for_brokers(broker, topic, monkeypatch):
    loaded: list[bool] = []
    load = ArrowBatches.load_kernel

    def load_slowly(self: ArrowBatches) -> None:
        if not loaded:
            time.sleep(3)
        load(self)
        loaded.append(True)

    monkeypatch.setattr(ArrowBatches, "load_kernel", load_slowly)
    given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, "kafka.max.block.ms": "2000"}
    write_task(SinkOptions.parse(given), TaskId("slow", 0, -1), rows("a"))
    assert len(loaded) == 2
