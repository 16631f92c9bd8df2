"""A leader changes uncleanly between two fetches of a task of Spark, or between two micro-batches: both notice it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import pytest

from tests.cluster.asking import await_in_sync, await_leader, create_topic, send
from tests.cluster.conftest import NewCluster
from tidelog.spark_ingest.fetch import read_range
from tidelog.spark_ingest.offsets import DataLoss
from tidelog.spark_ingest.option_table import BATCH, STREAM
from tidelog.spark_ingest.options import SourceOptions
from tidelog.spark_ingest.planning import OffsetRange
from tidelog.spark_ingest.stream import StreamDriver
from tidelog.testing.cluster import EmbeddedCluster

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.slow

TOPIC = "torn"
OLD, NEW = list(range(10)), [*range(5), *range(100, 110)]
"""The values by offset, before the election and after it."""


@pytest.fixture
def torn(new_cluster: NewCluster) -> tuple[EmbeddedCluster, Callable[[], None]]:
    """A cluster with the log OLD, and what makes it NEW. Each record is a batch."""
    cluster = new_cluster(3, controllers=1)
    create_topic(cluster, TOPIC, [[1, 2]], {"unclean.leader.election.enable": "true"})

    def write(values: list[int]) -> None:
        for value in values:
            send(cluster, TOPIC, [b"%d" % value])

    def elect() -> None:
        cluster.kill(1)
        await_leader(cluster.nodes[3].port, TOPIC, -1)
        cluster.restart(2)
        await_leader(cluster.nodes[3].port, TOPIC, 2)
        write(NEW[5:])

    write(OLD[:5])
    cluster.kill(2)
    await_in_sync(cluster.nodes[3].port, TOPIC, [1])
    write(OLD[5:])
    return cluster, elect


def options(cluster: EmbeddedCluster, mode: str = BATCH, **given: str) -> SourceOptions:
    servers = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "subscribe": TOPIC}
    return SourceOptions.parse({**servers, "kafka.max.partition.fetch.bytes": "1", **given}, mode)


def values(batch: Any) -> list[int]:
    return [int(value) for value in batch["value"].to_pylist()]


def read_on(task: Iterable[Any], rows: list[int]) -> None:
    for batch in task:
        rows += values(batch)


def test_a_task_does_not_go_on_in_another_log(torn: tuple[EmbeddedCluster, Callable[[], None]]) -> None:
    cluster, elect = torn
    strict, lax = options(cluster), options(cluster, failOnDataLoss="false")
    tasks = [read_range(each, OffsetRange(TOPIC, 0, 0, 10), ("value",)) for each in (strict, lax)]
    rows = [[value for _ in range(7) for value in values(next(task))] for task in tasks]
    assert rows == [OLD[:7]] * 2
    elect()
    with pytest.raises(DataLoss, match=f"records of {TOPIC}-0 before offset [78] were replaced by an unclean election"):
        read_on(tasks[0], rows[0])
    assert rows[0] == OLD[: len(rows[0])]
    read_on(tasks[1], rows[1])
    assert rows[1] in (OLD[:7] + NEW[7:10], OLD[:8] + NEW[8:10])
    again: list[int] = []
    read_on(read_range(strict, OffsetRange(TOPIC, 0, 0, 10), ("value",)), again)
    assert again == NEW[:10]


def test_a_stream_notices_that_what_it_has_read_was_replaced(
    torn: tuple[EmbeddedCluster, Callable[[], None]],
) -> None:
    cluster, elect = torn
    given = [options(cluster, STREAM, startingOffsets="earliest", failOnDataLoss=each) for each in ("true", "false")]
    with closing(StreamDriver(given[0])) as strict, closing(StreamDriver(given[1])) as lax:
        for stream in (strict, lax):
            assert stream.latest_offset(stream.initial_offset()) == {TOPIC: {"0": 10}}
        elect()
        loss = f"the records of {TOPIC}-0 from offset 5 to 9 were replaced by an unclean .* read those in a batch"
        with pytest.raises(DataLoss, match=loss):
            strict.latest_offset({TOPIC: {"0": 10}})
        back = lax.latest_offset({TOPIC: {"0": 10}})
        assert back == {TOPIC: {"0": 5}}
        assert lax.ranges({TOPIC: {"0": 10}}, back) == []
        end = lax.latest_offset(back)
        assert lax.ranges(back, end) == [(TOPIC, 0, 5, 15)]
        assert lax.latest_offset(end) is end


def test_a_stream_before_the_replaced_records_reads_on(torn: tuple[EmbeddedCluster, Callable[[], None]]) -> None:
    cluster, elect = torn
    with closing(StreamDriver(options(cluster, STREAM, startingOffsets="earliest"))) as stream:
        start = stream.latest_offset(stream.initial_offset(), max_offsets=5)
        assert start == {TOPIC: {"0": 5}}
        elect()
        assert stream.latest_offset(start) == {TOPIC: {"0": 15}}


def test_a_clean_election_is_no_loss_also_where_an_epoch_has_no_records(new_cluster: NewCluster) -> None:
    cluster = new_cluster(3, controllers=1)
    create_topic(cluster, TOPIC, [[1, 2]])
    send(cluster, TOPIC, [b"0", b"1"])
    asked = cluster.nodes[3].port
    with closing(StreamDriver(options(cluster, STREAM, startingOffsets="earliest"))) as stream:
        offset = stream.latest_offset(stream.initial_offset())
        for leader, next_leader in ((1, 2), (2, 1), (1, 2)):
            cluster.kill(leader)
            await_leader(asked, TOPIC, next_leader)
            assert stream.latest_offset(offset) is offset
            cluster.restart(leader)
            await_in_sync(asked, TOPIC, [1, 2])
        send(cluster, TOPIC, [b"2"])
        assert stream.latest_offset(offset) == {TOPIC: {"0": 3}}
