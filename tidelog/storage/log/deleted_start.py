"""The first segments of a log that Kafka has deleted, while its file of leader epochs still begins with them.

Kafka renames the files of a deleted segment at once, and writes the leader epochs in the background. A stop in between
drops the write (LeaderEpochFileCache.truncateFromStartAsyncFlush). Kafka opens the log at its first segment. The
renamed files show that retention has deleted the others: without them, a file below the first one is lost.

Here the leader epochs are on the device before a segment is deleted, so only a log of Kafka's may lack them. A log is
one until it is claimed here, which gives its topic id a checksum. After that, `.deleted` files below the first epoch
are those of a cleaning or a truncation, and say nothing of a segment that is lost.
"""

from __future__ import annotations

import logging
from typing import Final

from tidelog.storage.files.checkpoints import (
    LEADER_EPOCH_FILE,
    PARTITION_METADATA_FILE,
    CorruptCheckpoint,
    decode_leader_epochs,
    encode_leader_epochs,
    has_checksum,
    read_if_exists,
    replace_file,
)
from tidelog.storage.files.disk import Disk
from tidelog.storage.log.tidying import EMPTYING_FILE, offsets_of
from tidelog.storage.segments.damage import CorruptIndex
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.reader import headers
from tidelog.storage.segments.segment import (
    CLEANED_SUFFIX,
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SWAP_SUFFIX,
    TIME_INDEX_SUFFIX,
    Segment,
    file_name,
)

logger = logging.getLogger("tidelog.storage")

_UNFINISHED: Final = (CLEANED_SUFFIX, SWAP_SUFFIX, EMPTYING_FILE)


def forget_deleted_start(disk: Disk, directory: str, names: set[str], *, may_be_cleaned: bool) -> None:
    """Have the leader epochs begin with the first segment if retention has deleted the ones before. Raises OSError.

    `names`: the files of the log, before a start removes any. `may_be_cleaned`: the topic is or was compacted.
    """
    try:
        epochs = LeaderEpochs(decode_leader_epochs(read_if_exists(disk, f"{directory}/{LEADER_EPOCH_FILE}") or b""))
    except CorruptCheckpoint:
        return
    if epochs.earliest is None:
        return
    start, first = epochs.earliest[1], _first_of(names)
    if not is_start_deleted(disk, directory, names, start, may_be_cleaned=may_be_cleaned):
        return
    logger.warning(
        "%s: retention has deleted the offsets %d to %d, its leader epochs did not say so", directory, start, first
    )
    epochs.truncate_from_start(first)
    replace_file(disk, directory, LEADER_EPOCH_FILE, encode_leader_epochs(epochs))


def is_start_deleted(disk: Disk, directory: str, names: set[str], start: int, *, may_be_cleaned: bool) -> bool:
    """Whether retention has deleted the records from `start` up to the first segment. False if there are none.

    The last deleted segment must end where the first one begins, behind `start`: what a truncation to a higher offset
    has deleted ends before it, and what retention has deleted, too, where the leader epochs say so. A cleaner may have
    removed the last records of a segment: then it ends before the first one. Raises OSError.
    """
    first = _first_of(names)
    if not start < first < INT64_MAX or any(name.endswith(_UNFINISHED) for name in names):
        return False
    deleted = {each for each in offsets_of(names, LOG_SUFFIX + DELETED_SUFFIX) if each < first}
    if not deleted or min(deleted) > start or _is_segment_lost(names, first, deleted):
        return False
    metadata = read_if_exists(disk, f"{directory}/{PARTITION_METADATA_FILE}")
    if not metadata or has_checksum(metadata):
        return False
    end = _end_of_deleted(disk, directory, max(deleted))
    return end == first or (may_be_cleaned and start < end < first)


def _is_segment_lost(names: set[str], first: int, deleted: set[int]) -> bool:
    """Whether there is an index of a segment below the first one that has no .log, under either name.

    A cleaning or a truncation deletes segments, too, and new ones get the names: an index may stand beside a deleted
    one. Kafka renames the indexes of a deleted segment after its .log, so that a kill may leave some as they were.
    """
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
        left = deleted.difference(offsets_of(names, suffix + DELETED_SUFFIX))
        if any(each < first and each not in left for each in offsets_of(names, suffix)):
            return True
    return False


def _first_of(names: set[str]) -> int:
    return min(offsets_of(names, LOG_SUFFIX), default=INT64_MAX)


def _end_of_deleted(disk: Disk, directory: str, base_offset: int) -> int:
    """The offset behind the last batch of a deleted segment; -1 if it is damaged or unreadable. One without a byte had
    its first offset, at least: Kafka's cleaner removes each batch whose records are superseded.
    """
    end_offset = -1
    try:
        size_bytes = disk.size_of(f"{directory}/{file_name(base_offset, LOG_SUFFIX)}{DELETED_SUFFIX}")
        if not size_bytes:
            return base_offset + 1
        segment = Segment(disk, directory, base_offset, LogConfig(), 0, size_bytes=size_bytes, suffix=DELETED_SUFFIX)
        try:
            for _, header in headers(segment):
                end_offset = header.next_offset
        finally:
            segment.release()
    except (CorruptIndex, OSError):  # the log does not need the file: what it cannot show is no reason not to open it
        return -1
    return end_offset
