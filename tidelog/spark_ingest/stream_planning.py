"""Decides what the micro-batches of a stream read, from offsets that `stream.py` looks up.

Pure. A stream's offset is the next offset of each partition, as JSON in the form of Spark's Kafka
source. Invariant: the ranges of successive micro-batches join without gap or overlap, except where
data is lost; then a loss is named. A range is a function of the two offsets alone, so that a batch
that is replayed after a crash reads the same records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tidelog.client.model import TopicPartition
from tidelog.spark_ingest.options import read_partition_values, to_partition_object
from tidelog.spark_ingest.planning import OffsetRange

Offsets = Mapping[TopicPartition, int]

_CHOICES = "subscribe, subscribePattern or assign"


def to_offset(offsets: Offsets) -> dict[str, dict[str, int]]:
    """The offsets in the form that Spark writes into its log, sorted."""
    return to_partition_object(offsets)


def from_offset(value: Mapping[str, Any]) -> dict[TopicPartition, int]:
    """The reverse of `to_offset`. Raises ConfigError for other JSON."""
    return read_partition_values("the offset in the checkpoint", value)


class StreamState(NamedTuple):
    """The partitions of a stream at one time."""

    ends: Offsets
    """The end of the readable records of each existing partition."""
    new_starts: Offsets
    """The log start of the partitions that the stream's offset lacks."""
    recreated: Mapping[TopicPartition, int]
    """Partitions of topics that were deleted and created again, with their log start."""
    replaced: Offsets = MappingProxyType({})
    """Where logs differ from those that the stream has read, of partitions where they differ before its offset."""
    unselected: Collection[TopicPartition] = ()
    """Partitions of the stream's offset that the options do not name. They may exist."""


class NextOffsets(NamedTuple):
    """The end of the next micro-batch, and what is lost on the way."""

    ends: Offsets
    """The end of all that can be read."""
    losses: tuple[str, ...]


def available_offsets(start: Offsets, state: StreamState) -> NextOffsets:
    """All that the stream can read after `start`.

    A deleted partition leaves the offset. A partition of a topic that was created again goes back
    to its log start, and one with replaced records to the first of them: these records come in the
    next micro-batch. A log that ends before `start` makes the stream go on at its end.
    """
    ends = dict(state.ends)
    losses = [
        f"{partition} is not in {_CHOICES} any more" if partition in state.unselected else f"{partition} is gone"
        for partition in sorted(start.keys() - ends.keys())
    ]
    for partition, log_start in sorted(state.recreated.items()):
        if partition in start and partition in ends:
            ends[partition] = log_start
            losses.append(f"{partition} was deleted and created again; the stream was at offset {start[partition]}")
    for partition, first in sorted(state.replaced.items()):
        ends[partition] = first
        losses.append(
            f"the records of {partition} from offset {first} to {start[partition] - 1} were replaced by an unclean "
            "election after the stream had read them"
        )
    losses += [
        f"{partition} ends at {ends[partition]}, before offset {start[partition]} of the stream"
        for partition in sorted(ends.keys() & start.keys() - state.recreated.keys() - state.replaced.keys())
        if ends[partition] < start[partition]
    ]
    losses += [
        f"the new {partition} begins at {log_start} instead of 0"
        for partition, log_start in sorted(state.new_starts.items())
        if partition in ends and log_start > 0
    ]
    return NextOffsets(ends, tuple(losses))


def recreated_partitions(
    start: Offsets, ends: Offsets, known_ids: Mapping[str, bytes], topic_ids: Mapping[str, bytes]
) -> list[TopicPartition]:
    """The partitions of the stream whose topics were deleted and created again.

    A topic id that changed says so. Where the earlier id is not known, as after a restart, only an
    end before `start` does.
    """
    recreated = []
    for partition in sorted(start.keys() & ends.keys()):
        known_id = known_ids.get(partition.topic)
        if known_id is None:
            is_recreated = ends[partition] < start[partition]
        else:
            is_recreated = known_id != topic_ids.get(partition.topic, known_id)
        if is_recreated:
            recreated.append(partition)
    return recreated


def missing_partitions(
    start: Offsets, ends: Offsets, known_ids: Mapping[str, bytes], topic_ids: Mapping[str, bytes]
) -> list[TopicPartition]:
    """The partitions of the stream that the cluster does not have, or has in a topic with another id."""
    return [
        partition
        for partition in sorted(start)
        if partition not in ends or known_ids.get(partition.topic) not in (None, topic_ids.get(partition.topic))
    ]


def backlog(start: Offsets, ends: Offsets, new_starts: Offsets) -> dict[TopicPartition, int]:
    """The number of offsets to read in each partition that has some."""
    sizes = {}
    for partition, end in ends.items():
        size = end - start.get(partition, new_starts.get(partition, 0))
        if size > 0:
            sizes[partition] = size
    return sizes


def limit_offsets(start: Offsets, ends: Offsets, new_starts: Offsets, max_offsets: int) -> dict[TopicPartition, int]:
    """Bring the ends nearer, to about `max_offsets` in total, in proportion to the backlog.

    As in Spark every partition with a backlog gets at least one offset, so that none starves.
    """
    sizes = backlog(start, ends, new_starts)
    total = sum(sizes.values())
    limited = dict(ends)
    if total <= max_offsets:
        return limited
    for partition, size in sizes.items():
        # Whole numbers: a double would be off by one for large backlogs.
        share = max(size * max_offsets // total, 1)
        limited[partition] = ends[partition] - size + min(size, share)
    return limited


def must_wait(new_offsets: int, min_offsets: int, since_last_batch_ms: float, max_delay_ms: int) -> bool:
    """Whether a micro-batch waits for more records."""
    return new_offsets < min_offsets and since_last_batch_ms < max_delay_ms


class StreamRanges(NamedTuple):
    """The ranges of one micro-batch, and the partitions that need a look at the cluster."""

    ranges: tuple[OffsetRange, ...]
    new_partitions: tuple[TopicPartition, ...]
    """Partitions that begin at 0 in this batch; their logs may begin later."""
    losses: tuple[str, ...]


def first_end(start: Offsets, ends: Offsets, at_end: Collection[TopicPartition]) -> Offsets:
    """The end of a query's first micro-batch, `ends` at most. It is empty where the query begins at the end of a log.

    Spark keeps the end of this micro-batch, and not its start. See `replayed_start`. A partition that `start` lacks
    begins with the next micro-batch: a restart would find another start of it.
    """
    return {each: min(start[each], end) if each in at_end else end for each, end in ends.items() if each in start}


def replayed_start(start: Offsets, end: Offsets, at_end: Collection[TopicPartition], may_begin_later: bool) -> Offsets:
    """The start of a query's first micro-batch that ends at `end`, when it runs again after a restart.

    `start` is where the query would begin now. It may have more partitions than at first. A partition has nothing to
    read in this micro-batch if it begins later than at first, or is at the end of its log, also if that log has fewer
    records now.
    """
    return {
        each: end[each] if each in at_end else min(offset, end[each]) if may_begin_later else offset
        for each, offset in start.items()
        if each in end
    }


def ranges_between(start: Offsets, end: Offsets) -> StreamRanges:
    """The offsets from `start` to `end`.

    A partition without a start is new, and begins at 0. One whose end is before its start was
    created again or lost records: it has nothing to read in this batch.
    """
    ranges = []
    losses = [f"{each} is gone, or the options did not name it" for each in sorted(start.keys() - end.keys())]
    for partition, end_offset in sorted(end.items()):
        start_offset = start.get(partition, 0)
        if end_offset < start_offset:
            losses.append(f"{partition} went back from offset {start_offset} to {end_offset}")
            continue
        ranges.append(OffsetRange(*partition, start_offset, end_offset))
    new = tuple(sorted(partition for partition in end if partition not in start and end[partition] > 0))
    return StreamRanges(tuple(ranges), new, tuple(losses))
