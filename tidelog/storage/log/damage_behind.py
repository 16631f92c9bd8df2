"""Damage at the end of a closed segment that cannot hold what is missing: the rest gets a segment of its own.

A lost segment file belongs to the segment before it, as damage. The copies of several may be too large for one segment,
or have offsets that are too far from its base offset. Invariant: after a crash the log has the same damage, in either
segment, or first a range of no offsets, whose bytes a repair removes.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tidelog.storage.files.checkpoints import replace_file
from tidelog.storage.log.explained_gaps import hold_gap, keep_empty, name_early_ends
from tidelog.storage.log.repair import PLACE_OF_THE_REST, is_present
from tidelog.storage.segments.segment import LOG_SUFFIX, Segment, file_name

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.storage")


def begin_segment_at_damage(log: PartitionLog, segment: Segment, copied_to: int, first_offset: int) -> bool:
    """Give the damage at the end of `segment` a segment from `first_offset` on, in which it is all. Raises OSError.

    `copied_to`: from there to `first_offset` the other replica has no batches. False if there is no such damage, if its
    segment has nothing else, or if the log has changed meanwhile.
    """
    if segment is log.segments.active or not segment.damage:
        return False
    damage = segment.damage[-1]
    first_offset = max(first_offset, damage.first_offset)
    is_at_end = damage.end_position == segment.size_bytes and damage.end_offset == segment.next_offset
    is_rest = copied_to <= damage.first_offset and segment.base_offset < first_offset < damage.end_offset
    if not (is_present(log, segment, damage) and is_at_end and is_rest):
        return False
    has_gap = damage.first_offset < first_offset
    if has_gap:
        name_early_ends(log, {(segment.base_offset, first_offset)})
    place = PLACE_OF_THE_REST if segment.may_have_gaps else b""
    replace_file(log.disk, log.directory, file_name(first_offset, LOG_SUFFIX), place)
    following = Segment(
        log.disk, log.directory, first_offset, log.config, log.clock_ms, size_bytes=len(place), jitter_ms=log.jitter_ms
    )
    following.may_have_gaps, following.may_end_early = segment.may_have_gaps, segment.may_end_early
    following.next_offset = damage.end_offset
    following.set_damage((damage._replace(position=0, end_position=len(place), first_offset=first_offset),))
    segment.end_at(damage.position)
    segment.next_offset, segment.may_end_early = first_offset, segment.may_end_early or has_gap
    segment.set_damage(segment.damage[:-1])
    if not segment.size_bytes:
        keep_empty(segment)
    _move_transactions(segment, following, first_offset)
    log.segments.insert(following)
    if has_gap and segment.base_offset < damage.first_offset:
        hold_gap(log, segment, damage.first_offset)
    logger.info("%s: the damage from offset %d on gets this segment", following.path, first_offset)
    return True


def _move_transactions(segment: Segment, following: Segment, offset: int) -> None:
    """Move the rows of transactions that end in the new segment: a reader of it does not look into the one before."""
    rows = [row for row in segment.transaction_index.rows_or_none() if row.last_offset >= offset]
    for row in rows:
        following.transaction_index.append(row)
    if rows:
        segment.transaction_index.truncate_to(offset)
    following.transaction_index.lacks_rows = True
