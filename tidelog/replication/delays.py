"""The partitions that a link leaves out for a while after a failure, and when they come back: all together.

Why one is left out, and what is asked for it then, is the link's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tidelog.replication.backoff import pause_ms

if TYPE_CHECKING:
    from tidelog.replication.fetcher import ReplicaFetchers
    from tidelog.replication.followed import Followed


class Delays:
    """`on_over` is given those whose time has come."""

    def __init__(self, fetchers: ReplicaFetchers, on_over: Callable[[Collection[Followed]], None]) -> None:
        self._fetchers = fetchers
        self._on_over = on_over
        self._delayed: dict[Followed, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, followed: object) -> bool:
        return followed in self._delayed

    def add(self, followed: Followed) -> None:
        """For longer the more often it has failed in a row; for less where others come back earlier."""
        followed.failures += 1
        self._delayed[followed] = None
        if self._timer is None:
            fetchers, settings = self._fetchers, self._fetchers.settings
            delay_ms = pause_ms(followed.failures, settings.backoff_ms_initial, settings.backoff_ms_max, fetchers.rng)
            self._timer = fetchers.loop.call_later(delay_ms / 1000, self._over)

    def discard(self, followed: Followed) -> None:
        self._delayed.pop(followed, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _over(self) -> None:
        self._timer = None
        delayed, self._delayed = self._delayed, {}
        self._on_over(delayed)
