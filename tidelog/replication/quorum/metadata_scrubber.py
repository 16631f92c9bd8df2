"""Rereads the metadata log and its snapshots periodically, to detect damage while the node runs.

A thread reads a segment in pieces, at a bounded rate; `storage/log/scrub.py` checks it. A file that became shorter is
detected within half a minute, and so is damage of a snapshot that another node fetches: it would fetch it again and
again. `driver.py` handles the damage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from tidelog.replication.quorum.background_task import BackgroundTask
from tidelog.replication.quorum.files.metadata_log import MetadataLog
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.replication.threads import until_done
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments.segment import Segment

LOOK_S: Final = 30.0
PIECE_S: Final = 0.25
PIECE_BYTES_MIN: Final = 64 * 1024
PIECE_BYTES_MAX: Final = 8 * 1024 * 1024


class MetadataScrubber(BackgroundTask):
    """`on_damage` is called after each scrub, with or without damage; the log then knows its damaged records.

    `on_damaged_snapshots` is called if a snapshot is damaged. `tolerates` decides whether the scrubber continues after
    a device error.
    """

    def __init__(
        self,
        metadata: MetadataLog,
        log: PartitionLog,
        settings: QuorumSettings,
        loop: asyncio.AbstractEventLoop,
        run_in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        on_damage: Callable[[], None],
        on_damaged_snapshots: Callable[[], None],
        tolerates: Callable[[Exception], bool],
    ) -> None:
        super().__init__(loop, "metadata scrubber")
        self._metadata = metadata
        self._log = log
        self._rate_bytes = settings.scrub_bytes_per_s
        self._interval_s = settings.scrub_interval_ms / 1000
        self._run_in_executor = run_in_executor
        self._on_damage = on_damage
        self._on_damaged_snapshots = on_damaged_snapshots
        self._tolerates = tolerates
        self._doubts_snapshots = False

    def begin(self) -> None:
        if self._rate_bytes > 0:
            self._begin()

    def doubt_snapshots(self) -> None:
        """A node fetches a snapshot, perhaps again: the next look reads them, also where the scrubber is turned off."""
        self._doubts_snapshots = True
        if self._task is None:
            self._begin()

    async def _run(self) -> None:
        look_s = min(LOOK_S, self._interval_s)
        due_at = self._loop.time() + look_s
        while True:
            await asyncio.sleep(look_s)
            self._log.segments.age_trust()
            is_due = self._rate_bytes > 0 and self._loop.time() >= due_at
            if is_due:
                due_at = self._loop.time() + self._interval_s
            try:
                await self._look(is_due)
            except (OSError, CorruptLog) as error:
                if not self._tolerates(error):
                    return

    async def _look(self, is_due: bool) -> None:
        if is_due or self._doubts_snapshots:
            self._doubts_snapshots = False
            if await until_done(self._run_in_executor(self._metadata.check_snapshots)):
                self._on_damaged_snapshots()
        if not self._rate_bytes:
            return
        was_read = False
        for segment in list(self._log.segments):
            if (is_due or _is_cut(segment)) and self._has(segment):
                await self._scrub(segment)
                was_read = True
        if was_read:
            self._on_damage()

    def _has(self, segment: Segment) -> bool:
        """Whether the log still has the segment, and the segment is not empty."""
        return segment.size_bytes > 0 and any(one is segment for one in self._log.segments)

    async def _scrub(self, segment: Segment) -> None:
        scrub = Scrub(self._log, segment)
        piece = min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, int(self._rate_bytes * PIECE_S)))
        is_done = False
        try:
            while not scrub.is_done and self._log.failure is None:
                before = scrub.verified_bytes
                await until_done(self._run_in_executor(partial(scrub.run, piece)))
                read_bytes = min(piece, max(scrub.verified_bytes - before, 4096))
                await asyncio.sleep(read_bytes / self._rate_bytes)
            is_done = scrub.is_done
        finally:
            if not is_done:
                scrub.abandon()
        scrub.finish()


def _is_cut(segment: Segment) -> bool:
    return segment.file.size_bytes() < segment.size_bytes
