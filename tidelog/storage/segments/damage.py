"""Damage: batches of a log that differ from what was written, and how storage reports them.

A damaged range is a part of one segment's file with the offsets that belong there. Reads of it fail until it is
repaired (`repair.py`); reads of all other records work. An index that disagrees with its segment is not damage: storage
rebuilds it (docs/decisions/0016-damage-and-repair.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class DamagedRange(NamedTuple):
    """Bytes [position, end_position) of a segment file, where the records [first_offset, end_offset) should be.

    The byte range is empty if a part of the file is missing. `end_offset` is -1 if it is unknown, which happens only at
    the end of a log that is being opened.
    """

    position: int
    end_position: int
    first_offset: int
    end_offset: int
    reason: str

    def holds(self, offset: int) -> bool:
        return self.first_offset <= offset < self.end_offset


class DamagedRecords(Exception):
    """The requested records are damaged or may be damaged. The rest of the log stays usable."""

    def __init__(self, path: str, damage: DamagedRange) -> None:
        super().__init__(f"{path}: offsets {damage.first_offset} to {damage.end_offset} are damaged: {damage.reason}")
        self.path = path
        self.damage = damage


class CorruptIndex(Exception):
    """An index and its segment disagree, or a segment lacks expected records. `path` is the file.

    It never leaves storage: an examination of the segment rebuilds the index and finds the damage.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def damage_at(ranges: tuple[DamagedRange, ...], offset: int) -> DamagedRange | None:
    """The range that holds `offset`; None if there is none."""
    for damage in ranges:
        if damage.first_offset <= offset < damage.end_offset:
            return damage
    return None


def next_damage(ranges: tuple[DamagedRange, ...], offset: int) -> DamagedRange | None:
    """The first range that ends above `offset`; None if there is none."""
    for damage in ranges:
        if damage.end_offset > offset:
            return damage
    return None


def bytes_after(ranges: tuple[DamagedRange, ...], position: int) -> int:
    """The position of the next readable batch: `position`, or the end of the damaged range that holds it.

    A walk asks this for each batch. The ranges are in the order of their positions.
    """
    number = max(0, bisect_right(ranges, (position + 1,)) - 1)  # the last range that begins at the position or before
    while number < len(ranges) and ranges[number].position <= position:
        position = max(position, ranges[number].end_position)
        number += 1
    return position


def merged(ranges: list[DamagedRange]) -> tuple[DamagedRange, ...]:
    """The ranges in the order of their offsets, with neighbours merged."""
    joined: list[DamagedRange] = []
    for damage in sorted(ranges):
        if joined and joined[-1].end_position == damage.position and joined[-1].end_offset == damage.first_offset:
            joined[-1] = joined[-1]._replace(end_position=damage.end_position, end_offset=damage.end_offset)
        else:
            joined.append(damage)
    return tuple(joined)


def united(ranges: Sequence[DamagedRange]) -> tuple[DamagedRange, ...]:
    """`merged`, also of ranges that share offsets."""
    joined: list[DamagedRange] = []
    for damage in sorted(ranges):
        if joined and damage.first_offset < joined[-1].end_offset:
            end_position = max(joined[-1].end_position, damage.end_position)
            end_offset = max(joined[-1].end_offset, damage.end_offset)
            joined[-1] = joined[-1]._replace(end_position=end_position, end_offset=end_offset)
        else:
            joined.append(damage)
    return merged(joined)


def apart_from(ranges: Sequence[DamagedRange], others: Sequence[DamagedRange]) -> list[DamagedRange]:
    """Those of the ranges that share no offset with the others. Both are in the order of their offsets."""
    ends = [other.end_offset for other in others]
    apart = []
    for damage in ranges:
        behind = bisect_right(ends, damage.first_offset)
        if behind == len(others) or damage.end_offset <= others[behind].first_offset:
            apart.append(damage)
    return apart


def describe(damage: DamagedRange) -> str:
    """A description for the log file."""
    where = f"bytes {damage.position} to {damage.end_position}, offsets {damage.first_offset} to {damage.end_offset}"
    return f"{where} are damaged: {damage.reason}"
