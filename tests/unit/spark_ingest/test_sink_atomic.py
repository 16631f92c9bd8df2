"""A micro-batch as one transaction, against a real node: what readers see, crashes, and a change of `atomic`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.spark_ingest.conftest import Filled
from tests.unit.spark_ingest.test_sink import MicroBatch, rows, written
from tidelog.client.producing.producer import Producer
from tidelog.protocol.errors import ConfigError, KafkaError
from tidelog.spark_ingest import sink
from tidelog.spark_ingest.held_rows import HeldRows, hold_rows, release_rows
from tidelog.spark_ingest.micro_batches import CommittedBatch
from tidelog.spark_ingest.sink import commit_micro_batch, end_transactions, write_as_one
from tidelog.spark_ingest.sink_options import SinkOptions

pa = pytest.importorskip("pyarrow")

MAX_BYTES = 1_000_000


@pytest.fixture
def topic(new_topic: Callable[..., str]) -> str:
    return new_topic(0, 0)


@pytest.fixture
def options(node: Filled, topic: str) -> SinkOptions:
    return SinkOptions.parse(
        {"kafka.bootstrap.servers": node.bootstrap_servers, "topic": topic, "exactlyOnce": "true", "atomic": "true"}
    )


def held(*values: str) -> HeldRows:
    return hold_rows(rows(*values), MAX_BYTES)


def run(options: SinkOptions, query: str, batch: int, *tasks: HeldRows) -> None:
    write_as_one(options, query, batch, release_rows(tasks, options.max_atomic_bytes))


def test_the_rows_of_all_tasks_become_visible_in_one_transaction(options, topic, monkeypatch):
    ended = []

    def end(options: SinkOptions, transactions: Any, *, committed: bool) -> None:
        assert written(options, topic) == Counter()
        ended.append(len(transactions))
        end_transactions(options, transactions, committed=committed)

    monkeypatch.setattr(sink, "end_transactions", end)
    run(options, topic, 0, held("a", "b"), held(), held("c"))
    assert ended == [1]
    assert written(options, topic) == Counter([b"a", b"b", b"c"])


class Crash(Exception):
    """The driver dies."""


@pytest.mark.parametrize("step", ["init_transactions", "send_arrow", "send_offsets_to_transaction", "the commit"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_neither_loses_nor_doubles(options, topic, monkeypatch, step, when):
    run(options, topic, 0, held("0"))
    with monkeypatch.context() as patch:
        if step == "the commit":

            def end(*arguments: Any, **named: Any) -> None:
                if when == "after":
                    end_transactions(*arguments, **named)
                raise Crash

            patch.setattr(sink, "end_transactions", end)
        else:
            right = getattr(Producer, step)

            async def crash(*arguments: Any, **named: Any) -> None:
                if when == "after":
                    await right(*arguments, **named)
                raise Crash

            patch.setattr(Producer, step, crash)
        with pytest.raises(Crash):
            run(options, topic, 1, held("1"), held("1b"))
    # The same rows may come divided otherwise: nothing depends on the tasks.
    run(options, topic, 1, held("1", "1b"))
    run(options, topic, 2, held("2"))
    assert written(options, topic) == Counter([b"0", b"1", b"1b", b"2"])


def test_without_the_guard_a_replay_doubles(options, topic, monkeypatch):
    """The planted mistake: were it not seen, the tests above would show nothing."""

    async def nothing(*arguments: Any, **named: Any) -> CommittedBatch:
        return CommittedBatch(-1, 0)

    monkeypatch.setattr(sink, "committed_batch", nothing)
    for _ in range(2):
        run(options, topic, 0, held("a"))
    assert written(options, topic) == Counter({b"a": 2})


def test_a_driver_that_another_has_taken_over_from_commits_nothing(options, topic, monkeypatch):
    def end(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(sink, "end_transactions", end_transactions)
        run(options, topic, 0, held("a"))  # the other driver
        end_transactions(*arguments, **named)

    monkeypatch.setattr(sink, "end_transactions", end)
    with pytest.raises(KafkaError, match="another attempt has taken over"):
        run(options, topic, 0, held("a"))
    assert written(options, topic) == Counter([b"a"])


def test_a_row_that_cannot_be_a_record_leaves_nothing_to_see(options, topic):
    bad = hold_rows([pa.record_batch({"value": ["b"], "partition": pa.array([-7], pa.int32())})], MAX_BYTES)
    with pytest.raises(ConfigError, match="a row cannot be written"):
        run(options, topic, 0, held("a"), bad)
    run(options, topic, 0, held("a"))
    assert written(options, topic) == Counter([b"a"])


def test_a_batch_write_remembers_no_micro_batch(options, topic):
    run(options, topic, -1, held("a"), held("b"))
    run(options, topic, -1, held("a"))
    assert written(options, topic) == Counter({b"a": 2, b"b": 1})


def test_no_rows_need_no_transaction(options, topic):
    run(options, topic, 0, held(), held())
    run(options, topic, 0)
    assert written(options, topic) == Counter()


@pytest.mark.slow
@pytest.mark.parametrize("committed", ["none", "one task", "all"])
def test_a_micro_batch_that_tasks_have_begun_is_not_written_as_one(options, topic, committed):
    batch = MicroBatch(options, topic, 0)
    tasks = [batch.write(0), batch.write(1)]
    if committed == "all":
        commit_micro_batch(options, topic, 0, tasks)
    elif committed == "one task":
        before_the_end(options, topic, tasks)
        batch.end(tasks[0])
    if committed == "none":
        # Open transactions of tasks whose commit has not begun never end well: the micro-batch is written as one.
        run(options, topic, 0, held("0/0", "0/1"))
        with pytest.raises(ConfigError, match="was written with atomic=true"):
            commit_micro_batch(options, topic, 0, tasks)
    else:
        with pytest.raises(ConfigError, match="was begun without atomic=true"):
            run(options, topic, 0, held("0/0", "0/1"))
        commit_micro_batch(options, topic, 0, [batch.write(0), batch.write(1)])
    run(options, topic, 1, held("1"))
    assert written(options, topic) == batch.expected() + Counter([b"1"])


def test_a_micro_batch_that_is_written_as_one_ends_the_transactions_of_its_tasks(options, topic):
    """Readers with read_committed stood at them until their timeout."""
    batch = MicroBatch(options, topic, 0)
    batch.write(0), batch.write(1)  # and the driver dies
    run(options, topic, 0, held("0/0", "0/1"))
    assert written(options, topic) == batch.expected()


def test_tasks_go_on_at_once_after_a_driver_that_died_before_it_committed_all_as_one(options, topic, monkeypatch):
    """They waited for the end of its transaction, which has a micro-batch's number in it."""
    run(options, topic, 0, held("0"))

    def die(*arguments: Any, **named: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(sink, "end_transactions", die)
        with pytest.raises(Crash):
            run(options, topic, 1, held("1/0", "1/1"))
    batch = MicroBatch(options, topic, 1)
    commit_micro_batch(options, topic, 1, [batch.write(0), batch.write(1)])
    assert written(options, topic) == batch.expected() + Counter([b"0"])


@pytest.mark.slow
@pytest.mark.parametrize("held_at", ["init_transactions", "begin_transaction", "send_offsets_to_transaction"])
@pytest.mark.parametrize("is_as_one", [True, False])
def test_of_a_driver_that_lives_yet_and_its_successor_in_the_other_way_one_writes(
    options, topic, monkeypatch, held_at, is_as_one
):
    """Each looked whether the other had begun, and both wrote: nothing that they had in common was taken over."""
    batch = MicroBatch(options, topic, 0)
    tasks = [] if is_as_one else [batch.write(0), batch.write(1)]
    right = getattr(Producer, held_at)

    def go_on(as_one: bool) -> None:
        if as_one:
            run(options, topic, 0, held("0/0", "0/1"))
        else:
            commit_micro_batch(options, topic, 0, tasks or [batch.write(0), batch.write(1)], run="successor")

    async def hold(self: Producer, *arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(Producer, held_at, right)
        await asyncio.to_thread(go_on, not is_as_one)
        await right(self, *arguments, **named)

    monkeypatch.setattr(Producer, held_at, hold)
    with pytest.raises((KafkaError, ConfigError)):
        go_on(is_as_one)
    assert written(options, topic) == batch.expected()


def before_the_end(options: SinkOptions, query: str, tasks: Any) -> None:
    """What `commit_micro_batch` does before it ends the first transaction."""
    transactions = [each.transaction for each in tasks if each.transaction]
    asyncio.run(sink._begin_commit(options, query, 0, tasks, transactions))


@pytest.mark.slow
def test_a_micro_batch_that_is_written_as_one_is_not_written_by_tasks(options, topic):
    run(options, topic, 0, held("0/0", "0/1"))
    batch = MicroBatch(options, topic, 0)
    with pytest.raises(ConfigError, match=r"micro-batch 0 was written with atomic=true.*run it with atomic=true"):
        commit_micro_batch(options, topic, 0, [batch.write(0), batch.write(1)])
    run(options, topic, 0, held("0/0", "0/1"))
    later = MicroBatch(options, topic, 1)
    commit_micro_batch(options, topic, 1, [later.write(0), later.write(1)])
    assert written(options, topic) == batch.expected() + later.expected()


@pytest.mark.slow
@pytest.mark.parametrize("now", [("a", "b", "c"), ("abc",), ("ab", "c"), ("a",), ()])
def test_a_micro_batch_that_is_written_and_comes_with_more_rows_is_refused(options, topic, now):
    """As after a checkpoint was set back and more records came: the rows that were not written were lost."""
    run(options, topic, 0, held("0", "1"), held("2"))
    division = [held(*values) for values in now]
    run(options, topic, 0, *division)  # divided otherwise, or some have left the source since
    with pytest.raises(ConfigError, match=r"has 4 rows now .* has committed 3: .* the checkpoint was set back"):
        run(options, topic, 0, *division, held(*"defg"[: 4 - sum(map(len, now))]))
    run(options, topic, 1, held("next"))
    assert written(options, topic) == Counter([b"0", b"1", b"2", b"next"])


def test_rows_of_a_task_come_back_as_they_were():
    schema = pa.schema([("key", pa.binary()), ("value", pa.string()), ("topic", pa.string())])
    given = [pa.record_batch([[b"k", None], ["v", None], ["t", "u"]], schema=schema)] * 2
    assert list(release_rows([hold_rows(given, MAX_BYTES), held()], MAX_BYTES)) == given


def test_more_rows_than_the_driver_takes_are_refused():
    with pytest.raises(ConfigError, match=r"takes 10 bytes of rows .* Raise maxAtomicBytes"):
        hold_rows(rows("a" * 4) + rows("a" * 4), 10)
    task = hold_rows(rows("a" * 4), 10)
    list(release_rows([task], 10))
    with pytest.raises(ConfigError, match="Raise maxAtomicBytes"):
        release_rows([task, task], 10)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"atomic": "true"}, "atomic needs exactlyOnce=true"),
        ({"exactlyOnce": "true", "maxAtomicBytes": "5"}, "maxAtomicBytes has no effect without atomic=true"),
        (
            {"exactlyOnce": "true", "atomic": "true", "maxAtomicBytes": "0"},
            "must be a whole number, at least 1 and below",
        ),
        ({"exactlyOnce": "true", "atomic": "true", "maxAtomicBytes": "5 MB"}, "maxAtomicBytes must be a whole number"),
        ({"exactlyOnce": "true", "atomic": "yes"}, "atomic must be true or false"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, reason):
    with pytest.raises(ConfigError, match=reason):
        SinkOptions.parse({"kafka.bootstrap.servers": "localhost:1", **given})
