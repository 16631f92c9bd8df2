"""Deadlines as plain data: which key is due when.

Here lives the queue that a pure coordinator keeps in place of timers; the runtime asks for the next deadline and arms
one real timer per partition. A heartbeat only moves a number: the heap entry stays where it is and is put off when it
comes up. The invariant: a key has at most one deadline, and none is handed out before its time.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_SLACK = 64


class TimerQueue(Generic[Key]):
    """Deadlines in milliseconds by key."""

    def __init__(self) -> None:
        self._deadlines: dict[Key, int] = {}
        self._queued: dict[Key, int] = {}  # the time of the one heap entry that counts for this key
        self._heap: list[tuple[int, int, Key]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: object) -> bool:
        return key in self._deadlines

    def set(self, key: Key, deadline_ms: int) -> None:
        """The key is due at this time, whatever was said before."""
        self._deadlines[key] = deadline_ms
        queued_ms = self._queued.get(key)
        if queued_ms is None or deadline_ms < queued_ms:
            self._push(key, deadline_ms)

    def cancel(self, key: Key) -> None:
        """The key is due no more; unknown keys are no error."""
        if self._deadlines.pop(key, None) is not None and len(self._heap) > 2 * len(self._deadlines) + _SLACK:
            self._rebuild()

    def next_deadline_ms(self) -> int | None:
        """Not later than the earliest deadline, and usually that; None when nothing is due ever."""
        while self._heap:
            queued_ms, _, key = self._heap[0]
            if self._queued.get(key) == queued_ms and key in self._deadlines:
                return queued_ms
            self._drop_first()
        return None

    def pop_due(self, now_ms: int) -> Key | None:
        """Take out one key that is due by now; None when there is none."""
        while self._heap and self._heap[0][0] <= now_ms:
            key, counted = self._drop_first()
            if not counted:
                continue
            deadline_ms = self._deadlines.get(key)
            if deadline_ms is None:
                continue
            if deadline_ms <= now_ms:
                del self._deadlines[key]
                return key
            self._push(key, deadline_ms)
        return None

    def _push(self, key: Key, deadline_ms: int) -> None:
        self._sequence += 1  # keys need not be comparable, and equal deadlines keep their order
        self._queued[key] = deadline_ms
        heapq.heappush(self._heap, (deadline_ms, self._sequence, key))

    def _drop_first(self) -> tuple[Key, bool]:
        queued_ms, _, key = heapq.heappop(self._heap)
        counted = self._queued.get(key) == queued_ms
        if counted:
            del self._queued[key]
        return key, counted

    def _rebuild(self) -> None:
        self._queued = dict(self._deadlines)
        self._heap = [(deadline_ms, number, key) for number, (key, deadline_ms) in enumerate(self._deadlines.items())]
        self._sequence = len(self._heap)
        heapq.heapify(self._heap)
