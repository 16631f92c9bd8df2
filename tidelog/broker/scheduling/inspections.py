"""Looking at the records of batches that take long, beside the loop and in its pauses: one at a time, the others wait.

What is looked for is `storage/segments/inspection.py`'s business. Every batch waits for its turn, however many there
are: to refuse one would break the sequence of an idempotent producer, to look at it at once would stop the loop for
all others. What waits is bounded by what connections may hold, because a connection serves nothing else meanwhile and
keeps its receive buffer. Invariant: each callback runs once, from the loop, unless its client is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final

from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from tidelog.broker.scheduling.fair_scheduler import FairScheduler
    from tidelog.storage.segments.inspection import NeedsInspection

logger = logging.getLogger("tidelog.produce")

# Batches whose clients are gone are looked at and appended all the same while no more than this waits in all.
ABANDONED_BYTES_MAX: Final = 64 * 1024 * 1024

Looked = Callable[["memoryview | KafkaError"], None]
"""Receives the batch to append, or what it is refused for."""


class Inspection:
    """One batch that waits. `held_bytes`: what its request keeps in memory for it and for those behind it."""

    __slots__ = ("held_bytes", "looked", "unseen")

    def __init__(self, unseen: NeedsInspection, looked: Looked, held_bytes: int) -> None:
        self.unseen = unseen
        self.looked = looked
        self.held_bytes = held_bytes


class Inspections:
    """Of one node; each inspection may hold 16 MiB of records, twice while they are decompressed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor | None, scheduler: FairScheduler) -> None:
        self._loop = loop
        self._executor = executor
        self._scheduler = scheduler
        self._waiting: dict[Inspection, None] = {}
        self._waiting_bytes = 0
        self._worker: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def begin(self, inspection: Inspection) -> None:
        self._waiting[inspection] = None
        self._waiting_bytes += inspection.held_bytes
        if self._worker is None:
            self._worker = self._loop.create_task(self._work(), name="inspections")

    def abandon(self, inspection: Inspection) -> None:
        """Its client is gone, and with it the bound on what waits: drop it if too much does."""
        if inspection in self._waiting and self._waiting_bytes > ABANDONED_BYTES_MAX:
            self._take(inspection)

    def _take(self, inspection: Inspection) -> None:
        del self._waiting[inspection]
        self._waiting_bytes -= inspection.held_bytes

    async def _work(self) -> None:
        try:
            while self._waiting:
                inspection = next(iter(self._waiting))
                self._take(inspection)
                outcome = await self._outcome(inspection.unseen)
                try:
                    inspection.looked(outcome)
                except Exception:
                    logger.exception("the append of an inspected batch failed")  # the others wait for theirs
                del inspection, outcome
        finally:
            self._worker = None

    async def _outcome(self, unseen: NeedsInspection) -> memoryview | KafkaError:
        try:
            await self._loop.run_in_executor(self._executor, unseen.decompress)
            for _ in unseen.look():
                await self._scheduler.pause(for_records=True)
            await self._loop.run_in_executor(self._executor, unseen.rebuild)
        except Exception as error:
            return _refusal(error)
        return unseen.batches

    async def close(self) -> None:
        self._waiting.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)


def _refusal(error: Exception) -> KafkaError:
    """What the batch is refused with, without the frames that `error` came through: they hold megabytes of records."""
    if isinstance(error, KafkaError):
        return KafkaError(error.code, error.message, error.record_errors)
    logger.error("the inspection of a batch failed", exc_info=error)
    return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker failed; its log says why")
