"""Two runs of one query on one checkpoint at once: each row is written once, whatever the order of their steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from tidelog import EmbeddedBroker
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Consumer
from tidelog.protocol.errors import KafkaError
from tidelog.spark_ingest.sink import TaskId, TaskOutput, commit_micro_batch, end_transactions, write_task
from tidelog.spark_ingest.sink_options import SinkOptions

pa = pytest.importorskip("pyarrow")

TASKS = 2
STEPS = TASKS + 2
"""Of a run: each task, then the transactions of the first task alone, then the commit of all."""


@pytest.fixture(scope="module")
def options() -> Iterator[SinkOptions]:
    with EmbeddedBroker() as broker:
        given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": "rows", "exactlyonce": "true"}
        with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
            admin.create_topics([NewTopic("rows", 1)])
        yield SinkOptions.parse(given)


def committed(options: SinkOptions) -> Counter[bytes]:
    partition = TopicPartition("rows", 0)
    with Consumer(
        bootstrap_servers=options.producer["bootstrap_servers"],
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    ) as consumer:
        (end,) = consumer.end_offsets([partition]).values()
        consumer.assign([partition])
        found: Counter[bytes] = Counter()
        while consumer.position(partition) < end:
            found.update(record.value or b"" for record in consumer.poll(500).get(partition, []))
    return found


class Run:
    """One driver with its tasks, one micro-batch; `step` does the next thing. A refusal ends it."""

    def __init__(self, options: SinkOptions, query: str, batch: int) -> None:
        self.options, self.query, self.batch = options, query, batch
        self.tasks: list[TaskOutput] = []
        self.is_ended = self.is_committed = False

    def step(self) -> None:
        if self.is_ended:
            return
        try:
            self._step()
        except KafkaError:
            self.is_ended = True

    def _step(self) -> None:
        number = len(self.tasks)
        if number < TASKS:
            rows: Any = pa.record_batch({"value": [f"{self.query}/{self.batch}/{number}".encode()]})
            self.tasks.append(write_task(self.options, TaskId(self.query, number, self.batch), [rows]))
        elif number == TASKS:
            first = self.tasks[0].transaction
            end_transactions(self.options, [first] if first else [], committed=True)
            self.tasks.append(TaskOutput(0, None))
        else:
            commit_micro_batch(self.options, self.query, self.batch, self.tasks[:TASKS])
            self.is_ended = self.is_committed = True


def orders() -> Iterator[tuple[int, ...]]:
    """All orders of the steps of two runs; which of them begins does not matter."""
    for places in combinations(range(2 * STEPS), STEPS):
        if places[0] == 0:
            yield tuple(0 if place in places else 1 for place in range(2 * STEPS))


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, marks=pytest.mark.slow if number % 5 else (), id="".join(map(str, order)))
        for number, order in enumerate(orders())
    ],
)
def test_a_row_is_written_once_in_whatever_order_two_runs_of_a_query_go(options, order):
    query = "".join(map(str, order))
    runs = [Run(options, query, 0), Run(options, query, 0)]
    for which in order:
        runs[which].step()
    # Spark starts a query again that was refused.
    last = Run(options, query, 0)
    for _ in range(STEPS):
        last.step()
    assert last.is_committed
    mine = {value: count for value, count in committed(options).items() if value.startswith(query.encode())}
    assert mine == {f"{query}/0/{task}".encode(): 1 for task in range(TASKS)}
