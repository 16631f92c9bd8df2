"""Requests that wait: for an offset to be committed, or for a deadline. Pure; times are given in.

Kafka's DelayedOperationPurgatory does this with watcher lists and a timing wheel; here a partition's produces wait in
offset order (the high watermark only grows), and deadlines lie in coarse buckets so that adding and dropping one costs
the same however many wait. Invariant: an entry leaves exactly once, by its offset, its deadline or being dropped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

DEADLINE_RESOLUTION_MS = 10  # requests of the same time share a bucket; a timeout may be this late
EMPTY_BUCKETS_MAX = 256


class OffsetWaiters:
    """Callbacks of one partition, each waiting until the high watermark reaches its offset."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Callable[[Exception | None], None]]] = deque()
        """(offset, callback) in offset order; looked at on every append, so not hidden behind a method."""

    def add(self, required_offset: int, callback: Callable[[Exception | None], None]) -> None:
        """`required_offset` is the offset after the last record. A retried batch that is already in the log may ask
        for less than the one before it: it then waits as long as that one, which is safe and keeps the order."""
        waiting = self.waiting
        if waiting and waiting[-1][0] > required_offset:
            required_offset = waiting[-1][0]
        waiting.append((required_offset, callback))

    def reached(self, high_watermark: int) -> list[Callable[[Exception | None], None]]:
        """Take out every callback whose offset is now below or at the high watermark."""
        waiting = self.waiting
        done = []
        while waiting and waiting[0][0] <= high_watermark:
            done.append(waiting.popleft()[1])
        return done

    def take_all(self) -> list[Callable[[Exception | None], None]]:
        """Take out everything: the replica is no longer the leader."""
        done = [callback for _, callback in self.waiting]
        self.waiting.clear()
        return done


class Deadlines(Generic[T]):
    """Items by the time they are due, in buckets of DEADLINE_RESOLUTION_MS; an item is due at its bucket's end."""

    __slots__ = ("_buckets", "_empty", "_order")

    def __init__(self) -> None:
        self._buckets: dict[int, dict[T, None]] = {}
        self._order: list[int] = []
        self._empty = 0

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for items in self._buckets.values() for item in items)

    def add(self, due_ms: int, item: T) -> int:
        """Returns the bucket, which `discard` wants back."""
        bucket = due_ms // DEADLINE_RESOLUTION_MS + 1
        items = self._buckets.get(bucket)
        if items is None:
            items = self._buckets[bucket] = {}
            heapq.heappush(self._order, bucket)
        elif not items:
            self._empty -= 1
        items[item] = None
        return bucket

    def discard(self, bucket: int, item: T) -> None:
        items = self._buckets.get(bucket)
        if items is not None and items.pop(item, items) is None and not items:
            self._empty += 1
            if self._empty > EMPTY_BUCKETS_MAX and self._empty * 2 > len(self._buckets):
                # Of deadlines far ahead that are never reached: they would pile up until then.
                self._buckets = {due: others for due, others in self._buckets.items() if others}
                self._order = sorted(self._buckets)
                self._empty = 0

    def expire(self, now_ms: int) -> list[T]:
        """Take out every item that is due."""
        due: list[T] = []
        while self._order and self._order[0] * DEADLINE_RESOLUTION_MS <= now_ms:
            items = self._buckets.pop(heapq.heappop(self._order))
            self._empty -= not items
            due.extend(items)
        return due

    def next_due_ms(self) -> int | None:
        """When `expire` next has something to do; None when nothing waits."""
        while self._order and not self._buckets[self._order[0]]:
            del self._buckets[heapq.heappop(self._order)]
            self._empty -= 1
        return self._order[0] * DEADLINE_RESOLUTION_MS if self._order else None
