"""How long a member that leaves its group waits, for brokers and for the user's listener."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

CUT_LISTENER_S = 3.0
"""The time of a listener that runs, or that is still to be called, when the caller of `close` is cancelled."""
CUT_CONNECTION_S = 1.0
"""The time for the connection to the coordinator then: nothing can be sent without it."""


class LeaveLimit:
    """The limits of one leaving: `timeout_ms` for brokers, None for no limit, and none for the listener; or those of
    `cut`. One wait at a time.
    """

    def __init__(self, timeout_ms: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._brokers_until = None if timeout_ms is None else self._loop.time() + timeout_ms / 1000
        self._cut_s: float | None = None
        self._wait: asyncio.Timeout | None = None
        self._time_after_cut_s = 0.0

    def cut(self) -> None:
        """Wait no longer for brokers, and only a little for a connection and for the listener: the caller has no time
        left.
        """
        self._cut_s = self._loop.time()
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(self._cut_s + self._time_after_cut_s)

    @property
    def is_cut(self) -> bool:
        return self._cut_s is not None

    async def for_brokers(self, work: Awaitable[object]) -> None:
        """Wait for the work, and cancel it at the limit. What it sends before its first wait is sent in any case."""
        await self._wait_for(work, self._brokers_until, 0.0)

    async def for_connection(self, work: Awaitable[object]) -> None:
        """Wait for the work, and cancel it at the limit."""
        await self._wait_for(work, self._brokers_until, CUT_CONNECTION_S)

    async def for_listener(self, work: Awaitable[object]) -> bool:
        """Wait for the work, and cancel it at the limit: False then."""
        return await self._wait_for(work, None, CUT_LISTENER_S)

    async def _wait_for(self, work: Awaitable[object], until_s: float | None, time_after_cut_s: float) -> bool:
        self._time_after_cut_s = time_after_cut_s
        try:
            async with asyncio.timeout_at(until_s if self._cut_s is None else self._cut_s + time_after_cut_s) as wait:
                self._wait = wait
                await work
        except TimeoutError:
            return False
        finally:
            self._wait = None
        return True
