"""Removes what a crash has left in the directory of a log, before the log is opened.

A log that is emptied has a mark in its directory until all its segments are gone. A start removes the segments of a log
with the mark. Without it a kill would leave a prefix. The prefix of a cleaned log lacks the records that later ones had
superseded. A follower would go on behind the prefix, and would never get those records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tidelog.storage.files.checkpoints import (
    LEADER_EPOCH_FILE,
    CorruptCheckpoint,
    decode_leader_epochs,
    read_if_exists,
    replace_file,
)
from tidelog.storage.files.disk import Disk
from tidelog.storage.log.misnamed import restore_names
from tidelog.storage.log.swap import finish_swaps
from tidelog.storage.producers.producer_snapshots import SNAPSHOT_SUFFIX
from tidelog.storage.segments.log_config import INT64_MAX
from tidelog.storage.segments.segment import (
    CLEANED_SUFFIX,
    DELETED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SUFFIXES,
    SWAP_SUFFIX,
    TIME_INDEX_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
)

logger = logging.getLogger("tidelog.storage")

EMPTYING_FILE: Final = "emptying"
TEMPORARY_SUFFIX: Final = ".tmp"
_METADATA_SNAPSHOT_DELETED: Final = ".checkpoint.deleted"


@contextmanager
def emptying(disk: Disk, directory: str) -> Iterator[None]:
    """The caller removes all segments of the log in `directory`. Raises OSError: then the mark stays.

    Afterwards they are gone on the device. The caller syncs the directory before it writes records: the mark would take
    them with it.
    """
    replace_file(disk, directory, EMPTYING_FILE, b"1\n")
    yield
    disk.sync_directory(directory)
    disk.remove(f"{directory}/{EMPTYING_FILE}")


def tidy(
    disk: Disk, directory: str, names: set[str], cleaned_below: int
) -> tuple[set[str], set[int], set[int], set[int]]:
    """Remove the remains of a crash, finish an emptying and swaps of segments, and restore the names of segment files.

    Returns the remaining file names, the base offsets of indexes without a segment, those of indexes of
    transactions without a segment, behind the first one: they are kept for now, and those of renamed segments.
    """
    for name in sorted(names):
        is_deleted = name.endswith(DELETED_SUFFIX) and not name.endswith(_METADATA_SNAPSHOT_DELETED)
        if is_deleted or name.endswith(TEMPORARY_SUFFIX):
            disk.remove(f"{directory}/{name}")
            names.discard(name)
    _finish_emptying(disk, directory, names)
    finish_swaps(disk, directory, names)
    renamed = restore_names(disk, directory, names, cleaned_below)
    bases = set(offsets_of(names, LOG_SUFFIX))
    orphans = set(offsets_of(names, INDEX_SUFFIX)) - bases
    first = min(bases, default=INT64_MAX)
    lost = {each for each in offsets_of(names, TRANSACTION_INDEX_SUFFIX) if each > first} - bases
    for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TRANSACTION_INDEX_SUFFIX):
        kept = lost if suffix == TRANSACTION_INDEX_SUFFIX else set()
        for base_offset in set(offsets_of(names, suffix)) - bases - kept:
            name = f"{base_offset:020d}{suffix}"
            disk.remove(f"{directory}/{name}")
            names.discard(name)
    return names, orphans, lost, renamed


def _finish_emptying(disk: Disk, directory: str, names: set[str]) -> None:
    if EMPTYING_FILE not in names:
        return
    if _was_used_since(disk, directory, names):
        logger.warning("%s: it was being emptied, but has been used since: keeping its segments", directory)
        gone = []
    else:
        logger.warning("%s: it was being emptied: removing its segments", directory)
        suffixes = (*SUFFIXES, SNAPSHOT_SUFFIX, CLEANED_SUFFIX, SWAP_SUFFIX)
        gone = [name for name in sorted(names) if name.endswith(suffixes) and name[:20].isdecimal()]
        disk.sync_directory(directory)  # the process that made the mark may have been killed before this
    for name in gone:
        disk.remove(f"{directory}/{name}")
    disk.sync_directory(directory)
    disk.remove(f"{directory}/{EMPTYING_FILE}")
    disk.sync_directory(directory)
    names.difference_update(gone, (EMPTYING_FILE,))


def _was_used_since(disk: Disk, directory: str, names: set[str]) -> bool:
    """Whether a broker that does not know the mark has used the log: Kafka, or an earlier version.

    It may have served what is left without an append. Its start after the kill, or its stop, has then written indexes,
    snapshots or leader epochs. The process that was killed has written none of them after the mark, and no epoch.
    """
    marked_ms = disk.modified_ms(f"{directory}/{EMPTYING_FILE}")
    own = [name for name in names if name.endswith((*SUFFIXES, SNAPSHOT_SUFFIX)) and name[:20].isdecimal()]
    return _has_epochs(disk, directory) or any(disk.modified_ms(f"{directory}/{name}") > marked_ms for name in own)


def _has_epochs(disk: Disk, directory: str) -> bool:
    try:
        return bool(decode_leader_epochs(read_if_exists(disk, f"{directory}/{LEADER_EPOCH_FILE}") or b""))
    except CorruptCheckpoint:
        return False


def offsets_of(names: set[str], suffix: str) -> list[int]:
    length = 20 + len(suffix)
    return [int(name[:20]) for name in names if len(name) == length and name.endswith(suffix) and name[:20].isdecimal()]
