"""The new offsets of a group, from the options of `tidelog groups reset-offsets`. Pure.

It handles scopes (`TOPIC`, `TOPIC:0,1`), plans in the form of Kafka's tool (`topic,partition,offset`, with the group
first if there are several), points in time, and the limits of the log. The syntax and the rules are those of Kafka's
ConsumerGroupCommand, so that each tool can read the other's files.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from tidelog.client.durations import duration_ms
from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import counted

Offsets = dict[TopicPartition, int]


class ResetError(ValueError):
    """An invalid option or file; the text describes the error."""


class Move(NamedTuple):
    """A partition's offset before (None without a committed offset) and after."""

    old: int | None
    new: int


def scope_in(text: str) -> tuple[str, list[int] | None]:
    """(topic, its partitions, or None for all of them). Raises ResetError."""
    topic, colon, numbers = text.partition(":")
    if not topic:
        raise ResetError(f"{text!r} names no topic")
    if not colon:
        return topic, None
    try:
        partitions = [int(number) for number in numbers.split(",")]
    except ValueError:
        partitions = [-1]
    if min(partitions) < 0:
        raise ResetError(f"{text!r}: expected TOPIC:PARTITION,PARTITION...")
    return topic, list(dict.fromkeys(partitions))


def chosen(scopes: Iterable[str], counts: Mapping[str, int]) -> list[TopicPartition]:
    """The partitions of the scopes; `counts`: the number of partitions by topic. Raises ResetError."""
    partitions: dict[TopicPartition, None] = {}
    for scope in scopes:
        topic, numbers = scope_in(scope)
        if topic not in counts:
            raise ResetError(f"there is no topic {topic!r}")
        for number in range(counts[topic]) if numbers is None else numbers:
            if number >= counts[topic]:
                raise ResetError(
                    f"topic {topic!r} has {counted(counts[topic], 'partition')}, not one numbered {number}"
                )
            partitions[TopicPartition(topic, number)] = None
    return list(partitions)


# --------------------------------------------------------------------------------------------------------------- time


def datetime_in(text: str) -> int:
    """`2026-03-01T12:00:00.000`, in UTC by default, as milliseconds since 1970. Raises ResetError."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ResetError(f"{text!r} is no time: expected YYYY-MM-DDTHH:MM:SS.sss") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


def duration_in(text: str) -> int:
    """ISO 8601's `P1DT2H3M4.5S` as milliseconds. Raises ResetError."""
    value_ms = duration_ms(text)
    if value_ms is None:
        raise ResetError(f"{text!r} is no duration: expected PnDTnHnMnS, such as PT90M")
    return value_ms


# -------------------------------------------------------------------------------------------------------------- plans


def plans_in(text: str, groups: list[str]) -> dict[str, Offsets]:
    """The offsets by group of an exported file; a file without groups applies to the only group. Raises ResetError."""
    plans: dict[str, Offsets] = {}
    for number, row in enumerate(csv.reader(text.splitlines()), 1):
        if not row:
            continue
        cells = [cell.strip() for cell in row]
        if len(cells) == 3 and len(groups) == 1:
            cells.insert(0, groups[0])
        if len(cells) != 4:
            columns = "topic,partition,offset" if len(groups) == 1 else "group,topic,partition,offset"
            raise ResetError(f"line {number}: expected {columns}")
        group, topic, partition, offset = cells
        if not partition.isdecimal() or not offset.lstrip("-").isdecimal():
            raise ResetError(f"line {number}: partition and offset must be numbers")
        plans.setdefault(group, {})[TopicPartition(topic, int(partition))] = int(offset)
    return plans


def as_csv(plans: Mapping[str, Mapping[TopicPartition, int]], with_group: bool) -> str:
    """The text of these plans, in the form that `plans_in` reads."""
    lines = _Lines()
    writer = csv.writer(lines, lineterminator="\n")
    for group, offsets in plans.items():
        for (topic, partition), offset in sorted(offsets.items()):
            writer.writerow([group, topic, partition, offset] if with_group else [topic, partition, offset])
    return "".join(lines.written)


class _Lines:
    """A file object for `csv.writer`."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def write(self, line: str) -> None:
        self.written.append(line)


# ------------------------------------------------------------------------------------------------------------- offsets


def shifted(committed: Mapping[TopicPartition, int], partitions: Iterable[TopicPartition], by: int) -> Offsets:
    """The committed offsets, shifted. Raises ResetError for a partition without a committed offset."""
    for partition in partitions:
        if partition not in committed:
            raise ResetError(f"cannot shift the offset of {partition}: nothing is committed there")
    return {partition: committed[partition] + by for partition in partitions}


def within(
    targets: Mapping[TopicPartition, int], starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> tuple[Offsets, list[str]]:
    """The offsets, limited to the log's start and end, and a warning for each changed offset."""
    offsets: Offsets = {}
    warnings: list[str] = []
    for partition, offset in targets.items():
        held = offsets[partition] = min(max(offset, starts[partition]), ends[partition])
        if held != offset:
            where = "the log ends" if offset > held else "the log starts"
            warnings.append(f"{partition}: {where} at {held}, so it will be that and not {offset}")
    return offsets, warnings
