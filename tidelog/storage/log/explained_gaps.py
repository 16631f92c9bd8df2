"""Gaps between batches that are no damage: compaction made them, or every other replica has them, too.

The file `explained-gaps` beside the log says so to later starts (docs/formats/checkpoints.md). Invariant: where the
file may not be on the device, the cleaner's checkpoint names the log, and a start takes gaps for those of compaction.
"""

from __future__ import annotations

import logging
from typing import Protocol

from tidelog.storage.files.checkpoints import (
    EXPLAINED_GAPS_FILE,
    CorruptCheckpoint,
    decode_end_offset,
    encode_end_offset,
    read_if_exists,
    replace_file,
)
from tidelog.storage.files.disk import Disk
from tidelog.storage.log.flush import Durability, FlushTask
from tidelog.storage.segments.segments import Segments

logger = logging.getLogger("tidelog.storage")


class LogWithGaps(Protocol):
    """The part of `partition_log.PartitionLog` that is used here."""

    disk: Disk
    directory: str
    durability: Durability
    gaps_explained_below: int
    unsynced_gaps_below: int
    segments: Segments


def explain_gaps(log: LogWithGaps, end_offset: int, *, sync: bool) -> None:
    """Record that the gaps below `end_offset` are no damage, also for later starts. Raises OSError."""
    if end_offset <= log.gaps_explained_below and not (sync and log.unsynced_gaps_below):
        return
    end_offset = max(end_offset, log.gaps_explained_below)
    log.unsynced_gaps_below = max(log.unsynced_gaps_below, end_offset)  # also where there is no space for the file
    replace_file(log.disk, log.directory, EXPLAINED_GAPS_FILE, encode_end_offset(end_offset), sync=sync)
    log.gaps_explained_below = end_offset
    if sync:
        _note_synced(log)
    else:
        log.durability.note_path(f"{log.directory}/{EXPLAINED_GAPS_FILE}")
        log.durability.note_directory(log.directory)
    for segment in log.segments:
        segment.may_have_gaps = segment.may_have_gaps or segment.base_offset < end_offset


def note_flush(log: LogWithGaps, task: FlushTask) -> None:
    """The flush has succeeded. While the cleaner's checkpoint names the log, a lost segment is taken for cleaned."""
    path = f"{log.directory}/{EXPLAINED_GAPS_FILE}"
    if log.unsynced_gaps_below and path in task.paths and not log.durability.is_noted(path):
        _note_synced(log)


def _note_synced(log: LogWithGaps) -> None:
    if log.unsynced_gaps_below <= log.gaps_explained_below:
        log.unsynced_gaps_below = 0


def read_end_offset(disk: Disk, directory: str, name: str) -> int:
    """The offset in `explained-gaps` or `cleaned-ends`; 0 without the file, or where it is unreadable."""
    path = f"{directory}/{name}"
    data = read_if_exists(disk, path)
    if not data:
        return 0
    try:
        return decode_end_offset(data)
    except CorruptCheckpoint as error:
        logger.warning("cannot read %s: %s", path, error)
        return 0
