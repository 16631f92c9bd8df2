"""Syncs the metadata log off the loop's thread, again and again until all of it is on the device.

However much is appended while a sync runs, the next one covers it. What may count as synced is the log's to say
(`storage/log/flush.py`). Invariant: a sync that failed is tried again only where `tolerates` says that nothing was
lost by it; nobody is told of an offset before a sync that covers it succeeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tidelog.replication.backoff import SHORTAGE_PAUSE_S
from tidelog.replication.quorum.files.metadata_log import MetadataLog
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog


class MetadataSync:
    """`on_synced` hears of every sync that succeeded, `tolerates` of every other one."""

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
        """What is not synced yet is not tried again."""
        self._is_over = True

    async def close(self) -> None:
        """Until all is synced, or once more could not be."""
        self._is_over = True
        if self._task is not None:
            await self._task

    async def _sync_all(self) -> None:
        try:
            # One that was abandoned is never settled: its directory has failed, and no sync counts any more.
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
