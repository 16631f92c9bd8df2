"""Requests that wait for an offset to be committed, or for a deadline. Pure; times are arguments.

Kafka's DelayedOperationPurgatory uses watcher lists and a timing wheel. Here the requests of a partition wait in offset
order, because the high watermark only grows, and deadlines are in coarse buckets, so that adding and discarding one
costs the same for any number of them. Invariants: an entry is taken out exactly once: by its offset, its deadline or
`discard`; of those discarded, no more stay than DISCARDED_MAX, or than wait.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")

DEADLINE_RESOLUTION_MS = 10  # the width of a bucket; a timeout may be this late
EMPTY_BUCKETS_MAX = 256
DISCARDED_MAX = 1000

Settled = Callable[[Exception | None], None]


class OffsetWaiter:
    """A callback that waits for an offset."""

    __slots__ = ("_callback", "_waiters", "offset")

    def __init__(self, waiters: OffsetWaiters, offset: int, callback: Settled) -> None:
        self._waiters = waiters
        self._callback: Settled | None = callback
        self.offset = offset

    def discard(self) -> None:
        """Wait no longer. No effect on one that was taken out."""
        if self._callback is not None:
            self._callback = None
            self._waiters.note_discarded()

    @property
    def is_discarded(self) -> bool:
        return self._callback is None

    def take(self) -> Settled | None:
        """The callback. None: it was discarded."""
        callback, self._callback = self._callback, None
        return callback


def discard_all(waiters: Iterable[OffsetWaiter | None]) -> None:
    for waiter in waiters:
        if waiter is not None:
            waiter.discard()


class OffsetWaiters:
    """Callbacks of one partition that wait until the high watermark reaches their offsets."""

    __slots__ = ("_discarded", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[OffsetWaiter] = deque()
        """In offset order. Public, because every append reads it and a method call costs more."""
        self._discarded = 0  # of `waiting`

    def add(self, required_offset: int, callback: Settled) -> OffsetWaiter:
        """Add a callback for when the high watermark reaches `required_offset`, the offset after the last record.

        The offset of a retried batch, which is already in the log, may be below that of the waiter before it. Then the
        batch waits for the higher offset, which keeps the order.
        """
        waiting = self.waiting
        if waiting and waiting[-1].offset > required_offset:
            required_offset = waiting[-1].offset
        waiter = OffsetWaiter(self, required_offset, callback)
        waiting.append(waiter)
        return waiter

    def note_discarded(self) -> None:
        """A waiter was discarded. A high watermark that stands still would keep all of them."""
        self._discarded += 1
        if self._discarded > DISCARDED_MAX and self._discarded * 2 > len(self.waiting):
            self.waiting = deque(each for each in self.waiting if not each.is_discarded)
            self._discarded = 0

    def take_reached(self, high_watermark: int) -> list[Settled]:
        """Take out every callback whose offset the high watermark has reached."""
        waiting = self.waiting
        done = []
        while waiting and waiting[0].offset <= high_watermark:
            callback = waiting.popleft().take()
            if callback is None:
                self._discarded -= 1
            else:
                done.append(callback)
        return done

    def take_all(self) -> list[Settled]:
        """Take out all callbacks, when the replica is no longer the leader."""
        return self.take_reached(sys.maxsize)


class Deadlines(Generic[T]):
    """Items with due times, in buckets of DEADLINE_RESOLUTION_MS. An item is due at the end of its bucket."""

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
        """Returns the bucket, an argument of `discard`."""
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
                # Empty buckets of far deadlines would accumulate until those deadlines.
                self._buckets = {due: waiting for due, waiting in self._buckets.items() if waiting}
                self._order = sorted(self._buckets)
                self._empty = 0

    def expire(self, now_ms: int, count_max: int = sys.maxsize) -> Iterator[T]:
        """Take out the items that are due one by one, `count_max` at most: `discard` also holds for those that are due
        at the same time. `next_due_ms` tells of the rest.
        """
        while count_max and (due_ms := self.next_due_ms()) is not None and due_ms <= now_ms:
            bucket = self._order[0]
            items = self._buckets[bucket]
            for item in list(islice(items, count_max)):
                if item in items:
                    self.discard(bucket, item)
                    count_max -= 1
                    yield item

    def next_due_ms(self) -> int | None:
        """The next time at which `expire` returns an item; None without items."""
        while self._order and not self._buckets[self._order[0]]:
            del self._buckets[heapq.heappop(self._order)]
            self._empty -= 1
        return self._order[0] * DEADLINE_RESOLUTION_MS if self._order else None
