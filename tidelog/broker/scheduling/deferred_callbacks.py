"""Runs the callbacks of requests that can continue: each once, even if several partitions allow it at the same time.

During a read event of a connection they run at its end, or before its last request if that request waits for their
effect. Otherwise they run in the loop's next turn. Invariant: a callback runs exactly once after `defer`, and never
inside the call of `defer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger("tidelog.callbacks")


class DeferredCallbacks:
    """`collecting`: a connection processes its buffer, and calls `run` afterwards if `waiting` has callbacks."""

    __slots__ = ("_loop", "collecting", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.collecting = False
        self.waiting: dict[Callable[[], None], None] = {}

    def defer(self, callback: Callable[[], None]) -> None:
        if not self.waiting and not self.collecting:
            self._loop.call_soon(self.run)
        self.waiting[callback] = None

    def run(self) -> None:
        callbacks, self.waiting = self.waiting, {}
        # A callback may make a connection send. Further callbacks must not run inside this call: the stack would grow.
        collecting, self.collecting = self.collecting, False
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a waiting request failed")
        self.collecting = collecting
