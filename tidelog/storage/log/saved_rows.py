"""Writes the offset index rows of growing segments to their files, as often as the checkpoints.

Records may hold any bytes, also whole batches, but no client writes an index row: the scan after a kill knows by the
rows where the log's own batches begin behind damage. Without a sync, because a kill leaves what was written. After a
loss of power a row may name a batch that is gone, and then it names none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Final

from tidelog.storage.log.partition_log import PartitionLog

logger = logging.getLogger("tidelog.storage")

LOGS_AT_ONCE: Final = 20
"""Each of them may cost a write."""


def save_index_rows(logs: Mapping[tuple[str, int], PartitionLog]) -> Iterator[None]:
    """In steps, between which others may run. Rows that cannot be written stay in memory, until the next time."""
    failures: list[OSError] = []
    for count, (key, log) in enumerate(list(logs.items()), 1):
        if logs.get(key) is log:  # another log may have its path by now
            try:
                log.segments.active.save_offset_rows()
            except OSError as error:
                failures.append(error)
        if not count % LOGS_AT_ONCE:
            yield
    if failures:
        logger.warning("the index rows of %d logs stay in memory: %s", len(failures), failures[-1])
