"""The clean close of the logs of a directory: their last bytes are synced, with few files open at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tidelog.storage.log.explained_gaps import write_again
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog

logger = logging.getLogger("tidelog.storage")

# The logs that are closed at once, of which each has a file open.
CLOSED_AT_ONCE_MAX = 100


def close_logs(
    logs: list[PartitionLog], sync_at_once_from: int, sync_all: Callable[[list[PartitionLog]], bool]
) -> bool:
    """Close the logs, a part of them at a time: each has its file open until it is synced. Whether all were closed."""
    is_clean = True
    for log in logs:
        log.segments.release()  # there may be no descriptor left for the files that are still to be written
    for at in range(0, len(logs), CLOSED_AT_ONCE_MAX):
        is_clean = _close_some(logs[at : at + CLOSED_AT_ONCE_MAX], sync_at_once_from, sync_all) and is_clean
    return is_clean


def _close_some(
    logs: list[PartitionLog], sync_at_once_from: int, sync_all: Callable[[list[PartitionLog]], bool]
) -> bool:
    """Whether all were closed. Many logs are synced at once, because each sync takes milliseconds."""
    tasks: list[tuple[PartitionLog, FlushTask | None]] = []
    is_clean = True
    for log in logs:
        try:
            if log.failure is None:
                write_again(log, sync=False)
            tasks.append((log, log.begin_close()))
        except OSError as error:
            is_clean = _not_closed(log, error)
    waiting = {log: task for log, task in tasks if task is not None}
    if not (len(waiting) >= sync_at_once_from and _sync_at_once(waiting, sync_all)):
        for task in waiting.values():
            task.run()
    for log, done in tasks:
        try:
            log.finish_close(done)
        except (OSError, CorruptLog) as error:
            is_clean = _not_closed(log, error)
        is_clean = is_clean and log.is_closed
    return is_clean


def _sync_at_once(tasks: dict[PartitionLog, FlushTask], sync_all: Callable[[list[PartitionLog]], bool]) -> bool:
    """Sync the file system instead of each file. Whether it could.

    A new small file replaces the present one when its content is on the device: on XFS, and on ext4 mounted with
    noauto_da_alloc, a loss of power after the rename would leave an empty file.
    """
    logs = list(tasks)
    try:
        has_small_files = [task.prepare() for task in tasks.values()]
        if any(has_small_files):
            if not sync_all(logs):
                return False
            for task in tasks.values():
                task.put_in_place()
        return sync_all(logs)
    except OSError as error:
        logger.warning("syncing the logs file by file: %s", error)
        return False


def _not_closed(log: PartitionLog, error: Exception) -> bool:
    logger.error("%s-%d could not be closed cleanly: %s", log.topic, log.partition, error)
    return False
