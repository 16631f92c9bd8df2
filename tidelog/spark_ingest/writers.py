"""Spark's side of the sink: `write` runs in the tasks, `commit` and `abort` on the driver.

Thin; `sink.py` writes and ends transactions. No state survives in a writer: what must last lies in
the cluster.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from tidelog.client.producing.detached_transactions import DetachedTransaction
from tidelog.protocol.errors import ConfigError
from tidelog.spark_ingest.sink import TaskId, end_transactions, write_task
from tidelog.spark_ingest.sink_options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)


@dataclass
class TaskWritten(WriterCommitMessage):  # type: ignore[misc,unused-ignore]
    """The message of one task to the driver."""

    rows: int
    transaction: DetachedTransaction | None


Messages = Sequence[WriterCommitMessage | None]


class TidelogWriter(DataSourceArrowWriter):  # type: ignore[misc,unused-ignore]
    """One batch write. With `exactlyOnce` its rows appear when all tasks are done."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._query = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        written = write_task(self._options, TaskId(self._query, context.partitionId(), -1), iterator)
        return TaskWritten(*written)

    def commit(self, messages: Messages) -> None:
        end_transactions(self._options, _transactions(messages), committed=True)

    def abort(self, messages: Messages) -> None:
        end_transactions(self._options, _transactions(messages), committed=False)


class TidelogStreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc,unused-ignore]
    """The writes of one stream."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId")
        batch = context.getLocalProperty("streaming.sql.batchId")
        if self._options.exactly_once and (query is None or batch is None):
            raise ConfigError("exactlyOnce needs the number of the micro-batch, which this Spark does not tell")
        task = TaskId(query or "", context.partitionId(), int(batch or -1))
        return TaskWritten(*write_task(self._options, task, iterator))

    def commit(self, messages: Messages, batchId: int) -> None:
        end_transactions(self._options, _transactions(messages), committed=True)

    def abort(self, messages: Messages, batchId: int) -> None:
        end_transactions(self._options, _transactions(messages), committed=False)


def _transactions(messages: Messages) -> list[DetachedTransaction]:
    return [each.transaction for each in messages if isinstance(each, TaskWritten) and each.transaction is not None]
