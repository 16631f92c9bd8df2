"""The queue of large batches whose records must be looked at: one at a time, partly on a thread, partly in short steps.

A produced batch is inspected (`storage/segments/inspection.py`), one in the log is searched for a timestamp
(`storage/segments/lookup.py`). Hosts take turns. The number of waiting batches has no bound of its own: a refused batch
would break the sequence of an idempotent producer, and an inspection in one step would block the loop. The bound is
that of the connections' receive buffers, because a connection keeps its buffer and serves nothing else until its batch
is inspected. Invariant: each callback runs once, on the loop, unless its client has disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Final, Protocol

from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from tidelog.broker.scheduling.fair_scheduler import FairScheduler
    from tidelog.broker.scheduling.large_answers import Client

logger = logging.getLogger("tidelog.produce")

# The batches of disconnected clients are still inspected and appended while all waiting batches are within this bound.
ABANDONED_BYTES_MAX: Final = 64 * 1024 * 1024

OnInspected = Callable[["KafkaError | None"], None]
"""Receives the error that refuses the batch, or None."""


class LargeBatch(Protocol):
    """The parts of the work on one batch, in their order. Each may raise KafkaError."""

    def decompress(self) -> None:
        """On any thread."""
        ...

    def inspect(self) -> Iterator[None]:
        """In steps of about a millisecond."""
        ...

    def rebuild(self) -> None:
        """On any thread."""
        ...


class Inspection:
    """One waiting batch. `held_bytes`: the memory of its request, for this batch and those behind it. `host`: the
    address of its client. `client`: if it has disconnected when its turn comes, the batch is refused.
    """

    __slots__ = ("batch", "client", "held_bytes", "host", "on_inspected")

    def __init__(
        self,
        batch: LargeBatch,
        on_inspected: OnInspected,
        held_bytes: int,
        host: str = "",
        client: Client | None = None,
    ) -> None:
        self.batch = batch
        self.on_inspected = on_inspected
        self.held_bytes = held_bytes
        self.host = host
        self.client = client

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
        # By host, the host that is next at the front. Unlike those of a HostQueue they may leave before their turn.
        self._waiting: dict[str, dict[Inspection, None]] = {}
        self._waiting_bytes = 0
        self._worker: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """The number of waiting batches."""
        return sum(map(len, self._waiting.values()))

    def begin(self, inspection: Inspection) -> None:
        self._waiting.setdefault(inspection.host, {})[inspection] = None
        self._waiting_bytes += inspection.held_bytes
        if self._worker is None:
            self._worker = self._loop.create_task(self._work(), name="inspections")

    def abandon(self, inspection: Inspection) -> None:
        """The client has disconnected, and its buffer bounds the memory no longer: drop the batch if too much waits."""
        of_host = self._waiting.get(inspection.host, {})
        if inspection in of_host and self._waiting_bytes > ABANDONED_BYTES_MAX:
            del of_host[inspection]
            if not of_host:
                del self._waiting[inspection.host]
            self._waiting_bytes -= inspection.held_bytes
            inspection.end()

    def _take(self) -> Inspection:
        """The first one of the host whose turn it is."""
        host = next(iter(self._waiting))
        of_host = self._waiting.pop(host)
        inspection = next(iter(of_host))
        del of_host[inspection]
        if of_host:
            self._waiting[host] = of_host
        self._waiting_bytes -= inspection.held_bytes
        return inspection

    async def _work(self) -> None:
        try:
            while self._waiting:
                inspection = self._take()
                refusal = await self._refusal(inspection)
                try:
                    inspection.on_inspected(refusal)
                except Exception:
                    logger.exception("the append of an inspected batch failed")
                inspection.end()
                del inspection, refusal
        finally:
            self._worker = None

    async def _refusal(self, inspection: Inspection) -> KafkaError | None:
        batch = inspection.batch
        try:
            if inspection.client is not None and inspection.client.is_gone:
                raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "the client has disconnected")
            await self._loop.run_in_executor(self._executor, batch.decompress)
            for _ in batch.inspect():
                await self._scheduler.pause(for_records=True)
            await self._loop.run_in_executor(self._executor, batch.rebuild)
        except Exception as error:
            return _refusal(error)
        return None

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
