"""The queue of large batches whose records must be inspected: one at a time, partly on a thread, partly in short steps.

`storage/segments/inspection.py` has the checks. The number of waiting batches has no bound of its own: a refused batch
would break the sequence of an idempotent producer, and an inspection in one step would block the loop. The bound is
that of the connections' receive buffers, because a connection keeps its buffer and serves nothing else until its batch
is inspected. Invariant: each callback runs once, on the loop, unless its client has disconnected.
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

# The batches of disconnected clients are still inspected and appended while all waiting batches are within this bound.
ABANDONED_BYTES_MAX: Final = 64 * 1024 * 1024

OnInspected = Callable[["memoryview | KafkaError"], None]
"""Receives the batch to append, or the error that refuses it."""


class Inspection:
    """One waiting batch. `held_bytes`: the memory of its request, for this batch and those behind it."""

    __slots__ = ("batch", "held_bytes", "on_inspected")

    def __init__(self, batch: NeedsInspection, on_inspected: OnInspected, held_bytes: int) -> None:
        self.batch = batch
        self.on_inspected = on_inspected
        self.held_bytes = held_bytes

    def end(self) -> None:
        """Let go of the batch and of the callback, whose owner refers to this inspection. The cycle would keep the
        batch, and its decompressed records if it was refused, until a garbage collection.
        """
        del self.batch, self.on_inspected


class Inspections:
    """The inspections of one node. Each may hold 16 MiB of records, and twice that during the decompression."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor | None, scheduler: FairScheduler) -> None:
        self._loop = loop
        self._executor = executor
        self._scheduler = scheduler
        self._waiting: dict[Inspection, None] = {}
        self._waiting_bytes = 0
        self._worker: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """The number of waiting batches."""
        return len(self._waiting)

    def begin(self, inspection: Inspection) -> None:
        self._waiting[inspection] = None
        self._waiting_bytes += inspection.held_bytes
        if self._worker is None:
            self._worker = self._loop.create_task(self._work(), name="inspections")

    def abandon(self, inspection: Inspection) -> None:
        """The client has disconnected, and its buffer bounds the memory no longer: drop the batch if too much waits."""
        if inspection in self._waiting and self._waiting_bytes > ABANDONED_BYTES_MAX:
            self._take(inspection)
            inspection.end()

    def _take(self, inspection: Inspection) -> None:
        del self._waiting[inspection]
        self._waiting_bytes -= inspection.held_bytes

    async def _work(self) -> None:
        try:
            while self._waiting:
                inspection = next(iter(self._waiting))
                self._take(inspection)
                outcome = await self._outcome(inspection.batch)
                try:
                    inspection.on_inspected(outcome)
                except Exception:
                    logger.exception("the append of an inspected batch failed")
                inspection.end()
                del inspection, outcome
        finally:
            self._worker = None

    async def _outcome(self, batch: NeedsInspection) -> memoryview | KafkaError:
        try:
            await self._loop.run_in_executor(self._executor, batch.decompress)
            for _ in batch.inspect():
                await self._scheduler.pause(for_records=True)
            await self._loop.run_in_executor(self._executor, batch.rebuild)
        except Exception as error:
            return _refusal(error)
        return batch.batches

    async def close(self) -> None:
        self._waiting.clear()
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)


def _refusal(error: Exception) -> KafkaError:
    """The error for the client, without the traceback of `error`: its frames hold megabytes of records."""
    if isinstance(error, KafkaError):
        return KafkaError(error.code, error.message, error.record_errors)
    logger.error("the inspection of a batch failed", exc_info=error)
    return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker failed; its log says why")
