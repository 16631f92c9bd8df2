"""Ending a segment and ending a log: indexes made whole, producers put in a snapshot, so that a start needs no scan.

Functions over a PartitionLog, called by its methods of the same names; the next flush syncs what is written here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.storage.files.disk import probe_descriptors
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.segments.segment import Segment

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog


def roll(log: PartitionLog, now_ms: int, base_offset: int) -> Segment:
    active = log.segments.active
    if active.size_bytes == 0:
        if active.base_offset == base_offset:
            return active
        probe_descriptors(log.disk, log.directory)
        try:
            log.segments.drop_last(1, now_ms)
            return begin(log, now_ms, base_offset)
        except OSError as error:
            log.failure = f"{log.directory}: has lost its empty segment: {error}"
            raise
    active.seal()
    log.durability.note_seal(active)
    if log.config.preallocate:
        active.trim()
    log.producers.end_offset = base_offset
    path = None if log.lacks_producers else log.snapshots.take(log.producers, sync=False)
    if path is not None:
        log.durability.note_path(path)
    return begin(log, now_ms, base_offset)


def begin(log: PartitionLog, now_ms: int, base_offset: int) -> Segment:
    segment = Segment.create(log.disk, log.directory, base_offset, log.config, now_ms, log.jitter_ms)
    segment.may_have_gaps = segment.may_have_gaps or base_offset < log.gaps_explained_below
    log.segments.add(segment)
    log.durability.note_directory(log.directory)
    return segment


def begin_close(log: PartitionLog) -> FlushTask | None:
    if log.failure is not None:
        return None
    if log.compaction is not None:
        log.compaction.give_up()
    durability, active = log.durability, log.segments.active
    assert not durability.is_running, "close during a flush"
    if active.seal():
        for path in active.paths()[1:]:
            durability.note_path(path)
    if log.config.preallocate:
        active.trim()
    snapshot = None if log.lacks_producers else log.snapshots.take(log.producers, sync=False)
    if snapshot is not None:
        durability.note_path(snapshot)
        durability.note_directory(log.directory)
    is_settled = durability.is_settled(log.log_end_offset) and active.synced_bytes >= 0
    return None if is_settled and not log.leader_epochs.is_dirty else log.begin_flush()
