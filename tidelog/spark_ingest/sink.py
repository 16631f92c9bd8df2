"""Writes the rows of one task, and ends the transactions of all tasks. Spark itself is not needed here.

Without `exactlyOnce` a task's rows are in the log when the task ends, and a task that Spark runs
again writes them again. With it a task writes one transaction and leaves it open; the driver commits
those of all tasks. Invariants of a stream: a task's transaction carries the number of its
micro-batch (`micro_batches.py`). A task first takes over its transactional id, which ends what an
earlier run left open, then reads that number: a micro-batch that is committed is not written again.
So a replay neither loses nor doubles rows, when the rows of a task depend on its micro-batch alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.client.config import ConsumerConfig, ProducerConfig
from tidelog.client.model import BrokerErrors
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.kernel_loading import KernelLoading
from tidelog.client.producing.arrow_batches import ArrowBatches
from tidelog.client.producing.detached_transactions import DetachedTransaction, end_transaction
from tidelog.client.producing.producer import Producer
from tidelog.client.sync.loop_thread import LoopThread
from tidelog.protocol.batches.columnar_input import INPUT_COLUMNS
from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError
from tidelog.spark_ingest.connecting import connect, start_within
from tidelog.spark_ingest.micro_batches import (
    CommittedBatch,
    Marks,
    TaskOutcome,
    atomic_name,
    begin_commit,
    check_not_begun_in_tasks,
    check_rows,
    check_same_topics,
    committed_batch,
    is_first_of_run,
    is_repeated,
    mark,
)
from tidelog.spark_ingest.sink_options import SinkOptions, column_places

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_END_TIMEOUT_MS = 60_000
_LOAD_TIMEOUT_S = 300
_KILL_TIME_S = 5.0
"""The time in which Spark ends the tasks of a failed write: it looks every two seconds, and kills two seconds later."""
_ENDED_ERRORS = frozenset(
    (
        ErrorCode.INVALID_TXN_STATE,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    )
)
"""The transaction was ended by its timeout or by another attempt of the task."""
_UNFINISHED_STATES = ("Ongoing", "PrepareCommit", "PrepareAbort")


class TaskId(NamedTuple):
    """One task of a write. `query` names the write; `batch` is the micro-batch, -1 of a batch write."""

    query: str
    partition: int
    batch: int

    def transactional_id(self, prefix: str) -> str:
        return f"{query_group(prefix, self.query)}-{self.partition}"


def query_group(prefix: str, query: str) -> str:
    """The group that remembers the micro-batches of a query."""
    return f"{prefix}-{query}"


class TaskOutput(NamedTuple):
    """What a task has written."""

    rows: int
    """The rows of its input, also where it has written them before."""
    transaction: DetachedTransaction | None
    """The driver ends it."""
    topic: str = ""
    """The topic of its first row, with which the query's number of the micro-batch lies, too."""
    is_repeated: bool = False
    """Whether an earlier run of the task has committed this micro-batch."""


def write_task(options: SinkOptions, task: TaskId, batches: Iterable[pa.RecordBatch]) -> TaskOutput:
    """Write the rows of a task. Raises ConfigError for a row that cannot be a record, KafkaError."""
    if not options.exactly_once:
        return _write(_Writer(options), options, batches)
    transactional_id = task.transactional_id(options.prefix)
    return _write(_TransactionWriter(options, transactional_id, task.batch), options, batches)


def write_as_one(
    options: SinkOptions, query: str, batch: int, batches: Iterable[pa.RecordBatch], run: str = ""
) -> None:
    """Write the rows of all tasks of a micro-batch as one transaction, and commit it; `batch` is -1 of a batch write.

    Raises ConfigError when the micro-batch was begun in transactions of single tasks, KafkaError.
    """
    group = query_group(options.prefix, query)
    if batch >= 0:
        asyncio.run(_abort_of_earlier_runs(options, group, batch, run))
    written = _write(_TransactionWriter(options, atomic_name(group), batch, run, group), options, batches)
    if written.is_repeated:
        asyncio.run(_check_same_rows(options, TaskOutcome(atomic_name(group), written.rows, None), batch))
    end_transactions(options, [written.transaction] if written.transaction else [], committed=True)


async def _abort_of_earlier_runs(options: SinkOptions, group: str, batch: int, run: str) -> None:
    config = _common_config(options)
    timeout_ms = config.default_api_timeout_ms
    async with _connected(config, options.max_block_ms) as cluster:
        last = await committed_batch(cluster, atomic_name(group), timeout_ms, require_stable=False)
        if is_first_of_run(last, batch, run):
            await _abort_open(options, f"{group}-")


async def _check_same_rows(options: SinkOptions, written: TaskOutcome, batch: int) -> None:
    config = _common_config(options)
    async with _connected(config, options.max_block_ms) as cluster:
        await check_rows(cluster, [written], batch, config.default_api_timeout_ms)


def _write(writer: _Writer, options: SinkOptions, batches: Iterable[pa.RecordBatch]) -> TaskOutput:
    # The iterator blocks while Spark computes rows. The producer works in a thread of its own meanwhile.
    thread = LoopThread()
    try:
        for batch in batches:  # to its end: Spark does not use a process again that leaves input behind
            if batch.num_rows:
                thread.run(writer.write(batch))
        return thread.run(writer.finish())
    except KafkaError as error:
        raise _with_reason(error, options) from None
    finally:
        try:
            thread.run(writer.close())
        finally:
            thread.stop()


def _with_reason(error: KafkaError, options: SinkOptions) -> KafkaError:
    """The error with the reasons for which a transaction ends early, where it is such an error."""
    if not options.exactly_once or error.code not in _ENDED_ERRORS:
        return error
    timeout_ms = options.producer["transaction_timeout_ms"]
    return KafkaError(
        error.code,
        f"{error.message}: the transaction was open for longer than kafka.transaction.timeout.ms ({timeout_ms}), or "
        "another attempt has taken over. Its rows are not visible; a stream that is started again writes "
        "them",
    )


class _Writer:
    """The records of one task. Its coroutines run in one event loop."""

    def __init__(self, options: SinkOptions, **producer_options: str) -> None:
        self._options = options
        self._producer = Producer(**options.producer, **producer_options)
        load = ArrowBatches(ProducerConfig.from_options(options.producer)).load_kernel
        self._kernel = KernelLoading(load, lambda: None)
        self._rows = 0
        self._topics: set[str] = set()
        self._unsettled = 0
        self._failure: BaseException | None = None
        self._settled = asyncio.Event()

    async def write(self, batch: pa.RecordBatch) -> None:
        """Send the rows. Raises the first error of earlier ones, too."""
        await self._start()
        for topic, rows in _by_topic(batch, self._options):
            if self._failure is not None:
                raise self._failure
            try:
                future = await self._producer.send_arrow(topic, rows)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"a row cannot be written: {error}") from None
            self._unsettled += 1
            self._topics.add(topic)
            self._rows += rows.num_rows
            future.add_done_callback(self._on_done)

    async def _start(self) -> None:
        # Compiled for the first time on a machine, the loops may take longer than `max_block_ms`, which is for brokers.
        await self._kernel.load_within(_LOAD_TIMEOUT_S)
        await start_within(self._producer.start, self._options.max_block_ms)

    def _on_done(self, future: asyncio.Future[Any]) -> None:
        self._unsettled -= 1
        self._failure = self._failure or future.exception()
        self._settled.set()

    async def finish(self) -> TaskOutput:
        """Wait until every row is acknowledged. Raises the first error."""
        await self._deliver()
        return TaskOutput(self._rows, None)

    async def _deliver(self) -> None:
        await self._producer.flush()
        # After a flush the futures have their outcome, but their callbacks may not have run yet.
        while self._unsettled:
            self._settled.clear()
            await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """End the producer. A transaction that is not detached is aborted."""
        await self._kernel.close()
        await self._producer.close()


class _TransactionWriter(_Writer):
    """Records in one transaction, with the micro-batch's number in it as an offset of the group of the same name."""

    def __init__(
        self, options: SinkOptions, transactional_id: str, batch: int, run: str = "", query_group: str = ""
    ) -> None:
        super().__init__(options, transactional_id=transactional_id)
        self._id = transactional_id
        self._batch = batch
        self._run = run
        self._query_group = query_group
        """Of a query that writes its micro-batch as one transaction."""
        self._topic = ""
        self._committed = CommittedBatch(-1, 0)
        self._is_repeated = False

    async def write(self, batch: pa.RecordBatch) -> None:
        if not self._topic:
            await self._begin(_topics(batch, self._options)[0])
        if self._is_repeated:
            self._rows += batch.num_rows
            self._topics.update(_topics(batch, self._options))
        else:
            await super().write(batch)

    async def _begin(self, topic: str) -> None:
        self._topic = topic
        await self._start()
        await self._producer.init_transactions()
        if self._batch >= 0:
            config = _common_config(self._options)
            async with _connected(config, self._options.max_block_ms) as cluster:
                if self._query_group:
                    await check_not_begun_in_tasks(
                        cluster, self._query_group, self._batch, config.default_api_timeout_ms
                    )
                self._committed = await committed_batch(cluster, self._id, config.default_api_timeout_ms)
            self._is_repeated = is_repeated(self._committed, self._batch, f"the writer {self._id!r}")
        if self._is_repeated:
            logger.info("micro-batch %d of %s is committed already", self._batch, self._id)
        else:
            await self._producer.begin_transaction()

    async def finish(self) -> TaskOutput:
        """Deliver the transaction and leave it open."""
        if self._is_repeated:
            check_same_topics(self._committed, self._topics, f"the writer {self._id!r}")
        if self._is_repeated or not self._topic:
            return TaskOutput(self._rows, None, self._topic, self._is_repeated)
        await self._deliver()
        if self._batch >= 0:
            offsets = mark(self._topics, self._batch, self._rows, self._run)
            await self._producer.send_offsets_to_transaction(offsets, self._id)
        return TaskOutput(self._rows, await self._producer.detach_transaction(), self._topic)


def end_transactions(options: SinkOptions, transactions: Sequence[DetachedTransaction], *, committed: bool) -> None:
    """Commit or abort the transactions of a write. A commit raises KafkaError when one is not committed.

    An abort goes on after an error: a transaction that is not ended ends by its timeout.
    """
    if transactions:
        asyncio.run(_end_transactions(options, transactions, committed))


def commit_write(options: SinkOptions, transactions: Sequence[DetachedTransaction]) -> None:
    """Commit the transactions of all tasks of a batch write.

    Raises KafkaError, before any is committed, where one is over: its rows would be missing for ever, and a job that
    runs again would write those of the others twice.
    """
    if transactions:
        asyncio.run(_check_open(options, transactions))
    end_transactions(options, transactions, committed=True)


async def _check_open(options: SinkOptions, transactions: Sequence[DetachedTransaction]) -> None:
    from tidelog.client.admin.client import Admin

    try:
        async with Admin(**_common_options(options)) as admin:
            states = await admin.describe_transactions([each.transactional_id for each in transactions])
    except KafkaError as error:  # an old broker, or one that is away: the commit waits for it
        logger.warning("whether the transactions are open yet is not known: %s", error)
        return
    for each in transactions:
        now = states[each.transactional_id]
        if (now.state, now.producer_id, now.producer_epoch) != ("Ongoing", each.producer_id, each.producer_epoch):
            text = f"transaction {each.transactional_id!r} is over ({now.state}), and nothing of the write is committed"
            raise _with_reason(KafkaError(ErrorCode.INVALID_TXN_STATE, text), options)


def abort_write(
    options: SinkOptions, query: str, transactions: Sequence[DetachedTransaction], *, has_running_tasks: bool = False
) -> None:
    """Abort the transactions of a batch write, also those that killed tasks have left open.

    Where tasks run yet it waits for their end. An abort goes on after an error.
    """
    end_transactions(options, transactions, committed=False)
    if options.exactly_once and not options.max_atomic_bytes:
        asyncio.run(_abort_open_write(options, f"{query_group(options.prefix, query)}-", has_running_tasks))


async def _abort_open_write(options: SinkOptions, id_prefix: str, has_running_tasks: bool) -> None:
    await _abort_open(options, id_prefix)
    if has_running_tasks:  # one may begin its transaction, and leave it open, before Spark kills it
        await asyncio.sleep(_KILL_TIME_S)
        await _abort_open(options, id_prefix)


def abort_micro_batch(
    options: SinkOptions, query: str, batch: int, transactions: Sequence[DetachedTransaction]
) -> None:
    """The same for a stream; `query` is empty where no task has told it.

    Where another driver has begun a later micro-batch, killed tasks of this one have nothing open.
    """
    end_transactions(options, transactions, committed=False)
    if options.exactly_once and query:
        asyncio.run(_abort_open_tasks(options, query_group(options.prefix, query), batch))


async def _abort_open_tasks(options: SinkOptions, group: str, batch: int) -> None:
    config = _common_config(options)
    try:
        async with _connected(config) as cluster:
            marks = [
                await committed_batch(cluster, each, config.default_api_timeout_ms, require_stable=False)
                for each in (group, atomic_name(group))
            ]
    except KafkaError as error:
        logger.warning("open transactions of %s are left to their timeout: %s", group, error)
        return
    if all(last.number <= batch for last in marks):
        await _abort_open(options, f"{group}-")


async def _abort_open(options: SinkOptions, id_prefix: str, except_ids: Collection[str] = ()) -> None:
    """Abort the open transactions whose ids begin so, and wait for those that are about to end.

    Where that fails, they are left to their timeout.
    """
    from tidelog.client.admin.client import Admin  # takes 17 ms, and no task needs it

    try:
        async with Admin(**_common_options(options)) as admin:
            try:
                listings = await admin.list_transactions(states=_UNFINISHED_STATES)
            except BrokerErrors as error:
                logger.warning("open transactions of %s are left to their timeout: %s", id_prefix, error)
                listings = error.answers
            ids = {each.transactional_id for each in listings if each.transactional_id.startswith(id_prefix)}
            names = sorted(ids.difference(except_ids))
            outcomes = await admin.fence_producers(names)
    except KafkaError as error:
        logger.warning("open transactions of %s are left to their timeout: %s", id_prefix, error)
        return
    for name, outcome in outcomes.items():
        if isinstance(outcome, KafkaError):
            logger.warning("the transaction of %r is left to its timeout: %s", name, outcome)


def commit_micro_batch(
    options: SinkOptions, query: str, batch: int, tasks: Sequence[TaskOutput], run: str = ""
) -> None:
    """Commit the transactions of all tasks of a micro-batch, given in the order of their partitions.

    `run` is that of the query. The first commit of a run aborts what earlier ones have left open.
    Raises ConfigError, after it has aborted them, when the micro-batch was run with other tasks
    before; KafkaError when a transaction is not committed.
    """
    transactions = [each.transaction for each in tasks if each.transaction is not None]
    if transactions or any(each.is_repeated for each in tasks):
        asyncio.run(_begin_commit(options, query, batch, tasks, transactions, run))
    end_transactions(options, transactions, committed=True)


async def _begin_commit(
    options: SinkOptions,
    query: str,
    batch: int,
    tasks: Sequence[TaskOutput],
    transactions: Sequence[DetachedTransaction],
    run: str = "",
) -> None:
    config = _common_config(options)
    timeout_ms = config.default_api_timeout_ms
    outcomes = [
        TaskOutcome(
            TaskId(query, partition, batch).transactional_id(options.prefix),
            task.rows,
            None if task.transaction is None else task.topic,
        )
        for partition, task in enumerate(tasks)
    ]
    group = query_group(options.prefix, query)
    driver = Producer(**options.producer, transactional_id=atomic_name(group))

    async def commit_marks(marks: Marks) -> None:
        await driver.begin_transaction()
        await driver.send_offsets_to_transaction(marks, group)
        await driver.commit_transaction()

    try:
        async with _connected(config, options.max_block_ms) as cluster:
            if is_first_of_run(await committed_batch(cluster, group, timeout_ms, require_stable=False), batch, run):
                await _abort_open(options, f"{group}-", {each.transactional_id for each in transactions})
            await driver.init_transactions()
            await begin_commit(cluster, group, outcomes, batch, run, timeout_ms, commit_marks)
    except ConfigError:
        await _end_transactions(options, transactions, committed=False)
        raise
    except KafkaError as error:
        raise _with_reason(error, options) from None
    finally:
        await driver.close()


_COMMON_OPTIONS = frozenset(
    (
        "bootstrap_servers",
        "client_id",
        "metadata_max_age_ms",
        "reconnect_backoff_max_ms",
        "reconnect_backoff_ms",
        "request_timeout_ms",
        "retry_backoff_max_ms",
        "retry_backoff_ms",
        "security_protocol",
        "socket_connection_setup_timeout_ms",
    )
)


def _common_config(options: SinkOptions) -> ConsumerConfig:
    return ConsumerConfig.from_options(_common_options(options))


def _common_options(options: SinkOptions) -> dict[str, Any]:
    return {key: value for key, value in options.producer.items() if key in _COMMON_OPTIONS}


@asynccontextmanager
async def _connected(config: ConsumerConfig, timeout_ms: float = 0) -> AsyncIterator[Cluster]:
    """A cluster. `timeout_ms`: see `connect`; 0 is one attempt."""
    cluster = await connect(config, timeout_ms)
    try:
        yield cluster
    finally:
        await cluster.close()


async def _end_transactions(options: SinkOptions, transactions: Sequence[DetachedTransaction], committed: bool) -> None:
    timeout_ms = options.max_block_ms if committed else 0  # a transaction that is not aborted here ends by its timeout
    async with _connected(_common_config(options), timeout_ms) as cluster:
        ends = [
            end_transaction(cluster, each, committed=committed, timeout_ms=_END_TIMEOUT_MS) for each in transactions
        ]
        errors = [error for error in await asyncio.gather(*ends, return_exceptions=True) if error is not None]
    for error in errors:
        if not isinstance(error, KafkaError):
            raise error
        if committed:
            raise _with_reason(error, options)
        if error.code is not ErrorCode.INVALID_TXN_STATE:  # that one has ended, as where another's commit has failed
            logger.warning("a transaction is left to its timeout: %s", error)


def _topics(batch: pa.RecordBatch, options: SinkOptions) -> Sequence[str]:
    """The topics of the rows, that of the first row first. Raises ConfigError for a row without one."""
    if options.topic:
        return [options.topic]
    topics: Sequence[str | None] = batch.column(column_places(batch.schema.names)["topic"]).unique().to_pylist()
    if None in topics:
        raise ConfigError("null topic present in the data. Use the 'topic' option for setting a default topic.")
    return topics  # type: ignore[return-value]


def _by_topic(batch: pa.RecordBatch, options: SinkOptions) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each topic, with the columns that a record has."""
    import pyarrow as pa
    import pyarrow.compute as pc

    topics = _topics(batch, options)
    places = column_places(batch.schema.names)
    names = [name for name in INPUT_COLUMNS if name in places]
    records = pa.RecordBatch.from_arrays([batch.column(places[name]) for name in names], names=names)
    for topic in topics:
        is_whole = len(topics) == 1
        yield topic, records if is_whole else records.filter(pc.equal(batch.column(places["topic"]), topic))
