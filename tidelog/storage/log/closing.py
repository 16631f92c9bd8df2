"""Ending all logs of a directory at once: what each needs is `sealing.py`'s to say, here the device is waited for.

Invariant: what is called clean is on the device, all of it.
"""

from __future__ import annotations

import logging

from tidelog.storage.files.disk import Disk
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog

logger = logging.getLogger("tidelog.storage")


def close_logs(disk: Disk, path: str, logs: list[PartitionLog], sync_at_once_from: int) -> bool:
    """Whether all could be closed. Many are synced at once: one by one they would take milliseconds each."""
    tasks: list[tuple[PartitionLog, FlushTask | None]] = []
    is_clean = True
    for log in logs:
        try:
            tasks.append((log, log.begin_close()))
        except OSError as error:
            is_clean = _not_closed(log, error)
    waiting = [task for _, task in tasks if task is not None]
    if not (len(waiting) >= sync_at_once_from and _sync_at_once(disk, path, waiting)):
        for task in waiting:
            task.run()
    for log, done in tasks:
        try:
            log.finish_close(done)
        except (OSError, CorruptLog) as error:
            is_clean = _not_closed(log, error)
        is_clean = is_clean and log.is_closed
    return is_clean


def _sync_at_once(disk: Disk, path: str, tasks: list[FlushTask]) -> bool:
    try:
        for task in tasks:
            task.write_only()
        return disk.sync_all(path)
    except OSError as error:
        logger.warning("%s is synced file by file: %s", path, error)
        return False


def _not_closed(log: PartitionLog, error: Exception) -> bool:
    logger.error("%s-%d could not be closed cleanly: %s", log.topic, log.partition, error)
    return False
