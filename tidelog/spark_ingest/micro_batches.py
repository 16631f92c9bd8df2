"""Which micro-batch of a stream is committed, as offsets of groups in the cluster.

Each task has a group whose offset is committed in the task's transaction, with the number of its rows
as the offset's text: the task has written every micro-batch before that offset. The query has a group
whose offset the driver commits before it ends the first transaction of a micro-batch, with the number
of tasks and the run of the query as the offset's text. Invariant: a micro-batch that may be committed
in part is run again with the same tasks, or refused; otherwise rows that change their task would be
lost or doubled. Tasks are the same when each that is committed has as many rows as before; rows that
change places in equal numbers are not seen.

Where a micro-batch is one transaction, the query has another group (`atomic_name`), whose offset is
committed in that transaction. A micro-batch that was begun in one of the two ways is refused in the
other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from tidelog.client.groups.coordinator import Coordinator
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.protocol.errors import ConfigError, join_some

Marks = dict[TopicPartition, OffsetAndMetadata]
_MARK_PARTITION = 0
_WAYS_OUT = "To write this micro-batch as it is now, also rows that it has written before, run it without exactlyOnce"


class CommittedBatch(NamedTuple):
    """The last committed micro-batch of a task or a query; -1 for none."""

    number: int
    size: int
    """The number of a query's tasks, or of a task's rows; 0 where it is not known."""
    run: str = ""
    """The run of the query, from its start to its end; empty where it is not known."""
    topics: frozenset[str] = frozenset()
    """The topics of its rows, without those that were deleted since."""


async def committed_batch(
    cluster: Cluster, group: str, timeout_ms: float, *, require_stable: bool = True
) -> CommittedBatch:
    """The last micro-batch in the group's offsets; it waits for an open transaction that adds one.

    They lie with the topics that the micro-batch was written to, so all topics are looked at.
    """
    offsets = await Coordinator(cluster, group).committed(None, timeout_ms, require_stable=require_stable)
    last = max(offsets.values(), key=lambda each: each.offset, default=OffsetAndMetadata(0))
    size, _, run = last.metadata.partition(" ")
    topics = frozenset(partition.topic for partition, each in offsets.items() if each.offset == last.offset)
    return CommittedBatch(last.offset - 1, int(size) if size.isdecimal() else 0, run, topics)


def mark(topics: Iterable[str], batch: int, count: int, run: str = "") -> Marks:
    """The offsets to commit for a micro-batch of so many tasks or rows.

    Each topic has one: the offset of a topic that is deleted goes with it, and the others' rows are written yet.
    """
    offset = OffsetAndMetadata(batch + 1, f"{count} {run}".rstrip())
    return {TopicPartition(topic, _MARK_PARTITION): offset for topic in topics}


def is_first_of_run(last: CommittedBatch, batch: int, run: str) -> bool:
    """Whether `batch` may be the first micro-batch of this run, where `last` is the last one that was committed.

    An earlier run may have left transactions open then, also of tasks that this run lacks: they are aborted before the
    marks are read. Their rows would hold readers back, and be committed late by a driver that lives yet. Such a driver,
    with a micro-batch that is over, aborts none.
    """
    return last.number <= batch and (not run or last.run != run)


def is_repeated(committed: CommittedBatch, batch: int, owner: str) -> bool:
    """Whether `batch` is committed already. Raises ConfigError when a later one is."""
    if committed.number > batch:
        raise ConfigError(
            f"{owner} has committed micro-batch {committed.number}, and Spark runs micro-batch {batch}. Either "
            "another driver runs this query: let only one run. Or the checkpoint is older than the topic: begin with a "
            "new checkpoint, or with another transactionalIdPrefix"
        )
    return committed.number == batch


def check_same_topics(committed: CommittedBatch, topics: Collection[str], owner: str) -> None:
    """Raises ConfigError when a micro-batch that is committed has its rows in none of these topics.

    Another query with a copy of the checkpoint may have written it. As one of several topics may have been deleted
    since, one that is the same is enough.
    """
    if committed.topics.isdisjoint(topics):
        written, now = (join_some([repr(name) for name in sorted(names)]) for names in (committed.topics, topics))
        raise ConfigError(
            f"{owner} has written micro-batch {committed.number} to {written}, and not to {now}: the checkpoint is a "
            "copy of another query's, or the topic was changed while a micro-batch was being committed. Set another "
            f"transactionalIdPrefix, with which the micro-batch is written to {now} whole, or set back the topic"
        )


def atomic_name(query_group: str) -> str:
    """The group of a query whose micro-batches are one transaction each, and the transactional id of every driver.

    A driver takes the id over before it looks at the marks. So of two drivers, also in different ways, one commits.
    """
    return f"{query_group}-atomic"


async def check_not_begun_in_tasks(cluster: Cluster, query_group: str, batch: int, timeout_ms: float) -> None:
    """Raises ConfigError when transactions of single tasks of this or a later micro-batch may be committed."""
    begun = await committed_batch(cluster, query_group, timeout_ms)
    if begun.number >= batch:
        raise ConfigError(
            f"micro-batch {begun.number} was begun without atomic=true, and some of its rows may be written: run it to "
            "its end without atomic=true first"
        )


def _check_not_begun_as_one(committed: CommittedBatch, batch: int) -> None:
    if committed.number >= batch:
        raise ConfigError(
            f"micro-batch {committed.number} was written with atomic=true, and Spark runs micro-batch {batch}: run it "
            "with atomic=true"
        )


class TaskOutcome(NamedTuple):
    """One task of a micro-batch as it has run now."""

    group: str
    rows: int
    """The rows of its input, also where it has written them before."""
    topic: str | None
    """The topic of its open transaction; None for a task without one."""


async def begin_commit(
    cluster: Cluster,
    group: str,
    tasks: Sequence[TaskOutcome],
    batch: int,
    run: str,
    timeout_ms: float,
    commit_marks: Callable[[Marks], Awaitable[None]],
) -> None:
    """Note for the query that the transactions of a micro-batch are going to be committed.

    `commit_marks` commits the query's mark, and fails where another driver of the query has begun since.
    Raises ConfigError when an earlier run of the micro-batch has come as far with other tasks, or has
    committed it as one transaction.
    """
    committed, as_one = await asyncio.gather(
        *(committed_batch(cluster, each, timeout_ms) for each in (group, atomic_name(group)))
    )
    _check_not_begun_as_one(as_one, batch)
    topics = {task.topic for task in tasks if task.topic is not None}
    if is_repeated(committed, batch, f"the query {group!r}"):
        if committed.size != len(tasks):
            raise ConfigError(
                f"micro-batch {batch} was run with {committed.size} tasks before, some of which may be "
                f"committed, and now with {len(tasks)}: exactlyOnce needs the same tasks. Set back the options "
                "that divide the stream into tasks, as minPartitions, until it is done, and the number of cores where "
                f"Spark merges small partitions after a shuffle. {_WAYS_OUT}"
            )
        await check_rows(cluster, tasks, batch, timeout_ms)
    elif topics:
        await commit_marks(mark(topics, batch, len(tasks), run))


async def check_rows(cluster: Cluster, tasks: Sequence[TaskOutcome], batch: int, timeout_ms: float) -> None:
    """Raises ConfigError when rows of a micro-batch that is committed, at least in part, are others than before."""
    # A task with an open transaction has not committed this micro-batch, and its offset cannot be read before the end.
    closed = [task for task in tasks if task.topic is None]
    marks = await asyncio.gather(*(committed_batch(cluster, task.group, timeout_ms) for task in closed))
    changed = [
        (task, written.size)
        for task, written in zip(closed, marks)
        if written.number == batch and written.size and written.size != task.rows
    ]
    # Fewer rows with nothing left to write: the source has lost records since, and all are written.
    if any(task.rows > written for task, written in changed) or (changed and len(closed) < len(tasks)):
        task, written = changed[0]
        raise ConfigError(
            f"micro-batch {batch} has {task.rows} rows now in the task {task.group!r}, which has committed {written}: "
            "rows have changed their task, or the checkpoint was set back, and rows would be lost or written twice. "
            f"exactlyOnce needs rows that depend on the micro-batch alone, task by task. {_WAYS_OUT}"
        )
