"""A log that has lost its last batches. Checkpoints give a lower bound of its end.

The bound may lie inside a batch. When another replica's batch is known to be this log's last batch, the end moves to
the end of that batch: the whole batch is then damage, and is repaired as usual. Invariant: the end never moves back, so
this replica never denies a record that it had.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tidelog.storage.files.disk import probe_descriptors
from tidelog.storage.segments.damage import DamagedRange, describe
from tidelog.storage.segments.log_config import MAX_RELATIVE_OFFSET

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.storage")


def damaged_end(log: PartitionLog) -> DamagedRange | None:
    """The damage at the log end; None if there is none. The active segment after it is empty."""
    segments, active = log.segments, log.segments.active
    if active.size_bytes or active.base_offset != log.log_end_offset or len(segments) < 2:
        return None
    damage = segments[len(segments) - 2].damage
    return damage[-1] if damage and damage[-1].end_offset == log.log_end_offset else None


def move_damaged_end(log: PartitionLog, damage: DamagedRange, end_offset: int) -> bool:
    """Move the log end from the end of `damage` to `end_offset`, the end of its last batch, and extend the damage.

    False if the log has changed meanwhile. After a crash the log has the old or the new end. Raises OSError.
    """
    if damage != damaged_end(log) or end_offset <= damage.end_offset or log.failure is not None or log.is_closed:
        return False
    segment = log.segments[len(log.segments) - 2]
    if end_offset - segment.base_offset > MAX_RELATIVE_OFFSET:
        return False
    probe_descriptors(log.disk, log.directory)
    try:
        log.segments.drop_last(1, log.clock_ms)
        log.begin_segment(log.clock_ms, end_offset)
    except OSError as error:
        log.failure = f"{log.directory}: has lost its empty segment: {error}"
        raise
    segment.next_offset = end_offset
    segment.set_damage((*segment.damage[:-1], damage._replace(end_offset=end_offset)))
    logger.error("%s: %s", segment.path, describe(segment.damage[-1]))
    log.snapshots.delete_where(damage.end_offset, end_offset)
    log.log_end_offset = log.producers.end_offset = end_offset
    log.lacks_producers = log.passes_damage = True
    return True
