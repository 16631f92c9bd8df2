"""A queue of deadlines by key, as plain data.

A pure coordinator keeps this queue in place of timers. The runtime reads the next deadline and arms
one real timer per partition. A heartbeat only changes a number: the heap entry stays, and is queued
again when it comes up before the deadline. Invariant: a key has at most one deadline, and is never
returned before it.
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
        self._queued_ms: dict[Key, int] = {}  # the time of the valid heap entry of each key
        self._heap: list[tuple[int, int, Key]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: object) -> bool:
        return key in self._deadlines

    def set(self, key: Key, deadline_ms: int) -> None:
        """Set or replace the deadline of the key."""
        self._deadlines[key] = deadline_ms
        queued_ms = self._queued_ms.get(key)
        if queued_ms is None or deadline_ms < queued_ms:
            self._push(key, deadline_ms)

    def cancel(self, key: Key) -> None:
        """Remove the deadline of the key, if it has one."""
        if self._deadlines.pop(key, None) is not None and len(self._heap) > 2 * len(self._deadlines) + _SLACK:
            self._rebuild()

    def next_deadline_ms(self) -> int | None:
        """The earliest deadline, or an earlier time after a deadline moved; None without deadlines."""
        while self._heap:
            queued_ms, _, key = self._heap[0]
            if self._queued_ms.get(key) == queued_ms and key in self._deadlines:
                return queued_ms
            self._drop_first()
        return None

    def pop_due(self, now_ms: int) -> Key | None:
        """Remove and return one key that is due; None if no key is due."""
        while self._heap and self._heap[0][0] <= now_ms:
            key, is_valid = self._drop_first()
            if not is_valid:
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
        self._queued_ms[key] = deadline_ms
        heapq.heappush(self._heap, (deadline_ms, self._sequence, key))

    def _drop_first(self) -> tuple[Key, bool]:
        queued_ms, _, key = heapq.heappop(self._heap)
        is_valid = self._queued_ms.get(key) == queued_ms
        if is_valid:
            del self._queued_ms[key]
        return key, is_valid

    def _rebuild(self) -> None:
        self._queued_ms = dict(self._deadlines)
        self._heap = [(deadline_ms, number, key) for number, (key, deadline_ms) in enumerate(self._deadlines.items())]
        self._sequence = len(self._heap)
        heapq.heapify(self._heap)
