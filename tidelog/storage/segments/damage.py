"""Damage: batches of a log that are not what was written, and how storage reports them.

A damaged range is a part of one segment's file and the offsets that belong there. It is refused to every reader until
it is repaired (`repair.py`); everything around it is served. An index that disagrees with its segment is no damage: it
is made anew, inside storage (docs/decisions/0016-damage-and-repair.md).
"""

from __future__ import annotations

from typing import NamedTuple


class DamagedRange(NamedTuple):
    """Bytes [position, end_position) of a segment file, where the records [first_offset, end_offset) should be.

    The bytes may be none: where a part of the file is missing. `end_offset` is -1 where it is unknown, which is only
    ever so of the end of a log that is being opened.
    """

    position: int
    end_position: int
    first_offset: int
    end_offset: int
    reason: str

    def holds(self, offset: int) -> bool:
        return self.first_offset <= offset < self.end_offset


class DamagedRecords(Exception):
    """Records that were asked for are damaged, or cannot be told from damaged ones. The log goes on."""

    def __init__(self, path: str, damage: DamagedRange) -> None:
        super().__init__(f"{path}: offsets {damage.first_offset} to {damage.end_offset} are damaged: {damage.reason}")
        self.path = path
        self.damage = damage


class CorruptIndex(Exception):
    """An index and its segment disagree, or a segment does not hold what it should. Never leaves storage: the segment
    is examined, which makes the index anew and tells what is damaged. `path` is the file."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def damage_at(ranges: tuple[DamagedRange, ...], offset: int) -> DamagedRange | None:
    """The range that holds `offset`."""
    for damage in ranges:
        if damage.first_offset <= offset < damage.end_offset:
            return damage
    return None


def next_damage(ranges: tuple[DamagedRange, ...], offset: int) -> DamagedRange | None:
    """The first range that ends above `offset`."""
    for damage in ranges:
        if damage.end_offset > offset:
            return damage
    return None


def bytes_after(ranges: tuple[DamagedRange, ...], position: int) -> int:
    """Where to go on reading batches: `position`, or behind the damaged range that it lies in."""
    for damage in ranges:
        if damage.position <= position < damage.end_position:
            position = damage.end_position
    return position


def merged(ranges: list[DamagedRange]) -> tuple[DamagedRange, ...]:
    """Neighbours as one range, in the order of their offsets."""
    joined: list[DamagedRange] = []
    for damage in sorted(ranges):
        if joined and joined[-1].end_position == damage.position and joined[-1].end_offset == damage.first_offset:
            joined[-1] = joined[-1]._replace(end_position=damage.end_position, end_offset=damage.end_offset)
        else:
            joined.append(damage)
    return tuple(joined)


def describe(damage: DamagedRange) -> str:
    """For a line of the log."""
    where = f"bytes {damage.position} to {damage.end_position}, offsets {damage.first_offset} to {damage.end_offset}"
    return f"{where} are damaged: {damage.reason}"
