"""Damage behind the last batch of a closed segment, where the copies of several lost segments belong.

A lost segment file belongs to the segment before it, as damage. The copies of several may be too large for one segment.
Then what is still damaged gets a segment of its own. Invariant: after a crash the log has the same damage, in either
segment.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tidelog.storage.log.repair import is_present
from tidelog.storage.segments.segment import LOG_SUFFIX, Segment, file_name

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.storage")


def begin_segment_at_damage(log: PartitionLog, segment: Segment) -> bool:
    """Give the damage behind the last batch of `segment` an empty segment, in which it is all. Raises OSError.

    False if there is no such damage, if its segment has nothing else, or if the log has changed meanwhile.
    """
    if segment is log.segments.active or not segment.damage:
        return False
    damage = segment.damage[-1]
    if not is_present(log, segment, damage):
        return False
    is_behind = damage.position == damage.end_position == segment.size_bytes
    if not is_behind or damage.end_offset != segment.next_offset or damage.first_offset <= segment.base_offset:
        return False
    following = Segment(log.disk, log.directory, damage.first_offset, log.config, log.clock_ms, jitter_ms=log.jitter_ms)
    log.disk.write_file(f"{log.directory}/{file_name(damage.first_offset, LOG_SUFFIX)}", b"", sync=True)
    log.disk.sync_directory(log.directory)
    following.may_have_gaps, following.may_end_early = segment.may_have_gaps, segment.may_end_early
    following.next_offset = damage.end_offset
    following.set_damage((damage._replace(position=0, end_position=0),))
    segment.next_offset = damage.first_offset
    segment.set_damage(segment.damage[:-1])
    _move_transactions(segment, following, damage.first_offset)
    log.segments.insert(following)
    logger.info("%s: the damage from offset %d on gets this segment", following.path, damage.first_offset)
    return True


def _move_transactions(segment: Segment, following: Segment, offset: int) -> None:
    """Move the rows of transactions that end in the new segment: a reader of it does not look into the one before."""
    rows = [row for row in segment.transaction_index.rows_or_none() if row.last_offset >= offset]
    for row in rows:
        following.transaction_index.append(row)
    if rows:
        segment.transaction_index.truncate_to(offset)
    following.transaction_index.lacks_rows = True
