"""Syncs the metadata log on another thread, repeatedly until all of it is on the device.

The next sync covers all records that are appended during a sync. The log decides which records count as synced
(`storage/log/flush.py`). Invariant: a failed sync is retried only if `tolerates` finds that it lost nothing; an offset
is reported only after a successful sync of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tidelog.replication.backoff import SHORTAGE_PAUSE_S
from tidelog.replication.quorum.files.metadata_log import MetadataLog
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog


class MetadataSync:
    """`on_synced` is called after every successful sync, `tolerates` after every failed one."""

    def __init__(
        self,
        metadata: MetadataLog,
        log: PartitionLog,
        loop: asyncio.AbstractEventLoop,
        run_in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_synced: Callable[[], None],
        tolerates: Callable[[Exception], bool],
    ) -> None:
        self._metadata = metadata
        self._log = log
        self._loop = loop
        self._run_in_executor = run_in_executor
        self._on_synced = on_synced
        self._tolerates = tolerates
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    def begin(self) -> None:
        if self._task is None and not self._is_settled:
            self._task = self._loop.create_task(self._sync_all(), name="metadata log sync")

    @property
    def _is_settled(self) -> bool:
        return self._metadata.synced_offset >= self._metadata.end_offset

    def give_up(self) -> None:
        """Retry no failed sync."""
        self._is_over = True

    async def close(self) -> None:
        """Wait until all records are synced or the next sync fails."""
        self._is_over = True
        if self._task is not None:
            await self._task

    async def _sync_all(self) -> None:
        try:
            # A log with a failure would never be settled: its directory has failed, and no later sync counts.
            while not self._is_settled and self._log.failure is None:
                try:
                    task = self._log.begin_flush()
                    await self._run_in_executor(task.run)
                    self._log.finish_flush(task)
                    self._metadata.remember_acknowledged()
                except (OSError, CorruptLog) as error:
                    if not self._tolerates(error) or self._is_over:
                        return
                    await asyncio.sleep(SHORTAGE_PAUSE_S)
                else:
                    self._on_synced()
        finally:
            self._task = None
