"""Deletes the logs of replicas that are not on this node any more, a few in a turn of the loop.

`hosting.py` ends the roles of these replicas first, in one turn, so no client reads or writes them. A deletion renames
a directory, which takes up to a millisecond, and a topic may have thousands. Invariant: before a new log of the same
name is made, and before the node ends, `finish` deletes the old one: a start would keep it as a stray log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidelog.broker.replicas.log_directories import LogDirectories
    from tidelog.storage.log.directory import LogDirectory

logger = logging.getLogger("tidelog.hosting")

# The time that the deletions take in one turn of the loop.
DELETIONS_S = 0.01
Replica = tuple[str, int]


class LogDeletions:
    """`stopwatch` returns seconds."""

    def __init__(
        self,
        directories: LogDirectories,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
        stopwatch: Callable[[], float],
    ) -> None:
        self.discard_futures: Callable[[str, int], None] = lambda topic, index: None
        """Deletes the copies of the replica that were on their way to another log directory."""
        self._directories = directories
        self._loop = loop
        self._clock_ms = clock_ms
        self._stopwatch = stopwatch
        self._waiting: dict[Replica, LogDirectory | None] = {}
        self._is_scheduled = False

    def add(self, replica: Replica, directory: LogDirectory | None) -> None:
        """Delete the replica's log in this directory, None if that is not known, in this turn (`go_on`) or later."""
        self._waiting[replica] = directory
        self._go_on_later()

    def go_on(self) -> None:
        """Delete as many as one turn of the loop may."""
        began_s = self._stopwatch()
        while self._waiting and self._stopwatch() - began_s <= DELETIONS_S:
            self.finish(next(iter(self._waiting)))

    def _go_on_later(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self.go_on()
        self._go_on_later()

    def finish(self, replica: Replica) -> None:
        """Delete the replica's log now, if that is still to be done."""
        if replica not in self._waiting:
            return
        directory = self._waiting.pop(replica)
        self.discard_futures(*replica)
        if directory is None or directory.failure is not None:
            return
        try:
            directory.delete_log(*replica, self._clock_ms())
        except OSError as error:
            logger.error("cannot delete the log of %s-%d: %s", *replica, error)
            self._directories.failed(directory, error)

    def finish_all(self) -> None:
        for replica in list(self._waiting):
            self.finish(replica)
