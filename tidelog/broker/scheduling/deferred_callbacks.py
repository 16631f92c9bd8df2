"""Requests that may go on: each once, when what made it so is done with, however many partitions say so meanwhile.

That is at the end of the read event that is being served, or with its last request if that waits for what they do, or
else at the loop's next turn. Invariant: a callback runs exactly once after it was asked for, and never inside
the call that asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger("tidelog.callbacks")


class DeferredCallbacks:
    """`collecting`: a connection serves what it has read, and will look at `waiting` when it has."""

    __slots__ = ("_loop", "collecting", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.collecting = False
        self.waiting: dict[Callable[[], None], None] = {}

    def soon(self, callback: Callable[[], None]) -> None:
        if not self.waiting and not self.collecting:
            self._loop.call_soon(self.run)
        self.waiting[callback] = None

    def run(self) -> None:
        woken, self.waiting = self.waiting, {}
        # What it lets others send is not to wake the next inside of this, and so on: each level costs frames.
        collecting, self.collecting = self.collecting, False
        for callback in woken:
            try:
                callback()
            except Exception:
                logger.exception("a waiting request failed")  # the others are not to wait on
        self.collecting = collecting
