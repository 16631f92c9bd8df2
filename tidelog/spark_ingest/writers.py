"""Spark's side of the sink: `write` runs in the tasks, `commit` and `abort` on the driver.

Thin; `sink.py` writes and ends transactions. No state survives in a writer: what must last lies in
the cluster.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # before PySpark 4.1, where the sink writes batches only
    DataSourceStreamArrowWriter = object  # type: ignore[misc,assignment,unused-ignore]

from tidelog.client.producing.detached_transactions import DetachedTransaction
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.held_rows import HeldRows, hold_rows, release_rows
from tidelog.spark_ingest.libraries import check_libraries
from tidelog.spark_ingest.sink import (
    TaskId,
    TaskOutput,
    abort_micro_batch,
    abort_write,
    commit_micro_batch,
    commit_write,
    write_as_one,
    write_task,
)
from tidelog.spark_ingest.sink_options import SinkOptions, check_speculation
from tidelog.spark_ingest.task_process import task_process

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)


@dataclass
class TaskWritten(WriterCommitMessage):  # type: ignore[misc,unused-ignore]
    """The message of one task to the driver."""

    written: TaskOutput | HeldRows
    query: str = ""
    run: str = ""
    """The query's run of its own, from a start to an end."""


Messages = Sequence[WriterCommitMessage | None]
Outcome = TypeVar("Outcome", TaskOutput, HeldRows)


class TidelogWriter(DataSourceArrowWriter):  # type: ignore[misc,unused-ignore]
    """One batch write. With `exactlyOnce` its rows appear when all tasks are done."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._query = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _task_context(self._options)
        return _write(self._options, TaskId(self._query, context.partitionId(), -1), iterator)

    def commit(self, messages: Messages) -> None:
        if self._options.max_atomic_bytes:
            _write_held(self._options, self._query, -1, messages)
            return
        commit_write(self._options, _transactions(messages))

    def abort(self, messages: Messages) -> None:
        has_running_tasks = None in messages
        abort_write(self._options, self._query, _transactions(messages), has_running_tasks=has_running_tasks)


class TidelogStreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc,unused-ignore]
    """The writes of one stream. Raises ConfigError where Spark has no such writer."""

    def __init__(self, options: SinkOptions) -> None:
        if DataSourceStreamArrowWriter is object:  # type: ignore[comparison-overlap,unused-ignore]
            raise ConfigError("streams need PySpark 4.2 or newer")
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _task_context(self._options)
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if self._options.exactly_once and (query is None or batch is None):
            raise ConfigError("exactlyOnce needs the number of the micro-batch, which this Spark does not tell")
        task = TaskId(query or "", context.partitionId(), int(batch or -1))
        # Spark's job group is the run of the query.
        return _write(self._options, task, iterator, context.getLocalProperty("spark.jobGroup.id") or "")

    def commit(self, messages: Messages, batchId: int) -> None:
        task = _first(messages)
        if self._options.max_atomic_bytes:
            _write_held(self._options, task.query, batchId, messages, task.run)
        elif self._options.exactly_once:
            commit_micro_batch(self._options, task.query, batchId, _outcomes(messages, TaskOutput), task.run)

    def abort(self, messages: Messages, batchId: int) -> None:
        abort_micro_batch(self._options, _first(messages).query, batchId, _transactions(messages))


def _task_context(options: SinkOptions) -> TaskContext:
    context = TaskContext.get()
    assert context is not None
    # Spark hands its settings to tasks as local properties.
    check_speculation(options, context.getLocalProperty("spark.speculation"))
    return context


def _write(options: SinkOptions, task: TaskId, iterator: Iterator[pa.RecordBatch], run: str = "") -> TaskWritten:
    check_libraries()
    with task_process():
        if options.max_atomic_bytes:
            return TaskWritten(hold_rows(iterator, options.max_atomic_bytes), task.query, run)
        return TaskWritten(write_task(options, task, iterator), task.query, run)


def _write_held(options: SinkOptions, query: str, batch: int, messages: Messages, run: str = "") -> None:
    rows = release_rows(_outcomes(messages, HeldRows), options.max_atomic_bytes)
    write_as_one(options, query, batch, rows, run)


def _first(messages: Messages) -> TaskWritten:
    """What any task says of the query."""
    return next((each for each in messages if isinstance(each, TaskWritten)), TaskWritten(TaskOutput(0, None)))


def _outcomes(messages: Messages, kind: type[Outcome]) -> list[Outcome]:
    """What the tasks have done, in the order of their partitions."""
    return [each.written for each in messages if isinstance(each, TaskWritten) and isinstance(each.written, kind)]


def _transactions(messages: Messages) -> list[DetachedTransaction]:
    return [each.transaction for each in _outcomes(messages, TaskOutput) if each.transaction is not None]
