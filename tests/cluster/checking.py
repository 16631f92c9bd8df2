"""What must hold of a log after hard kills, compared with what the producer was told. No process is started here.

`Sent` is what the producer knows: numbered records per partition, and the offset of each acknowledged one. `Scanned` is
a whole partition read from the start. The checks raise AssertionError and name the first thing that is wrong.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from tidelog.protocol.batches.record_batch import HEADER_SIZE, read_header


@dataclass(slots=True)
class Sent:
    """Records sent to one partition, in order: number n was sent n-th. `acknowledged` maps a number to its offset."""

    timestamps_ms: list[int] = field(default_factory=list)
    acknowledged: dict[int, int] = field(default_factory=dict)


UNKNOWN_OFFSET = -1
"""librdkafka names no offset where the success of a later batch stands for an earlier one."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """One record as a full scan found it; `number` is what the producer called it."""

    offset: int
    timestamp_ms: int
    number: int


def check_partition(sent: Sent, scan: list[Scanned], *, all_acknowledged: bool = True) -> None:
    """Nothing acknowledged lost, nothing twice, in the order sent, at the offsets acknowledged, without gaps."""
    for before, after in pairwise(scan):
        assert after.offset == before.offset + 1, f"offset {before.offset} is followed by {after.offset}"
    by_offset = {record.offset: record for record in scan}
    present = {record.number for record in scan}
    for number, offset in sent.acknowledged.items():
        if offset == UNKNOWN_OFFSET:
            assert number in present, f"record {number}, acknowledged without an offset, is lost"
            continue
        assert offset in by_offset, f"record {number}, acknowledged at {offset}, is lost"
        found = by_offset[offset]
        assert found.number == number, f"record {found.number} is at {offset}, where {number} was acknowledged"
    numbers = [record.number for record in scan]
    assert len(set(numbers)) == len(numbers), f"twice in the log: {_twice(numbers)}"
    for before, after in pairwise(scan):
        assert after.number > before.number, f"record {after.number} comes behind {before.number}"
    for record in scan:
        expected = sent.timestamps_ms[record.number]
        assert record.timestamp_ms == expected, f"record {record.number} has time {record.timestamp_ms}, not {expected}"
    if all_acknowledged:
        missing = sorted(set(range(len(sent.timestamps_ms))) - sent.acknowledged.keys())
        assert not missing, f"never acknowledged: {missing[:5]}"


def check_time_lookup(
    scan: list[Scanned], targets_ms: Iterable[int], lookup: Callable[[int], tuple[int, int] | None]
) -> None:
    """`lookup(time) -> (timestamp, offset)` finds the first record at or after a time, exactly as a scan does."""
    highest = list(accumulate((record.timestamp_ms for record in scan), max))
    for target_ms in targets_ms:
        position = bisect.bisect_left(highest, target_ms)
        expected = (scan[position].timestamp_ms, scan[position].offset) if position < len(scan) else None
        found = lookup(target_ms)
        assert found == expected, f"time {target_ms}: looked up {found}, scanned {expected}"


def check_offset_lookup(offsets: Iterable[int], batch_at: Callable[[int], tuple[int, int]]) -> None:
    """`batch_at(offset) -> (first, last offset)` of the batch a fetch begins with, which must hold the offset."""
    for offset in offsets:
        first, last = batch_at(offset)
        assert first <= offset <= last, f"a fetch at {offset} begins with the batch {first}-{last}"


def check_producer_epochs(directory: Path, topics: Iterable[str]) -> int:
    """How many batches the replicas of these topics in a data directory hold; none of a later epoch than 0."""
    count = 0
    for file in sorted(file for topic in topics for file in directory.glob(f"{topic}-*/*.log")):
        data, position = file.read_bytes(), 0
        while position + HEADER_SIZE <= len(data) and any(data[position : position + HEADER_SIZE]):
            header = read_header(data, position)
            assert header.producer_epoch <= 0, f"{file} from offset {header.base_offset} on: {header}"
            position += header.size_bytes
            count += 1
    return count


def _twice(numbers: list[int]) -> list[int]:
    seen: set[int] = set()
    return [number for number in numbers if number in seen or seen.add(number)][:5]  # type: ignore[func-returns-value]
