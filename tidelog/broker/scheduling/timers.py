"""Runs any number of deadlines on one timer of the event loop, with `purgatory.Deadlines`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from tidelog.broker.scheduling.purgatory import Deadlines

logger = logging.getLogger("tidelog.timers")

Expiry = Callable[[], None]
# At most so many deadlines end in one turn of the loop. The answer of a fetch takes 7 us.
EXPIRED_PER_TURN = 100


class DeadlineTimer:
    """Calls each callback after its delay, up to DEADLINE_RESOLUTION_MS late, and never after `discard`. Many that are
    due at the same time are later: a turn of the loop calls EXPIRED_PER_TURN.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._deadlines: Deadlines[Expiry] = Deadlines()
        self.discard = self._deadlines.discard
        """Takes the bucket that `add` returned, and the callback."""
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for_ms = 0

    def add(self, delay_ms: int, on_expiry: Expiry) -> int:
        """Returns the bucket, an argument of `discard`."""
        due_ms = int(self._loop.time() * 1000) + delay_ms
        bucket = self._deadlines.add(due_ms, on_expiry)
        if self._timer is None or due_ms < self._armed_for_ms:
            first_due_ms = self._deadlines.next_due_ms()
            if first_due_ms is not None and (self._timer is None or first_due_ms < self._armed_for_ms):
                self._arm(first_due_ms)
        return bucket

    def waiting(self) -> Iterator[Expiry]:
        """The callbacks that still have a deadline."""
        return iter(self._deadlines)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, due_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for_ms = due_ms
        self._timer = self._loop.call_at(due_ms / 1000, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for on_expiry in self._deadlines.expire(int(self._loop.time() * 1000 + 0.5), EXPIRED_PER_TURN):
            try:
                on_expiry()
            except Exception:
                logger.exception("the end of a request's wait failed")
        due_ms = self._deadlines.next_due_ms()
        if due_ms is not None and self._timer is None:
            self._arm(due_ms)
