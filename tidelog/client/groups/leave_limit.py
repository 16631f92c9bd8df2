"""How long a member that leaves its group waits, for brokers and for the user's listener."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress

CUT_LISTENER_S = 3.0
"""The time of a listener that runs, or that is still to be called, when the caller of `close` is cancelled."""


class LeaveLimit:
    """The limits of one leaving: `timeout_ms` for brokers, None for no limit, and none for the listener; or those of
    `cut`.
    """

    def __init__(self, timeout_ms: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._brokers_until = None if timeout_ms is None else self._loop.time() + timeout_ms / 1000
        self._listener_until: float | None = None
        self._broker_wait: asyncio.Timeout | None = None
        self._listener_wait: asyncio.Timeout | None = None

    def cut(self) -> None:
        """Wait for brokers no longer, and for the listener only a little: the caller has no time left."""
        self._brokers_until = self._loop.time()
        self._listener_until = self._brokers_until + CUT_LISTENER_S
        if self._broker_wait is not None and not self._broker_wait.expired():
            self._broker_wait.reschedule(self._brokers_until)
        if self._listener_wait is not None:
            self._listener_wait.reschedule(self._listener_until)

    @property
    def is_cut(self) -> bool:
        return self._listener_until is not None

    async def for_brokers(self, work: Awaitable[object]) -> None:
        """Wait for the work, and cancel it at the limit. What it sends before its first wait is sent in any case."""
        with suppress(TimeoutError):
            try:
                async with asyncio.timeout_at(self._brokers_until) as self._broker_wait:
                    await work
            finally:
                self._broker_wait = None

    async def for_listener(self, work: Awaitable[object]) -> bool:
        """Wait for the work, and cancel it at the limit: False then."""
        try:
            async with asyncio.timeout_at(self._listener_until) as self._listener_wait:
                await work
        except TimeoutError:
            return False
        finally:
            self._listener_wait = None
        return True
