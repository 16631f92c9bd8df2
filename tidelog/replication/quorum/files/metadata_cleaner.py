"""Cleans the metadata log by its retention, once a minute and after each new snapshot.

`metadata_retention.py` decides which snapshots may go; `metadata_log.py` removes them in a safe order. Runs on the
loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from tidelog.replication.quorum.files.metadata_log import MetadataLog
from tidelog.replication.quorum.raft.metadata_retention import MetadataRetention
from tidelog.storage.log.partition_log import CorruptLog

logger = logging.getLogger("tidelog.quorum")

CLEAN_INTERVAL_MS: Final = 60_000


class MetadataCleaner:
    """`tolerates` decides whether to continue after an error; after a device error the node leaves the quorum."""

    def __init__(
        self,
        log: MetadataLog,
        retention: MetadataRetention,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
        tolerates: Callable[[Exception], bool],
    ) -> None:
        self._log = log
        self._retention = retention
        self._loop = loop
        self._clock_ms = clock_ms
        self._tolerates = tolerates
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._timer = self._loop.call_later(CLEAN_INTERVAL_MS / 1000, self._on_time)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self.begin()
        self.clean()

    def clean(self) -> None:
        before = self._log.start_offset
        try:
            self._log.clean(self._retention, self._clock_ms())
        except (OSError, CorruptLog) as error:
            self._tolerates(error)
        if self._log.start_offset != before:
            logger.info("the metadata log now starts at offset %d, where a snapshot ends", self._log.start_offset)
