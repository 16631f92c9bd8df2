"""The partitions that their leader does not know yet: it is behind a slow link, and reads the metadata later.

Requests for thousands of them would take the link from that metadata. So a part is asked for at a time, in turn, and
all once the leader answers one. Until then each has its turn within PARTS rounds, because the leader may know some, as
where a topic that it has deleted is not deleted here yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from itertools import islice
from typing import TYPE_CHECKING, Final

from tidelog.protocol.errors import ErrorCode
from tidelog.replication.backoff import pause_ms

if TYPE_CHECKING:
    import random

    from tidelog.replication.fetcher_settings import FetcherSettings
    from tidelog.replication.followed_partition import FollowedPartition

PARTS: Final = 16
ASKED_AT_ONCE_MIN: Final = 10
# A leader usually learns of a topic within the first pause. All partitions are asked for at its end.
FAILURES_MIN: Final = 2

_NOT_HOSTED: Final = (ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


class UnhostedPartitions:
    """`on_over` gets those whose turn has come, to ask for them again."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        settings: FetcherSettings,
        on_over: Callable[[Collection[FollowedPartition]], None],
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._settings = settings
        self._on_over = on_over
        self._waiting: dict[FollowedPartition, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._failures = 0
        self._is_asked_in_parts = False
        self._is_known = False  # the leader has answered one: all are due

    def __contains__(self, followed: object) -> bool:
        return followed in self._waiting

    def takes(self, followed: FollowedPartition, code: int) -> bool:
        """Whether the partition waits here after this refusal, and not by itself."""
        return code in _NOT_HOSTED and followed.failures + 1 >= FAILURES_MIN

    def add(self, followed: FollowedPartition) -> None:
        followed.failures += 1
        self._failures = max(self._failures, followed.failures)
        self._waiting[followed] = None
        if self._timer is None:
            self._arm()

    def discard(self, followed: FollowedPartition) -> None:
        self._waiting.pop(followed, None)

    def on_answered(self) -> None:
        """The leader hosts a partition that it refused before."""
        if self._is_asked_in_parts and self._timer is not None:
            self._is_asked_in_parts, self._is_known, self._failures = False, True, 0
            self._timer.cancel()
            self._timer = self._loop.call_later(0, self._over)

    def clear(self) -> None:
        """Let all go without another request, as the link begins anew with all partitions."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._failures, self._is_asked_in_parts, self._is_known = 0, False, False

    def _arm(self) -> None:
        settings = self._settings
        delay_ms = pause_ms(max(self._failures, 1), settings.backoff_ms_initial, settings.backoff_ms_max, self._rng)
        self._timer = self._loop.call_later(delay_ms / 1000, self._over)

    def _over(self) -> None:
        self._timer = None
        count = len(self._waiting) if self._is_known else max(ASKED_AT_ONCE_MIN, -(-len(self._waiting) // PARTS))
        self._is_known = False
        due = list(islice(self._waiting, count))
        for followed in due:
            del self._waiting[followed]
        self._is_asked_in_parts = bool(self._waiting)
        if self._waiting:
            self._failures += 1
            self._arm()
        else:
            self._failures = 0
        self._on_over(due)
