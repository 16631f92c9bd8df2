"""Keeps the event loop awake while a short answer is due: to wake an idle processor takes longer than to decode it.

Invariant: the loop runs everything else as before, because each turn looks at its sockets, timers and callbacks. One
call at a time is watched, for at most the limit, and only after a call whose answer came within the limit.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Final

from tidelog.client.network.connection import yield_processor

PROMPT_S: Final = 0.0002
"""A call that takes no longer, alone, may be followed by a `DirectSend`."""


class BusyPoll:
    """Watches the calls of one producer that wait for a record.

    `limit_us` is the option `busy_poll_us`; with 0 no call is watched.
    """

    __slots__ = ("_future", "_is_alone", "_last_was_short", "_limit_s", "_started_s", "last_was_prompt")

    def __init__(self, limit_us: int) -> None:
        self._limit_s = limit_us / 1_000_000
        self._last_was_short = False
        self._future: asyncio.Future[None] | None = None
        self._started_s = 0.0
        self._is_alone = False
        self.last_was_prompt = False
        """The last watched call took `PROMPT_S` at most, and no other call began meanwhile."""

    def begin(self, future: asyncio.Future[None], loop: asyncio.AbstractEventLoop, started_s: float) -> None:
        """A call that began at `started_s` of `time.monotonic` begins to wait for `future`.

        It is not watched while another watched call waits.
        """
        if not self._limit_s:
            return
        if self._future is not None and not self._future.done():
            self._is_alone = False
            return
        self._future = future
        self._started_s = started_s
        self._is_alone = True
        self.last_was_prompt = False
        if self._last_was_short:
            self._last_was_short = False  # until this answer has come
            loop.call_soon(self._keep_awake, future, loop)

    def end(self, future: asyncio.Future[None]) -> None:
        """The call has its answer. A cancelled call says nothing about the next one."""
        if future is self._future:
            self._future = None
            waited_s = monotonic() - self._started_s
            self._last_was_short = waited_s <= self._limit_s
            self.last_was_prompt = self._is_alone and waited_s <= PROMPT_S

    def _keep_awake(self, future: asyncio.Future[None], loop: asyncio.AbstractEventLoop) -> None:
        if not future.done() and monotonic() - self._started_s < self._limit_s:
            yield_processor()  # the broker may be waiting for this very one
            loop.call_soon(self._keep_awake, future, loop)
