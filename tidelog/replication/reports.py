"""A broker's reports to the controller: batched, sent one request at a time, and repeated until they are settled.

Subclasses define the reports (`isr_changes.py`, the broker's directory assignments). Invariant: at most one request is
open. The newest report of a key replaces earlier ones and stays until it is settled or withdrawn.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from tidelog.replication.backoff import Backoff

if TYPE_CHECKING:
    import random

logger = logging.getLogger("tidelog.reports")

Key = TypeVar("Key")
Report = TypeVar("Report")


class RetryingReporter(Generic[Key, Report]):
    """A subclass implements `_send`, which calls `_settle` for each settled report."""

    in_one_request_max = 1 << 30

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random, backoff: Backoff) -> None:
        self._loop = loop
        self._rng = rng
        self._backoff = backoff
        self._open: dict[Key, Report] = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._open.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _report(self, key: Key, report: Report) -> None:
        self._open[key] = report
        self._go_on()

    def _settle(self, key: Key, report: Report) -> bool:
        """Drop the report if it is still the newest of its key. Returns whether it was."""
        if self._open.get(key) != report:
            return False
        del self._open[key]
        return True

    def _go_on(self) -> None:
        if self._open and self._task is None and not self._closed:
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._open and not self._closed:
                self._forget_overtaken()
                sent = dict(islice(self._open.items(), self.in_one_request_max))
                if sent and await self._try_send(sent):
                    self._backoff.reset()
                elif sent:
                    self._move_behind_others(sent)
                    await asyncio.sleep(self._backoff.next_ms(self._rng) / 1000)
        finally:
            self._task = None
        self._go_on()  # a report may have come after the last check

    def _move_behind_others(self, sent: dict[Key, Report]) -> None:
        """Those that are refused again and again would fill each request, and the others would never be sent."""
        for key in [key for key in sent if key in self._open]:
            self._open[key] = self._open.pop(key)

    async def _try_send(self, sent: dict[Key, Report]) -> bool:
        try:
            return await self._send(sent)
        except Exception:  # a bug here or in the controller: the open reports are sent again
            logger.exception("%s could not send %d reports to the controller", type(self).__name__, len(sent))
            return False

    def _forget_overtaken(self) -> None:
        """Withdraw the reports that are no longer needed."""

    async def _send(self, sent: dict[Key, Report]) -> bool:
        """Send these reports in one request. Returns whether all of them are settled."""
        raise NotImplementedError
